"""Messages of a consumer group's member, taken as pointers: without a Python object for each.

The member is a confluent-kafka `Consumer`, which joins the group, is told of rebalances and commits. The messages of its
partitions are forwarded to a queue of librdkafka that is read here, so that no callback runs while it is read.
"""

import ctypes
import time
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from confluent_kafka import Consumer, KafkaError

from aggregations.columns import message_kernels
from jobs.republish.columns import At, Columns
from jobs.republish.partition import Consumed
from persistence.kafka import librdkafka
from persistence.kafka.array_producer import Spans
from persistence.kafka.headers import name_of

_MOST_BYTES = 2**31 - 1
"""Of a column."""
_FORWARD_SECONDS = 1.0
"""Between two times that partitions are forwarded."""


class PointedMessage:
    """A message at an address, with the methods of confluent-kafka's `Message`."""

    def __init__(self, address: int) -> None:
        self._library = librdkafka.functions()
        self._address = address
        self._message = librdkafka.Message.from_address(address)

    def __len__(self) -> int:
        return int(self._message.size)

    def error(self) -> KafkaError | None:
        return self._message.error if self._message.err else None

    def topic(self) -> str:
        return _topic_name(self._message.topic)

    def partition(self) -> int:
        return int(self._message.partition)

    def offset(self) -> int:
        return int(self._message.offset)

    def key(self) -> bytes | None:
        return _bytes(self._message.key, self._message.key_size)

    def value(self) -> bytes | None:
        return _bytes(self._message.payload, self._message.size)

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        library, found = self._library, ctypes.c_void_p()
        if library.rd_kafka_message_headers(self._address, ctypes.byref(found)):
            return None
        pairs = []
        name, at, size = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_size_t()
        for number in range(library.rd_kafka_header_cnt(found)):
            library.rd_kafka_header_get_all(found, number, *map(ctypes.byref, (name, at, size)))
            pairs.append((name_of(name.value or b""), _bytes(at.value, size.value)))
        return pairs

    def timestamp(self) -> tuple[int, int]:
        kind = ctypes.c_int()
        time = self._library.rd_kafka_message_timestamp(self._address, ctypes.byref(kind))
        return kind.value, time

    def leader_epoch(self) -> int | None:
        found: int = self._library.rd_kafka_message_leader_epoch(self._address)
        return None if found < 0 else found


class Pointers(Sequence[Consumed]):
    """Messages that were taken together. They are valid until they are given back.

    Args:
        addresses: Their addresses (int64).
    """

    def __init__(self, addresses: npt.NDArray[np.int64]) -> None:
        self._messages = addresses

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, place: int) -> Consumed: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Consumed]: ...
    def __getitem__(self, place: int | slice) -> Consumed | Sequence[Consumed]:
        if isinstance(place, slice):
            return Pointers(self._messages[place])
        return PointedMessage(int(self._messages[place]))

    def __add__(self, others: "Pointers") -> "Pointers":
        return Pointers(np.concatenate((self._messages, others._messages)))

    @property
    def nbytes(self) -> int:
        """Bytes of their keys and values."""
        return sum(self._sizes[2:])

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int]:
        """How many messages there are, how many have an error, and the bytes of the keys and values of the others."""
        return message_kernels.measured(self._messages, np.iinfo(np.int64).max)

    def columns(self) -> Columns:
        """Those that have a value and no headers, and whose key is not empty, as columns."""
        taken = self._messages
        count, errors, *sizes = self._sizes
        if max(sizes) > _MOST_BYTES:
            return Pointers(taken[:0]).columns()
        rows, failed = count - errors, np.empty(errors, np.int64)
        partitions, offsets, times = np.empty(rows, np.int32), np.empty(rows, np.int64), np.empty(rows, np.int64)
        keys, values = (
            (np.empty(rows + 1, np.int32), np.empty(rows, np.bool_), np.empty(size, np.uint8)) for size in sizes
        )
        topics, epochs, headed = np.empty(rows, np.int64), np.empty(rows, np.int32), np.empty(rows, np.bool_)
        timestamp, leader_epoch, headers = _addresses()
        message_kernels.copied(taken, timestamp, partitions, offsets, times, keys, values, failed)
        message_kernels.described(taken, leader_epoch, headers, topics, epochs, headed)
        at, codes = _numbered(topics, partitions, epochs)
        made = Columns(np.delete(np.arange(count), failed), at, codes, offsets, times, _spans(values), _spans(keys))
        usual = ~headed & (made.values[2] > 0) & (made.keys[2] != 0)
        return made if usual.all() else made.of(usual)


class Pointed:
    """The messages of a consumer's partitions.

    Args:
        consumer: A confluent-kafka `Consumer` of a version whose objects were checked; see `librdkafka.is_known`.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._library = library = librdkafka.functions()
        self._kafka = librdkafka.client_of(consumer)
        self._queue = library.rd_kafka_queue_new(self._kafka)
        self._taken: list[npt.NDArray[np.int64]] = []
        self._places: set[tuple[str, int]] = set()
        self._again = 0.0  # when to forward them again
        # The consumer waits for its messages and queues before it ends, even when the process ends.
        self.close = librdkafka.released(self, _close, library, self._queue, self._taken)

    def split_off(self, topic: str, partition: int) -> None:
        """Take the messages of a partition here instead of from the consumer. To be called before it is assigned."""
        self._places.add((topic, partition))
        self._forward(topic, partition)

    def join(self, topic: str, partition: int) -> None:
        """Leave the messages of a partition to the consumer. To be called when it is revoked."""
        self._places.discard((topic, partition))

    def _forward(self, topic: str, partition: int) -> None:
        library = self._library
        if queue := library.rd_kafka_queue_get_partition(self._kafka, topic.encode(), partition):
            library.rd_kafka_queue_forward(queue, self._queue)
            library.rd_kafka_queue_destroy(queue)

    def take(self, most: int, seconds: float) -> Pointers:
        """Take messages, waiting until there are `most` or the time is over.

        Raises:
            KafkaException: The client cannot be read.
        """
        if time.monotonic() > self._again:
            # librdkafka ends the forwarding of a partition when it stops to fetch it; then its messages would be nobody's.
            self._again = time.monotonic() + _FORWARD_SECONDS
            for place in self._places:
                self._forward(*place)
        messages = np.zeros(most, np.int64)
        self._taken.append(messages)  # first: a signal handler may raise as soon as the function returns
        consume = librdkafka.address(self._library.rd_kafka_consume_batch_queue)
        count = message_kernels.taken(messages, consume, self._queue, round(seconds * 1000))
        librdkafka.check(self._library.rd_kafka_last_error() if count < 0 else 0)
        return Pointers(messages[: max(count, 0)])

    def give_back(self) -> None:
        """Give back what was taken."""
        _give_back(self._taken)


def _give_back(taken: list[npt.NDArray[np.int64]]) -> None:
    destroy = librdkafka.address(librdkafka.functions().rd_kafka_message_destroy)
    for some in taken:
        message_kernels.destroyed(some, destroy)
    taken.clear()


def _close(library: Any, queue: int, taken: list[npt.NDArray[np.int64]]) -> None:
    _give_back(taken)
    library.rd_kafka_queue_destroy(queue)


@cache
def _addresses() -> tuple[int, int, int]:
    library = librdkafka.functions()
    readers = (
        library.rd_kafka_message_timestamp,
        library.rd_kafka_message_leader_epoch,
        library.rd_kafka_message_headers,
    )
    return tuple(map(librdkafka.address, readers))  # type: ignore[return-value]


def _numbered(topics: Any, partitions: Any, epochs: Any) -> tuple[list[At], npt.NDArray[np.int64]]:
    """Topics, partitions and leader epochs, and the number of each message's."""
    columns = (topics, partitions, epochs)
    firsts = np.flatnonzero(np.any([np.diff(one, prepend=one[:1] - 1) != 0 for one in columns], axis=0))
    numbers: dict[tuple[int, int, int], int] = {}
    found = zip(*(one[firsts].tolist() for one in columns), strict=True)
    codes = [numbers.setdefault(one, len(numbers)) for one in found]
    lengths = np.diff(firsts, append=len(topics))
    at = [(_topic_name(topic), partition, None if epoch < 0 else epoch) for topic, partition, epoch in numbers]
    return at, np.repeat(np.array(codes, np.int64), lengths)


def _spans(column: tuple[Any, Any, Any]) -> Spans:
    bounds, valid, data = column
    return data, bounds[:-1].astype(np.int64), np.where(valid, np.diff(bounds), np.int64(-1))


def _topic_name(topic: int | None) -> str:
    return librdkafka.functions().rd_kafka_topic_name(topic).decode() if topic else ""


def _bytes(at: int | None, size: int) -> bytes | None:
    return None if at is None else ctypes.string_at(at, size)
