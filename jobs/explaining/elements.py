"""Follows a record through a flow in memory: what becomes of each of its elements, stage by stage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import END_OF_FLOW, Flow, Stage
from aggregations.per_message.arrivals import Arrival, standing_of
from aggregations.per_message.judging import judge_stage
from aggregations.per_message.ledger import Entry
from aggregations.per_message.loop import MessageLoop
from aggregations.per_message.stage import Decided, KeyState, fold_stage
from aggregations.per_message.steps import Applied, RejectedElement
from aggregations.per_message.times import latest
from aggregations.report import Report
from aggregations.run.run import Run
from aggregations.run.states import state_of
from envelope import EnvelopeError, Lineage, Node, Reason, Standing
from jobs.explaining.evidence import Evidence
from jobs.explaining.outcome import AtStage, Outcome
from jobs.explaining.removed import removed
from jobs.explaining.stages import at_stage
from jobs.tracing import Place


class Elements:
    """Follows the elements of a record through the flow.

    Args:
        flow: The flow.
        run: Its stores and manifests, read-only.
        place: Coordinates of the record.
        roots: Id by topic, for roots without a topic id.
        evidence: What is known about the record.

    Attributes:
        report: What the loop counts.
        standing: Where the record stands before the first stage; None if it cannot be read.
    """

    def __init__(self, flow: Flow[Any], run: Run, place: Place, roots: Mapping[str, str], evidence: Evidence) -> None:
        self._flow, self._run, self._place, self._roots, self._evidence = flow, run, place, roots, evidence
        self._rows: list[AtStage] = []
        self.report = Report()
        self.standing: Standing | None = None
        self._loop = MessageLoop(
            flow=flow,
            ledger=run.ledger,
            topic_ids=roots,
            collector=self,
            report=self.report,
            batch=run.batch,
        )

    def follow(self, record: Record) -> tuple[list[AtStage], tuple[str, ...]]:
        """Return what became of the elements of a record, and the topics to which the flow publishes it."""
        loop, flow = self._loop, self._flow
        applied = loop.read([record])
        for element in applied.elements:
            self.standing = standing_of(element, element.lineage.resolved(self._roots), flow.siblings)
        for stage in flow.stages:
            self._removed(stage.name, stage.index, applied)
            arrivals = loop.enter(stage, applied)
            applied = self._at(stage, arrivals)
        self._removed(END_OF_FLOW, len(flow.stages), applied)
        loop.leave(applied)
        self._settle()
        return self._rows, tuple(sorted({one.topic for one in loop.outputs}))

    def _settle(self) -> None:
        """Decide by the state behind a filter what the filter's own does not show."""
        stages, rows = self._flow.stages, self._rows
        letters = {one.facts.stage for one in self._evidence.letters if one.facts is not None}
        for stage, following in reversed(list(pairwise(stages))):
            own = next((row for row in rows if row.stage == stage.name), None)
            if stage.aggregate.rule is None or own is None or own.outcome is not Outcome.UNDECIDED:
                continue
            behind = [row for row in rows if row.stage == following.name]
            rejected = following.name in letters
            if any(row.outcome is Outcome.FOLDED or row.waits or rejected for row in behind):
                why = f"the filter passed it on: stage {following.name} has it"
                rows[rows.index(own)] = replace(own, outcome=Outcome.FOLDED, why=why, verdict=None, earlier=None)
            elif behind and all(row.outcome is Outcome.MISSING for row in behind):
                why = own.why if own.verdict is not None else "the filter dropped it"
                why += f": stage {following.name} does not have it"
                at = rows.index(own)
                rows[at:] = [replace(own, outcome=Outcome.DROPPED, why=why)]

    def _removed(self, stage: str, index: int, applied: Applied) -> None:
        flow = self._flow
        steps = flow.stages[index].before if index < len(flow.stages) else flow.tail
        for one in removed(flow, index, applied.elements, applied.schema, steps):
            why = f"branch {one.branch} took it" if one.branch else f"{one.step} removed it"
            self._rows.append(AtStage(stage, Outcome.REMOVED, why, indices=one.indices))

    def _at(self, stage: Stage, arrivals: Sequence[Arrival]) -> Applied:
        """Judge the arrivals at a stage, and return what it passed on of those that it folded, or may have folded."""
        run, siblings = self._run, self._flow.siblings
        ref, keys = run.stage_ref(stage), list(dict.fromkeys(arrival.key for arrival in arrivals))
        stored = run.stores[stage.name].load(ref, keys)
        states = {key: state_of(one, ref, key) for key, one in stored.items()}
        closed_us, passed = self._closed_us(stage), []
        for arrival in arrivals:
            state = states.get(arrival.key, KeyState())
            row = at_stage(stage, arrival, state, siblings, self._evidence, closed_us)
            self._rows.append(row)
            if row.outcome in (Outcome.FOLDED, Outcome.UNDECIDED):
                passed.append(replace(arrival, transit=True))
        # As for a redriven record that passes a stage: what an `emit` makes of the state as it is now.
        pass_on = fold_stage if stage.aggregate.rule is None else judge_stage
        outcome = pass_on(stage.aggregate, states, passed, batch=run.batch, siblings=siblings)
        return self._loop.onward(stage, outcome)

    def _closed_us(self, stage: Stage) -> int | None:
        """The event time up to which windows of a stage are closed for the record."""
        manifest, place = self._run.manifest, self._place
        assert manifest is not None
        own = manifest.positions[place.topic][place.partition].time_us
        return latest(own, manifest.closing_us) if stage.final_snapshots else own

    def unread(self, own: Node, error: EnvelopeError, *, again: bool = True) -> None:
        """The record cannot be read."""
        if error.chain is not None:
            element: Element[Any] = Element(None, None, own, error.chain)
            lineage = Lineage.of(error.chain, own).resolved(self._roots)
            self.standing = standing_of(element, lineage, self._flow.siblings)
        self._reject(self._flow.stage_names[0], error.reason, error.detail)

    def rejected(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """An element that a step rejects, or that the flow diverts."""
        self._reject(stage, rejection.reason, rejection.detail, rejection.element.indices)

    def _reject(self, stage: str, reason: Reason, detail: str, indices: tuple[int, ...] = ()) -> None:
        evidence = self._evidence
        why = f"{reason.value}: {detail}"
        if evidence.has_letters and not evidence.letters:
            why += "; the dead-letter topic does not have it: retention deleted it, or a swap dropped it"
        self._rows.append(AtStage(stage, Outcome.DEAD_LETTER, why, indices=indices, reason=reason))

    def turned_away(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """An element that a filter rejects."""
        self.rejected(stage, rejection)

    def decided(self, stage: str, decided: Iterable[Decided]) -> None:
        """Nothing is folded."""

    def published(self, filled: Iterable[Entry]) -> None:
        """Nothing is published."""

    def tail(self, filled: Iterable[Entry], *, copies: int) -> None:
        """Nothing is published."""
