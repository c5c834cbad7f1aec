"""What a filter judges, what it decides, and the interface that all filters share."""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from envelope.codec import decode
from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.message import Envelope

S = TypeVar("S")

Extractor: TypeAlias = Callable[[Any], Any]
"""Takes what is judged, an `Arrival` or anything with its attributes, and returns a value of it; None for no value."""

INT64 = 1 << 63
MILLISECOND: Final = timedelta(milliseconds=1)

STAMPED: Final = {
    "producer": "producer",
    "sequence": "sequence",
    "last_sequence": "last",
    "producer_epoch": "epoch",
    "sequence_per_partition": "contiguous",
}
"""Fields of an envelope that `Stamp` has, with their names there."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A record as a filter sees it. Records and elements of a flow have the same attributes and are judged as they are.

    Attributes:
        topic: Topic.
        partition: Partition.
        offset: Offset; None for what no topic contains, such as the output of a timer.
        key: Key bytes, or None.
        value: The value: bytes, or a mapping of column names to values.
        timestamp_ms: Time in milliseconds since 1970.
        headers: Pairs of name and value, in order; names may repeat.
        topic_id: Kafka's id of the topic; empty when unknown.
        leader_epoch: Leader epoch in which it was written; None when unknown.
    """

    topic: str
    partition: int
    offset: int | None
    key: bytes | None = None
    value: Any = None
    timestamp_ms: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()
    topic_id: str = ""
    leader_epoch: int | None = None


class Windowed(NamedTuple):
    """A key and the window that its record opened.

    Attributes:
        key: Key of the record.
        start_ms: Start of the window, in milliseconds since 1970.
        end_ms: End of the window: exclusive for a tumbling window, the last record's time for a session.
    """

    key: bytes
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a filter decided about one record.

    Attributes:
        verdict: The verdict.
        forward: Whether the record is passed on. Otherwise it is held back, sent to the dead-letter topic
            (`Verdict.diverts`), or dropped.
        reason: Reason code, if the record is rejected.
        detail: What was wrong, without the payload; for a dead letter.
        window: The window that the record opened, if the filter is windowed.
        missing: First and last sequence number that are missing before this record.
        released: Offsets of records that were held back until now. They are passed on in this order, after this record;
            if this record is among them, at its place.
        warning: A sign that the filter is used wrongly, given once for each state.
    """

    verdict: Verdict
    forward: bool
    reason: Reason | None = None
    detail: str = ""
    window: Windowed | None = None
    missing: tuple[int, int] | None = None
    released: tuple[int, ...] = ()
    warning: str = ""


ACCEPTED = Ruling(Verdict.ACCEPTED, forward=True)
DUPLICATE = Ruling(Verdict.DUPLICATE, forward=False)
UNIDENTIFIED = Ruling(Verdict.UNIDENTIFIED, forward=True)
REDRIVEN = Ruling(Verdict.REDRIVEN, forward=True)
UNPROVEN = Ruling(
    Verdict.REJECTED,
    forward=False,
    reason=Reason.UNPROVEN,
    detail="the filter no longer knows whether another record with its identity was passed on",
)
# What a filter of the user says about a record that it cannot tell from a copy because it comes late.
_UNCERTAIN: Final = frozenset({Verdict.BELOW_FLOOR, Verdict.BEYOND_HORIZON})


class Filter(Protocol[S]):
    """A rule that decides which records of a stream are duplicates.

    It is a value without state of its own: `judge` depends on its arguments only. A state belongs to one scope, such as
    a partition or a key, and the records of a scope are judged in the order in which they were read.
    """

    @property
    def name(self) -> str:
        """Name of its states in a store."""
        ...

    def scope(self, arrival: Any) -> bytes | None:
        """Key of the state that judges a record; None for a record that is passed on without a state.

        Raises:
            EnvelopeError: The record has no scope that can be used.
        """
        ...

    def zero(self) -> S:
        """The state of a scope before its first record."""
        ...

    def judge(self, state: S, arrival: Any) -> tuple[Ruling, S]:
        """Decide about a record. The state is passed by value: it may be changed in place, and is returned.

        A record that is rejected leaves the state as it was: redriven, it is judged anew.
        """
        ...

    def dump(self, state: S) -> Any:
        """The state as a readable JSON value."""
        ...

    def load(self, value: Any) -> S:
        """The state that `dump` returned this value for."""
        ...


class Scope(StrEnum):
    """Which records share a state."""

    PARTITION = "partition"
    """The records of one partition. The number of states is the number of partitions."""
    KEY = "key"
    """The records of one key. The number of states is the number of keys; records without a key are passed on."""


def scope_of(scope: Scope, arrival: Any) -> bytes | None:
    """Key of the state for a record."""
    if scope is Scope.KEY:
        key: bytes | None = arrival.key
        return key
    return place_of(arrival).encode()


def place_of(arrival: Any) -> str:
    """Topic and partition of a record, as text."""
    return f"{arrival.topic}:{arrival.partition}"


def shard_of(identity: Any, shards: int) -> bytes:
    """Key of the state for an id, if ids are spread over a fixed number of states."""
    if type(identity) is str:
        text = encode_basestring_ascii(identity)  # what `json.dumps` returns, in a fifth of the time
    else:
        text = json.dumps(identity, default=repr, separators=(",", ":"))
    return b"%d/%d" % (zlib.crc32(text.encode()) % shards, shards)


def extracted(extractor: Extractor, arrival: Any, what: str) -> Any:
    """The value that an extractor returns.

    Raises:
        EnvelopeError: `TRANSFORM_FAILED`: it raised an exception.
    """
    try:
        return extractor(arrival)
    except EnvelopeError:
        raise
    except Exception as error:
        raise EnvelopeError(
            Reason.TRANSFORM_FAILED, f"the extractor of the {what} raised {type(error).__name__}"
        ) from error


def judge_late(rule: Filter[S], state: S, arrival: Any, *, asserted: bool = False) -> tuple[Ruling, S]:
    """Decide about a record that was missing at its place, as a dead letter, and comes back.

    It is judged as if it were at its place, by what the filter still knows of it. It was not passed on, but another record
    with its identity may have been. If the filter cannot tell, it rejects the record as `unproven`. A filter of the user
    does not say what it knows: what it calls `below_floor` or `beyond_horizon` is passed on.

    Args:
        rule: The filter.
        state: Its state, by value.
        arrival: The record.
        asserted: The operator asserts that no record with its identity was passed on.
    """
    own = getattr(rule, "judge_late", None)
    ruling, state = (rule.judge if own is None else own)(state, arrival)
    uncertain = ruling.reason is Reason.UNPROVEN and asserted if own else ruling.verdict in _UNCERTAIN
    return (REDRIVEN if uncertain else ruling), state


def tracking(rule: Filter[S], state: S, *, on: bool) -> S:
    """The state of a filter that notes from now on what it skips, because records are missing, or no longer."""
    track = getattr(rule, "track", None)
    return state if track is None else track(state, on=on)


def resting(rule: Filter[S], state: S) -> S:
    """The state of a filter without the note that nothing was skipped: where it is told again when records are missing."""
    rest = getattr(rule, "rest", None)
    return state if rest is None else rest(state)


def rejected(error: EnvelopeError) -> Ruling:
    """The ruling for a record that cannot be judged."""
    return Ruling(Verdict.REJECTED, forward=False, reason=error.reason, detail=error.detail)


def milliseconds(name: str, duration: timedelta) -> int:
    """A duration in milliseconds.

    Raises:
        ValueError: It is negative, or not a whole number of milliseconds.
    """
    if not isinstance(duration, timedelta):
        raise TypeError(f"{name} is of type {type(duration).__name__}: use a datetime.timedelta")
    whole, rest = divmod(duration, MILLISECOND)
    if whole < 0 or rest:
        raise ValueError(f"{name}={duration}: use a duration of whole milliseconds, not below 0")
    return whole


def time_of(time: Extractor | None, arrival: Any) -> int:
    """Time of a record in milliseconds since 1970: its timestamp, or what the filter's own extractor returns.

    Raises:
        EnvelopeError: `TRANSFORM_FAILED`: the extractor failed, or returned something else than an integer.
    """
    found = arrival.timestamp_ms if time is None else extracted(time, arrival, "time")
    if type(found) is not int or not -INT64 <= found < INT64:
        raise EnvelopeError(
            Reason.TRANSFORM_FAILED, f"the time is of type {type(found).__name__}: use an integer of milliseconds"
        )
    return found


@dataclass(frozen=True, slots=True)
class FromHeader:
    """Extracts the last header of this name."""

    name: str

    def __call__(self, arrival: Any) -> Any:
        return next((value for found, value in reversed(arrival.headers) if found == self.name), None)


@dataclass(frozen=True, slots=True)
class FromValue:
    """Extracts a field of the value."""

    name: str

    def __call__(self, arrival: Any) -> Any:
        value = arrival.value
        if isinstance(value, bytes):
            value = json.loads(value)
        return value.get(self.name) if isinstance(value, Mapping) else None


@dataclass(frozen=True, slots=True)
class FromEnvelope:
    """Extracts a field of the envelope. The elements of a flow were read from one, and have its fields."""

    name: str

    def __call__(self, arrival: Any) -> Any:
        if not hasattr(arrival, "stamp"):  # a record; an element of a flow was read from an envelope
            found = getattr(decode(arrival.value), self.name)
        elif self.name in STAMPED:
            found = getattr(arrival.stamp, STAMPED[self.name], None)
        else:
            found = getattr(arrival, self.name)
        return None if found == "" else found


def from_header(name: str) -> Extractor:
    """Extract the last header of this name; None without one."""
    return FromHeader(name)


def from_value(name: str) -> Extractor:
    """Extract a field of the value: a column, or a member of a JSON object in bytes; None without it."""
    return FromValue(name)


def from_envelope(name: str) -> Extractor:
    """Extract a field of the envelope in the value, such as `event_id` or `sequence`; None if it is not set.

    Raises:
        ValueError: An envelope has no such field.
    """
    if name not in Envelope.__dataclass_fields__:
        raise ValueError(f"an envelope has no field {name!r}")
    return FromEnvelope(name)
