"""Values as JSON, in which no number becomes null."""

from typing import Any

import msgspec

from envelope import EnvelopeError, Reason


def json_of(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        EnvelopeError: `NOT_FINITE`: JSON has no NaN and no infinities, and msgspec writes null for them.
        TypeError: JSON has no such value; others of msgspec.
    """
    text = msgspec.json.encode(value)
    if b"null" in text and not _is_finite(msgspec.to_builtins(value)):
        raise EnvelopeError(
            Reason.NOT_FINITE, "the value to write has a number that is NaN or infinite, and JSON has none"
        )
    return text


def _is_finite(value: Any) -> bool:
    match value:
        case float():
            return value - value == 0
        case list() | tuple():
            return all(map(_is_finite, value))
        case dict():
            return all(map(_is_finite, value.values()))
    return True
