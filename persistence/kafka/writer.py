"""Writes messages of named producers to topics, and refuses duplicates before it writes them (Pulsar PIP-6)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from envelope import Envelope, TopicPartition, Verdict, encode
from envelope.filters.sequence_maps import (
    EVERYWHERE,
    PRODUCERS,
    SNAPSHOT_EVERY,
    DedupPolicy,
    Entry,
    SequenceMaps,
    Snapshot,
)
from persistence.commit.faults import WRITER_COMMIT, WRITER_PRODUCE, WRITER_SNAPSHOT, effect
from persistence.kafka.errors import BrokerError, BrokerRefused
from persistence.kafka.facts import Watermarks
from persistence.kafka.producer import batch_bytes
from persistence.kafka.session import SequenceLost
from persistence.kafka.settings import KafkaSettings
from persistence.kafka.tail import BlockReader, is_stamped, last_id, stamped
from persistence.kafka.topics import Topics, former_ends
from persistence.kafka.transactions import TransactionalProducer
from persistence.murmur2 import murmur2
from persistence.protocol import StateStore
from persistence.reader import SequenceSnapshots

_POSITIVE: Final = 0x7FFFFFFF
_MARKER: Final = 1  # offset of the commit after the last record of a transaction, after which a snapshot is taken
_ANOTHER_NAME: Final = "Another name of the writer begins with what the topic contains"


class DeduplicatingWriter:
    """Writes each message of a producer to its topic once, as a broker of Pulsar does with deduplication.

    It is a gateway between producers, which send again what they are not sure of, and topics that it alone writes. A
    message is a duplicate if its partition contains its producer's number, or a later one. The partition is that of the
    message's key, or without one that of the producer's name, so that copies meet.

    The constructor fences every earlier writer of this name, and recovers the sequence maps: the latest snapshot, and
    what the topic contains after it. `write` sends a batch in one transaction. Used by one thread.

    Args:
        name: Name of the writer: its `transactional.id`, and the name of its snapshots.
        topics: The topics that it may write.
        settings: Settings of the Kafka cluster.
        store: Store of the snapshots, or its URL.
        policy: Topics in which duplicates are refused. Those of others are written as they come.
        every: Entries of a partition between two snapshots.
        limit: Producers that a partition remembers.
        options: More librdkafka settings (underscores stand for dots), for example `compression_type="zstd"`.

    Raises:
        SequenceLost: Retention has deleted messages that are in no snapshot, or Kafka has lost some that are in one.
        BrokerError: Kafka cannot be reached, or refuses a request.
        StoreError: The store failed.
    """

    def __init__(
        self,
        name: str,
        topics: Iterable[str],
        settings: KafkaSettings,
        store: StateStore | str,
        *,
        policy: DedupPolicy = EVERYWHERE,
        every: int = SNAPSHOT_EVERY,
        limit: int = PRODUCERS,
        **options: Any,
    ) -> None:
        self._broker = broker = Topics(settings)
        names = sorted(set(topics))
        broker.check_rights(write=names)
        self._facts = broker.describe(names)
        most = broker.max_message_bytes(names)
        sizes = {"message_max_bytes": max(most.values()), "batch_size": batch_bytes(most.values())}
        self._maps: dict[tuple[str, int], SequenceMaps] = {}
        self._stored: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        # First the earlier writer is fenced: then nothing is added to a topic after its end was read.
        self._producer = TransactionalProducer(settings, name, acknowledged=self._note, **sizes | options)
        try:
            self._snapshots = SequenceSnapshots(store, name)
            for topic in filter(policy.enabled, names):
                self._recover(broker, settings, topic, every, limit)
        except BaseException:
            self._producer.close()
            raise

    def _recover(self, broker: Topics, settings: KafkaSettings, topic: str, every: int, limit: int) -> None:
        """Make the maps of a topic's partitions as of its end."""
        topic_id = self._facts[topic].topic_id
        marks = broker.marks([topic])
        lows = {partition: one.low for (_, partition), one in marks.items()}
        ends = {partition: end for (_, partition), end in broker.ends([topic]).items()}
        snapshots = {one: self._snapshots.load(topic, one, topic_id) for one in ends}
        known = {one: found for one, found in snapshots.items() if found is not None}
        epochs = {TopicPartition(topic, one): found.leader_epoch for one, found in known.items()}
        former = former_ends(broker, epochs, {place: marks[place].leader_epoch for place in epochs})
        whole = {one: min(end, former.get(TopicPartition(topic, one), end)) for one, end in ends.items()}
        for partition, found in known.items():
            if (low := lows[partition]) > found.next_offset + _MARKER:
                raise SequenceLost(
                    f"{topic}:{partition}: retention has deleted offsets {found.next_offset} to {low - 1}, which are in no "
                    "snapshot",
                    f"{_ANOTHER_NAME}. Keep records longer, or let a snapshot be written more often (every=)",
                )
            if whole[partition] < found.next_offset:
                raise SequenceLost(
                    f"{topic}:{partition} has kept what it contained up to offset {whole[partition]}, and its snapshot "
                    f"contains everything below {found.next_offset}: Kafka has lost records",
                    f"{_ANOTHER_NAME}. Set unclean.leader.election.enable=false",
                )
        begins = {one: max(lows[one], 0 if found is None else found.next_offset) for one, found in snapshots.items()}
        tails: dict[int, list[Entry]] = {one: [] for one in ends}
        with BlockReader(settings, topic) as reader:
            for message in reader.read({one: (begins[one], end) for one, end in ends.items()}):
                tails[message.partition()].append(_entry(message.offset(), message.value()))
        for partition, snapshot in snapshots.items():
            before = snapshot or Snapshot(begins[partition])
            maps = self._maps[topic, partition] = SequenceMaps(before, tails[partition], every=every, limit=limit)
            if snapshot is None:  # or nothing would show that retention has deleted messages before the first one
                self._save(topic, partition, maps.snapshot(), marks)

    def _save(self, topic: str, partition: int, snapshot: Snapshot, marks: Mapping[TopicPartition, Watermarks]) -> None:
        """Store a snapshot of a partition, with the epoch of its leader."""
        made = replace(snapshot, leader_epoch=marks[TopicPartition(topic, partition)].leader_epoch)
        save = partial(self._snapshots.save, topic, partition, made, self._facts[topic].topic_id)
        effect(WRITER_SNAPSHOT, save)

    def write(self, topic: str, messages: Iterable[Envelope]) -> list[Verdict]:
        """Write the new ones of some messages, all of them or none; return when they are stored and visible.

        Args:
            topic: The topic.
            messages: The messages, those of each producer in the order of their sequence numbers. A message without
                producer and sequence number takes no part, and is written; so does one that was republished, whose
                number is that of its root.

        Returns:
            For each message `ACCEPTED`, or `DUPLICATE`: the topic contains it, or a later one of its producer.

        Raises:
            ProducerFenced: A newer writer of this name has begun.
            ValueError: The topic is not one of the writer, or it contains a part of a message of several numbers, which
                is neither new nor a duplicate. Nothing was written.
            BrokerError: Nothing was written, unless the commit was not answered: the next call asks again. Write all
                of the messages again. If the topic was created again, or an abort was not answered, make a new writer.
            StoreError: A snapshot was not stored. The messages are written; make a new writer.
        """
        if topic not in self._facts:
            raise ValueError(f"this writer writes {', '.join(self._facts)}, not {topic}")
        self._finish()
        placed = [(self._place(topic, one), one) for one in messages]
        try:
            verdicts = [self._push(topic, place, one) for place, one in placed]
            new = [one for one, verdict in zip(placed, verdicts, strict=True) if verdict is Verdict.ACCEPTED]
            if Verdict.DUPLICATE in verdicts:
                self._check_current(topic)
            effect(WRITER_PRODUCE, lambda: self._send(topic, new))
        except BaseException:
            self._failed()
            raise
        self._finish()
        # What was in flight is in the same transaction.
        return [Verdict.DUPLICATE if one is Verdict.IN_FLIGHT else one for one in verdicts]

    def last_sequence_id(self, topic: str, producer: str) -> int | None:
        """Highest number of a producer in a topic, after which it resumes; None for an unknown one."""
        found = (maps.last_sequence_id(producer) for (name, _), maps in self._maps.items() if name == topic)
        return max((one for one in found if one is not None), default=None)

    def persisted(self, topic: str, partition: int) -> dict[str, int]:
        """Highest number by producer that a partition contains."""
        return self._maps[topic, partition].persisted

    def covered(self, topic: str, partition: int) -> int:
        """Offset below which the latest snapshot of a partition contains everything."""
        return self._maps[topic, partition].covered

    def close(self) -> None:
        """Drop what is not written, and release the connections; a second call does nothing."""
        self._producer.close()
        self._snapshots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _place(self, topic: str, message: Envelope) -> int:
        key = message.producer.encode() if message.key is None else message.key
        return (murmur2(key) & _POSITIVE) % self._facts[topic].partitions

    def _push(self, topic: str, partition: int, message: Envelope) -> Verdict:
        maps = self._maps.get((topic, partition))
        if maps is None:
            return Verdict.ACCEPTED
        if not is_stamped(message):
            return maps.push(None)
        name, first, last = message.producer, message.sequence or 0, last_id(message)
        if (known := maps.highest(name)) is not None and first <= known < last:
            raise ValueError(
                f"{topic}:{partition} contains a part of numbers {first} to {last} of a producer, those up to {known}: send "
                "the others as another message"
            )
        return maps.push(name, last)

    def _check_current(self, topic: str) -> None:
        """Check that the topic is still the one that the maps are about."""
        if self._broker.topic_ids([topic])[topic] != self._facts[topic].topic_id:
            raise _replaced(topic)

    def _send(self, topic: str, new: list[tuple[int, Envelope]]) -> None:
        for place, message in new:
            self._producer.send(topic, encode(message), message.key, partition=place)

    def _finish(self) -> None:
        """Commit what was sent, note where it is stored, and write the snapshots that are due."""
        if not self._producer.in_transaction:
            return
        try:
            effect(WRITER_COMMIT, self._producer.flush)
        except BrokerError:
            if not self._producer.committing:
                self._failed()
            raise
        due: dict[tuple[str, int], Snapshot] = {}
        for place, offsets in self._stored.items():
            if (maps := self._maps.get(place)) is None:
                continue
            try:
                found = [maps.acknowledged(offset) for offset in offsets]
            except ValueError as error:  # offsets are used again
                self._check_current(place[0])
                raise BrokerRefused(
                    f"{place[0]}:{place[1]}: Kafka has lost records that this writer had written, and uses their offsets again",
                    f"{_ANOTHER_NAME}. What was written last is stored. Set unclean.leader.election.enable=false",
                ) from error
            if any(found):
                due[place] = maps.snapshot()  # after the whole transaction
        self._stored.clear()
        marks = self._broker.marks(sorted({topic for topic, _ in due})) if due else {}
        for (topic, partition), snapshot in due.items():
            self._save(topic, partition, snapshot, marks)

    def _failed(self) -> None:
        """Forget what was sent: its transaction is aborted."""
        try:
            self._producer.abort()
        finally:
            self._stored.clear()
            for maps in self._maps.values():
                maps.failed()

    def _note(self, topic: str, partition: int, offset: int) -> None:
        self._stored[topic, partition].append(offset)


def _replaced(topic: str) -> BrokerRefused:
    return BrokerRefused(
        f"{topic} was deleted and created again since this writer began",
        "Make a new writer, and write all of the messages again",
    )


def _entry(offset: int, value: bytes | None) -> Entry:
    message = stamped(value)
    return Entry(offset) if message is None else Entry(offset, message.producer, last_id(message))
