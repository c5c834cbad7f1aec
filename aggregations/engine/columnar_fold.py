"""One stage, one batch, whole columns: verdicts, folds and histories.

A key with anything uncommon in a batch (a route through a retry topic, a missing fan-out index, a
hole in its state, a value that a fold rejects, a total near its limit) is folded message by message by the pure
code, which is the reference; all other keys are folded by columns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.batch import positions_at_stage
from aggregations.columns.elements import plain_element
from aggregations.columns.emitting import Emitted, emit_columns
from aggregations.columns.expiring import Expiring
from aggregations.columns.fold import Folded, fold_fields, kinds_of, unfit_rows
from aggregations.columns.judge import HistoryLimits, Judged, judge
from aggregations.columns.lane_names import LaneNames, known_names
from aggregations.columns.latest import fold_latest
from aggregations.columns.made import made_inputs
from aggregations.columns.order import fold_order, positions_of
from aggregations.columns.record_text import TEXT, Form
from aggregations.columns.records import StoredStates, encoded, form_of
from aggregations.columns.sessions import NO_DUES, Groups, SessionGroups
from aggregations.columns.signature import Lane, lanes_of
from aggregations.columns.steps import numbered
from aggregations.columns.values import with_values
from aggregations.definition.aggregates import At
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Aggregate, Stage
from aggregations.definition.inputs import SiblingPolicy
from aggregations.definition.lookups import LatestRow
from aggregations.definition.operators import emit_input
from aggregations.engine.job import Exclusion
from aggregations.engine.path import Work
from aggregations.engine.python_fold import fold_elements
from aggregations.engine.row_arrivals import arrival_of
from aggregations.engine.rows import BROKEN, INPUT, REKEYED, Rows, closed_rows
from aggregations.engine.verdicts import count_verdicts, note_decided
from aggregations.errors import FlowError
from aggregations.per_message.arrivals import passed_on
from aggregations.per_message.emitting import emitted_types
from aggregations.per_message.folding import Inputs
from aggregations.per_message.rows import evaluate_elements
from aggregations.per_message.stage import KeyState, StageOutcome, fold_stage
from aggregations.run.states import state_of, writes_of
from envelope import EnvelopeError, Node, Verdict
from envelope.dedup.lineage import died_in
from persistence.protocol import Stored, Write


class _Input(NamedTuple):
    """Arrivals as input of `aggregations.columns.judge`."""

    lanes: Ints
    positions: list[Ints]
    places: list[Lane]


class _Inputs(NamedTuple):
    """Inputs of `Fields`.

    Attributes:
        columns: As columns; None if the state is needed after each message, or if their values have no common type.
        broken: Rows whose inputs cannot be computed.
        values: The inputs of each row, or the error, where they are not columns.
    """

    columns: pl.DataFrame | None
    broken: Mask
    values: Sequence[Inputs] = ()


class ColumnarFold:
    """One stage, one batch.

    Args:
        work: Context of the task.
        stage: The stage.
        rows: Its arrivals.
        codes: Number of each arrival's key.
        keys: The keys, by number.
        stored: The stored states of those keys that have one.

    Attributes:
        writes: The changed states, after `run`.
        states: These states, if the stage publishes them; else those folded message by message.
    """

    def __init__(
        self,
        work: Work,
        stage: Stage,
        rows: Rows,
        codes: Ints,
        keys: list[bytes],
        stored: Mapping[bytes, Stored],
    ) -> None:
        self.work = work
        self.stage = stage
        self.aggregate: Aggregate = stage.aggregate
        self.siblings: SiblingPolicy = work.job.flow.siblings
        self.rows = rows
        self.frame = rows.frame
        self.codes = codes
        self.keys = keys
        self.stored = stored
        self.states: dict[bytes, KeyState] = {}
        self.writes: list[Write] = []
        self.accepted = np.zeros(self.frame.height, np.bool_)
        self.late: dict[int, str] = {}
        self.emitted: dict[int, list[Any]] = {}
        self.types = emitted_types(stage)
        self.columns: tuple[Ints, pl.DataFrame] | None = None  # what an `Emit` made of which rows
        self._expiring: Expiring | None = None

    def run(self) -> "ColumnarFold":
        fold, progress, names = self.aggregate.fold, self.work.job.progress, known_names()
        entering = self._input()
        inputs = (
            self._inputs(fold) if isinstance(fold, Fields) else _Inputs(None, np.zeros(self.frame.height, np.bool_))
        )
        members, kinds, refused, columns = None, [TEXT], inputs.broken, inputs.columns
        if isinstance(fold, Fields) and columns is not None:
            members, kinds = list(fold.fields), kinds_of(fold, columns.schema)
            refused = refused | unfit_rows(fold, columns, self.frame.height)
        elif isinstance(self.aggregate.emit, Emit):
            self._one_by_one(np.ones(len(self.keys), np.bool_))
            return self
        if self.aggregate.sessions is None:
            form = form_of(self.stage.definition, members, kinds)
        else:
            form = form_of(self.stage.definition, None)
        values = [None if one is None else one.value for one in map(self.stored.get, self.keys)]
        expiry = self.aggregate.expiry
        before = StoredStates(values, form, names, timed=expiry is not None)
        exotic: Mask = self.frame.get_column(schema.EXOTIC).to_numpy()
        if expiry is not None:
            self._expiring = Expiring(expiry, self.frame, self.codes, before)
            exotic = exotic | self._expiring.may_expire()
            if isinstance(fold, Fields) and any(field.ordered for field in fold.fields.values()):
                by_position = fold_order(self.codes, entering.positions, entering.lanes, entering.places)
                exotic = exotic | self._expiring.disordered(by_position)
        judged = judge(
            self.codes,
            entering.lanes,
            entering.positions,
            entering.places,
            before.lanes,
            names,
            HistoryLimits.of(self.aggregate.history, self.aggregate.lanes, progress.batch, evict=progress.evict),
            pure=before.other,
            exotic=exotic | self._excluded() | self._late() | closed_rows(self.frame) | self._listed(entering),
            refused=refused,
        )
        groups = self._groups(judged, before, members, kinds)
        if isinstance(fold, Fields) and columns is not None:
            folded = groups.of_keys(self._folded(fold, kinds, columns, entering, groups))
        else:
            folded = groups.of_keys(self._called(inputs, entering, groups))
        self.accepted = judged.fold.copy()
        apart = np.zeros(len(self.keys), np.bool_)
        apart[self.codes[judged.pure]] = True
        apart |= folded.unfit
        if isinstance(fold, Fields) and columns is not None and isinstance(self.aggregate.emit, Emit):
            self._emit(fold, self.aggregate.emit, kinds, columns, entering, groups, apart)
        elif apart.any():
            self._one_by_one(apart)
        count_verdicts(self.work, self.stage.name, self.rows, judged.verdicts, ~judged.fold, ~apart[self.codes])
        dues = groups.dues
        if self._expiring is not None:
            folded, dues = self._expiring.after(folded, groups.rows)
        self._write(form, names, judged, folded, apart, dues)
        return self

    def _input(self) -> "_Input":
        signatures = self.frame.get_column(schema.SIGNATURE).to_numpy()
        rekeyed = self.frame.get_column(REKEYED).to_numpy()
        keyless = self.frame.get_column(schema.KEY).is_null().to_numpy()
        lanes, places = lanes_of(self.rows.signatures, signatures, rekeyed, keyless)
        if any(place.wide for place in places):
            wide = np.array([place.wide for place in places])[lanes]
            self.work.report.counts.keyless += Counter({self.stage.name: int(wide.sum())})
        return _Input(lanes, positions_at_stage(self.frame, self.rows.signatures), places)

    def _inputs(self, fields: Fields) -> "_Inputs":
        """Inputs of the fields."""
        names = fields.inputs()
        if self.rows.values is None:
            columns = self.frame.select(pl.col(f"{INPUT}{name}").alias(name) for name in names)
            broken: Mask = self.frame.get_column(BROKEN).to_numpy() != 0
            if not self.aggregate.makes:
                return _Inputs(columns, broken)
            return _Inputs(None, broken, columns.to_dicts() if names else [{}] * self.frame.height)
        elements = list(self.work.elements(self.frame, self.rows.signatures, self.rows.values))
        found = evaluate_elements(elements, names, self.stage.arriving)
        made = made_inputs(found, names) if self.aggregate.emit is None else None
        with suppress(FlowError):  # a type that a field does not accept: each row is rejected with its reason
            if made is not None:
                fields.check(made[0].schema)
                return _Inputs(*made)
        return _Inputs(None, np.array([isinstance(one, EnvelopeError) for one in found], np.bool_), found)

    def _groups(
        self, judged: Judged, before: StoredStates, members: Sequence[str] | None, kinds: Sequence[int]
    ) -> Groups:
        """The accepted rows by the state that they are folded into."""
        rows = judged.order[judged.fold[judged.order]]
        if self._expiring is not None:
            rows = self._expiring.in_order(rows)
        if self.aggregate.sessions is None:
            return Groups(rows, self.codes[rows], before)
        times = self.frame.get_column(schema.TIME).to_numpy()[rows]
        removed = self.work.job.progress.removed.get(self.stage.name)
        return SessionGroups(self.aggregate.sessions, removed, rows, self.codes[rows], times, before, members, kinds)

    def _folded(
        self, fields: Fields, kinds: Sequence[int], inputs: pl.DataFrame, entering: "_Input", groups: Groups
    ) -> Folded:
        """New states of the fold."""
        rows = groups.rows
        taken = inputs[rows] if inputs.width else inputs
        return fold_fields(fields, kinds, taken, groups.codes, self._at(fields, entering, rows), groups.states)

    def _at(self, fields: Fields, entering: "_Input", rows: Ints) -> list[At] | None:
        """Position and lane of rows, if a field is ordered."""
        if not any(field.ordered for field in fields.fields.values()):
            return None
        names = [entering.places[lane].lane for lane in entering.lanes[rows].tolist()]
        return list(zip(positions_of(entering.positions, rows), names, strict=True))

    def _emit(
        self,
        fields: Fields,
        emit: Emit,
        kinds: Sequence[int],
        inputs: pl.DataFrame,
        entering: "_Input",
        groups: Groups,
        apart: Mask,
    ) -> None:
        """Make the columns that the stage passes on, and fold some keys one by one: keys are added to them."""
        rows, codes = groups.only(~apart[self.codes[groups.rows]])
        taken = inputs[rows] if inputs.width else inputs
        read = self.frame[rows].select(pl.col(f"{INPUT}{emit_input(name)}").alias(name) for name in emit.read)
        at = self._at(fields, entering, rows)
        made: Emitted = emit_columns(emit, fields, kinds, self.types, taken, read, codes, at, groups.states)
        apart[self.codes[rows[made.failed]]] = True
        if apart.any():
            self._one_by_one(apart)
        kept = made.passes & ~apart[self.codes[rows]]
        self.columns = rows[kept], made.columns.filter(pl.Series(kept))

    def _called(self, inputs: "_Inputs", entering: "_Input", groups: Groups) -> Folded:
        """The same by calls of the fold and of `emit`."""
        fold, rows = self.aggregate.fold, groups.rows
        frame, signatures = self.frame[rows], self.rows.signatures
        elements = self.work.elements(frame, signatures, self.rows.values)
        if isinstance(fold, LatestRow):
            return fold_latest(fold, frame, elements, signatures, groups.codes, groups.states)
        found = [inputs.values[row] for row in rows.tolist()] if inputs.values else []
        at = self._at(fold, entering, rows) if isinstance(fold, Fields) else None
        folded, passed = fold_elements(self.aggregate, elements, groups.codes, groups.states, found, at)
        self.emitted.update(zip(rows.tolist(), passed, strict=False))
        return folded

    def _write(
        self,
        form: Form,
        names: LaneNames,
        judged: Judged,
        folded: Folded,
        apart: Mask,
        dues: Mapping[int, int] = NO_DUES,
    ) -> None:
        """Encode the changed states, except those that are folded one by one; `dues` has their due times by code."""
        fit = np.flatnonzero(~apart[judged.changed])
        changed = judged.changed[fit]
        values = folded.values.of_keys(judged.changed)
        records = encoded(form, names, judged.lanes, fit, values, folded.texts)
        keys = [self.keys[code] for code in changed.tolist()]
        versions = [one.version if one else 0 for one in map(self.stored.get, keys)]
        writes = list(map(Write, keys, versions, records, map(dues.get, changed.tolist())))
        self.writes += writes
        if self.stage.snapshots:
            self.states |= {write.key: self._state(write) for write in writes}

    def _state(self, write: Write) -> KeyState:
        stage = self.work.job.progress.ref.stage(self.stage.name)
        return replace(state_of(Stored(0, 0, 0, write.value), stage, write.key), version=write.expected)

    def _one_by_one(self, apart: Mask) -> None:
        """Fold some keys by the pure code, and with them all keys that have an item of a record that fails there.

        Args:
            apart: The keys; keys are added to it.
        """
        while True:
            rows = np.flatnonzero(apart[self.codes])
            outcome = self._fold_rows(self.frame[rows])
            failed = np.zeros(len(self.keys), np.bool_)
            failed[self.codes[self._of_records(outcome.failed)]] = True
            if not (failed & ~apart).any():
                break
            apart |= failed
        self.states.update(outcome.states)
        self.writes += writes_of(outcome.states, self.stage.definition, self.aggregate.renewed)
        counts = self.work.report.counts
        counts.verdicts.setdefault(self.stage.name, Counter()).update(outcome.verdicts)
        counts.retired += outcome.retired
        self.work.collector.decided(self.stage.name, outcome.decided)
        note_decided(self.work, self.stage.name, self.rows, rows, outcome.decided)
        for row, one in zip(rows, outcome.decided, strict=True):
            self.accepted[row] = one.decision.fold or (one.arrival.transit and bool(one.emitted))
            if self.aggregate.emit is not None:
                self.emitted[int(row)] = [element.value for element in one.emitted]
            if one.decision.verdict is Verdict.REDRIVEN and one.decision.fold:
                self.late[int(row)] = passed_on(one.arrival.standing.route, one.arrival.redriven).value
            if one.failed and one.reason is not None:
                cause = Exclusion(one.reason, one.detail, hole=one.hole, raised=one.raised)
                self.work.fail(self.stage.index, one.arrival.element.own, cause)

    def _fold_rows(self, frame: pl.DataFrame) -> StageOutcome:
        """Fold rows, which are all rows of their keys, by the pure code."""
        job = self.work.job
        arrivals = [arrival_of(self.work, self.stage, self.rows, row) for row in frame.iter_rows(named=True)]
        fold, made = self.aggregate.fold, self.rows.values
        if not isinstance(fold, Fields) or made is not None or self.aggregate.makes:
            elements = list(self.work.elements(frame, self.rows.signatures, made))
            if not isinstance(fold, Fields):
                elements = list(map(plain_element, elements))  # a fold may put an element into its state
            arrivals = [replace(one, element=element) for one, element in zip(arrivals, elements, strict=True)]
            if isinstance(fold, Fields) and made is not None:
                inputs = evaluate_elements(elements, self.aggregate.inputs(), self.stage.arriving)
                arrivals = [replace(one, values=values) for one, values in zip(arrivals, inputs, strict=True)]
        found = {one.key: self.stored[one.key] for one in arrivals if one.key in self.stored}
        loaded = job.states_in(self.stage, found)
        return fold_stage(
            self.aggregate,
            loaded,
            arrivals,
            batch=job.progress.batch,
            siblings=self.siblings,
            excluded=job.excluded_at(self.stage.index, hole=True),
            evict=job.progress.evict,
            replays=job.progress.replays,
            types=self.types,
            holes=not self.stage.looks_up,
            removed=job.progress.removed.get(self.stage.name),
            waiting=job.progress.ledger.waiting(job.flow.after(self.stage)),
        )

    def onward(self) -> Rows:
        """Rows that the stage passes on."""
        frame = self.frame
        if self.late:
            before = frame.get_column(schema.LATE).to_list() if schema.LATE in frame.columns else [None] * frame.height
            routes = [self.late.get(row, route) for row, route in enumerate(before)]
            frame = frame.with_columns(pl.Series(schema.LATE, routes, dtype=pl.String))
        if self.aggregate.emit is None:
            return Rows(frame.filter(pl.Series(self.accepted)), self.rows.signatures, self.rows.values)
        if self.columns is not None:
            return self._with_columns(frame, *self.columns)
        sizes = np.array([len(self.emitted.get(row, ())) for row in range(frame.height)], np.int64)
        frame = numbered(frame[np.repeat(np.arange(frame.height), sizes)], sizes)
        values = [value for row in range(len(sizes)) for value in self.emitted.get(row, ())]
        return Rows(with_values(frame, values)[0], self.rows.signatures, values)

    def _with_columns(self, frame: pl.DataFrame, rows: Ints, columns: pl.DataFrame) -> Rows:
        """Rows that pass on the columns of an `Emit`, in the order of arrival."""
        alone = [row for row, values in self.emitted.items() if values]
        if alone:
            values = [self.emitted[row][0] for row in alone]
            columns = columns.vstack(pl.DataFrame(values, schema=columns.schema))
            rows = np.concatenate((rows, np.array(alone, np.int64)))
        order = np.argsort(rows)
        found = numbered(frame[rows[order]].drop(schema.TOMBSTONE, strict=False), np.ones(len(rows), np.int64))
        return Rows(found.with_columns(columns[order].get_columns()), self.rows.signatures)

    def _late(self) -> Mask:
        """Rows that an earlier stage folded late."""
        if schema.LATE not in self.frame.columns:
            return np.zeros(self.frame.height, np.bool_)
        return self.frame.get_column(schema.LATE).is_not_null().to_numpy()

    def _listed(self, entering: "_Input") -> Mask:
        """Rows whose event may be listed as a dead letter: by the offset of its root, or by its own coordinates.

        In a stage whose `emit` reads the state, also those that are listed at a later stage.
        """
        job, mask = self.work.job, np.zeros(self.frame.height, np.bool_)
        later = job.flow.after(self.stage) if self.aggregate.emits_state else frozenset[str]()
        listed: dict[str, list[int | str]] = {}
        for name, offset in job.progress.ledger.waiting(frozenset({self.stage.name}) | later):
            listed.setdefault(name, []).append(offset)
        if not listed:
            return mask
        for number, place in enumerate(entering.places):
            if roots := listed.get(place.group):
                mask |= (entering.lanes == number) & np.isin(entering.positions[0], np.array(roots, np.int64))
        for topic, partition in self.frame.select(schema.TOPIC, schema.PARTITION).unique().iter_rows():
            if offsets := listed.get(died_in(job.node(topic, partition, 0))):
                mine = (pl.col(schema.TOPIC) == topic) & (pl.col(schema.PARTITION) == partition)
                found = self.frame.select(mine & pl.col(schema.OFFSET).is_in(offsets)).to_series()
                mask |= found.to_numpy()
        return mask

    def _excluded(self) -> Mask:
        return self._of_records(self.work.job.excluded_at(self.stage.index, hole=True))

    def _of_records(self, nodes: Iterable[Node]) -> Mask:
        """The rows of some records."""
        mask = np.zeros(self.frame.height, np.bool_)
        topics = self.frame.get_column(schema.TOPIC)
        partition, offset = (self.frame.get_column(name).to_numpy() for name in (schema.PARTITION, schema.OFFSET))
        for node in nodes:
            mask |= (partition == node.partition) & (offset == node.offset) & (topics == node.topic).to_numpy()
        return mask
