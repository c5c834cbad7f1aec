"""Takes messages from a Kafka consumer as columns, through librdkafka's C API.

`Consumer.consume()` makes a Python object of each message, which costs more than to fetch it. The C API returns
pointers to messages, from which compiled code fills columns. It is used with those versions of librdkafka whose layout
of a message was checked; see `librdkafka.is_known`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from aggregations.columns import header_kernels, message_kernels
from aggregations.columns.arrays import arrow, validity
from aggregations.engine.message_objects import HEADERS, Event
from persistence.kafka import librdkafka
from persistence.kafka.headers import name_of

_COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp", "headers")


class Pointers:
    """Takes messages through librdkafka's C API, with a client of its own.

    A client of confluent-kafka cannot be used: its callbacks expect to be called within calls of confluent-kafka.

    Args:
        settings: Settings as for confluent-kafka: names and values of librdkafka, and a `logger` for log lines.
        most_bytes: Bytes of keys and values, and of headers, after which a call returns no more messages.
        headers: Read headers, too.

    Raises:
        KafkaException: A setting is invalid.
    """

    def __init__(self, settings: dict[str, Any], most_bytes: int, *, headers: bool = False) -> None:
        self._library = library = librdkafka.functions()
        self._most_bytes = most_bytes
        self._kafka = librdkafka.client(librdkafka.CONSUMER, settings)
        self._logs = librdkafka.Logs(self._kafka, settings["logger"])
        self._queue = library.rd_kafka_queue_get_consumer(self._kafka)
        self._consume = librdkafka.address(library.rd_kafka_consume_batch_queue)
        self._timestamp = librdkafka.address(library.rd_kafka_message_timestamp)
        readers = (library.rd_kafka_message_headers, library.rd_kafka_header_cnt, library.rd_kafka_header_get_all)
        self._headers = tuple(map(librdkafka.address, readers)) if headers else None
        self._fetched = _Fetched(librdkafka.address(library.rd_kafka_message_destroy))
        # A client waits for its messages and queues before it ends, even when the process ends.
        self._release = librdkafka.released(
            self, _release, library, self._kafka, (self._queue, self._logs.queue), self._fetched
        )

    def take(self, most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        fetched = self._fetched
        if not len(fetched.waiting):
            self._fetch(most, seconds)
        waiting = fetched.waiting[:most]
        count, errors, *sizes = message_kernels.measured(waiting, self._most_bytes)
        if self._headers:
            fewer, *headers = header_kernels.headers_measured(waiting[:count], self._most_bytes, self._headers)
            if fewer < count:
                count, errors, *sizes = message_kernels.measured(waiting[:fewer], self._most_bytes)
            sizes += headers
        try:
            return self._columns(waiting[:count], count - errors, errors, sizes)
        finally:
            fetched.give_back(count)

    def assign(self, topic: str, starts: Mapping[int, int]) -> None:
        self._fetched.give_back(len(self._fetched.waiting))
        librdkafka.look_up_leaders(self._kafka, topic)
        with librdkafka.partitions(topic, starts) as some:
            librdkafka.check(self._library.rd_kafka_assign(self._kafka, some))

    def unassign(self) -> None:
        self._fetched.give_back(len(self._fetched.waiting))
        librdkafka.check(self._library.rd_kafka_assign(self._kafka, None))

    def pause(self, topic: str, partitions: Collection[int]) -> None:
        with librdkafka.partitions(topic, dict.fromkeys(partitions)) as some:
            librdkafka.check(self._library.rd_kafka_pause_partitions(self._kafka, some))

    def resume(self, topic: str, partitions: Collection[int]) -> None:
        with librdkafka.partitions(topic, dict.fromkeys(partitions)) as some:
            librdkafka.check(self._library.rd_kafka_resume_partitions(self._kafka, some))

    def close(self) -> None:
        if self._release.alive:
            self._logs.pass_on()
            self._release()

    def _fetch(self, most: int, seconds: float) -> None:
        self._logs.pass_on()
        # First: a signal handler may raise as soon as the function returns, and what it took is given back all the same.
        self._fetched.waiting = messages = np.zeros(most, np.int64)
        count = message_kernels.taken(messages, self._consume, self._queue, round(seconds * 1000))
        self._fetched.waiting = messages[: max(count, 0)]
        librdkafka.check(self._library.rd_kafka_last_error() if count < 0 else 0)

    def _columns(self, taken: Any, rows: int, errors: int, sizes: Sequence[int]) -> tuple[pa.RecordBatch, list[Event]]:
        partitions, failed = np.empty(rows, np.int32), np.empty(errors, np.int64)
        offsets, timestamps = np.empty(rows, np.int64), np.empty(rows, np.int64)
        key, value = (_buffers(rows, size) for size in sizes[:2])
        message_kernels.copied(taken, self._timestamp, partitions, offsets, timestamps, key, value, failed)
        arrays = [
            _binary(*key),
            _binary(*value),
            arrow(partitions),
            arrow(offsets),
            arrow(timestamps).view(pa.timestamp("ms")),
        ]
        if self._headers:
            arrays.append(_headers(taken, self._headers, rows, *sizes[2:]))
        names = _COLUMNS[: len(arrays)]
        return pa.RecordBatch.from_arrays(arrays, names=names), [self._event(taken[i]) for i in failed.tolist()]

    def _event(self, address: int) -> Event:
        message = librdkafka.Message.from_address(int(address))
        partition, offset = message.partition, message.offset
        return Event(message.error, None if partition < 0 else partition, None if offset < 0 else offset)


class _Fetched:
    """Messages of a client: `waiting` has the addresses of those that were not given back, and 0 in other places."""

    def __init__(self, destroy: int) -> None:
        self._destroy = destroy
        self.waiting = np.empty(0, np.int64)

    def give_back(self, count: int) -> None:
        message_kernels.destroyed(self.waiting[:count], self._destroy)
        self.waiting = self.waiting[count:]


def _release(library: Any, kafka: int, queues: Sequence[int], fetched: _Fetched) -> None:
    fetched.give_back(len(fetched.waiting))
    for queue in queues:
        library.rd_kafka_queue_destroy(queue)  # what is logged from now on is dropped
    library.rd_kafka_destroy(kafka)


def _headers(
    messages: Any, functions: tuple[int, ...], rows: int, headers: int, name_bytes: int, value_bytes: int
) -> pa.ListArray:
    """The headers of messages, of which `rows` have no error, as a column."""
    bounds, name, value = np.empty(rows + 1, np.int32), _buffers(headers, name_bytes), _buffers(headers, value_bytes)
    header_kernels.headers_copied(messages, functions, bounds, name, value)
    pairs = pa.StructArray.from_arrays([texts(_binary(*name)), _binary(*value)], names=["key", "value"])
    return pa.ListArray.from_arrays(arrow(bounds), pairs, type=HEADERS)


def texts(names: pa.BinaryArray) -> pa.StringArray:
    """Names of headers; one that is not UTF-8, from a client that does not check names, is that of `headers_of`."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(map(name_of, names.to_pylist()), pa.string())


def _buffers(rows: int, size: int) -> tuple[Any, Any, Any]:
    """Arrays for bounds, validity and data of a column of bytes."""
    return np.empty(rows + 1, np.int32), np.empty(rows, np.bool_), np.empty(size, np.uint8)


def _binary(bounds: Any, valid: Any, data: Any) -> pa.BinaryArray:
    """An array of these buffers, without copies."""
    return pa.Array.from_buffers(pa.binary(), len(valid), [validity(valid), pa.py_buffer(bounds), pa.py_buffer(data)])
