"""The demo's topics without a broker."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator

from aggregations.definition.element import Record
from envelope import EnvelopeError
from envelope.hops import HopWriter
from jobs.demo.flow import LEGS, RAW, VIA, legs
from jobs.republish.processor import Processor
from jobs.republish.record import InputRecord as Incoming
from jobs.republish.source import InputTopics
from persistence.kafka import Message

PARTITIONS = 4


def placed(messages: Iterable[Message]) -> Iterator[tuple[int, int, Message]]:
    """Partition, offset and message, as a topic would have them."""
    ends = [0] * PARTITIONS
    for message in messages:
        partition = zlib.crc32(message.get("key") or b"") % PARTITIONS
        yield partition, ends[partition], message
        ends[partition] += 1


def republished(messages: list[Message], refused: Counter[str] | None = None) -> list[Message]:
    """What the republisher makes of flights.raw, in one go."""
    processor = Processor(legs, via=VIA, source=InputTopics.of(RAW, "json"), targets={LEGS: 1_000_000})
    hops = [HopWriter(topic=RAW, partition=partition, via=VIA) for partition in range(PARTITIONS)]
    out: list[Message] = []
    for partition, offset, message in placed(messages):
        record = Incoming(RAW, partition, offset, message.get("key"), message["value"], timestamp_ms=0)
        try:
            made = processor.process(record, hops[partition])
        except EnvelopeError as error:
            assert refused is not None, error
            refused[error.reason.value] += 1
            continue
        out += [Message(key=one.key, value=one.value) for one in made]
    return out


def records(messages: Iterable[Message]) -> list[Record]:
    """flights.legs, partition by partition."""
    found = [
        Record(LEGS, partition, offset, message.get("key"), message["value"])
        for partition, offset, message in placed(messages)
    ]
    return sorted(found, key=lambda record: record.node.partition)


def batches(found: list[Record], size: int) -> Iterator[list[Record]]:
    """Every partition in order, a piece of each in every batch."""
    by_partition = [[record for record in found if record.partition == partition] for partition in range(PARTITIONS)]
    while any(by_partition):
        yield [record for rest in by_partition for record in rest[:size]]
        by_partition = [rest[size:] for rest in by_partition]
