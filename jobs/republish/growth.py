"""Partitions that are added to a topic while a group of republishers lags. Pure.

Keys then move from old partitions to new ones, and a member that reads a new one at once sends newer records of a key
before older ones. So new partitions wait until every old one is committed up to its end, as of the time when all
producers knew of the new ones. Members agree on that through what each commits with its offsets: a `Note`. It holds what
concerns its own partition, so it is short however many partitions there are.

Whoever owns an old partition notes when he saw the growth, and its end when that is `metadata.max.age.ms` ago; whoever
owns a new one reads what all have noted. The number of partitions that may be read, `resolved`, is raised only by who has
seen all of that done, so the highest number that anybody has noted holds for the group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from persistence.growth import Ends, age
from persistence.manifest import Growth


@dataclass(frozen=True, slots=True)
class Note:
    """What is committed with the offset of a partition: `ID SETTLED [NOW SEEN [UNTIL]]`, up to 4 numbers.

    Attributes:
        topic_id: Id of the topic that the offset counts in; empty where another tool set the offset.
        resolved: Number of partitions that may be read; 0 when nobody has said so yet.
        now: Number of partitions that there are, while new ones wait; 0 when none do.
        seen_ms: When `now` was first seen by who had this partition, in milliseconds since 1970.
        until: Offset that this partition has to reach; None until producers know of the new ones.
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
        """Read what was committed. Of text that another tool or version wrote the first word is the topic's id."""
        topic_id, *numbers = (text or "").split(" ")
        if len(numbers) not in (1, 3, 4) or not all(one.isascii() and one.isdigit() for one in numbers):
            return cls(topic_id)
        return cls(topic_id, *map(int, numbers))

    def grown(self, now: int, clock_ms: int, max_age_ms: int, end: Callable[[], int]) -> "Note":
        """Return the note of a partition whose topic has `now` partitions, of which the new ones wait.

        Args:
            now: Number of partitions.
            clock_ms: Milliseconds since 1970.
            max_age_ms: How long producers may not know of new partitions.
            end: Asks for the end of this partition.
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
    """What a group has committed of a partition.

    Attributes:
        offset: Next offset to be read; negative when nothing is committed.
        note: What was committed with it, by the member who has the partition or had it last.
    """

    offset: int
    note: Note


class Readable(NamedTuple):
    """Which partitions of a topic may be read.

    Attributes:
        resolved: Those with a lower number, if it is sure ...
        sure: ... and none when it is not: keys may have moved between those as well.
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
        places: What the group has committed, by partition; marks of an earlier topic of that name left out.
        now: Number of partitions.
        watched: Numbers of partitions that this member has seen one after the other, without a long look away.
        ends: Asks for the ends of the topic.
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
    # Of a growth that nobody watched nobody can say whether it was one.
    one_step = (resolved, now) in pairwise(watched) and steps == {now}
    return Readable(resolved, sure=one_step and not now % resolved)


def _is_done(place: Committed | None, now: int) -> bool:
    if place is None or place.note.now != now or place.note.until is None:
        return False
    return place.offset >= place.note.until
