"""Duplicates by an id in the message, in bounded memory: exact within a horizon, and counted apart beyond it.

A copy of an event has its id and its time. The filter remembers the ids with the highest times, and the highest time of
those that it has forgotten: the floor. A record above the floor is new if its id is not remembered. At or below the
floor nothing shows whether a copy of it was forgotten.
"""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.filters.arrival import (
    ACCEPTED,
    DUPLICATE,
    MILLISECOND,
    UNIDENTIFIED,
    UNPROVEN,
    Extractor,
    Ruling,
    Scope,
    extracted,
    milliseconds,
    rejected,
    scope_of,
    shard_of,
    time_of,
)
from envelope.filters.index import Id, TimeIndex, identity_of

IDS: Final = 100_000
"""Ids that a state remembers, at most."""

_LATE = Ruling(Verdict.LATE, forward=True)


class Beyond(StrEnum):
    """What happens to a record of which a copy may have been forgotten."""

    FORWARD = "forward"
    """It is passed on: nothing is lost, and a copy beyond the horizon counts twice."""
    DROP = "drop"
    """It is dropped: nothing counts twice, and a record beyond the horizon is lost."""
    REJECT = "reject"
    """It belongs into the dead-letter topic, with reason `unproven`, and somebody decides."""


BEYOND: Final = {
    Beyond.FORWARD: Ruling(Verdict.BEYOND_HORIZON, forward=True),
    Beyond.DROP: Ruling(Verdict.BEYOND_HORIZON, forward=False),
    Beyond.REJECT: Ruling(
        Verdict.REJECTED,
        forward=False,
        reason=Reason.UNPROVEN,
        detail="its time is beyond the horizon of the ids that are remembered",
    ),
}
"""The ruling on such a record."""


@dataclass(slots=True)
class EventIdState:
    """What the filter remembers.

    Attributes:
        stream_time_ms: Highest time seen; None before the first record.
        floor_ms: Highest time of a forgotten id; None when none was forgotten.
        ids: The remembered ids.
    """

    stream_time_ms: int | None
    floor_ms: int | None
    ids: TimeIndex


@dataclass(frozen=True, slots=True)
class EventIdFilter:
    """Drops a record if its id was passed on before.

    Attributes:
        id: Extracts the id: text, bytes, an integer of 64 bits, or a tuple of these. Records without an id are passed on.
        horizon: An id is remembered until stream time is more than this ahead of it.
        limit: Ids that a state remembers, at most. With more ids within the horizon, the oldest are forgotten earlier.
        beyond: What happens to a record beyond the horizon.
        scope_by: Where copies arrive: in the partition of the first delivery, or with its key.
        partitions: If copies may arrive anywhere: number of states over which ids are spread, one shuffle. Replaces
            `scope_by`. Another number begins with empty states.
        time: Extracts the event's time in milliseconds since 1970, which all copies share; None for the timestamp.
        name: Name of the states in a store.
    """

    id: Extractor
    horizon: timedelta
    limit: int = IDS
    beyond: Beyond = Beyond.FORWARD
    scope_by: Scope = Scope.PARTITION
    partitions: int = 0
    time: Extractor | None = None
    name: str = "event-id"

    def __post_init__(self) -> None:
        milliseconds("horizon", self.horizon)
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: a state has to remember at least 1 id")

    def scope(self, arrival: Any) -> bytes | None:
        if not self.partitions:
            return scope_of(self.scope_by, arrival)
        identity = self.identity(arrival)
        return None if identity is None else shard_of(identity, self.partitions)

    def zero(self) -> EventIdState:
        return EventIdState(None, None, TimeIndex())

    def judge(self, state: EventIdState, arrival: Any) -> tuple[Ruling, EventIdState]:
        try:
            time = time_of(self.time, arrival)
            identity = self.identity(arrival)
        except EnvelopeError as error:
            return rejected(error), state
        before = state.stream_time_ms
        state.stream_time_ms = time if before is None else max(before, time)
        if identity is None:
            return UNIDENTIFIED, state
        if state.ids.get(identity) is not None:
            return DUPLICATE, state
        if state.floor_ms is not None and time <= state.floor_ms:
            return BEYOND[self.beyond], state
        self._remember(state, identity, time)
        return (ACCEPTED if before is None or time >= before else _LATE), state

    def judge_late(self, state: EventIdState, arrival: Any) -> tuple[Ruling, EventIdState]:
        """Decide about a record that was missing; see `envelope.filters.arrival.judge_late`.

        If it is passed on, its id is remembered as that of a record of now: another dead letter may have it.
        """
        try:
            time = time_of(self.time, arrival)
            identity = self.identity(arrival)
        except EnvelopeError as error:
            return rejected(error), state
        if identity is None or state.ids.get(identity) is not None:
            return self.judge(state, arrival)
        before, floor_ms = state.stream_time_ms, state.floor_ms
        state.stream_time_ms = now = time if before is None else max(before, time)
        if self.beyond is not Beyond.FORWARD and floor_ms is not None and time <= floor_ms:
            return UNPROVEN, state
        self._remember(state, identity, now)
        return _LATE, state

    def _remember(self, state: EventIdState, identity: Id, time_ms: int) -> None:
        state.ids.add(identity, time_ms)
        assert state.stream_time_ms is not None
        forgotten = state.ids.purge(state.stream_time_ms - self.horizon // MILLISECOND, self.limit)
        if forgotten is not None:
            state.floor_ms = forgotten  # above the floor before, as every remembered id

    def identity(self, arrival: Any) -> Id | None:
        """The id; None for a record without one.

        Raises:
            EnvelopeError: `TRANSFORM_FAILED`: it is of a type that cannot be used.
        """
        found = extracted(self.id, arrival, "id")
        return None if found is None else identity_of(found)

    def dump(self, state: EventIdState) -> Any:
        return {"stream_time_ms": state.stream_time_ms, "floor_ms": state.floor_ms, "ids": state.ids.dump()}

    def load(self, value: Any) -> EventIdState:
        return EventIdState(value["stream_time_ms"], value["floor_ms"], TimeIndex.load(value["ids"]))
