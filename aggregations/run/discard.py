"""Discards dead letters: removes their holes and ledger entries as if they had been folded, without folding them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import END_OF_FLOW, Flow, Stage
from aggregations.definition.lookups import Row
from aggregations.per_message.arrivals import Arrival, standing_of
from aggregations.per_message.ledger import Changes, Entry, hole_at, outputs_before
from aggregations.per_message.lookups import current_rows
from aggregations.per_message.loop import MessageLoop
from aggregations.per_message.stage import Decided, KeyState, fold_stage
from aggregations.per_message.steps import RejectedElement
from aggregations.report import Report
from aggregations.run.run import Run
from aggregations.run.states import load_states, save_states
from envelope import EnvelopeError, Hop, Node
from envelope.dedup.lineage import died_in
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep

NO_TOMBSTONES: Final[Mapping[Node, tuple[Hop, ...]]] = MappingProxyType({})


def fill_holes(
    run: Run,
    records: Sequence[Record],
    *,
    unreadable: Sequence[Node] = (),
    tombstones: Mapping[Node, tuple[Hop, ...]] = NO_TOMBSTONES,
    apply: bool,
) -> dict[Node, int | EnvelopeError]:
    """Fill the holes that redriven records would fill, and remove them from the ledger, without folding them.

    Afterwards the state holds the position, so later copies are dropped. Neither the state nor any stage after it folds
    anything of the record.

    Args:
        run: A run that holds the epoch; with `apply` False a read-only run is enough.
        records: Redriven records as made by `jobs.dead_letters.redrive.redriven`, each with its own coordinates.
        unreadable: Coordinates of dead letters that cannot be read.
        tombstones: Hops by coordinates, for records without a value, which cannot contain them.
        apply: Write the changes.

    Returns:
        Number of holes and entries by coordinates; 0 for a record that has none (any more). Or the error with which the
        flow's steps reject a record that the ledger does not list: its key is then unknown.

    Raises:
        StoreError: A store does not answer, or a newer run has begun.
        DefinitionChangedError: A state was made by another definition of its stage.
    """
    filling = _Filling(run, apply=apply)
    for part in run.flow.parts:
        filling.part = part
        for node in unreadable:
            if run.flow.part_of(node.topic).topics.keys() == part.topics.keys():
                filling.unread(replace(node, cluster=part.cluster))
        mine = [one for one in records if run.flow.part_of(one.topic).topics.keys() == part.topics.keys()]
        hops = {replace(node, cluster=part.cluster): chain for node, chain in tombstones.items()}
        _fill_part(run, part, filling, mine, hops, apply=apply)
    if apply and (struck := filling.struck | filling.outputs):
        run.rewrite_ledger(run.ledger.changed(Changes(filled=struck)))
    # By the caller's coordinates, which name no cluster.
    return {replace(own, cluster=""): filling.found(own) for own in filling.counts}


def _fill_part(
    run: Run,
    flow: Flow[Any],
    filling: "_Filling",
    records: Sequence[Record],
    hops: Mapping[Node, tuple[Hop, ...]],
    *,
    apply: bool,
) -> None:
    """Fill the holes of records that one part of the flow reads."""

    def rows(table: str, keys: Sequence[bytes]) -> Mapping[bytes, Row]:
        return current_rows(run.stores[table], run.ref, table, keys)

    loop = MessageLoop(
        flow=flow,
        ledger=run.ledger,
        topic_ids=run.topic_ids,
        collector=filling,
        report=Report(),
        batch=run.batch,
        tables=rows,
        longest_keys=run.longest_keys,
    )
    applied = loop.read(records)
    applied.elements = [one if one.chain else replace(one, chain=hops.get(one.own, ())) for one in applied.elements]
    filling.counts |= {element.own: 0 for element in applied.elements}
    read = applied.elements
    for stage in flow.stages:
        arrivals = loop.enter(stage, applied)
        loaded = load_states(run, stage, list(dict.fromkeys(arrival.key for arrival in arrivals)))
        filling.fill(stage, loaded, arrivals)
        passing = [arrival for arrival in arrivals if arrival.transit]
        applied = loop.onward(stage, fold_stage(stage.aggregate, loaded, passing, batch=run.batch))
    for element in applied.elements:
        filling.strike(element.own, filling.entries(END_OF_FLOW, element))
    for element in read:
        filling.left(element)


class _Filling:
    """The holes filled and ledger entries removed so far.

    Attributes:
        counts: Number of holes and entries by coordinates.
        errors: Errors with which the flow's steps reject a record, or an item of it.
        struck: Entries to remove from the ledger.
        outputs: Entries of outputs to remove from it; they belong to a dead letter that is counted by another entry.
        part: The part of the flow that reads the records.
    """

    def __init__(self, run: Run, *, apply: bool) -> None:
        self._run = run
        self._apply = apply
        self.counts: dict[Node, int] = {}
        self.errors: dict[Node, EnvelopeError] = {}
        self.struck: set[Entry] = set()
        self.outputs: set[Entry] = set()
        self.part: Flow[Any] = run.flow
        self._met: set[Node] = set()

    def found(self, own: Node) -> int | EnvelopeError:
        """Number of holes and entries of a record; the error if it has none and reached no stage."""
        return self.counts[own] or (0 if own in self._met else self.errors.get(own, 0))

    def strike(self, own: Node, entries: Iterable[Entry]) -> None:
        """Count ledger entries, and remove them."""
        count = self.counts.get(own, 0)
        for entry in entries:
            if entry not in self.struck:
                self.struck.add(entry)
                count += 1
        self.counts[own] = count

    def unread(self, own: Node, error: EnvelopeError | None = None, *, again: bool = True) -> None:
        """Remove the ledger entries of a record that cannot be read: found by its chain, else by its coordinates."""
        if error is not None and error.chain is not None:
            self.rejected("", RejectedElement(Element(None, None, own, error.chain), error.reason, error.detail))
            return
        if error is not None:
            self.errors[own] = error
        entry = Entry(self.part.stage_names[0], died_in(own), (own.offset,))
        listed = () if self._run.ledger.missing_from([entry]) else (entry,)
        self.strike(own, listed)
        self.published(one._replace(stage=outputs_before(one.stage)) for one in listed)

    def rejected(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """Remove the ledger entries of a rejected element under the stage of its dead letter."""
        element = rejection.element
        self.errors[element.own] = EnvelopeError(rejection.reason, rejection.detail)
        self._strike_listed(element)

    def left(self, element: Element[Any]) -> None:
        """Remove the ledger entries of an element of which nothing was found: it was dropped on its way.

        For example by a lookup, because the table has no row for it any more.
        """
        if not self.counts[element.own] and element.own not in self.errors:
            self._strike_listed(element)

    def _strike_listed(self, element: Element[Any]) -> None:
        """Remove the ledger entries of an element under the stage of its dead letter."""
        redrive = element.lineage.redrive
        listed_at = redrive.stage if redrive and redrive.stage else self.part.stage_names[0]
        self.strike(element.own, self.entries(listed_at, element))
        self.published(self.entries(outputs_before(listed_at), element))

    def decided(self, stage: str, decided: Iterable[Decided]) -> None:
        """Nothing is folded."""

    def turned_away(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """Nothing is judged by a filter."""

    def published(self, filled: Iterable[Entry]) -> None:
        """Remove entries of outputs."""
        self.outputs.update(filled)

    def tail(self, filled: Iterable[Entry], *, copies: int) -> None:
        """Nothing is published."""

    def entries(self, stage: str, element: Element[Any]) -> tuple[Entry, ...]:
        """Ledger entries of an element before a stage."""
        run = self._run
        lineage = element.lineage.resolved(run.topic_ids)
        standing = standing_of(element, lineage, self.part.siblings)
        return run.ledger.entries(stage, element.own, standing, lineage.redriven, element.indices, whole=True)

    def fill(self, stage: Stage, loaded: dict[bytes, KeyState], arrivals: Sequence[Arrival]) -> None:
        """Fill and count the holes of the arrivals at one stage."""
        run, changed = self._run, dict[bytes, KeyState]()
        for arrival in arrivals:
            key, standing, own = arrival.key, arrival.standing, arrival.element.own
            if arrival.transit:
                continue
            self._met.add(own)
            self.strike(own, arrival.entries)
            self.published(run.ledger.entries(hole_at(stage.name), *arrival.listed_as))
            state, count = changed.get(key) or loaded.get(key), self.counts[own]
            if state is None:
                continue
            if standing.position not in state.histories.holes.get(standing.group, ()):
                continue
            histories, _ = state.histories.folding(
                [standing],
                size=stage.aggregate.history,
                lanes=stage.aggregate.lanes,
                batch=run.batch,
                evict=run.evicts,
                replays=run.replays,
            )
            # From now on it holds a position, so it needs a state to continue from.
            fold = state.fold if state.folded else stage.aggregate.zero()
            changed[key] = replace(state, fold=fold, histories=histories)
            self.counts[own] = count + 1
        if self._apply and changed:
            effect(CommitStep.PERSIST.of(stage.name), lambda: save_states(run, stage, changed))
