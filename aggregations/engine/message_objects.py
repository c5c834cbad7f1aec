"""What takes messages from Kafka, and how confluent-kafka's objects are taken. It compiles nothing."""

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from aggregations.columns.arrays import arrow, binary
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import assign

HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
"""Type of the column `headers`."""


class Event(NamedTuple):
    """What a consumer reports instead of a message.

    Attributes:
        error: The report.
        partition: The partition that it is about; None for none.
        offset: Its offset; None for none.
    """

    error: KafkaError
    partition: int | None
    offset: int | None


class Client(Protocol):
    """A consumer of the partitions that are assigned to it."""

    def take(self, most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        """Take messages, waiting until there are `most` or the time is over.

        Returns:
            Columns `key` and `value` (binary), `partition` (int32), `offset` (int64), `timestamp` (milliseconds) and, if
            the client reads them, `headers` (`HEADERS`), the messages of a partition in ascending order; and the other
            events.

        Raises:
            KafkaException: The client cannot be read.
        """
        ...

    def assign(self, topic: str, starts: Mapping[int, int]) -> None:
        """Assign partitions, with the offsets to begin at, in place of the present ones."""
        ...

    def unassign(self) -> None:
        """Assign no partition."""
        ...

    def pause(self, topic: str, partitions: Collection[int]) -> None:
        """Fetch no more of some partitions, until `resume`."""
        ...

    def resume(self, topic: str, partitions: Collection[int]) -> None:
        """Fetch these partitions again."""
        ...

    def close(self) -> None:
        """Close the consumer."""
        ...


class Objects:
    """Takes messages as objects of confluent-kafka.

    Args:
        settings: Its settings.
        headers: Read headers, too.

    Raises:
        KafkaException: A setting is invalid.
    """

    def __init__(self, settings: dict[str, Any], *, headers: bool = False) -> None:
        self._consumer = Consumer(settings)
        self._headers = headers
        self.close = self._consumer.close
        self.unassign = self._consumer.unassign

    def take(self, most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        messages, events = [], []
        for message in self._consumer.consume(most, seconds):
            if (error := message.error()) is None:
                messages.append(message)
            else:
                events.append(Event(error, message.partition(), message.offset()))
        columns = {
            "key": binary([one.key() for one in messages]),
            "value": binary([one.value() for one in messages]),
            "partition": arrow(np.array([one.partition() for one in messages], np.int32)),
            "offset": arrow(np.array([one.offset() for one in messages], np.int64)),
            "timestamp": arrow(np.array([one.timestamp()[1] for one in messages], np.int64)).view(pa.timestamp("ms")),
        }
        if self._headers:
            columns["headers"] = pa.array(list(map(_headers, messages)), HEADERS)
        return pa.RecordBatch.from_arrays([*columns.values()], names=[*columns]), events

    def assign(self, topic: str, starts: Mapping[int, int]) -> None:
        assign(self._consumer, [TopicPartition(topic, partition, start) for partition, start in starts.items()])

    def pause(self, topic: str, partitions: Collection[int]) -> None:
        self._consumer.pause([TopicPartition(topic, partition) for partition in partitions])

    def resume(self, topic: str, partitions: Collection[int]) -> None:
        self._consumer.resume([TopicPartition(topic, partition) for partition in partitions])


def _headers(message: Message) -> list[dict[str, Any]]:
    return [{"key": name, "value": value} for name, value in headers_of(message)]
