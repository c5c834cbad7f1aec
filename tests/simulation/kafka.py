"""A broker in memory: topics with ids, partitions as lists, retention, growth, consumer groups; and its clock."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from aggregations.definition.element import Record
from envelope.headers import Headers
from jobs.republish.growth import Note
from persistence.kafka.facts import Watermarks

_BEGIN_NS = 1_000_000_000 * 10**9
_MARKED = 7  # one in this many offsets is not a record


class Clock:
    """A clock that only the simulation advances. Replaces the module `time`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restart the clock."""
        self._ns = _BEGIN_NS

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._ns

    def monotonic(self) -> float:
        """Seconds."""
        return self._ns / 1e9

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self._ns += round(seconds * 1e9)


CLOCK = Clock()
"""The clock of the running world. One runs at a time."""


@dataclass(slots=True)
class Partition:
    """One partition.

    Attributes:
        records: Every record since offset 0, including deleted ones, which checks need. None for an offset without a
            record, such as a transaction marker; the last one is always a record.
        low: First offset that is not deleted.
        epochs: (first offset, leader epoch), ascending: the leader epoch in which records were written from there on.
    """

    records: list[Record | None] = field(default_factory=list)
    low: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    @property
    def high(self) -> int:
        """End of the log."""
        return len(self.records)

    @property
    def leader_epoch(self) -> int:
        """Epoch of its leader."""
        return self.epochs[-1][1]

    def epoch_at(self, offset: int) -> int:
        """Leader epoch in which the record at an offset was written."""
        return max(epoch for first, epoch in self.epochs if first <= offset)

    def end_of(self, epoch: int) -> int:
        """Where the records of a leader epoch end, and of those before."""
        return min((first for first, later in self.epochs if later > epoch), default=self.high)

    def elect(self, lost: int = 0) -> None:
        """Get another leader, which does not have the newest records, and gives their offsets to new ones (KIP-320)."""
        del self.records[max(self.low, self.high - lost) :]
        while self.high > self.low and self.records[-1] is None:
            self.records.pop()
        epoch = self.leader_epoch + 1
        self.epochs = [*(one for one in self.epochs if one[0] < self.high), (self.high, epoch)]


@dataclass(slots=True)
class Log:
    """One topic.

    Attributes:
        topic: Its name.
        topic_id: Its id.
        partitions: Its partitions.
        known: Number of partitions that producers have seen ...
        learned_ns: ... until this time.
    """

    topic: str
    topic_id: str
    partitions: list[Partition]
    known: int = 0
    learned_ns: int = 0

    def records(self) -> Iterator[Record]:
        """All records that are not deleted."""
        for partition in self.partitions:
            yield from (record for record in partition.records[partition.low :] if record)

    def marks(self) -> list[Watermarks]:
        """The watermarks of each partition."""
        return [Watermarks(one.low, one.high, one.leader_epoch) for one in self.partitions]


class Committed(NamedTuple):
    """A committed offset.

    Attributes:
        offset: The offset.
        metadata: The metadata committed with it.
        by_member: A member of the group committed it, not a tool.
        leader_epoch: Leader epoch of the last record before it; None if a tool committed it.
    """

    offset: int
    metadata: str = ""
    by_member: bool = False
    leader_epoch: int | None = None


class Member(NamedTuple):
    """The member of a group at one of its places.

    Attributes:
        generation: Number of joins of the group at that time; members that joined earlier at this place are fenced.
        seen: Time of its last request to the coordinator, in seconds.
        has: Its partitions; no other member gets them before it releases them.
    """

    generation: int
    seen: float
    has: frozenset[tuple[str, int]] = frozenset()


@dataclass(slots=True)
class Group:
    """A consumer group.

    Attributes:
        joined: Number of joins. Every second one reassigns the partitions.
        members: The member at each place.
    """

    joined: int = 0
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def shift(self) -> int:
        """Number of places by which the partitions have moved."""
        return self.joined // 2


class Cluster:
    """Topics and consumer groups.

    Attributes:
        topics: Log by topic name.
        groups: Committed offsets by (group, topic, partition).
        readers: The members of each group.
    """

    def __init__(self) -> None:
        self.topics: dict[str, Log] = {}
        self.groups: dict[tuple[str, str, int], Committed] = {}
        self.readers: defaultdict[str, Group] = defaultdict(Group)
        self._created = 0
        self._keyless = 0

    def create(self, topic: str, partitions: int, *, late_commits: bool = False) -> Log:
        """Create a topic; an existing one is deleted first. The new topic gets a new id.

        Args:
            topic: Its name.
            partitions: Number of its partitions.
            late_commits: The group's commits for the old topic arrive after its deletion, and stay.
        """
        self._created += 1
        log = self.topics[topic] = Log(topic, f"{topic}-{self._created}", [Partition() for _ in range(partitions)])
        self.groups = {at: one for at, one in self.groups.items() if at[1] != topic or (late_commits and one.by_member)}
        return log

    def grow(self, topic: str, *, by: int = 1, learned: float = 0.0) -> None:
        """Add partitions.

        Args:
            topic: Their topic.
            by: Number of new partitions.
            learned: Seconds until producers see them.
        """
        log = self.topics[topic]
        log.known, log.learned_ns = self._known(log), CLOCK.time_ns() + round(learned * 1e9)
        log.partitions += [Partition() for _ in range(by)]

    def _known(self, log: Log) -> int:
        """Number of partitions that producers have seen."""
        return log.known if CLOCK.time_ns() < log.learned_ns else len(log.partitions)

    def place(self, topic: str, key: bytes | None, partition: int | None = None) -> int:
        """The partition of a record. Keys that differ in one digit have different ones; without a key it is arbitrary."""
        wanted = partition if partition is not None else self._keyless if key is None else sum(key)
        return wanted % self._known(self.topics[topic])

    def produce(
        self, topic: str, key: bytes | None, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Record:
        """Append a record, to the key's partition unless one is given."""
        log, place = self.topics[topic], self.place(topic, key, partition)
        self._keyless += key is None
        records = log.partitions[place].records
        if len(records) % _MARKED == _MARKED - 2:
            records.append(None)
        now_ms = CLOCK.time_ns() // 1_000_000
        record = Record(topic, place, len(records), key, value, now_ms, tuple(headers), log.topic_id)
        records.append(record)
        return record

    def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Records from `offset` on, or from the first one that is not deleted."""
        log = self.topics[topic].partitions[partition]
        rest = islice(log.records, max(offset, log.low), None)
        return list(islice((record for record in rest if record), limit))

    def commit(self, group: str, topic: str, partition: int, one: Committed) -> None:
        """Store a committed offset of a consumer group."""
        self.groups[group, topic, partition] = one

    def committed(self, group: str, topic: str, partition: int) -> int:
        """A group's committed offset of the current incarnation of a topic; 0 if there is none."""
        one, log = self.groups.get((group, topic, partition), Committed(0)), self.topics[topic]
        if Note.read(one.metadata).topic_id not in ("", log.topic_id):
            return 0
        return (
            one.offset
            if one.leader_epoch is None
            else min(one.offset, log.partitions[partition].end_of(one.leader_epoch))
        )
