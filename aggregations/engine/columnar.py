"""The vectorised path: whole columns from Kafka's bytes to the stages, and from one stage to the next."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from aggregations.columns import schema
from aggregations.columns.arrays import Ints
from aggregations.columns.batch import indices_of, redriven, standing
from aggregations.columns.scopes import scopes_of
from aggregations.columns.signature import Signature
from aggregations.columns.steps import Rejected, Stepped, evaluate_columns, evaluated
from aggregations.columns.times import enter_times
from aggregations.columns.values import apply_all, with_values
from aggregations.definition.element import Element
from aggregations.definition.emit import Emit
from aggregations.definition.expressions import Expression, columns_of, expression
from aggregations.definition.flow import END_OF_FLOW, Stage, Step
from aggregations.definition.inputs import merged_schema, siblings_of
from aggregations.definition.judging import Scopes
from aggregations.definition.paths import calls_fold, expressions_of, is_vectorised
from aggregations.definition.schemas import Passed, Schema
from aggregations.engine.columnar_judging import columnar_fold
from aggregations.engine.columnar_read import read_topics
from aggregations.engine.job import Exclusion, Job, shared_key
from aggregations.engine.path import Work
from aggregations.engine.rows import (
    BROKEN,
    CLOSED,
    INPUT,
    REKEYED,
    STAGE_KEY,
    Rows,
    key_bytes,
    key_codes,
    of_one_numbering,
    with_all_columns,
)
from aggregations.per_message.arrivals import marking_before, missing_at_end, stage_key, too_long
from aggregations.per_message.cause import Cause
from aggregations.per_message.dead_letters import RejectedRecord
from aggregations.per_message.ledger import outputs_before
from aggregations.per_message.publishing import Marking
from aggregations.per_message.steps import without_rejected
from envelope import Position, Reason, Route
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.protocol import Write

_SOMETIMES = (schema.AGAIN, schema.TOMBSTONE, schema.LATE, schema.MADE, schema.TIME, schema.BEFORE, schema.STAMP)
_SYSTEM = frozenset({*schema.SYSTEM, *_SOMETIMES})
_RECORD = frozenset({schema.VALUE, schema.HEADERS, schema.CHAIN})
_OWN = (schema.TOPIC, schema.PARTITION, schema.OFFSET)
_NULL_KEY = Cause(Reason.NULL_KEY, "the stage's key is null")


class ColumnarPath:
    """Works on `Rows`."""

    def read(self, work: Work, chunks: Iterable[pa.Table]) -> Rows:
        parts = read_topics(work, chunks)
        with work.timed("steps"):
            if stages := work.job.flow.stages:
                return _enter(work, stages[0], *_met(work, parts, stages[0].name, work.job.flow.after(stages[0])))
            _leave(work, *_met(work, [_missing_after(work, one) for one in parts], END_OF_FLOW))
            return parts[0]

    def fold(self, work: Work, stage: Stage, arrivals: Rows) -> tuple[list[Write], Rows | None]:
        job = work.job
        if not arrivals.frame.height:
            # A task that got nothing has not even columns.
            return [], arrivals if stage.index + 1 < len(job.flow.stages) else None
        codes, keys = key_codes(arrivals.frame)
        if stage.index == 0:
            _check_partitions(job, stage, arrivals.frame, codes)
        with work.timed("load"):
            stored = effect(CommitStep.LOAD.of(stage.name), lambda: job.stored(stage, keys))
        with work.timed("fold"):
            folded = effect(CommitStep.FOLD, lambda: columnar_fold(work, stage, arrivals, codes, keys, stored).run())
            work.outputs += job.snapshots_of(stage, folded.states, work.report.counts)
        with work.timed("steps"):
            return folded.writes, _onward(work, stage, folded.onward())


def _check_partitions(job: Job, stage: Stage, frame: pl.DataFrame, codes: Ints) -> None:
    """Check that every key of the first stage is in one partition of each topic, where that must be.

    Raises:
        SharedKeyError: One is in two partitions.
    """
    partitions = frame.get_column(schema.PARTITION).to_numpy()
    for topic in job.flow.topics:
        if not job.checks_partition(topic, rekeyed=False):
            continue
        mine, places = codes, partitions
        if job.flow.merges:
            rows = (frame.get_column(schema.TOPIC) == topic).to_numpy() & ~frame.get_column(REKEYED).to_numpy()
            mine, places = codes[rows], partitions[rows]
        usual = np.zeros(int(mine.max(initial=-1)) + 1, places.dtype)
        usual[mine] = places
        if (usual[mine] != places).any():
            raise shared_key(job, stage, topic)


def _met(work: Work, parts: Sequence[Rows], stage: str, later: Collection[str] = ()) -> tuple[Rows, Stepped | None]:
    """The rows of all sources behind the steps of their inputs, and what these steps rejected, filtered and published.

    See `aggregations.per_message.merging`, which does the same.

    Args:
        work: Context of the task.
        parts: The rows of each source.
        stage: Name of the first stage; `end` if there is none.
        later: See `_marking`.
    """
    flow = work.job.flow
    if not flow.merges:
        return parts[0], None
    met, frames = merged_schema(flow.inputs), []
    marking = _marking(work, stage, later)
    whole = Stepped(
        pl.DataFrame(), lambda frame, values: work.elements(frame, (), values), [] if isinstance(met, Passed) else None
    )
    aligned = of_one_numbering(parts)
    for one, rows in zip(flow.inputs, aligned, strict=True):
        stepped = _stepped(work, 0, one.steps, rows, one.topic.schema, marking)
        whole.rejected += stepped.rejected
        whole.outputs += stepped.outputs
        whole.filtered += stepped.filtered
        if whole.values is None:
            frames.append(with_all_columns(stepped.frame, met, flow.columns))
            continue
        values = [element.value for element in stepped.rows()] if stepped.values is None else stepped.values
        frame = with_values(stepped.frame, values)[0] if stepped.values is None else stepped.frame
        system = frame.select(name for name in frame.columns if name.startswith("_"))
        frames.append(system.with_columns(pl.col(schema.MADE) + len(whole.values)))
        whole.values += values
    return Rows(pl.concat(frames, how="diagonal"), aligned[0].signatures, whole.values), whole


def _onward(work: Work, stage: Stage, accepted: Rows) -> Rows | None:
    """Pass the accepted rows of a stage to the next stage; None after the last stage."""
    stages = work.job.flow.stages
    if stage.index + 1 < len(stages):
        return _enter(work, stages[stage.index + 1], accepted)
    _leave(work, _missing_after(work, accepted))
    return None


def _leave(work: Work, rows: Rows, earlier: Stepped | None = None) -> None:
    """Run the rows that the last stage passes on, or all that were read, through the steps after it.

    Args:
        work: Context of the task.
        rows: The rows.
        earlier: What steps of single inputs rejected, filtered and published before.
    """
    flow = work.job.flow
    stepped = _stepped(work, len(flow.stages), flow.tail, rows, flow.tail_schema, _marking(work, END_OF_FLOW))
    _add(stepped, earlier)
    _gather(work, len(flow.stages), END_OF_FLOW, rows, stepped)
    if not flow.stages:
        for one in rows.signatures:
            if one.chained:
                work.incarnations.verdict(one.topic, one.topic_id)  # notes the ids of root topics


def _add(stepped: Stepped, earlier: Stepped | None) -> None:
    """Add what steps of single inputs rejected, filtered and published before."""
    if earlier is not None:
        stepped.rejected = [*earlier.rejected, *stepped.rejected]
        stepped.outputs = [*earlier.outputs, *stepped.outputs]
        stepped.filtered += earlier.filtered


def _stepped(work: Work, index: int, steps: Sequence[Step], rows: Rows, columns: Schema, marking: Marking) -> Stepped:
    """Run the steps before a stage, without the records that failed there in another task."""
    frame, failed = rows.frame, []
    for own, cause in work.job.excluded_at(index, hole=False).items():
        mine = (pl.col(schema.PARTITION) == own.partition) & (pl.col(schema.OFFSET) == own.offset)
        if work.job.flow.merges:
            mine &= pl.col(schema.TOPIC) == own.topic
        failed.append(Rejected(frame.filter(mine), cause))
        frame = frame.filter(~mine)
    made = None if rows.values is None else list(rows.values)
    found = lambda frame, values: work.elements(frame, rows.signatures, values)  # noqa: E731
    stepped = apply_all(steps, frame, found, marking, made, columns, work.rows)
    stepped.rejected += failed
    return stepped


def _missing_after(work: Work, rows: Rows) -> Rows:
    """The rows for the steps after the last stage: redriven rows only if something of them is missing there."""
    ledger, collector, judged, frame = work.job.progress.ledger, work.collector, bool(work.job.flow.stages), rows.frame
    backs = [one.back for one in rows.signatures]
    bound = [back is not None and (not judged or back.redrive.stage == END_OF_FLOW) for back in backs]
    listed = ledger.listed.get(END_OF_FLOW, {})
    if not any(bound) and not listed:
        return rows
    meant = _perhaps_listed(frame, bound, [listed])
    late: dict[int, str] = {}
    keep = np.ones(frame.height, np.bool_)
    for number in meant.arg_true():
        row = frame.row(number, named=True)
        if row.get(schema.LATE) or (backs[row[schema.SIGNATURE]] is not None and not bound[row[schema.SIGNATURE]]):
            continue
        policy = siblings_of(collector.siblings, row[schema.TOPIC])
        at = standing(row, rows.signatures, rekeyed=False, siblings=policy)
        route, entries = missing_at_end(ledger, work.node(row), at, redriven(row, rows.signatures), indices_of(row))
        collector.tail(entries, copies=route is Route.COPY)
        if route is Route.COPY:
            keep[number] = False
        elif route is not Route.PLAIN:
            late[number] = route.value
    if late:
        frame = frame.with_columns(pl.Series(schema.LATE, map(late.get, range(frame.height)), pl.String))
    return Rows(frame.filter(pl.Series(keep)), rows.signatures, rows.values)


def _perhaps_listed(
    frame: pl.DataFrame, bound: Sequence[bool], listed: Iterable[Mapping[str, Collection[Position]]]
) -> pl.Series:
    """The rows to look up in the ledger: redriven ones, and those whose root or record has a listed offset.

    Args:
        frame: The rows.
        bound: Whether the rows of each signature are looked up in any case.
        listed: Listed positions by group, of some stages.
    """
    roots = sorted({int(at[0]) for groups in listed for positions in groups.values() for at in positions})
    meant = pl.Series(np.array(bound, np.bool_)[frame.get_column(schema.SIGNATURE).to_numpy()])
    offsets = pl.Series(roots, dtype=pl.Int64).implode()
    return meant | frame.get_column(schema.position(0)).is_in(offsets) | frame.get_column(schema.OFFSET).is_in(offsets)


def _marking(work: Work, stage: str, later: Collection[str] = ()) -> Marking:
    """Decides what publish steps before a stage publish."""
    return marking_before(
        stage,
        ledger=work.job.progress.ledger,
        topic_ids=work.roots.topic_ids,
        siblings=work.collector.siblings,
        later=later,
        largest=work.job.progress.largest,
    )


def _enter(work: Work, stage: Stage, before: Rows, earlier: Stepped | None = None) -> Rows:
    """Apply steps, key and inputs of a stage; keep only the columns that it and the following stages need.

    Args:
        work: Context of the task.
        stage: The stage.
        before: The rows.
        earlier: What steps of single inputs rejected, filtered and published before.
    """
    job = work.job
    aggregate = stage.aggregate
    marking = _marking(work, stage.name, job.flow.after(stage))
    stepped = _stepped(work, stage.index, stage.before, before, stage.schema, marking)
    _add(stepped, earlier)
    key = user_key = _keys(stepped, aggregate.key, job.progress.longest_keys.get(stage.name))
    closed: list[pl.Series] = []
    if aggregate.times is not None:
        user_key, key, shut = enter_times(stepped, key, aggregate.times, job.progress.closed.get(stage.name))
        closed = [shut.alias(CLOSED)]
    frame = stepped.frame
    # Inputs of values that a function made are evaluated message by message, when they are folded.
    wanted = aggregate.inputs() if stepped.values is None else {}
    # A row whose inputs cannot be computed still arrives: it leaves a hole in the state of its key.
    # A filter reads null where an element has no columns.
    read = frame if aggregate.rule is None else frame.drop(schema.TOMBSTONE, strict=False)
    inputs, broken = evaluate_columns(read, {f"{INPUT}{name}": one for name, one in wanted.items()})
    _gather(work, stage.index, stage.name, before, stepped)
    _fill_outputs(work, outputs_before(stage.name), Rows(frame, before.signatures))
    if stage.index == 0:
        _strike_left(work, stage.name, before, [frame, *(one.frame for one in stepped.rejected)])
    own_key = frame.get_column(schema.KEY)
    rekeyed = pl.lit(value=True) if not aggregate.co_partitioned else user_key.ne_missing(own_key)
    system = [name for name in frame.columns if name in _SYSTEM or schema.is_position(name)]
    system += schema.item_columns(frame.columns)
    frame = frame.select([*system, *_further(job, stage, frame)]).with_columns(
        key.alias(STAGE_KEY), pl.Series(BROKEN, broken), *inputs.get_columns(), rekeyed.alias(REKEYED), *closed
    )
    return Rows(frame, before.signatures, stepped.values)


def _fill_outputs(work: Work, missing: str, rows: Rows) -> None:
    """Collect the ledger entries of outputs before a stage that are no longer missing: of rows that arrive there."""
    ledger, policy = work.job.progress.ledger, work.collector.siblings
    if missing in ledger.listed:
        for row in rows.frame.iter_rows(named=True):
            at = standing(row, rows.signatures, rekeyed=False, siblings=siblings_of(policy, row[schema.TOPIC]))
            back = redriven(row, rows.signatures)
            work.collector.published(ledger.entries(missing, work.node(row), at, back, indices_of(row)))


def _strike_left(work: Work, stage: str, before: Rows, stays: Sequence[pl.DataFrame]) -> None:
    """Strike listed records of which nothing arrives at the first stage: a step dropped them, or a branch took them."""
    ledger, collector, places = work.job.progress.ledger, work.collector, (stage, outputs_before(stage))
    if ledger.listed.keys().isdisjoint(places):
        return
    left = before.frame
    for frame in stays:
        left = left.join(frame.select(_OWN), on=_OWN, how="anti")
    bound = [one.back is not None for one in before.signatures]
    groups = [ledger.listed[place] for place in places if place in ledger.listed]
    for row in left.filter(_perhaps_listed(left, bound, groups)).iter_rows(named=True):
        at = standing(
            row, before.signatures, rekeyed=False, siblings=siblings_of(collector.siblings, row[schema.TOPIC])
        )
        for place in places:
            back = redriven(row, before.signatures)
            collector.published(ledger.entries(place, work.node(row), at, back, whole=True))


def _further(job: Job, stage: Stage, frame: pl.DataFrame) -> list[str]:
    """Columns that are needed from here on, apart from the system columns: all if a function may read any of them."""
    if schema.MADE in frame.columns:
        return [name for name in frame.columns if name in (schema.VALUE, schema.HEADERS)]
    later = job.flow.stages[stage.index + 1 :]
    steps = [*(step for one in later for step in (*one.before, one.aggregate)), *job.flow.tail]
    if isinstance(stage.aggregate.emit, Emit):
        # Its columns replace those of the payload.
        return [name for name in frame.columns if name in _RECORD]
    if not calls_fold(stage.aggregate) and all(map(is_vectorised, steps)) and not stage.aggregate.makes:
        needed = columns_of(one for step in steps for one in expressions_of(step))
        further = sorted(needed.intersection(frame.columns))
    else:
        further = frame.columns
    return [name for name in further if not name.startswith("_") or name in _RECORD]


def _keys(stepped: Stepped, of: Expression | Callable[[Element[Any]], Any], longest: int | None) -> pl.Series:
    """Canonical bytes of the stage's key of every row; rows without one, or with one that is too long, are rejected."""
    keys = _given_keys(stepped, of)
    if longest is None:
        return keys
    kept = stepped.reject((keys.bin.size() > longest).to_numpy().astype(np.uint8), [Cause(*too_long(longest))])
    return keys if kept.all() else keys.filter(pl.Series(kept))


def _given_keys(stepped: Stepped, of: Expression | Callable[[Element[Any]], Any]) -> pl.Series:
    """Canonical bytes of the stage's key of every row; rows without one are rejected."""
    if isinstance(of, Scopes) and stepped.values is None and (scopes := scopes_of(of, stepped.frame)) is not None:
        return scopes.alias(STAGE_KEY)
    if not isinstance(of, str | pl.Expr) or stepped.values is not None:
        keys = stepped.succeeded([stage_key(one) for one in stepped.each(of)])
        return pl.Series(STAGE_KEY, keys, dtype=pl.Binary)
    key = evaluated(stepped, {STAGE_KEY: expression(of)}).get_column(STAGE_KEY)
    kept = stepped.reject(key.is_null().to_numpy().astype(np.uint8), [_NULL_KEY])
    return key_bytes(key if kept.all() else key.filter(pl.Series(kept)))


def _indices(frame: pl.DataFrame) -> list[tuple[int, ...]]:
    """The index of every row in each flat-map."""
    items = schema.item_columns(frame.columns)
    rows = frame.select(items).iter_rows() if items else [()] * frame.height
    return [tuple(index for index in row if index is not None) for row in rows]


def _gather(work: Work, index: int, stage: str, before: Rows, stepped: Stepped) -> None:
    """Collect what the steps before a stage rejected, filtered and published."""
    policy, given = work.collector.siblings, schema.item_columns(before.frame.columns) if index else []
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
            own = work.node(row)
            late, indices = row.get(schema.LATE), indices_of(row)
            dead = RejectedRecord(own, stage, cause.reason, cause.detail, lineages[number], raised=cause.raised)
            if whole:
                work.fail(index, own, Exclusion(cause.reason, cause.detail, hole=False, raised=cause.raised))
            elif indices:
                dead.items = (indices,)
            work.collector.lost(
                dead,
                standing(row, before.signatures, rekeyed=False, siblings=siblings_of(policy, row[schema.TOPIC])),
                redriven(row, before.signatures),
                indices,
                proven=late == Route.MISSING or not (late or row.get(schema.AGAIN)),
                late=bool(late),
                whole=whole,
                fixed=sum(row[name] is not None for name in given),
            )


def _lineages(work: Work, frame: pl.DataFrame, signatures: Sequence[Signature]) -> list[str]:
    """Lineages as text, where the values of records are kept: as long as the flow calls functions."""
    kept = schema.VALUE in frame.columns or not any(one.chained for one in signatures)
    if not (kept and work.job.flow.calls_functions):
        return [""] * frame.height
    found = (one.lineage.resolved(work.roots.topic_ids) for one in work.elements(frame, signatures))
    return [str(one) for one in found]
