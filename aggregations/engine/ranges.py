"""Decides what the next batch reads: a range of offsets for each partition of every source."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from aggregations.definition.times import MICROS
from envelope import TopicPartition
from persistence.kafka import BrokerRefused, BrokerUnavailable, Topics
from persistence.manifest import Progress

_ANY: Final = 1 << 62
"""More seconds than there are between two valid event times."""


class Range(NamedTuple):
    """Records of one partition.

    Attributes:
        partition: Its number.
        start: First offset.
        end: Offset after the last; there need not be a record right before it.
        topic: Its topic.
    """

    partition: int
    start: int
    end: int
    topic: str = ""

    @property
    def place(self) -> TopicPartition:
        """Topic and partition."""
        return TopicPartition(self.topic, self.partition)


class Slot(NamedTuple):
    """Ranges that one task reads.

    Attributes:
        number: Number of the slot. A partition is always in the same one, and with it the partitions of this number of
            other topics.
        ranges: The ranges.
    """

    number: int
    ranges: tuple[Range, ...]

    def by_topic(self) -> dict[str, list[Range]]:
        """The ranges of each topic."""
        divided: dict[str, list[Range]] = {}
        for one in self.ranges:
            divided.setdefault(one.topic, []).append(one)
        return divided


class Source:
    """The partitions of a source as the driver sees them.

    Args:
        topics: Administrative access to topics.
        topic: The topic.
        widens: Partitions that are added are read as soon as they are seen.

    Attributes:
        topic: The topic.
        positions: Next offset by partition, as of the last look: those of the run, and those of added partitions.
        epochs: Epoch of each partition's leader, as of the last look; None if the broker gives none.
    """

    def __init__(self, topics: Topics, topic: str, *, widens: bool) -> None:
        self._topics = topics
        self.topic = topic
        self._widens = widens
        self.positions: dict[int, int] = {}
        self.epochs: dict[TopicPartition, int | None] = {}

    def look(self, positions: Mapping[int, int]) -> list[Range]:
        """Ask for the ends, and return all that there is to read, with open transactions left out.

        Args:
            positions: Next offset by partition.

        Raises:
            BrokerUnavailable: The broker does not answer, or knows fewer partitions.
            BrokerRefused: The topic does not have the offsets to read.
        """
        marks = {partition: one for (_, partition), one in self._topics.marks([self.topic]).items()}
        self.epochs = {TopicPartition(self.topic, partition): one.leader_epoch for partition, one in marks.items()}
        if gone := positions.keys() - marks.keys():  # or the broker that answered has not learned of them
            raise BrokerUnavailable(
                f"{self.topic}:{min(gone)} is not among the {len(marks)} partitions that the broker knows",
                "Check the topic with kafka-topics",
            )
        added = dict.fromkeys(marks.keys() - positions.keys() if self._widens else (), 0)
        self.positions = {**positions, **added}
        backlog = []
        for partition, start in sorted(self.positions.items()):
            low, high = marks[partition].low, marks[partition].high
            if not low <= start <= high:
                raise BrokerRefused(
                    f"{self.topic}:{partition} has offsets {low} to {high}, but the next offset to read is {start}",
                    "If records were deleted in the meantime, start the run again to see which ones; otherwise check the broker",
                )
            if start < high:
                backlog.append(Range(partition, start, high, self.topic))
        return backlog


def before(backlog: Sequence[Range], ends: Mapping[TopicPartition, int]) -> list[Range]:
    """The part of the ranges before these ends; nothing of a partition without one."""
    cut = [one._replace(end=min(one.end, ends.get(one.place, 0))) for one in backlog]
    return [one for one in cut if one.start < one.end]


def of_one_branch(backlog: Sequence[Range], logs: Mapping[TopicPartition, Progress]) -> list[Range]:
    """The part of the ranges before the next branch of their log: offsets mean other records from there on."""
    cut = []
    for one in backlog:
        branches = logs[one.place].branches if one.place in logs else ()
        cut.append(one._replace(end=min([one.end, *(first for first, _ in branches if first > one.start)])))
    return cut


def within(backlog: Sequence[Range], most: int) -> list[Range]:
    """Limit ranges to a number of records; each keeps its share, so that partitions end together.

    Args:
        backlog: The ranges.
        most: Maximum number of records; 0 for no limit.
    """
    whole = sum(one.end - one.start for one in backlog)
    if not most or whole <= most:
        return list(backlog)
    return [one._replace(end=one.start + max((one.end - one.start) * most // whole, 1)) for one in backlog]


def aligned(
    backlog: Sequence[Range], most: int, reached: Mapping[TopicPartition, int], skews: Mapping[str, int]
) -> list[Range]:
    """Limit ranges to a number of records, those of partitions that are behind in event time first.

    A partition whose topic has a limit is left out if it is further ahead of another one than that, and if the other one
    is not read to its end. So a partition without records holds none back, and something is always read.

    Args:
        backlog: The ranges.
        most: Maximum number of records; 0 for no limit.
        reached: Event time that a partition has reached, in microseconds since 1970; one without is neither held back,
            nor holds others back.
        skews: How far partitions of a topic may be ahead of others, in seconds, by topic.

    Returns:
        Ranges in the order of the backlog.
    """
    taken: dict[TopicPartition, Range] = {}
    left, room = list(backlog), most
    while left:
        behind = min((reached[one.place] for one in left if one.place in reached), default=0)
        near = [one for one in left if _ahead_us(one, reached, behind) <= skews.get(one.topic, _ANY) * MICROS]
        cut = within(near, room)
        taken |= {one.place: one for one in cut}
        if most:
            room -= sum(one.end - one.start for one in cut)
        if cut != near or (most and room <= 0):
            break
        left = [one for one in left if one.place not in taken]
    return [taken[one.place] for one in backlog if one.place in taken]


def _ahead_us(one: Range, reached: Mapping[TopicPartition, int], behind: int) -> int:
    """How far a partition is ahead of an event time, in microseconds."""
    return reached.get(one.place, behind) - behind


def slots_of(ranges: Sequence[Range], slots: int) -> tuple[Slot, ...]:
    """Give every range to the slot of its partition; slots without a range are left out."""
    divided: dict[int, list[Range]] = {}
    for one in ranges:
        divided.setdefault(one.partition % slots, []).append(one)
    return tuple(Slot(number, tuple(part)) for number, part in sorted(divided.items()))
