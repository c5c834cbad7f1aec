"""A republish service: its main loop is simulated, what it makes of a record is the library's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from aggregations.element import Record
from aggregations.report import DeadLetter
from aggregations.simulation.kafka import Cluster
from aggregations.simulation.topology import Passage, Payload, digest
from envelope import Envelope, Hop, Lineage, Node, Standing, append_hop, decode, encode
from envelope.redrive import Redrive, redrive_hops
from persistence.faults import REPUBLISH_COMMIT, REPUBLISH_FLUSH, REPUBLISH_PRODUCE, effect

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(dict).decode


class Outgoing(NamedTuple):
    """A message that a service is about to produce."""

    topic: str
    key: bytes
    value: bytes
    partition: int | None
    payload: Payload
    redriven: str = ""


def payload_of(record: Record) -> Payload:
    """The payload of an enveloped record."""
    assert record.value is not None
    payload: Payload = _decode_json(decode(record.value).payload)
    return payload


def published(value: bytes) -> tuple[str, Standing]:
    """Id of what a flow produced, and where it stands for whoever reads it."""
    message = decode(value)
    name: str = _decode_json(message.payload)["id"]
    return name, Lineage.of(message.chain, Node("out", 0, 0)).standing(event_id=message.event_id)


def rooted(payload: Payload) -> bytes:
    """What a producer that is no republisher writes."""
    return encode(Envelope(_encode_json(payload), event_id=payload["id"]))


def mended(letter: DeadLetter, place: Record) -> Outgoing:
    """A dead letter on its way back: the hops that the library gives it, and a payload that is no longer bad."""
    record = letter.record
    assert record.value is not None
    message = decode(record.value)
    payload = {**_decode_json(message.payload), "bad": ""}
    hops = redrive_hops(_place(record), _place(place), Redrive(letter.stage, letter.hole))
    value = encode(replace(message, payload=_encode_json(payload), chain=(*message.chain, *hops)))
    assert record.key is not None
    return Outgoing(record.topic, record.key, value, None, payload, letter.stage)


@dataclass(slots=True)
class Service:
    """One instance of a republisher.

    Args:
        passage: What it does.
        cluster: The broker.
        deliver: Appends a message to its topic.
        reorders: Its producer may swap neighbours.

    Attributes:
        attempts: Batches begun: the route through the retry topic depends on it.
    """

    passage: Passage
    cluster: Cluster
    deliver: Callable[[Outgoing], Record]
    reorders: bool = False
    attempts: int = 0

    @property
    def sources(self) -> list[str]:
        """Topics it reads: its own source and its retry topic."""
        retry = f"{self.passage.name}.retry"
        return [self.passage.source, *([retry] if retry in self.cluster.topics else [])]

    def lag(self) -> int:
        """Records it has yet to read."""
        return sum(
            partition.high - max(partition.low, self._committed(topic, number))
            for topic in self.sources
            for number, partition in enumerate(self.cluster.topics[topic].partitions)
        )

    def place(self, source: int, partition: int) -> tuple[str, int]:
        """One of its sources and a partition of it."""
        topic = self.sources[source % len(self.sources)]
        return topic, partition % len(self.cluster.topics[topic].partitions)

    def step(self, source: int, partition: int, limit: int) -> None:
        """Consume, produce, flush, commit: every effect by the name that it has in the real service."""
        topic, number = self.place(source, partition)
        records = self.read(topic, number, limit)
        self.produce(self.transform(records))
        effect(REPUBLISH_FLUSH, lambda: None)
        if records:
            effect(REPUBLISH_COMMIT, lambda: self.commit(topic, number, records[-1].offset + 1))

    def drain(self, limit: int = 1000) -> None:
        """Work on every partition once."""
        for source, topic in enumerate(self.sources):
            for number in range(len(self.cluster.topics[topic].partitions)):
                self.step(source, number, limit)

    def read(self, topic: str, partition: int, limit: int) -> list[Record]:
        """Records from the committed offset on."""
        return self.cluster.read(topic, partition, self._committed(topic, partition), limit)

    def transform(self, records: list[Record]) -> list[Outgoing]:
        """What it makes of some records."""
        self.attempts += 1
        outgoing = [output for record in records for output in self._passed(record)]
        if self.reorders:
            for i in range(self.attempts % 2, len(outgoing) - 1, 2):
                outgoing[i], outgoing[i + 1] = outgoing[i + 1], outgoing[i]
        return outgoing

    def produce(self, outgoing: list[Outgoing]) -> None:
        """Produce one by one: any number of them may have arrived when it dies."""
        for output in outgoing:
            effect(REPUBLISH_PRODUCE, lambda output=output: self.deliver(output))  # type: ignore[misc]

    def commit(self, topic: str, partition: int, offset: int) -> None:
        """Commit an input offset."""
        self.cluster.groups[self.passage.name, topic, partition] = offset

    def rewind(self, partition: int, back: int) -> None:
        """Set the committed offset of the source back, as an operator may."""
        topic = self.passage.source
        number = partition % len(self.cluster.topics[topic].partitions)
        self.commit(topic, number, max(self._committed(topic, number) - back, 0))

    def _committed(self, topic: str, partition: int) -> int:
        return self.cluster.groups.get((self.passage.name, topic, partition), 0)

    def _passed(self, record: Record) -> Iterator[Outgoing]:
        passage = self.passage
        assert record.value is not None
        assert record.key is not None
        payload = payload_of(record)
        if passage.retries and record.topic == passage.source and self._detours(payload):
            value = append_hop(record.value, _hop(record, passage, transparent=True))
            yield Outgoing(f"{passage.name}.retry", record.key, value, None, payload)
            return
        message = decode(record.value)
        Lineage.of(message.chain, record.node).check()
        for index, output in enumerate(passage.outputs(payload)):
            key = output["k"].encode()
            hop = _hop(record, passage, index=None if passage.foreign else index, rekeyed=key != record.key)
            value = encode(
                replace(
                    message,
                    payload=_encode_json(output),
                    chain=(*message.chain, hop),
                    event_id=output["id"],
                    key=None,
                )
            )
            partition = digest(output["id"], str(self.attempts)) if passage.spread else None
            yield Outgoing(passage.target, key, value, partition, output)

    def _detours(self, payload: Payload) -> bool:
        """Whether the try fails and goes to the retry topic: another one may not."""
        return digest(payload["id"], str(self.attempts)) % 4 == 0


def _place(record: Record) -> Hop:
    return Hop(record.topic, record.partition, record.offset, topic_id=record.topic_id)


def _hop(
    record: Record, passage: Passage, *, index: int | None = None, rekeyed: bool = False, transparent: bool = False
) -> Hop:
    return Hop(
        record.topic,
        record.partition,
        record.offset,
        via=passage.name,
        index=index,
        rekeyed=rekeyed,
        transparent=transparent,
        topic_id="" if passage.foreign else record.topic_id,
    )
