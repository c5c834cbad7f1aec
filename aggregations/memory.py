"""The in-memory runner: real flow, stores and commit, records handed over by the caller. The oracle of the others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aggregations.element import Element, Record
from aggregations.flow import END_OF_FLOW, Flow, Stage
from aggregations.report import DeadLetter, Report
from aggregations.run import Incarnations, Run, begin
from aggregations.snapshots import snapshots_of
from aggregations.source import RecordDecoder
from aggregations.stage import Arrival, KeyState, Outcome, fold_stage
from aggregations.states import load_states, save_states
from aggregations.steps import Applied, Output, Rejected, apply_steps, arrive
from envelope import EnvelopeError, Node, Reason
from persistence.commit import commit
from persistence.faults import DEAD_LETTER, effect
from persistence.steps import Step


@dataclass(slots=True)
class _Batch:
    """A batch on its way through the flow."""

    records: dict[tuple[str, int, int], Record]
    report: Report
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    dead: dict[tuple[str, int, int, str], DeadLetter] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)

    def bury(self, stage: str, own: Node, reason: Reason, detail: str, *, hole: bool = False) -> None:
        """Note a dead letter: once per record and stage, though several of its items may fail."""
        at = (own.topic, own.partition, own.offset)
        if (*at, stage) not in self.dead:
            self.dead[*at, stage] = DeadLetter(self.records[at], stage, reason, detail, hole)
            self.report.reasons[reason.value] += 1


class MemoryRunner:
    """Runs a flow message by message in this process, with the real commit order.

    Every batch is exact or raises; after an error begin again with a new runner on the same stores.

    Args:
        flow: The flow.
        stores: URL of the store by stage name, from `run.bind`.
        topic_ids: Current topic id by topic, for roots that do not name theirs.
        accept: Risks taken on purpose; see `aggregations.reconcile.Risk`.

    Raises:
        RunRefusedError: The stores do not fit together or to the flow.

    Attributes:
        run: Term, manifest and stores.
        dead_letters: All dead letters so far, in order.
        outputs: All outputs so far, in order.
        report: Counts so far.
    """

    def __init__(
        self,
        flow: Flow[Any],
        stores: Mapping[str, str],
        *,
        topic_ids: Mapping[str, str] | None = None,
        accept: Sequence[str] = (),
    ) -> None:
        assert flow.topic is not None
        self.flow = flow
        self.topic = flow.topic
        self.topic_ids = topic_ids or {}
        self.dead_letters: list[DeadLetter] = []
        self.outputs: list[Output] = []
        self.report = Report()
        self._decoder = RecordDecoder(self.topic, flow.columns)
        self.run: Run = begin(flow, stores, accept=accept)

    def process(self, records: Iterable[Record]) -> Report:
        """Fold and commit one batch: contiguous per partition, in order of offsets.

        Returns:
            What this batch did.
        """
        batch = effect(Step.FETCH, lambda: self._fetch(records))
        consumed = self._consumed_ids(batch)
        incarnations = self.run.incarnations({**self.topic_ids, **consumed})
        applied = Applied(self._decode(batch), self.topic.schema)
        for stage in self.flow.stages:
            applied = self._stage(stage, applied, batch, incarnations)
        self._finish(self.flow.tail, applied, batch)
        ends = {(record.topic, record.partition): record.offset + 1 for record in batch.records.values()}
        manifest = self.run.following(ends, consumed, incarnations.merged())
        commit(
            lambda: self._publish(batch),
            [(stage.name, lambda stage=stage: self._persist(stage, batch)) for stage in self.flow.stages],  # type: ignore[misc]
            [
                (name, lambda name=name: self.run.save_manifest(name, manifest))  # type: ignore[misc]
                for name, _ in self.run.distinct_stores()
            ],
        )
        self.run.advanced(manifest)
        batch.report.batches = 1
        self.report.add(batch.report)
        return batch.report

    def states(self, stage: str) -> dict[bytes, KeyState]:
        """Every state of a stage, as its store has it."""
        found = self.flow.stage(stage)
        store = self.run.stores[stage]
        keys = [key for key, _ in store.scan(self.run.stage_ref(found))]
        return load_states(self.run, found, keys)

    def results(self, stage: str) -> dict[bytes, Any]:
        """What readers see of every state of a stage."""
        fold = self.flow.stage(stage).aggregate.fold
        result = getattr(fold, "result", lambda state: state)
        return {key: result(state.fold) for key, state in self.states(stage).items() if state.folded}

    def close(self) -> None:
        """Close the stores."""
        self.run.close()

    def _fetch(self, records: Iterable[Record]) -> _Batch:
        found = {(record.topic, record.partition, record.offset): record for record in records}
        return _Batch(found, Report(records=len(found)))

    def _decode(self, batch: _Batch) -> list[Element[Any]]:
        elements: list[Element[Any]] = []
        for record in batch.records.values():
            try:
                read = self._decoder.decode(record)
            except EnvelopeError as error:
                batch.bury("", record.node, error.reason, error.detail)
                continue
            elements.append(read.element(record.headers))
        return elements

    def _stage(self, stage: Stage, applied: Applied, batch: _Batch, incarnations: Incarnations) -> Applied:
        applied = apply_steps(stage.before, applied.elements, applied.schema)
        arrivals: list[Arrival] = arrive(
            stage.aggregate,
            applied,
            topic_ids=self.topic_ids,
            incarnation=incarnations.verdict,
            siblings=self.topic.siblings,
            later=self.flow.behind(stage),
        )
        self._gather(stage.name, applied, batch)
        keys = list(dict.fromkeys(arrival.key for arrival in arrivals))
        loaded = effect(Step.LOAD.of(stage.name), lambda: load_states(self.run, stage, keys))
        outcome = effect(
            Step.FOLD,
            lambda: fold_stage(stage.aggregate, loaded, arrivals, batch=self.run.batch, siblings=self.topic.siblings),
        )
        batch.outcomes[stage.name] = outcome
        batch.report.verdicts[stage.name] = outcome.verdicts
        batch.report.retired += outcome.retired
        for one in outcome.decided:
            if one.reason is not None:
                batch.bury(stage.name, one.arrival.element.own, one.reason, one.detail, hole=one.hole)
        batch.outputs += snapshots_of(
            stage,
            outcome.states,
            flow=self.flow.name,
            generation=self.run.ref.generation,
            term=self.run.term,
            attempt=1,
        )
        emitted = [element for one in outcome.decided for element in one.emitted]
        return Applied(emitted, applied.schema if stage.aggregate.emit is None else None)

    def _finish(self, steps: Sequence[Any], applied: Applied, batch: _Batch) -> None:
        applied = apply_steps(steps, applied.elements, applied.schema)
        self._gather(END_OF_FLOW, applied, batch)

    def _gather(self, stage: str, applied: Applied, batch: _Batch) -> None:
        rejected: Rejected
        for rejected in applied.rejected:
            batch.bury(stage, rejected.element.own, rejected.reason, rejected.detail)
        batch.outputs += applied.outputs
        batch.report.filtered += applied.filtered

    def _publish(self, batch: _Batch) -> None:
        self.outputs += batch.outputs
        batch.report.outputs = len(batch.outputs)
        if batch.dead:
            effect(DEAD_LETTER, lambda: self.dead_letters.extend(batch.dead.values()))

    def _persist(self, stage: Stage, batch: _Batch) -> None:
        save_states(self.run, stage, batch.outcomes[stage.name].states)

    def _consumed_ids(self, batch: _Batch) -> dict[str, str]:
        """Topic ids of what is consumed, where they are known: what a record names goes before what was given."""
        given = {topic: topic_id for topic, topic_id in self.topic_ids.items() if topic == self.topic.name}
        return given | {record.topic: record.topic_id for record in batch.records.values() if record.topic_id}
