"""The ledger: a flow's dead letters that left no hole, and the highest positions read. Stored in the manifest.

A record that is rejected before its key is known leaves no hole in any state. The ledger lists it under the stage that
it was bound for: by the position of its event if it is proven to be the event's first delivery, else by the
coordinates at which it was rejected. A redriven record is folded only if it is listed or fits a hole. After a crash a
record may be read again whose own coordinates are listed: if it is folded now, its dead letter is a copy. A hole that is
followed by other stages or outputs is listed too: the record that fills it is then known to be missing there. If
publish steps precede the stage of a rejected record, its outputs there are listed as missing too (`outputs_before`).

Entries are added before anything of their batch is published or persisted, and removed with its manifest. A replay
therefore knows what a crashed attempt left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias, cast

from aggregations.definition.flow import END_OF_FLOW
from aggregations.per_message.times import Times
from envelope import Lineage, Node, Position, Route, Standing, TopicPartition
from envelope.deadletter import DeadLetterHeaders
from envelope.dedup.lanes import group_of
from envelope.dedup.lineage import Redriven, died_in, event_of, position_order
from envelope.redrive import Redrive
from persistence.manifest import Manifest, Rebuilt

LISTED: Final = 10_000
"""Maximum number of dead letters without a hole that a flow lists; further ones are only counted."""
ROUTES: Final = 1_024
"""Maximum number of routes whose highest position is kept; a flow with more cannot prove a first delivery."""


Waiting: TypeAlias = frozenset[tuple[str, int | str]]
"""Records of which something is listed: by group and root offset, or by original topic-partition and offset."""
Doubt: TypeAlias = Mapping[TopicPartition, int]
"""Offset by topic and partition below which a crashed attempt may have folded records."""


class Entry(NamedTuple):
    """One dead letter of the ledger.

    Attributes:
        stage: Stage that it was bound for; `end` after the last stage.
        group: Group of lanes of its event, or its original topic-partition (`envelope.dedup.lineage.died_in`).
        position: Position of its event, or its original offset, followed by the index of an item of the record.
    """

    stage: str
    group: str
    position: Position


class UnlistedError(Exception):
    """Dead letters must be listed before anything of their batch is published or persisted.

    Attributes:
        entries: Entries to list.
        beside: Other tasks may have persisted states of the last stage in the meantime.
    """

    def __init__(self, entries: frozenset[Entry], beside: bool) -> None:
        self.entries = entries
        self.beside = beside


@dataclass(slots=True)
class Changes:
    """Changes that a batch, or a part of it, makes to the ledger.

    Attributes:
        added: Dead letters without a hole.
        filled: Entries whose event is folded now.
        again: Filled entries that were rejected again after the stage at which they were filled.
        seen: Highest position read, by route.
        times: Latest event time read, by topic and partition; empty in a flow without windows.
    """

    added: set[Entry] = field(default_factory=set)
    filled: set[Entry] = field(default_factory=set)
    again: set[Entry] = field(default_factory=set)
    seen: dict[str, Position] = field(default_factory=dict)
    times: Times = field(default_factory=dict)

    def resolved(self) -> "Changes":
        """The changes for the batch's manifest: added entries are already listed."""
        return Changes(filled=self.filled - self.again, seen=self.seen)

    def add(self, other: "Changes") -> None:
        """Add another part's changes."""
        self.added |= other.added
        self.filled |= other.filled
        self.again |= other.again
        self.seen = highest(self.seen, other.seen)
        self.times |= other.times  # a partition is read by one task


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger of one generation of a flow.

    Attributes:
        flow: Name of the flow.
        generation: The generation.
        listed: Positions by group and stage.
        forgotten: Number of dead letters by stage beyond the limit of the list.
        seen: Highest position read, by route; None if there are too many routes, or if it was not kept from the start.
        earlier: Generations of the same definition whose states it began with; see `Rebuilt.continues`.
    """

    flow: str
    generation: int = 1
    listed: Mapping[str, Mapping[str, frozenset[Position]]] = field(default_factory=dict)
    forgotten: Mapping[str, int] = field(default_factory=dict)
    seen: Mapping[str, Position] | None = field(default_factory=dict)
    earlier: tuple[int, ...] = ()
    _waiting: dict[frozenset[str], Waiting] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, flow: str, generation: int, manifest: Manifest | None, rebuilt: Rebuilt | None = None) -> "Ledger":
        """The ledger from a manifest, and from the note of the rebuild that made the generation."""
        earlier = rebuilt.continues if rebuilt else ()
        if manifest is None:
            return cls(flow, generation, earlier=earlier)
        listed = {
            stage: {group: frozenset(map(tuple, positions)) for group, positions in groups.items()}
            for stage, groups in manifest.dead.items()
        }
        seen = None if manifest.seen is None else {route: tuple(at) for route, at in manifest.seen.items()}
        return cls(flow, generation, listed, manifest.forgotten, seen, earlier)

    def mine(self, rejected: Redrive | DeadLetterHeaders) -> bool:
        """Whether this generation of this flow, or one that it began with, rejected a record."""
        return rejected.application == self.flow and rejected.generation in (self.generation, *self.earlier)

    def entries(
        self,
        stage: str,
        own: Node,
        standing: Standing,
        redriven: Redriven | None,
        indices: tuple[int, ...] = (),
        *,
        whole: bool = False,
    ) -> tuple[Entry, ...]:
        """Ledger entries of an element at a stage: of its event, and of the rejected record.

        Args:
            stage: The stage.
            own: Coordinates of its record.
            standing: Where the element stands.
            redriven: How it came back from the dead-letter topic.
            indices: Its index in each flat-map of the flow.
            whole: Include entries of items that later steps make from it.
        """
        groups = self.listed.get(stage)
        if not groups:
            return ()
        found = _among(groups.get(standing.group), standing.position, len(indices), whole=whole)
        entries = [Entry(stage, standing.group, at) for at in found]
        place, offset = origin_of(own, redriven)
        died = _among(groups.get(place), (offset, *indices), len(indices), whole=whole)
        return (*entries, *(Entry(stage, place, at) for at in died))

    def count(self, stages: Iterable[str]) -> int:
        """Number of dead letters that are listed under some stages, or were before the limit of the list."""
        places = (self.listed.get(name, {}).values() for name in _names(stages))
        listed = sum(len(positions) for groups in places for positions in groups)
        return listed + sum(self.forgotten.get(name, 0) for name in _names(stages))

    def waiting(self, stages: frozenset[str]) -> Waiting:
        """The records of which something is listed under some stages."""
        if stages not in self._waiting:
            self._waiting[stages] = frozenset(
                (place, position[0])
                for name in _names(stages)
                for place, positions in self.listed.get(name, {}).items()
                for position in positions
            )
        return self._waiting[stages]

    def stands_for(
        self, own: Node, standing: Standing, redriven: Redriven, indices: tuple[int, ...]
    ) -> tuple[Entry, ...] | None:
        """What a redriven element stands for at the stage that rejected it: the entries of its items there.

        Args:
            own: Coordinates of its record.
            standing: Where the element stands.
            redriven: How it came back from the dead-letter topic.
            indices: Its index in each flat-map of the flow.

        Returns:
            The entries, none for a sibling of what was rejected; None if nothing of its record is listed.
        """
        names = list(_names([redriven.redrive.stage]))
        found = [self.entries(name, own, standing, redriven, indices, whole=True) for name in names]
        if any(found):
            return tuple(chain.from_iterable(found))
        record = replace(standing, position=event_of(standing.position, len(indices)))
        return () if any(self.entries(name, own, record, redriven, whole=True) for name in names) else None

    def route(self, stage: str, standing: Standing, redriven: Redriven | None, entries: Sequence[Entry]) -> Route:
        """Route of an element at a stage, according to the ledger.

        Args:
            stage: The stage.
            standing: Where the element stands.
            redriven: How it came back from the dead-letter topic.
            entries: Result of `entries`.
        """
        if any(entry.group == standing.group for entry in entries):
            return Route.MISSING
        if standing.route is not Route.COPY or redriven is None:
            return standing.route
        mine = self.mine(redriven.redrive)
        if entries:
            return Route.ASSERTED if mine and redriven.redrive.asserted else Route.DEAD_LETTER
        if mine and not redriven.redrive.hole and self.forgotten.get(stage):
            return Route.HEALED if redriven.redrive.asserted else Route.DEAD_LETTER
        return Route.COPY

    def changed(self, changes: Changes) -> "Ledger":
        """The ledger after a batch is committed."""
        listed = {stage: {group: set(at) for group, at in groups.items()} for stage, groups in self.listed.items()}
        forgotten = dict(self.forgotten)
        for stage, group, position in changes.filled:
            listed.get(stage, {}).get(group, set()).discard(position)
        size = sum(len(positions) for groups in listed.values() for positions in groups.values())
        for entry in sorted(changes.added, key=lambda entry: (entry[:2], position_order(entry.position))):
            positions = listed.setdefault(entry.stage, {}).setdefault(entry.group, set())
            if entry.position in positions:
                continue
            if size >= LISTED:
                forgotten[entry.stage] = forgotten.get(entry.stage, 0) + 1
                continue
            positions.add(entry.position)
            size += 1
        kept = {
            stage: {group: frozenset(positions) for group, positions in groups.items() if positions}
            for stage, groups in listed.items()
        }
        seen = None if self.seen is None else highest(self.seen, changes.seen)
        if seen is not None and len(seen) > ROUTES:
            seen = None
        after = replace(self, listed={k: v for k, v in kept.items() if v}, forgotten=forgotten, seen=seen)
        return after.levelled() if self._widened(changes.seen) else after

    def levelled(self) -> "Ledger":
        """The ledger after partitions were added on a path: a copy of what was read may arrive by any of its routes.

        A key may have moved from one old partition to another. So every route of a path counts as read up to the
        highest position that was read by any of them.
        """
        if self.seen is None:
            return self
        tops: dict[str, Position] = {}
        for route, position in self.seen.items():
            tops = highest(tops, {group_of(route): position})
        return replace(self, seen={route: tops[group_of(route)] for route in self.seen})

    def _widened(self, read: Iterable[str]) -> bool:
        """Whether a known path leads through a partition for the first time."""
        known = self.seen or {}
        new = [route for route in read if route not in known]
        return bool(new) and not frozenset(map(group_of, new)).isdisjoint(map(group_of, known))

    def missing_from(self, added: Iterable[Entry]) -> set[Entry]:
        """The entries among `added` that are not listed yet, up to the limit of the list."""
        return {
            one
            for one in added
            if one.position not in self.listed.get(one.stage, {}).get(one.group, ())
            and not self.forgotten.get(one.stage)
        }

    def fields(self) -> dict[str, Any]:
        """The fields of a manifest that contain it."""
        dead = {
            stage: {group: tuple(sorted(at, key=position_order)) for group, at in sorted(groups.items())}
            for stage, groups in sorted(self.listed.items())
        }
        return {"dead": dead, "forgotten": self.forgotten, "seen": self.seen}


def dead_entry(
    stage: str,
    own: Node,
    standing: Standing,
    redriven: Redriven | None,
    indices: tuple[int, ...] = (),
    *,
    proven: bool,
    whole: bool = True,
    fixed: int = 0,
) -> Entry:
    """The entry of an element that was rejected without a hole.

    Args:
        stage: Stage that it was bound for.
        own: Coordinates of its record.
        standing: Where it stands, in any lane of its group.
        redriven: How it came back from the dead-letter topic.
        indices: Its index in each flat-map of the flow.
        proven: It is the first delivery of its event.
        whole: All items of its record that arrived with it were rejected with it: one entry stands for those that the
            steps since the previous stage made of the same item.
        fixed: Number of indices that the previous stage gave it.
    """
    items = len(indices) - fixed if whole else 0
    if proven:
        return Entry(stage, standing.group, event_of(standing.position, items))
    place, offset = origin_of(own, redriven)
    return Entry(stage, place, event_of((offset, *indices), items))


def origin_of(own: Node, redriven: Redriven | None) -> tuple[str, int]:
    """The topic-partition and the offset of a record, or those at which it was rejected if it was redriven."""
    return (died_in(own), own.offset) if redriven is None else (redriven.place, redriven.offset)


def outputs_before(stage: str) -> str:
    """Name under which the ledger lists events whose outputs before a stage are missing. No stage has this name.

    After the last stage nothing but outputs can be missing: they are listed under `end`.
    """
    return stage if stage == END_OF_FLOW else f"{stage}>"


def hole_at(stage: str) -> str:
    """Name under which the ledger lists holes of a stage for the stages before it, if it does not list them anyway."""
    return f"{stage}<"


def _names(stages: Iterable[str]) -> Iterator[str]:
    for stage in stages:
        yield stage
        yield hole_at(stage)


def merged(ledgers: Iterable[Ledger]) -> Ledger:
    """Merge the ledgers of a flow's stores: an entry in any of them is not folded in all stores."""
    first, *others = ledgers
    for other in others:
        entries = {
            Entry(stage, group, position)
            for stage, groups in other.listed.items()
            for group, positions in groups.items()
            for position in positions
        }
        forgotten = {
            stage: max(first.forgotten.get(stage, 0), other.forgotten.get(stage, 0))
            for stage in {*first.forgotten, *other.forgotten}
        }
        seen = None if first.seen is None or other.seen is None else highest(first.seen, other.seen)
        whole = first.changed(Changes(added=entries))
        first = replace(first, listed=whole.listed, forgotten=forgotten, seen=seen)
    return first


def highest(first: Mapping[str, Position], second: Mapping[str, Position]) -> dict[str, Position]:
    """The higher position of each route."""
    found = dict(first)
    for route, position in second.items():
        have = found.get(route)
        if have is None or position_order(position) > position_order(have):
            found[route] = position
    return found


class Reading:
    """Decides which records of a batch may be copies of earlier ones. Records are read in order of offsets.

    A record is proven to be the first delivery of its event when its position is above all positions that arrived on
    the same path, from the same root partition, through the same partitions; and above all that had arrived through any
    partitions when partitions were last added on the path.

    In addition, no earlier run or attempt at the batch may have folded it and crashed before this was noted.

    Args:
        seen: Highest position read, by route; None when nothing can be proven.
        doubt: Offset by topic and partition below which records may have been folded before.

    Attributes:
        read: Highest position read in this batch, by route.
    """

    def __init__(self, seen: Mapping[str, Position] | None, doubt: Doubt | None = None) -> None:
        self._seen = seen
        # Looked up for every record: a plain tuple is made in a tenth of the time.
        self._doubt = cast("Mapping[tuple[str, int], int]", doubt or {})
        self._groups = frozenset(map(group_of, seen or ()))
        self.read: dict[str, Position] = {}

    def again(self, lineage: Lineage, key: bytes | None) -> bool:
        """Whether a record may be a copy.

        Args:
            lineage: Its lineage, with the root's topic id.
            key: Its key. Records without a key arrive in any partition.
        """
        own = lineage.own
        doubtful = own.offset < self._doubt.get((own.topic, own.partition), 0)
        if not lineage.edges:
            return doubtful
        if lineage.pass_through or self._seen is None:
            return True
        standing = lineage.standing(rekeyed=True)
        route, position = standing.lane, standing.position
        before = self.read.get(route, self._seen.get(route))
        if before is None or position > before:
            self.read[route] = position
        if doubtful or key is None or standing.ambiguous:
            return True
        if route not in self._seen and standing.group in self._groups:
            return True  # a partition that is new on this path: partitions were added to the topic
        return before is not None and position <= before


def _among(positions: frozenset[Position] | None, position: Position, items: int, *, whole: bool) -> list[Position]:
    """The listed positions among the position itself, the elements that it was flat-mapped from, and its own items."""
    if not positions:
        return []
    found = [at for at in (event_of(position, cut) for cut in range(items + 1)) if at in positions]
    if not whole:
        return found
    inner = [at for at in positions if len(at) > len(position) and event_of(at, len(at) - len(position)) == position]
    return [*found, *inner]
