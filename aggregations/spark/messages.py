"""The per-message path: the same pure code as the in-memory runner, in Spark's tasks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from aggregations.element import Element, Record
from aggregations.flow import END_OF_FLOW, Stage
from aggregations.source import RecordDecoder
from aggregations.spark.clients import store_of
from aggregations.spark.job import dumps, loads
from aggregations.spark.parcels import route_of
from aggregations.spark.path import Work, text_of
from aggregations.spark.roots import DETAIL
from aggregations.stage import Arrival, Decided, KeyState, fold_stage
from aggregations.states import read_states, writes_of
from aggregations.steps import Applied, apply_steps, arrive
from envelope import EnvelopeError, Reason
from persistence.faults import effect
from persistence.protocol import Write
from persistence.steps import Step


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
                    excluded=job.excluded_at(stage),
                ),
            )
            counts = work.report.counts
            counts.verdicts.setdefault(stage.name, Counter()).update(outcome.verdicts)
            counts.retired += outcome.retired
            for one in outcome.decided:
                if one.reason is not None:
                    self._fail(work, stage, one)
            emitted = [element for one in outcome.decided for element in one.emitted]
            work.outputs += job.snapshots_of(stage, outcome.states)
            writes = writes_of(outcome.states, stage.definition)
            if stage.index + 1 < len(job.flow.stages):
                following = job.flow.stages[stage.index + 1]
                return writes, self._enter(work, following, Applied(emitted, following.schema))
            self._gather(work, END_OF_FLOW, apply_steps(job.flow.tail, emitted, job.flow.tail_schema))
            return writes, None

    def _decode(self, work: Work, batches: Iterable[pa.RecordBatch]) -> list[Element[Any]]:
        job = work.job
        assert job.flow.topic is not None
        decoder = RecordDecoder(job.flow.topic, job.flow.columns)
        elements: list[Element[Any]] = []
        for record in records_of(batches, job.topic_ids):
            work.report.counts.records += 1
            try:
                read = decoder.decode(record)
            except EnvelopeError as error:
                work.bury(record.node, "", error.reason, error.detail)
                continue
            if read.chain and work.roots.is_beyond(read.lineage.resolved(work.roots.topic_ids).root):
                work.bury(record.node, "", Reason.ROOT_BEYOND_END, DETAIL, str(read.lineage))
                continue
            elements.append(read.element(record.headers))
        return elements

    def _enter(self, work: Work, stage: Stage, before: Applied) -> list[Arrival]:
        job = work.job
        assert job.flow.topic is not None
        applied = apply_steps(stage.before, before.elements, before.schema)
        arrivals = arrive(
            stage.aggregate,
            applied,
            topic_ids=work.roots.topic_ids,
            incarnation=work.incarnations.verdict,
            siblings=job.flow.topic.siblings,
            later=job.flow.behind(stage),
        )
        self._gather(work, stage.name, applied)
        return arrivals

    def _gather(self, work: Work, stage: str, applied: Applied) -> None:
        for rejected in applied.rejected:
            work.bury(rejected.element.own, stage, rejected.reason, rejected.detail, text_of(rejected.element))
        work.outputs += applied.outputs
        work.report.counts.filtered += applied.filtered

    def _fail(self, work: Work, stage: Stage, one: Decided) -> None:
        assert one.reason is not None
        own = one.arrival.element.own
        work.bury(own, stage.name, one.reason, one.detail, text_of(one.arrival.element), hole=one.hole)
        if one.hole:
            work.report.failed[stage.index, own.topic, own.partition, own.offset] = (one.reason, one.detail)


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
