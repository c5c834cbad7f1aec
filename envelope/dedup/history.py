"""The history of a lane: the positions of the messages that a state has folded from it.

The rule is that of an anti-replay window (RFC 4303, RFC 6479): the highest positions are remembered
individually; everything at or below the floor is only known to be below it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from envelope.dedup.lineage import NO_INDEX, Position

HISTORY = 32
"""Positions remembered per lane: the disorder within one lane that is still folded exactly."""
WIDE = 1024
"""Positions remembered per lane that leads through records without a key. Their copies may arrive over any partition;
within this number of positions each copy is still recognised."""
HEALED = 1024
"""Positions remembered per group that were folded late: below a floor, or because a list of dead letters named them."""


@dataclass(frozen=True, slots=True)
class History:
    """Positions of one lane.

    Attributes:
        held: The highest positions folded, ascending.
        floor: The highest position folded and no longer held; None when all are held.
        used: Batch that last added to it.
        wide: Records without a key arrived on this lane.
        loose: It holds positions without a fan-out index. Those of one root arrive in any order, so the history counts
            each such root as one position, and holds all of its positions or none.
    """

    held: tuple[Position, ...] = ()
    floor: Position | None = None
    used: int = 0
    wide: bool = False
    loose: bool = field(default=False, compare=False, repr=False)

    @property
    def highest(self) -> Position | None:
        """The highest position folded; None in an empty history."""
        return self.held[-1] if self.held else self.floor

    def holds(self, position: Position) -> bool:
        """Whether `position` is held."""
        i = bisect_left(self.held, position)
        return i < len(self.held) and self.held[i] == position

    def reaches(self, position: Position) -> bool:
        """Whether `position` is at or below the floor."""
        return self.floor is not None and position <= self.floor

    @property
    def retires(self) -> bool:
        """Whether `retired` would make it smaller."""
        return bool(self.held) and not (self.loose and self.held[0][0] == self.held[-1][0])

    def adding(
        self, positions: Iterable[Position], size: int = HISTORY, used: int = 0, *, wide: bool = False
    ) -> "History":
        """Return the history with these positions held, and the lowest ones evicted beyond `size`.

        Positions at or below the floor change nothing.
        """
        fresh = {position for position in positions if not self.reaches(position)}
        every = sorted(fresh.union(self.held))
        loose = self.loose or any(map(is_loose, fresh))
        cut = _cut(every, size, loose=loose)
        return self._holding(every, cut, max(self.used, used), wide=self.wide or wide, loose=loose)

    def healing(self, positions: Iterable[Position], batch: int, *, replays: bool = False) -> "History":
        """Return the history with additional positions that were folded late, in any order.

        Until a batch is committed it may be judged again, so none of its own positions is evicted; of the others the
        highest are kept. What a crashed run has folded may be judged again in several batches: while a batch `replays`
        it, nothing is evicted. Positions may lie below the floor.
        """
        fresh = set(positions)
        old = [position for position in self.held if position not in fresh]
        cut = 0 if replays or self.used == batch else min(max(len(old) + len(fresh) - HEALED, 0), len(old))
        floor = self.floor
        if cut and (floor is None or old[cut - 1] > floor):
            floor = old[cut - 1]
        return History(tuple(sorted(fresh.union(old[cut:]))), floor, max(self.used, batch))

    def retired(self) -> "History":
        """Return the history reduced to a floor at its highest position.

        More messages of a root without a fan-out index may arrive, in any order: the positions of such a root are kept.
        """
        cut = _cut(self.held, 1, loose=True) if self.loose else len(self.held)
        kept = self.held[cut:] if any(map(is_loose, self.held[cut:])) else ()
        # All positions that were folded late may lie below the floor.
        gone = [at for at in (*self.held[: len(self.held) - len(kept)][-1:], self.floor) if at is not None]
        return History(kept, max(gone, default=None), wide=self.wide and bool(kept), loose=bool(kept))

    def _holding(self, every: Sequence[Position], cut: int, used: int, *, wide: bool, loose: bool) -> "History":
        """The history with the positions from index `cut` to the end."""
        kept = tuple(every[cut:])
        return History(kept, every[cut - 1] if cut else self.floor, used, wide, loose and any(map(is_loose, kept)))


def width_of(size: int | None, *, wide: bool) -> int:
    """Number of positions that a history remembers.

    Args:
        size: The stage's setting; None for the default of the lane.
        wide: The lane leads through records without a key.
    """
    if size is not None:
        return size
    return WIDE if wide else HISTORY


def is_loose(position: Position) -> bool:
    """Whether a position lacks a fan-out index: its siblings arrive in any order."""
    return NO_INDEX in position


def _cut(every: Sequence[Position], size: int, *, loose: bool) -> int:
    """Number of lowest positions to evict so that `size` remain; siblings without an index count as one."""
    if len(every) <= size or not loose:
        return max(len(every) - size, 0)
    cut = len(every)
    for _, same in groupby(reversed(every), itemgetter(0)):
        root = list(same)
        count = 1 if any(map(is_loose, root)) else len(root)
        if count > size:
            return cut - size
        size -= count
        cut -= len(root)
    return cut
