"""What a state has already folded: a history of positions per lane, and the holes left by dead letters.

The rule is that of an anti-replay window (RFC 4303, RFC 6479): the highest positions are remembered
individually; everything at or below the floor is only known to be below it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from envelope.dedup.lanes import group_of
from envelope.dedup.lineage import NO_INDEX, Position, Route, Siblings, Standing, position_order
from envelope.dedup.verdict import Verdict
from envelope.errors import Reason
from envelope.limits import MAX_INDEX

HISTORY = 32
"""Positions remembered per lane: the disorder within one lane that is still folded exactly."""
WIDE = 1024
"""Positions remembered per lane that leads through records without a key. Their copies may arrive over any partition;
within this number of positions each copy is still recognised."""
LANES = 256
"""Lanes with a history per state; beyond that the least recently used lane is retired to its floor."""
HEALED = 1024
"""Positions remembered per group that were folded late: below a floor, or because a list of dead letters named them."""
HOLES = 1024
"""Dead-lettered positions per state."""
SIBLINGS = 1024
"""Messages of one root without a fan-out index that a state tells apart."""
KNOWN_LANES = 1 << 14
"""Lanes per state, retired ones included. None is forgotten, because an intermediate topic or a dead letter may deliver
again at any time. Kafka topics rarely have more than a hundred partitions; a hundred times a hundred fit."""
GROWTH = 65_536
"""Positions remembered per lane while the consumed topic grows and none may be evicted: about 1 MB of state."""

_ABOVE = MAX_INDEX + 1  # every fan-out index
_SEARCH = 4  # positions that can be added to a set in the time of one search


_LATE = (Route.MISSING, Route.HEALED, Route.LETTER)
"""Routes whose messages may be folded below the floor of their lane."""


class HolesFullError(Exception):
    """A state has reached its limit of dead-lettered positions: the job stops rather than forget one."""


class GrowthFullError(Exception):
    """A lane has reached its limit of positions while its topic grows: the job stops rather than evict one."""


class Decision(NamedTuple):
    """A verdict, and whether the message is folded."""

    verdict: Verdict
    fold: bool


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


class Group:
    """The positions that the lanes of one group hold together.

    Args:
        histories: Their histories that are not empty.

    Attributes:
        lowest: Lowest position that any of them holds.
        highest: Highest position that any of them holds.
    """

    __slots__ = ("_all", "_asked", "_histories", "highest", "lowest")

    def __init__(self, histories: Sequence[History]) -> None:
        self.lowest = min(history.held[0] for history in histories)
        self.highest = max(history.held[-1] for history in histories)
        self._histories = histories
        self._asked = 0
        self._all: set[Position] | None = None

    def holds(self, position: Position) -> bool:
        """Whether any of them holds `position`."""
        if self._all is None:
            self._asked += 1
            if self._asked * _SEARCH < max(len(history.held) for history in self._histories):
                return any(history.holds(position) for history in self._histories)
            self._all = set().union(*(history.held for history in self._histories))
        return position in self._all

    def of_root(self, offset: int | str) -> set[Position]:
        """The positions of one root that they hold."""
        held: set[Position] = set()
        for history in self._histories:
            held.update(
                history.held[bisect_left(history.held, (offset,)) : bisect_left(history.held, (offset, _ABOVE))]
            )
        return held


@dataclass(frozen=True, slots=True)
class Histories:
    """Everything that one state remembers about the messages folded into it. Immutable.

    Attributes:
        lanes: History by lane name.
        holes: Dead-lettered positions by group name, each waiting for a redriven copy.
    """

    lanes: Mapping[str, History] = field(default_factory=dict)
    holes: Mapping[str, frozenset[Position]] = field(default_factory=dict)
    _groups: Mapping[str, Group] | None = field(default=None, init=False, repr=False, compare=False)

    def group(self, name: str) -> Group | None:
        """The positions that the lanes of a group hold; None when they hold none."""
        return self.groups().get(name)

    def groups(self) -> Mapping[str, Group]:
        """The positions that the lanes of each group hold, without groups that hold none."""
        groups = self._groups
        if groups is None:
            histories: dict[str, list[History]] = {}
            for lane, history in self.lanes.items():
                if history.held:
                    histories.setdefault(group_of(lane), []).append(history)
            groups = {group: Group(held) for group, held in histories.items()}
            object.__setattr__(self, "_groups", groups)
        return groups

    def judge(self, arrivals: Sequence[Standing], siblings: Siblings = Siblings.EVENT_ID) -> list[Decision]:
        """Decide about the messages of one batch for one key.

        They are judged in the order of `in_order`. Positions then rise within every lane, so a message of the batch can
        neither evict nor overtake a later one: each message is judged by the histories as they were before
        the batch, and by the messages that the batch accepted before it.

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
        history = self.lanes.get(one.lane)
        if self._holds(one, history):
            return Decision(Verdict.AMBIGUOUS if one.ambiguous else Verdict.DUPLICATE, fold=False)
        if (one.group, one.position) in taken:
            if one.ambiguous:
                return Decision(Verdict.AMBIGUOUS, fold=siblings is Siblings.GROUP)
            return Decision(Verdict.DUPLICATE_IN_BATCH, fold=False)
        if one.position in self.holes.get(one.group, ()):
            return Decision(Verdict.REDRIVEN, fold=True)
        if one.route is Route.COPY:
            return Decision(Verdict.COPY, fold=False)
        if one.route in _LATE:
            proven = one.route is Route.MISSING or not self._passed(one)
            return Decision(Verdict.REDRIVEN, fold=True) if proven else Decision(Verdict.UNPROVEN, fold=False)
        if history is None:
            return Decision(Verdict.NEW_LANE if met and one.lane not in met else Verdict.ACCEPTED, fold=True)
        if history.reaches(one.position):
            return Decision(Verdict.UNPROVEN if one.route is Route.RETRIED else Verdict.BELOW_FLOOR, fold=False)
        late = history.highest is not None and one.position < history.highest
        return Decision(Verdict.LATE if late else Verdict.ACCEPTED, fold=True)

    def _passed(self, one: Standing) -> bool:
        """Whether `one` may have been folded and evicted since: then nothing proves that it was not folded."""
        floors = [history for lane, history in self.lanes.items() if group_of(lane) == one.group]
        if one.route is Route.HEALED:
            # It is expected below the floors of its path. Positions healed before are remembered, up to a limit.
            healed = self.lanes.get(healed_lane(one.group), History())
            return healed.reaches(one.position) and any(history.reaches(one.position) for history in floors)
        return any(history.reaches(one.position) for history in floors)

    def _holds(self, one: Standing, history: History | None) -> bool:
        if history is not None and history.holds(one.position):
            return True
        if len(self.lanes) == (history is not None):
            return False
        healed = self.lanes.get(healed_lane(one.group))
        if healed is not None and not one.ambiguous and healed.holds(one.position):
            return True
        group = self.group(one.group)
        return group is not None and group.holds(one.position)

    def folding(
        self,
        folded: Iterable[Standing],
        *,
        size: int | None = None,
        lanes: int = LANES,
        batch: int = 0,
        evict: bool = True,
        replays: bool = False,
    ) -> tuple["Histories", tuple[str, ...]]:
        """Return the histories with these messages added and their holes filled, and the lanes that were retired.

        Args:
            folded: The messages.
            size: Positions remembered per lane; None for 32, or 1,024 on a lane with records without a key.
            lanes: Lanes with a history.
            batch: Number of the batch.
            evict: False while the consumed topic grows: lanes whose name lacks its partition evict no position.
            replays: A crashed run may have folded some of these messages, or of the next ones: nothing that was folded
                late is forgotten.

        Raises:
            GrowthFullError: A lane that must not evict has reached its limit.
        """
        positions: dict[str, list[Position]] = {}
        holes, keyless = dict(self.holes), set()
        for one in folded:
            if one.wide:
                keyless.add(one.lane)
            positions.setdefault(one.lane, []).append(one.position)
            if one.route in _LATE:
                positions.setdefault(healed_lane(one.group), []).append(one.position)
            if one.position in holes.get(one.group, ()):
                holes[one.group] = holes[one.group] - {one.position}
        known = dict(self.lanes)
        for lane, added in positions.items():
            history = known.get(lane, History())
            if is_healed(lane):
                known[lane] = history.healing(added, batch, replays=replays)
                continue
            wide = history.wide or lane in keyless
            width, whole = width_of(size, wide=wide), not evict and not names_partition(lane)
            if whole:
                width = max(width, GROWTH)
            known[lane] = history.adding(added, width, batch, wide=wide)
            if whole:
                check_full(history, known[lane], width)
        retired = retire(known, lanes, batch, evict=evict, replays=replays)
        return Histories(known, {group: left for group, left in holes.items() if left}), retired

    def leaving_hole(self, one: Standing, limit: int = HOLES) -> "Histories":
        """Return the histories with a hole at the position of `one`, which goes to the dead-letter topic.

        Raises:
            HolesFullError: The state already has `limit` holes.
        """
        present = self.holes.get(one.group, frozenset())
        if one.position in present:
            return self
        if sum(len(positions) for positions in self.holes.values()) >= limit:
            raise HolesFullError(
                f"{limit} dead-lettered messages of one key wait to be redriven; redrive or discard them"
            )
        return replace(self, holes={**self.holes, one.group: present | {one.position}})


class Room:
    """Checks the limits of a state while a batch is folded into it.

    Args:
        histories: The histories before the batch.
    """

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._opened: set[str] = set()
        self._siblings: dict[tuple[str, int | str], set[Position]] = {}

    def take(self, one: Standing) -> tuple[Reason, str] | None:
        """Count a message that is to be folded; return the reason code and the rule if it exceeds a limit."""
        if one.lane not in self._histories.lanes and one.lane not in self._opened:
            if len(self._histories.lanes) + len(self._opened) >= KNOWN_LANES:
                return Reason.TOO_MANY_LANES, f"its key comes over more than {KNOWN_LANES} lanes"
            self._opened.add(one.lane)
        if not is_loose(one.position):
            return None
        siblings = self._siblings_of(one)
        if one.position not in siblings and len(siblings) >= SIBLINGS:
            return Reason.TOO_MANY_SIBLINGS, f"its root has more than {SIBLINGS} messages without a fan-out index"
        siblings.add(one.position)
        return None

    def _siblings_of(self, one: Standing) -> set[Position]:
        root = (one.group, one.position[0])
        if root not in self._siblings:
            group = self._histories.group(one.group)
            self._siblings[root] = set() if group is None else group.of_root(one.position[0])
        return self._siblings[root]


def healed_lane(group: str) -> str:
    """Lane that remembers the positions of a group that were folded late. No other lane begins with "!"."""
    return f"!{group}"


def is_healed(lane: str) -> bool:
    """Whether a lane remembers positions that were folded late, out of the order of their path."""
    return lane.startswith("!")


def retire(
    known: dict[str, History], limit: int, batch: int, *, evict: bool = True, replays: bool = False
) -> tuple[str, ...]:
    """Retire the lanes beyond the limit, least recently used first, and return their names."""
    active = [lane for lane, history in known.items() if history.retires]
    late = [lane for lane in active if is_healed(lane)]
    paths = [lane for lane in active if not is_healed(lane) and (evict or names_partition(lane))]
    # Other lanes never displace them, and what this batch adds is needed until it is committed.
    late = [] if replays else [lane for lane in late if known[lane].used < batch]
    gone = (*_longest_unused(paths, known, limit), *_longest_unused(late, known, max(limit, LANES)))
    for lane in gone:
        known[lane] = known[lane].retired()
    return gone


def _longest_unused(active: Sequence[str], known: Mapping[str, History], limit: int) -> list[str]:
    """The lanes beyond the limit, least recently used first."""
    if len(active) <= limit:
        return []
    return sorted(active, key=lambda lane: (known[lane].used, lane))[: len(active) - limit]


def names_partition(lane: str) -> bool:
    """Whether a lane's name contains the partition that its messages are consumed from."""
    _, behind, last = lane.rpartition(">")
    return not behind or ":" in last


def check_full(before: History, after: History, limit: int) -> None:
    """Check that a lane that must not evict has evicted nothing.

    Raises:
        GrowthFullError: It has evicted a position: it has reached its limit.
    """
    if after.floor != before.floor:
        raise GrowthFullError(
            f"partitions were added to the topic before it was read to its end, and a key has more than {limit} positions "
            "since. Set history= of the stage to the most unread records of a key, or accept that what comes later than "
            "the history is dropped as below_floor"
        )


def in_order(arrivals: Sequence[Standing]) -> list[int]:
    """Return the indices of `arrivals` in the order in which a batch folds them: position, lane, arrival."""
    return sorted(range(len(arrivals)), key=lambda i: (position_order(arrivals[i].position), arrivals[i].lane))
