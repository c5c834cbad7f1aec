"""Bugs of the rule: windows, positions, lanes, what a chain means."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.per_message.ledger import Ledger
from envelope import Decision, Lineage, Route, Siblings, Standing, Verdict, Window, Windows
from envelope.dedup import windows
from envelope.dedup.lineage import Edge
from tests.simulation.patch import Patch, original


def _adding(change: Callable[[Window, Window], Window]) -> Any:
    real = original(Window, "adding")

    def adding(self: Window, *arguments: Any, **options: Any) -> Window:
        return change(self, real(self, *arguments, **options))

    return adding


def _lowest_kept(self: Window, positions: Any, size: int = 32, used: int = 0, *, wide: bool = False) -> Window:
    every = sorted({position for position in positions if not self.reaches(position)}.union(self.held))
    return Window(tuple(every[:size]), self.floor, max(self.used, used), wide)


def _sorted_as_text(self: Window, positions: Any, size: int = 32, used: int = 0, *, wide: bool = False) -> Window:
    every = sorted({p for p in positions if not self.reaches(p)}.union(self.held), key=str)
    cut = max(len(every) - size, 0)
    return Window(tuple(sorted(every[cut:])), every[cut - 1] if cut else self.floor, max(self.used, used), wide)


def _starts_over(self: Windows, folded: Any, **options: Any) -> Any:
    """The article's rule: another partition or topic makes the state forget what it held of the path."""
    made, retired = _folding(self, folded, **options)
    new = made.lanes.keys() - self.lanes.keys()
    if not new or not self.lanes:
        return made, retired
    return Windows({lane: made.lanes[lane] for lane in new}, made.holes), retired


def _unmarked(route: Route) -> Route:
    return Route.PLAIN if route in (Route.MISSING, Route.HEALED) else route


_folding = original(Windows, "folding")
_decide = original(Windows, "_decide")
_judge = original(Windows, "judge")
_leaving_hole = original(Windows, "leaving_hole")


def _own_lane_only(self: Windows, one: Standing, window: Window | None) -> bool:
    return window is not None and window.holds(one.position)


def _below_any_lane(self: Windows, one: Standing, *rest: Any) -> Decision:
    """One offset for all lanes of a root partition, as the article has it."""
    decision: Decision = _decide(self, one, *rest)
    root = one.lane.split(">")[0]
    highest = [w.highest for lane, w in self.lanes.items() if lane.split(">")[0] == root and w.highest]
    if decision.fold and any(one.position[:1] < high[:1] for high in highest):
        return Decision(Verdict.BELOW_FLOOR, fold=False)
    return decision


def _forgets_the_batch(self: Windows, arrivals: Sequence[Standing], siblings: Siblings = Siblings.EVENT_ID) -> Any:
    return [_judge(self, [one], siblings)[0] for one in arrivals]


def _keeps_holes(self: Windows, folded: Any, **options: Any) -> Any:
    made, retired = _folding(self, folded, **options)
    return Windows(made.lanes, self.holes), retired


def _forgets_healed(self: Windows, folded: Any, **options: Any) -> Any:
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
    """Keeps the edge of the transparent passage instead of the one behind it."""
    kept = [i for i, edge in enumerate(self.edges) if not edge.transparent]
    edges = tuple(Edge(self.edges[i].via, 0, self.edges[i].rekeyed) for i in kept)
    return Lineage((self.nodes[0], *(self.nodes[i + 1] for i in kept)), edges) if self.transparent else self


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "floor-strict": (
        "`<` for `<=` at the floor of a window",
        [(Window, "reaches", lambda self, position: self.floor is not None and position < self.floor)],
    ),
    "window-blind": ("a window holds nothing", [(Window, "holds", lambda self, position: False)]),
    "window-without-floor": (
        "what is evicted from a window is forgotten",
        [(Window, "adding", _adding(lambda before, made: replace(made, floor=None)))],
    ),
    "window-evicts-highest": ("a full window keeps its lowest positions", [(Window, "adding", _lowest_kept)]),
    "siblings-split": (
        "a window counts siblings without an index one by one",
        [(windows, "_cut", _counted)],
    ),
    # Worlds are small: two positions stand for the thirty-two of other lanes.
    "keyless-narrow": (
        "lanes through records without a key have narrow windows",
        [(windows, "WIDE", 2)],
    ),
    "positions-as-text": ("positions are ordered as text", [(Window, "adding", _sorted_as_text)]),
    "lane-retired-to-nothing": (
        "a retired lane forgets its floor",
        [(Window, "retired", lambda self: Window((), None, self.used))],
    ),
    "starts-over": ("a new lane makes a state forget the others", [(Windows, "folding", _starts_over)]),
    "one-offset": ("what is below any lane's highest is dropped", [(Windows, "_decide", _below_any_lane)]),
    "own-lane-only": ("lanes of one group do not share what they hold", [(Windows, "_holds", _own_lane_only)]),
    "batch-forgotten": ("a batch does not look at itself", [(Windows, "judge", _forgets_the_batch)]),
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
    "retry-counted": ("transparent hops are counted", [(Lineage, "reduced", lambda self: self)]),
    "retry-eats-index": ("a transparent hop takes the next one's index along", [(Lineage, "reduced", _eats_the_index)]),
    "ledger-unread": (
        "a redriven record without a hole is judged as any other",
        [(Ledger, "entries", lambda self, *_, **__: ())],
    ),
    "late-folds-forgotten": (
        "what is folded below the floor is not remembered",
        [(Windows, "folding", _forgets_healed)],
    ),
    "late-folds-not-marked": (
        "the stages behind a hole do not learn that it was filled",
        [(Lineage, "standing", _stands(lambda one: replace(one, route=_unmarked(one.route))))],
    ),
    "no-hole": ("a dead letter leaves no hole", [(Windows, "leaving_hole", lambda self, one, limit=0: self)]),
    "hole-never-filled": ("a hole stays when it is filled", [(Windows, "folding", _keeps_holes)]),
}
