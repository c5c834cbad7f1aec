"""Bugs of the rule: histories, positions, lanes, what a chain means."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.per_message.ledger import Ledger
from envelope import Decision, Histories, History, Lineage, Route, Siblings, Standing, Verdict
from envelope.dedup import history
from envelope.dedup.lineage import Edge
from tests.simulation.patch import Patch, original


def _adding(change: Callable[[History, History], History]) -> Any:
    real = original(History, "adding")

    def adding(self: History, *arguments: Any, **options: Any) -> History:
        return change(self, real(self, *arguments, **options))

    return adding


def _lowest_kept(self: History, positions: Any, size: int = 32, used: int = 0, *, wide: bool = False) -> History:
    every = sorted({position for position in positions if not self.reaches(position)}.union(self.held))
    return History(tuple(every[:size]), self.floor, max(self.used, used), wide)


def _sorted_as_text(self: History, positions: Any, size: int = 32, used: int = 0, *, wide: bool = False) -> History:
    every = sorted({p for p in positions if not self.reaches(p)}.union(self.held), key=str)
    cut = max(len(every) - size, 0)
    return History(tuple(sorted(every[cut:])), every[cut - 1] if cut else self.floor, max(self.used, used), wide)


def _starts_over(self: Histories, folded: Any, **options: Any) -> Any:
    """The article's rule: another partition or topic makes the state forget what it held of the path."""
    made, retired = _folding(self, folded, **options)
    new = made.lanes.keys() - self.lanes.keys()
    if not new or not self.lanes:
        return made, retired
    return Histories({lane: made.lanes[lane] for lane in new}, made.holes), retired


def _unmarked(route: Route) -> Route:
    return Route.PLAIN if route in (Route.MISSING, Route.HEALED) else route


_folding = original(Histories, "folding")
_decide = original(Histories, "_decide")
_judge = original(Histories, "judge")
_leaving_hole = original(Histories, "leaving_hole")


def _own_lane_only(self: Histories, one: Standing, known: Mapping[str, History]) -> bool:
    history = known.get(one.lane)
    return history is not None and history.holds(one.position)


def _below_any_lane(self: Histories, one: Standing, *rest: Any) -> Decision:
    """One offset for all lanes of a root partition, as the article has it."""
    decision: Decision = _decide(self, one, *rest)
    root = one.lane.split(">")[0]
    highest = [w.highest for lane, w in self.lanes.items() if lane.split(">")[0] == root and w.highest]
    if decision.fold and any(one.position[:1] < high[:1] for high in highest):
        return Decision(Verdict.BELOW_FLOOR, fold=False)
    return decision


def _forgets_the_batch(self: Histories, arrivals: Sequence[Standing], siblings: Siblings = Siblings.EVENT_ID) -> Any:
    return [_judge(self, [one], siblings)[0] for one in arrivals]


def _keeps_holes(self: Histories, folded: Any, **options: Any) -> Any:
    made, retired = _folding(self, folded, **options)
    return Histories(made.lanes, self.holes), retired


def _forgets_healed(self: Histories, folded: Any, **options: Any) -> Any:
    return _folding(self, [replace(one, route=Route.PLAIN) for one in folded], **options)


def _counted(every: Sequence[Any], size: int, *, loose: bool) -> int:
    return max(len(every) - size, 0)


_names = original(Lineage, "_names")
_standing = original(Lineage, "standing")


def _named(change: Callable[[str, str], tuple[str, str]]) -> Any:
    def names(self: Lineage, **options: Any) -> tuple[str, str]:
        return change(*_names(self, **options))

    return names


def _every_partition(self: Lineage, *, rekeyed: bool, branch: tuple[str, ...]) -> tuple[str, str]:
    result: tuple[str, str] = _names(self, rekeyed=True, branch=branch)
    return result


def _stands(change: Callable[[Standing], Standing]) -> Any:
    def standing(self: Lineage, **options: Any) -> Standing:
        return change(_standing(self, **options))

    return standing


def _without_indices(one: Standing) -> Standing:
    return replace(one, position=(one.position[0], *(part for part in one.position[1:] if isinstance(part, str))))


def _at_own_coordinates(self: Lineage, **options: Any) -> Standing:
    result: Standing = _standing(Lineage((self.own,)), **options)
    return result


def _never_rekeyed(self: Lineage, **options: Any) -> Standing:
    result: Standing = _standing(self, **{**options, "rekeyed": False})
    return result


def _eats_the_index(self: Lineage) -> Lineage:
    """Keeps the edge of the pass-through processor instead of the one behind it."""
    kept = [i for i, edge in enumerate(self.edges) if not edge.pass_through]
    edges = tuple(Edge(self.edges[i].via, 0, self.edges[i].rekeyed) for i in kept)
    return Lineage((self.nodes[0], *(self.nodes[i + 1] for i in kept)), edges) if self.pass_through else self


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "floor-strict": (
        "`<` for `<=` at the floor of a history",
        [(History, "reaches", lambda self, position: self.floor is not None and position < self.floor)],
    ),
    "history-blind": ("a history holds nothing", [(History, "holds", lambda self, position: False)]),
    "history-without-floor": (
        "what is evicted from a history is forgotten",
        [(History, "adding", _adding(lambda before, made: replace(made, floor=None)))],
    ),
    "history-evicts-highest": ("a full history keeps its lowest positions", [(History, "adding", _lowest_kept)]),
    "siblings-split": (
        "a history counts siblings without an index one by one",
        [(history, "_cut", _counted)],
    ),
    # Worlds are small: two positions stand for the thirty-two of other lanes.
    "keyless-narrow": (
        "lanes through records without a key have narrow histories",
        [(history, "WIDE", 2)],
    ),
    "positions-as-text": ("positions are ordered as text", [(History, "adding", _sorted_as_text)]),
    "lane-retired-to-nothing": (
        "a retired lane forgets its floor",
        [(History, "retired", lambda self: History((), None, self.used))],
    ),
    "starts-over": ("a new lane makes a state forget the others", [(Histories, "folding", _starts_over)]),
    "one-offset": ("what is below any lane's highest is dropped", [(Histories, "_decide", _below_any_lane)]),
    "own-lane-only": ("lanes of one group do not share what they hold", [(Histories, "_holds", _own_lane_only)]),
    "batch-forgotten": ("a batch does not look at itself", [(Histories, "judge", _forgets_the_batch)]),
    "lane-without-partitions": (
        "partitions are no part of a lane",
        [(Lineage, "_names", _named(lambda lane, group: (group, group)))],
    ),
    "lane-with-every-partition": ("every hop's partition is part of a lane", [(Lineage, "_names", _every_partition)]),
    "path-without-name": (
        "the republisher's name is no part of a path",
        [
            (
                Lineage,
                "_names",
                _named(lambda lane, group: (re.sub(">[^>]*>", ">>", lane), re.sub(">[^>]*>", ">>", group))),
            )
        ],
    ),
    "lane-without-topic-id": (
        "lanes know no incarnation of the root topic, so neither do checks across lanes",
        [(Lineage, "_names", _named(lambda lane, group: (re.sub("#[^>]*", "", lane), re.sub("#[^>]*", "", group))))],
    ),
    "index-dropped": ("fan-out indices are no part of a position", [(Lineage, "standing", _stands(_without_indices))]),
    "own-coordinates": ("a message stands where it was consumed", [(Lineage, "standing", _at_own_coordinates)]),
    "stage-key-ignored": ("a stage that changes the key does not say so", [(Lineage, "standing", _never_rekeyed)]),
    "retry-counted": ("pass-through hops are counted", [(Lineage, "reduced", lambda self: self)]),
    "retry-eats-index": (
        "a pass-through hop takes the next one's index along",
        [(Lineage, "reduced", _eats_the_index)],
    ),
    "ledger-unread": (
        "a redriven record without a hole is judged as any other",
        [(Ledger, "entries", lambda self, *_, **__: ())],
    ),
    "late-folds-forgotten": (
        "what is folded below the floor is not remembered",
        [(Histories, "folding", _forgets_healed)],
    ),
    "late-folds-not-marked": (
        "the stages behind a hole do not learn that it was filled",
        [(Lineage, "standing", _stands(lambda one: replace(one, route=_unmarked(one.route))))],
    ),
    "no-hole": ("a dead letter leaves no hole", [(Histories, "leaving_hole", lambda self, one, limit=0: self)]),
    "hole-never-filled": ("a hole stays when it is filled", [(Histories, "folding", _keeps_holes)]),
}
