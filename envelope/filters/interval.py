"""Deduplication by key, by key and id, or by id, within an interval of time (KIP-655).

Stream time is the highest time that a state has seen, of whatever record. An id is remembered from the record that was
passed on until stream time is more than the interval ahead of it. It is removed by a range of the index by time.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.filters.arrival import (
    ACCEPTED,
    DUPLICATE,
    UNIDENTIFIED,
    UNPROVEN,
    Extractor,
    Ruling,
    extracted,
    milliseconds,
    place_of,
    rejected,
    shard_of,
    time_of,
)
from envelope.filters.index import Id, TimeIndex, identity_of
from envelope.limits import number_of

_LATE = Ruling(Verdict.LATE, forward=True)
_REPROCESSED = Ruling(Verdict.REPROCESSED, forward=True)
_BEYOND = Ruling(Verdict.BEYOND_HORIZON, forward=True)

PARTITIONS = 16
"""States over which ids are spread, if equal ids may arrive in different partitions."""


@dataclass(slots=True)
class IntervalState:
    """What the filter remembers of a partition.

    Attributes:
        stream_time_ms: Highest time seen, in milliseconds since 1970; None before the first record.
        passed: The ids of the records that were passed on: time, offset, and the partition if ids span partitions.
    """

    stream_time_ms: int | None
    passed: TimeIndex


@dataclass(frozen=True, slots=True)
class IntervalFilter:
    """Passes on the first record of an id, and then none within the interval before or after it.

    Made by `deduplicate_by_key`, `deduplicate_by_key_value` and `deduplicate`.

    Attributes:
        interval_ms: The interval in milliseconds. Both of its ends belong to it.
        keyed: The key is part of the identity.
        key: Extracts the key; None for the record's own key.
        id: Extracts the id; None for no id beside the key.
        partitions: Number of states over which ids are spread; 0 for a state for each partition of the source.
        time: Extracts the time in milliseconds since 1970; None for the record's timestamp.
        name: Name of the states in a store.
    """

    interval_ms: int
    keyed: bool
    key: Extractor | None
    id: Extractor | None
    partitions: int
    time: Extractor | None
    name: str

    @property
    def repartitions(self) -> bool:
        """Whether records of one state come from several partitions: a runner shuffles them by `scope` first."""
        return self.partitions > 0

    def scope(self, arrival: Any) -> bytes | None:
        if not self.partitions:
            return place_of(arrival).encode()
        identity = self._shuffled_by(arrival)
        return None if identity is None else shard_of(identity, self.partitions)

    def zero(self) -> IntervalState:
        return IntervalState(None, TimeIndex())

    def judge(self, state: IntervalState, arrival: Any) -> tuple[Ruling, IntervalState]:
        try:
            time = time_of(self.time, arrival)
            identity = self.identity(arrival)
        except EnvelopeError as error:
            return rejected(error), state
        before = state.stream_time_ms
        state.stream_time_ms = now = time if before is None else max(before, time)
        state.passed.purge(now - self.interval_ms)
        if identity is None:
            return UNIDENTIFIED, state
        at = number_of(arrival)
        place = (at, place_of(arrival)) if self.partitions else (at,)
        if (found := state.passed.get(identity)) is not None:
            if arrival.offset is not None and found[1:] == place:
                return _REPROCESSED, state
            if abs(time - found[0]) <= self.interval_ms:
                return DUPLICATE, state
            return _BEYOND, state  # more than the interval before the record that was passed on
        if time < now - self.interval_ms:
            return _BEYOND, state
        state.passed.add(identity, time, *place)
        return (ACCEPTED if before is None or time >= before else _LATE), state

    def judge_late(self, state: IntervalState, arrival: Any) -> tuple[Ruling, IntervalState]:
        """Decide about a record that was missing; see `envelope.filters.arrival.judge_late`."""
        ruling, state = self.judge(state, arrival)
        return (UNPROVEN if ruling is _BEYOND else ruling), state

    def dump(self, state: IntervalState) -> Any:
        return {"stream_time_ms": state.stream_time_ms, "passed": state.passed.dump()}

    def load(self, value: Any) -> IntervalState:
        return IntervalState(value["stream_time_ms"], TimeIndex.load(value["passed"]))

    def identity(self, arrival: Any) -> Id | None:
        """What two duplicates have in common; None for a record that has no duplicates.

        Raises:
            EnvelopeError: `TRANSFORM_FAILED`: key or id is of a type that cannot be used.
        """
        key = self._key(arrival) if self.keyed else None
        if self.id is None:
            return key
        if self.keyed and key is None:
            return None
        found = extracted(self.id, arrival, "id")
        if found is None:
            return None
        return (key, identity_of(found)) if key is not None else identity_of(found)

    def _shuffled_by(self, arrival: Any) -> Id | None:
        """What decides about the state: the changed key, or the id."""
        return self._key(arrival) if self.keyed else self.identity(arrival)

    def _key(self, arrival: Any) -> bytes | None:
        key = arrival.key if self.key is None else extracted(self.key, arrival, "key")
        if isinstance(key, str):
            identity_of(key)  # it can be encoded
            key = key.encode()
        if key is not None and not isinstance(key, bytes):
            raise EnvelopeError(Reason.TRANSFORM_FAILED, f"the key is of type {type(key).__name__}: use bytes or text")
        return key


def deduplicate_by_key(
    interval: timedelta,
    *,
    key: Extractor | None = None,
    partitions: int = PARTITIONS,
    time: Extractor | None = None,
    name: str = "deduplicate",
) -> IntervalFilter:
    """Pass on a record if none of its key was passed on within the interval before or after it.

    Records without a key are always passed on.

    Args:
        interval: The interval. Both of its ends belong to it; 0 drops records of equal time only.
        key: Extracts another key than the record's. Its records are then spread over `partitions` states, one shuffle.
        partitions: Number of these states. Another number begins with empty states.
        time: Extracts the time in milliseconds since 1970; by default the record's timestamp.
        name: Name of the states in a store.
    """
    return _made(interval, True, key, None, partitions if key else 0, time, name)


def deduplicate_by_key_value(
    id: Extractor,  # noqa: A002 - the field's word
    interval: timedelta,
    *,
    key: Extractor | None = None,
    partitions: int = PARTITIONS,
    time: Extractor | None = None,
    name: str = "deduplicate",
) -> IntervalFilter:
    """As `deduplicate_by_key`, but duplicates have the same key and the same id.

    Records without a key, or without an id, are always passed on.

    Args:
        id: Extracts the id: text, bytes, an integer of 64 bits, or a tuple of these.
        interval: As for `deduplicate_by_key`.
        key: As for `deduplicate_by_key`.
        partitions: As for `deduplicate_by_key`.
        time: As for `deduplicate_by_key`.
        name: As for `deduplicate_by_key`.
    """
    return _made(interval, True, key, id, partitions if key else 0, time, name)


def deduplicate(
    id: Extractor,  # noqa: A002 - the field's word
    interval: timedelta,
    *,
    partitions: int = PARTITIONS,
    time: Extractor | None = None,
    name: str = "deduplicate",
) -> IntervalFilter:
    """As `deduplicate_by_key`, but duplicates have the same id, whatever their keys and partitions: one shuffle.

    Records without an id are always passed on.

    Args:
        id: Extracts the id: text, bytes, an integer of 64 bits, or a tuple of these.
        interval: As for `deduplicate_by_key`.
        partitions: Number of states over which ids are spread. Another number begins with empty states.
        time: As for `deduplicate_by_key`.
        name: As for `deduplicate_by_key`.
    """
    return _made(interval, False, None, id, partitions, time, name)


def _made(
    interval: timedelta,
    keyed: bool,
    key: Extractor | None,
    identity: Extractor | None,
    partitions: int,
    time: Extractor | None,
    name: str,
) -> IntervalFilter:
    if (key is not None or not keyed) and partitions < 1:
        raise ValueError(f"partitions={partitions}: use at least 1")
    return IntervalFilter(milliseconds("interval", interval), keyed, key, identity, partitions, time, name)
