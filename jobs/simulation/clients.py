"""The clients of the simulated broker: as much of confluent-kafka's as a republisher uses, and what it asks of topics.

`simulated_clients` puts them, and the simulated clock, where the modules of `jobs.republish` have the real ones; of
their own code nothing is replaced.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from aggregations.element import Record
from envelope.headers import Headers
from jobs.republish import input as reading
from jobs.republish import offsets, service, worker
from jobs.simulation.kafka import CLOCK, Cluster
from jobs.simulation.patch import Patch, patched
from persistence.faults import effect
from persistence.kafka import Marks

DELIVER = "deliver"
"""The effect of one record that reaches its topic, within the flush."""
_CREATE_TIME = 1
_MOST_BYTES = 1 << 20

Place = tuple[str, int]
"""Topic and partition."""


class Sent(NamedTuple):
    """A record in a producer's queue."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(slots=True)
class Session:
    """One life of a service: the broker it is connected to, and how much it may read. Stands in the place of `KafkaSettings`.

    Attributes:
        cluster: The broker.
        deliver: Appends a record to its topic.
        allowed: Number of records that it may still read, by partition.
        idle: How often it may look in vain before it is told to stop.
        reorders: Its producer may swap neighbours.
        stop: Tells the service to stop.
        waits: Called once when there is nothing to read; returns when it is to look again.
        options: Nothing: what `KafkaSettings` has more.
    """

    cluster: Cluster
    deliver: Callable[[Sent], None]
    allowed: dict[Place, int]
    idle: int = 0
    reorders: bool = False
    stop: Callable[[], None] = lambda: None
    waits: Callable[[], None] | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def client(self, on_error: object = None, **options: Any) -> dict[str, Any]:
        """The configuration of a client."""
        return {"session": self, **{name.replace("_", "."): value for name, value in options.items()}}


class SimulatedMessage:
    """A record as a consumer delivers it."""

    __slots__ = ("_record",)

    def __init__(self, record: Record) -> None:
        self._record = record

    def error(self) -> None:
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


class SimulatedConsumer:
    """A member of a consumer group, until the group is joined again by another one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._session: Session = config["session"]
        self._cluster: Cluster = self._session.cluster
        self._group: str = config["group.id"]
        self._generation = 0
        self._positions: dict[Place, int] = {}
        self._paused: set[Place] = set()

    def subscribe(self, topics: Sequence[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._topics, self._on_assign, self._on_lost = topics, on_assign, on_lost
        self._cluster.generations[self._group] += 1
        self._generation = self._cluster.generations[self._group]

    def memberid(self) -> str:
        return f"{self._group}-{self._generation}"

    def consume(self, count: int, timeout: float) -> list[SimulatedMessage]:
        if self._is_out:
            self._on_lost(self, _parts(self._positions))
            self._positions.clear()
            self._session.stop()
            return []
        logs = [self._cluster.topics[topic] for topic in self._topics]
        places = [(log.topic, number) for log in logs for number in range(len(log.partitions))]
        if new := [place for place in places if place not in self._positions]:
            self._on_assign(self, _parts(new))
        got = [SimulatedMessage(record) for record in self._records(count)]
        if not got:
            self._idle(timeout)
        return got

    def _idle(self, timeout: float) -> None:
        session = self._session
        CLOCK.sleep(timeout)
        waits, session.waits = session.waits, None
        if waits:
            waits()
            return
        session.idle -= 1
        if session.idle < 0 or not self._paused:
            session.stop()

    def _records(self, count: int) -> Iterator[Record]:
        allowed = self._session.allowed
        for place in self._positions:
            most = min(count, allowed.get(place, 0))
            if most <= 0 or place in self._paused:
                continue
            # A topic that was created again is followed without a word. What lies behind its end is read from its beginning.
            end = self._cluster.topics[place[0]].partitions[place[1]].high
            records = self._cluster.read(*place, self._positions[place] if self._positions[place] <= end else 0, most)
            if records:
                self._positions[place] = records[-1].offset + 1
                allowed[place] -= len(records)
                count -= len(records)
                yield from records

    def incremental_assign(self, parts: Sequence[TopicPartition]) -> None:
        for part in parts:
            self._positions[part.topic, part.partition] = 0 if part.offset == OFFSET_BEGINNING else part.offset

    def committed(self, parts: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [self._committed(part.topic, part.partition) for part in parts]

    def _committed(self, topic: str, partition: int) -> TopicPartition:
        offset, metadata = self._cluster.groups.get((self._group, topic, partition), (OFFSET_INVALID, ""))
        return TopicPartition(topic, partition, offset, metadata=metadata)

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool) -> Sequence[TopicPartition]:
        if self._is_out:
            raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))
        for part in offsets:
            self._cluster.commit(self._group, part.topic, part.partition, part.offset, part.metadata or "")
        return offsets

    def get_watermark_offsets(self, part: TopicPartition, cached: bool) -> tuple[int, int]:
        marks = _marks(self._cluster, part.topic)[part.partition]
        return marks.low, marks.high

    def pause(self, parts: Sequence[TopicPartition]) -> None:
        self._paused |= {(part.topic, part.partition) for part in parts}

    def resume(self, parts: Sequence[TopicPartition]) -> None:
        self._paused -= {(part.topic, part.partition) for part in parts}

    def seek(self, part: TopicPartition) -> None:
        place = part.topic, part.partition
        self._session.allowed[place] = self._session.allowed.get(place, 0) + self._positions[place] - part.offset
        self._positions[place] = part.offset

    def close(self) -> None:
        """Leave the group."""

    @property
    def _is_out(self) -> bool:
        return self._cluster.generations[self._group] != self._generation


class SimulatedTopics:
    """What is known of topics."""

    def __init__(self, settings: Session, *, timeout: float = 10) -> None:
        self._cluster = settings.cluster

    def check(self) -> None:
        """There is a broker."""

    def check_rights(self, *, read: Iterable[str], write: Iterable[str]) -> None:
        """There are no rights."""

    def max_message_bytes(self, names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, _MOST_BYTES)

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self._cluster.topics[name].topic_id for name in names}

    def marks(self, names: Iterable[str]) -> dict[Place, Marks]:
        return {(name, part): marks for name in names for part, marks in enumerate(_marks(self._cluster, name))}

    def ends(self, names: Iterable[str]) -> dict[Place, int]:
        return {place: marks.high for place, marks in self.marks(names).items()}


class SimulatedProducer:
    """A producer whose records stay in its queue until the flush: any number of them arrive when it dies there."""

    def __init__(self, settings: Session, **options: Any) -> None:
        self._session = settings
        self._queue: deque[Sent] = deque()
        self._flushes = 0

    def send(self, topic: str, value: bytes | None, key: bytes | None = None, headers: Headers = ()) -> None:
        self._queue.append(Sent(topic, key, value, headers))

    def send_many(self, topic: str, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            self.send(topic, message["value"], message.get("key"))

    def flush(self, timeout: float | None = None) -> None:
        queue = self._queue
        if self._session.reorders:
            self._flushes += 1
            for i in range(self._flushes % 2, len(queue) - 1, 2):
                queue[i], queue[i + 1] = queue[i + 1], queue[i]
        while queue:
            effect(DELIVER, lambda: self._session.deliver(queue.popleft()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.clear()


def _parts(places: Iterable[Place]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for topic, partition in places]


def _marks(cluster: Cluster, topic: str) -> list[Marks]:
    return [Marks(partition.low, partition.high) for partition in cluster.topics[topic].partitions]


_PATCHES: Sequence[Patch] = (
    (reading, "Consumer", SimulatedConsumer),
    (reading, "Topics", SimulatedTopics),
    (service, "Topics", SimulatedTopics),
    (service, "AcknowledgedProducer", SimulatedProducer),
    # A commit that is never answered is librdkafka's to have; here no thread has to wait for it.
    (offsets, "_within", lambda timeout, action: action()),
    *((module, "time", CLOCK) for module in (reading, offsets, service, worker)),
    (logging.getLogger("headwater.republish"), "disabled", True),
)


@contextmanager
def simulated_clients() -> Iterator[None]:
    """Let republishers of this process meet the simulated broker until the block ends."""
    CLOCK.reset()
    with patched(_PATCHES):
        yield
