"""The simulated consumer: a member of a group that shares partitions, commits, and is fenced."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from jobs.republish.place import INSTANCE
from persistence.commit.faults import effect
from persistence.errors import Transient
from tests.simulation.kafka import CLOCK, Cluster, Committed, Group, Member
from tests.simulation.life import Life, Place, SimulatedMessage, SimulatedReport, demand

T = TypeVar("T")

_COMMIT, _COMMITTED = "coordinator:commit", "coordinator:committed"
_CONSUMER = {"enable.auto.commit": False, "enable.auto.offset.store": False, "isolation.level": "read_committed"}


class SimulatedConsumer:
    """A member of a consumer group, until another one takes its place.

    A replaced member learns of it: a static member is fenced, any other one has lost its partitions and joins again.
    It gets a partition of another member when that member releases it, or has lost its own place.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        demand(config, _CONSUMER)
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

    def list_topics(self, topic: str, timeout: float) -> None:
        """Simulated clients never lose their brokers."""

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
            log = self._cluster.topics[at[0]].partitions[at[1]]
            end = log.high
            if self._positions[at] > end:
                # A recreated topic is followed silently; its end is before the current position.
                self._positions[at] = 0
            records = self._cluster.read(*at, self._positions[at], most)
            found += [SimulatedMessage(record, log.epoch_at(record.offset)) for record in records]
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
        epoch = -1 if one.leader_epoch is None else one.leader_epoch
        return TopicPartition(topic, partition, one.offset, metadata=one.metadata, leader_epoch=epoch)

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool) -> Sequence[TopicPartition]:
        return _answered(_COMMIT, lambda: self._commit(offsets))

    def _commit(self, offsets: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        if self._is_out:
            code = KafkaError.FENCED_INSTANCE_ID if self._static else KafkaError.ILLEGAL_GENERATION
            raise KafkaException(KafkaError(code))
        self._heartbeat()
        for part in offsets:
            one = Committed(part.offset, part.metadata or "", by_member=True, leader_epoch=part.leader_epoch)
            self._cluster.commit(self._group, part.topic, part.partition, one)
        return offsets

    def get_watermark_offsets(self, part: TopicPartition, cached: bool = True) -> tuple[int, int]:
        marks = self._cluster.topics[part.topic].marks()[part.partition]
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


def _answered(point: str, action: Callable[[], T]) -> T:
    """Send a request to the coordinator; errors are raised as in confluent-kafka."""
    try:
        return effect(point, action)
    except Transient as error:
        raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR)) from error


def _parts(places: Iterable[Place]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for topic, partition in places]
