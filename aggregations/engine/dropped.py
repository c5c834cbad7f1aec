"""Which records a batch dropped, for the journal, as spans of offsets."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.engine.sampling import partition_number, sampled
from aggregations.per_message.stage import Decided
from envelope import Verdict

MOST_RUNS: Final = 20_000
"""Runs of consecutive offsets in one entry, and of one task, at most about 300 kB; a replayed range is one run."""

Runs: TypeAlias = Sequence[int]
"""Ascending offsets: the first one, how many follow each other, the gap to the next one, how many follow, ..."""
Spans: TypeAlias = Ints
"""Ascending spans of offsets that do not touch: a column for each, with the first and the last offset."""


def spans_of(offsets: Ints) -> Spans:
    """Spans of some offsets, in any order."""
    if not len(offsets):
        return np.empty((2, 0), np.int64)
    steps = np.diff(offsets)
    if (steps < 1).any():
        offsets = np.unique(offsets)
        steps = np.diff(offsets)
    ends = np.flatnonzero(steps != 1)
    return np.stack((offsets[np.concatenate(([0], ends + 1))], offsets[np.concatenate((ends, [len(offsets) - 1]))]))


def runs_of(parts: Sequence[Spans]) -> list[int]:
    """Runs of the offsets in any of some parts, which may overlap: several tasks may drop items of one record."""
    firsts, lasts = np.concatenate(parts, axis=1)
    if not len(firsts):
        return []
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    apart = np.flatnonzero(firsts[1:] > lasts[:-1] + 1)
    firsts, lasts = firsts[np.concatenate(([0], apart + 1))], lasts[np.concatenate((apart, [len(lasts) - 1]))]
    pairs = np.empty(2 * len(firsts), np.int64)
    pairs[1::2] = lasts - firsts + 1
    pairs[0] = firsts[0]
    pairs[2::2] = firsts[1:] - lasts[:-1]
    found: list[int] = pairs.tolist()
    return found


@dataclass(frozen=True, slots=True)
class Listed:
    """Offsets in runs."""

    runs: Runs

    def __contains__(self, offset: int) -> bool:
        return any(offset in run for run in self)

    def __iter__(self) -> Iterator[range]:
        last = 0
        for gap, length in zip(self.runs[::2], self.runs[1::2], strict=True):
            first = last + gap
            yield range(first, first + length)
            last = first + length - 1


def was_dropped(decided: Decided, *, filters: bool) -> bool:
    """Whether the pure code dropped an arrival. What it rejects, or lets pass to a later stage, it does not drop.

    Args:
        decided: What it decided.
        filters: The stage is a filter, which remembers the positions of what it drops.
    """
    if decided.reason is not None or decided.decision.verdict is Verdict.REJECTED or decided.arrival.transit:
        return False
    return not (decided.emitted if filters else decided.decision.fold)


@dataclass(slots=True)
class Dropped:
    """The elements that a batch, or a part of it, dropped, by the offsets of their records.

    Attributes:
        spans: Spans of offsets by stage, verdict, topic and partition.
        unlisted: Number of further records by stage.
    """

    spans: dict[tuple[str, str, str, int], list[Spans]] = field(default_factory=dict)
    unlisted: dict[str, int] = field(default_factory=dict)

    def take(self, stage: str, verdict: str, topic: str, partitions: Ints, offsets: Ints) -> None:
        """Note elements that a stage dropped with one verdict.

        Args:
            stage: The stage.
            verdict: The verdict.
            topic: Topic of their records.
            partitions: Partition of each.
            offsets: Offset of each.
        """
        room = MOST_RUNS - sum(part.shape[1] for parts in self.spans.values() for part in parts)
        for partition in np.flatnonzero(np.bincount(partitions)).tolist():
            found = spans_of(offsets[partitions == partition])
            kept, beyond = found[:, :room], found[:, room:]
            if kept.shape[1]:
                self.spans.setdefault((stage, verdict, topic, partition), []).append(kept)
            if beyond.shape[1]:
                self.unlisted[stage] = self.unlisted.get(stage, 0) + int((beyond[1] - beyond[0] + 1).sum())
            room -= kept.shape[1]

    def decided(self, stage: str, decided: Iterable[Decided], share: float, *, filters: bool) -> None:
        """Note what the pure code dropped.

        Args:
            stage: The stage.
            decided: What it decided.
            share: Share of the events that are noted.
            filters: The stage is a filter, which remembers the positions of what it drops.
        """
        found: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
        for one in decided:
            if was_dropped(one, filters=filters):
                own, root = one.arrival.element.own, one.arrival.element.root
                place = own.partition, own.offset, partition_number(root.topic, root.partition), root.offset
                found.setdefault((one.decision.verdict.value, own.topic), []).append(place)
        for (verdict, topic), places in found.items():
            columns = np.array(places, np.int64)
            columns = columns[sampled(share, columns[:, 2], columns[:, 3])]
            self.take(stage, verdict, topic, columns[:, 0], columns[:, 1])

    def add(self, other: "Dropped") -> None:
        """Add another part's."""
        for place, parts in other.spans.items():
            self.spans.setdefault(place, []).extend(parts)
        for stage, count in other.unlisted.items():
            self.unlisted[stage] = self.unlisted.get(stage, 0) + count
