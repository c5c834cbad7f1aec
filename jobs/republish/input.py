"""The consuming side of a republisher: its partitions, their progress, and their commits."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

import envelope
from jobs.republish.client_watch import ClientWatch
from jobs.republish.counts import Statistics
from jobs.republish.delivery import Delivery, cooperates, member_config
from jobs.republish.growth import Committed, Note
from jobs.republish.growth_watch import GrowthWatch
from jobs.republish.offsets import (
    check_lost,
    commit_in_callback,
    commit_offsets,
    committed,
    failure,
    is_of_another_topic,
    lost_ends,
    patiently,
)
from jobs.republish.partition import Consumed, InputPartition
from jobs.republish.place import INSTANCE
from jobs.republish.topic_check import TopicCheck, facts_of
from persistence.commit.faults import REPUBLISH_NOTE, effect
from persistence.kafka import BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.errors import UNREACHABLE_REMEDY, broker_error, connection_trouble
from persistence.kafka.facts import TopicFacts

_LOG = logging.getLogger("headwater.republish")

_IDLE_SECONDS: Final = 300.0  # max.poll.interval.ms: the longest that a group waits for a member that hangs
_GATHER_SECONDS: Final = 0.05  # between two checks of the topics' ids while records arrive ...
_LOOK_SECONDS: Final = 60.0  # ... and while none arrive ...
_GROWING_SECONDS: Final = 1.0  # ... unless partitions wait
_HELD: Final = 1 << 62  # due time of the records of a partition that waits because its topic grows


class Input:
    """Reads topics as a member of a consumer group. Used by one thread.

    Nothing is committed for a partition after it is revoked: `before_revoke` runs, and must finish and commit the
    records in flight, before the group may assign the partition to another member. For a partition that was lost
    without notice, nothing more is committed.

    Args:
        settings: Where Kafka is.
        group: Consumer group.
        topics: Topics to read.
        via: Name of the republisher.
        before_revoke: Called before partitions are revoked, and when a topic has grown.
        statistics: Statistics that count rebalances and expired records.
        member_ids: Collects the member ids that the group assigns to this consumer.
        growth: Decides which partitions wait because their topic grows.
        ends: Offset to reach by topic and partition; None to read until stopped.
        cluster: Name of the Kafka cluster, when there is more than one.
        accept: Names of accepted risks.
        pointers: Most records will be read as columns: make no Python objects of them, if that is possible.

    Attributes:
        partitions: The partitions that are assigned now, by topic and partition: a plain tuple, which is made for every
            record in a tenth of the time of a `TopicPartition`.
        assigned: Whether the group has assigned partitions yet.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        topics: Iterable[str],
        via: str,
        *,
        before_revoke: Callable[[], None],
        statistics: Statistics,
        member_ids: set[str],
        growth: GrowthWatch,
        ends: Mapping[envelope.TopicPartition, int] | None = None,
        cluster: str = "",
        accept: Collection[str] = (),
        pointers: bool = False,
    ) -> None:
        self._accept = accept
        self.partitions: dict[tuple[str, int], InputPartition] = {}
        self.assigned = False
        self._statistics = statistics
        self._member_ids = member_ids
        self._growth = growth
        self._topics = Topics(settings)
        self._names = list(topics)
        self._via = via
        self._cluster = cluster
        self._ends = ends
        self._before_revoke = before_revoke
        self._connection = ""
        self._is_called_back = self._is_closing = False
        self._topic_check = TopicCheck(self._topics)
        self._found: dict[str, TopicFacts] = {}
        self._joins_again = self._static = INSTANCE in settings.client()
        config = member_config(settings, group, self._on_error)
        try:
            self._consumer = Consumer(config)
            self._client = ClientWatch(self._consumer, self._names)
            self._assign = self._consumer.incremental_assign if cooperates(config) else self._consumer.assign
            self._subscribe()
            self._delivery = Delivery(self._consumer, pointers=pointers)
        except KafkaException as error:
            raise broker_error(error.args[0], "setting up the consumer") from error

    def read(self, most: int) -> Sequence[Consumed]:
        """Return up to `most` records of the assigned topics: those available now, or within a fifth of a second.

        They are valid until the next call. They may be transformed, but nothing that is made of them may be sent before
        `check`.

        Raises:
            BrokerError: A topic no longer exists, or may not be read.
        """
        if self.assigned and self._joins_again:
            self._join_again()
        got = self._delivery.take(
            most, lambda: max(_GATHER_SECONDS - self._topic_check.seconds, 0.0), assigned=self.assigned
        )
        if got:
            self._topic_check.begin(self.partitions.values())
            self._note()  # before the records are processed: one of them may end this process, each time anew
            return got
        if self._topic_check.seconds > (_GROWING_SECONDS if self._growth.under_way else _LOOK_SECONDS):
            # A client may never see that a topic was created again: the new topic's leader epochs count from 0, and the
            # client ignores them as outdated if the broker was restarted since the old topic was created.
            with suppress(BrokerUnavailable):
                self._topic_check.begin(self.partitions.values())
                self.check()
                if not self._found:
                    self._topics.check()
                self._client.check()
        return []

    def check(self) -> None:
        """Check that no topic was created again before the records were read that `read` returned last.

        Raises:
            TopicReplaced: A topic was created again; nothing made of the records may be sent.
            BrokerError: A topic no longer exists, or may not be read.
        """
        self._found |= self._topic_check.finish(self.partitions.values())

    def follow(self) -> None:
        """Check the numbers of partitions, and the group's progress in topics that have grown.

        To be called when the records that `read` returned last are processed.
        """
        found, self._found = self._found, {}
        for fact in found.values():
            if self._growth.see(fact):
                self._before_revoke()  # processed records count as read
            if self._growth.is_due(fact.name):
                places = self._every([fact.name])
                self._judge(fact, patiently(lambda left: committed(self._consumer, places, self._connection)))  # noqa: B023
        self._note()

    def _every(self, topics: Iterable[str]) -> list[TopicPartition]:
        """Every partition of topics that were seen."""
        return [TopicPartition(topic, number) for topic in topics for number in range(self._growth.count(topic))]

    def _judge(self, fact: TopicFacts, found: Iterable[TopicPartition]) -> None:
        """Read the partitions of a topic that may be read, and let the others wait.

        Args:
            fact: The topic.
            found: The group's committed offsets of it.
        """
        topic, topic_id = fact.name, fact.topic_id
        own = [part for part in self.partitions.values() if part.topic == topic and part.topic_id == topic_id]
        places = {at.partition: Committed(at.offset, Note.read(at.metadata)) for at in found if at.topic == topic}
        places = {one: place for one, place in places.items() if place.note.topic_id in ("", topic_id)}
        places |= {part.partition: Committed(part.done, part.note) for part in own}
        ends = cache(lambda: {n: end for (_, n), end in patiently(lambda left: self._topics.ends([topic])).items()})
        verdict = self._growth.judge(topic, places, ends)
        for part in own:
            part.note = self._growth.note(topic, part.note, verdict, lambda part=part: ends().get(part.partition, 0))  # type: ignore[misc]
            if part.partition < verdict.resolved and verdict.sure:
                self._release(part)
            elif not part.due_ms:
                part.due_ms = _HELD
                self._consumer.pause([TopicPartition(topic, part.partition)])
        self._growth.show(topic, verdict, places | {part.partition: Committed(part.done, part.note) for part in own})

    def _release(self, part: InputPartition) -> None:
        if part.due_ms == _HELD:
            part.due_ms = 0
            self._consumer.seek(at := TopicPartition(part.topic, part.partition, part.position))
            self._consumer.resume([at])

    def _note(self) -> None:
        """Commit the notes of partitions, without advancing their offsets."""
        self._tell([(part, part.done) for part in self.partitions.values() if part.note != part.noted])

    def _tell(self, offsets: list[tuple[InputPartition, int]], timeout: float | None = None) -> None:
        if offsets:
            effect(REPUBLISH_NOTE, lambda: self._commit(offsets, timeout))

    def raise_for(self, message: Consumed, error: KafkaError) -> None:
        """Handle a message that is not a record: the end of a partition, or an error.

        Raises:
            BrokerError: It is a permanent error.
        """
        if error.code() == KafkaError._PARTITION_EOF:
            part = self.partitions.get((message.topic(), message.partition()))
            if part and not part.due_ms:  # if a record waits, the partition is not read to its end
                # Transaction markers and compacted records occupy offsets without a record.
                part.next = max(part.next or 0, message.offset())
            return
        problem = failure(error, f"reading {message.topic() or ', '.join(self._names)}", self._connection)
        # The client restores connections by itself; after _MAX_POLL_EXCEEDED it rejoins the group.
        if isinstance(problem, BrokerRefused) and error.code() != KafkaError._MAX_POLL_EXCEEDED:
            raise problem
        _LOG.warning("%s", problem)

    def jumped(self, part: InputPartition, offset: int) -> None:
        """Handle an unexpected offset: a gap, expired records, or a log that lost its end."""
        expected = part.next
        if expected is None:
            return
        if offset < expected:
            _LOG.warning("%s:%d: the position went back from %d to %d", part.topic, part.partition, expected, offset)
            return
        low, _ = self._consumer.get_watermark_offsets(TopicPartition(part.topic, part.partition), cached=True)
        self._count_expired(part.topic, part.partition, expected, min(low, offset))

    def hold(self, part: InputPartition, offset: int, due_ms: int) -> None:
        """Pause the partition at the record at `offset` until the record is due."""
        at = TopicPartition(part.topic, part.partition, offset)
        self._consumer.pause([at])
        self._consumer.seek(at)
        part.due_ms = due_ms

    def wake(self, now_ms: int) -> None:
        """Resume partitions whose next record is due."""
        for part in self.partitions.values():
            if part.due_ms and part.due_ms <= now_ms:
                part.due_ms = 0
                self._consumer.resume([TopicPartition(part.topic, part.partition)])

    def check_idle(self, seconds: float) -> None:
        """Stop waiting for the end of the partitions when no records arrive any more.

        Args:
            seconds: Seconds since the last record.

        Raises:
            BrokerUnavailable: No record has arrived for too long.
        """
        if self._ends is not None and seconds > _IDLE_SECONDS and not self._growth.under_way:
            hint = f" ({self._connection})" if self._connection else ""
            what = f"no record of {', '.join(self._names)} arrived for {seconds:.0f} s, before the end{hint}"
            raise BrokerUnavailable(what, UNREACHABLE_REMEDY)

    @property
    def caught_up(self) -> bool:
        """Whether every assigned partition has reached its requested end; False while none is assigned."""
        return self._ends is not None and self.assigned and all(part.caught_up for part in self.partitions.values())

    def commit(self, timeout: float | None = None) -> None:
        """Commit the progress of the assigned partitions.

        Args:
            timeout: Seconds to retry while the coordinator is unavailable; None for a minute.

        Raises:
            BrokerError: The group's coordinator refused or did not answer.
        """
        self._commit(self._ahead(), timeout)

    def commit_ends(self, timeout: float | None = None) -> None:
        """The same when no record is in flight: the end of a partition may lie after its last record."""
        self._tell(self._ahead(), timeout)

    def _ahead(self) -> list[tuple[InputPartition, int]]:
        return [(part, part.position) for part in self.partitions.values() if part.position != part.done]

    def _commit(self, offsets: list[tuple[InputPartition, int]], timeout: float | None) -> None:
        if not offsets:
            return
        asked = [
            TopicPartition(
                *(part.topic, part.partition, at),
                metadata=str(part.note),
                leader_epoch=-1 if part.leader_epoch is None else part.leader_epoch,
            )
            for part, at in offsets
        ]
        if self._is_called_back:
            closing = self._is_closing
            results = commit_in_callback(self._consumer, asked, timeout, self._connection, closing=closing)
        else:
            results = patiently(lambda left: commit_offsets(self._consumer, asked, left, self._connection), timeout)
        for (part, at), is_committed in zip(offsets, results, strict=True):
            if is_committed:
                part.committed, part.noted = at, part.note

    def close(self) -> None:
        """Leave the group."""
        self._is_closing = True
        self._delivery.close()
        self._consumer.close()

    def abandon(self) -> None:
        """Leave the group without finishing anything: uncommitted records are read again."""
        self._before_revoke = lambda: None
        self.partitions.clear()
        self.close()

    def _on_assign(self, consumer: Consumer, added: list[TopicPartition]) -> None:
        if self._is_closing:
            return  # the group had assigned them before it learned of the end; it answers this consumer no longer
        self.assigned = True
        self._statistics.rebalances += 1
        self._member_ids.add(consumer.memberid() or "")
        # Added partitions cause a rebalance: members that were in the group before it check and note what they see.
        self._topic_check.is_due()
        if not added:
            return
        names = {part.topic for part in added}
        facts = patiently(lambda left: facts_of(self._topics, added))
        marks = patiently(lambda left: self._topics.marks(names))
        for fact in facts.values():
            self._growth.see(fact)
        found = patiently(lambda left: committed(consumer, self._every(names), self._connection))
        mine = {(part.topic, part.partition) for part in added}
        starts = [at for at in found if (at.topic, at.partition) in mine]
        read = {
            envelope.TopicPartition(at.topic, at.partition): (at.offset, at.leader_epoch)
            for at in starts
            if at.offset >= 0 and not is_of_another_topic(at, facts[at.topic].topic_id)
        }
        lost = patiently(lambda left: lost_ends(self._topics, read, marks))
        check_lost(lost, read, self._accept, "republished")
        for at in starts:
            place = envelope.TopicPartition(at.topic, at.partition)
            at.offset = lost.get(place, at.offset)
            self._begin(at, facts[at.topic], marks[place].low)
            if place in lost:  # what is committed is beyond that
                self.partitions[place].committed = read[place][0]
        self._delivery.begin(starts)
        # By default the client library would fetch the committed offsets again, and start there.
        self._assign(starts)
        for fact in facts.values():
            if fact.name in self._growth.sources:
                self._judge(fact, found)

    def _begin(self, at: TopicPartition, fact: TopicFacts, low: int) -> None:
        """Start a partition at its committed offset, or at its first offset, and set `at` to it."""
        part = self.partitions[at.topic, at.partition] = self._new(at.topic, at.partition, fact.topic_id)
        part.begin = low
        if at.offset < 0 or is_of_another_topic(at, part.topic_id):
            if at.offset >= 0:
                _LOG.warning("%s:%d was created again: it is read from its beginning", at.topic, at.partition)
            at.offset = OFFSET_BEGINNING
        else:
            part.note = part.noted = replace(Note.read(at.metadata), topic_id=fact.topic_id)
            part.next, part.committed, part.leader_epoch = max(at.offset, low), at.offset, at.leader_epoch
            self._count_expired(at.topic, at.partition, at.offset, low)

    def _on_revoke(self, consumer: Consumer, gone: list[TopicPartition]) -> None:
        self._statistics.rebalances += 1
        self._is_called_back = True
        self._before_revoke()
        self._is_called_back = False
        self._forget(gone)

    def _on_lost(self, consumer: Consumer, gone: list[TopicPartition]) -> None:
        self._statistics.rebalances += 1
        self._forget(gone)
        # For example when the broker was unavailable for a session: the client rejoins by itself, as a new member with
        # the same group.instance.id.
        self.assigned, self._joins_again = False, self._static

    def _subscribe(self) -> None:
        self._consumer.subscribe(
            self._names, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _join_again(self) -> None:
        """Join the group a second time, with the current member id.

        A static member that returns within its session, after a restart or when its broker was unavailable, gets its
        partitions back without a rebalance. If it was the leader of the group it still is, but it only learns this from
        version 9 of JoinGroup (KIP-814), and librdkafka uses version 5. The leader must detect added partitions:
        without a second join they would be unassigned as long as it runs.
        """
        self._before_revoke()  # here: a commit in the callback of an unsubscription is not answered
        self._joins_again = self.assigned = False
        self._consumer.unsubscribe()
        self._subscribe()

    def _forget(self, gone: list[TopicPartition]) -> None:
        for at in gone:
            part = self.partitions.pop((at.topic, at.partition), None)
            self._delivery.end(at)
            if part and part.due_ms:
                self._consumer.resume([at])  # or it would still be paused when it is assigned again
        self._growth.forget({part.topic for part in gone} - {part.topic for part in self.partitions.values()})

    def _new(self, topic: str, partition: int, topic_id: str) -> InputPartition:
        end = None if self._ends is None else self._ends.get(envelope.TopicPartition(topic, partition), 0)
        return InputPartition(topic, partition, self._via, topic_id, end, self._cluster)

    def _count_expired(self, topic: str, partition: int, expected: int, low: int) -> None:
        if low > expected:
            self._statistics.expired += low - expected
            _LOG.warning(
                "%s:%d: retention deleted offsets %d to %d before they were read", topic, partition, expected, low - 1
            )

    def _on_error(self, error: KafkaError) -> None:
        self._connection = connection_trouble(error, self._connection)
        if error.fatal():
            raise failure(error, "the consumer failed")
