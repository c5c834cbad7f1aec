"""A broker in memory: topics with ids, partitions as lists, retention, growth, and group offsets."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from aggregations.element import Record


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
    """Topics and group offsets.

    Attributes:
        topics: Log by topic name.
        groups: Committed offset by (group, topic, partition).
    """

    def __init__(self) -> None:
        self.topics: dict[str, Log] = {}
        self.groups: dict[tuple[str, str, int], int] = {}
        self._created = 0

    def create(self, topic: str, partitions: int) -> Log:
        """Create a topic; one that exists is deleted first, and gets another id."""
        self._created += 1
        log = self.topics[topic] = Log(topic, f"{topic}-{self._created}", [Partition() for _ in range(partitions)])
        self.groups = {at: offset for at, offset in self.groups.items() if at[1] != topic}
        return log

    def grow(self, topic: str) -> None:
        """Add a partition."""
        self.topics[topic].partitions.append(Partition())

    def produce(self, topic: str, key: bytes, value: bytes, partition: int | None = None) -> Record:
        """Append a record, to the key's partition unless one is given."""
        log = self.topics[topic]
        count = len(log.partitions)
        place = zlib.crc32(key) % count if partition is None else partition % count
        records = log.partitions[place].records
        record = Record(topic, place, len(records), key, value, topic_id=log.topic_id)
        records.append(record)
        return record

    def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Records from `offset` on, or from the first one that is still there."""
        log = self.topics[topic].partitions[partition]
        begin = max(offset, log.low)
        return log.records[begin : begin + limit]
