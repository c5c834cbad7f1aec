"""What a state already holds: a window of positions per lane, and the holes left by dead letters.

The rule is that of an anti-replay window (RFC 4303, RFC 6479): the highest positions are remembered
one by one, everything at or below the floor only as "below".
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from envelope.lanes import group_of
from envelope.lineage import Position, Siblings, Standing, position_order
from envelope.verdict import Verdict

WINDOW = 32
"""Positions remembered per lane: the disorder of one lane that is still folded exactly."""
LANES = 256
"""Lanes with a window per state; the one longest unused is retired to its floor."""
HOLES = 1024
"""Dead-lettered positions per state."""

_SEARCH = 16  # positions that are put into a set in the time of one search


class HolesFullError(Exception):
    """A state has as many dead-lettered positions as it may: the job stops rather than forget one."""


class Decision(NamedTuple):
    """A verdict, and whether the message is folded."""

    verdict: Verdict
    fold: bool


@dataclass(frozen=True, slots=True)
class Window:
    """Positions of one lane.

    Attributes:
        held: The highest positions folded, ascending.
        floor: The highest position folded and no longer held; None when all are held.
        used: Batch that last added to it.
    """

    held: tuple[Position, ...] = ()
    floor: Position | None = None
    used: int = 0

    @property
    def highest(self) -> Position | None:
        """The highest position folded; None in an empty window."""
        return self.held[-1] if self.held else self.floor

    def holds(self, position: Position) -> bool:
        """Whether `position` is held."""
        i = bisect_left(self.held, position)
        return i < len(self.held) and self.held[i] == position

    def reaches(self, position: Position) -> bool:
        """Whether `position` is at or below the floor."""
        return self.floor is not None and position <= self.floor

    def adding(self, positions: Iterable[Position], size: int = WINDOW, used: int = 0) -> "Window":
        """Return the window with these positions held, and the lowest ones evicted beyond `size`.

        Positions at or below the floor change nothing.
        """
        fresh = {position for position in positions if not self.reaches(position)}
        every = sorted(fresh.union(self.held))
        cut = max(len(every) - size, 0)
        return Window(tuple(every[cut:]), every[cut - 1] if cut else self.floor, max(self.used, used))

    def retired(self) -> "Window":
        """Return the window with its floor at its highest position, and nothing else."""
        return Window((), self.highest)


class Group:
    """What the lanes of one group hold together.

    Args:
        windows: Their windows that hold something.

    Attributes:
        lowest: Lowest position that one of them holds.
        highest: Highest one.
    """

    __slots__ = ("_all", "_asked", "_windows", "highest", "lowest")

    def __init__(self, windows: Sequence[Window]) -> None:
        self.lowest = min(window.held[0] for window in windows)
        self.highest = max(window.held[-1] for window in windows)
        self._windows = windows
        self._asked = 0
        self._all: set[Position] | None = None

    def holds(self, position: Position) -> bool:
        """Whether one of them holds `position`."""
        if self._all is None:
            self._asked += 1
            if self._asked * _SEARCH < max(len(window.held) for window in self._windows):
                return any(window.holds(position) for window in self._windows)
            self._all = set().union(*(window.held for window in self._windows))
        return position in self._all


@dataclass(frozen=True, slots=True)
class Windows:
    """All that one state knows of what it holds. Immutable.

    Attributes:
        lanes: Window by lane name.
        holes: Dead-lettered positions by group name, waiting for a redriven copy.
    """

    lanes: Mapping[str, Window] = field(default_factory=dict)
    holes: Mapping[str, frozenset[Position]] = field(default_factory=dict)
    _groups: Mapping[str, Group] | None = field(default=None, init=False, repr=False, compare=False)

    def group(self, name: str) -> Group | None:
        """What the lanes of a group hold; None where they hold nothing."""
        groups = self._groups
        if groups is None:
            windows: dict[str, list[Window]] = {}
            for lane, window in self.lanes.items():
                if window.held:
                    windows.setdefault(group_of(lane), []).append(window)
            groups = {group: Group(held) for group, held in windows.items()}
            object.__setattr__(self, "_groups", groups)
        return groups.get(name)

    def judge(self, arrivals: Sequence[Standing], siblings: Siblings = Siblings.EVENT_ID) -> list[Decision]:
        """Decide about the messages of one batch for one key.

        They are taken in the order of `in_order`. Because positions then rise within every lane, what the
        batch itself adds can neither evict nor overtake what is still to come: each message is judged by the
        windows as they were before the batch, and by what the batch accepted before it.

        Returns:
            One decision per arrival, in the order of `arrivals`.
        """
        decisions: dict[int, Decision] = {}
        taken: set[tuple[str, Position]] = set()
        met: set[str] = set(self.lanes)
        for i in in_order(arrivals):
            one = arrivals[i]
            decision = decisions[i] = self._decide(one, taken, met, siblings)
            if decision.fold:
                taken.add((one.group, one.position))
                met.add(one.lane)
        return [decisions[i] for i in range(len(arrivals))]

    def _decide(self, one: Standing, taken: set[tuple[str, Position]], met: set[str], siblings: Siblings) -> Decision:
        window = self.lanes.get(one.lane)
        if self._holds(one, window):
            return Decision(Verdict.AMBIGUOUS if one.ambiguous else Verdict.DUPLICATE, fold=False)
        if (one.group, one.position) in taken:
            if one.ambiguous:
                return Decision(Verdict.AMBIGUOUS, fold=siblings is Siblings.GROUP)
            return Decision(Verdict.DUPLICATE_IN_BATCH, fold=False)
        if one.position in self.holes.get(one.group, ()):
            return Decision(Verdict.REDRIVEN, fold=True)
        if one.orphan is not None:
            return self._decide_orphan(one, *one.orphan)
        if window is None:
            return Decision(Verdict.NEW_LANE if met and one.lane not in met else Verdict.ACCEPTED, fold=True)
        if window.reaches(one.position):
            return Decision(Verdict.UNPROVEN if one.transparent else Verdict.BELOW_FLOOR, fold=False)
        late = window.highest is not None and one.position < window.highest
        return Decision(Verdict.LATE if late else Verdict.ACCEPTED, fold=True)

    def _decide_orphan(self, one: Standing, lane: str, position: Position) -> Decision:
        """Decide about a redriven record without a hole that no lane of its path holds."""
        window, others = self.lanes.get(lane, Window()), self.lanes.get(_orphans(one))
        # The event may have died twice, as two copies, and the other one have come back below the floor.
        if window.holds(position) or (others is not None and not one.ambiguous and others.holds(one.position)):
            return Decision(Verdict.DUPLICATE, fold=False)
        if window.reaches(position):
            return Decision(Verdict.UNPROVEN, fold=False)
        return Decision(Verdict.REDRIVEN, fold=True)

    def _holds(self, one: Standing, window: Window | None) -> bool:
        if window is not None and window.holds(one.position):
            return True
        if len(self.lanes) == (window is not None):
            return False
        group = self.group(one.group)
        return group is not None and group.holds(one.position)

    def folding(
        self, folded: Iterable[Standing], *, size: int = WINDOW, lanes: int = LANES, batch: int = 0
    ) -> tuple["Windows", tuple[str, ...]]:
        """Return the windows with these messages held and their holes filled, and the lanes that were retired."""
        positions: dict[str, list[Position]] = {}
        holes = dict(self.holes)
        for one in folded:
            positions.setdefault(one.lane, []).append(one.position)
            if one.orphan is not None:
                positions.setdefault(one.orphan[0], []).append(one.orphan[1])
                positions.setdefault(_orphans(one), []).append(one.position)
            if one.position in holes.get(one.group, ()):
                holes[one.group] = holes[one.group] - {one.position}
        known = dict(self.lanes)
        for lane, added in positions.items():
            # Letters come back in no order of their own: their lanes are wide, and give way to no other.
            width = max(size, WINDOW) if _is_of_orphans(lane) else size
            known[lane] = known.get(lane, Window()).adding(added, width, batch)
        retired = retire(known, lanes)
        return Windows(known, {group: left for group, left in holes.items() if left}), retired

    def leaving_hole(self, one: Standing, limit: int = HOLES) -> "Windows":
        """Return the windows with a hole where `one`, which goes to the dead-letter topic, would have stood.

        Raises:
            HolesFullError: The state has `limit` holes.
        """
        present = self.holes.get(one.group, frozenset())
        if one.position in present:
            return self
        if sum(len(positions) for positions in self.holes.values()) >= limit:
            raise HolesFullError(
                f"{limit} dead-lettered messages of one key wait to be redriven; redrive or discard them"
            )
        return replace(self, holes={**self.holes, one.group: present | {one.position}})


def _orphans(one: Standing) -> str:
    """Lane that remembers the orphans of a group by their position. No lane of a path begins like this."""
    return f"!{one.group}"


def _is_of_orphans(lane: str) -> bool:
    return lane.startswith("!")


def retire(known: dict[str, Window], limit: int) -> tuple[str, ...]:
    """Retire the lanes that are beyond the limit, those first that were used last longest ago, and return their names."""
    active = [lane for lane, window in known.items() if window.held]
    orphans = [lane for lane in active if _is_of_orphans(lane)]
    paths = [lane for lane in active if not _is_of_orphans(lane)] if orphans else active
    gone = (*_longest_unused(paths, known, limit), *_longest_unused(orphans, known, max(limit, LANES)))
    for lane in gone:
        known[lane] = known[lane].retired()
    return gone


def _longest_unused(active: Sequence[str], known: Mapping[str, Window], limit: int) -> list[str]:
    """The lanes beyond the limit, those first that were used last longest ago."""
    if len(active) <= limit:
        return []
    return sorted(active, key=lambda lane: (known[lane].used, lane))[: len(active) - limit]


def in_order(arrivals: Sequence[Standing]) -> list[int]:
    """Return the indices of `arrivals` in the order in which a batch folds them: position, lane, arrival."""
    return sorted(range(len(arrivals)), key=lambda i: (position_order(arrivals[i].position), arrivals[i].lane))
