"""A producer whose `flush` means: every record is in the log, or an error is raised.

Placement is the Java client's (murmur2 of the key; at random without one), so keys land where Java producers put them.
"""

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NotRequired, Self, TypeAlias, TypedDict, cast

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Report

from persistence.kafka.errors import (
    BrokerError,
    BrokerRefused,
    broker_error,
    connection_trouble,
    unreachable,
)
from persistence.kafka.settings import KafkaSettings

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

BY_KEY: Final = -1
"""In the place of a partition: the key decides."""
_QUEUE_MESSAGES: Final = 500_000
_QUEUE_KBYTES: Final = 256 * 1024
_SLICE_SECONDS: Final = 0.5  # flush in slices: a signal handler runs between two of them


class Message(TypedDict):
    """One record, shaped as `Producer.produce_batch` takes it; `send_many` takes none with headers."""

    value: bytes | None
    key: NotRequired[bytes | None]
    headers: NotRequired[Headers]


class AcknowledgedProducer:
    """Idempotent producer that waits for every replica in sync and forgets no failed delivery.

    Records to one partition keep the order they were sent in. `send` and `send_many` return when the
    records are queued; they block while more is in flight than the queue may hold. After an
    error nothing may be taken as delivered: send again what was sent since the last `flush`.

    Args:
        settings: Where Kafka is.
        delivery_timeout: Seconds after which a record that nobody acknowledged counts as failed.
        options: More librdkafka settings (underscores stand for dots), for example `compression_type="zstd"`.

    Raises:
        BrokerRefused: A setting that the client does not know.
    """

    def __init__(self, settings: KafkaSettings, *, delivery_timeout: float = 120, **options: Any) -> None:
        config = settings.client(
            on_error=self._on_error,
            **{
                "linger_ms": 5,
                "compression_type": "lz4",
                "message_timeout_ms": int(delivery_timeout * 1000),
                "queue_buffering_max_messages": _QUEUE_MESSAGES,
                "queue_buffering_max_kbytes": _QUEUE_KBYTES,
            }
            | options,
        )
        # What exactness rests on is not for settings to change.
        config |= {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}
        # confluent-kafka keeps this option to itself: reports of success cost no Python call.
        config |= {"delivery.report.only.error": True, "on_delivery": self._on_delivery}
        # Half of the queue: librdkafka then never refuses one record of a batch and takes a later one.
        self._most_messages = int(config["queue.buffering.max.messages"]) // 2
        self._most_bytes = int(config["queue.buffering.max.kbytes"]) * 1024 // 2
        self._messages = self._bytes = 0
        self._failures = 0
        self._failure: BrokerError | None = None
        self._connection = ""
        try:
            self._producer = Producer(config)
        except KafkaException as error:
            raise broker_error(error.args[0], "setting up the producer") from error

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
            BrokerError: The record cannot be sent, or one sent before has failed.
        """
        self._reserve(1, _size(value, key) + sum(len(name) + len(text or b"") for name, text in headers))
        while True:
            try:
                return self._producer.produce(topic, value, key, partition, headers=list(headers))
            except BufferError:
                self._producer.poll(_SLICE_SECONDS)
                self._check()
            except KafkaException as error:
                raise broker_error(error.args[0], f"producing to {topic}") from error

    def send_many(self, topic: str, messages: list[Message]) -> None:
        """Queue records without headers; a third of the cost of as many `send`.

        Raises:
            BrokerError: A record cannot be sent, or one sent before has failed.
        """
        contents = [message["value"] for message in messages] + [message.get("key") for message in messages]
        size = sum(map(len, filter(None, contents)))
        self._reserve(len(messages), size)
        try:
            queued = self._producer.produce_batch(topic, cast(list[dict[str, Any]], messages))
        except KafkaException as error:
            raise broker_error(error.args[0], f"producing to {topic}") from error
        if queued != len(messages):
            refused = next(message["_error"] for message in messages if "_error" in message)  # type: ignore[typeddict-item]
            raise broker_error(refused, f"producing to {topic}, {len(messages) - queued} records")

    def flush(self, timeout: float | None = None) -> None:
        """Return when every record sent so far is acknowledged by all replicas in sync.

        Args:
            timeout: Seconds to wait at the most; None for the delivery timeout.

        Raises:
            BrokerError: At least one record was not; the text names its topic.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while left := self._producer.flush(_SLICE_SECONDS):
            if time.monotonic() > deadline:
                hint = f" ({self._connection})" if self._connection else ""
                what = f"{left} records were not acknowledged within {timeout:g} s{hint}"
                raise unreachable(what, self._connection)
        self._messages = self._bytes = 0
        self._check()

    def close(self) -> None:
        """Drop what is not sent yet and end the client; a second call does nothing."""
        self._producer.purge()
        self._producer.flush(_SLICE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reserve(self, messages: int, size: int) -> None:
        """Back-pressure: wait for the queue to run empty before it could overflow."""
        if self._failure:
            self._check()
        if self._messages + messages > self._most_messages or self._bytes + size > self._most_bytes:
            self.flush()
        else:
            self._producer.poll(0)
        self._messages += messages
        self._bytes += size

    def _check(self) -> None:
        if self._failure:
            failure, count = self._failure, self._failures
            self._failure, self._failures = None, 0
            raise type(failure)(f"{failure.what} ({count} records not acknowledged)", failure.remedy)

    def _on_delivery(self, error: KafkaError | None, report: Report) -> None:
        if error:
            self._failures += 1
            self._failure = self._failure or broker_error(error, f"producing to {report.topic()}", self._connection)

    def _on_error(self, error: KafkaError) -> None:
        """Connection trouble is librdkafka's to mend; only a fatal error ends the producer."""
        self._connection = connection_trouble(error.str())
        if error.fatal():
            self._failures += 1
            self._failure = BrokerRefused(f"the producer failed: {error.str()}", "Start again from the last commit")


def _size(value: bytes | None, key: bytes | None) -> int:
    return len(value or b"") + len(key or b"")
