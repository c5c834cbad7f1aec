"""A producer with a name and sequence ids, which continues after a crash where it was."""

import uuid
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from envelope import Envelope, EnvelopeError, Reason, TopicPartition, encode
from envelope.headers import Headers
from envelope.limits import DEFAULT_LIMITS, Limits
from envelope.sequences import TOPIC, SequenceError, SequenceRange, Sequences, SequenceState
from persistence.commit.faults import SESSION_FLUSH, SESSION_SEND, effect
from persistence.kafka.errors import BrokerRefused
from persistence.kafka.producer import AcknowledgedProducer, batch_bytes
from persistence.kafka.settings import KafkaSettings
from persistence.kafka.tail import Tail, read_tail
from persistence.kafka.topics import Topics, former_ends
from persistence.kafka.transactions import TRANSACTION_TIMEOUT_MS, TransactionalProducer
from persistence.murmur2 import murmur2

_POSITIVE: Final = 0x7FFFFFFF
_MOST_PENDING: Final = 100_000
_MOST_BYTES: Final = 64 << 20
_OLD_SECONDS: Final = TRANSACTION_TIMEOUT_MS / 2_000  # of a transaction: half of what the coordinator waits for
_OVERHEAD_BYTES: Final = 256  # of a record batch around one record, with room to spare


class SequenceLost(BrokerRefused):
    """Retention may have deleted the last messages of a producer, so nothing shows which ids it has used."""


class _Pending(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes
    headers: Headers


class ProducerSession:
    """Sends messages of one producer to a topic, in envelopes with the producer's name and ascending sequence ids.

    A reader drops a message whose id is not higher than the last one of its producer. After a crash the next session of
    the same name finds in the topic what the last one has sent, and `last_sequence_id` says where to continue. Used by
    one thread.

    `send` returns when a message is queued. `flush` returns when all are acknowledged. If it raises, the session keeps
    the messages, and the next `flush` sends them again with the same ids, before any later message.

    The session chooses the partition: by the key as Java's producer does, and without a key by the sequence id, so that
    a message that is sent again arrives in the same partition.

    Args:
        name: Name of the producer, which no other producer of the topic uses; None for a new, unique one.
        topic: The topic.
        settings: Settings of the Kafka cluster.
        resume: State that `checkpoint` of an earlier session returned, if you saved one: less has to be read. If the topic
            was created again since, its messages are not in the topic, and ids that the session counts go on above theirs.
            What a partition has lost since (an unclean election) is not in the topic either: `contains` says so.
        initial: Lowest id of the first message. 0 without it. After a restart the session continues after the last id.
        per_partition: Number each partition by itself and without holes, so that readers detect missing messages.
            Otherwise one numbering covers the topic, and may have holes.
        transactional: Send in Kafka's transactions, with `NAME:TOPIC` as `transactional.id`: `flush` commits. An earlier
            session of the same name is refused by the brokers, not only by readers, and nothing is sent twice.
        payload_type: Type of the payloads, for example a protobuf full name.
        content_type: Media type of the payloads.
        limits: Limits of envelopes.
        options: More librdkafka settings (underscores stand for dots), for example `compression_type="zstd"`.

    Attributes:
        name: Name of the producer.
        topic: The topic.
        epoch: Number of this session: higher than that of all earlier sessions whose messages are in the topic.

    Raises:
        SequenceLost: The last messages of the producer may have been deleted.
        BrokerError: Kafka cannot be reached, or refuses a request.
        ValueError: An empty name, or the state of another producer or topic.
    """

    def __init__(
        self,
        name: str | None,
        topic: str,
        settings: KafkaSettings,
        *,
        resume: SequenceState | None = None,
        initial: int | None = None,
        per_partition: bool = False,
        transactional: bool = False,
        payload_type: str = "",
        content_type: str = "",
        limits: Limits = DEFAULT_LIMITS,
        **options: Any,
    ) -> None:
        if name is not None and not name.strip():
            raise ValueError("the name of a producer is empty: give one, or None for a new, unique one")
        self.name = uuid.uuid4().hex if name is None else name
        self.topic = topic
        if resume is not None and (resume.producer, resume.topic) != (self.name, topic):
            raise ValueError(
                f"the state is of producer {resume.producer!r} and topic {resume.topic}, not of this session"
            )
        self._payload_type, self._content_type, self._limits = payload_type, content_type, limits
        self._pending: list[_Pending] = []
        self._bytes = self._placed = 0
        self._again = False
        self._topics = Topics(settings)
        self._topics.check_rights(write=[topic])
        facts = self._topics.describe([topic])[topic]
        self._topic_id, self._partitions = facts.topic_id, facts.partitions
        most = self._topics.max_message_bytes([topic])[topic]
        self._most_bytes = most - _OVERHEAD_BYTES
        options = {"message_max_bytes": most, "batch_size": batch_bytes([most])} | options
        # First the earlier session is fenced: then nothing is added to the topic after its end was read.
        self._producer: AcknowledgedProducer | TransactionalProducer = (
            TransactionalProducer(settings, f"{self.name}:{topic}", **options)
            if transactional
            else AcknowledgedProducer(settings, **options)
        )
        try:
            resume = self._kept(resume)
            tail = Tail() if name is None else self._read(settings, resume, initial)
        except BaseException:
            self._producer.close()
            raise
        again = resume is not None and bool(resume.topic_id and self._topic_id) and resume.topic_id != self._topic_id
        former = {**resume.former, **(resume.last if again else {})} if resume else {}
        known = resume.last if resume and not again else {}
        last = {one: max(known.get(one, -1), tail.last.get(one, -1)) for one in {*known, *tail.last}}
        self.epoch = max(tail.epoch, resume.epoch if resume else -1) + 1
        self._sequences = Sequences(per_partition=per_partition, initial=initial, last=last, former=former)

    def _kept(self, resume: SequenceState | None) -> SequenceState | None:
        """An earlier state without the partitions whose logs have lost what it counts: they are read from their beginning."""
        if resume is None or resume.topic_id != self._topic_id or not resume.offsets:
            return resume
        places = {number: TopicPartition(self.topic, number) for number in resume.offsets}
        marks, ends = self._topics.marks([self.topic]), self._topics.ends([self.topic])
        epochs = {place: resume.leader_epochs.get(number) for number, place in places.items() if place in marks}
        former = former_ends(self._topics, epochs, {place: marks[place].leader_epoch for place in epochs})
        whole = {
            number
            for number, place in places.items()
            if min(former.get(place, ends.get(place, 0)), ends.get(place, 0)) >= resume.offsets[number]
        }
        return replace(
            resume,
            last={number: one for number, one in resume.last.items() if number in whole or number not in places},
            offsets={number: one for number, one in resume.offsets.items() if number in whole},
        )

    def _read(self, settings: KafkaSettings, resume: SequenceState | None, initial: int | None) -> Tail:
        """Find the last messages of the producer."""
        same = resume is not None and resume.topic_id == self._topic_id
        since = resume.offsets if resume and same else {}
        tail = read_tail(settings, self.topic, self.name, since=since, limits=self._limits)
        if tail.lost and initial is None:
            raise SequenceLost(
                f"{self.topic}: retention has deleted the beginning of {len(tail.lost)} partitions, and the rest has no "
                f"message of producer {self.name}: its last sequence id is unknown",
                "Give the state of its last session (resume=), or an initial id above all that it has used (initial=; 0 for "
                "a new producer)",
            )
        return tail

    def last_sequence_id(self, partition: int | None = None) -> int | None:
        """The highest id of this producer that the topic contains, earlier sessions included; None if there is none.

        A session that sends to several partitions without transactions, and crashes, may leave messages with lower ids
        out in other partitions: `contains` says which.

        Args:
            partition: The partition; None for the whole topic.
        """
        return self._sequences.persisted(TOPIC if partition is None else partition)

    def contains(self, sequence: int, key: bytes | None = None, *, partition: int | None = None) -> bool:
        """Whether the topic contains the message of an id: a later one of its producer is in the same partition.

        Args:
            sequence: The application's own id.
            key: Key of the record.
            partition: Partition that it is sent to; None for the one of the key.

        Raises:
            SequenceError: Each partition is numbered by itself, and neither key nor partition is given.
        """
        place = self._place(key, partition, sequence)
        if place is None:
            raise SequenceError("each partition is numbered by itself: give the key or the partition")
        last = self._sequences.persisted(place)
        return last is not None and sequence <= last

    def last_pushed_id(self, partition: int | None = None) -> int | None:
        """The same of messages that were sent, acknowledged or not."""
        return self._sequences.pushed(TOPIC if partition is None else partition)

    def send(
        self,
        payload: bytes,
        key: bytes | None = None,
        *,
        sequence: int | None = None,
        last: int | None = None,
        count: int = 1,
        partition: int | None = None,
        event_id: str = "",
        event_time_us: int | None = None,
        headers: Headers = (),
    ) -> SequenceRange:
        """Queue one message, and return its sequence ids.

        Args:
            payload: The event.
            key: Key of the record.
            sequence: The application's own id, for example the offset of a line in a file. Ids ascend, with holes as you
                like. All messages of a session carry one, or none.
            last: Last id of a batch that begins with `sequence`.
            count: Number of messages in the payload, if it is a batch and the session assigns the ids.
            partition: Partition to send it to; None for the one of the key.
            event_id: Identity of the event.
            event_time_us: Event time in microseconds since 1970.
            headers: Headers of the record.

        Raises:
            SequenceError: The id does not ascend, or some messages carry one and others do not. Nothing is sent.
            EnvelopeError: The message is larger than a limit. Nothing is sent.
            BrokerError: An earlier message has failed. Nothing is sent: flush, then send it again.
            KeyboardInterrupt: The session keeps the message, as `last_pushed_id` says, and the next flush sends it.
        """
        old = isinstance(self._producer, TransactionalProducer) and self._producer.open_seconds > _OLD_SECONDS
        if self._again or old or len(self._pending) > _MOST_PENDING or self._bytes > _MOST_BYTES:
            self.flush()
        own = sequence is not None
        place = self._place(key, partition, sequence)
        if place is None and self._sequences.per_partition:
            place = self._placed % self._partitions
        ids = self._sequences.next(TOPIC if place is None else place, sequence, last, count)
        if place is None:
            place = ids.first % self._partitions
        if not 0 <= place < self._partitions:
            raise SequenceError(f"partition {place}: {self.topic} has {self._partitions} partitions")
        value = encode(self._envelope(payload, key, ids, event_id, event_time_us), self._limits)
        self._check_size(key, value, headers)
        size = len(value) + len(key or b"")
        self._sequences.push(place, ids, own=own)
        self._pending.append(_Pending(place, key, value, headers))
        self._bytes += size
        try:
            self._hand_over(self._pending[-1:])
        except Exception:
            # The client does not have it. After an interruption it may have it, and the session keeps the message.
            self._sequences.take_back()
            self._pending.pop()
            self._bytes -= size
            raise
        self._placed += 1
        return ids

    def flush(self, timeout: float | None = None) -> None:
        """Return when every message is acknowledged by all in-sync replicas, and committed if sent in transactions.

        Args:
            timeout: Seconds to wait; None for the producer's own delivery timeout.

        Raises:
            ProducerFenced: A newer session of this name sends in transactions.
            BrokerError: Some are not acknowledged. The session keeps them: call it again.
        """
        if self._again and not (isinstance(self._producer, TransactionalProducer) and self._producer.committing):
            self._hand_over(self._pending)
        self._again = False
        try:
            effect(SESSION_FLUSH, lambda: self._producer.flush(timeout))
        except BaseException:
            self._again = True
            raise
        self._sequences.acknowledge()
        self._pending.clear()
        self._bytes = 0

    def checkpoint(self, timeout: float | None = None) -> SequenceState:
        """Flush, and return what the session has reached: save it where your program saves its own progress.

        The next session needs it only if retention deletes this producer's last messages; it also has less to read.

        Raises:
            BrokerError: As `flush`.
        """
        self.flush(timeout)
        marks = self._topics.marks([self.topic])  # before the ends: a leader that comes later has another epoch
        epochs = {number: one.leader_epoch for (_, number), one in marks.items() if one.leader_epoch is not None}
        offsets = {partition: end for (_, partition), end in self._topics.ends([self.topic]).items()}
        last, former = self._sequences.last, self._sequences.former
        return SequenceState(self.name, self.topic, self._topic_id, self.epoch, last, offsets, epochs, former)

    def close(self) -> None:
        """Drop messages that are not acknowledged; a second call does nothing."""
        self._producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.flush()
        self.close()

    def _place(self, key: bytes | None, partition: int | None, sequence: int | None) -> int | None:
        """The partition of a message, if it does not depend on others."""
        if partition is not None:
            return partition
        if key is not None:
            return (murmur2(key) & _POSITIVE) % self._partitions
        return None if sequence is None or self._sequences.per_partition else sequence % self._partitions

    def _hand_over(self, messages: list[_Pending]) -> None:
        """Pass messages to the producer; after an error the next flush passes all of them again."""

        def send() -> None:
            for one in messages:
                self._producer.send(self.topic, one.value, one.key, one.headers, one.partition)

        try:
            effect(SESSION_SEND, send)
        except BaseException:
            self._again = True
            raise

    def _envelope(
        self, payload: bytes, key: bytes | None, ids: SequenceRange, event_id: str, event_time_us: int | None
    ) -> Envelope:
        return Envelope(
            payload,
            key=key,
            event_id=event_id,
            event_time_us=event_time_us,
            payload_type=self._payload_type,
            content_type=self._content_type,
            producer=self.name,
            sequence=ids.first,
            producer_epoch=self.epoch,
            last_sequence=None if ids.last == ids.first else ids.last,
            sequence_per_partition=self._sequences.per_partition,
        )

    def _check_size(self, key: bytes | None, value: bytes, headers: Headers) -> None:
        size = len(value) + len(key or b"") + sum(len(name) + len(text or b"") for name, text in headers)
        if size > self._most_bytes:
            raise EnvelopeError(
                Reason.PAYLOAD_TOO_LARGE,
                f"the message has {size} bytes, and {self.topic} takes {self._most_bytes} (max.message.bytes)",
            )
