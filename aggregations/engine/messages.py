"""The per-message path: runs the pure code of the in-memory runner on a batch of few records, and compiles nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import pyarrow as pa

from aggregations.definition.element import Record
from aggregations.definition.flow import Stage
from aggregations.engine.job import Exclusion, shared_key
from aggregations.engine.path import Work
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.cause import Cause
from aggregations.per_message.loop import Failures, MessageLoop
from aggregations.per_message.stage import KeyState
from aggregations.run.states import writes_of
from envelope import Node
from persistence.protocol import Write

_PLACE = attrgetter("partition", "offset")
"""In this order, whichever partition came first: of two copies, every attempt and every runner folds the same."""


class MessagePath:
    """Processes lists of `Arrival`."""

    def read(self, work: Work, chunks: Iterable[pa.RecordBatch | pa.Table]) -> list[Arrival]:
        loop = _loop(work)
        with work.timed("decode"):
            applied = loop.read(sorted(records_of(chunks, work.job.progress.own_id), key=_PLACE))
            work.collector.changes.seen, work.collector.changes.times = loop.seen, loop.times
            if stages := work.job.flow.stages:
                return loop.enter(stages[0], applied)
            loop.leave(applied)
            return []

    def fold(self, work: Work, stage: Stage, arrivals: list[Arrival]) -> tuple[list[Write], list[Arrival] | None]:
        job, loop = work.job, _loop(work)
        if stage.index == 0:
            partitions: dict[tuple[str, bytes], int] = {}
            window = stage.aggregate.window
            for arrival in arrivals:
                own = arrival.element.own
                key = arrival.key if window is None else window.stage_key(arrival.key)
                if not job.checks_partition(own.topic, rekeyed=key != arrival.element.key):
                    continue
                if partitions.setdefault((own.topic, arrival.key), own.partition) != own.partition:
                    raise shared_key(job, stage, own.topic)

        def load(stage: Stage, keys: Sequence[bytes]) -> dict[bytes, KeyState]:
            with work.timed("load"):
                return job.load(stage, keys)

        with work.timed("fold"):
            outcome = loop.fold(stage, arrivals, load)
            if job.options.journal is not None:
                filters = stage.aggregate.rule is not None
                work.report.dropped.decided(stage.name, outcome.decided, job.options.journal_share, filters=filters)
            work.outputs += job.snapshots_of(stage, outcome.states, work.report.counts)
            writes = writes_of(outcome.states, stage.definition, stage.aggregate.renewed)
            passed_on = loop.onward(stage, outcome)
            if stage.index + 1 < len(job.flow.stages):
                return writes, loop.enter(job.flow.stages[stage.index + 1], passed_on)
            loop.leave(passed_on)
            return writes, None


class _Failures(Failures):
    """Failures of records whose items may be in several tasks."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def at(self, index: int, *, hole: bool) -> Mapping[Node, Cause]:
        return self._work.job.excluded_at(index, hole=hole)

    def add(self, index: int, own: Node, cause: Cause, *, hole: bool) -> None:
        self._work.fail(index, own, Exclusion(cause.reason, cause.detail, hole, cause.raised))


def _loop(work: Work) -> MessageLoop:
    job = work.job
    return MessageLoop(
        flow=job.flow,
        ledger=job.progress.ledger,
        topic_ids=work.roots.topic_ids,
        collector=work.collector,
        report=work.report.counts,
        batch=job.progress.batch,
        doubt=job.attempt.doubt,
        incarnation=work.incarnations.verdict,
        beyond_end=work.roots.is_beyond,
        failures=_Failures(work),
        evict=job.progress.evict,
        replays=job.progress.replays,
        outputs=work.outputs,
        times=job.progress.times,
        removed=job.progress.removed,
        closed=job.progress.closed,
        tables=work.rows,
        largest=job.progress.largest,
        longest_keys=job.progress.longest_keys,
    )


def records_of(chunks: Iterable[pa.RecordBatch | pa.Table], own_id: Callable[[str, int], str]) -> Iterable[Record]:
    """Rows of `aggregations.engine.fetch` as records.

    Args:
        chunks: Columns key, value, topic, partition, offset, timestamp (a timestamp of Arrow) and optionally headers.
        own_id: Returns the topic id of a record by its topic and partition.
    """
    for batch in chunks:
        columns = {name: batch.column(name) for name in batch.schema.names}
        times = _milliseconds(columns["timestamp"])
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
                times[i],
                tuple((one["key"], one["value"]) for one in headers[i] or ()) if headers else (),
                own_id(topic, partition),
            )


def _milliseconds(times: pa.Array | pa.ChunkedArray) -> list[int]:
    """Timestamps since 1970. `cast` would import pandas, if it is installed."""
    per = {"ms": 1, "us": 1000}[times.type.unit]
    chunks = times.chunks if isinstance(times, pa.ChunkedArray) else [times]
    return [one // per for chunk in chunks for one in chunk.view(pa.int64()).to_pylist()]
