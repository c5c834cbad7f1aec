"""Sessions of a stage: windows of event time that the elements of a key make."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, TypeAlias

from aggregations.definition.arguments import check_type, located
from aggregations.definition.fields import Fields
from aggregations.definition.folds import check_state
from aggregations.definition.times import EPOCH, MICROS, due_in_steps, put_off, step_of
from aggregations.definition.windows import (
    RETENTION,
    Late,
    Window,
    WindowKey,
    after_the_end,
    check_zone,
    duration,
    length_text,
)
from aggregations.errors import FlowError
from envelope import EnvelopeError

MOST_SESSIONS: Final = 1_000
"""Sessions that the state of one key holds: all of them are read and written with it."""
TOO_MANY: Final = (
    f"its key has {MOST_SESSIONS:,} sessions, the most that a state holds; use a longer gap or a shorter retention"
)

_SPAN: Final = re.compile(rb"@([0-9T:.-]{19,26}Z)/([0-9T:.-]{19,26}Z)\Z")
_MEMBERS: Final = 3

Sessions: TypeAlias = list[Any]
"""The state of a key: `[start, end, state of the fold]` for each session, in microseconds since 1970, in order of time."""


@dataclass(frozen=True, slots=True)
class SessionWindow:
    """Windows that the elements of a key make: consecutive times of a session are at most `gap` apart.

    All sessions of a key are in one state, so that its positions drop every copy, whichever session holds the event.

    Attributes:
        gap: Longest time between two consecutive elements of a session, in seconds.
        lateness: How much later than the gap an element may come, in seconds of event time.
        late: What happens to an element that comes too late.
        retention: How long a session stays in the state after no element can change it any more, in seconds of event
            time.
    """

    gap: int
    lateness: int = 0
    late: Late = Late.DROP
    retention: int = RETENTION
    each: ClassVar[int] = 1

    @property
    def gap_us(self) -> int:
        """The gap in microseconds."""
        return self.gap * MICROS

    @property
    def definition(self) -> str:
        """Canonical text of what determines the states: all but what becomes of late elements and of old sessions."""
        return f"session {self.gap} {self.lateness}"

    def closes_us(self, time_us: int) -> int:
        """The first event time in the log of its partition after which an element comes too late.

        A session of this element alone is closed then: the log is further ahead than the gap and the lateness.

        Args:
            time_us: Time of the element, in microseconds since 1970.
        """
        return time_us + (self.gap + self.lateness) * MICROS + 1

    @property
    def changes(self) -> int:
        """How far the closing watermark passes the end of a session before no element can join it any more, in seconds.

        An element that is not too late is at most the gap and the lateness behind the watermark, and joins no session
        that ended more than the gap before.
        """
        return 2 * self.gap + self.lateness

    @property
    def stays(self) -> int:
        """How far the closing watermark passes the end of a session before it leaves, in seconds."""
        return self.changes + self.retention

    @staticmethod
    def due(time_us: int) -> int:
        """The due time of a session that ends then, in seconds since 1970: the first second after its last element."""
        return time_us // MICROS + 1

    @property
    def _step(self) -> int:
        """Seconds in which the due times that a store notes rise.

        Sessions that were published less than this ago are looked through once more.
        """
        return max(min(step_of(self.stays), self.changes // 4), 1)

    def noted_due(self, time_us: int) -> int:
        """The due time that a store notes for a state whose last session ends then; see `Expiry.noted_due`."""
        return put_off(self.due(time_us), self._step)

    def closed_until(self, closing_us: int) -> int:
        """The latest due time of a session that no element can join any more.

        Args:
            closing_us: The closing watermark, in microseconds since 1970.

        Returns:
            Seconds since 1970, not before `due_until`. It rises in steps.
        """
        return max(due_in_steps(closing_us, self.changes, step_of(self.changes)), self.due_until(closing_us))

    def shut_until(self, published: int) -> int:
        """The time before which elements are too late, so that they join no session that is published.

        Args:
            published: Due time up to which sessions are published, in seconds since 1970.
        """
        return published + self.gap

    @staticmethod
    def due_between(sessions: Sessions, after: int | None, until: int) -> Sessions:
        """The sessions of a key that are due after one time and at or before another.

        Args:
            sessions: Its sessions, in order of time.
            after: In seconds since 1970; None for any.
            until: In seconds since 1970.
        """
        first = 0 if after is None else bisect_left(sessions, after * MICROS, key=_end)
        return sessions[first : bisect_left(sessions, until * MICROS, key=_end)]

    def due_until(self, closing_us: int) -> int:
        """The latest due time of a session that leaves.

        Args:
            closing_us: The closing watermark, in microseconds since 1970.

        Returns:
            Seconds since 1970. It rises in steps.
        """
        return due_in_steps(closing_us, self.stays, step_of(self.stays) // self._step * self._step)

    @staticmethod
    def is_removed(time_us: int, removed: int | None) -> bool:
        """Whether an element with this time may belong to a session that has left.

        Args:
            time_us: Its event time, in microseconds since 1970.
            removed: Due time up to which sessions have left, in seconds since 1970; None if none has.
        """
        return removed is not None and time_us < removed * MICROS

    def kept(self, sessions: Sequence[Any], reached_us: int | None) -> int:
        """The number of sessions that the log of one partition leaves in the state.

        Args:
            sessions: Lists that begin with the first and last time of a session, in order of time.
            reached_us: The latest event time in that log, in microseconds since 1970; None if there is none.
        """
        if reached_us is None:
            return len(sessions)
        return len(sessions) - bisect_left(sessions, reached_us - self.stays * MICROS, key=_end)

    @staticmethod
    def stage_key(key: bytes) -> bytes:
        """The stage's key in the key of a state: they are the same."""
        return key

    def key_of(self, key: bytes, start_us: int, end_us: int) -> WindowKey:
        """The session of a key, with its first and last time in microseconds since 1970."""
        return WindowKey(key, _time(start_us), _time(end_us))

    def split(self, key: bytes) -> WindowKey:
        """Divide the key of a session, as readers see it, into the stage's key, and the first and last time.

        Raises:
            ValueError: It is not the key of a session.
        """
        if (found := self.find(key)) is None:
            raise ValueError("the key does not end in the start and end of a session")
        return found

    @staticmethod
    def find(key: bytes) -> WindowKey | None:
        """Divide a key as `split` does; None if it is not the key of a session."""
        found = _SPAN.search(key)
        if found is None:
            return None
        try:
            start, end = (datetime.fromisoformat(text.decode()) for text in found.groups())
        except ValueError:
            return None
        return WindowKey(key[: found.start()], start, end)

    @staticmethod
    def key_at(key: bytes, start: datetime) -> bytes:
        """The key of the state that holds a session: a session may begin at any time.

        Args:
            key: The stage's key.
            start: First time of the session, with a time zone.

        Raises:
            FlowError: It has no time zone.
        """
        check_zone(start)
        return key

    def __str__(self) -> str:
        late = f", {length_text(self.lateness)} late" if self.lateness else ""
        kept = "" if self.retention == RETENTION else f", kept for {length_text(self.retention)}"
        return f"session {length_text(self.gap)}{late}{kept}"


def session(gap: str, *, lateness: str = "0s", late: str = Late.DROP, retention: str = "1d") -> SessionWindow:
    """Windows of activity: elements of a key belong to one session as long as no two neighbours are more than `gap` apart.

    An element that is at most `gap` away from two sessions makes them one: their states are merged.

    Args:
        gap: A number of seconds, minutes, hours or days, such as `90s`, `5m`, `1h` or `7d`. Two elements that are
            exactly this far apart belong to one session, as in Kafka Streams.
        lateness: An element comes too late if its partition has an event time before it that is more than the gap plus
            the lateness ahead.
        late: What happens to such an element: `drop` or `dead_letter`. Both are counted.
        retention: How long a session stays in the state after no element can change it any more, in event time.

    Raises:
        FlowError: A length is zero, negative or not a length, or `late` is unknown.
    """
    with located("session()"):
        return SessionWindow(duration("gap", gap), *after_the_end(lateness, late, retention))


def check_window(window: object, fold: Any) -> None:
    """Check the argument `window=` of a stage, and that sessions can merge the states of its fold.

    Raises:
        FlowError: It is neither windows nor None, or the fold cannot merge two states.
    """
    if isinstance(window, SessionWindow):
        _check_merges(fold)
    elif window is not None:
        check_type("window=", window, Window, 'tumbling("5m"), hopping("10m", "5m") or session("5m")')


def _check_merges(fold: Any) -> None:
    if isinstance(fold, Fields):
        if missing := [f"{name} ({field.kind})" for name, field in fold.fields.items() if not field.mergeable]:
            raise FlowError(f"session windows merge states, and these fields cannot be merged: {', '.join(missing)}")
        return
    if not callable(getattr(fold, "merge", None)):
        raise FlowError(
            f"session windows merge states: give {type(fold).__name__} a method merge(state, other) that returns the "
            "state of the elements of both"
        )
    try:
        check_state(fold.merge(fold.zero(), fold.zero()))
    except Exception as error:  # user code may raise anything
        detail = error.detail if isinstance(error, EnvelopeError) else type(error).__name__
        raise FlowError(f"merge() of its fold does not return a state: {detail}") from error


def near(sessions: Sequence[Any], time_us: int, gap_us: int) -> slice:
    """The sessions that an element joins: those that begin or end within the gap of its time, or contain it.

    Args:
        sessions: Lists that begin with the first and last time of a session, in order of time.
        time_us: Time of the element.
        gap_us: The gap.

    Returns:
        The place of these sessions; if there are none, where the element's own session belongs.
    """
    first = last = bisect_left(sessions, time_us - gap_us, key=_end)
    while last < len(sessions) and sessions[last][0] - gap_us <= time_us:
        last += 1
    return slice(first, last)


def remaining(sessions: Sessions, removed: int | None) -> Sessions:
    """The sessions of a key without those that have left.

    Args:
        sessions: Its sessions, in order of time.
        removed: Due time up to which sessions have left, in seconds since 1970; None if none has.
    """
    if removed is None:
        return sessions
    return sessions[bisect_left(sessions, removed * MICROS, key=_end) :]


def are_sessions(state: Any) -> bool:
    """Whether a stored state is one of a stage with sessions."""
    return isinstance(state, list) and all(
        isinstance(one, list) and len(one) == _MEMBERS and type(one[0]) is int and type(one[1]) is int for one in state
    )


def row_key(window: WindowKey) -> bytes:
    """The key of a session as readers see it: `s7@2026-11-24T06:01:00Z/2026-11-24T06:04:30Z`."""
    start, end = window.texts
    return window.key + f"@{start}/{end}".encode()


def _end(one: Any) -> int:
    end: int = one[1]
    return end


def _time(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)
