"""Bugs planted on purpose, each a patch of the real code at run time: what a proof is worth that does not find them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from aggregations import memory, run, stage, steps
from aggregations.element import Element
from aggregations.reconcile import Broker, Plan, plan
from aggregations.simulation import driver, service
from aggregations.stage import KeyState, Outcome, fold_stage
from envelope import Decision, Lineage, Siblings, Standing, Verdict, Window, Windows
from envelope.lineage import Edge
from persistence import cas
from persistence import memory as memory_store
from persistence.errors import Transient
from persistence.faults import effect
from persistence.manifest import Manifest
from persistence.steps import Step

Patch = tuple[object, str, Any]
"""Owner, attribute, and what stands there while the bug is planted."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug until the block ends."""
    with ExitStack() as stack:
        for owner, attribute, value in BUGS[name][1]:
            before = vars(owner)[attribute]
            stack.callback(setattr, owner, attribute, before)
            setattr(owner, attribute, value)
        yield


def _original(owner: object, attribute: str) -> Any:
    found = vars(owner)[attribute]
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


# Windows


def _adding(change: Callable[[Window, Window], Window]) -> Any:
    real = _original(Window, "adding")

    def adding(self: Window, *arguments: Any, **options: Any) -> Window:
        return change(self, real(self, *arguments, **options))

    return adding


def _lowest_kept(self: Window, positions: Any, size: int = 32, used: int = 0) -> Window:
    every = sorted({position for position in positions if not self.reaches(position)}.union(self.held))
    return Window(tuple(every[:size]), self.floor, max(self.used, used))


def _sorted_as_text(self: Window, positions: Any, size: int = 32, used: int = 0) -> Window:
    every = sorted({p for p in positions if not self.reaches(p)}.union(self.held), key=str)
    cut = max(len(every) - size, 0)
    return Window(tuple(sorted(every[cut:])), every[cut - 1] if cut else self.floor, max(self.used, used))


def _starts_over(self: Windows, folded: Any, **options: Any) -> Any:
    """The article's rule: another partition or topic makes the state forget what it held of the path."""
    made, retired = _folding(self, folded, **options)
    new = made.lanes.keys() - self.lanes.keys()
    if not new or not self.lanes:
        return made, retired
    return Windows({lane: made.lanes[lane] for lane in new}, made.holes), retired


_folding = _original(Windows, "folding")
_decide = _original(Windows, "_decide")
_judge = _original(Windows, "judge")
_leaving_hole = _original(Windows, "leaving_hole")


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


def _forgets_orphans(self: Windows, folded: Any, **options: Any) -> Any:
    return _folding(self, [replace(one, orphan=None) for one in folded], **options)


# Lineage


_names = _original(Lineage, "_names")
_standing = _original(Lineage, "standing")


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


# Stages


def _keys_apart(of: Any, loaded: Mapping[bytes, KeyState], arrivals: Sequence[Any], **options: Any) -> Outcome:
    """Folds every key by itself: a record whose item fails under one key is folded under the others."""
    states_by_key: dict[bytes, KeyState] = {}
    decided: dict[int, Any] = {}
    for key in sorted({one.key for one in arrivals}):
        rows = [i for i, one in enumerate(arrivals) if one.key == key]
        outcome = fold_stage(of, loaded, [arrivals[i] for i in rows], **options)
        states_by_key |= outcome.states
        decided |= zip(rows, outcome.decided, strict=True)
    return Outcome(states_by_key, [decided[i] for i in range(len(arrivals))])


def _trusts_the_first_stage(of: Any, loaded: Any, arrivals: Any, **options: Any) -> Outcome:
    """Judges at the first stage only."""
    if of.name == "s0":
        return fold_stage(of, loaded, arrivals, **options)
    fresh = {key: replace(state, windows=Windows(state.windows.lanes, {})) for key, state in loaded.items()}
    numbers = count()
    apart = [
        replace(one, standing=replace(one.standing, lane=f"{one.standing.lane}~{options['batch']}.{next(numbers)}"))
        for one in arrivals
    ]
    return fold_stage(of, fresh, [replace(one, standing=replace(one.standing, group="~")) for one in apart], **options)


def _arrive_without_ids(*arguments: Any, **options: Any) -> Any:
    return steps.arrive(*arguments, **{**options, "siblings": Siblings.DROP})


def _floor_moves(self: Windows, arrivals: Sequence[Standing], siblings: Siblings = Siblings.EVENT_ID) -> Any:
    """Judges one by one, in any order, by windows that move on with each."""
    decisions: list[Decision] = []
    current = self
    for one in reversed(arrivals):
        [decision] = _judge(current, [one], siblings)
        decisions.append(decision)
        if decision.fold:
            current, _ = _folding(current, [one], size=2)
    return decisions[::-1]


def _no_index(self: Element[Any], index: int, value: Any) -> Element[Any]:
    return replace(self, value=value)


# Commit, run and stores


_Effects = Sequence[tuple[str, Callable[[], object]]]


def _publish(publish: Callable[[], object]) -> None:
    effect(Step.PUBLISH, publish)


def _persist(stages: _Effects) -> None:
    for name, persist in stages:
        effect(Step.PERSIST.of(name), persist)


def _manifest(manifests: _Effects) -> None:
    for name, save in manifests:
        effect(Step.MANIFEST.of(name), save)


def _upstream_first(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    _persist(stages)
    _manifest(list(reversed(manifests)))


def _manifest_first(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    _manifest(list(reversed(manifests)))
    _persist(list(reversed(stages)))


def _upstream_manifest_first(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    _persist(list(reversed(stages)))
    _manifest(manifests)


def _published_last(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _persist(list(reversed(stages)))
    _manifest(list(reversed(manifests)))
    _publish(publish)


def _swallowing(work: Callable[[], object]) -> None:
    try:
        work()
    except Transient:
        return


def _publish_not_awaited(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _swallowing(lambda: _publish(publish))
    _persist(list(reversed(stages)))
    _manifest(list(reversed(manifests)))


def _persist_not_awaited(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    for one in reversed(stages):
        _swallowing(lambda one=one: _persist([one]))  # type: ignore[misc]
    _manifest(list(reversed(manifests)))


def _maximum(manifests: Sequence[Manifest | None]) -> dict[str, dict[int, int]]:
    highest: dict[str, dict[int, int]] = {}
    for manifest in manifests:
        for topic, partitions in (manifest.positions if manifest else {}).items():
            mine = highest.setdefault(topic, {})
            for partition, progress in partitions.items():
                mine[partition] = max(mine.get(partition, 0), progress.next_offset)
    return highest


def _same_topic(flow: str, start: Manifest | None, manifests: Any, broker: Broker) -> Plan:
    known = start.topic_ids.get(broker.topic, "") if start else ""
    return plan(flow, start, manifests, replace(broker, topic_id=known))


def _blind(at: Any, writes: Any, stored: Any, **options: Any) -> Any:
    return list(writes)


def _no_term(*arguments: Any) -> None:
    """Lets every term pass."""


def _any_manifest(*arguments: Any) -> None:
    """Lets every manifest pass."""


def _settle_without_term(at: Any, writes: Any, stored: Any, *, term: int, batch: int) -> Any:
    return cas.settle(at, writes, stored, term=max([term, *(one.term for one in stored.values())]), batch=batch)


# Driver and services


_Driver = driver.Driver
_init = _original(_Driver, "__init__")
_batch = _original(_Driver, "batch")


def _from_the_end(*arguments: Any) -> Plan:
    made = plan(*arguments)
    return replace(
        made, partitions=[replace(one, start=one.high) if one.start is None else one for one in made.partitions]
    )


def _from_the_group(self: Any, *arguments: Any, **options: Any) -> None:
    _init(self, *arguments, **options)
    self.next = {number: self.committed(number) for number in range(len(self.log.partitions))}


def _offsets_first(self: Any, limit: int, slow: int = -1) -> None:
    records = self.records(limit, slow)
    self.advance(records)
    effect(Step.OFFSETS, self.commit)
    self.runner.process(records)
    effect(Step.RETURN, lambda: None)


def _skips_a_failed_batch(self: Any, limit: int, slow: int = -1) -> None:
    records = self.records(limit, slow)
    try:
        _batch(self, limit, slow)
    except Transient:
        self.advance(records)


_Service = service.Service


def _commits_first(self: Any, source: int, partition: int, limit: int) -> None:
    topic, number = self.place(source, partition)
    records = self.read(topic, number, limit)
    if records:
        effect("republish:commit", lambda: self.commit(topic, number, records[-1].offset + 1))
    self.produce(self.transform(records))


_hop = _original(service, "_hop")
_numbers = count()


def _hop_never_rekeyed(*arguments: Any, **options: Any) -> Any:
    return _hop(*arguments, **{**options, "rekeyed": False})


def _hop_counted(*arguments: Any, index: int | None = None, **options: Any) -> Any:
    return _hop(*arguments, index=None if index is None else next(_numbers), **options)


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
    "orphans-unknown": (
        "a redriven record without a hole is judged as any other",
        [(Lineage, "standing", _stands(lambda one: replace(one, orphan=None)))],
    ),
    "orphans-forgotten": (
        "a redriven record without a hole is not remembered",
        [(Windows, "folding", _forgets_orphans)],
    ),
    "no-hole": ("a dead letter leaves no hole", [(Windows, "leaving_hole", lambda self, one, limit=0: self)]),
    "hole-never-filled": ("a hole stays when it is filled", [(Windows, "folding", _keeps_holes)]),
    "event-id-ignored": (
        "siblings without an index are told apart by nothing",
        [(memory, "arrive", _arrive_without_ids)],
    ),
    "floor-moves-in-batch": ("a batch is judged one by one, unsorted", [(Windows, "judge", _floor_moves)]),
    "half-a-fold-kept": ("a fold that fails half-way leaves its traces", [(stage, "_copy", lambda state: state)]),
    "partial-flat-map": ("items of a failed record are folded under other keys", [(memory, "fold_stage", _keys_apart)]),
    "flat-map-without-index": ("items of a flat-map all have the record's own position", [(Element, "nth", _no_index)]),
    "first-stage-trusted": ("only the first stage drops duplicates", [(memory, "fold_stage", _trusts_the_first_stage)]),
    "upstream-first": ("upstream states are persisted first", [(memory, "commit", _upstream_first)]),
    "manifest-first": ("manifests are written before states", [(memory, "commit", _manifest_first)]),
    "upstream-manifest-first": (
        "the upstream manifest is written first",
        [(memory, "commit", _upstream_manifest_first)],
    ),
    "published-last": ("dead letters are produced behind the manifests", [(memory, "commit", _published_last)]),
    "letters-not-awaited": ("nobody waits for dead letters", [(memory, "commit", _publish_not_awaited)]),
    "states-not-awaited": ("nobody waits for states", [(memory, "commit", _persist_not_awaited)]),
    "maximum-of-manifests": ("a run starts where the most advanced store is", [(run, "minimum", _maximum)]),
    "lost-store-accepted": ("a downstream store that lost data is accepted", [(run, "check_stores", lambda *_: [])]),
    "incarnation-ignored": (
        "a topic that was created again is read on from the old offset",
        [(driver, "plan", _same_topic)],
    ),
    "term-ignored": (
        "an older run may write",
        [
            (memory_store, "check_term", _no_term),
            (memory_store, "check_manifest", _any_manifest),
            (memory_store, "settle", _settle_without_term),
        ],
    ),
    "term-and-version-ignored": (
        "an older run may write, whatever version is stored",
        [
            (memory_store, "check_term", _no_term),
            (memory_store, "check_manifest", _any_manifest),
            (memory_store, "settle", _blind),
        ],
    ),
    "starts-at-the-end": (
        "partitions that no manifest knows start at their end",
        [(driver, "plan", _from_the_end)],
    ),
    "group-trusted": (
        "a run starts from the group's offsets, committed before the states are written",
        [(_Driver, "__init__", _from_the_group), (_Driver, "batch", _offsets_first)],
    ),
    "failed-batch-skipped": (
        "the engine goes on behind a batch that failed",
        [(_Driver, "batch", _skips_a_failed_batch)],
    ),
    "service-commits-first": ("a republisher commits before it produces", [(_Service, "step", _commits_first)]),
    "service-hides-rekeying": (
        "a republisher does not say that it changed the key",
        [(service, "_hop", _hop_never_rekeyed)],
    ),
    "service-counts-on": ("a republisher numbers its outputs on and on", [(service, "_hop", _hop_counted)]),
}
"""Name to what is wrong, and the patches that make it so."""
