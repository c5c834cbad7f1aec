"""A producer whose `flush` means: every record is in the log, or an error is raised.

Placement is the Java client's (murmur2 of the key; at random without one), so keys land where Java producers put them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn, NotRequired, Self, TypeAlias, TypedDict, cast

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
_MESSAGE_BYTES: Final = 1_000_000  # librdkafka's own default
_SLICE_SECONDS: Final = 0.5  # flush in slices: a signal handler runs between two of them


class Message(TypedDict):
    """One record, shaped as `Producer.produce_batch` takes it; `send_many` takes none with headers."""

    value: bytes | None
    key: NotRequired[bytes | None]
    headers: NotRequired[Headers]


# What exactness rests on. Readers tell a copy from news by order, so whatever arrives in a partition has to arrive behind
# all that was sent to it before. To librdkafka that is no matter of course: a record that fails for good, or too often, or
# waits for longer than message.timeout.ms, is left out, and those behind it go on (its pull request 2188; issue 4134).
_EXACT: Final[dict[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,  # never: `flush` gives up instead, and drops what waits
    "retries": 2**31 - 1,
    # A broker that knows a producer id no longer, or not yet, takes any first number: the second of two requests on
    # their way could pass for it, and librdkafka would take that for an acknowledgement of both.
    "max.in.flight.requests.per.connection": 1,
    "partitioner": "murmur2_random",
}
_ALIASES: Final = ("delivery.timeout.ms", "message.send.max.retries", "max.in.flight")
_OVERHEAD_BYTES: Final = 256  # of a batch around one record, with room to spare
_DROPPED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


class AcknowledgedProducer:
    """Idempotent producer that waits for every replica in sync and forgets no failed delivery. Used by one thread.

    Records to one partition keep the order they were sent in, and none goes on when one in front of it has failed.
    `send` and `send_many` return when the records are queued; they block while more is in flight than the queue may
    hold. After an error what waits is dropped, and nothing may be taken as delivered: send again what was sent since
    the last `flush`.

    Args:
        settings: Where Kafka is. Its `message.timeout.ms` stands for `delivery_timeout`; 0 is for ever.
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
                "message_max_bytes": _MESSAGE_BYTES,
            }
            | options,
        )
        timeout = "delivery.timeout.ms" if "delivery.timeout.ms" in config else "message.timeout.ms"
        self._delivery_timeout = _number(config, timeout) / 1000 or math.inf
        # Exactness depends on these: settings must not change them.
        config = {name: value for name, value in config.items() if name not in _ALIASES} | _EXACT
        # confluent-kafka keeps this option to itself: reports of success cost no Python call.
        config |= {"delivery.report.only.error": True, "on_delivery": self._on_delivery}
        # Half of the queue: librdkafka then never refuses one record of a batch and takes a later one.
        self._most_messages = _number(config, "queue.buffering.max.messages") // 2
        self._most_bytes = _number(config, "queue.buffering.max.kbytes") * 1024 // 2
        self._most_record = _number(config, "message.max.bytes") - _OVERHEAD_BYTES
        self._messages = self._bytes = 0
        self._topics: set[str] = set()
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
        size = len(value or b"") + len(key or b"") + sum(len(name) + len(text or b"") for name, text in headers)
        while True:
            self._reserve(topic, 1, size)
            try:
                return self._producer.produce(topic, value, key, partition, headers=list(headers))
            except BufferError:
                self.flush()
            except KafkaException as error:
                self._fail(broker_error(error.args[0], f"producing to {topic}"))

    def send_many(self, topic: str, messages: list[Message]) -> None:
        """Queue records without headers; a third of the cost of as many `send`.

        Raises:
            BrokerError: A record cannot be sent, or one sent before has failed.
        """
        values = [len(message["value"] or b"") for message in messages]
        keys = [len(message.get("key") or b"") for message in messages]
        size = sum(values) + sum(keys)
        too_many = len(messages) > self._most_messages or size > self._most_bytes
        if messages and (too_many or max(values) + max(keys) > self._most_record):
            # Of a batch librdkafka leaves out what it refuses and takes the rest, which is on its way at once.
            for message in messages:
                self.send(topic, message["value"], message.get("key"))
            return
        self._reserve(topic, len(messages), size)
        try:
            queued = self._producer.produce_batch(topic, cast(list[dict[str, Any]], messages))
        except KafkaException as error:
            self._fail(broker_error(error.args[0], f"producing to {topic}"))
        if queued != len(messages):
            refused = next(message["_error"] for message in messages if "_error" in message)  # type: ignore[typeddict-item]
            self._fail(broker_error(refused, f"producing to {topic}"))

    def flush(self, timeout: float | None = None) -> None:
        """Return when every record sent so far is acknowledged by all replicas in sync.

        Args:
            timeout: Seconds to wait, half a second more or less; what waits then is dropped. None for as long as
                acknowledgements come, and the delivery timeout behind the last one.

        Raises:
            BrokerError: At least one record was not; the text names its topic.
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

    def close(self) -> None:
        """Drop what is not sent yet; a second call does nothing."""
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
        """Back-pressure: wait for the queue to run empty before it could overflow. Nothing follows what has failed."""
        if self._messages + messages > self._most_messages or self._bytes + size > self._most_bytes:
            self.flush()
        self._served(lambda: self._producer.poll(0))
        self._check()
        self._messages += messages
        self._bytes += size
        self._topics.add(topic)

    def _served(self, serve: Callable[[], int]) -> int:
        """Take reports."""
        try:
            return serve()
        except (KafkaException, SystemError) as error:
            # Only a fatal error comes out of it. A report that meets it on the way makes CPython's SystemError of it.
            fatal = error.__cause__ if isinstance(error, SystemError) else error
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
        """Raise it, or what went wrong before it; a new client goes on. Until then, nothing is forgotten."""
        self._failure = self._failure or failure
        self.close()  # what waits must not arrive: it was sent behind what failed
        self._connect()
        failure, again = self._failure, self._messages
        self._failure = None
        self._forget()
        raise type(failure)(f"{failure.what} ({again} records are to be sent again)", failure.remedy)

    def _on_delivery(self, error: KafkaError | None, report: Report) -> None:
        if error and error.code() not in _DROPPED:
            self._failure = self._failure or broker_error(error, f"producing to {report.topic()}", self._connection)

    def _on_error(self, error: KafkaError) -> None:
        """Connection trouble is librdkafka's to mend."""
        self._connection = connection_trouble(error.str())


def _number(config: Mapping[str, Any], name: str) -> int:
    """A setting that is a whole number.

    Raises:
        BrokerRefused: It is none.
    """
    try:
        return int(config[name])
    except ValueError:
        raise BrokerRefused(f"setting up the producer: {name} is not an integer", "Correct the setting") from None
