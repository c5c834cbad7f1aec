"""The producer filter: a record is new if its producer's sequence number is greater than the highest one (PIP-6).

The number is kept for each producer, topic and partition. Numbers that a producer gives over several partitions of a
topic arrive in no certain order: with one number for the topic, sequence 2 of one partition, read before 1 of
another, would lose 1.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from envelope.codec import decode
from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.filters.arrival import (
    ACCEPTED,
    DUPLICATE,
    INT64,
    MILLISECOND,
    UNIDENTIFIED,
    UNPROVEN,
    Extractor,
    Ruling,
    extracted,
    milliseconds,
    place_of,
    rejected,
    time_of,
)
from envelope.filters.index import identity_of
from envelope.filters.skipped import Skipped
from envelope.limits import number_of
from envelope.message import Envelope

PRODUCERS: Final = 10_000
"""Producers that a partition remembers; Pulsar's `brokerDeduplicationMaxNumberOfProducers` has this default."""
EXPIRY: Final = timedelta(days=7)
"""Stream time after which a producer that sent nothing is forgotten."""
MISSING: Final = 32
"""Ranges of missing numbers that are remembered for a producer."""
HELD: Final = 100
"""Records that are held back for a producer."""

_BELOW = Ruling(Verdict.BELOW_FLOOR, forward=False)
_FENCED = Ruling(Verdict.FENCED, forward=False)
_HELD = Ruling(Verdict.HELD, forward=False)
_LATE = Ruling(Verdict.LATE, forward=True)


class Gaps(StrEnum):
    """What happens to a record of a contiguous producer if sequence numbers before it have not arrived."""

    REPORT = "report"
    """It is passed on as `gap`. What is missing is passed on as `late` when it arrives."""
    HOLD = "hold"
    """It is held back until the missing ones arrive, so that the order is that of the numbers."""
    REFUSE = "refuse"
    """It is rejected, with reason `out_of_sequence`: as a Kafka broker does."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a producer says about a message.

    Attributes:
        producer: Name of the producer, unique among all producers of the topic.
        sequence: Sequence number; of a batch in one message the first one.
        last: Sequence number of the last event of a batch; None for a single event.
        epoch: Epoch of the producer's session. A session with a higher epoch fences those of the same name before it.
            Numbers continue from session to session.
        contiguous: The producer numbers each partition on its own and without gaps, so the next number is the last one
            plus 1. Otherwise only a higher number is required.
    """

    producer: str
    sequence: int
    last: int | None = None
    epoch: int = 0
    contiguous: bool = False

    @property
    def end(self) -> int:
        """The last sequence number of the message."""
        return self.sequence if self.last is None else self.last


@dataclass(slots=True)
class Producer:
    """What a partition remembers of a producer.

    Attributes:
        highest: Highest sequence number passed on.
        exact_from: From here to `highest`, every number that is not missing was passed on.
        epoch: Highest epoch of its sessions.
        seen_ms: Stream time of its last message.
        missing: Ranges of numbers that have not arrived, ascending, ends included.
        held: Messages that are held back: first number, last number, offset, ascending.
        skipped: Numbers that were skipped since records are missing; None if none are.
    """

    highest: int
    exact_from: int
    epoch: int = 0
    seen_ms: int = 0
    missing: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int, int]] = field(default_factory=list)
    skipped: Skipped | None = None


@dataclass(slots=True)
class ProducerState:
    """What the filter remembers of a partition.

    Attributes:
        stream_time_ms: Highest time seen; None before the first record.
        producers: The producers by name, the one that sent nothing for the longest time first.
        tracks: Records are missing, and what is skipped is noted.
    """

    stream_time_ms: int | None
    producers: OrderedDict[str, Producer]
    tracks: bool = False

    def last_sequence_id(self, producer: str) -> int | None:
        """Highest sequence number of a producer; None for an unknown one."""
        known = self.producers.get(producer)
        return None if known is None else known.highest


def envelope_stamp(arrival: Any) -> Stamp | None:
    """The producer and sequence number of an envelope in the value; None without them, and for a republished message.

    A republished message is in another partition and another order than its producer's, and several messages may be made
    of one. Its lineage recognises its copies.
    """
    if hasattr(arrival, "stamp"):  # an element of a flow was read from an envelope
        stamp: Stamp | None = arrival.stamp
        return None if stamp is None or not stamp.producer or arrival.chained else stamp
    message = decode(arrival.value)
    return None if not message.producer or message.chain else stamp_of(message)


def stamp_of(message: Envelope) -> Stamp | None:
    """What an envelope says about its producer; None without a sequence number."""
    if message.sequence is None:
        return None
    return Stamp(
        message.producer,
        message.sequence,
        message.last_sequence,
        message.producer_epoch or 0,
        message.sequence_per_partition,
    )


@dataclass(frozen=True, slots=True)
class ProducerFilter:
    """Passes on a message if its sequence number is greater than the highest one of its producer and partition.

    A producer that is forgotten (`expiry`, `limit`) is a new one when it sends again: whatever its message's number is,
    it is passed on.

    Attributes:
        stamp: Extracts a `Stamp`; None for a message of a producer that takes no part, which is passed on.
        gaps: What happens to a message of a contiguous producer if numbers before it have not arrived.
        expiry: A producer is forgotten when it has sent nothing for this long, in stream time of the partition.
        limit: Producers that a partition remembers. Beyond, the one that sent nothing for the longest time is forgotten.
        hold: Messages that are held back for a producer. With more, the filter stops waiting and passes them on.
        time: Extracts the time in milliseconds since 1970; None for the record's timestamp.
        name: Name of the states in a store.
    """

    stamp: Extractor = envelope_stamp
    gaps: Gaps = Gaps.REPORT
    expiry: timedelta = EXPIRY
    limit: int = PRODUCERS
    hold: int = HELD
    time: Extractor | None = None
    name: str = "producer"

    def __post_init__(self) -> None:
        milliseconds("expiry", self.expiry)
        if self.limit < 1 or self.hold < 1:
            raise ValueError(f"limit={self.limit}, hold={self.hold}: use at least 1")

    def scope(self, arrival: Any) -> bytes | None:
        return place_of(arrival).encode()

    def zero(self) -> ProducerState:
        return ProducerState(None, OrderedDict())

    def judge(self, state: ProducerState, arrival: Any) -> tuple[Ruling, ProducerState]:
        try:
            time = time_of(self.time, arrival)
            stamp = checked(extracted(self.stamp, arrival, "stamp"))
        except EnvelopeError as error:
            return rejected(error), state
        before = state.stream_time_ms
        now = time if before is None else max(before, time)
        forgotten = self._forgotten(state, now, None if stamp is None else stamp.producer)
        known = None if stamp is None or stamp.producer in forgotten else state.producers.get(stamp.producer)
        if stamp is None:
            ruling = UNIDENTIFIED
        elif known is None:
            ruling = ACCEPTED
        elif stamp.epoch < known.epoch:
            ruling = _FENCED
        else:
            ruling = self._of(known, stamp, number_of(arrival))
        if ruling.verdict is Verdict.REJECTED:
            return ruling, state
        state.stream_time_ms = now
        released = [offset for name in forgotten for _, _, offset in state.producers.pop(name).held]
        if stamp is not None and known is None:
            skipped = Skipped().before(stamp.sequence, None) if state.tracks else None
            state.producers[stamp.producer] = Producer(stamp.end, stamp.sequence, stamp.epoch, now, skipped=skipped)
        elif stamp is not None and known is not None and ruling is not _FENCED:
            known.epoch, known.seen_ms = stamp.epoch, now
            state.producers.move_to_end(stamp.producer)
        return _also(ruling, released), state

    def judge_late(self, state: ProducerState, arrival: Any) -> tuple[Ruling, ProducerState]:
        """Decide about a message that was missing; see `envelope.filters.arrival.judge_late`."""
        try:
            stamp = checked(extracted(self.stamp, arrival, "stamp"))
        except EnvelopeError as error:
            return rejected(error), state
        known = None if stamp is None else state.producers.get(stamp.producer)
        if stamp is None or known is None or stamp.end > known.highest:
            return self.judge(state, arrival)
        if known.skipped is None:
            ruling = _within(known, stamp.sequence, stamp.end)
            return (UNPROVEN if ruling is _BELOW else ruling), state
        ruling, known.skipped = known.skipped.judge(stamp.sequence, stamp.end)
        if ruling.forward:
            _within(known, stamp.sequence, stamp.end)
        return ruling, state

    def track(self, state: ProducerState, *, on: bool) -> ProducerState:
        """Note what is skipped from now on, or no longer; see `envelope.filters.arrival.tracking`."""
        if state.tracks is not on or not on:
            state.tracks = on
            for known in state.producers.values():
                known.skipped = (known.skipped or Skipped(tuple(known.missing))) if on else None
        return state

    def rest(self, state: ProducerState) -> ProducerState:
        """See `envelope.filters.arrival.resting`."""
        state.tracks = False
        for known in state.producers.values():
            known.skipped = None if known.skipped == Skipped(tuple(known.missing)) else known.skipped
        return state

    def dump(self, state: ProducerState) -> Any:
        return {
            "stream_time_ms": state.stream_time_ms,
            "producers": {name: _dumped(known) for name, known in state.producers.items()},
            **({"tracks": True} if state.tracks else {}),
        }

    def load(self, value: Any) -> ProducerState:
        producers = OrderedDict((name, _loaded(one)) for name, one in value["producers"].items())
        return ProducerState(value["stream_time_ms"], producers, value.get("tracks", False))

    def held(self, state: ProducerState) -> set[int]:
        """Offsets of the messages that are held back: they are read again after a restart."""
        return {offset for known in state.producers.values() for _, _, offset in known.held}

    def _forgotten(self, state: ProducerState, now: int, arriving: str | None) -> list[str]:
        """The producers that are forgotten when a message arrives."""
        found: list[str] = []
        oldest = now - self.expiry // MILLISECOND
        needed = len(state.producers) + (arriving is not None and arriving not in state.producers)
        for name, known in state.producers.items():
            if known.seen_ms >= oldest and needed <= self.limit:
                break
            found.append(name)
            needed -= name != arriving
        return found

    def _of(self, known: Producer, stamp: Stamp, offset: int | None) -> Ruling:
        """The ruling for a message of a known producer. If it is rejected, the producer stays as it was."""
        first, end = stamp.sequence, stamp.end
        if end <= known.highest:
            ruling = _within(known, first, end)
            if ruling.forward and known.skipped is not None:
                known.skipped = known.skipped.judge(first, end)[1]
            return ruling
        if first <= known.highest:
            return _refused(f"numbers {first} to {end} of a producer overlap what was passed on, up to {known.highest}")
        for held_first, held_end, held_offset in known.held:
            if held_first <= end and first <= held_end:
                if held_offset == offset:
                    return _HELD
                if (held_first, held_end) == (first, end):
                    return DUPLICATE
                return _refused(f"numbers {first} to {end} of a producer overlap those of a message that is held back")
        if not stamp.contiguous:
            ready = tuple(held_offset for _, _, held_offset in known.held)
            highest = max(end, known.held[-1][1]) if known.held else end
            _note(known, first)
            known.highest, known.exact_from, known.missing, known.held = highest, highest if ready else first, [], []
            return _also(ACCEPTED, ready)
        if first == known.highest + 1:
            known.highest = end
            return _also(ACCEPTED, _ready(known))
        missing = (known.highest + 1, first - 1)
        if self.gaps is Gaps.REFUSE:
            return _refused(f"number {first} of a producer follows {known.highest}: {_count(missing)} missing")
        if self.gaps is Gaps.HOLD:
            return self._holding(known, first, end, offset)
        _skip(known, first, end)
        return Ruling(Verdict.GAP, forward=True, missing=missing)

    def _holding(self, known: Producer, first: int, end: int, offset: int | None) -> Ruling:
        """The ruling for a message that arrives before its predecessors."""
        if offset is None:
            return _refused(f"number {first} of a producer came early, and without an offset it cannot be held back")
        missing = (known.highest + 1, first - 1)
        known.held.insert(bisect_left(known.held, (first, end, offset)), (first, end, offset))
        if len(known.held) <= self.hold:
            return Ruling(Verdict.HELD, forward=False, missing=missing)
        released = []
        for held_first, held_end, held_offset in known.held:
            if held_first > known.highest + 1:
                _skip(known, held_first, held_end)
            known.highest = held_end
            released.append(held_offset)
        known.held = []
        return Ruling(Verdict.GAP, forward=False, missing=missing, released=tuple(released))


def checked(found: Any) -> Stamp | None:
    """Check what an extractor of stamps returned.

    Raises:
        EnvelopeError: `BAD_SEQUENCE`: it is no stamp, or its numbers are not integers of 64 bits in ascending order.
            `TRANSFORM_FAILED`: its name contains an unpaired surrogate.
    """
    if found is None:
        return None
    if not isinstance(found, Stamp):
        raise EnvelopeError(Reason.BAD_SEQUENCE, f"the stamp is of type {type(found).__name__}")
    if not found.producer or type(found.producer) is not str:
        raise EnvelopeError(Reason.BAD_SEQUENCE, "the stamp has no name of a producer")
    identity_of(found.producer)
    numbers = (found.sequence, found.end, found.epoch)
    if any(type(one) is not int or not -INT64 <= one < INT64 for one in numbers) or found.end < found.sequence:
        raise EnvelopeError(Reason.BAD_SEQUENCE, "the numbers of a stamp are not ascending integers of 64 bits")
    return found


def _within(known: Producer, first: int, end: int) -> Ruling:
    """The ruling for numbers that are not above the highest one; those that were missing are no longer."""
    near = [one for one in known.missing if one[0] <= end and first <= one[1]]
    if not near:
        return DUPLICATE if first >= known.exact_from else _BELOW
    low, high = near[0]
    if len(near) > 1 or first < low or end > high:
        return _refused(f"numbers {first} to {end} of a producer were passed on in part")
    rest = [(low, first - 1), (end + 1, high)]
    known.missing = sorted([one for one in known.missing if one != near[0]] + [one for one in rest if one[0] <= one[1]])
    _trim(known)
    return _LATE


def _skip(known: Producer, first: int, end: int) -> None:
    """Pass on numbers although some before them are missing."""
    known.missing.append((known.highest + 1, first - 1))
    _note(known, first)
    known.highest = end
    _trim(known)


def _note(known: Producer, first: int) -> None:
    """Note the numbers that are skipped before a message, if records are missing."""
    if known.skipped is not None:
        known.skipped = known.skipped.before(first, known.highest)


def _trim(known: Producer) -> None:
    while len(known.missing) > MISSING:
        _, high = known.missing.pop(0)
        known.exact_from = high + 1


def _ready(known: Producer) -> tuple[int, ...]:
    """The messages that are no longer held back, because the numbers before them have arrived."""
    ready: list[int] = []
    while known.held and known.held[0][0] == known.highest + 1:
        _, known.highest, offset = known.held.pop(0)
        ready.append(offset)
    return tuple(ready)


def _also(ruling: Ruling, released: Iterable[int]) -> Ruling:
    """A ruling that also releases messages."""
    offsets = (*released, *ruling.released)
    if offsets == ruling.released:
        return ruling
    return Ruling(
        ruling.verdict, ruling.forward, ruling.reason, ruling.detail, missing=ruling.missing, released=offsets
    )


def _refused(detail: str) -> Ruling:
    return Ruling(Verdict.REJECTED, forward=False, reason=Reason.OUT_OF_SEQUENCE, detail=detail)


def _count(missing: tuple[int, int]) -> str:
    return f"{missing[1] - missing[0] + 1} {'number is' if missing[0] == missing[1] else 'numbers are'}"


def _dumped(known: Producer) -> dict[str, Any]:
    value: dict[str, Any] = {"highest": known.highest, "exact_from": known.exact_from, "seen_ms": known.seen_ms}
    if known.epoch:
        value["epoch"] = known.epoch
    if known.missing:
        value["missing"] = [list(one) for one in known.missing]
    if known.held:
        value["held"] = [list(one) for one in known.held]
    if known.skipped is not None:
        value["skipped"] = known.skipped.dump()
    return value


def _loaded(value: Any) -> Producer:
    missing = [(low, high) for low, high in value.get("missing", ())]
    held = [(first, end, offset) for first, end, offset in value.get("held", ())]
    skipped = Skipped.load(value.get("skipped"))
    return Producer(
        value["highest"], value["exact_from"], value.get("epoch", 0), value["seen_ms"], missing, held, skipped
    )
