"""A flow run twice: message by message in memory, and by the Spark engine's vectorised tasks, without Spark."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow, Stage
from aggregations.engine.columnar import ColumnarPath
from aggregations.engine.dropped import Dropped, Listed, runs_of
from aggregations.engine.path import Work
from aggregations.engine.transfer import pack, unpack
from aggregations.per_message.dead_letters import DeadLetterCollector
from aggregations.per_message.loop import MessageLoop
from aggregations.per_message.publishing import OutputMessage
from aggregations.per_message.stage import Decided
from aggregations.per_message.times import times_in
from aggregations.report import DeadLetter, Report
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.closing import with_closing
from aggregations.run.final import FinalSnapshots
from aggregations.run.memory import MemoryRunner
from aggregations.run.retire import Retirement, with_dues
from aggregations.run.run import Run
from aggregations.run.snapshots import snapshots_of
from aggregations.run.states import load_states
from aggregations.run.turns import begin_batch
from envelope import Hop, Reason, TopicPartition
from envelope.deadletter import DeadLetterHeaders, Form
from jobs.dead_letters.redrive import redriven
from persistence.protocol import Write
from tests.support.jobs import job_of
from tests.support.pure import fresh_store, table_of

TOPIC_ID = "T1"
ROUTES = 2
SHARE = 0.5
"""Share of the events that a journal would list."""


def record(topic: str, offset: int, key: bytes, value: bytes, partition: int = 0) -> Record:
    """A record of the source."""
    return Record(topic, partition, offset, key, value, topic_id=TOPIC_ID)


class _OfKnownPartitions(MemoryRunner):
    """Takes no partition for an added one: the engine looks for them outside of the vectorised path."""

    def _look(self, *_: object) -> None:
        pass


class Both:
    """Two runs of one flow, each on its own store; after every batch they must agree in everything stored.

    Attributes:
        dead_letters: All dead letters so far.
        stores: URLs of the two stores, for another pair of runs on them.
    """

    def __init__(
        self,
        flow: Flow[Any],
        stores: tuple[str, str] | None = None,
        *,
        accept: Sequence[str] = (),
        largest: Mapping[str, int] = {},
    ) -> None:
        self.flow = flow
        self._largest = largest
        self.topic_ids = dict.fromkeys(flow.topics, TOPIC_ID)
        self.stores = stores or (fresh_store(), fresh_store())
        mine, theirs = (bind(flow, {}, store) for store in self.stores)
        with self._limited():
            self.memory = _OfKnownPartitions(flow, mine, topic_ids=self.topic_ids, accept=accept, ends={})
        self.dead_letters: list[DeadLetter] = []
        self._urls = theirs
        # Two tasks may reject items of one record for two reasons; see tests/unit/test_scattered_items.py.
        self._routes = 1 if flow.scatters else ROUTES
        self.run = begin(flow, theirs, accept=accept)
        self._retirement = Retirement(self.run)
        self._closed: list[OutputMessage] = []
        self._final = FinalSnapshots(self.run, lambda _stage, outputs: self._closed.extend(outputs), largest)
        self._final.publish()
        assert self._taken() == sorted(map(repr, self.memory.outputs))

    def process(self, records: Sequence[Record]) -> None:
        """Fold one batch on both paths and compare verdicts, dead letters, states and histories."""
        before, sent = len(self.memory.dead_letters), len(self.memory.outputs)
        with _journaled(self.flow) as journal, self._limited():
            report = self.memory.process(records)
        works = [
            self._vectorised(part, mine) for part in self.flow.parts if (mine := self._of(part, records)) is not None
        ]
        assert self.run.ledger == self.memory.run.ledger
        new = self.memory.dead_letters[before:]
        self.dead_letters += new
        assert {
            (one.record.node, one.stage): (one.reason, one.detail, one.hole, one.items, one.raised) for one in new
        } == {
            at: (dead.reason, dead.detail, dead.hole, dead.items, dead.raised)
            for work in works
            for at, dead in work.collector.dead.items()
        }
        dropped = Dropped()
        for work in works:
            dropped.add(work.report.dropped)
        assert _listed(dropped) == _listed(journal)
        outputs = [repr(output) for work in works for output in work.outputs]
        assert sorted([*outputs, *self._taken()]) == sorted(map(repr, self.memory.outputs[sent:]))
        counts = Report()
        for work in works:
            counts.add(work.report.counts)
            counts.add_copies(work.collector.copies)
        verdicts = {**{stage.name: Counter() for stage in self.flow.stages}, **counts.verdicts}
        assert verdicts == {**{stage.name: Counter() for stage in self.flow.stages}, **report.verdicts}
        assert (counts.records, counts.filtered) == (report.records, report.filtered)
        assert (counts.removed, counts.warnings) == (report.removed, report.warnings)
        assert counts.unpublished == report.unpublished
        ours, theirs = self.memory.run.ledger, self.run.ledger
        assert (ours.listed, ours.forgotten, ours.seen) == (theirs.listed, theirs.forgotten, theirs.seen)
        assert self.memory.run.manifest is not None
        assert self.run.manifest is not None
        assert self.memory.run.manifest.positions == self.run.manifest.positions
        for stage in self.flow.stages:
            store = self.run.stores[stage.name]
            keys = [key for key, _ in store.scan(self.run.stage_ref(stage))]
            found, wanted = load_states(self.run, stage, keys), self.memory.states(stage.name)
            assert found == wanted
            # As text, because 1, 1.0 and true compare equal.
            assert {key: json.dumps(one.fold) for key, one in found.items()} == {
                key: json.dumps(one.fold) for key, one in wanted.items()
            }

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """What the engine asks the broker for, the run in memory gets here."""
        with ExitStack() as stack:
            for made in (MessageLoop, snapshots_of, FinalSnapshots):
                limited = partial(made, largest=self._largest)
                stack.enter_context(patch(f"aggregations.run.memory.{made.__name__}", limited))
            yield

    def _taken(self) -> list[str]:
        """What was published of closed windows since the last call."""
        found, self._closed[:] = sorted(map(repr, self._closed)), []
        return found

    def results(self, stage: str) -> dict[bytes, Any]:
        """The results of a stage by key."""
        return self.memory.results(stage)

    def reasons(self) -> list[tuple[int, Reason]]:
        """Offset and reason of every dead letter so far."""
        return [(one.record.offset, one.reason) for one in self.dead_letters]

    def redriven(self, dead: DeadLetter, offset: int, application: str = "") -> Record:
        """A dead letter of the flow, or of another application, as an operator redrives it."""
        return redriven_record(self.flow, dead, offset, application)

    def _of(self, part: Flow[Any], records: Sequence[Record]) -> Sequence[Record] | None:
        """The records that a part of the flow reads; None if it has no batch."""
        if len(self.flow.parts) == 1:
            return records
        return [one for one in records if one.topic in part.topics] or None

    def _vectorised(self, part: Flow[Any], records: Sequence[Record]) -> Work:
        run = self.run
        begin_batch(run, {TopicPartition(one.topic, one.partition): one.offset + 1 for one in records}, self.topic_ids)
        while True:
            work, writes = self._folded(records, part)
            if not (unlisted := work.collector.unlisted()):
                break
            run.list_dead(unlisted)
        for stage, found in reversed(writes):
            dated = with_dues(stage, found)
            run.stores[stage.name].save(run.stage_ref(stage), dated, epoch=run.epoch, batch=run.batch)
        ends = {TopicPartition(one.topic, one.partition): one.offset + 1 for one in records}
        following = run.following(ends, self.topic_ids, _incarnations(run), work.collector.changes)
        manifest = with_closing(run, following, ())
        for name, _ in run.distinct_stores():
            run.save_manifest(name, manifest)
        run.advanced(manifest)
        work.report.counts.add(self._final.publish())
        work.report.counts.removed = self._retirement.remove()
        return work

    def _chunks(self, records: Sequence[Record]) -> list[pa.RecordBatch]:
        found: list[pa.RecordBatch] = []
        for topic in dict.fromkeys(one.topic for one in records):
            table = table_of([one for one in records if one.topic == topic], headers=self.flow.reads_headers)
            found += table.to_batches(max_chunksize=3)
        return found

    def _folded(
        self, records: Sequence[Record], part: Flow[Any] | None = None
    ) -> tuple[Work, list[tuple[Stage, list[Write]]]]:
        part = part or self.flow
        run, path = self.run, ColumnarPath()
        job = job_of(
            *(part, run, self.topic_ids),
            routes=self._routes,
            earlier=None if run.accept_definition else run.earlier,
            asked=("raw", *self.topic_ids),
            incarnations=_incarnations(run),
            times=times_in(run.manifest, self.topic_ids),
            removed=self._retirement.removed,
            closed=self._final.closed(self._retirement.removed),
            largest=self._largest,
            longest_keys=run.longest_keys,
            journal="journal",
            journal_share=SHARE,
        )
        work = Work(job)
        tasks: list[Any] = [path.read(work, self._chunks(records))]
        writes = []
        for stage in part.stages:
            folded = [path.fold(work, stage, arrivals) for arrivals in tasks]
            writes.append((stage, [write for part, _ in folded for write in part]))
            sent = [pack(following, self._routes) for _, following in folded if following is not None]
            tasks = [unpack([part[route] for part in sent if part[route]]) for route in range(self._routes)]
        return work, writes


def _incarnations(run: Run) -> dict[str, tuple[str, ...]]:
    return dict(run.manifest.incarnations) if run.manifest else {}


@contextmanager
def _journaled(flow: Flow[Any]) -> Iterator[Dropped]:
    """What a journal would list of a batch in memory: of the last attempt of each part of the flow."""
    whole, attempts, collect = Dropped(), dict[str, tuple[DeadLetterCollector, Dropped]](), DeadLetterCollector.decided

    def noted(self: DeadLetterCollector, stage: str, decisions: Sequence[Decided]) -> None:
        if attempts.get(self.first, (None,))[0] is not self:
            attempts[self.first] = self, Dropped()
        filters = flow.stage(stage).aggregate.rule is not None
        attempts[self.first][1].decided(stage, decisions, SHARE, filters=filters)
        collect(self, stage, decisions)

    with patch.object(DeadLetterCollector, "decided", noted):
        yield whole
    for _, one in attempts.values():
        whole.add(one)


def _listed(dropped: Dropped) -> dict[tuple[str, str, str, int], set[int]]:
    """The offsets of what was dropped."""
    return {
        place: {offset for run in Listed(runs_of(parts)) for offset in run} for place, parts in dropped.spans.items()
    }


def redriven_record(
    flow: Flow[Any], dead: DeadLetter, offset: int, application: str = "", *, generation: int = 1
) -> Record:
    """A dead letter of a generation of a flow, or of another application, as an operator redrives it."""
    record = dead.record
    form = Form.ENVELOPE if flow.source_of(record.topic).envelope else Form.PAYLOAD
    place = (record.topic, record.partition, record.offset)
    letter = DeadLetterHeaders(
        *place,
        dead.reason,
        topic_id=TOPIC_ID,
        stage=dead.stage,
        application=application or flow.name,
        generation=generation,
        hole=dead.hole,
        items=dead.items,
        form=form,
        timestamp_ms=record.timestamp_ms,
    )
    value = redriven(record.key, record.value, (), letter, Hop("dead", 0, offset, topic_id="D"))
    return Record(record.topic, record.partition, offset, record.key, value, record.timestamp_ms, (), TOPIC_ID)
