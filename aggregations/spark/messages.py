"""The per-message path: the same pure code as the in-memory runner, in Spark's tasks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import END_OF_FLOW, Stage
from aggregations.definition.flow import Step as FlowStep
from aggregations.definition.source import RecordDecoder
from aggregations.per_message.ledger import Reading
from aggregations.per_message.stage import Arrival, KeyState, fold_stage
from aggregations.per_message.steps import Applied, Rejected, apply_steps, arrive, enter_tail, withhold
from aggregations.run.states import read_states, writes_of
from aggregations.spark.clients import store_of
from aggregations.spark.job import Exclusion, dumps, loads
from aggregations.spark.parcels import route_of
from aggregations.spark.path import Work
from aggregations.spark.roots import DETAIL
from envelope import EnvelopeError, Lineage, Node, Position, Reason
from persistence.commit.faults import effect
from persistence.commit.steps import Step
from persistence.protocol import Write


class MessagePath:
    """Works on lists of `Arrival`."""

    def read(self, work: Work, batches: Iterable[pa.RecordBatch]) -> list[Arrival]:
        with work.timed("decode"):
            elements = self._decode(work, batches)
            assert work.job.flow.topic is not None
            return self._enter(work, work.job.flow.stages[0], Applied(elements, work.job.flow.topic.schema))

    def pack(self, work: Work, arrivals: list[Arrival], routes: int) -> list[bytes]:
        divided: list[list[Arrival]] = [[] for _ in range(routes)]
        for arrival in arrivals:
            divided[route_of(arrival.key, routes)].append(arrival)
        return [dumps(part) if part else b"" for part in divided]

    def unpack(self, work: Work, payloads: Sequence[bytes]) -> list[Arrival]:
        return [arrival for payload in payloads for arrival in loads(payload)]

    def fold(self, work: Work, stage: Stage, arrivals: list[Arrival]) -> tuple[list[Write], list[Arrival] | None]:
        job = work.job
        keys = list(dict.fromkeys(arrival.key for arrival in arrivals))
        with work.timed("load"):
            loaded: dict[bytes, KeyState] = effect(
                Step.LOAD.of(stage.name),
                lambda: read_states(
                    store_of(job.urls[stage.name]), job.ref.stage(stage.name), keys, job.definition(stage)
                ),
            )
        assert job.flow.topic is not None
        siblings = job.flow.topic.siblings
        with work.timed("fold"):
            outcome = effect(
                Step.FOLD,
                lambda: fold_stage(
                    stage.aggregate,
                    loaded,
                    arrivals,
                    batch=job.batch,
                    siblings=siblings,
                    excluded=job.excluded_at(stage.index, hole=True),
                    evict=job.evict,
                    replays=job.replays,
                ),
            )
            counts = work.report.counts
            counts.verdicts.setdefault(stage.name, Counter()).update(outcome.verdicts)
            counts.retired += outcome.retired
            counts.keyless += Counter({stage.name: outcome.keyless})
            work.deaths.decided(stage.name, outcome.decided)
            for one in outcome.decided:
                if one.hole and one.reason is not None:
                    own = one.arrival.element.own
                    work.fail(stage.index, own, Exclusion(one.reason, one.detail, hole=True))
            emitted = [element for one in outcome.decided for element in one.emitted]
            work.outputs += job.snapshots_of(stage, outcome.states)
            writes = writes_of(outcome.states, stage.definition)
            if stage.index + 1 < len(job.flow.stages):
                following = job.flow.stages[stage.index + 1]
                return writes, self._enter(work, following, Applied(emitted, following.schema))
            self._leave(work, Applied(emitted, job.flow.tail_schema))
            return writes, None

    def _decode(self, work: Work, batches: Iterable[pa.RecordBatch]) -> list[Element[Any]]:
        job = work.job
        assert job.flow.topic is not None
        decoder = RecordDecoder(job.flow.topic, job.flow.columns)
        elements: list[Element[Any]] = []
        reading = Reading(job.ledger.seen, job.doubt)
        for record in records_of(batches, job.topic_ids):
            work.report.counts.records += 1
            if decoder.skips(record):
                work.report.counts.tombstones += 1
                continue
            own = job.node(record.topic, record.partition, record.offset)
            try:
                read = decoder.decode(record)
            except EnvelopeError as error:
                again = reading.again(Lineage.of(error.chain or (), own).resolved(work.roots.topic_ids), record.key)
                work.deaths.unread(own, error, key=record.key, again=again)
                continue
            lineage = read.lineage.resolved(work.roots.topic_ids)
            if read.chain and work.roots.is_beyond(lineage.root):
                work.deaths.unread(own, EnvelopeError(Reason.ROOT_BEYOND_END, DETAIL))
                continue
            elements.append(read.element(record.headers, again=reading.again(lineage, record.key)))
        work.deaths.changes.seen = reading.read
        return elements

    def _enter(self, work: Work, stage: Stage, before: Applied) -> list[Arrival]:
        job = work.job
        assert job.flow.topic is not None
        applied = self._apply(work, stage.index, stage.before, before)
        arrivals = arrive(
            stage.aggregate,
            applied,
            ledger=job.ledger,
            topic_ids=work.roots.topic_ids,
            incarnation=work.incarnations.verdict,
            siblings=job.flow.topic.siblings,
            later=job.flow.behind(stage),
        )
        self._gather(work, stage.index, stage.name, applied)
        return arrivals

    def _leave(self, work: Work, emitted: Applied) -> None:
        """Steps behind the last stage."""
        flow = work.job.flow
        assert flow.topic is not None
        tail = enter_tail(emitted, ledger=work.job.ledger, topic_ids=work.roots.topic_ids, siblings=flow.topic.siblings)
        work.deaths.tail(tail.filled, copies=tail.copies)
        last = len(flow.stages)
        applied = self._apply(work, last, flow.tail, tail.applied, tail.items)
        withhold(applied)
        self._gather(work, last, END_OF_FLOW, applied)

    def _apply(
        self,
        work: Work,
        index: int,
        steps: Sequence[FlowStep],
        before: Applied,
        only: Mapping[Node, frozenset[Position]] | None = None,
    ) -> Applied:
        """Run the steps in front of a stage, without the records of which another task found that they fail there."""
        excluded = work.job.excluded_at(index, hole=False)
        if not excluded:
            return apply_steps(steps, before.elements, before.schema, only)
        kept = [element for element in before.elements if element.own not in excluded]
        applied = apply_steps(steps, kept, before.schema, only)
        applied.rejected += [
            Rejected(element, *excluded[element.own]) for element in before.elements if element.own in excluded
        ]
        return applied

    def _gather(self, work: Work, index: int, name: str, applied: Applied) -> None:
        for rejected in applied.rejected:
            work.deaths.rejected(name, rejected)
            if rejected.whole:
                work.fail(index, rejected.element.own, Exclusion(rejected.reason, rejected.detail, hole=False))
        work.outputs += applied.outputs
        work.report.counts.filtered += applied.filtered


def records_of(batches: Iterable[pa.RecordBatch], topic_ids: dict[str, str]) -> Iterable[Record]:
    """Rows of Spark's Kafka source as records.

    Args:
        batches: Columns key, value, topic, partition, offset, timestamp (microseconds) and maybe headers.
        topic_ids: Current topic id by topic.
    """
    for batch in batches:
        columns = {name: batch.column(name) for name in batch.schema.names}
        times = columns["timestamp"].cast(pa.int64()).to_pylist()
        headers = columns["headers"].to_pylist() if "headers" in columns else None
        rows = zip(
            *(columns[name].to_pylist() for name in ("key", "value", "topic", "partition", "offset")), strict=True
        )
        for i, (key, value, topic, partition, offset) in enumerate(rows):
            yield Record(
                topic,
                partition,
                offset,
                key,
                value,
                times[i] // 1000,
                tuple((one["key"], one["value"]) for one in headers[i] or ()) if headers else (),
                topic_ids.get(topic, ""),
            )
