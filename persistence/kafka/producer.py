"""A producer whose `flush` means: every record is in the log, or an error is raised.

Placement is the Java client's (murmur2 of the key; at random without one), so keys land where Java producers put them.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, NotRequired, Self, TypedDict

from confluent_kafka import KafkaError, KafkaException, Producer

from envelope.headers import Headers
from persistence.kafka import librdkafka
from persistence.kafka.errors import (
    UNREACHABLE_REMEDY,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    broker_error,
    connection_trouble,
    unreachable,
)
from persistence.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from persistence.kafka.array_producer import Spans

BY_KEY: Final = -1
"""Used instead of a partition number: the key decides."""
_QUEUE_MESSAGES: Final = 500_000
_QUEUE_KBYTES: Final = 256 * 1024
# A topic sets the limit of its records; one that is larger than this would not fit into the queue.
_MESSAGE_BYTES: Final = _QUEUE_KBYTES * 1024 // 2
_SLICE_SECONDS: Final = 0.5  # flush in slices: a signal handler runs between two of them


class Message(TypedDict):
    """One record in the form of `Producer.produce_batch`; without headers it has no `headers`."""

    value: bytes | None
    key: NotRequired[bytes | None]
    headers: NotRequired[Headers]


# Exactness depends on these. Readers recognise copies by order, so a record must arrive in its partition after all
# records sent to it before. librdkafka does not guarantee this by default: it drops a record that fails permanently or
# too often, or waits longer than message.timeout.ms, and sends those after it (its pull request 2188; issue 4134).
_EXACT: Final[dict[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,  # never: `flush` times out instead, and drops the waiting records
    "retries": 2**31 - 1,
    # A broker that no longer knows a producer id, or does not know it yet, accepts any first sequence number: it could
    # accept the second of two requests in flight as the first, and librdkafka would count both as acknowledged.
    "max.in.flight.requests.per.connection": 1,
    "partitioner": "murmur2_random",
}
_ALIASES: Final = ("delivery.timeout.ms", "message.send.max.retries", "max.in.flight")
_OVERHEAD_BYTES: Final = 256  # of a batch around one record, with room to spare
_BATCH_BYTES: Final = 1_000_000  # librdkafka's default of batch.size
COMMAND_BATCH_BYTES: Final = 16_384
"""Bytes of a batch in commands that write to topics of any limit: the Java client's default."""
_DROPPED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


class AcknowledgedProducer:
    """Idempotent producer that waits for all in-sync replicas and reports every failed delivery. Used by one thread.

    Records of one partition keep the order in which they were sent, and none is sent after an earlier one has failed.
    `send` and `send_many` return when the records are queued; they block while more is in flight than the queue may
    hold. After an error the waiting records are dropped, and none counts as delivered: send again all records since
    the last `flush`.

    Args:
        settings: Settings of the Kafka cluster. Their `message.timeout.ms` replaces `delivery_timeout`; 0 is no limit.
        delivery_timeout: Seconds without any acknowledgement after which the waiting records count as failed.
        arrays: Many records will be in arrays (`send_arrays`): use librdkafka's C API for all, if its version is known.
        options: More librdkafka settings (underscores stand for dots), for example `compression_type="zstd"`.

    Raises:
        BrokerRefused: The client does not know a setting.
    """

    def __init__(
        self, settings: KafkaSettings, *, delivery_timeout: float = 120, arrays: bool = False, **options: Any
    ) -> None:
        config = settings.client(
            on_error=self._on_error,
            **{
                "linger_ms": 5,
                "compression_type": "lz4",
                "message_timeout_ms": int(delivery_timeout * 1000),
                "queue_buffering_max_messages": _QUEUE_MESSAGES,
                "queue_buffering_max_kbytes": _QUEUE_KBYTES,
                "message_max_bytes": _MESSAGE_BYTES,
            }
            | options,
        )
        timeout = "delivery.timeout.ms" if "delivery.timeout.ms" in config else "message.timeout.ms"
        self._delivery_timeout = _number(config, timeout) / 1000 or math.inf
        # Exactness depends on these: settings must not change them.
        config = {name: value for name, value in config.items() if name not in _ALIASES} | _EXACT
        # confluent-kafka implements this option itself: delivery reports of success then cost no Python call.
        config |= {"delivery.report.only.error": True, "on_delivery": self._on_delivery}
        # Half of the queue: then librdkafka never rejects one record of a batch and accepts a later one.
        self._most_messages = _number(config, "queue.buffering.max.messages") // 2
        self._most_bytes = _number(config, "queue.buffering.max.kbytes") * 1024 // 2
        self._most_record = _number(config, "message.max.bytes") - _OVERHEAD_BYTES
        self._messages = self._bytes = 0
        self._topics: set[str] = set()
        self._failure: BrokerError | None = None
        self._connection = ""
        self._config = config
        self._arrays = arrays and librdkafka.is_known()
        self._connect()

    def _connect(self) -> None:
        try:
            self._producer: Any = self._client()
        except KafkaException as error:
            raise broker_error(error.args[0], "setting up the producer") from error

    def _client(self) -> Any:
        if not self._arrays:
            return Producer(self._config)
        from persistence.kafka.array_producer import ArrayProducer  # it imports numpy

        return ArrayProducer(self._config)

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int = BY_KEY,
    ) -> None:
        """Queue one record.

        Raises:
            BrokerError: The record cannot be sent, or an earlier record has failed.
        """
        size = len(value or b"") + len(key or b"") + sum(len(name) + len(text or b"") for name, text in headers)
        while True:
            self._reserve(topic, 1, size)
            try:
                self._producer.produce(topic, value, key, partition, headers=list(headers))
                return
            except BufferError:
                self.flush()
            except KafkaException as error:
                self._fail(broker_error(error.args[0], f"producing to {topic}"))

    def send_many(self, topic: str, messages: list[Message]) -> None:
        """Queue records, in order; if none has headers, at half of the cost of as many calls of `send`.

        Raises:
            BrokerError: A record cannot be sent, or an earlier record has failed.
        """
        if any("headers" in message for message in messages):  # a batch has none
            for message in messages:
                self.send(topic, message["value"], message.get("key"), message.get("headers", ()))
            return
        self.send_plain(topic, [one["value"] for one in messages], [one.get("key") for one in messages])

    def send_plain(self, topic: str, values: Sequence[bytes | None], keys: Sequence[bytes | None]) -> None:
        """Queue records without headers, in order, at a third of the cost of as many calls of `send`.

        Raises:
            BrokerError: A record cannot be sent, or an earlier record has failed.
        """
        value_sizes, key_sizes = (list(map(len, filter(None, several))) for several in (values, keys))
        size = sum(value_sizes) + sum(key_sizes)
        too_many = len(values) > self._most_messages or size > self._most_bytes
        if too_many or max(value_sizes, default=0) + max(key_sizes, default=0) > self._most_record:
            # Of a batch, librdkafka rejects some records and sends the others immediately.
            for value, key in zip(values, keys, strict=True):
                self.send(topic, value, key)
            return
        messages: list[dict[str, Any]]
        messages = [{"value": value, "key": key} for value, key in zip(values, keys, strict=True)]
        self._reserve(topic, len(messages), size)
        try:
            queued = self._producer.produce_batch(topic, messages)
        except KafkaException as error:
            self._fail(broker_error(error.args[0], f"producing to {topic}"))
        if queued != len(messages):
            refused = next(message["_error"] for message in messages if "_error" in message)
            self._fail(broker_error(refused, f"producing to {topic}"))

    def send_arrays(self, topic: str, values: "Spans", keys: "Spans") -> None:
        """Queue records without headers, in order.

        Args:
            topic: The topic.
            values: Values: a buffer (uint8), and where each begins in it and how many bytes it has (int64); -1 for none.
            keys: The same of the keys.

        Raises:
            BrokerError: A record cannot be sent, or an earlier record has failed.
            ValueError: The arrays are of other types or numbers, or name bytes that the buffer does not have.
        """
        from persistence.kafka.array_producer import check_spans, sizes_of, texts_of  # it imports numpy

        check_spans(values, keys)
        count, (value_sizes, key_sizes) = len(values[1]), (sizes_of(values), sizes_of(keys))
        size = int(value_sizes.sum() + key_sizes.sum())
        fits = int(value_sizes.max(initial=0) + key_sizes.max(initial=0)) <= self._most_record
        if not self._arrays or not fits or count > self._most_messages or size > self._most_bytes:
            self.send_plain(topic, texts_of(values), texts_of(keys))
            return
        self._reserve(topic, count, size)
        try:
            self._producer.produce_arrays(topic, values, keys)
        except KafkaException as error:
            self._fail(broker_error(error.args[0], f"producing to {topic}"))

    def flush(self, timeout: float | None = None) -> None:
        """Return when every record sent so far is acknowledged by all in-sync replicas.

        Args:
            timeout: Seconds to wait, plus or minus half a second; records that still wait are dropped. None to wait as
                long as acknowledgements arrive, and the delivery timeout after the last one.

        Raises:
            BrokerError: At least one record was not acknowledged; the text names its topic.
        """
        patience = self._delivery_timeout if timeout is None else timeout
        deadline, fewest = time.monotonic() + patience, math.inf
        while left := self._served(lambda: self._producer.flush(_SLICE_SECONDS)):
            self._check()
            if timeout is None and left < fewest:
                deadline, fewest = time.monotonic() + patience, left
            if time.monotonic() > deadline:
                hint = f" ({self._connection})" if self._connection else ""
                what = f"{self._doing}: no acknowledgement within {patience:g} s{hint}"
                self._fail(unreachable(what, self._connection))
        self._check()
        self._forget()

    def is_settled(self) -> bool:
        """Whether every record sent so far is acknowledged; it does not wait.

        Raises:
            BrokerError: As in `flush`.
        """
        left = self._served(lambda: self._producer.flush(0))
        self._check()
        if not left:
            self._forget()
        return not left

    def close(self) -> None:
        """Drop records that are not sent yet; a second call does nothing."""
        self._producer.purge()
        with suppress(KafkaException, SystemError):
            self._producer.flush(_SLICE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reserve(self, topic: str, messages: int, size: int) -> None:
        """Back-pressure: wait until the queue is empty before it could overflow. After a failure nothing is sent."""
        if self._messages + messages > self._most_messages or self._bytes + size > self._most_bytes:
            self.flush()
        self._served(lambda: self._producer.poll(0))
        self._check()
        self._messages += messages
        self._bytes += size
        self._topics.add(topic)

    def _served(self, serve: Callable[[], int]) -> int:
        """Process delivery reports."""
        try:
            return serve()
        except (KafkaException, SystemError) as error:
            # It raises only fatal errors. A delivery report during such an error turns it into CPython's SystemError.
            fatal = error.__cause__ if isinstance(error, SystemError) else error
            if fatal is None:  # seen while a broker refused records
                what = f"{self._doing}: the client library failed without a reason"
                self._fail(BrokerUnavailable(what, UNREACHABLE_REMEDY))
            if not isinstance(fatal, KafkaException):
                raise
            self._fail(broker_error(fatal.args[0], self._doing))

    @property
    def _doing(self) -> str:
        return f"producing to {', '.join(sorted(self._topics))}"

    def _forget(self) -> None:
        self._messages = self._bytes = 0
        self._topics.clear()

    def _check(self) -> None:
        if self._failure:
            self._fail(self._failure)

    def _fail(self, failure: BrokerError) -> NoReturn:
        """Raise the error, or an earlier one, and replace the client. Until then, every failure is kept."""
        self._failure = self._failure or failure
        self.close()  # waiting records must not arrive: they were sent after the failed record
        self._connect()
        failure, again = self._failure, self._messages
        self._failure = None
        self._forget()
        raise type(failure)(f"{failure.what} ({again} records must be sent again)", failure.remedy)

    def _on_delivery(self, error: KafkaError | None, report: Any) -> None:
        if error and error.code() not in _DROPPED:
            self._failure = self._failure or broker_error(error, f"producing to {report.topic()}", self._connection)

    def _on_error(self, error: KafkaError) -> None:
        """Note the error: librdkafka restores connections by itself."""
        self._connection = connection_trouble(error, self._connection)


def batch_bytes(largest: Iterable[int]) -> int:
    """Bytes of a producer's batch: librdkafka's default, or what the topic takes that takes least.

    Args:
        largest: Largest record that each topic takes, in bytes: a batch of several records must not be larger either.
    """
    return max(min([_BATCH_BYTES, *largest]), 1)


def _number(config: Mapping[str, Any], name: str) -> int:
    """A setting that is a whole number.

    Raises:
        BrokerRefused: It is not a whole number.
    """
    try:
        return int(config[name])
    except ValueError:
        raise BrokerRefused(f"setting up the producer: {name} is not an integer", "Correct the setting") from None
