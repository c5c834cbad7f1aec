"""A broker in memory: topics with ids, partitions as lists, retention, growth, consumer groups; and its clock."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aggregations.element import Record
from envelope.headers import Headers

_BEGIN_NS = 1_000_000_000 * 10**9


class Clock:
    """Time that moves only when it is told to; stands in the place of the module `time`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self._ns = _BEGIN_NS

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._ns

    def monotonic(self) -> float:
        """Seconds."""
        return self._ns / 1e9

    def sleep(self, seconds: float) -> None:
        """Go on by so much."""
        self._ns += round(seconds * 1e9)


CLOCK = Clock()
"""Of the world that runs. One runs at a time."""


@dataclass(slots=True)
class Partition:
    """One partition.

    Attributes:
        records: Every record since offset 0, deleted ones included: tests need what a broker forgets.
        low: First offset that is still there.
    """

    records: list[Record] = field(default_factory=list)
    low: int = 0

    @property
    def high(self) -> int:
        """End of the log."""
        return len(self.records)


@dataclass(slots=True)
class Log:
    """One topic."""

    topic: str
    topic_id: str
    partitions: list[Partition]

    def records(self) -> Iterator[Record]:
        """All records that are still there."""
        for partition in self.partitions:
            yield from partition.records[partition.low :]


class Cluster:
    """Topics and consumer groups.

    Attributes:
        topics: Log by topic name.
        groups: Committed offset and its metadata by (group, topic, partition).
        generations: How often a group was joined: who joined it before its last member is a member no more.
    """

    def __init__(self) -> None:
        self.topics: dict[str, Log] = {}
        self.groups: dict[tuple[str, str, int], tuple[int, str]] = {}
        self.generations: Counter[str] = Counter()
        self._created = 0

    def create(self, topic: str, partitions: int) -> Log:
        """Create a topic; one that exists is deleted first, and gets another id."""
        self._created += 1
        log = self.topics[topic] = Log(topic, f"{topic}-{self._created}", [Partition() for _ in range(partitions)])
        # Now and then a commit comes in behind the deletion. It says which topic it counts in.
        stays = self._created % 2 == 1
        self.groups = {at: one for at, one in self.groups.items() if at[1] != topic or (stays and one[1])}
        return log

    def grow(self, topic: str) -> None:
        """Add a partition."""
        self.topics[topic].partitions.append(Partition())

    def produce(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Record:
        """Append a record, to the key's partition unless one is given."""
        log = self.topics[topic]
        count = len(log.partitions)
        # Keys that differ in one digit are in different partitions.
        place = (sum(key) if partition is None else partition) % count
        records = log.partitions[place].records
        now_ms = CLOCK.time_ns() // 1_000_000
        record = Record(topic, place, len(records), key, value, now_ms, tuple(headers), log.topic_id)
        records.append(record)
        return record

    def read(self, topic: str, partition: int, offset: int, limit: int) -> Sequence[Record]:
        """Records from `offset` on, or from the first one that is still there."""
        log = self.topics[topic].partitions[partition]
        begin = max(offset, log.low)
        return log.records[begin : begin + limit]

    def commit(self, group: str, topic: str, partition: int, offset: int, metadata: str = "") -> None:
        """Keep an offset of a consumer group."""
        self.groups[group, topic, partition] = offset, metadata

    def committed(self, group: str, topic: str, partition: int) -> int:
        """What a group has committed of a topic as it is now; 0 for nothing."""
        offset, metadata = self.groups.get((group, topic, partition), (0, ""))
        return 0 if metadata and metadata != self.topics[topic].topic_id else offset
