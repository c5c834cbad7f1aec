"""The in-memory runner: real flow, stores and commit; the caller passes the records. Reference for other runners."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow, Stage
from aggregations.definition.lookups import Row
from aggregations.errors import RunRefusedError
from aggregations.per_message.dead_letters import DeadLetterCollector
from aggregations.per_message.lookups import rows_before
from aggregations.per_message.loop import MessageLoop
from aggregations.per_message.publishing import OutputMessage
from aggregations.per_message.stage import KeyState, StageOutcome
from aggregations.per_message.times import times_in
from aggregations.report import DeadLetter, Report
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.closing import IdlePartitions, with_closing
from aggregations.run.final import FinalSnapshots
from aggregations.run.held_outputs import hold_outputs
from aggregations.run.incarnations import Incarnations
from aggregations.run.results import results_of
from aggregations.run.retire import Retirement
from aggregations.run.risks import check_accept
from aggregations.run.run import Run
from aggregations.run.snapshots import snapshots_of
from aggregations.run.states import load_states, save_states
from aggregations.run.turns import batch_to_repeat, begin_batch, check_turn, part_to_finish
from envelope import TopicPartition
from envelope.limits import MAX_OFFSET, broker_id
from persistence.commit.faults import DEAD_LETTER, close_of, effect
from persistence.commit.order import commit
from persistence.commit.steps import CommitStep
from persistence.errors import StoreError
from persistence.growth import METADATA_MAX_AGE_SECONDS, Ends
from persistence.manifest import Rebuilt

_LOG = logging.getLogger("headwater.memory")
_attempts = count(1)

_Records: TypeAlias = dict[tuple[str, int, int], Record]
"""Records by topic, partition and offset, in order of offsets."""


@dataclass(slots=True)
class _Batch:
    """A batch while the flow processes it."""

    records: _Records
    report: Report
    collector: DeadLetterCollector
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    outputs: list[OutputMessage] = field(default_factory=list)

    def dead_letters(self) -> list[DeadLetter]:
        """The records that cannot be used, unchanged."""
        return [
            DeadLetter(
                self.records[one.own.topic, one.own.partition, one.own.offset],
                one.stage,
                one.reason,
                one.detail,
                one.hole,
                one.items,
                one.raised,
            )
            for one in self.collector.dead.values()
        ]


class MemoryRunner:
    """Runs a flow message by message in this process, with the real commit order.

    Every batch is exact or raises; after an error, start again with a new runner on the same stores.

    Args:
        flow: The flow.
        stores: URL of the store by stage name, as for `bind`.
        topic_ids: Current topic id by topic, for roots without a topic id.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        ends: Current end offset by partition. A crashed run may have folded records below them; without them, any
            record.
        whole: Returns the end offset by partition of the whole topic; by topic for a flow with several sources. Without
            it only the partitions of the records passed in are known: no other one holds windows open, and a growth of the
            topic never ends.
        clock: Returns the time in seconds since 1970.
        metadata_max_age: Seconds for which producers may not know of new partitions.
        generation: Generation of the states; None for the live one.
        rebuilt: The run is that of a rebuild, with this note: states of windows that have closed are held in the store.
        holds: Its outputs are held as well (`aggregations.run.held_outputs`); the caller does not pass on `outputs`.

    Raises:
        FlowError: The flow has no source or no stage, a stage has no store, or an argument has the wrong type.
        RunRefusedError: The stores are inconsistent with each other or with the flow.

    Attributes:
        run: Epoch, manifest and stores.
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
        ends: Mapping[TopicPartition, int] | None = None,
        whole: Ends | Mapping[str, Ends] | None = None,
        clock: Callable[[], float] = time.time,
        metadata_max_age: float = METADATA_MAX_AGE_SECONDS,
        generation: int | None = None,
        rebuilt: Rebuilt | None = None,
        holds: bool = False,
    ) -> None:
        stores = bind(flow, stores)
        check_accept(flow.name, stores, accept)
        self.flow = flow
        self.topic_ids = topic_ids or {}
        self.dead_letters: list[DeadLetter] = []
        self.outputs: list[OutputMessage] = []
        self.report = Report()
        self._whole = dict.fromkeys(flow.topics, whole) if callable(whole) else whole or {}
        self._clock, self._max_age = clock, metadata_max_age
        self.run: Run = begin(flow, stores, generation=generation, accept=accept, clock=clock, rebuilt=rebuilt)
        self._ends = ends
        self._failed = False
        self._idle = IdlePartitions({name: topic.idle_seconds for name, topic in flow.topics.items()})
        self.run.doubted(ends or {})
        self._retirement = Retirement(self.run)
        self._holds = holds
        run, outputs = self.run, self.outputs  # the runner itself would keep its stores open until the collector runs

        def publish_closed(stage: str, made: Sequence[OutputMessage]) -> None:
            effect(close_of(stage), lambda: outputs.extend(made) if rebuilt is None else _hold(run, made))

        self._final = FinalSnapshots(run, publish_closed)
        self._leave(self.report)  # what a crashed run left

    def process(self, records: Iterable[Record]) -> Report:
        """Fold and commit one batch: contiguous per partition, in order of offsets.

        Returns:
            Counts and dead letters of this batch.
        """
        self._failed = True
        found = effect(CommitStep.FETCH, lambda: {(one.topic, one.partition, one.offset): one for one in records})
        first = part_to_finish(self.run)
        report = Report()
        for part in sorted(
            self.flow.parts, key=lambda part: first is None or part.topics.keys() != first.topics.keys()
        ):
            mine = {place: one for place, one in found.items() if len(self.flow.parts) == 1 or place[0] in part.topics}
            if mine or len(self.flow.parts) == 1:
                for batch in self._divided(mine):
                    report.add(self._commit(part, batch))
        self._failed = False
        return report

    @property
    def unfinished(self) -> Mapping[TopicPartition, int]:
        """Next offset after a batch that a crashed run began and that `process` has to repeat; empty for none."""
        return batch_to_repeat(self.run)

    def _divided(self, found: _Records) -> Iterator[_Records]:
        """The batch that has to be repeated, if there is one, and what remains.

        Raises:
            RunRefusedError: Some records of the batch to be repeated are missing.
        """
        if not (ends := self.unfinished):
            yield found
            return
        first = {at: one for at, one in found.items() if at[2] < ends.get(TopicPartition(at[0], at[1]), 0)}
        if (given := _ends_of(first)) != ends:
            missing = [f"{at.topic}:{at.partition} up to {end}" for at, end in ends.items() if given.get(at) != end]
            raise RunRefusedError(
                f"flow {self.flow.name}: a crashed run may have passed on records of {', '.join(missing)}. Pass the whole "
                "batch: in another batch, a filter over all partitions would pass on other records"
            )
        yield first
        if rest := {at: one for at, one in found.items() if at not in first}:
            yield rest

    def _commit(self, part: Flow[Any], found: _Records) -> Report:
        """Fold and commit the records of one part of the flow."""
        check_turn(self.run, part)
        consumed = self._consumed_ids(found.values())
        begin_batch(self.run, _ends_of(found), consumed)
        self._look(part, found)
        read = {TopicPartition(topic, partition) for topic, partition, _ in found}
        idle = self._idle.look({*self.run.start, *read}, read, self._clock())
        self.run.check_progress()
        incarnations = self.run.incarnations({**self.topic_ids, **consumed})
        batch = self._fold(part, found, incarnations, consumed)
        while unlisted := batch.collector.unlisted():
            self.run.list_dead(unlisted)
            # Redriven copies of listed dead letters may be in the same batch.
            batch = self._fold(part, found, incarnations, consumed)
        ends = {TopicPartition(topic, partition): 0 for topic, whole in self._whole.items() for partition in whole()}
        ends |= _ends_of(found)
        manifest = self.run.following(ends, consumed, incarnations.merged(), batch.collector.changes)
        manifest = with_closing(self.run, manifest, idle)
        commit(
            lambda: self._publish(batch),
            [(stage.name, lambda stage=stage: self._persist(stage, batch)) for stage in part.stages],  # type: ignore[misc]
            [
                (name, lambda name=name: self.run.save_manifest(name, manifest))  # type: ignore[misc]
                for name, _ in self.run.distinct_stores()
            ],
        )
        self.run.advanced(manifest)
        batch.report.batches = 1
        self._leave(batch.report)
        batch.report.reasons.update(one.reason.value for one in batch.collector.dead.values())
        batch.report.raised.update(one.cause for one in batch.collector.dead.values() if one.raised)
        batch.report.log_raised(_LOG)
        batch.report.add_copies(batch.collector.copies)
        self.report.add(batch.report)
        return batch.report

    def states(self, stage: str) -> dict[bytes, KeyState]:
        """Every state of a stage, as stored."""
        found = self.flow.stage(stage)
        store = self.run.stores[stage]
        keys = [key for key, _ in store.scan(self.run.stage_ref(found))]
        return load_states(self.run, found, keys)

    def results(self, stage: str) -> dict[bytes, Any]:
        """Every state of a stage, as readers see it; in a stage with sessions every session."""
        found, states = self.flow.stage(stage).aggregate, self.states(stage)
        results = (one for key, state in states.items() if state.folded for one in results_of(found, key, state.fold))
        return {one.key: one.state for one in results}

    def close(self) -> None:
        """End the run and close the stores."""
        if not self._failed:
            with suppress(
                StoreError
            ):  # another run has started, or the store does not answer: then this run did not end cleanly
                self.run.finish()
        self.run.close()

    def _fold(
        self,
        flow: Flow[Any],
        found: _Records,
        incarnations: Incarnations,
        consumed: Mapping[str, str],
    ) -> _Batch:
        """Load and fold a batch, stage by stage, in memory."""
        run = self.run
        if self._ends is None:
            run.doubted(
                {TopicPartition(*place): MAX_OFFSET for place in {(topic, partition) for topic, partition, _ in found}}
            )
        collector = DeadLetterCollector(
            run.ledger,
            flow.stage_names[0],
            flow.siblings,
            self.topic_ids,
            flow.followed,
            flow.publishing,
            flow.lists_holes,
        )
        batch = _Batch(found, Report(), collector)
        loop = MessageLoop(
            flow=flow,
            ledger=run.ledger,
            topic_ids=self.topic_ids,
            collector=collector,
            report=batch.report,
            batch=run.batch,
            doubt=run.doubt,
            incarnation=incarnations.verdict,
            evict=run.evicts,
            replays=run.replays,
            outputs=batch.outputs,
            times=times_in(run.manifest, consumed),
            removed=self._retirement.removed,
            closed=self._final.closed(self._retirement.removed),
            tables=self._rows,
            longest_keys=run.longest_keys,
        )
        applied = loop.read(found.values())
        collector.changes.seen, collector.changes.times = loop.seen, loop.times
        for stage in flow.stages:
            arrivals = loop.enter(stage, applied)
            outcome = batch.outcomes[stage.name] = loop.fold(stage, arrivals, partial(load_states, run))
            batch.outputs += snapshots_of(
                stage, outcome.states, ref=run.ref, epoch=run.epoch, batch=run.batch, attempt=1, counts=batch.report
            )
            applied = loop.onward(stage, outcome)
        loop.leave(applied)
        return batch

    def _leave(self, report: Report) -> None:
        """Publish the windows that have closed, then remove the states that are due."""
        report.add(self._final.publish())
        report.removed.update(self._retirement.remove())

    def _rows(self, table: str, keys: Sequence[bytes]) -> Mapping[bytes, Row]:
        run = self.run
        return rows_before(run.stores[table], run.ref, table, keys, epoch=run.epoch, batch=run.batch)

    def _look(self, part: Flow[Any], records: Mapping[tuple[str, int, int], Record]) -> None:
        """Detect partitions that were added to a topic, also before it was first read."""
        keys: dict[tuple[str, bytes], set[int]] = defaultdict(set)
        for record in records.values():
            if record.key is not None and all(one.aggregate.co_partitioned for one in part.stages[:1]):
                keys[record.topic, record.key].add(record.partition)
        for topic in self.run.sources:
            seen = {partition for name, partition, _ in records if name == topic} | self.run.positions(topic).keys()
            whole = self._whole.get(topic)
            self.run.look(
                topic,
                len(seen) if whole is None else max(len(whole()), len(seen)),
                clock_ms=int(self._clock() * 1000),
                ends=whole,
                shared=any(name == topic and len(partitions) > 1 for (name, _), partitions in keys.items()),
                max_age_seconds=self._max_age,
            )

    def _publish(self, batch: _Batch) -> None:
        self.outputs += batch.outputs
        if self._holds:
            _hold(self.run, [one for one in batch.outputs if one.own is not None])
        batch.report.outputs = len(batch.outputs)
        if batch.collector.dead:
            effect(DEAD_LETTER, lambda: self.dead_letters.extend(batch.dead_letters()))

    def _persist(self, stage: Stage, batch: _Batch) -> None:
        save_states(self.run, stage, batch.outcomes[stage.name].states)

    def _consumed_ids(self, records: Iterable[Record]) -> dict[str, str]:
        """Topic ids of the consumed topics, if known: a record's own topic id takes precedence over `topic_ids`."""
        given = {topic: topic_id for topic, topic_id in self.topic_ids.items() if topic in self.flow.topics}
        return given | {record.topic: broker_id(record.topic_id) for record in records if record.topic_id}


def _hold(run: Run, outputs: Sequence[OutputMessage]) -> None:
    """Hold outputs of a rebuild in its store."""
    store, attempt = run.stores[run.flow.stage_names[0]], next(_attempts)
    hold_outputs(store, run.ref, outputs, epoch=run.epoch, batch=run.batch, attempt=attempt)


def _ends_of(found: Mapping[tuple[str, int, int], Record]) -> dict[TopicPartition, int]:
    """Next offset after these records, which are in order of offsets, by partition."""
    return {TopicPartition(record.topic, record.partition): record.offset + 1 for record in found.values()}
