"""Processes the records of a republisher's batch, up to the commit."""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from envelope import EnvelopeError, Lineage, Reason
from envelope.deadletter import DeadLetterHeaders, DeadLetterRecord, dead_letter_record
from envelope.hops import HopWriter
from jobs.republish.counts import Statistics
from jobs.republish.filtering import RecordFilter
from jobs.republish.input import Input
from jobs.republish.partition import Consumed, InputPartition
from jobs.republish.processor import NotOurs, Outgoing, Processor, TransformError
from jobs.republish.record import InputRecord
from jobs.republish.retry import RetryTopics, due_ms
from persistence.commit.faults import REPUBLISH_DEAD_LETTER, REPUBLISH_FLUSH, REPUBLISH_PRODUCE, effect
from persistence.kafka import AcknowledgedProducer, BrokerRefused, Message
from persistence.kafka.headers import headers_of

if TYPE_CHECKING:
    from jobs.republish.columns import Columns
    from jobs.republish.express import Express
    from persistence.kafka.array_producer import Spans

_LOG = logging.getLogger("headwater.republish")

_MOST_DEAD: Final = 1000
_AGAIN_SECONDS: Final = 60.0  # between two warnings of one line of the transform
_MOST_WAITING: Final = 10_000  # outputs, apart from those of the fast path: a few records may have very many outputs


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Worker:
    """Handles the records of one batch after another. Used by one thread.

    Args:
        name: Name of the republisher.
        processor: Processes one record.
        source: How the input is read.
        producer: Producer of the outputs.
        retry: Topics for records whose transform failed.
        dead_letter: Topic for records that cannot be used, and the largest record that it accepts in bytes.
        cluster: Name of the Kafka cluster, when there is more than one.
        judging: The filter; None without one.
    """

    def __init__(
        self,
        *,
        name: str,
        processor: Processor,
        source: Input,
        producer: AcknowledgedProducer,
        retry: RetryTopics,
        dead_letter: tuple[str, int] | None,
        cluster: str,
        judging: RecordFilter | None = None,
    ) -> None:
        self._name = name
        self._processor = processor
        self._input = source
        self._producer = producer
        self._retry = retry
        self._dead_letter = dead_letter
        self._cluster = cluster
        self._filter = judging
        self._told: dict[str, float] = {}
        self._begin()

    @cached_property
    def _express(self) -> "Express | None":
        """The fast path; None if there is none. It is loaded when the first records have arrived: meanwhile more arrive."""
        return None if self._filter else self._processor.express()

    def _begin(self) -> None:
        self._counts = Statistics()
        self._dead: list[DeadLetterRecord] = []
        self._began = time.monotonic()

    @property
    def pending(self) -> int:
        """Records of the batch so far."""
        return self._counts.consumed

    def is_due(self, batch_size: int, max_wait: float) -> bool:
        """Whether the batch is large or old enough to be finished."""
        full = self.pending >= batch_size or len(self._dead) >= _MOST_DEAD
        return full or time.monotonic() - self._began >= max_wait

    def handle(self, messages: Sequence[Consumed]) -> None:
        """Transform records and pass the outputs to the producer.

        Raises:
            BrokerError: Kafka refuses an output, or a record cannot be used and there is no dead-letter topic.
            StoreError: The store of the filter failed.
        """
        if self._filter:
            self._filter.begin(self._judged())
        if not self.pending:
            self._began = time.monotonic()
        at = 0
        for run in self._express.runs(messages, self._writers()) if self._express else ():
            self._handle_each(messages, at, int(run.rows[0]))
            self._forward(run)
            at = int(run.rows[-1]) + 1
        self._handle_each(messages, at, len(messages))

    def _forward(self, run: "Columns") -> None:
        """Send what the fast path made of messages."""
        made = run.advancing(self._input)
        self._counts.consumed += len(made.rows)
        self._counts.produced += len(made.rows)
        self._send(_Slice(self._processor.target, made.values, made.keys))

    def _handle_each(self, messages: Sequence[Consumed], first: int, end: int) -> None:
        """Handle the messages from `first` on, before `end`, one by one."""
        if first == end:
            return
        outbox, partitions = _Outbox(), self._input.partitions
        for place in range(first, end):
            message = messages[place]
            if error := message.error():
                self._input.raise_for(message, error)
                continue
            offset = message.offset()
            part = partitions.get((message.topic(), message.partition()))
            if part is None or part.due_ms:
                continue  # the partition was revoked or waits: the record is read again
            if offset != part.next:
                self._input.jumped(part, offset)
            record = self._record(message, part, offset)
            if not self._waits(record, part):
                outbox.extend(self._process(record, part))
                part.next, part.leader_epoch = offset + 1, record.leader_epoch
            if outbox.added >= _MOST_WAITING:
                self._send(outbox)
        self._send(outbox)

    def _writers(self) -> dict[tuple[str, int], HopWriter]:
        return {place: part.hops for place, part in self._input.partitions.items()}

    def _send(self, outbox: "_Outbox | _Slice") -> None:
        self._input.check()
        if outbox:
            effect(REPUBLISH_PRODUCE, lambda: outbox.send(self._producer))

    def finish(self, timeout: float | None = None) -> None:
        """Return when every output and dead letter of the batch is acknowledged.

        Args:
            timeout: Maximum wait in seconds; None for the producer's own delivery timeout.

        Raises:
            BrokerError: One was not acknowledged, or another process has the state of the filter. Nothing of the batch may
                be committed.
            StoreError: The store of the filter failed. Nothing of the batch may be committed.
        """
        effect(REPUBLISH_FLUSH, lambda: self._producer.flush(timeout))
        if self._dead:
            effect(REPUBLISH_DEAD_LETTER, lambda: self._publish_dead_letters(timeout))
        if self._filter:
            self._filter.save(self._judged())

    def _judged(self) -> list[InputPartition]:
        """The assigned partitions whose records are judged: a record in a retry topic was judged before."""
        return [part for part in self._input.partitions.values() if part.topic not in self._retry.delays]

    def take_counts(self) -> Statistics:
        """Return the counts of the finished batch and begin a new batch."""
        counts = self._counts
        self._begin()
        return counts

    def _record(self, message: Consumed, part: InputPartition, offset: int) -> InputRecord:
        kind, timestamp = message.timestamp()
        return InputRecord(
            part.topic,
            part.partition,
            offset,
            message.key(),
            message.value(),
            headers_of(message),
            timestamp if kind else None,
            message.leader_epoch(),
            part.topic_id,
            self._cluster,
        )

    def _waits(self, record: InputRecord, part: InputPartition) -> bool:
        """Hold a record of a retry topic, and its partition, until the record is due."""
        if record.topic not in self._retry.delays or (due := due_ms(record.headers)) <= now_ms():
            return False
        self._input.hold(part, record.offset, due)
        return True

    def _process(self, record: InputRecord, part: InputPartition) -> Sequence[Outgoing]:
        """Process a record; if it cannot be used, retry or dead-letter it."""
        self._counts.consumed += 1
        if self._processor.skips(record):
            self._counts.tombstones += 1
            return ()
        judged = record.topic in self._retry.delays
        try:
            self._processor.open(record)
            if not judged and not self._passes(record):
                return ()
            judged = True
            made = self._processor.transformed(record, part.hops)
        except NotOurs:
            self._counts.copies += 1
            return ()
        except EnvelopeError as error:
            return self._refuse(record, part, error, judged=judged)
        self._counts.produced += len(made)
        self._counts.dropped += not made
        return made

    def _passes(self, record: InputRecord) -> bool:
        """Whether the filter passes on a record.

        Raises:
            EnvelopeError: It rejects the record.
        """
        if self._filter is None:
            return True
        ruling = self._filter.judge(record)
        self._counts.verdicts[ruling.verdict.value] += 1
        if ruling.reason is not None:
            raise EnvelopeError(ruling.reason, ruling.detail)
        return ruling.forward

    def _refuse(
        self, record: InputRecord, part: InputPartition, error: EnvelopeError, *, judged: bool
    ) -> Sequence[Outgoing]:
        """Send a record that cannot be used to the next retry topic, or set it aside for the dead-letter topic.

        Args:
            record: The record.
            part: Its partition.
            error: Why it cannot be used.
            judged: The filter has passed it on. Otherwise its dead letter names the filter, which judges it when it is
                redriven.
        """
        kind = error.error if isinstance(error, TransformError) else ""
        attempt, now = record.attempt, now_ms()
        if kind and (topic := self._retry.next(attempt)):
            headers = self._retry.headers(topic, attempt, kind, now)
            with suppress(EnvelopeError):  # with one more hop it may be too large: then the dead-letter topic is next
                made = self._processor.detour(record, part.hops, topic, headers)
                self._counts.retried += 1
                return (made,)
        if not self._dead_letter:
            other = "" if error.reason is not Reason.NOT_AN_ENVELOPE else ", set the format of the topic (--input)"
            raise BrokerRefused(
                f"{record.node} cannot be republished ({error})",
                f"Name a dead-letter topic{other}, or fix the producer",
            )
        letter = DeadLetterHeaders(
            record.topic,
            record.partition,
            record.offset,
            error.reason,
            topic_id=record.topic_id,
            lineage=_lineage(record),
            stage="" if judged or self._filter is None else self._filter.miss(record),
            attempt=attempt,
            application=self._name,
            form=self._processor.form(record.topic),
            time_ms=now,
            detail=error.detail,
            raised=error.raised,
            timestamp_ms=record.timestamp_ms,
            leader_epoch=record.leader_epoch,
        )
        self._counts.dead_lettered[error.reason.value] += 1
        self._dead.append(dead_letter_record(letter, record.key, record.value, record.headers, self._dead_letter[1]))
        level = logging.WARNING if self._is_news(error) else logging.INFO
        _LOG.log(level, "dead letter: %s: %s%s", record.node, error, f", {error.raised}" if error.raised else "")
        return ()

    def _is_news(self, error: EnvelopeError) -> bool:
        """Whether the transform failed as it has not failed for a minute."""
        if not isinstance(error, TransformError):
            return False
        cause, now = str(error.raised or error), time.monotonic()
        if now - self._told.get(cause, -math.inf) < _AGAIN_SECONDS:
            return False
        self._told[cause] = now
        return True

    def _publish_dead_letters(self, timeout: float | None) -> None:
        assert self._dead_letter is not None
        for dead in self._dead:
            self._producer.send(self._dead_letter[0], dead.value, dead.key, dead.headers)
        self._producer.flush(timeout)


class _Slice(NamedTuple):
    """The outputs of a slice of records that the fast path forwards."""

    topic: str
    values: "Spans"
    keys: "Spans"

    def __bool__(self) -> bool:
        return len(self.keys[1]) > 0

    def send(self, producer: AcknowledgedProducer) -> None:
        """Pass all outputs to the producer."""
        producer.send_arrays(*self)


class _Outbox:
    """The outputs of a slice of records, by topic. The order within a topic, and so within a partition, is kept."""

    def __init__(self) -> None:
        self.added = 0
        self._topics: dict[str, list[Message]] = {}

    def __bool__(self) -> bool:
        return any(self._topics.values())

    def of(self, topic: str) -> list[Message]:
        """The records for a topic, to append to."""
        return self._topics.setdefault(topic, [])

    def extend(self, outgoing: Sequence[Outgoing]) -> None:
        """Add the outputs of one record."""
        self.added += len(outgoing)
        for topic, key, value, headers in outgoing:
            message = Message(value=value, key=key)
            if headers:
                message["headers"] = headers
            self.of(topic).append(message)

    def send(self, producer: AcknowledgedProducer) -> None:
        """Pass all outputs to the producer and clear the outbox."""
        for topic, messages in self._topics.items():
            if messages:
                producer.send_many(topic, messages)
            messages.clear()
        self.added = 0


def _lineage(record: InputRecord) -> str:
    """Text of the record's lineage: the known part, when the chain cannot be read."""
    if record.way:
        try:
            return str(record.lineage)
        except EnvelopeError:
            pass
    return str(Lineage((record.node,)))
