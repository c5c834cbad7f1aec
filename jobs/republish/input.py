"""The consuming side of a republisher: which partitions it has, how far they are done, and their commit."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from envelope.hops import HopWriter
from jobs.republish.statistics import Statistics
from persistence.kafka import BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.errors import UNREACHABLE_REMEDY, broker_error, connection_trouble

T = TypeVar("T")

_LOG = logging.getLogger("headwater.republish")

_PATIENCE_SECONDS: Final = 60.0  # a fifth of max.poll.interval.ms, after which the group would give us up
_IDLE_SECONDS: Final = 300.0  # max.poll.interval.ms: so long may a group wait for a member that hangs
_LOOK_SECONDS: Final = 60.0  # how often topics are asked for their ids
_LEAST_SECONDS: Final = 1.0  # for an answer, however late it is
_WAIT_SECONDS: Final = 0.2  # the longest a stop has to wait for an idle consumer
# The group is being dealt out again. What was not committed stays to be committed by whoever has the partition then.
_OVERTAKEN: Final = (
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._ASSIGNMENT_LOST,
    KafkaError._STATE,
)


class Consumed(Protocol):
    """What the consumer delivers: confluent-kafka's `Message`, with the types that a delivered one has."""

    def error(self) -> KafkaError | None: ...
    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def leader_epoch(self) -> int | None: ...
    def __len__(self) -> int: ...


class InputPartition:
    """One assigned partition.

    Attributes:
        topic: Its topic.
        partition: Its number.
        hops: Writer of the hops that its records get.
        topic_id: Kafka's id of the topic.
        next: Offset behind the last record that was processed; None before the first.
        committed: What `next` was at the last commit.
        end: Offset at which it counts as caught up; None when nobody asks.
        due_ms: When its next record is due, in milliseconds since 1970; 0 when it is not waiting.
    """

    __slots__ = ("committed", "due_ms", "end", "hops", "next", "partition", "topic", "topic_id")

    def __init__(self, topic: str, partition: int, via: str, topic_id: str, end: int | None, cluster: str) -> None:
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.hops = HopWriter(topic, partition, via, topic_id=topic_id, cluster=cluster)
        self.next: int | None = None
        self.committed: int | None = None
        self.end = end
        self.due_ms = 0

    @property
    def caught_up(self) -> bool:
        """Whether all that was there at the start has been processed."""
        return self.end is not None and (self.next or 0) >= self.end


class Input:
    """Reads topics as a member of a consumer group. Used by one thread.

    Nothing of a partition is committed once it is gone: `before_revoke` runs, and has to finish and commit what is
    under way, before the group may give the partition to another member. Of a partition that was lost
    without notice nothing more is committed at all.

    Args:
        settings: Where Kafka is.
        group: Consumer group.
        topics: Topics to read.
        via: Name of the republisher.
        before_revoke: Called before partitions go away.
        statistics: Where rebalances and expired records are counted.
        ends: (topic, partition) -> offset to be reached; None to read on for ever.
        cluster: Name of the Kafka cluster, where there is more than one.

    Attributes:
        partitions: What is assigned now.
        assigned: Whether the group has dealt out partitions yet.
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
        ends: dict[tuple[str, int], int] | None = None,
        cluster: str = "",
    ) -> None:
        self.partitions: dict[tuple[str, int], InputPartition] = {}
        self.assigned = False
        self._statistics = statistics
        self._topics = Topics(settings)
        self._names = list(topics)
        self._via = via
        self._cluster = cluster
        self._ends = ends
        self._before_revoke = before_revoke
        self._connection = ""
        self._looked = time.monotonic()
        self._joins_again = bool(settings.client().get("group.instance.id"))
        config = settings.client(
            on_error=self._on_error,
            partition_assignment_strategy="cooperative-sticky",
            queued_min_messages=100_000,
            queued_max_messages_kbytes=65_536,
            fetch_wait_max_ms=100,
            session_timeout_ms=10_000,  # a killed member gives its partitions up after that
        )
        # What exactness rests on is not for settings to change.
        config |= {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": ends is not None,
        }
        try:
            self._consumer = Consumer(config)
            self._subscribe()
        except KafkaException as error:
            raise broker_error(error.args[0], "setting up the consumer") from error

    def read(self, most: int) -> list[Consumed]:
        """Return up to `most` records: what is there, or what comes within a fifth of a second.

        Raises:
            BrokerError: A topic is gone, or may not be read.
        """
        if self.assigned and self._joins_again:
            self._join_again()
        first = self._consumer.consume(1, _WAIT_SECONDS)
        more = self._consumer.consume(most - 1, 0) if first and most > 1 else []
        return cast(list[Consumed], first + more)

    def raise_for(self, message: Consumed, error: KafkaError) -> None:
        """Deal with a message that is no record: the end of a partition, or an error.

        Raises:
            BrokerError: It is an error that does not pass by itself.
        """
        if error.code() == KafkaError._PARTITION_EOF:
            if part := self.partitions.get((message.topic(), message.partition())):
                # Transaction markers and compacted records have offsets too, and no record.
                part.next = max(part.next or 0, message.offset())
            return
        failure = broker_error(error, f"reading {message.topic() or ', '.join(self._names)}", self._connection)
        # The client mends connections by itself; after _MAX_POLL_EXCEEDED it joins the group anew.
        if isinstance(failure, BrokerRefused) and error.code() != KafkaError._MAX_POLL_EXCEEDED:
            raise failure
        _LOG.warning("%s", failure)

    def jumped(self, part: InputPartition, offset: int) -> InputPartition:
        """Look into an offset that is not the one expected: a gap, retention, or a topic created again.

        Returns the partition to go on with.
        """
        expected = part.next
        if offset == 0 or (expected is not None and offset < expected):
            # Where a topic created again begins. The consumer follows it without a word.
            topic_id = self._topics.topic_ids([part.topic])[part.topic]
            if expected:
                _LOG.warning("%s:%d went back from %d to %d", part.topic, part.partition, expected, offset)
            if topic_id != part.topic_id:
                part = self._new(part.topic, part.partition, topic_id)
                self.partitions[part.topic, part.partition] = part
            return part
        if expected is None:
            return part
        low, _ = self._consumer.get_watermark_offsets(TopicPartition(part.topic, part.partition), cached=True)
        self._count_expired(part.topic, part.partition, expected, min(low, offset))
        return part

    def hold(self, part: InputPartition, offset: int, due_ms: int) -> None:
        """Leave the record at `offset`, and those behind it, until they are due."""
        at = TopicPartition(part.topic, part.partition, offset)
        self._consumer.pause([at])
        self._consumer.seek(at)
        part.due_ms = due_ms

    def wake(self, now_ms: int) -> None:
        """Go on with partitions whose next record is due."""
        for part in self.partitions.values():
            if part.due_ms and part.due_ms <= now_ms:
                part.due_ms = 0
                self._consumer.resume([TopicPartition(part.topic, part.partition)])

    def check_idle(self, seconds: float) -> None:
        """Give up on an end that nothing leads to any more.

        Args:
            seconds: How long nothing has come.

        Raises:
            BrokerUnavailable: It has been too long.
        """
        if self._ends is not None and seconds > _IDLE_SECONDS:
            hint = f" ({self._connection})" if self._connection else ""
            what = f"nothing came of {', '.join(self._names)} for {seconds:.0f} s, before the end{hint}"
            raise BrokerUnavailable(what, UNREACHABLE_REMEDY)

    def check_topics(self) -> None:
        """Look, once a minute, whether a topic was created again and the client library still reads the old one.

        It takes the leader epochs of the new topic, which count from 0, for old news when the broker was restarted
        since the old topic was created, and then waits for ever.

        Raises:
            BrokerRefused: One was, or a topic is gone.
        """
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            ids = self._topics.topic_ids({part.topic for part in self.partitions.values()})
        except BrokerUnavailable:
            return
        for part in self.partitions.values():
            if ids[part.topic] != part.topic_id:
                raise BrokerRefused(
                    f"{part.topic}:{part.partition}: the topic was created again, and nothing of the new one was read yet",
                    "Start again; nothing is lost",
                )

    @property
    def caught_up(self) -> bool:
        """Whether every assigned partition has reached the end asked for; never when none is."""
        return self._ends is not None and self.assigned and all(part.caught_up for part in self.partitions.values())

    def commit(self, timeout: float | None = None) -> None:
        """Commit how far the assigned partitions are processed.

        Args:
            timeout: Seconds to go on trying while the coordinator is away; None for a minute.

        Raises:
            BrokerError: The group's coordinator refused or did not answer.
        """
        done = [part for part in self.partitions.values() if part.next is not None and part.next != part.committed]
        if not done:
            return
        offsets = [TopicPartition(part.topic, part.partition, part.next or 0) for part in done]
        doing = "committing the input offsets"
        results = self._patiently(lambda left: self._commit(offsets, doing, left), timeout)
        for part, committed in zip(done, results, strict=True):
            part.committed = part.next if committed else part.committed

    def _commit(self, offsets: list[TopicPartition], doing: str, timeout: float) -> list[bool]:
        """Commit, and say of each offset whether it is."""
        try:
            results = _within(timeout, lambda: self._consumer.commit(offsets=offsets, asynchronous=False))
        except TimeoutError:
            hint = f" ({self._connection})" if self._connection else ""
            raise BrokerUnavailable(f"{doing}: no answer for {timeout:.0f} s{hint}", UNREACHABLE_REMEDY) from None
        except KafkaException as error:
            if error.args[0].code() not in _OVERTAKEN:
                raise broker_error(error.args[0], doing, self._connection) from error
            return [False] * len(offsets)
        for at in results:
            if at.error and at.error.code() not in _OVERTAKEN:
                raise broker_error(at.error, f"{doing}, {at.topic}:{at.partition}")
        return [at.error is None for at in results]

    def _committed(self, parts: list[TopicPartition]) -> list[TopicPartition]:
        doing = "reading the committed offsets"
        try:
            found: list[TopicPartition] = self._consumer.committed(parts, timeout=10)
        except KafkaException as error:
            raise broker_error(error.args[0], doing, self._connection) from error
        for at in found:
            if at.error:
                raise broker_error(at.error, f"{doing}, {at.topic}:{at.partition}")
        return found

    def _patiently(self, action: Callable[[float], T], timeout: float | None = None) -> T:
        """Ask again while a broker is away or a coordinator is on its way; `action` gets the seconds that are left."""
        deadline = time.monotonic() + (_PATIENCE_SECONDS if timeout is None else timeout)
        while True:
            try:
                return action(max(deadline - time.monotonic(), _LEAST_SECONDS))
            except BrokerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_WAIT_SECONDS)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    def abandon(self) -> None:
        """Leave the group without finishing anything: what is not committed is read again."""
        self._before_revoke = lambda: None
        self.partitions.clear()
        self._consumer.close()

    def _on_assign(self, consumer: Consumer, added: list[TopicPartition]) -> None:
        self.assigned = True
        self._statistics.rebalances += 1
        if not added:
            return
        names = {part.topic for part in added}
        ids = self._patiently(lambda left: self._topics.topic_ids(names))
        marks = self._patiently(lambda left: self._topics.marks(names))
        for part in self._patiently(lambda left: self._committed(added)):
            place = (part.topic, part.partition)
            self.partitions[place] = self._new(part.topic, part.partition, ids[part.topic])
            if part.offset >= 0:
                low = marks[place].low
                self.partitions[place].next, self.partitions[place].committed = max(part.offset, low), part.offset
                self._count_expired(part.topic, part.partition, part.offset, low)

    def _on_revoke(self, consumer: Consumer, gone: list[TopicPartition]) -> None:
        self._statistics.rebalances += 1
        self._before_revoke()
        self._forget(gone)

    def _on_lost(self, consumer: Consumer, gone: list[TopicPartition]) -> None:
        self._statistics.rebalances += 1
        self._forget(gone)

    def _subscribe(self) -> None:
        self._consumer.subscribe(
            self._names, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _join_again(self) -> None:
        """Join the group a second time, as the member that it is by now.

        A static member that comes back within its session gets its partitions back without a rebalance. If it led
        the group it still does, but is not told so before version 9 of JoinGroup (KIP-814), of which librdkafka
        speaks 5: added partitions, which a leader has to look for, would belong to nobody for as long as it runs.
        """
        self._before_revoke()  # here: a commit in the callback of an unsubscription is not answered
        self._joins_again = self.assigned = False
        self._consumer.unsubscribe()
        self._subscribe()

    def _forget(self, gone: list[TopicPartition]) -> None:
        for part in gone:
            self.partitions.pop((part.topic, part.partition), None)

    def _new(self, topic: str, partition: int, topic_id: str) -> InputPartition:
        end = None if self._ends is None else self._ends.get((topic, partition), 0)
        return InputPartition(topic, partition, self._via, topic_id, end, self._cluster)

    def _count_expired(self, topic: str, partition: int, expected: int, low: int) -> None:
        if low > expected:
            self._statistics.expired += low - expected
            _LOG.warning(
                "%s:%d: retention deleted offsets %d to %d before they were read", topic, partition, expected, low - 1
            )

    def _on_error(self, error: KafkaError) -> None:
        self._connection = connection_trouble(error.str())
        if error.fatal():
            raise BrokerRefused(f"the consumer failed: {error.str()}", "Start again; nothing is lost")


def _within(timeout: float, action: Callable[[], T]) -> T:
    """Call in a thread of its own, and wait no longer than `timeout` seconds.

    A commit has no timeout in librdkafka: it waits for a coordinator for as long as there is none.

    Raises:
        TimeoutError: It has not returned.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:  # it is raised where the answer is waited for
            answers.put((None, error))

    threading.Thread(target=call, name="headwater-commit", daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast("T", answer)
