"""Reads blocks of a topic: to find the last messages of a producer, from the end backwards, in blocks that grow."""

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaError, TopicPartition

from envelope import Envelope, EnvelopeError, decode
from envelope import envelope_pb2 as pb
from envelope.limits import DEFAULT_LIMITS, Limits
from persistence.kafka.errors import BrokerRefused, BrokerUnavailable, broker_error, connection_trouble
from persistence.kafka.reading import assign
from persistence.kafka.settings import KafkaSettings
from persistence.kafka.topics import Topics

_BLOCK: Final = 1_000  # offsets of the first block of each partition ...
_GROWTH: Final = 8  # ... and how much larger the next one is
_MOST_READ: Final = 10_000
_WAIT_SECONDS: Final = 0.2


@dataclass(slots=True)
class Tail:
    """The last messages of a producer in a topic.

    Attributes:
        epoch: Highest epoch of the messages found; -1 if there are none, or they have no epoch.
        last: Highest sequence id by partition.
        ends: End of each partition: everything before it was considered.
        lost: Partitions in which no message was found, and whose older records no longer exist.
    """

    epoch: int = -1
    last: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)


def read_tail(
    settings: KafkaSettings,
    topic: str,
    producer: str,
    *,
    since: Mapping[int, int],
    limits: Limits = DEFAULT_LIMITS,
    timeout: float = 120,
) -> Tail:
    """Find the last messages of a producer in each partition.

    Messages of open transactions are waited for, so that the result is final unless the producer sends more.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The topic.
        producer: Name of the producer.
        since: Offset by partition at which the search may stop.
        limits: Limits of its envelopes.
        timeout: Seconds without a record until the search is given up.

    Raises:
        BrokerUnavailable: The ends of the partitions were not reached in time.
        BrokerRefused: The topic may not be read.
    """
    topics = Topics(settings)
    lows = {partition: marks.low for (_, partition), marks in topics.marks([topic]).items()}
    found = Tail(ends={partition: end for (_, partition), end in topics.ends([topic]).items()})
    left, size = dict(found.ends), _BLOCK
    name = pb.Envelope(producer=producer).SerializeToString()  # most records can be excluded without parsing them
    with BlockReader(settings, topic, timeout) as reader:
        while left:
            floors = {partition: max(lows[partition], since.get(partition, 0)) for partition in left}
            blocks = {partition: (max(floors[partition], stop - size), stop) for partition, stop in left.items()}
            matches = dict[int, tuple[int, int]]()
            for message in reader.read(blocks):
                value = message.value()
                ids = _ids(value, producer, limits) if value is not None and name in value else None
                if ids is not None:
                    last, epoch = matches.get(message.partition(), (-1, -1))
                    matches[message.partition()] = max(last, ids[0]), max(epoch, ids[1])
            for partition, (start, _) in blocks.items():
                if partition in matches:
                    found.last[partition], epoch = matches[partition]
                    found.epoch = max(found.epoch, epoch)
                elif start > floors[partition]:
                    left[partition] = start
                    continue
                elif lows[partition] > since.get(partition, 0):
                    found.lost.append(partition)
                del left[partition]
            size *= _GROWTH
    return found


def is_stamped(message: Envelope) -> bool:
    """Whether a message has its producer's name and sequence id. In one that was republished, these are the root's."""
    return bool(message.producer) and message.sequence is not None and not message.chain


def stamped(value: bytes | None, limits: Limits = DEFAULT_LIMITS) -> Envelope | None:
    """The envelope in a value, if it has its producer's name and sequence id."""
    if value is None:
        return None
    try:
        message: Envelope = decode(value, limits)
    except EnvelopeError:
        return None
    return message if is_stamped(message) else None


def last_id(message: Envelope) -> int:
    """The last sequence id of a message that has one."""
    assert message.sequence is not None
    return message.sequence if message.last_sequence is None else message.last_sequence


def _ids(value: bytes, producer: str, limits: Limits) -> tuple[int, int] | None:
    """Last sequence id and epoch of a value, if it is this producer's own message."""
    message = stamped(value, limits)
    if message is None or message.producer != producer:
        return None
    return last_id(message), -1 if message.producer_epoch is None else message.producer_epoch


class BlockReader:
    """Reads blocks of a topic to their ends; messages of open transactions are waited for.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The topic.
        timeout: Seconds without a record until reading is given up.
    """

    def __init__(self, settings: KafkaSettings, topic: str, timeout: float = 120) -> None:
        self._topic = topic
        self._timeout = timeout
        self._connection = ""
        config = settings.client(on_error=self._on_error, group_id=f"headwater.tail.{uuid.uuid4().hex}")
        config |= {
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,  # after transaction markers only this event shows the end
        }
        self._consumer = Consumer(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def read(self, blocks: Mapping[int, tuple[int, int]]) -> Iterator[Any]:
        """Yield the messages within blocks of offsets, those of a partition in their order.

        Args:
            blocks: First offset and end by partition.

        Raises:
            BrokerUnavailable: The ends were not reached in time.
            BrokerRefused: The topic may not be read.
        """
        open_ = {partition: stop for partition, (start, stop) in blocks.items() if start < stop}
        if not open_:
            return
        assign(self._consumer, [TopicPartition(self._topic, one, blocks[one][0]) for one in open_])
        deadline = time.monotonic() + self._timeout
        while open_:
            got: list[Any] = self._consumer.consume(_MOST_READ, _WAIT_SECONDS)
            if any(not message.error() for message in got):
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                hint = f" ({self._connection})" if self._connection else ""
                raise BrokerUnavailable(
                    f"reading the end of {self._topic}: no record within {self._timeout:g} s{hint}",
                    "A transaction of another producer may be open: try again when it is over",
                )
            for message in got:
                if self._belongs(message, open_):
                    yield message

    def _belongs(self, message: Any, open_: dict[int, int]) -> bool:
        """Whether a message is in an open block; the block is closed after its last one."""
        partition, offset = message.partition(), message.offset()
        if error := message.error():
            if error.code() == KafkaError._PARTITION_EOF:
                if partition in open_ and offset >= open_[partition]:
                    del open_[partition]
                return False
            problem = broker_error(error, f"reading {self._topic}", self._connection)
            if isinstance(problem, BrokerRefused) and error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise problem
            return False
        if partition not in open_:
            return False
        stop = open_[partition]
        if offset >= stop - 1:
            del open_[partition]
        return bool(offset < stop)

    def _on_error(self, error: KafkaError) -> None:
        self._connection = connection_trouble(error, self._connection)
