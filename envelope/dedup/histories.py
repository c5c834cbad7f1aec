"""What a state has already folded: the history of each lane, and the holes left by dead letters."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from envelope.dedup.eviction import GROWTH, LANES, check_full, retire
from envelope.dedup.history import History, width_of
from envelope.dedup.lanes import group_of, healed_lane, is_healed, names_partition
from envelope.dedup.lineage import Position, Route, Siblings, Standing, position_order
from envelope.dedup.packed import PackedLanes, divided, opened
from envelope.dedup.verdict import Verdict
from envelope.limits import MAX_INDEX

HOLES = 1024
"""Dead-lettered positions per state."""

_ABOVE = MAX_INDEX + 1  # every fan-out index
_SEARCH = 4  # positions that can be added to a set in the time of one search
_LATE = (Route.MISSING, Route.HEALED, Route.DEAD_LETTER, Route.ASSERTED)
"""Routes whose messages may be folded below the floor of their lane."""


class HolesFullError(Exception):
    """A state has reached its limit of dead-lettered positions: the job stops rather than forget one."""


class Decision(NamedTuple):
    """A verdict, and whether the message is folded."""

    verdict: Verdict
    fold: bool


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
            for lane, history in divided(self.lanes)[0].items():
                if history.held:
                    histories.setdefault(group_of(lane), []).append(history)
            groups = {group: Group(held) for group, held in histories.items()}
            object.__setattr__(self, "_groups", groups)
        return groups

    def judge(
        self,
        arrivals: Sequence[Standing],
        siblings: Siblings | Sequence[Siblings] = Siblings.EVENT_ID,
        *,
        by_lane: bool = True,
    ) -> list[Decision]:
        """Return the verdicts on the messages of one batch for one key.

        They are judged in the order of `in_order`. Positions then rise within every lane, so a message of the batch can
        neither evict nor overtake a later one: each message is judged by the histories as they were before
        the batch, and by the messages that the batch accepted before it.

        Args:
            arrivals: The messages.
            siblings: Policy for equal positions without index and id, of all messages or of each.
            by_lane: As for `in_order`.

        Returns:
            One decision per arrival, in the order of `arrivals`.
        """
        decisions: dict[int, Decision] = {}
        taken: set[tuple[str, Position]] = set()
        met: set[str] = set()
        known, _ = opened(self.lanes, (name for one in arrivals for name in (one.lane, healed_lane(one.group))))
        for i in in_order(arrivals, by_lane=by_lane):
            one = arrivals[i]
            policy = siblings if isinstance(siblings, Siblings) else siblings[i]
            decision = decisions[i] = self._decide(one, known, taken, met, policy)
            if decision.fold:
                taken.add((one.group, one.position))
                met.add(one.lane)
        return [decisions[i] for i in range(len(arrivals))]

    def _decide(
        self,
        standing: Standing,
        known: Mapping[str, History],
        taken: set[tuple[str, Position]],
        met: set[str],
        siblings: Siblings,
    ) -> Decision:
        history = known.get(standing.lane)
        if self._holds(standing, known):
            return Decision(Verdict.AMBIGUOUS if standing.ambiguous else Verdict.DUPLICATE, fold=False)
        if (standing.group, standing.position) in taken:
            if standing.ambiguous:
                return Decision(Verdict.AMBIGUOUS, fold=siblings is Siblings.GROUP)
            return Decision(Verdict.DUPLICATE_IN_BATCH, fold=False)
        if standing.position in self.holes.get(standing.group, ()):
            return Decision(Verdict.REDRIVEN, fold=True)
        if standing.route is Route.COPY:
            return Decision(Verdict.COPY, fold=False)
        if standing.route in _LATE:
            proven = standing.route in (Route.MISSING, Route.ASSERTED) or not _passed(standing, known)
            return Decision(Verdict.REDRIVEN, fold=True) if proven else Decision(Verdict.UNPROVEN, fold=False)
        if history is None:
            new = (self.lanes or met) and standing.lane not in met
            return Decision(Verdict.NEW_LANE if new else Verdict.ACCEPTED, fold=True)
        if history.reaches(standing.position):
            return Decision(Verdict.UNPROVEN if standing.route is Route.RETRIED else Verdict.BELOW_FLOOR, fold=False)
        late = history.highest is not None and standing.position < history.highest
        return Decision(Verdict.LATE if late else Verdict.ACCEPTED, fold=True)

    def _holds(self, standing: Standing, known: Mapping[str, History]) -> bool:
        history = known.get(standing.lane)
        if history is not None and history.holds(standing.position):
            return True
        if len(self.lanes) == (history is not None):
            return False
        healed = known.get(healed_lane(standing.group))
        if healed is not None and not standing.ambiguous and healed.holds(standing.position):
            return True
        group = self.group(standing.group)
        return group is not None and group.holds(standing.position)

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
        known, packed = opened(self.lanes, positions)
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
        every = PackedLanes(known, packed) if packed else known
        return Histories(every, {group: left for group, left in holes.items() if left}), retired

    def leaving_hole(self, standing: Standing, limit: int = HOLES) -> "Histories":
        """Return the histories with a hole at the position of `standing`, which goes to the dead-letter topic.

        Raises:
            HolesFullError: The state already has `limit` holes.
        """
        present = self.holes.get(standing.group, frozenset())
        if standing.position in present:
            return self
        if sum(len(positions) for positions in self.holes.values()) >= limit:
            raise HolesFullError(
                f"{limit} dead-lettered messages of one key wait to be redriven; redrive or discard them"
            )
        return replace(self, holes={**self.holes, standing.group: present | {standing.position}})


def in_order(arrivals: Sequence[Standing], *, by_lane: bool = True) -> list[int]:
    """Return the indices of `arrivals` in the order in which a batch folds them: position, lane, arrival.

    Args:
        arrivals: The messages.
        by_lane: False if of copies on several lanes the first arrival is folded, not that of the first lane.
    """

    def order(i: int) -> tuple[tuple[Position, str], str]:
        return position_order(arrivals[i].position), arrivals[i].lane if by_lane else ""

    return sorted(range(len(arrivals)), key=order)


def _passed(standing: Standing, known: Mapping[str, History]) -> bool:
    """Whether `standing` may have been folded and evicted since: then nothing proves that it was not folded."""
    floors = [history for lane, history in known.items() if group_of(lane) == standing.group]
    if standing.route is Route.HEALED:
        # It is expected below the floors of its path. Positions healed before are remembered, up to a limit.
        healed = known.get(healed_lane(standing.group), History())
        return healed.reaches(standing.position) and any(history.reaches(standing.position) for history in floors)
    return any(history.reaches(standing.position) for history in floors)
