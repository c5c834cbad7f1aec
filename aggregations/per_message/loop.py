"""The loop over a flow's stages, message by message. The in-memory runner, Spark's tasks and discard use it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import END_OF_FLOW, Flow, Stage, Step
from aggregations.definition.source import RecordDecoder
from aggregations.per_message.arrivals import Arrival, arrive, marking_before, missing_after, standing_of
from aggregations.per_message.cause import Cause
from aggregations.per_message.dead_letters import BEYOND_END
from aggregations.per_message.emitting import emitted_types
from aggregations.per_message.judging import judge_stage
from aggregations.per_message.ledger import Doubt, Entry, Ledger, Reading, outputs_before
from aggregations.per_message.lookups import Tables, no_tables
from aggregations.per_message.merging import merged
from aggregations.per_message.publishing import Marking, OutputMessage
from aggregations.per_message.stage import Decided, KeyState, StageOutcome, fold_stage
from aggregations.per_message.steps import Applied, RejectedElement, apply_steps, withhold
from aggregations.per_message.times import Times, with_times
from aggregations.report import Report
from envelope import EnvelopeError, Lineage, Node, Position, Reason, Verdict
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep

_NONE: Mapping[Node, Cause] = MappingProxyType({})


class Collector(Protocol):
    """Receives the elements that are not passed on."""

    def unread(self, own: Node, error: EnvelopeError, *, again: bool = True) -> None:
        """A record that cannot be read; `again` matters only if its chain could be."""
        ...

    def rejected(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """An element that a step before a stage rejects, or that the flow diverts.

        Args:
            stage: Name of the stage.
            rejection: The element.
            fixed: Number of its indices that it had when the previous stage passed it on.
        """
        ...

    def turned_away(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """An element that a filter rejects; `fixed` as for `rejected`."""
        ...

    def decided(self, stage: str, decided: Iterable[Decided]) -> None:
        """Decisions of a stage."""
        ...

    def published(self, filled: Iterable[Entry]) -> None:
        """Entries of outputs before a stage that are no longer missing."""
        ...

    def tail(self, filled: Iterable[Entry], *, copies: int) -> None:
        """Redriven records that are passed on after the last stage."""
        ...


class Failures:
    """Records with a failed item that other tasks must know of. This base class is for a runner without other tasks."""

    def at(self, index: int, *, hole: bool) -> Mapping[Node, Cause]:
        """Records that must not pass a stage, because one of their items failed in another task.

        Args:
            index: Index of the stage; the number of stages for the steps after the last stage.
            hole: Records whose fold failed; else records that a step before the stage rejected.
        """
        return _NONE

    def add(self, index: int, own: Node, cause: Cause, *, hole: bool) -> None:
        """An item of a record failed here; see `at`."""


@dataclass
class MessageLoop:
    """Runs messages through the steps and stages of a flow.

    Attributes:
        flow: The flow.
        ledger: Dead letters of the flow that left no hole.
        topic_ids: Current topic id by topic.
        collector: Receives the elements that are not passed on.
        report: Receives the counts.
        batch: Number of the batch.
        doubt: Offsets below which records may have been folded before.
        incarnation: Verdict for the id of a root topic; None for the current id.
        beyond_end: Whether a root is beyond the end of its topic.
        failures: Failed records of other tasks.
        evict: False while the consumed topic grows; see `Histories.folding`.
        replays: A crashed run may have folded the next messages; see `Histories.folding`.
        outputs: Messages that the flow's steps publish.
        seen: Highest position read, by route, after `read` has returned.
        times: Latest event time read, by topic and partition; brought up to date by `read`.
        removed: Due time up to which states have left the store, by stage, in seconds since 1970.
        closed: Time up to which elements are too late, by stage: see `aggregations.run.final.FinalSnapshots.closed`.
        tables: What the flow looks up.
        largest: Largest record that can be produced to a topic, in bytes, by topic.
        longest_keys: Bytes of the longest key by stage, if its store has a limit.
    """

    flow: Flow[Any]
    ledger: Ledger
    topic_ids: Mapping[str, str]
    collector: Collector
    report: Report
    batch: int
    doubt: Doubt = field(default_factory=dict)
    incarnation: Callable[[str, str], Verdict | None] = lambda _topic, _topic_id: None
    beyond_end: Callable[[Node], bool] = lambda _root: False
    failures: Failures = field(default_factory=Failures)
    evict: bool = True
    replays: bool = False
    outputs: list[OutputMessage] = field(default_factory=list)
    seen: dict[str, Position] = field(default_factory=dict)
    times: Times = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, int] = field(default_factory=dict)
    tables: Tables = no_tables
    largest: Mapping[str, int] = field(default_factory=dict)
    longest_keys: Mapping[str, int] = field(default_factory=dict)

    def read(self, records: Iterable[Record]) -> Applied:
        """Read records, those of a partition in order of offsets.

        Raises:
            FlowError: A record is not of a source.
        """
        flow, decoders = self.flow, dict[str, RecordDecoder]()
        reading = Reading(self.ledger.seen, self.doubt)
        elements: list[Element[Any]] = []
        times: list[int | None] = []
        for record in records:
            self.report.records += 1
            if (decoder := decoders.get(record.topic)) is None:
                source = flow.source_of(record.topic)
                decoder = decoders[record.topic] = RecordDecoder(source, flow.columns, stamps=flow.reads_stamps)
            if decoder.skips(record):
                self.report.tombstones += 1
                continue
            own = replace(record.node, cluster=flow.cluster)
            try:
                read = decoder.decode(record)
            except EnvelopeError as error:
                again = reading.again(Lineage.of(error.chain or (), own).resolved(self.topic_ids), record.key)
                self.collector.unread(own, error, again=again)
                continue
            lineage = read.lineage.resolved(self.topic_ids)
            if read.chain and self.beyond_end(lineage.root):
                self.collector.unread(own, EnvelopeError(Reason.ROOT_BEYOND_END, BEYOND_END))
                continue
            elements.append(read.element(record, again=reading.again(lineage, record.key)))
            times.append(read.time_us)
        self.seen = reading.read
        if flow.is_timed:
            elements, self.times = with_times(elements, times, flow, self.times)
        return Applied(elements, flow.stages[0].schema if flow.stages else flow.tail_schema)

    def enter(self, stage: Stage, before: Applied) -> list[Arrival]:
        """Run elements through the steps before a stage."""
        later = self.flow.after(stage)
        marking = self._marking(stage.name, later)
        applied = self._apply(stage.index, stage.before, before, marking)
        arrivals = arrive(
            stage.aggregate,
            applied,
            ledger=self.ledger,
            topic_ids=self.topic_ids,
            incarnation=self.incarnation,
            siblings=self.flow.siblings,
            later=later,
            removed=self.closed.get(stage.name),
            longest_key=self.longest_keys.get(stage.name),
            fixed=stage.fixed,
        )
        self._gather(stage.index, stage.name, before, applied)
        missing = outputs_before(stage.name)
        for one in arrivals:
            self.collector.published(self.ledger.entries(missing, *one.listed_as))
        if stage.index == 0 and not self.ledger.listed.keys().isdisjoint((stage.name, missing)):
            self._strike_left(stage.name, before, applied)
        return arrivals

    def _strike_left(self, stage: str, before: Applied, applied: Applied) -> None:
        """Strike listed records of which nothing arrives at the first stage: a step dropped them, or a branch took them."""
        stays = {element.own for element in applied.elements} | {one.element.own for one in applied.rejected}
        for element in before.elements:
            if element.own not in stays:
                lineage = element.lineage.resolved(self.topic_ids)
                standing = standing_of(element, lineage, self.flow.siblings)
                for place in (stage, outputs_before(stage)):
                    entries = self.ledger.entries(place, element.own, standing, lineage.redriven, whole=True)
                    self.collector.published(entries)

    def fold(
        self,
        stage: Stage,
        arrivals: Sequence[Arrival],
        load: Callable[[Stage, Sequence[bytes]], Mapping[bytes, KeyState]],
    ) -> StageOutcome:
        """Load, judge and fold one stage."""
        keys = list(dict.fromkeys(arrival.key for arrival in arrivals))
        loaded = effect(CommitStep.LOAD.of(stage.name), lambda: load(stage, keys))
        outcome = effect(CommitStep.FOLD, lambda: self._folded(stage, loaded, arrivals))
        self.report.verdicts.setdefault(stage.name, Counter()).update(outcome.verdicts)
        self.report.retired += outcome.retired
        self.report.keyless += Counter({stage.name: outcome.keyless})
        self.report.warnings.update(outcome.warnings)
        self.collector.decided(stage.name, outcome.decided)
        for i, cause in outcome.rejected.items():
            element, fixed = arrivals[i].element, arrivals[i].fixed
            self.collector.turned_away(stage.name, RejectedElement.because(element, cause), fixed=fixed)
        for one in outcome.decided:
            if one.failed and one.reason is not None:
                cause = Cause(one.reason, one.detail, one.raised)
                self.failures.add(stage.index, one.arrival.element.own, cause, hole=one.hole)
        return outcome

    def _folded(self, stage: Stage, loaded: Mapping[bytes, KeyState], arrivals: Sequence[Arrival]) -> StageOutcome:
        if stage.aggregate.rule is not None:
            return judge_stage(
                stage.aggregate,
                loaded,
                arrivals,
                batch=self.batch,
                siblings=self.flow.siblings,
                evict=self.evict,
                replays=self.replays,
                missing=self.ledger.count(self.flow.up_to(stage)),
            )
        return fold_stage(
            stage.aggregate,
            loaded,
            arrivals,
            batch=self.batch,
            siblings=self.flow.siblings,
            excluded=self.failures.at(stage.index, hole=True),
            evict=self.evict,
            replays=self.replays,
            types=emitted_types(stage),
            holes=not stage.looks_up,
            removed=self.removed.get(stage.name),
            waiting=self.ledger.waiting(self.flow.after(stage)),
        )

    def onward(self, stage: Stage, outcome: StageOutcome) -> Applied:
        """The elements that a stage passes on, in order of arrival."""
        behind = self.flow.stages[stage.index + 1 :]
        schema = behind[0].schema if behind else self.flow.tail_schema
        return Applied([element for one in outcome.decided for element in one.emitted], schema)

    def leave(self, emitted: Applied) -> None:
        """Run the elements that the last stage passes on, or all that were read, through the steps after it."""
        topic_ids, siblings = self.topic_ids, self.flow.siblings
        judged = bool(self.flow.stages)
        filled, copies = missing_after(
            emitted, ledger=self.ledger, topic_ids=topic_ids, siblings=siblings, judged=judged
        )
        self.collector.tail(filled, copies=copies)
        if not judged:
            for lineage in (element.lineage.resolved(topic_ids) for element in emitted.elements if element.chain):
                self.incarnation(lineage.root.topic, lineage.root.topic_id)  # notes the ids of root topics
        marking, last = self._marking(END_OF_FLOW), len(self.flow.stages)
        self._gather(last, END_OF_FLOW, emitted, self._apply(last, self.flow.tail, emitted, marking))

    def _marking(self, stage: str, later: Collection[str] = ()) -> Marking:
        return marking_before(
            stage,
            ledger=self.ledger,
            topic_ids=self.topic_ids,
            siblings=self.flow.siblings,
            later=later,
            largest=self.largest,
        )

    def _apply(self, index: int, steps: Sequence[Step], before: Applied, marking: Marking) -> Applied:
        """Run the steps before a stage, without the records that failed there in another task."""
        failed = self.failures.at(index, hole=False)
        kept = [element for element in before.elements if element.own not in failed] if failed else before.elements
        if index == 0 and self.flow.merges:
            applied = merged(self.flow, kept, marking).after(steps)
        else:
            applied = apply_steps(steps, kept, before.schema, marking, self.tables)
        if not failed:
            return applied
        applied.rejected += [
            RejectedElement.because(element, failed[element.own])
            for element in before.elements
            if element.own in failed
        ]
        return applied

    def _gather(self, index: int, name: str, before: Applied, applied: Applied) -> None:
        withhold(applied)
        passed = {element.own: len(element.indices) for element in before.elements if index and applied.rejected}
        for rejected in applied.rejected:
            self.collector.rejected(name, rejected, fixed=passed.get(rejected.element.own, 0))
            if rejected.whole:
                cause = Cause(rejected.reason, rejected.detail, rejected.raised)
                self.failures.add(index, rejected.element.own, cause, hole=False)
        self.outputs += applied.outputs
        self.report.filtered += applied.filtered
