"""A producer through librdkafka's C API, which also takes records from arrays, without a Python object for each.

It has those methods of confluent-kafka's `Producer` that `AcknowledgedProducer` uses.
"""

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError, KafkaException

from persistence.kafka import librdkafka
from persistence.kafka.librdkafka import text_of

Spans: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Byte strings: a buffer, and where each begins in it and how long it is; a length of -1 for none."""

_REPORTS, _ERRORS = 0x1, 0x8
"""`RD_KAFKA_EVENT_DR` and `RD_KAFKA_EVENT_ERROR`."""
_BY_KEY: Final = -1
_COPY: Final = 0x2
_QUEUES: Final = 0x1 | 0x2
"""What `purge` drops: records in the queue and in flight."""
_WORDS: Final = ctypes.sizeof(librdkafka.Message) // 8
_PAYLOAD, _KEY = 3, 5
"""Words of a message that have an address; the next one has the size."""
_ERROR: Final = 0xFFFFFFFF
_SLICE_SECONDS: Final = 0.1
"""Between two looks at the reports while it waits: a record that failed waits until its report is read."""
_TEXT_BYTES: Final = 512


class ArrayProducer:
    """A producer, used by one thread.

    Args:
        config: Settings as for confluent-kafka's `Producer`, with `on_delivery`, which is called with failures only, and
            optionally `error_cb`.

    Raises:
        KafkaException: A setting is invalid.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._library = library = librdkafka.functions()
        self._on_failure: Callable[[KafkaError, Report], None] = config["on_delivery"]
        self._on_error: Callable[[KafkaError], None] = config.get("error_cb", lambda error: None)
        given = {name: value for name, value in config.items() if name not in ("on_delivery", "error_cb")}
        given["delivery.report.only.error"] = True
        self._kafka = librdkafka.client(librdkafka.PRODUCER, given, _REPORTS | _ERRORS)
        self._logs = librdkafka.Logs(self._kafka, config["logger"])
        self._queue = library.rd_kafka_queue_get_main(self._kafka)
        self._topics: dict[str, int] = {}
        librdkafka.released(self, _release, library, self._kafka, (self._queue, self._logs.queue), self._topics)

    def __len__(self) -> int:
        """Records and reports that wait."""
        return int(self._library.rd_kafka_outq_len(self._kafka))

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = _BY_KEY,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Queue a record.

        Raises:
            BufferError: The queue is full.
            KafkaException: The record cannot be sent.
        """
        name, pairs = topic.encode(), [(name.encode(), text) for name, text in headers]
        given = (_Given * (5 + len(pairs)))(
            _Given(_TOPIC, _Value(text=name)),
            _Given(_PARTITION, _Value(number=partition)),
            _Given(_VALUE, _Value(data=_Data(value, len(value or b"")))),
            _Given(_KEY_OF, _Value(data=_Data(key, len(key or b"")))),
            _Given(_FLAGS, _Value(number=_COPY)),
            *(_Given(_HEADER, _Value(header=_Header(name, text, len(text or b"")))) for name, text in pairs),
        )
        error = self._library.rd_kafka_produceva(self._kafka, given, len(given))
        if error:
            found = KafkaError(
                self._library.rd_kafka_error_code(error), text_of(self._library.rd_kafka_error_string(error))
            )
            self._library.rd_kafka_error_destroy(error)
            if found.code() == KafkaError._QUEUE_FULL:
                raise BufferError(found.str())
            raise KafkaException(found)

    def produce_arrays(self, topic: str, values: Spans, keys: Spans) -> None:
        """Queue records without headers, in order.

        Raises:
            KafkaException: A record cannot be sent; some others may be queued.
        """
        count = len(values[1])
        messages = np.zeros((count, _WORDS), np.int64)
        _place(messages, _PAYLOAD, values)
        _place(messages, _KEY, keys)
        where, at = self._topic(topic), messages.ctypes.data
        if self._library.rd_kafka_produce_batch(where, _BY_KEY, _COPY, at, count) < count:
            codes = (messages[:, 0] & _ERROR).astype(np.uint32).view(np.int32)
            raise KafkaException(KafkaError(int(codes[codes != 0][0])))

    def produce_batch(self, topic: str, messages: Sequence[Mapping[str, bytes | None]]) -> int:
        """Queue records without headers, in order; return their number.

        Raises:
            KafkaException: A record cannot be sent; some others may be queued.
        """
        values, keys = (spans_of([one.get(name) for one in messages]) for name in ("value", "key"))
        self.produce_arrays(topic, values, keys)
        return len(messages)

    def poll(self, seconds: float = 0) -> int:
        """Read the reports so far; it does not wait.

        Raises:
            KafkaException: The client has failed and can no longer be used.
        """
        self._logs.pass_on()
        library, events = self._library, 0
        while event := library.rd_kafka_queue_poll(self._queue, 0):
            events += 1
            try:
                self._read(event, library.rd_kafka_event_type(event))
            finally:
                library.rd_kafka_event_destroy(event)
        return events

    def flush(self, seconds: float) -> int:
        """Wait until no record waits, or the time is over; return how many records and reports wait.

        Raises:
            KafkaException: The client has failed and can no longer be used.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(min(deadline - time.monotonic(), _SLICE_SECONDS), 0)
            self._library.rd_kafka_flush(self._kafka, math.ceil(left * 1000))
            self.poll()
            if not (waiting := len(self)) or time.monotonic() >= deadline:
                return waiting

    def purge(self) -> None:
        """Drop all records that wait."""
        self._library.rd_kafka_purge(self._kafka, _QUEUES)

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            if not (made := self._library.rd_kafka_topic_new(self._kafka, name.encode(), None)):
                raise KafkaException(KafkaError(self._library.rd_kafka_last_error()))
            self._topics[name] = made
        return self._topics[name]

    def _read(self, event: int, kind: int) -> None:
        library = self._library
        if kind == _REPORTS:
            while address := library.rd_kafka_event_message_next(event):
                message = librdkafka.Message.from_address(address)
                if message.err:
                    topic = text_of(library.rd_kafka_topic_name(message.topic))
                    self._on_failure(KafkaError(message.err), Report(topic))
        elif kind == _ERRORS:
            code = library.rd_kafka_event_error(event)
            error = KafkaError(code, text_of(library.rd_kafka_event_error_string(event)))
            if code != KafkaError._FATAL:
                self._on_error(error)
                return
            text = ctypes.create_string_buffer(_TEXT_BYTES)
            code = library.rd_kafka_fatal_error(self._kafka, text, _TEXT_BYTES)
            raise KafkaException(KafkaError(code, text_of(text.value), True))


class Report:
    """The report of a record that was not delivered."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def topic(self) -> str:
        """Its topic."""
        return self._topic


class _Data(ctypes.Structure):
    _fields_ = (("at", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("at", ctypes.c_char_p), ("size", ctypes.c_ssize_t))


class _Value(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int32),
        ("data", _Data),
        ("header", _Header),
        ("room", ctypes.c_char * 64),
    )


class _Given(ctypes.Structure):
    """`rd_kafka_vu_t`: one argument of `rd_kafka_produceva`."""

    _fields_ = (("kind", ctypes.c_int), ("value", _Value))


_TOPIC, _PARTITION, _VALUE, _KEY_OF, _FLAGS, _HEADER = 1, 3, 4, 5, 7, 9
"""Kinds of arguments: `RD_KAFKA_VTYPE_...`."""


def spans_of(texts: Sequence[bytes | None]) -> Spans:
    """Byte strings as spans."""
    lengths = np.fromiter((-1 if text is None else len(text) for text in texts), np.int64, len(texts))
    sizes = np.maximum(lengths, 0)
    return np.frombuffer(b"".join(filter(None, texts)), np.uint8), np.cumsum(sizes) - sizes, lengths


def texts_of(spans: Spans) -> list[bytes | None]:
    """Spans as byte strings."""
    data = spans[0].tobytes()
    places = zip(spans[1].tolist(), spans[2].tolist(), strict=True)
    return [None if size < 0 else data[at : at + size] for at, size in places]


def check_spans(*columns: Spans) -> None:
    """Check that columns may be read at their addresses.

    Raises:
        ValueError: They may not.
    """
    count = len(columns[0][1])
    for data, starts, sizes in columns:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise ValueError("the buffer is not a contiguous array of uint8")
        if not all(one.dtype == np.int64 and one.shape == (count,) for one in (starts, sizes)):
            raise ValueError(f"the starts and lengths are not arrays of {count} int64")
        known = sizes >= 0
        if not (known <= (starts >= 0)).all() or not (known <= (starts <= len(data) - sizes)).all():
            raise ValueError("a byte string is not within the buffer")


def sizes_of(spans: Spans) -> npt.NDArray[np.int64]:
    """Bytes of each byte string; 0 for none."""
    return np.maximum(spans[2], 0)


def _place(messages: npt.NDArray[np.int64], column: int, spans: Spans) -> None:
    """Write addresses and sizes; an empty byte string has an address, too."""
    messages[:, column] = np.where(spans[2] < 0, 0, spans[0].ctypes.data + spans[1])
    messages[:, column + 1] = sizes_of(spans)


def _release(library: Any, kafka: int, queues: Sequence[int], topics: Mapping[str, int]) -> None:
    for topic in topics.values():
        library.rd_kafka_topic_destroy(topic)
    for queue in queues:
        library.rd_kafka_queue_destroy(queue)
    library.rd_kafka_destroy(kafka)
