"""Follows a record back to its root, and checks that its chain is true. It reads, and writes nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Part

from envelope import Envelope, EnvelopeError, Hop, TopicPartition, decode
from envelope.limits import broker_id
from jobs.environment import NotThereError, UsageError
from jobs.table.view import key_as_json
from persistence.kafka import BrokerUnavailable, KafkaSettings, TopicMissing, Topics
from persistence.kafka.errors import broker_error, passes
from persistence.kafka.facts import TopicFacts, Watermarks
from persistence.kafka.reading import assign

_SECONDS: Final = 10.0


class Found(StrEnum):
    """Whether a record could be read."""

    FOUND = "found"
    EXPIRED = "expired"
    """Its offset is below the beginning of the log: retention deleted it."""
    MISSING = "missing"
    """The log has no record at this offset: it was compacted, or its transaction was aborted or is open."""
    GONE = "gone"
    """The topic does not exist, or was created again since."""
    ELSEWHERE = "elsewhere"
    """It is in another cluster."""
    BEYOND = "beyond"
    """No record ever had this offset: it is at or above the end of the log, or there is no such partition."""


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was found at a place.

    Attributes:
        found: Whether the record could be read.
        key: Its key.
        value: Its value.
        timestamp_ms: Its timestamp in milliseconds since 1970.
        topic_id: Current id of the topic.
        leader_epoch: Leader epoch in which it was written; None when unknown.
    """

    found: Found
    key: bytes | None = None
    value: bytes | None = None
    timestamp_ms: int | None = None
    topic_id: str = ""
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One record on the way: the input of a republisher, or the traced record itself.

    Attributes:
        place: Its coordinates.
        found: Whether it could be read.
        hop: How the next record was made of it; None for the traced record.
        key: Its key; None if it has none or could not be read.
        timestamp_ms: Its timestamp in milliseconds since 1970; None if it could not be read.
        event_id: Event id in its envelope; empty if it has none.
        wrong: What contradicts the chain; empty if nothing does.
    """

    place: Place
    found: Found
    hop: Hop | None
    key: bytes | None = None
    timestamp_ms: int | None = None
    event_id: str = ""
    wrong: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The step as a JSON object."""
        hop = self.hop or Hop("", 0, 0)
        return {
            "topic": self.place.topic,
            "partition": self.place.partition,
            "offset": self.place.offset,
            "found": self.found.value,
            **({"key": None} if self.key is None else key_as_json(self.key)),
            "timestamp_ms": self.timestamp_ms,
            "event_id": self.event_id,
            "via": hop.via,
            "index": hop.index,
            "count": hop.count,
            "rekeyed": hop.rekeyed,
            "pass_through": hop.pass_through,
            "wrong": [*self.wrong],
        }


def place_of(text: str) -> Place:
    """The coordinates that a person wrote.

    Raises:
        UsageError: They are malformed.
    """
    parts = text.rsplit(":", 2)
    if len(parts) < 3 or not parts[0] or not all(one.isascii() and one.isdecimal() for one in parts[1:]):
        raise UsageError(f"{text!r}: write TOPIC:PARTITION:OFFSET, for example orders:0:1742")
    return Place(parts[0], int(parts[1]), int(parts[2]))


def trace(settings: KafkaSettings, place: Place) -> list[Step]:
    """Read a record and every record of its chain, the root first and the record itself last.

    Args:
        settings: Settings of the Kafka cluster.
        place: Coordinates of the record.

    Raises:
        NotThereError: The record does not exist, or cannot be read any more.
        BrokerError: Kafka cannot be reached, or does not let this user read a topic.
    """
    records = _Records(settings)
    try:
        return traced(place, records.fetch)
    finally:
        records.close()


def traced(place: Place, fetch: Callable[[Place], Fetched]) -> list[Step]:
    """The same, with another source of records."""
    record = fetch(place)
    if record.found is not Found.FOUND:
        raise NotThereError(f"{place}: {NOT_THERE[record.found]}")
    envelope = _envelope(record)
    chain = envelope.chain if envelope else ()
    inputs = [
        (hop, Place(hop.topic, hop.partition, hop.offset), Fetched(Found.ELSEWHERE) if hop.cluster else None)
        for hop in chain
    ]
    fetched = [(hop, at, known or _of_topic(hop, fetch(at))) for hop, at, known in inputs]
    outputs = [*(one for _, _, one in fetched), record][1:]
    steps = [
        _step(at, one, hop, _wrong(chain[:i], hop, one, after))
        for i, ((hop, at, one), after) in enumerate(zip(fetched, outputs, strict=True))
    ]
    return [*steps, _step(place, record, None, ())]


NOT_THERE: Final[Mapping[Found, str]] = {
    Found.EXPIRED: "retention has deleted the record",
    Found.MISSING: "the log has no record at this offset: it was compacted, or its transaction was aborted or is open",
    Found.GONE: "there is no such topic. Correct its name",
    Found.BEYOND: "no record has this offset yet, or there is no such partition. Give a lower one, or another partition",
}
"""Why a record could not be read, and the remedy."""


def _of_topic(hop: Hop, found: Fetched) -> Fetched:
    """What was found, unless it is of another topic of the same name."""
    again = hop.topic_id and found.topic_id and broker_id(hop.topic_id) != found.topic_id
    return Fetched(Found.GONE) if again else found


def _wrong(before: tuple[Hop, ...], hop: Hop, record: Fetched, output: Fetched) -> tuple[str, ...]:
    """What contradicts a hop.

    Args:
        before: The hops before it.
        hop: The hop.
        record: The record that it names.
        output: The record that was made of it.
    """
    wrong = []
    if record.found is Found.BEYOND:
        wrong.append("the log ends below this offset")
    if hop.index is not None and hop.count is not None and hop.index >= hop.count:
        wrong.append(f"output {hop.index} of {hop.count}")
    epochs = {hop.leader_epoch, record.leader_epoch}
    if record.found is Found.FOUND and None not in epochs and len(epochs) > 1:
        wrong.append("the broker lost the record of this hop, and gave its offset to another one")
    elif record.found is Found.FOUND:
        envelope = _envelope(record)
        chain = envelope.chain if envelope else ()
        # A republisher and a redrive append pass-through hops together with the hop of the record that they read.
        if not _begins(before, chain) or not all(one.pass_through for one in before[len(chain) :]):
            wrong.append("its own chain is not the beginning of this chain")
        if hop.timestamp_ms is not None and hop.timestamp_ms != record.timestamp_ms:
            wrong.append("it has another timestamp than the hop says")
        if output.found is Found.FOUND and not hop.rekeyed and record.key != output.key:
            wrong.append("the key of the output differs, and the hop does not say so")
    return tuple(wrong)


def _begins(whole: tuple[Hop, ...], chain: tuple[Hop, ...]) -> bool:
    """Whether a chain is the beginning of another one, in which a flow may have marked hops through retry topics."""
    same = (old in (new, replace(new, pass_through=False)) for old, new in zip(chain, whole, strict=False))
    return len(chain) <= len(whole) and all(same)


def _step(place: Place, record: Fetched, hop: Hop | None, wrong: tuple[str, ...]) -> Step:
    envelope = _envelope(record)
    event_id = envelope.event_id if envelope else ""
    return Step(place, record.found, hop, record.key, record.timestamp_ms, event_id, wrong)


def _envelope(record: Fetched) -> Envelope | None:
    """A record's envelope; None if it has none."""
    try:
        return decode(record.value)
    except EnvelopeError:
        return None


class _Records:
    """Single records of a cluster."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._topics = Topics(settings)
        self._consumer = Consumer(
            settings.client(group_id="headwater-trace", enable_auto_commit=False, enable_partition_eof=True)
        )
        self._known: dict[
            str, tuple[TopicFacts, dict[TopicPartition, Watermarks], dict[TopicPartition, int]] | None
        ] = {}

    def fetch(self, place: Place) -> Fetched:
        """The record at a place."""
        if place.topic not in self._known:
            self._known[place.topic] = self._look(place.topic)
        if (known := self._known[place.topic]) is None:
            return Fetched(Found.GONE)
        facts, marks, ends = known
        part = TopicPartition(place.topic, place.partition)
        if place.offset < 0 or place.offset >= ends.get(part, 0):
            return Fetched(Found.BEYOND, topic_id=facts.topic_id)
        if place.offset < marks[part].low:
            return Fetched(Found.EXPIRED, topic_id=facts.topic_id)
        return self._read(place, facts.topic_id) or Fetched(Found.MISSING, topic_id=facts.topic_id)

    def close(self) -> None:
        """Release the connections."""
        self._consumer.close()

    def _look(
        self, topic: str
    ) -> tuple[TopicFacts, dict[TopicPartition, Watermarks], dict[TopicPartition, int]] | None:
        try:
            self._topics.check_rights(read=[topic])
            facts = self._topics.describe([topic])[topic]
            return facts, self._topics.marks([topic]), self._topics.ends([topic])
        except TopicMissing:
            return None

    def _read(self, place: Place, topic_id: str) -> Fetched | None:
        """The record, None if the log has none at this offset."""
        assign(self._consumer, [Part(place.topic, place.partition, place.offset)])
        while True:
            message = self._consumer.poll(_SECONDS)
            if message is None:
                raise BrokerUnavailable(f"reading {place}: no answer", "Run the command again; that is safe")
            if (error := message.error()) is not None:
                if error.name() == "_PARTITION_EOF":
                    return None
                if passes(error):
                    continue
                raise broker_error(error, f"reading {place}")
            if message.offset() != place.offset:
                return None
            kind, timestamp = message.timestamp()
            told = timestamp if kind else None
            return Fetched(Found.FOUND, message.key(), message.value(), told, topic_id, message.leader_epoch())
