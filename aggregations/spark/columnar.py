"""The vectorised path: whole columns from Kafka's bytes to verdicts and folds.

A key with anything uncommon about it in a batch (a route through a retry topic, a missing fan-out index, a
hole in its state, a value that a fold refuses, a total near its limit) is folded message by message by the pure
code, which is the definition; all other keys take the columns.
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from aggregations.columns import schema
from aggregations.columns.batch import position_arrays, standing
from aggregations.columns.decode import Decoder
from aggregations.columns.fold import CODE, fold_fields, unfit_rows
from aggregations.columns.judge import VERDICTS, Judged, judge
from aggregations.columns.order import positions_of
from aggregations.columns.signature import Place, Signature
from aggregations.columns.steps import CANNOT, Stepped, apply_columns, evaluate_columns, evaluated
from aggregations.columns.windows import fold_windows
from aggregations.element import Element
from aggregations.expressions import columns_of, expression
from aggregations.fields import Fields
from aggregations.flow import END_OF_FLOW, Aggregate, Divert, Filter, Map, Stage
from aggregations.spark.job import Job, dumps, loads, store_of
from aggregations.spark.parcels import route_of
from aggregations.spark.path import Work
from aggregations.spark.roots import DETAIL
from aggregations.stage import Arrival, Decided, KeyState, fold_stage
from aggregations.states import read_states, writes_of
from envelope import EnvelopeError, Node, Reason, Siblings, Standing, Verdict, Windows
from persistence.faults import effect
from persistence.protocol import Write
from persistence.steps import Step

STAGE_KEY = "_stage_key"
REKEYED = "_rekeyed"
BROKEN = "_broken"
_INPUT = "_in:"
_FIRST_SEEN = tuple(VERDICTS.index(one) for one in (Verdict.ACCEPTED, Verdict.LATE, Verdict.NEW_LANE))
_CHUNK_ROWS = 100_000
_NO_END = np.iinfo(np.int64).max


@dataclass(slots=True)
class Rows:
    """Arrivals at a stage as columns.

    Attributes:
        frame: `_stage_key` Binary, `_rekeyed` Boolean, `_broken` Boolean (its inputs cannot be computed), `_in:NAME` for every input of the stage's fields, the system
            columns of `aggregations.columns.schema`, positions `_p0`, `_p1`, … and the payload columns that
            stages further down read.
        signatures: By the codes of `_signature`.
    """

    frame: pl.DataFrame
    signatures: list[Signature]


class ColumnarPath:
    """Works on `Rows`."""

    def read(self, work: Work, batches: Iterable[pa.RecordBatch]) -> Rows:
        job = work.job
        assert job.flow.topic is not None
        decoder = Decoder(job.flow.topic, job.topic_ids, job.flow.columns)
        parts: list[Rows] = []
        for table in _chunks(batches):
            with work.timed("decode"):
                batch = decoder.decode(table)
                _count(work, table)
                for row, reason, detail in batch.rejected:
                    work.bury(_node(job, table, row), "", reason, detail)
                parts.append(_existing(work, Rows(batch.frame, list(batch.signatures))))
        whole = _together(parts, _empty(decoder))
        with work.timed("steps"):
            return _enter(work, job.flow.stages[0], whole)

    def pack(self, work: Work, arrivals: Rows, routes: int) -> list[bytes]:
        frame = arrivals.frame
        if not frame.height:
            return [b""] * routes
        codes, keys = _key_codes(frame)
        route = np.fromiter((route_of(key, routes) for key in keys), np.int64, len(keys))[codes]
        payloads = []
        for number in range(routes):
            part = frame.filter(pl.Series(route == number))
            payloads.append(dumps((_ipc(part), arrivals.signatures)) if part.height else b"")
        return payloads

    def unpack(self, work: Work, payloads: Sequence[bytes]) -> Rows:
        parts = []
        for payload in payloads:
            data, signatures = loads(payload)
            parts.append(Rows(pl.read_ipc(io.BytesIO(data)), signatures))
        return _together(parts, None)

    def fold(self, work: Work, stage: Stage, arrivals: Rows) -> tuple[list[Write], Rows | None]:
        job = work.job
        if not arrivals.frame.height:
            return [], _onward(work, stage, arrivals)
        codes, keys = _key_codes(arrivals.frame)
        with work.timed("load"):
            found: dict[bytes, KeyState] = effect(
                Step.LOAD.of(stage.name),
                lambda: read_states(
                    store_of(job.urls[stage.name]), job.ref.stage(stage.name), keys, job.definition(stage)
                ),
            )
        with work.timed("fold"):
            folded = effect(Step.FOLD, lambda: _Fold(work, stage, arrivals, codes, keys, found).run())
            work.outputs += job.snapshots_of(stage, folded.states)
            writes = writes_of(folded.states, stage.aggregate.definition)
        with work.timed("steps"):
            accepted = Rows(arrivals.frame.filter(pl.Series(folded.accepted)), arrivals.signatures)
            return writes, _onward(work, stage, accepted)


class _Door(NamedTuple):
    """Arrivals as `aggregations.columns.judge` takes them."""

    lanes: npt.NDArray[np.int64]
    positions: list[npt.NDArray[np.int64]]
    places: list[Place]


class _Fold:
    """One stage, one batch."""

    def __init__(
        self,
        work: Work,
        stage: Stage,
        rows: Rows,
        codes: npt.NDArray[np.int64],
        keys: list[bytes],
        found: Mapping[bytes, KeyState],
    ) -> None:
        assert work.job.flow.topic is not None
        self.work = work
        self.stage = stage
        self.aggregate: Aggregate = stage.aggregate
        self.siblings: Siblings = work.job.flow.topic.siblings
        self.later = work.job.flow.behind(stage)
        self.rows = rows
        self.frame = rows.frame
        self.codes = codes
        self.keys = keys
        self.found = found
        self.states: dict[bytes, KeyState] = {}
        self.accepted = np.zeros(self.frame.height, np.bool_)

    def run(self) -> "_Fold":
        fields = self.aggregate.fold
        assert isinstance(fields, Fields)
        inputs = self.frame.select(pl.col(f"{_INPUT}{name}").alias(name) for name in fields.inputs())
        door = self._door()
        blank = Windows()
        windows = [state.windows if (state := self.found.get(key)) else blank for key in self.keys]
        exotic: npt.NDArray[np.bool_] = self.frame.get_column(schema.EXOTIC).to_numpy()
        judged = judge(self.codes, door.lanes, door.positions, door.places, windows, exotic | self._excluded())
        uncommon = judged.pure | self._keys_with(self._refused(fields, inputs) & judged.fold)
        new, unfit = self._folded(fields, inputs, door, judged, judged.fold & ~uncommon)
        if unfit:
            uncommon |= np.isin(self.codes, unfit)
        self.accepted = judged.fold & ~uncommon
        self._hold(door, judged, windows, new)
        self._count(judged.verdicts, ~uncommon)
        if uncommon.any():
            self._one_by_one(np.flatnonzero(uncommon))
        return self

    def _door(self) -> "_Door":
        signatures = self.frame.get_column(schema.SIGNATURE).to_numpy().astype(np.int64)
        rekeyed = self.frame.get_column(REKEYED).to_numpy()
        places = [place for one in self.rows.signatures for place in (one.kept, one.rekeyed)]
        return _Door(signatures * 2 + rekeyed, position_arrays(self.frame), places)

    def _refused(self, fields: Fields, inputs: pl.DataFrame) -> npt.NDArray[np.bool_]:
        """Rows that the fold will refuse."""
        broken: npt.NDArray[np.bool_] = self.frame.get_column(BROKEN).to_numpy()
        return broken | unfit_rows(fields, inputs, self.frame.height)

    def _keys_with(self, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """All rows of the keys that have one of these rows."""
        if not rows.any():
            return rows
        keys = np.zeros(len(self.keys), np.bool_)
        keys[self.codes[rows]] = True
        return keys[self.codes]

    def _folded(
        self, fields: Fields, inputs: pl.DataFrame, door: "_Door", judged: Judged, fold: npt.NDArray[np.bool_]
    ) -> tuple[dict[int, Any], list[int]]:
        """New states of the fold by key number, and keys with a total near its limit."""
        rows = judged.order[fold[judged.order]]
        at = None
        if any(field.ordered for field in fields.fields.values()):
            names = [door.places[lane].lane for lane in door.lanes[rows].tolist()]
            at = list(zip(positions_of(door.positions, rows), names, strict=True))
        taken = inputs[rows] if inputs.width else pl.DataFrame(height=len(rows))
        states = {code: state.fold for code, key in enumerate(self.keys) if (state := self.found.get(key)) is not None}
        return fold_fields(fields, taken.with_columns(pl.Series(CODE, self.codes[rows])), at, states)

    def _hold(self, door: "_Door", judged: Judged, windows: Sequence[Windows], new: Mapping[int, Any]) -> None:
        """Put new folds and windows together."""
        held, retired = fold_windows(
            judged,
            self.codes,
            door.lanes,
            door.positions,
            door.places,
            windows,
            fold=self.accepted,
            size=self.aggregate.window,
            most_lanes=self.aggregate.lanes,
            batch=self.work.job.batch,
        )
        self.work.report.counts.retired += retired
        for code, now in held.items():
            key = self.keys[code]
            before = self.found.get(key)
            self.states[key] = KeyState(new[code], now, before.version if before else 0)

    def _count(self, verdicts: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_]) -> None:
        """Count verdicts; first deliveries of a topic created again have a name of their own."""
        signature = self.frame.get_column(schema.SIGNATURE).to_numpy()
        incarnation = np.array([_incarnation(self.work, one) for one in self.rows.signatures], np.int64)[signature]
        named = np.where((incarnation >= 0) & np.isin(verdicts, _FIRST_SEEN), incarnation, verdicts)
        counts = np.bincount(named[mask], minlength=len(VERDICTS))
        mine = self.work.report.counts.verdicts.setdefault(self.stage.name, Counter())
        mine.update({VERDICTS[i].value: int(count) for i, count in enumerate(counts) if count})

    def _one_by_one(self, rows: npt.NDArray[np.int64]) -> None:
        """Fold some keys by the pure code."""
        job = self.work.job
        arrivals = [self._arrival(row) for row in self.frame[rows].iter_rows(named=True)]
        loaded = {key: self.found[key] for key in {one.key for one in arrivals} if key in self.found}
        outcome = fold_stage(
            self.aggregate,
            loaded,
            arrivals,
            batch=job.batch,
            siblings=self.siblings,
            excluded=job.excluded_at(self.stage),
        )
        self.states.update(outcome.states)
        counts = self.work.report.counts
        counts.verdicts.setdefault(self.stage.name, Counter()).update(outcome.verdicts)
        counts.retired += outcome.retired
        for row, one in zip(rows, outcome.decided, strict=True):
            self.accepted[row] = one.decision.fold or one.arrival.transit
            if one.reason is not None:
                self._fail(one)

    def _arrival(self, row: Mapping[str, Any]) -> Arrival:
        signature = self.rows.signatures[row[schema.SIGNATURE]]
        own = self.work.job.node(row[schema.TOPIC], row[schema.PARTITION], row[schema.OFFSET])
        verdict = _incarnation(self.work, signature)
        names = self.aggregate.fold.inputs() if isinstance(self.aggregate.fold, Fields) else ()
        return Arrival(
            Element(None, row[schema.KEY], own, event_id=row[schema.EVENT_ID] or ""),
            row[STAGE_KEY],
            self._standing(row),
            VERDICTS[verdict] if verdict >= 0 else None,
            EnvelopeError(Reason.TRANSFORM_FAILED, CANNOT)
            if row[BROKEN]
            else {name: row[f"{_INPUT}{name}"] for name in names},
            signature.stage in self.later,
        )

    def _standing(self, row: Mapping[str, Any]) -> Standing:
        return standing(row, self.rows.signatures, rekeyed=row[REKEYED], siblings=self.siblings, stage=self.stage.name)

    def _fail(self, one: Decided) -> None:
        assert one.reason is not None
        own = one.arrival.element.own
        self.work.bury(own, self.stage.name, one.reason, one.detail, hole=one.hole)
        if one.hole:
            place = (self.stage.index, own.topic, own.partition, own.offset)
            self.work.report.failed[place] = (one.reason, one.detail)

    def _excluded(self) -> npt.NDArray[np.bool_]:
        nodes = self.work.job.excluded_at(self.stage)
        mask = np.zeros(self.frame.height, np.bool_)
        partition = self.frame.get_column(schema.PARTITION).to_numpy()
        offset = self.frame.get_column(schema.OFFSET).to_numpy()
        for node in nodes:
            mask |= (partition == node.partition) & (offset == node.offset)
        return mask


def _existing(work: Work, rows: Rows) -> Rows:
    """Leave out the rows whose root is beyond the end of its topic."""
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
    stepped = Stepped(rows.frame)
    stepped.reject(beyond, Reason.BAD_COORDINATES, DETAIL)
    _gather(work, "", stepped)
    return Rows(stepped.frame, rows.signatures)


def _onward(work: Work, stage: Stage, accepted: Rows) -> Rows | None:
    """Bring what a stage accepted to the next one; None behind the last."""
    stages = work.job.flow.stages
    if stage.index + 1 < len(stages):
        return _enter(work, stages[stage.index + 1], accepted)
    stepped = apply_columns(work.job.flow.tail, accepted.frame)
    _gather(work, END_OF_FLOW, stepped)
    return None


def _enter(work: Work, stage: Stage, before: Rows) -> Rows:
    """Steps, key and inputs of a stage; only the columns that it and the stages behind it need go on."""
    job = work.job
    aggregate = stage.aggregate
    assert isinstance(aggregate.key, str | pl.Expr)
    assert isinstance(aggregate.fold, Fields)
    stepped = apply_columns(stage.before, before.frame)
    key = evaluated(stepped, {STAGE_KEY: expression(aggregate.key)}).get_column(STAGE_KEY)
    null = key.is_null().to_numpy()
    if null.any():
        stepped.reject(null, Reason.NULL_KEY, "the stage's key is null")
        key = key.filter(~pl.Series(null))
    key = _key_bytes(key)
    frame = stepped.frame
    # A row whose inputs cannot be computed still arrives: it leaves a hole under its key.
    inputs, broken = evaluate_columns(frame, {f"{_INPUT}{name}": one for name, one in aggregate.fold.inputs().items()})
    _gather(work, stage.name, stepped)
    rekeyed = pl.lit(value=True) if not aggregate.co_partitioned else pl.col(STAGE_KEY).ne_missing(pl.col(schema.KEY))
    system = [name for name in frame.columns if name in schema.SYSTEM or _is_position(name)]
    further = sorted(_needed_behind(job, stage) & set(frame.columns))
    frame = frame.select([*system, *further]).with_columns(
        key.alias(STAGE_KEY), pl.Series(BROKEN, broken), *inputs.get_columns()
    )
    frame = frame.with_columns(rekeyed.alias(REKEYED))
    return Rows(frame, before.signatures)


def _is_position(name: str) -> bool:
    return name.startswith("_p") and name[2:].isdecimal()


def _needed_behind(job: Job, stage: Stage) -> frozenset[str]:
    """Payload columns that the stages behind this one read."""
    wanted: list[pl.Expr] = []
    for later in job.flow.stages[stage.index + 1 :]:
        for step in later.before:
            match step:
                case Filter(argument) | Divert(argument):
                    wanted += [expression(argument)] if isinstance(argument, str | pl.Expr) else []
                case Map(columns, _):
                    wanted += [expression(one) for one in columns.values()]
        aggregate = later.aggregate
        assert isinstance(aggregate.key, str | pl.Expr)
        assert isinstance(aggregate.fold, Fields)
        wanted += [expression(aggregate.key), *aggregate.fold.inputs().values()]
    return columns_of(wanted)


def _key_bytes(key: pl.Series) -> pl.Series:
    """Canonical bytes of keys; see `aggregations.expressions.key_bytes`."""
    if key.dtype == pl.Binary:
        return key
    return key.cast(pl.String).cast(pl.Binary)


def _key_codes(frame: pl.DataFrame) -> tuple[npt.NDArray[np.int64], list[bytes]]:
    """Number of every row's key, and the keys by number."""
    keys = frame.select(STAGE_KEY).unique(maintain_order=True).with_row_index(CODE)
    codes = frame.select(STAGE_KEY).join(keys, on=STAGE_KEY, how="left", maintain_order="left").get_column(CODE)
    return codes.to_numpy().astype(np.int64), keys.get_column(STAGE_KEY).to_list()


def _gather(work: Work, stage: str, stepped: Stepped) -> None:
    work.report.counts.filtered += stepped.filtered
    for frame, reason, detail in stepped.rejected:
        for topic, partition, offset in frame.select(schema.TOPIC, schema.PARTITION, schema.OFFSET).iter_rows():
            work.bury(work.job.node(topic, partition, offset), stage, reason, detail)


def _incarnation(work: Work, signature: Signature) -> int:
    verdict = work.incarnations.verdict(signature.topic, signature.topic_id)
    return -1 if verdict is None else VERDICTS.index(verdict)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
    """Spark's small batches in larger pieces: fewer calls, and still read while the JVM fetches."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= _CHUNK_ROWS:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if rows:
        yield pa.Table.from_batches(held)


def _count(work: Work, table: pa.Table) -> None:
    frame = pl.from_arrow(table.select(["topic", "partition", "offset"]))
    assert isinstance(frame, pl.DataFrame)
    work.report.counts.records += frame.height
    ends = frame.group_by("topic", "partition").agg(pl.col("offset").max())
    for topic, partition, offset in ends.iter_rows():
        place = (topic, partition)
        work.report.ends[place] = max(work.report.ends.get(place, 0), offset + 1)


def _node(job: Job, table: pa.Table, row: int) -> Node:
    return job.node(*(table.column(name)[row].as_py() for name in ("topic", "partition", "offset")))


def _together(parts: Sequence[Rows], blank: pl.DataFrame | None) -> Rows:
    """Concatenate, with one numbering of the signatures."""
    numbers: dict[Signature, int] = {}
    frames = []
    for part in parts:
        if not part.frame.height:
            continue
        renumbered = np.array([numbers.setdefault(one, len(numbers)) for one in part.signatures], np.uint32)
        codes = part.frame.get_column(schema.SIGNATURE).to_numpy()
        frames.append(part.frame.with_columns(pl.Series(schema.SIGNATURE, renumbered[codes])))
    if not frames:
        empty = blank if blank is not None else parts[0].frame if parts else pl.DataFrame()
        return Rows(empty, [])
    return Rows(pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0], list(numbers))


def _empty(decoder: Decoder) -> pl.DataFrame:
    return pl.DataFrame(schema={**decoder.schema, **schema.SYSTEM, schema.position(0): pl.Int64})


def _ipc(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_ipc(buffer, compression="lz4")
    return buffer.getvalue()
