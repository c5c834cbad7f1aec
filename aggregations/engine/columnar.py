"""The vectorised path: whole columns from Kafka's bytes to the stages, and from one stage to the next."""

import io
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from aggregations.columns import schema
from aggregations.columns.batch import RejectedRow, indices_of, redriven, standing
from aggregations.columns.decode import Decoder
from aggregations.columns.first import Unread, may_be_copies, unread_may_be_copy
from aggregations.columns.record_columns import with_record_columns
from aggregations.columns.signature import Signature
from aggregations.columns.steps import Rejected, Stepped, apply_columns, evaluate_columns, evaluated
from aggregations.columns.times import enter_windows, with_times
from aggregations.columns.values import apply_values, parts_of, with_values
from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, columns_of, expression
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow, Stage, Step
from aggregations.definition.operators import expressions_of, is_vectorised
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.engine.columnar_fold import ColumnarFold
from aggregations.engine.job import Exclusion, Job, dumps, loads, shared_key
from aggregations.engine.path import Work, route_of
from aggregations.engine.rows import BROKEN, CLOSED, INPUT, REKEYED, STAGE_KEY, Rows, key_codes, together
from aggregations.per_message.arrivals import marking_before, missing_at_end, stage_key
from aggregations.per_message.cause import Cause
from aggregations.per_message.dead_letters import BEYOND_END, RejectedRecord
from aggregations.per_message.ledger import outputs_before
from aggregations.per_message.steps import Marking, without_rejected
from envelope import EnvelopeError, Lineage, Reason, Route
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.protocol import Write

_SYSTEM = frozenset({*schema.SYSTEM, schema.AGAIN, schema.LATE, schema.MADE, schema.TIME, schema.BEFORE})
_RECORD = frozenset({schema.VALUE, schema.HEADERS, schema.CHAIN})
_OWN = (schema.TOPIC, schema.PARTITION, schema.OFFSET)
_NO_END = np.iinfo(np.int64).max
_NULL_KEY = Cause(Reason.NULL_KEY, "the stage's key is null")


class ColumnarPath:
    """Works on `Rows`."""

    def read(self, work: Work, chunks: Iterable[pa.Table]) -> Rows:
        job = work.job
        assert job.flow.topic is not None
        decoder = Decoder(job.flow.topic, work.roots.topic_ids, job.flow.columns, timed=job.flow.is_timed)
        parts: list[Rows] = []
        unread: list[Unread] = []
        for table in chunks:
            with work.timed("decode"):
                batch = decoder.decode(table)
                work.report.counts.records += table.num_rows
                work.report.counts.tombstones += batch.skipped
                unread += [_unread(work, table, one) for one in batch.rejected]
                frame = with_record_columns(batch, table, job.flow)
                parts.append(_existing(work, Rows(frame, list(batch.signatures))))
        whole = together(parts, _empty(decoder, job.flow))
        if len(job.tasks) < sum(len(slot.ranges) for slot in job.tasks):
            whole = _by_partition(whole)
        with work.timed("steps"):
            if job.flow.is_timed:
                frame, work.collector.changes.times = with_times(whole.frame, job.flow.topic, job.times)
                whole = Rows(frame, whole.signatures)
            whole = _first_deliveries(work, whole, unread)
            if job.flow.stages:
                return _enter(work, job.flow.stages[0], whole)
            _leave(work, whole)
            return whole

    def pack(self, work: Work, arrivals: Rows, routes: int) -> list[bytes]:
        frame = arrivals.frame
        if not frame.height:
            return [b""] * routes
        codes, keys = key_codes(frame)
        route = np.fromiter((route_of(key, routes) for key in keys), np.int64, len(keys))[codes]
        payloads = []
        for number in range(routes):
            part = frame.filter(pl.Series(route == number))
            part, values = _own_values(part, arrivals.values)
            payloads.append(dumps((_ipc(part), arrivals.signatures, values)) if part.height else b"")
        return payloads

    def unpack(self, work: Work, payloads: Sequence[bytes]) -> Rows:
        parts = []
        for payload in payloads:
            data, signatures, values = loads(payload)
            parts.append(Rows(pl.read_ipc(io.BytesIO(data)), signatures, values))
        whole = together(parts, None)
        return _by_partition(whole) if len(parts) > 1 else whole

    def fold(self, work: Work, stage: Stage, arrivals: Rows) -> tuple[list[Write], Rows | None]:
        job = work.job
        if not arrivals.frame.height:
            # A task that got nothing has not even columns.
            return [], arrivals if stage.index + 1 < len(job.flow.stages) else None
        codes, keys = key_codes(arrivals.frame)
        if stage.index == 0 and job.folds_while_reading:
            partitions = arrivals.frame.get_column(schema.PARTITION).to_numpy()
            usual = np.zeros(len(keys), partitions.dtype)
            usual[codes] = partitions
            if (usual[codes] != partitions).any():
                raise shared_key(job, stage)
        with work.timed("load"):
            stored = effect(CommitStep.LOAD.of(stage.name), lambda: job.stored(stage, keys))
        with work.timed("fold"):
            folded = effect(CommitStep.FOLD, lambda: ColumnarFold(work, stage, arrivals, codes, keys, stored).run())
            work.outputs += job.snapshots_of(stage, folded.states)
        with work.timed("steps"):
            return folded.writes, _onward(work, stage, folded.onward())


def _by_partition(rows: Rows) -> Rows:
    """In the order of partitions, whichever came first: of two copies, every attempt and every runner folds the same."""
    if not rows.signatures:
        return rows
    items = schema.item_columns(rows.frame.columns)  # of a record whose items come from several tasks
    place = [schema.PARTITION, *((schema.OFFSET, *items) if items else ())]
    return Rows(rows.frame.sort(place, maintain_order=True), rows.signatures, rows.values)


def _unread(work: Work, table: pa.Table, rejection: RejectedRow) -> Unread:
    own = work.job.node(*(table.column(name)[rejection.row].as_py() for name in ("topic", "partition", "offset")))
    lineage = Lineage.of(rejection.error.chain or (), own).resolved(work.roots.topic_ids)
    return Unread(own, table.column("key")[rejection.row].as_py(), rejection.error, lineage)


def _first_deliveries(work: Work, rows: Rows, unread: Sequence[Unread]) -> Rows:
    """Mark rows that may be copies, and collect records that could not be read."""
    seen, doubt = work.job.ledger.seen, work.job.doubt
    again, read = may_be_copies(rows.frame, rows.signatures, seen, doubt)
    for one in unread:
        copy = unread_may_be_copy(one, rows.frame, rows.signatures, seen, doubt, read)
        work.collector.unread(one.own, one.error, again=copy)
    work.collector.changes.seen = read
    if not again.any():
        return rows
    return Rows(rows.frame.with_columns(pl.Series(schema.AGAIN, again)), rows.signatures)


def _existing(work: Work, rows: Rows) -> Rows:
    """Reject the rows whose root is beyond the end of its topic."""
    ends = [
        work.roots.end(one.topic, one.topic_id, one.partition, one.cluster) if one.chained else None
        for one in rows.signatures
    ]
    if not rows.frame.height or all(end is None for end in ends):
        return rows
    limits = np.array([_NO_END if end is None else end for end in ends], np.int64)
    codes = rows.frame.get_column(schema.SIGNATURE).to_numpy()
    beyond = rows.frame.get_column(schema.position(0)).to_numpy() >= limits[codes]
    if not beyond.any():
        return rows
    for place in rows.frame.filter(pl.Series(beyond)).select(schema.TOPIC, schema.PARTITION, schema.OFFSET).iter_rows():
        work.collector.unread(work.job.node(*place), EnvelopeError(Reason.ROOT_BEYOND_END, BEYOND_END))
    return Rows(rows.frame.filter(~pl.Series(beyond)), rows.signatures)


def _onward(work: Work, stage: Stage, accepted: Rows) -> Rows | None:
    """Pass the accepted rows of a stage to the next stage; None after the last stage."""
    stages = work.job.flow.stages
    if stage.index + 1 < len(stages):
        return _enter(work, stages[stage.index + 1], accepted)
    _leave(work, accepted)
    return None


def _leave(work: Work, rows: Rows) -> None:
    """Run the rows that the last stage passes on, or all that were read, through the steps after it."""
    flow = work.job.flow
    missing = _missing_after(work, rows)
    stepped = _stepped(work, len(flow.stages), flow.tail, missing, _marking(work, END_OF_FLOW))
    _gather(work, len(flow.stages), END_OF_FLOW, rows, stepped)
    if not flow.stages:
        for one in rows.signatures:
            if one.chained:
                work.incarnations.verdict(one.topic, one.topic_id)  # notes the ids of root topics


def _stepped(work: Work, index: int, steps: Sequence[Step], rows: Rows, marking: Marking) -> Stepped:
    """Run the steps before a stage, without the records that failed there in another task."""
    frame, failed = rows.frame, []
    for own, cause in work.job.excluded_at(index, hole=False).items():
        mine = (pl.col(schema.PARTITION) == own.partition) & (pl.col(schema.OFFSET) == own.offset)
        failed.append(Rejected(frame.filter(mine), cause))
        frame = frame.filter(~mine)
    on_columns, on_values = parts_of(steps, made=rows.values is not None)
    stepped = apply_columns(
        on_columns, frame, lambda frame, values: work.elements(frame, rows.signatures, values), marking
    )
    stepped.values = rows.values
    apply_values(on_values, stepped, marking)
    stepped.rejected += failed
    return stepped


def _missing_after(work: Work, rows: Rows) -> Rows:
    """The rows for the steps after the last stage: redriven rows only if something of them is missing there."""
    ledger, collector, judged, frame = work.job.ledger, work.collector, bool(work.job.flow.stages), rows.frame
    backs = [one.back for one in rows.signatures]
    bound = [back is not None and (not judged or back.redrive.stage == END_OF_FLOW) for back in backs]
    listed = {} if judged else ledger.listed.get(END_OF_FLOW, {})
    if not any(bound) and not listed:
        return rows
    # Without a stage, a plain copy may be of a listed record: one of the same root's offset.
    meant = pl.Series(np.array(bound, np.bool_)[frame.get_column(schema.SIGNATURE).to_numpy()])
    roots = pl.Series(sorted({int(at[0]) for positions in listed.values() for at in positions}), dtype=pl.Int64)
    meant |= frame.get_column(schema.position(0)).is_in(roots.implode())
    late: dict[int, str] = {}
    keep = np.ones(frame.height, np.bool_)
    for number in meant.arg_true():
        row = frame.row(number, named=True)
        if row.get(schema.LATE):
            continue
        at = standing(row, rows.signatures, rekeyed=False, siblings=collector.siblings)
        route, entries = missing_at_end(ledger, at, redriven(row, rows.signatures), indices_of(row))
        collector.tail(entries, copies=route is Route.COPY)
        if route is Route.COPY:
            keep[number] = False
        elif route is not Route.PLAIN:
            late[number] = route.value
    if late:
        frame = frame.with_columns(pl.Series(schema.LATE, map(late.get, range(frame.height)), pl.String))
    return Rows(frame.filter(pl.Series(keep)), rows.signatures, rows.values)


def _marking(work: Work, stage: str, later: Collection[str] = ()) -> Marking:
    """Decides what publish steps before a stage publish."""
    return marking_before(
        stage,
        ledger=work.job.ledger,
        topic_ids=work.roots.topic_ids,
        siblings=work.collector.siblings,
        later=later,
    )


def _enter(work: Work, stage: Stage, before: Rows) -> Rows:
    """Apply steps, key and inputs of a stage; keep only the columns that it and the following stages need."""
    job = work.job
    aggregate = stage.aggregate
    stepped = _stepped(work, stage.index, stage.before, before, _marking(work, stage.name, job.flow.after(stage)))
    key = user_key = _keys(stepped, aggregate.key)
    closed: list[pl.Series] = []
    if aggregate.window is not None:
        user_key, key, shut = enter_windows(stepped, key, aggregate.window)
        closed = [shut.alias(CLOSED)]
    frame = stepped.frame
    # Inputs of values that a function made are evaluated message by message, when they are folded.
    fold = aggregate.fold
    wanted = fold.inputs() if isinstance(fold, Fields) and stepped.values is None else {}
    # A row whose inputs cannot be computed still arrives: it leaves a hole in the state of its key.
    inputs, broken = evaluate_columns(frame, {f"{INPUT}{name}": one for name, one in wanted.items()})
    _gather(work, stage.index, stage.name, before, stepped)
    _fill_outputs(work, outputs_before(stage.name), Rows(frame, before.signatures))
    own_key = frame.get_column(schema.KEY)
    rekeyed = pl.lit(value=True) if not aggregate.co_partitioned else user_key.ne_missing(own_key)
    system = [name for name in frame.columns if name in _SYSTEM or _is_position(name)]
    system += schema.item_columns(frame.columns)
    frame = frame.select([*system, *_further(job, stage, frame)]).with_columns(
        key.alias(STAGE_KEY), pl.Series(BROKEN, broken), *inputs.get_columns(), rekeyed.alias(REKEYED), *closed
    )
    return Rows(frame, before.signatures, stepped.values)


def _fill_outputs(work: Work, missing: str, rows: Rows) -> None:
    """Collect the ledger entries of outputs before a stage that are no longer missing: of rows that arrive there."""
    ledger, siblings = work.job.ledger, work.collector.siblings
    if missing in ledger.listed:
        for row in rows.frame.iter_rows(named=True):
            at = standing(row, rows.signatures, rekeyed=False, siblings=siblings)
            work.collector.published(ledger.entries(missing, at, redriven(row, rows.signatures), indices_of(row)))


def _is_position(name: str) -> bool:
    return name.startswith("_p") and name[2:].isdecimal()


def _further(job: Job, stage: Stage, frame: pl.DataFrame) -> list[str]:
    """Columns that are needed from here on, apart from the system columns: all if a function may read any of them."""
    if schema.MADE in frame.columns:
        return [name for name in frame.columns if name in (schema.VALUE, schema.HEADERS)]
    later = job.flow.stages[stage.index + 1 :]
    steps = [*(step for one in later for step in (*one.before, one.aggregate)), *job.flow.tail]
    if isinstance(stage.aggregate.fold, Fields) and all(map(is_vectorised, steps)) and stage.aggregate.emit is None:
        needed = columns_of(one for step in steps for one in expressions_of(step))
        further = sorted(needed.intersection(frame.columns))
    else:
        further = frame.columns
    return [name for name in further if not name.startswith("_") or name in _RECORD]


def _keys(stepped: Stepped, of: Expression | Callable[[Element[Any]], Any]) -> pl.Series:
    """Canonical bytes of the stage's key of every row; rows without one are rejected."""
    if not isinstance(of, str | pl.Expr) or stepped.values is not None:
        keys = stepped.succeeded([stage_key(one) for one in stepped.each(of)])
        return pl.Series(STAGE_KEY, keys, dtype=pl.Binary)
    key = evaluated(stepped, {STAGE_KEY: expression(of)}).get_column(STAGE_KEY)
    kept = stepped.reject(key.is_null().to_numpy().astype(np.uint8), [_NULL_KEY])
    return _key_bytes(key if kept.all() else key.filter(pl.Series(kept)))


def _key_bytes(key: pl.Series) -> pl.Series:
    """Canonical bytes of keys; see `aggregations.definition.expressions.key_bytes`."""
    if key.dtype == pl.Binary:
        return key
    return key.cast(pl.String).cast(pl.Binary)


def _indices(frame: pl.DataFrame) -> list[tuple[int, ...]]:
    """The index of every row in each flat-map."""
    items = schema.item_columns(frame.columns)
    return list(frame.select(items).iter_rows()) if items else [()] * frame.height


def _gather(work: Work, index: int, stage: str, before: Rows, stepped: Stepped) -> None:
    """Collect what the steps before a stage rejected, filtered and published."""
    work.report.counts.filtered += stepped.filtered
    if stepped.outputs:
        died = (
            (work.job.node(*place), () if whole else indices)
            for frame, _, whole in stepped.rejected
            for place, indices in zip(frame.select(_OWN).iter_rows(), _indices(frame), strict=True)
        )
        work.outputs += without_rejected(stepped.outputs, died)
    for frame, cause, whole in stepped.rejected:
        lineages = _lineages(work, frame, before.signatures)
        for number, row in enumerate(frame.iter_rows(named=True)):
            own = work.job.node(row[schema.TOPIC], row[schema.PARTITION], row[schema.OFFSET])
            late, indices = row.get(schema.LATE), indices_of(row)
            dead = RejectedRecord(own, stage, cause.reason, cause.detail, lineages[number], raised=cause.raised)
            if whole:
                work.fail(index, own, Exclusion(cause.reason, cause.detail, hole=False, raised=cause.raised))
            elif indices:
                dead.items = (indices,)
            work.collector.lost(
                dead,
                standing(row, before.signatures, rekeyed=False, siblings=work.collector.siblings),
                redriven(row, before.signatures),
                indices,
                proven=late == Route.MISSING or not (late or row.get(schema.AGAIN)),
                late=bool(late),
                whole=whole,
            )


def _lineages(work: Work, frame: pl.DataFrame, signatures: Sequence[Signature]) -> list[str]:
    """Lineages as text, where the values of records are kept: as long as the flow calls functions."""
    kept = schema.VALUE in frame.columns or not any(one.chained for one in signatures)
    if not (kept and work.job.flow.calls_functions):
        return [""] * frame.height
    found = (one.lineage.resolved(work.roots.topic_ids) for one in work.elements(frame, signatures))
    return [str(one) for one in found]


def _empty(decoder: Decoder, flow: Flow[Any]) -> pl.DataFrame:
    lists = {name: SYSTEM_COLUMNS[name] for name in sorted(flow.system_lists)}
    return pl.DataFrame(schema={**decoder.schema, **schema.SYSTEM, schema.position(0): pl.Int64, **lists})


def _own_values(part: pl.DataFrame, values: Sequence[Any] | None) -> tuple[pl.DataFrame, list[Any] | None]:
    """Some rows with only their values."""
    if values is None:
        return part, None
    return with_values(part, [values[number] for number in part.get_column(schema.MADE)])


def _ipc(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_ipc(buffer, compression="lz4")
    return buffer.getvalue()
