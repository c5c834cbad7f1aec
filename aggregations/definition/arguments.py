"""Checks of the arguments with which a flow is defined: an error names the argument, what it takes, and what it got."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from aggregations.errors import FlowError
from envelope import EnvelopeError, Limits
from envelope.limits import DEFAULT_LIMITS, check_topic

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put the place in a definition before the text of the errors raised in the block."""
    try:
        yield
    except FlowError as error:
        raise FlowError(f"{where}: {error}") from error


def check_name(what: str, name: object) -> None:
    """Check the name of a flow or a stage.

    Raises:
        FlowError: It is not valid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FlowError(
            f"{name!r} is not a valid {what} name; use 1 to 100 letters, digits, '_', '.' and '-', beginning with a "
            "letter or a digit"
        )


def check_type(what: str, given: object, kind: type, wanted: str) -> None:
    """Check the type of an argument.

    Args:
        what: The argument.
        given: Its value.
        kind: The type. A boolean is not an integer.
        wanted: What the argument takes, for the error.

    Raises:
        FlowError: The value is of another type.
    """
    if not isinstance(given, kind) or (kind is int and isinstance(given, bool)):
        raise FlowError(f"{what} takes {wanted}; got {type(given).__name__}")


def check_positive(what: str, given: object) -> None:
    """Check that an argument is an integer of at least 1.

    Raises:
        FlowError: It is not.
    """
    check_type(what, given, int, "an integer")
    if isinstance(given, int) and given < 1:
        raise FlowError(f"{what} must be at least 1, not {given}")


def topic_name(name: object, limits: Limits = DEFAULT_LIMITS) -> str:
    """The name of a topic.

    Raises:
        FlowError: Kafka does not allow it.
    """
    try:
        return check_topic(name if isinstance(name, str) else "", limits)
    except EnvelopeError as error:
        raise FlowError(
            f"{name!r} is not a topic name that Kafka allows; use 1 to {limits.topic_chars} letters, digits, '.', '_' "
            "and '-'"
        ) from error


def check_callable(what: str, function: object) -> None:
    """Check that an argument is a function.

    Raises:
        FlowError: It is not.
    """
    if not callable(function):
        raise FlowError(f"{what} takes a function; got {type(function).__name__}")
