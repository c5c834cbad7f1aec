"""Values that aggregates can fold and states can store: exact integers within 64 bits, finite numbers, UTF-8 text."""

from typing import Any

from envelope import EnvelopeError, Reason

INT64 = 2**63


class Exact(float):
    """A number that was taken from an element, not computed: two folds of the same elements have the same bits of it."""


def exact(value: Any) -> Any:
    """A value, or several in lists and objects, with every floating-point number as `Exact`."""
    match value:
        case float():
            return Exact(value)
        case list():
            return [exact(one) for one in value]
        case dict():
            return {name: exact(one) for name, one in value.items()}
        case _:
            return value


def checked(number: Any) -> Any:
    """Return the sum if it is in range.

    Raises:
        EnvelopeError: `OVERFLOW`: an integer beyond 64 bits or a float beyond its range.
    """
    if isinstance(number, int):
        if not -INT64 <= number < INT64:
            raise EnvelopeError(Reason.OVERFLOW, "an integer total exceeds 64 bits")
    elif number in (float("inf"), float("-inf")):
        raise EnvelopeError(Reason.OVERFLOW, "a floating-point total exceeds its range")
    return number


def check_value(name: str, value: Any, *, numeric: bool = False) -> None:
    """Check that a field can fold a value, and that its state can be stored.

    Raises:
        EnvelopeError: `NOT_FINITE`, `OVERFLOW`, or `BAD_PAYLOAD` for a type that the aggregate does not accept.
    """
    match value:
        case bool():
            return
        case int():
            # From -2^63 to the maximum of the largest unsigned type.
            if not -INT64 <= value < 2 * INT64:
                raise EnvelopeError(Reason.OVERFLOW, f"field {name!r} is an integer beyond 64 bits")
        case float():
            if value - value != 0:
                raise EnvelopeError(Reason.NOT_FINITE, f"field {name!r} is NaN or infinite")
        case str() if not numeric:
            if not is_utf8(value):
                raise EnvelopeError(Reason.BAD_PAYLOAD, f"field {name!r} contains an unpaired surrogate")
        case _:
            raise EnvelopeError(
                Reason.BAD_PAYLOAD, f"field {name!r} is a {type(value).__name__}; use numbers, text or booleans"
            )


def is_utf8(text: str) -> bool:
    """Whether UTF-8, and therefore JSON, can encode the text."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
