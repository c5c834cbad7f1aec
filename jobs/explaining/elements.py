"""Follows a record through a flow in memory: what becomes of each of its elements, stage by stage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import END_OF_FLOW, Flow, Stage
from aggregations.definition.inputs import siblings_of
from aggregations.definition.schemas import UNKNOWN
from aggregations.definition.windows import Window
from aggregations.per_message.arrivals import Arrival, standing_of
from aggregations.per_message.judging import judge_stage
from aggregations.per_message.ledger import Entry
from aggregations.per_message.loop import MessageLoop
from aggregations.per_message.stage import Decided, KeyState, fold_stage
from aggregations.per_message.steps import Applied, RejectedElement
from aggregations.per_message.times import Times, is_late
from aggregations.report import Report
from aggregations.run.final import FinalSnapshots
from aggregations.run.retire import Retirement
from aggregations.run.run import Run
from aggregations.run.states import state_of
from envelope import EnvelopeError, Lineage, Node, Reason, Standing, Verdict
from jobs.explaining.evidence import Evidence
from jobs.explaining.filters import Nobody
from jobs.explaining.outcome import AtStage, Outcome
from jobs.explaining.removed import removed
from jobs.explaining.stages import AtOneStage, Late, at_stage, unsearched
from jobs.tracing import Place


class Elements:
    """Follows the elements of a record through the flow.

    Args:
        flow: The flow.
        run: Its stores and manifests, read-only.
        place: Coordinates of the record.
        roots: Id by topic, for roots without a topic id.
        evidence: What is known about the record.
        reached: The latest event times in the log of its partition before it, as far as it was searched.

    Attributes:
        report: What the loop counts.
        standing: Where the record stands before the first stage; None if it cannot be read.
    """

    def __init__(
        self,
        flow: Flow[Any],
        run: Run,
        place: Place,
        roots: Mapping[str, str],
        evidence: Evidence,
        reached: Times,
    ) -> None:
        self._flow, self._run, self._place, self._roots, self._evidence = flow, run, place, roots, evidence
        self._rows: list[AtStage] = []
        self._removed = Retirement(run).removed if flow.is_timed else {}
        self._shut = FinalSnapshots(run, lambda *_: None).closed(self._removed)
        self._emits = ""
        self.report = Report()
        self.standing: Standing | None = None
        self._loop = MessageLoop(
            flow=flow,
            ledger=run.ledger,
            topic_ids=roots,
            collector=self,
            report=self.report,
            batch=run.batch,
            times=reached,
        )
        # Siblings that nothing tells from the record may have other keys: they are followed as well.
        self._others = MessageLoop(flow, run.ledger, roots, Nobody(), Report(), run.batch)
        self._alike = Applied([], UNKNOWN)

    def follow(self, record: Record) -> tuple[list[AtStage], tuple[str, ...]]:
        """Return what became of the elements of a record, and the topics to which the flow publishes it."""
        loop, flow = self._loop, self._flow
        applied = loop.read([record])
        for element in applied.elements:
            self.standing = standing_of(element, element.lineage.resolved(self._roots), flow.siblings)
        if self.standing is not None and self.standing.ambiguous:
            self._alike = self._others.read(copy.record for copy in self._evidence.copies if copy.record is not None)
        for stage in flow.stages:
            self._take_away(stage.name, stage.index, applied)
            arrivals = loop.enter(stage, applied)
            applied = self._at(stage, arrivals)
        self._take_away(END_OF_FLOW, len(flow.stages), applied)
        loop.leave(applied)
        self._settle()
        return self._rows, tuple(sorted({one.topic for one in loop.outputs}))

    def _settle(self) -> None:
        """Decide by the states of the following stage what a stage's own does not show."""
        for stage, following in reversed(list(pairwise(self._flow.stages))):
            for own in [row for row in self._rows if row.stage == stage.name and row.outcome is Outcome.UNDECIDED]:
                self._settle_one(stage, own, following)

    def _settle_one(self, stage: Stage, own: AtStage, following: Stage) -> None:
        made = [row for row in self._rows if row.indices[: len(own.indices)] == own.indices]
        behind = [row for row in made if row.stage == following.name]
        what = f"the {'filter' if stage.aggregate.rule is not None else 'stage'}"
        has = any(row.outcome is Outcome.FOLDED or row.waits for row in behind)
        if self._evidence.passed(stage, own.indices) or (has and not self._has_siblings):
            why = f"{what} passed it on: stage {following.name} has it"
            if stage.aggregate.rule is None and not self._evidence.is_complete:
                why += unsearched(self._evidence)
            settled = replace(own, outcome=Outcome.FOLDED, why=why, verdict=None, earlier=None)
        elif behind and all(row.outcome is Outcome.MISSING for row in behind):
            why = own.why if own.verdict is not None else f"{what} dropped it"
            settled = replace(own, outcome=Outcome.DROPPED, why=f"{why}: stage {following.name} does not have it")
            later = {one.name for one in self._flow.stages[following.index :]} | {END_OF_FLOW}
            gone = [row for row in made if row.stage in later]
            self._rows = [row for row in self._rows if row not in gone]
        else:
            return
        self._rows[self._rows.index(own)] = settled

    @property
    def _has_siblings(self) -> bool:
        """Whether nothing tells the record from others that may be its siblings: a state that has its position may have theirs."""
        return self.standing is not None and self.standing.ambiguous and bool(self._evidence.copies)

    def _take_away(self, stage: str, index: int, applied: Applied) -> None:
        flow = self._flow
        steps = flow.stages[index].before if index < len(flow.stages) else flow.tail
        for one in removed(flow, index, applied.elements, applied.schema, steps):
            why = f"branch {one.branch} took it" if one.branch else f"{one.step} removed it"
            self._guess(AtStage(stage, Outcome.REMOVED, why, indices=one.indices))

    def _guess(self, row: AtStage) -> None:
        """Note what a step makes of an element now: it is certain unless an earlier stage emits what its state is now."""
        if self._emits:
            why = f"{row.why}, if stage {self._emits} emitted then what it makes of its state now"
            row = replace(row, outcome=Outcome.UNDECIDED, why=why)
        self._rows.append(row)

    def _at(self, stage: Stage, arrivals: Sequence[Arrival]) -> Applied:
        """Judge the arrivals at a stage, and return what it passed on of those that it folded, or may have folded."""
        run, siblings, evidence = self._run, self._flow.siblings, self._evidence
        ref, keys = run.stage_ref(stage), list(dict.fromkeys(arrival.key for arrival in arrivals))
        stored = run.stores[stage.name].load(ref, keys)
        states = {key: state_of(one, ref, key) for key, one in stored.items()}
        passed, others = list[Arrival](), list[Arrival]()
        unsure = any(row.outcome is Outcome.UNDECIDED for row in self._rows)
        if self._has_siblings:
            others = self._others.enter(stage, self._alike)
        for arrival in arrivals:
            if self._has_siblings:
                same = (one for one in others if one.key == arrival.key)
                places = {_place_of(one) for one in same if one.standing.position == arrival.standing.position}
                evidence = self._evidence.among(places)
            if not arrival.transit:
                state, policy = states.get(arrival.key, KeyState()), siblings_of(siblings, arrival.element.topic)
                late = self._late(stage, arrival)
                row = self._doubted(
                    at_stage(AtOneStage(stage, arrival, state, policy, evidence, late, self._emits, unsure))
                )
                self._rows.append(row)
                if row.outcome not in (Outcome.FOLDED, Outcome.UNDECIDED):
                    continue
            passed.append(replace(arrival, transit=True))
        # As for a redriven record that passes a stage: what an `emit` makes of the state as it is now.
        pass_on = fold_stage if stage.aggregate.rule is None else judge_stage
        outcome = pass_on(stage.aggregate, states, passed, batch=run.batch, siblings=siblings)
        others = [replace(other, transit=True) for other in others]
        alike = pass_on(stage.aggregate, states, others, batch=run.batch, siblings=siblings)
        self._alike = self._others.onward(stage, alike)
        if stage.aggregate.emits_state:
            self._emits = stage.name
        return self._loop.onward(stage, outcome)

    def _late(self, stage: Stage, arrival: Arrival) -> Late:
        manifest, place = self._run.manifest, self._place
        times, at = stage.aggregate.times, arrival.element.time_us
        if times is None or at is None or manifest is None:
            return Late()
        if isinstance(times, Window):
            at = int(times.split(arrival.key).start.timestamp())
        reached_us, shut = manifest.positions[place.topic][place.partition].time_us, self._shut.get(stage.name)
        return Late(
            is_late(times, at, reached_us, shut),
            times.is_removed(at, shut),
            times.is_removed(at, self._removed.get(stage.name)),
        )

    def unread(self, own: Node, error: EnvelopeError, *, again: bool = True) -> None:
        """The record cannot be read."""
        lineage = None if error.chain is None else Lineage.of(error.chain, own).resolved(self._roots)
        if lineage is not None:
            element: Element[Any] = Element(None, None, own, error.chain or ())
            self.standing = standing_of(element, lineage, self._flow.siblings)
        self._reject(self._flow.stage_names[0], error.reason, error.detail, lineage)

    def rejected(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """An element that a step rejects, or that the flow diverts."""
        element = rejection.element
        self._reject(stage, rejection.reason, rejection.detail, element.lineage, element.indices)

    def _reject(
        self, stage: str, reason: Reason, detail: str, lineage: Lineage | None, indices: tuple[int, ...] = ()
    ) -> None:
        evidence = self._evidence
        why = f"{reason.value}: {detail}"
        if evidence.has_letters and not evidence.letters and lineage is not None and lineage.redriven is not None:
            why += "; it was redriven, and its dead letter was not missing any more"
            self._rows.append(AtStage(stage, Outcome.DROPPED, why, indices=indices, verdict=Verdict.COPY))
            return
        row = self._doubted(AtStage(stage, Outcome.DEAD_LETTER, why, indices=indices, reason=reason))
        if evidence.letters:
            self._rows.append(row)
        else:
            self._guess(row)

    def _doubted(self, row: AtStage) -> AtStage:
        """A dead letter that its topic does not have: it is certain only if its element is certain to have come so far."""
        evidence = self._evidence
        if row.outcome is not Outcome.DEAD_LETTER or row.waits or evidence.letters or not evidence.has_letters:
            return row
        gone = "the dead-letter topic does not have it: retention deleted it, or a swap dropped it"
        open_before = any(one.outcome is Outcome.UNDECIDED for one in self._rows)
        if self._rows and (open_before or evidence.copies or not evidence.is_complete):
            gone += ", or it did not come here"
            row = replace(row, outcome=Outcome.UNDECIDED, reason=None)
        return replace(row, why=f"{row.why}; {gone}")

    def turned_away(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """An element that a filter rejects."""
        self.rejected(stage, rejection)

    def decided(self, stage: str, decided: Iterable[Decided]) -> None:
        """Nothing is folded."""

    def published(self, filled: Iterable[Entry]) -> None:
        """Nothing is published."""

    def tail(self, filled: Iterable[Entry], *, copies: int) -> None:
        """Nothing is published."""


def _place_of(arrival: Arrival) -> Place:
    own = arrival.element.own
    return Place(own.topic, own.partition, own.offset)
