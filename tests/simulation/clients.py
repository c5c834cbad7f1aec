"""Clients of the simulated broker, with the part of confluent-kafka's interface that a republisher uses.

`simulated_clients` replaces the clients and the clock in the republisher's modules and its producer. Besides the clients
it replaces `Topics`, which queries the broker, `KafkaSettings`, and the thread that waits for a commit.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from aggregations.definition.element import Record
from envelope.headers import Headers
from jobs.republish import absence, growing, offsets, place, service, worker
from jobs.republish import input as reading
from jobs.republish.place import INSTANCE, SESSION_MS
from persistence.commit.faults import effect
from persistence.errors import Transient
from persistence.kafka import TopicFacts, Watermarks
from persistence.kafka import producer as producing
from tests.simulation.kafka import CLOCK, Cluster, Committed, Group, Member
from tests.simulation.patch import Patch, patched

T = TypeVar("T")
Place = tuple[str, int]
"""Topic and partition."""

DELIVER = "deliver"
"""The effect of one record being appended to its topic, within the flush."""
_COMMIT, _COMMITTED = "coordinator:commit", "coordinator:committed"
_CREATE_TIME = 1
_MOST_BYTES = 1 << 20
# Settings that exactness depends on. A real broker behaves differently with others; this one ignores them.
_CONSUMER = {"enable.auto.commit": False, "enable.auto.offset.store": False, "isolation.level": "read_committed"}
_PRODUCER = {"enable.idempotence": True, "acks": "all"}
_GAPLESS = {"enable.gapless.guarantee": True, "message.timeout.ms": 0}


class Sent(NamedTuple):
    """A record in a producer's queue."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(slots=True)
class Life:
    """One life of a service: its broker, and how much it may read. Replaces `KafkaSettings`.

    Attributes:
        cluster: The broker.
        deliver: Appends a record to its topic.
        allowed: Number of records that it may still read, by partition.
        idle: Number of unsuccessful polls, while a record waits for a retry, after which it is stopped.
        revoked: Number of polls after which some partitions go to another member, and come back; negative for never.
        reorders: Its producer may swap neighbours.
        place: Its place in its group.
        places: Number of places among which the group's partitions are divided. It is one if the service is alone; all
            other members then count as gone.
        options: Further settings of `KafkaSettings`.
        stop: Stops the service.
        pause: Called once if there is nothing to read; returns when it should poll again.
    """

    cluster: Cluster
    deliver: Callable[[Sent], None]
    allowed: dict[Place, int]
    idle: int = 0
    revoked: int = -1
    reorders: bool = False
    place: int = 0
    places: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    stop: Callable[[], None] = lambda: None
    pause: Callable[[], None] | None = None

    def client(self, on_error: object = None, **options: Any) -> dict[str, Any]:
        """The configuration of a client."""
        return {"life": self, **{name.replace("_", "."): value for name, value in options.items()}, **self.options}


class SimulatedMessage:
    """A record as a consumer delivers it."""

    __slots__ = ("_record",)

    def __init__(self, record: Record) -> None:
        self._record = record

    def error(self) -> KafkaError | None:
        return None

    def topic(self) -> str:
        return self._record.topic

    def partition(self) -> int:
        return self._record.partition

    def offset(self) -> int:
        return self._record.offset

    def key(self) -> bytes | None:
        return self._record.key

    def value(self) -> bytes | None:
        return self._record.value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return list(self._record.headers) or None

    def timestamp(self) -> tuple[int, int]:
        return _CREATE_TIME, self._record.timestamp_ms

    def leader_epoch(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self._record.value or b"")


class SimulatedReport(SimulatedMessage):
    """A client's event other than a record: an error, the end of a partition, an undelivered record."""

    __slots__ = ("_error",)

    def __init__(self, code: int, topic: str = "", partition: int = 0, offset: int = 0) -> None:
        super().__init__(Record(topic, partition, offset, None, None))
        self._error = KafkaError(code)

    def error(self) -> KafkaError:
        return self._error


class SimulatedConsumer:
    """A member of a consumer group, until another one takes its place.

    A replaced member learns of it: a static member is fenced, any other one has lost its partitions and joins again.
    It gets a partition of another member when that member releases it, or has lost its own place.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _demand(config, _CONSUMER)
        self._life: Life = config["life"]
        self._cluster: Cluster = self._life.cluster
        self._group: str = config["group.id"]
        self._static = INSTANCE in config
        self._reset: str = config["auto.offset.reset"]
        self._tells_ends: bool = config["enable.partition.eof"]
        self._generation = 0
        self._alone = self._life.places == 1
        self._positions: dict[Place, int] = {}
        self._told: dict[Place, int] = {}
        self._paused: set[Place] = set()

    def subscribe(self, topics: Sequence[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._topics = topics
        self._on_assign, self._on_revoke, self._on_lost = on_assign, on_revoke, on_lost
        self._join()

    def unsubscribe(self) -> None:
        self._give_up(list(self._positions))

    @property
    def _readers(self) -> Group:
        return self._cluster.readers[self._group]

    def _join(self) -> None:
        readers = self._readers
        readers.joined += 1
        self._generation = readers.joined
        if self._alone:
            readers.members.clear()
        self._alone = False  # a member that rejoins finds others
        self._heartbeat()

    def _heartbeat(self) -> None:
        self._readers.members[self._life.place] = Member(
            self._generation, CLOCK.monotonic(), frozenset(self._positions)
        )

    @property
    def _is_out(self) -> bool:
        member = self._readers.members.get(self._life.place)
        return member is None or member.generation != self._generation

    def memberid(self) -> str:
        return f"{self._group}-{self._generation}"

    def _dealt(self) -> list[Place]:
        """The partitions of this member, including those that other members have yet to release."""
        logs = [self._cluster.topics[topic] for topic in self._topics]
        places = [(log.topic, number) for log in logs for number in range(len(log.partitions))]
        life, shift = self._life, self._readers.shift
        return [one for number, one in enumerate(places) if (number + shift) % life.places == life.place]

    def consume(self, count: int, timeout: float) -> list[SimulatedMessage]:
        if self._is_out:
            if self._static:
                return [SimulatedReport(KafkaError.FENCED_INSTANCE_ID)]
            self._on_lost(self, _parts(self._positions))
            self._forget(list(self._positions))
            self._join()
        self._heartbeat()
        self._life.revoked -= 1
        if self._life.revoked == 0:
            self._give_up(list(self._positions)[::2])
        dealt = self._dealt()
        self._give_up([one for one in self._positions if one not in dealt])
        others = [one.has for place, one in self._readers.members.items() if place != self._life.place]
        taken = {*self._positions, *chain(*others)}
        if new := [one for one in dealt if one not in taken]:
            self._on_assign(self, _parts(new))
        self._heartbeat()
        return self._look(count) or (self._waited(timeout) and self._look(count)) or []

    def _give_up(self, places: list[Place]) -> None:
        """Release partitions to another member, after committing their processed records."""
        if places:
            self._on_revoke(self, _parts(places))
            self._forget(places)

    def _forget(self, places: list[Place]) -> None:
        for one in places:
            del self._positions[one]  # it stays paused, as in librdkafka, if the member gets it again

    def _waited(self, timeout: float) -> bool:
        """Whether records may have arrived meanwhile."""
        life = self._life
        CLOCK.sleep(timeout)
        pause, life.pause = life.pause, None
        if pause:
            pause()
            return True
        life.idle -= 1
        if life.idle < 0 or not self._paused:
            life.stop()
        return False

    def _look(self, count: int) -> list[SimulatedMessage]:
        found: list[SimulatedMessage] = []
        allowed = self._life.allowed
        for at in self._positions:
            most = min(count - len(found), allowed.get(at, 0))
            if most <= 0 or at in self._paused:
                continue
            end = self._cluster.topics[at[0]].partitions[at[1]].high
            if self._positions[at] > end:
                # A recreated topic is followed silently; its end is before the current position.
                self._positions[at] = 0
            records = self._cluster.read(*at, self._positions[at], most)
            found += map(SimulatedMessage, records)
            if records:
                self._positions[at] = records[-1].offset + 1
                allowed[at] -= len(records)
            if self._tells_ends and len(records) < most and self._told.get(at) != end:
                self._told[at] = end
                found.append(SimulatedReport(KafkaError._PARTITION_EOF, *at, end))
        return found

    def incremental_assign(self, parts: Sequence[TopicPartition]) -> None:
        for part in parts:
            self._positions[part.topic, part.partition] = self._begin(part)

    def _begin(self, part: TopicPartition) -> int:
        low, high = self.get_watermark_offsets(part)
        if part.offset >= 0:
            return part.offset
        from_low = part.offset == OFFSET_BEGINNING or (part.offset != OFFSET_END and self._reset == "earliest")
        return low if from_low else high

    def committed(self, parts: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return _answered(_COMMITTED, lambda: [self._committed(part.topic, part.partition) for part in parts])

    def _committed(self, topic: str, partition: int) -> TopicPartition:
        one = self._cluster.groups.get((self._group, topic, partition), Committed(OFFSET_INVALID))
        return TopicPartition(topic, partition, one.offset, metadata=one.metadata)

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool) -> Sequence[TopicPartition]:
        return _answered(_COMMIT, lambda: self._commit(offsets))

    def _commit(self, offsets: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        if self._is_out:
            code = KafkaError.FENCED_INSTANCE_ID if self._static else KafkaError.ILLEGAL_GENERATION
            raise KafkaException(KafkaError(code))
        self._heartbeat()
        for part in offsets:
            one = Committed(part.offset, part.metadata or "", by_member=True)
            self._cluster.commit(self._group, part.topic, part.partition, one)
        return offsets

    def get_watermark_offsets(self, part: TopicPartition, cached: bool = True) -> tuple[int, int]:
        marks = _marks(self._cluster, part.topic)[part.partition]
        return marks.low, marks.high

    def pause(self, parts: Sequence[TopicPartition]) -> None:
        self._paused |= {(part.topic, part.partition) for part in parts}

    def resume(self, parts: Sequence[TopicPartition]) -> None:
        self._paused -= {(part.topic, part.partition) for part in parts}

    def seek(self, part: TopicPartition) -> None:
        at = part.topic, part.partition
        self._life.allowed[at] = self._life.allowed.get(at, 0) + self._positions[at] - part.offset
        self._positions[at] = part.offset

    def close(self) -> None:
        if not self._is_out:
            self._give_up(list(self._positions))
            self._heartbeat()


class SimulatedTopics:
    """Facts about topics. Replaces `persistence.kafka.Topics`."""

    def __init__(self, settings: Life, *, timeout: float = 10) -> None:
        self._cluster = settings.cluster

    def check(self) -> None:
        """Do nothing: there is always a broker."""

    def check_rights(self, *, read: Iterable[str], write: Iterable[str]) -> None:
        """Do nothing: rights are not simulated."""

    def max_message_bytes(self, names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, _MOST_BYTES)

    def missing(self, names: Iterable[str]) -> list[str]:
        return []

    def cleanup_policies(self, names: Iterable[str]) -> dict[str, str | None]:
        return dict.fromkeys(names, "delete")

    def describe(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        logs = [self._cluster.topics[name] for name in names]
        return {log.topic: TopicFacts(log.topic, log.topic_id, len(log.partitions)) for log in logs}

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self._cluster.topics[name].topic_id for name in names}

    def marks(self, names: Iterable[str]) -> dict[Place, Watermarks]:
        return {(name, part): marks for name in names for part, marks in enumerate(_marks(self._cluster, name))}

    def ends(self, names: Iterable[str]) -> dict[Place, int]:
        return {at: marks.high for at, marks in self.marks(names).items()}

    def static_member(self, group: str, instance: str) -> str | None:
        """The last member that joined, until its session ends: a static member does not leave its group."""
        member = self._cluster.readers[group].members.get(int(instance[-1]))
        gone = member is None or CLOCK.monotonic() - member.seen > SESSION_MS / 1000
        return None if member is None or gone else f"{group}-{member.generation}"


class SimulatedProducer:
    """A producer whose records stay in its queue until the flush; if it dies there, any number of them arrive.

    If its configuration allows gaps, a failed record is skipped and later ones are sent.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _demand(config, _PRODUCER)
        self._life: Life = config["life"]
        self._gapless = all(config.get(name) == value for name, value in _GAPLESS.items())
        self._reported: Callable[[KafkaError, SimulatedReport], None] = config["on_delivery"]
        self._queue: list[Sent] = []
        self._flushes = 0

    def produce(self, topic: str, value: bytes | None, key: bytes | None, partition: int, headers: Headers) -> None:
        self._queue.append(Sent(topic, key, value, headers))

    def produce_batch(self, topic: str, messages: Sequence[Mapping[str, Any]]) -> int:
        self._queue += [Sent(topic, message.get("key"), message["value"], ()) for message in messages]
        return len(messages)

    def poll(self, timeout: float) -> int:
        return 0

    def flush(self, timeout: float) -> int:
        queue, self._queue = self._queue, []
        failed = False
        for sent in self._ordered(queue):
            try:
                if not (failed and self._gapless):
                    effect(DELIVER, lambda sent=sent: self._life.deliver(sent))  # type: ignore[misc]
                    continue
            except Transient:
                failed = True
            self._reported(KafkaError(KafkaError._MSG_TIMED_OUT), SimulatedReport(0, sent.topic))
        return 0

    def _ordered(self, queue: list[Sent]) -> list[Sent]:
        """Order the queue by partition, each time beginning with another partition."""
        cluster, self._flushes = self._life.cluster, self._flushes + 1
        queue.sort(key=lambda sent: (cluster.place(sent.topic, sent.key) + self._flushes) % 3)
        if self._life.reorders:
            for i in range(self._flushes % 2, len(queue) - 1, 2):
                queue[i], queue[i + 1] = queue[i + 1], queue[i]
        return queue

    def purge(self) -> None:
        self._queue.clear()


def _demand(config: Mapping[str, Any], wanted: Mapping[str, object]) -> None:
    if wrong := [name for name, value in wanted.items() if config.get(name) != value]:
        raise ValueError(f"{', '.join(wrong)}: exactness rests on another value")


def _answered(point: str, action: Callable[[], T]) -> T:
    """Send a request to the coordinator; errors are raised as in confluent-kafka."""
    try:
        return effect(point, action)
    except Transient as error:
        raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR)) from error


def _parts(places: Iterable[Place]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for topic, partition in places]


def _marks(cluster: Cluster, topic: str) -> list[Watermarks]:
    return [Watermarks(partition.low, partition.high) for partition in cluster.topics[topic].partitions]


TIMED = (absence, growing, reading, offsets, place, service, worker, producing)
"""Modules that read the clock."""
_PATCHES: Sequence[Patch] = (
    (reading, "Consumer", SimulatedConsumer),
    (producing, "Producer", SimulatedProducer),
    *((module, "Topics", SimulatedTopics) for module in (absence, reading, place, service)),
    # Only with librdkafka can a commit stay unanswered; here no thread has to wait for it.
    (offsets, "_within", lambda timeout, action: action()),
    *((module, "time", CLOCK) for module in TIMED),
    (logging.getLogger("headwater.republish"), "disabled", True),
)


@contextmanager
def simulated_clients() -> Iterator[None]:
    """Connect republishers of this process to the simulated broker while the block runs."""
    CLOCK.reset()
    with patched(_PATCHES):
        yield
