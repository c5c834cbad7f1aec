"""Windows of a stage: the event times that one of its states covers, and the key of that state."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from aggregations.definition.arguments import check_type, located
from aggregations.definition.times import MICROS
from aggregations.errors import FlowError

MOST_WINDOWS: Final = 1_000
"""Windows that one element may belong to: each of them is a state of its own."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST: Final = 3_650 * 86_400
"""Ten years: with `aggregations.definition.times.EARLIEST_US` every start and end has a year of four digits."""
_DURATION: Final = re.compile(r"([0-9]{1,9})(s|m|h|d)", re.ASCII)
RETENTION: Final = 86_400
"""Seconds: the default of `retention=`, a day."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_START: Final = re.compile(rb"@([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z)\Z")
START_BYTES: Final = len(b"@2013-01-01T05:00:00Z")
"""Bytes that follow the stage's key in the key of a state."""


class Late(StrEnum):
    """What happens to an element whose window is closed."""

    DROP = "drop"
    """It is counted and dropped."""
    DEAD_LETTER = "dead_letter"
    """It is counted and sent to the dead-letter topic."""


class WindowKey(NamedTuple):
    """The key of a windowed state or of a session, divided.

    Attributes:
        key: Key of the stage.
        start: Start of the window; first time of the session.
        end: End of the window: the first time that is not in it; last time of the session.
    """

    key: bytes
    start: datetime
    end: datetime

    @property
    def texts(self) -> tuple[str, str]:
        """Start and end in ISO 8601, as in the key of the state."""
        return _iso(self.start), _iso(self.end)


@dataclass(frozen=True, slots=True)
class Window:
    """Windows of event time that all have one size: `[start, start + size)`. They begin at multiples of `slide`, in UTC.

    The key of a state is the stage's key, followed by `@` and the start of its window: `screw-7@2013-01-01T05:00:00Z`.
    The start always has 21 bytes, so the key is found again whatever it contains, and the windows of one key are in
    order.

    Attributes:
        size: Length of a window, in seconds.
        slide: Distance between the starts of two windows, in seconds; it divides `size`.
        lateness: How long a window stays open after its end, in seconds of event time.
        late: What happens to an element whose window is closed.
        retention: How long the state of a window stays in the store after the window has closed, in seconds of event
            time.
    """

    size: int
    slide: int
    lateness: int = 0
    late: Late = Late.DROP
    retention: int = RETENTION

    @property
    def each(self) -> int:
        """Number of windows that an element belongs to."""
        return self.size // self.slide

    @property
    def definition(self) -> str:
        """Canonical text of what determines the states: all but what becomes of late elements and of old states."""
        return f"window {self.size} {self.slide} {self.lateness}"

    def starts(self, time_us: int) -> range:
        """Starts of the windows that contain a time, ascending.

        Args:
            time_us: Microseconds since 1970.

        Returns:
            Seconds since 1970.
        """
        last = time_us // MICROS // self.slide * self.slide
        return range(last - self.size + self.slide, last + 1, self.slide)

    def closes_us(self, start: int) -> int:
        """Event time at which a window closes, in microseconds since 1970.

        Args:
            start: Start of the window, in seconds since 1970.
        """
        return (start + self.size + self.lateness) * MICROS

    def due(self, key: bytes) -> int:
        """End of the window of a state, in seconds since 1970: its due time, whatever the lateness and the retention."""
        return _start_of(key[-START_BYTES:]) + self.size

    def closed_until(self, closing_us: int) -> int:
        """The latest due time of a window that all partitions have closed.

        Args:
            closing_us: The closing watermark, in microseconds since 1970.

        Returns:
            Seconds since 1970. It rises only when the watermark passes the time at which a window closes.
        """
        return self._latest_end(closing_us // MICROS - self.lateness)

    @staticmethod
    def shut_until(published: int) -> int:
        """The latest due time of a window that takes no element, if those up to a due time are published: the same."""
        return published

    def due_until(self, closing_us: int) -> int:
        """The latest due time of a state that leaves the store.

        Args:
            closing_us: The closing watermark, in microseconds since 1970.

        Returns:
            Seconds since 1970. It rises only when the watermark passes the time at which a window leaves.
        """
        return self._latest_end(closing_us // MICROS - self.lateness - self.retention)

    def _latest_end(self, time: int) -> int:
        """The latest end of a window at or before a time, in seconds since 1970."""
        return (time - self.size) // self.slide * self.slide + self.size

    def is_removed(self, start: int, removed: int | None) -> bool:
        """Whether the state of a window has left the store, or would have.

        Args:
            start: Start of the window, in seconds since 1970.
            removed: Due time up to which states have left; None if none has.
        """
        return removed is not None and start + self.size <= removed

    def key_at(self, key: bytes, start: datetime) -> bytes:
        """The key of the state of one window.

        Args:
            key: The stage's key.
            start: Start of the window, with a time zone.

        Raises:
            FlowError: No window starts there.
        """
        check_zone(start)
        seconds = (start - _EPOCH).total_seconds()
        if seconds % self.slide:
            raise FlowError(
                f"no window starts at {start.isoformat()}: {self} starts at multiples of {length_text(self.slide)}"
            )
        return key + start_bytes(int(seconds))

    @staticmethod
    def stage_key(key: bytes) -> bytes:
        """The stage's key in the key of a state."""
        return key[:-START_BYTES]

    def split(self, key: bytes) -> WindowKey:
        """Divide the key of a state into the stage's key, and start and end of the window.

        Raises:
            ValueError: It is not the key of a windowed state.
        """
        found = _START.search(key)
        if found is None:
            raise ValueError("the key does not end in the start of a window")
        start = datetime.fromisoformat(found[1].decode())
        return WindowKey(self.stage_key(key), start, start + timedelta(seconds=self.size))

    def __str__(self) -> str:
        name = "tumbling" if self.slide == self.size else "hopping"
        slide = "" if self.slide == self.size else f" every {length_text(self.slide)}"
        late = f", {length_text(self.lateness)} late" if self.lateness else ""
        kept = "" if self.retention == RETENTION else f", kept for {length_text(self.retention)}"
        return f"{name} {length_text(self.size)}{slide}{late}{kept}"


def tumbling(size: str, *, lateness: str = "0s", late: str = Late.DROP, retention: str = "1d") -> Window:
    """Windows that follow each other without a gap: every element belongs to one.

    Args:
        size: Their length: a number of seconds, minutes, hours or days, such as `90s`, `5m`, `1h` or `7d`.
        lateness: How long a window stays open after its end. It closes for a partition when an event time of this
            partition reaches the end plus the lateness.
        late: What happens to an element whose window is closed: `drop` or `dead_letter`. Both are counted.
        retention: How long the state of a window stays in the store after the window has closed, in event time.

    Raises:
        FlowError: A length is zero, negative or not a length, or `late` is unknown.
    """
    with located("tumbling()"):
        seconds = duration("size", size)
        return Window(seconds, seconds, *after_the_end(lateness, late, retention))


def hopping(size: str, slide: str, *, lateness: str = "0s", late: str = Late.DROP, retention: str = "1d") -> Window:
    """Windows that overlap: one of length `size` begins every `slide`, and an element belongs to `size / slide` of them.

    Args:
        size: Their length, as in `tumbling`.
        slide: Distance between the starts of two windows; it divides `size`.
        lateness: As in `tumbling`.
        late: As in `tumbling`.
        retention: As in `tumbling`.

    Raises:
        FlowError: A length is zero, negative or not a length, the slide does not divide the size, or `late` is unknown.
    """
    with located("hopping()"):
        seconds, step = duration("size", size), duration("slide", slide)
        if seconds % step:
            raise FlowError(f"slide {slide} does not divide size {size}")
        if seconds // step > MOST_WINDOWS:
            raise FlowError(
                f"an element would belong to {seconds // step} windows; the limit is {MOST_WINDOWS}: use a longer slide"
            )
        return Window(seconds, step, *after_the_end(lateness, late, retention))


def check_zone(time: datetime) -> None:
    """Check that a time has a time zone.

    Raises:
        FlowError: It has none.
    """
    if time.tzinfo is None:
        raise FlowError(f"{time.isoformat()} has no time zone; append Z for UTC, or an offset such as +02:00")


def duration(what: str, given: object, least: int = 1) -> int:
    """Read a length of time.

    Args:
        what: The argument, for errors.
        given: A number and its unit: `s`, `m`, `h` or `d`.
        least: The smallest length in seconds.

    Returns:
        Seconds.

    Raises:
        FlowError: It is not a length, or is too small.
    """
    wanted = "a number of seconds, minutes, hours or days, such as '90s', '5m', '1h' or '7d'"
    check_type(what, given, str, wanted)
    found = _DURATION.fullmatch(str(given))
    if found is None:
        raise FlowError(f"{what} takes {wanted}; got {given!r}")
    seconds = int(found[1]) * _SECONDS[found[2]]
    if not least <= seconds <= _LONGEST:
        raise FlowError(f"{what} must be {'longer than 0s' if seconds < least else 'at most 3650d'}, not {given}")
    return seconds


def start_bytes(start: int) -> bytes:
    """The end of a windowed state's key.

    Args:
        start: Start of the window, in seconds since 1970.
    """
    return f"@{_iso(_EPOCH + timedelta(seconds=start))}".encode()


def after_the_end(lateness: str, late: str, retention: str) -> tuple[int, Late, int]:
    """Read the arguments `lateness=`, `late=` and `retention=`.

    Raises:
        FlowError: A length is negative or not a length, or `late` is unknown.
    """
    return duration("lateness=", lateness, least=0), late_policy(late), duration("retention=", retention, least=0)


@lru_cache(maxsize=1 << 12)
def _start_of(end: bytes) -> int:
    """Start of the window in the end of a key, in seconds since 1970."""
    found = _START.search(end)
    assert found is not None
    return int((datetime.fromisoformat(found[1].decode()) - _EPOCH).total_seconds())


def _iso(time: datetime) -> str:
    return f"{time.replace(tzinfo=None).isoformat()}Z"


def late_policy(given: str) -> Late:
    """Read the argument `late=`.

    Raises:
        FlowError: It is unknown.
    """
    try:
        return Late(given)
    except ValueError as error:
        raise FlowError(f"late= takes one of {', '.join(Late)}; got {given!r}") from error


def length_text(seconds: int) -> str:
    """A length of time in its largest unit, as `duration` reads it."""
    unit = next(name for name in reversed(_SECONDS) if seconds % _SECONDS[name] == 0)
    return f"{seconds // _SECONDS[unit]}{unit}"
