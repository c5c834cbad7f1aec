"""A producer whose `flush` means: every record is in the log, or an error is raised.

Placement is the Java client's (murmur2 of the key; at random without one), so keys land where Java producers put them.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn, NotRequired, Self, TypeAlias, TypedDict, cast

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Report

from persistence.kafka.errors import (
    BrokerError,
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


# What exactness rests on. Readers tell a copy from news by order, so whatever arrives in a partition arrives behind
# all that was sent to it before. To librdkafka that is no matter of course: a record that fails, or waits for longer
# than message.timeout.ms, is left out, and those behind it go on (its pull request 2188; issue 4134).
_EXACT: Final[dict[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,  # never: `flush` gives up instead, and drops what waits
    "partitioner": "murmur2_random",
}
_DROPPED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


class AcknowledgedProducer:
    """Idempotent producer that waits for every replica in sync and forgets no failed delivery.

    Records to one partition keep the order they were sent in, and none arrives before those in front of it. `send` and
    `send_many` return when the records are queued; they block while more is in flight than the queue may hold. After an
    error what waits is dropped, and nothing may be taken as delivered: send again what was sent since the last `flush`.

    Args:
        settings: Where Kafka is. Its `message.timeout.ms` stands for `delivery_timeout`.
        delivery_timeout: Seconds without any acknowledgement after which what waits counts as failed.
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
        timeout_ms = int(
            config.pop("delivery.timeout.ms", config["message.timeout.ms"])
        )  # librdkafka's two names of it
        self._delivery_timeout = timeout_ms / 1000 or math.inf
        # What exactness rests on is not for settings to change.
        config |= _EXACT
        # confluent-kafka keeps this option to itself: reports of success cost no Python call.
        config |= {"delivery.report.only.error": True, "on_delivery": self._on_delivery}
        # Half of the queue: librdkafka then never refuses one record of a batch and takes a later one.
        self._most_messages = int(config["queue.buffering.max.messages"]) // 2
        self._most_bytes = int(config["queue.buffering.max.kbytes"]) * 1024 // 2
        self._messages = self._bytes = 0
        self._topics: set[str] = set()
        self._failures = 0
        self._failure: BrokerError | None = None
        self._connection = ""
        self._config = config
        self._connect()

    def _connect(self) -> None:
        try:
            self._producer = Producer(self._config)
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
        self._reserve(topic, 1, _size(value, key) + sum(len(name) + len(text or b"") for name, text in headers))
        while True:
            try:
                return self._producer.produce(topic, value, key, partition, headers=list(headers))
            except BufferError:
                self.flush()
            except KafkaException as error:
                self._fail(broker_error(error.args[0], f"producing to {topic}"), 1)

    def send_many(self, topic: str, messages: list[Message]) -> None:
        """Queue records without headers; a third of the cost of as many `send`.

        Raises:
            BrokerError: A record cannot be sent, or one sent before has failed.
        """
        contents = [message["value"] for message in messages] + [message.get("key") for message in messages]
        size = sum(map(len, filter(None, contents)))
        self._reserve(topic, len(messages), size)
        try:
            queued = self._producer.produce_batch(topic, cast(list[dict[str, Any]], messages))
        except KafkaException as error:
            self._fail(broker_error(error.args[0], f"producing to {topic}"), len(messages))
        if queued != len(messages):
            refused = next(message["_error"] for message in messages if "_error" in message)  # type: ignore[typeddict-item]
            self._fail(broker_error(refused, f"producing to {topic}"), len(messages) - queued)

    def flush(self, timeout: float | None = None) -> None:
        """Return when every record sent so far is acknowledged by all replicas in sync.

        Args:
            timeout: Seconds to wait at the most; None for as long as acknowledgements come, and the delivery timeout
                behind the last one.

        Raises:
            BrokerError: At least one record was not; the text names its topic.
        """
        patience = self._delivery_timeout if timeout is None else timeout
        deadline, fewest = time.monotonic() + patience, math.inf
        while left := self._wait(_SLICE_SECONDS):
            if timeout is None and left < fewest:
                deadline, fewest = time.monotonic() + patience, left
            if time.monotonic() > deadline:
                hint = f" ({self._connection})" if self._connection else ""
                what = f"producing to {', '.join(sorted(self._topics))}: no acknowledgement within {patience:g} s{hint}"
                self._fail(unreachable(what, self._connection), left)
        self._check()
        self._forget()

    def close(self) -> None:
        """Drop what is not sent yet and end the client; a second call does nothing."""
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
        """Back-pressure: wait for the queue to run empty before it could overflow."""
        if self._failure:
            self._check()
        if self._messages + messages > self._most_messages or self._bytes + size > self._most_bytes:
            self.flush()
        else:
            self._wait(0)
        self._messages += messages
        self._bytes += size
        self._topics.add(topic)

    def _wait(self, seconds: float) -> int:
        """Take reports for so long, or until none is to come; how many are."""
        try:
            return self._producer.flush(seconds) if seconds else self._producer.poll(0)
        except (KafkaException, SystemError) as error:
            # Only a fatal error comes out of it. A report that meets it on the way makes CPython's SystemError of it.
            fatal = error.__cause__ if isinstance(error, SystemError) else error
            if not isinstance(fatal, KafkaException):
                raise
            self._fail(broker_error(fatal.args[0], f"producing to {', '.join(sorted(self._topics))}"), 0)

    def _forget(self) -> None:
        self._messages = self._bytes = 0
        self._topics.clear()

    def _check(self) -> None:
        if self._failure:
            self._fail(self._failure, 0)

    def _fail(self, failure: BrokerError, count: int) -> NoReturn:
        """Raise it, or what went wrong before it, with the number of records that it was about. A new client goes on."""
        self.close()  # what waits must not arrive: it was sent behind what failed
        first, count = self._failure or failure, self._failures + count
        self._failure, self._failures = None, 0
        self._forget()
        self._connect()
        counted = f" ({count} records not acknowledged)" if count else ""
        raise type(first)(f"{first.what}{counted}", first.remedy)

    def _on_delivery(self, error: KafkaError | None, report: Report) -> None:
        if error and error.code() not in _DROPPED:
            self._failures += 1
            self._failure = self._failure or broker_error(error, f"producing to {report.topic()}", self._connection)

    def _on_error(self, error: KafkaError) -> None:
        """Connection trouble is librdkafka's to mend."""
        self._connection = connection_trouble(error.str())


def _size(value: bytes | None, key: bytes | None) -> int:
    return len(value or b"") + len(key or b"")
