"""Event times: which times count, and how far the log of a partition has come."""

from datetime import UTC, datetime
from typing import Final

MICROS: Final = 1_000_000
"""Microseconds per second."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
EARLIEST_US: Final = round((datetime(1000, 1, 1, tzinfo=UTC) - EPOCH).total_seconds()) * MICROS
"""The earliest valid event time."""
LATEST_US: Final = round((datetime(9000, 1, 1, tzinfo=UTC) - EPOCH).total_seconds()) * MICROS
"""The latest valid event time."""
NO_TIME: Final = "it has no valid event time, or one too far ahead of its record's timestamp"

_STEPS: Final = 16
"""States leave at most this part of their time after they are due: a removal for every second would be too many."""


def step_of(stays: int) -> int:
    """Seconds between two removals of states that stay so many seconds after their due time."""
    return max(stays // _STEPS, 1)


def due_in_steps(closing_us: int, stays: int, step: int) -> int:
    """The latest due time of a state that leaves.

    Args:
        closing_us: The closing watermark, in microseconds since 1970.
        stays: How long a state stays after its due time, in seconds.
        step: Seconds between two removals.

    Returns:
        Seconds since 1970, a multiple of `step`.
    """
    return (closing_us // MICROS - stays) // step * step


def put_off(due: int, step: int) -> int:
    """The first multiple of a step at or after a due time, in seconds: no removal is between them."""
    return -(-due // step) * step


def checked_time(time_us: int | None, timestamp_ms: int, ahead: int) -> int | None:
    """The event time of a record, if it is valid.

    An event time far in the future would close every window. What decides is in the log: the record's own timestamp,
    which the broker writes or checks (`message.timestamp.after.max.ms`), and never a clock, because a replay would then
    decide otherwise.

    Args:
        time_us: Event time in microseconds since 1970; None if the record has none.
        timestamp_ms: Kafka's timestamp of the record, in milliseconds since 1970.
        ahead: How far the event time may be ahead of the timestamp, in seconds.

    Returns:
        The event time; None if there is none, if it is not within the years 1000 to 9000, or if it is too far ahead.
    """
    if time_us is None or not EARLIEST_US <= time_us <= LATEST_US:
        return None
    return time_us if time_us <= timestamp_ms * 1_000 + ahead * MICROS else None
