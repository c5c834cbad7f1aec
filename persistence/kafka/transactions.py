"""A producer whose records become visible together, and that a newer one of the same name fences.

Kafka's coordinator knows one producer for each `transactional.id`. When a second one begins, the coordinator ends the
transaction of the first, and from then on brokers refuse everything that the first one sends (KIP-98). Nothing else
stops a process that was suspended and wakes up with requests in its buffers.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Report

from envelope.headers import Headers
from persistence.kafka.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    broker_error,
    connection_trouble,
)
from persistence.kafka.producer import BY_KEY
from persistence.kafka.settings import KafkaSettings

_PAUSE_SECONDS: Final = 0.05
_SLICE_SECONDS: Final = 0.5  # a signal handler runs between two slices
_SETTLE_SECONDS: Final = 10  # longer than a leader election
_FENCED: Final = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
_DROPPED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
TRANSACTION_TIMEOUT_MS: Final = 60_000
"""After this time without an end the coordinator aborts a transaction. Kafka's default of transaction.timeout.ms."""


class ProducerFenced(BrokerRefused):
    """Nothing of this producer is accepted any more: a newer one of the same name has begun, or it waited too long."""


class TransactionalProducer:
    """Sends records in transactions: readers with `isolation.level=read_committed` see all of a transaction or nothing.

    The constructor returns when every earlier producer of the same id is fenced, and its transaction is ended. Records
    of one partition keep the order in which they were sent. Used by one thread.

    Args:
        settings: Settings of the Kafka cluster.
        transactional_id: Name of the producer.
        timeout: Seconds to wait for the coordinator, and for the acknowledgement of a transaction.
        acknowledged: Called with topic, partition and offset of each record that a broker has stored, those of a partition
            in their order, before `flush` returns. They count when it has committed them.
        options: More librdkafka settings (underscores stand for dots).

    Attributes:
        committing: The last commit was not answered in time: `flush` asks again, and nothing else is possible.

    Raises:
        BrokerError: The coordinator refuses or does not answer.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        transactional_id: str,
        *,
        timeout: float = 120,
        acknowledged: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ) -> None:
        self._id = transactional_id
        self._acknowledged = acknowledged
        self._timeout = timeout
        self._connection = ""
        self._failure: BrokerError | None = None
        self._ended: BrokerError | None = None
        self._open = False
        self._began = 0.0
        self.committing = False
        config = settings.client(on_error=self._on_error, **{"linger_ms": 5, "compression_type": "lz4"} | options)
        # Exactness depends on these: settings must not change them. For the one request in flight see `producer`.
        for alias in ("delivery.timeout.ms", "message.send.max.retries", "max.in.flight", "retries"):
            config.pop(alias, None)
        config |= {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "message.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "enable.idempotence": True,
            "acks": "all",
            "max.in.flight.requests.per.connection": 1,
            "partitioner": "murmur2_random",
            "delivery.report.only.error": acknowledged is None,
            "on_delivery": self._on_delivery,
        }
        try:
            self._producer = Producer(config)
        except KafkaException as error:
            raise broker_error(error.args[0], "setting up the producer") from error
        self._patiently(self._producer.init_transactions, f"beginning as transactional.id {transactional_id}")

    @property
    def in_transaction(self) -> bool:
        """Whether records were sent since the last commit."""
        return self._open

    @property
    def open_seconds(self) -> float:
        """Seconds since the first record of the current transaction was sent; 0 without one."""
        return time.monotonic() - self._began if self._open else 0.0

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int = BY_KEY,
    ) -> None:
        """Queue one record of the current transaction; it begins with its first record.

        Raises:
            ProducerFenced: A newer producer has this id.
            BrokerError: The record cannot be sent, or an earlier one has failed. The transaction is aborted.
        """
        self._check()
        try:
            if not self._open:
                self._producer.begin_transaction()
                self._open, self._began = True, time.monotonic()
            while True:
                try:
                    self._producer.produce(topic, value, key, partition, headers=list(headers))
                    break
                except BufferError:
                    self._producer.flush(_PAUSE_SECONDS)  # the queue is full
                    self._check()
            self._producer.poll(0)
        except KafkaException as error:
            self._fail(self._error(error.args[0], f"producing to {topic}"))

    def flush(self, timeout: float | None = None) -> None:
        """Commit the transaction: return when all of its records are acknowledged and visible.

        Raises:
            ProducerFenced: A newer producer has this id; nothing of the transaction is visible.
            BrokerError: The transaction is aborted. Or the coordinator has not answered (`committing`): then call it
                again; the next producer of this id would resolve it, too.
        """
        if not self.committing:
            self._check()
        if not self._open:
            return
        try:
            self._patiently(self._producer.commit_transaction, f"committing as {self._id}", timeout)
        except BrokerError as error:
            reason: KafkaError = error.__cause__.args[0]  # type: ignore[union-attr]
            if reason.retriable():
                self.committing = True
                raise
            self.committing = False
            if not reason.txn_requires_abort():
                self._ended = error  # fatal
            self._failure = self._failure or error
            self._fail(error)
        self._open = self.committing = False
        self._check()

    def abort(self) -> None:
        """Drop the current transaction: nothing of it becomes visible. Without one it does nothing.

        Raises:
            BrokerError: The coordinator refuses or does not answer. So does every later call.
        """
        if self._open:
            self._open = False
            self._settle()
            try:
                self._patiently(self._producer.abort_transaction, f"aborting as {self._id}")
            except BrokerError as error:
                self._ended = error  # librdkafka begins no other transaction
                raise
        self._failure = None

    def close(self) -> None:
        """Abort what is not committed; never waits for long. A second call does nothing."""
        if self._open and not self.committing and self._ended is None:
            self._open = False
            with suppress(KafkaException, SystemError):
                self._producer.purge()
                self._producer.abort_transaction(2 * _SLICE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self) -> None:
        """Wait until the broker has answered every record, unless the transaction has failed already.

        librdkafka may ask for the end of a transaction before the coordinator knows of its first partition, which is a
        fatal error (its issue 4849). It also skips the sequence numbers of records that it drops, and then the broker
        refuses the next transaction once.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        with suppress(KafkaException, SystemError):  # the abort reports it
            while self._failure is None and time.monotonic() < deadline and self._producer.flush(_PAUSE_SECONDS):
                pass

    def _patiently(self, call: Callable[[float], Any], doing: str, timeout: float | None = None) -> None:
        """Call until it succeeds, in slices. librdkafka continues where the slice before ended."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            try:
                call(_SLICE_SECONDS)
            except KafkaException as error:
                reason: KafkaError = error.args[0]
                if not reason.retriable() or time.monotonic() > deadline:
                    raise self._error(reason, doing) from error
            else:
                return

    def _error(self, reason: KafkaError, doing: str) -> BrokerError:
        if reason.code() in _FENCED:
            if self.open_seconds > TRANSACTION_TIMEOUT_MS / 1_000:
                return ProducerFenced(
                    f"{doing}: the coordinator has ended a transaction that began {self.open_seconds:.0f} s ago, or another "
                    f"process has begun under the name {self._id}",
                    "Nothing of it is visible. Begin again and send it again; a transaction lasts at most "
                    f"{TRANSACTION_TIMEOUT_MS // 1_000} s. Give each process its own name",
                )
            return ProducerFenced(
                f"{doing}: another process has begun under the name {self._id}",
                "Nothing is lost: the other process continues. Give each process its own name",
            )
        return broker_error(reason, doing, self._connection)

    def _check(self) -> None:
        if self._ended:
            raise self._ended
        if self.committing:
            raise BrokerUnavailable(f"the last commit as {self._id} was not answered", "Flush again")
        if self._failure:
            self._fail(self._failure)

    def _fail(self, error: BrokerError) -> NoReturn:
        """Abort the transaction and raise the first error; without the coordinator's answer, nothing goes on.

        A new client would fence a newer producer of the same id, so this one is never replaced.
        """
        first = error if isinstance(error, ProducerFenced) else self._failure or error
        if isinstance(first, ProducerFenced):
            self._ended = first
        if self._ended is None:
            try:
                self.abort()
            except BrokerError as failed:
                self._ended = failed if isinstance(failed, ProducerFenced) else first
        self._open, self._failure = False, None
        raise (self._ended if isinstance(self._ended, ProducerFenced) else first)

    def _on_delivery(self, error: KafkaError | None, report: Report) -> None:
        if error and error.code() not in _DROPPED:
            self._failure = self._failure or self._error(error, f"producing to {report.topic()}")
        elif not error and self._acknowledged is not None:
            topic, partition, offset = report.topic(), report.partition(), report.offset()
            assert topic is not None
            assert partition is not None
            assert offset is not None
            self._acknowledged(topic, partition, offset)

    def _on_error(self, error: KafkaError) -> None:
        """Note the error: librdkafka restores connections by itself, and the calls report fatal ones."""
        self._connection = connection_trouble(error, self._connection)
