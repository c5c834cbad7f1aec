"""The first record of each window: `distinct` on tumbling and on session windows (the first proposal of KIP-655)."""

from dataclasses import dataclass
from datetime import timedelta
from heapq import heapify, heappop, heappush
from typing import Any, Final

from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError
from envelope.filters.arrival import (
    DUPLICATE,
    UNIDENTIFIED,
    UNPROVEN,
    Extractor,
    Ruling,
    Scope,
    Windowed,
    milliseconds,
    rejected,
    scope_of,
    time_of,
)
from envelope.filters.index import TimeIndex, quoted, unquoted

GRACE: Final = timedelta(hours=24)
"""How long windows are remembered after their end; what `TimeWindows.of` of Kafka Streams uses."""

_EXPIRED = Ruling(Verdict.BEYOND_HORIZON, forward=False)


@dataclass(frozen=True, slots=True)
class TimeWindows:
    """Windows of a fixed size, aligned to the epoch: [0, size), [size, 2 * size), ...

    Attributes:
        size: Size of a window.
        grace: How long after its end, in stream time, a window is remembered. Later records of it are dropped.
        advance: Distance between the starts of two windows. Another value than `size` makes hopping windows, which
            `distinct` refuses.
    """

    size: timedelta
    grace: timedelta = GRACE
    advance: timedelta | None = None


@dataclass(frozen=True, slots=True)
class SessionWindows:
    """Windows that the data makes: records of a key with at most `gap` between them belong to one session.

    Attributes:
        gap: Longest time without a record within a session.
        grace: How long after the end of a session, beyond the gap and in stream time, it is remembered.
    """

    gap: timedelta
    grace: timedelta = GRACE


def distinct(
    windows: Any,
    *,
    scope_by: Scope = Scope.PARTITION,
    time: Extractor | None = None,
    name: str = "distinct",
) -> "DistinctTumbling | DistinctSession":
    """Pass on the first record of each key and window, with its windowed key (`Ruling.window`), and no other.

    Records without a key are passed on without a window.

    Args:
        windows: `TimeWindows`, tumbling, or `SessionWindows`.
        scope_by: Whose records make the stream time that closes windows: the partition's, as in Kafka Streams, or the
            key's own.
        time: Extracts the time in milliseconds since 1970; by default the record's timestamp.
        name: Name of the states in a store.

    Raises:
        ValueError: The windows overlap: hopping or sliding ones.
    """
    if isinstance(windows, SessionWindows):
        gap, grace = milliseconds("gap", windows.gap), milliseconds("grace", windows.grace)
        return DistinctSession(gap, grace, scope_by, time, name)
    if not isinstance(windows, TimeWindows) or windows.advance not in (None, windows.size):
        raise ValueError(
            "distinct needs windows that do not overlap: a record in several hopping or sliding windows would be passed on "
            "several times. Use TimeWindows without `advance`, or SessionWindows"
        )
    if not (size := milliseconds("size", windows.size)):
        raise ValueError("size=0: use a size of at least a millisecond")
    return DistinctTumbling(size, milliseconds("grace", windows.grace), scope_by, time, name)


@dataclass(slots=True)
class TumblingState:
    """What `DistinctTumbling` remembers.

    Attributes:
        stream_time_ms: Highest time seen; None before the first record.
        opened: The open windows, as (key, start), by their end.
    """

    stream_time_ms: int | None
    opened: TimeIndex


@dataclass(frozen=True, slots=True)
class DistinctTumbling:
    """The first record of each tumbling window; made by `distinct`.

    Attributes:
        size_ms: Size of a window.
        grace_ms: How long after its end a window is remembered.
        scope_by: Whose records make the stream time.
        time: Extracts the time; None for the record's timestamp.
        name: Name of the states in a store.
    """

    size_ms: int
    grace_ms: int
    scope_by: Scope
    time: Extractor | None
    name: str

    def scope(self, arrival: Any) -> bytes | None:
        return scope_of(self.scope_by, arrival)

    def zero(self) -> TumblingState:
        return TumblingState(None, TimeIndex())

    def judge(self, state: TumblingState, arrival: Any) -> tuple[Ruling, TumblingState]:
        try:
            time = time_of(self.time, arrival)
        except EnvelopeError as error:
            return rejected(error), state
        before = state.stream_time_ms
        state.stream_time_ms = now = time if before is None else max(before, time)
        state.opened.purge(now - self.grace_ms + 1)
        if arrival.key is None:
            return UNIDENTIFIED, state
        window = self._window(arrival.key, time)
        if state.opened.get((arrival.key, window.start_ms)) is not None:
            return DUPLICATE, state
        if window.end_ms <= now - self.grace_ms:
            return _EXPIRED, state
        state.opened.add((arrival.key, window.start_ms), window.end_ms)
        return _first(before, time, window), state

    def judge_late(self, state: TumblingState, arrival: Any) -> tuple[Ruling, TumblingState]:
        """Decide about a record that was missing; see `envelope.filters.arrival.judge_late`."""
        ruling, state = self.judge(state, arrival)
        return (UNPROVEN if ruling is _EXPIRED else ruling), state

    def window(self, arrival: Any) -> Windowed | None:
        """The window of a record; None without a key.

        Raises:
            EnvelopeError: `TRANSFORM_FAILED`: it has no valid time.
        """
        return None if arrival.key is None else self._window(arrival.key, time_of(self.time, arrival))

    def _window(self, key: bytes, time: int) -> Windowed:
        start = time - time % self.size_ms
        return Windowed(key, start, start + self.size_ms)

    def dump(self, state: TumblingState) -> Any:
        return {"stream_time_ms": state.stream_time_ms, "opened": state.opened.dump()}

    def load(self, value: Any) -> TumblingState:
        return TumblingState(value["stream_time_ms"], TimeIndex.load(value["opened"]))


class Sessions:
    """The sessions of all keys of a state: per key a list of (start, end), ascending, none within a gap of another."""

    __slots__ = ("_added", "_expiry", "_scheduled", "by_key")

    def __init__(self, by_key: dict[bytes, list[tuple[int, int]]]) -> None:
        self.by_key = by_key
        self._scheduled = {key: min(end for _, end in sessions) for key, sessions in by_key.items()}
        self._expiry = [(end, number, key) for number, (key, end) in enumerate(self._scheduled.items())]
        self._added = len(self._expiry)
        heapify(self._expiry)

    def purge(self, before_ms: int) -> None:
        """Remove the sessions that end below `before_ms`. Only keys with such a session are looked at."""
        while self._expiry and self._expiry[0][0] < before_ms:
            end, _, key = heappop(self._expiry)
            if self._scheduled.get(key) != end:
                continue  # a session that ends earlier was scheduled since
            del self._scheduled[key]
            if kept := [session for session in self.by_key[key] if session[1] >= before_ms]:
                self.by_key[key] = kept
                self._schedule(key, min(end for _, end in kept))
            else:
                del self.by_key[key]

    def joins(self, key: bytes, time_ms: int, gap_ms: int) -> bool:
        """Whether a time belongs to a session, which then contains it; sessions that it connects become one."""
        sessions = self.by_key.get(key, [])
        near = [one for one in sessions if one[0] - gap_ms <= time_ms <= one[1] + gap_ms]
        if not near:
            return False
        merged = (min(time_ms, near[0][0]), max(time_ms, near[-1][1]))
        self.by_key[key] = sorted([one for one in sessions if one not in near] + [merged])
        return True

    def open(self, key: bytes, time_ms: int) -> None:
        """Begin a session of one record."""
        self.by_key[key] = sorted([*self.by_key.get(key, []), (time_ms, time_ms)])
        if key not in self._scheduled or time_ms < self._scheduled[key]:
            self._schedule(key, time_ms)

    def _schedule(self, key: bytes, end: int) -> None:
        self._scheduled[key] = end
        heappush(self._expiry, (end, self._added, key))
        self._added += 1


@dataclass(slots=True)
class SessionState:
    """What `DistinctSession` remembers.

    Attributes:
        stream_time_ms: Highest time seen; None before the first record.
        sessions: The sessions that a record may still belong to.
    """

    stream_time_ms: int | None
    sessions: Sessions


@dataclass(frozen=True, slots=True)
class DistinctSession:
    """The first record of each session; made by `distinct`.

    A record that connects two sessions is dropped, and they continue as one: the first record of each was passed on.

    Attributes:
        gap_ms: Longest time without a record within a session.
        grace_ms: How long after its end and the gap a session is remembered.
        scope_by: Whose records make the stream time.
        time: Extracts the time; None for the record's timestamp.
        name: Name of the states in a store.
    """

    gap_ms: int
    grace_ms: int
    scope_by: Scope
    time: Extractor | None
    name: str

    def scope(self, arrival: Any) -> bytes | None:
        return scope_of(self.scope_by, arrival)

    def zero(self) -> SessionState:
        return SessionState(None, Sessions({}))

    def judge(self, state: SessionState, arrival: Any) -> tuple[Ruling, SessionState]:
        try:
            time = time_of(self.time, arrival)
        except EnvelopeError as error:
            return rejected(error), state
        before = state.stream_time_ms
        state.stream_time_ms = now = time if before is None else max(before, time)
        closed = now - self.gap_ms - self.grace_ms
        state.sessions.purge(closed)
        if arrival.key is None:
            return UNIDENTIFIED, state
        if state.sessions.joins(arrival.key, time, self.gap_ms):
            return DUPLICATE, state
        if time < closed:
            return _EXPIRED, state
        state.sessions.open(arrival.key, time)
        return _first(before, time, Windowed(arrival.key, time, time)), state

    def judge_late(self, state: SessionState, arrival: Any) -> tuple[Ruling, SessionState]:
        """Decide about a record that was missing; see `envelope.filters.arrival.judge_late`."""
        ruling, state = self.judge(state, arrival)
        return (UNPROVEN if ruling is _EXPIRED else ruling), state

    def window(self, arrival: Any) -> Windowed | None:
        """The session that a record begins if the filter passes it on; None without a key.

        Raises:
            EnvelopeError: `TRANSFORM_FAILED`: it has no valid time.
        """
        if arrival.key is None:
            return None
        time = time_of(self.time, arrival)
        return Windowed(arrival.key, time, time)

    def dump(self, state: SessionState) -> Any:
        sessions = {quoted(key): [list(one) for one in found] for key, found in state.sessions.by_key.items()}
        return {"stream_time_ms": state.stream_time_ms, "sessions": sessions}

    def load(self, value: Any) -> SessionState:
        sessions = {unquoted(key): [(start, end) for start, end in found] for key, found in value["sessions"].items()}
        return SessionState(value["stream_time_ms"], Sessions(sessions))


def _first(before: int | None, time: int, window: Windowed) -> Ruling:
    """The ruling for the first record of a window."""
    verdict = Verdict.ACCEPTED if before is None or time >= before else Verdict.LATE
    return Ruling(verdict, forward=True, window=window)
