"""Partitions that are added to a topic while a group of republishers lags. Pure.

Keys then move from old partitions to new ones, and a member that reads a new partition immediately forwards newer
records of a key before older ones. So new partitions wait until every old partition is committed up to the end that it
had when all producers knew of the new ones. Members agree on this through a `Note` that each commits with its offsets.
A note concerns only its own partition, so it is short however many partitions there are.

The member that owns an old partition notes when it saw the growth, and `metadata.max.age.ms` later the partition's end;
the member that owns a new partition reads all notes. The number of partitions that may be read, `resolved`, is raised
only by a member that has seen every old partition reach its end, so the highest noted number holds for the group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from persistence.growth import Ends, age
from persistence.manifest import Growth


@dataclass(frozen=True, slots=True)
class Note:
    """Metadata committed with the offset of a partition: `ID RESOLVED [NOW SEEN [UNTIL]]`, up to 4 numbers.

    Attributes:
        topic_id: Id of the topic that the offset belongs to; empty if another tool set the offset.
        resolved: Number of partitions that may be read; 0 when no member has noted it yet.
        now: Number of partitions of the topic while new ones wait; 0 when none wait.
        seen_ms: When this partition's owner first saw `now`, in milliseconds since 1970.
        until: Offset that this partition must reach; None until producers know of the new ones.
    """

    topic_id: str = ""
    resolved: int = 0
    now: int = 0
    seen_ms: int = 0
    until: int | None = None

    def __str__(self) -> str:
        numbers = (self.resolved, self.now, self.seen_ms) if self.now else (self.resolved,)
        parts = [self.topic_id, *(str(one) for one in numbers if self.resolved)]
        return " ".join(parts if not self.now or self.until is None else [*parts, str(self.until)])

    @classmethod
    def read(cls, text: str | None) -> "Note":
        """Parse committed metadata. If another tool or version wrote it, only the first word is read, as topic id."""
        topic_id, *numbers = (text or "").split(" ")
        if len(numbers) not in (1, 3, 4) or not all(one.isascii() and one.isdigit() for one in numbers):
            return cls(topic_id)
        return cls(topic_id, *map(int, numbers))

    def grown(self, now: int, clock_ms: int, max_age_ms: int, end: Callable[[], int]) -> "Note":
        """Return the note of a partition whose topic has `now` partitions; the new ones wait.

        Args:
            now: Number of partitions.
            clock_ms: Current time in milliseconds since 1970.
            max_age_ms: Milliseconds for which producers may not know of new partitions.
            end: Returns the end of this partition.
        """
        if self.now != now:
            return replace(self, now=now, seen_ms=clock_ms, until=None)
        until = None if self.until is None else {0: self.until}
        aged = age(
            Growth(self.resolved, now, self.seen_ms, until),
            clock_ms=clock_ms,
            max_age_ms=max_age_ms,
            ends=lambda: {0: end()},
        )
        return replace(self, seen_ms=aged.seen_at_ms, until=None if aged.until is None else aged.until[0])


class Committed(NamedTuple):
    """A group's committed offset of a partition, with its note.

    Attributes:
        offset: Next offset to read; negative when nothing is committed.
        note: Note committed with it, by the current or last owner of the partition.
    """

    offset: int
    note: Note


class Readable(NamedTuple):
    """Which partitions of a topic may be read.

    Attributes:
        resolved: If `sure`, partitions with a lower number may be read.
        sure: False when no partition may be read: keys may have moved between the old ones as well.
    """

    resolved: int
    sure: bool = True


def judge(
    places: Mapping[int, Committed],
    now: int,
    *,
    watched: Sequence[int],
    ends: Ends,
    accepted: bool = False,
) -> Readable:
    """Return which partitions of a topic may be read.

    Args:
        places: The group's committed offsets by partition, without those of an earlier topic of that name.
        now: Number of partitions.
        watched: Successive numbers of partitions that this member has seen, without a long gap between two checks.
        ends: Returns the ends of the topic.
        accepted: Whether disorder is accepted.
    """
    resolved = max((place.note.resolved for place in places.values()), default=0)
    if not resolved or accepted or resolved >= now:
        return Readable(max(resolved, now))
    noted = {place.note.now for place in places.values() if place.note.now > resolved}
    steps = {*noted, *(count for count in watched if resolved < count)}
    if noted == steps == {now}:
        every = all(_is_done(places.get(one), now) for one in range(resolved))
        return Readable(now if every else resolved)
    if all(end <= max(places[one].offset if one in places else 0, 0) for one, end in ends().items()):
        return Readable(now)
    # If no member watched the growth, the topic may have grown in several steps.
    one_step = (resolved, now) in pairwise(watched) and steps == {now}
    return Readable(resolved, sure=one_step and not now % resolved)


def _is_done(place: Committed | None, now: int) -> bool:
    if place is None or place.note.now != now or place.note.until is None:
        return False
    return place.offset >= place.note.until
