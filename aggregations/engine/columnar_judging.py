"""A stage that is a filter, one batch, whole columns.

Positions are judged by columns, as in every stage. What is new is judged by the filter, for each state in the order in
which it was read. A key with anything uncommon in a batch is left to the pure code.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.batch import indices_of, redriven, standing
from aggregations.columns.fold import Folded
from aggregations.columns.judge import VERDICTS, HistoryLimits, Judged, judge
from aggregations.columns.judging import rulings_of, stamped, times_of
from aggregations.columns.lane_names import known_names
from aggregations.columns.order import sorted_rows
from aggregations.columns.records import StoredStates, Texts, form_of
from aggregations.columns.rulings import UNIDENTIFIED, Rulings, begins_of
from aggregations.columns.subjects import subjects_of
from aggregations.definition.flow import Stage
from aggregations.definition.inputs import siblings_of
from aggregations.definition.judging import Judging
from aggregations.engine.columnar_fold import ColumnarFold
from aggregations.engine.path import Work
from aggregations.engine.row_arrivals import arrival_of
from aggregations.engine.rows import INPUT, Rows
from aggregations.engine.verdicts import count_verdicts, note_decided
from aggregations.per_message.arrivals import passed_on
from aggregations.per_message.cause import Cause
from aggregations.per_message.dead_letters import RejectedRecord
from aggregations.per_message.judging import judge_stage
from aggregations.per_message.stage import StageOutcome
from aggregations.run.states import writes_of
from envelope import Route, Verdict
from envelope.filters.arrival import resting, tracking
from envelope.filters.turns import in_turns
from persistence.protocol import Stored

_STATE, _PARTITION, _TIME = "state", "partition", "time"
_ACCEPTED: Final = VERDICTS.index(Verdict.ACCEPTED)
_LATE: Final = VERDICTS.index(Verdict.LATE)
_DUPLICATE_IN_BATCH: Final = VERDICTS.index(Verdict.DUPLICATE_IN_BATCH)


def columnar_fold(
    work: Work, stage: Stage, rows: Rows, codes: Ints, keys: list[bytes], stored: Mapping[bytes, Stored]
) -> ColumnarFold:
    """The object that folds a batch of a stage, or judges it if the stage is a filter."""
    kind = ColumnarFold if stage.aggregate.rule is None else ColumnarJudging
    return kind(work, stage, rows, codes, keys, stored)


class ColumnarJudging(ColumnarFold):
    """One stage that is a filter, one batch."""

    def run(self) -> "ColumnarJudging":
        progress, names = self.work.job.progress, known_names()
        entering = self._input()
        form = form_of(self.stage.definition, None)
        before = StoredStates(
            [None if one is None else one.value for one in map(self.stored.get, self.keys)], form, names
        )
        exotic: Mask = self.frame.get_column(schema.EXOTIC).to_numpy()
        limits = HistoryLimits.of(self.aggregate.history, self.aggregate.lanes, progress.batch, evict=progress.evict)
        none = np.zeros(self.frame.height, np.bool_)
        inputs = self._inputs_of()
        reading = self._in_reading_order(inputs)
        turn = np.empty_like(reading)
        turn[reading] = np.arange(len(reading))

        def judged_of(rows: Ints, uncommon: Mask) -> Judged:
            return judge(
                self.codes[rows],
                entering.lanes[rows],
                [component[rows] for component in entering.positions],
                entering.places,
                before.lanes,
                names,
                limits,
                pure=before.other,
                exotic=uncommon[rows],
                refused=none[rows],
                ties=turn[rows],
            )

        every, uncommon = np.arange(self.frame.height), exotic | self._late() | self._listed(entering)
        judged = judged_of(every, uncommon)
        if (again := self._judged_before(judged)).any():
            judged = judged_of(every, uncommon | again)
        rows, unjudged = self._parted(reading[judged.fold[reading]])
        rulings = rulings_of(
            self._rule.rule,
            inputs[rows] if inputs.width else inputs,
            lambda some: self._subjects(self.frame[rows[some]]),
            self.codes[rows],
            before,
            missing=self._missing,
        )
        self._keep(np.setdiff1d(self.codes[unjudged], self.codes[rows]), before, rulings)
        verdicts = judged.verdicts.copy()
        verdicts[unjudged], self.accepted[unjudged] = UNIDENTIFIED, True
        # What the filter accepts has the verdict on its position.
        told = rulings.verdicts != _ACCEPTED
        verdicts[rows[told]] = rulings.verdicts[told]
        self.accepted[rows] = rulings.forward
        apart = np.zeros(len(self.keys), np.bool_)
        apart[self.codes[judged.pure]] = True
        if rulings.rejected:
            dead = rows[list(rulings.rejected)]
            # A copy of a rejected record may be in the batch: the pure code judges it.
            apart[np.intersect1d(self.codes[dead], self.codes[verdicts == _DUPLICATE_IN_BATCH])] = True
            kept = judged.fold.copy()
            kept[dead] = False
            judged = judged_of(np.flatnonzero(kept), none)
            self._reject(
                {int(rows[i]): cause for i, cause in rulings.rejected.items() if not apart[self.codes[rows[i]]]}
            )
        self.work.report.counts.warnings.update(rulings.warnings)
        if apart.any():
            self._one_by_one(apart)
        count_verdicts(self.work, self.stage.name, self.rows, verdicts, ~self.accepted, ~apart[self.codes])
        self._write(
            form, names, judged, Folded(rulings.values, rulings.texts, np.zeros(len(self.keys), np.bool_)), apart
        )
        return self

    @property
    def _rule(self) -> Judging:
        assert isinstance(self.aggregate.fold, Judging)
        return self.aggregate.fold

    @property
    def _missing(self) -> int:
        """Number of listed dead letters that may still come to the filter."""
        job = self.work.job
        return job.progress.ledger.count(job.flow.up_to(self.stage))

    def _parted(self, rows: Ints) -> tuple[Ints, Ints]:
        """The rows that the filter judges, and those of topics that it does not."""
        topics = self.frame.get_column(schema.TOPIC).is_in(self._rule.unjudged).to_numpy()[rows]
        return rows[~topics], rows[topics]

    def _keep(self, codes: Ints, before: StoredStates, rulings: Rulings) -> None:
        """Add the states whose rows the filter has not judged, as they were."""
        if len(codes):
            texts, rule, missing = Texts(rulings.values, rulings.texts), self._rule.rule, self._missing > 0
            for code in codes.tolist():
                state = rule.load(msgspec.json.decode(before.text(0, code))) if before.exists[code] else rule.zero()
                texts.put(0, code, rule.dump(resting(rule, tracking(rule, state, on=missing))))
            rulings.texts = texts.joined()

    def _judged_before(self, judged: Judged) -> Mask:
        """Rows that an attempt that crashed may have rejected: without a chain, and below what their states hold."""
        found: Mask = judged.fold & (judged.verdicts == _LATE) & ~self._republished()
        return found

    def _in_reading_order(self, inputs: pl.DataFrame) -> Ints:
        """The rows by state, those of a state in the order in which they are judged."""
        partition, offset = (self.frame.get_column(name).to_numpy() for name in (schema.PARTITION, schema.OFFSET))
        order = sorted_rows([self.codes, partition, offset])
        if not self._rule.spans:
            return order
        times = times_of(self._rule.rule, inputs if inputs.width else self.frame.select(schema.TIMESTAMP))
        if times is None:
            subjects, codes = self._subjects(self.frame[order]), self.codes[order]
            states = np.split(np.arange(len(order)), begins_of(codes)[1:])
            turns = [mine[in_turns([subjects[row] for row in mine.tolist()], self._rule.time)] for mine in states]
            return order[np.concatenate(turns)]
        # The reference is `envelope.filters.turns.in_turns`.
        frame = pl.DataFrame({_STATE: self.codes[order], _PARTITION: partition[order], _TIME: times[order]})
        reached = frame.select(pl.col(_TIME).cum_max().over(_STATE, _PARTITION)).to_series().to_numpy()
        return order[sorted_rows([self.codes[order], reached, partition[order], offset[order]])]

    def _inputs_of(self) -> pl.DataFrame:
        """The columns that the filter reads, if they are known: see `rulings_of`."""
        if not self._rule.is_known:
            return pl.DataFrame()
        found = [pl.col(schema.TOPIC, schema.PARTITION, schema.OFFSET, schema.KEY, schema.TIMESTAMP)]
        found.append(pl.col(schema.EVENT_ID).replace("", None).alias(stamped("event_id")))
        if self.rows.values is None:
            found += [pl.col(f"{INPUT}{name}").alias(name) for name in self._rule.inputs()]
        if schema.STAMP in self.frame.columns:
            found.append(pl.col(schema.STAMP).struct.field("sequence").alias(stamped("sequence")))
            own = pl.Series(~self._republished())
            found.append(pl.when(own).then(schema.STAMP).alias(schema.STAMP))
        return self.frame.select(found)

    def _republished(self) -> Mask:
        """Rows that were republished: their stamps and positions are those of the root, which is in another partition."""
        republished = np.array([one.republished for one in self.rows.signatures], np.bool_)
        found: Mask = republished[self.frame.get_column(schema.SIGNATURE).to_numpy()]
        return found

    def _subjects(self, frame: pl.DataFrame) -> Sequence[Any]:
        """Rows as the filter judges them."""
        if self.rows.values is None and self._rule.is_known:
            return subjects_of(frame, self.rows.signatures)
        return list(self.work.elements(frame, self.rows.signatures, self.rows.values))

    def _one_by_one(self, apart: Mask) -> None:
        """Judge some keys by the pure code."""
        rows = np.flatnonzero(apart[self.codes])
        outcome = self._fold_rows(self.frame[rows])
        self.states.update(outcome.states)
        self.writes += writes_of(outcome.states, self.stage.definition)
        counts = self.work.report.counts
        counts.verdicts.setdefault(self.stage.name, Counter()).update(outcome.verdicts)
        counts.retired += outcome.retired
        counts.warnings.update(outcome.warnings)
        self.work.collector.decided(self.stage.name, outcome.decided)
        note_decided(self.work, self.stage.name, self.rows, rows, outcome.decided, filters=True)
        self._reject({int(rows[i]): cause for i, cause in outcome.rejected.items()})
        for row, one in zip(rows.tolist(), outcome.decided, strict=True):
            self.accepted[row] = bool(one.emitted)
            if one.emitted and one.decision.fold and one.emitted[0].route is not one.arrival.element.route:
                self.late[row] = passed_on(one.arrival.standing.route, one.arrival.redriven).value

    def _fold_rows(self, frame: pl.DataFrame) -> StageOutcome:
        job = self.work.job
        arrivals = [arrival_of(self.work, self.stage, self.rows, row) for row in frame.iter_rows(named=True)]
        found = {one.key: self.stored[one.key] for one in arrivals if one.key in self.stored}
        return judge_stage(
            self.aggregate,
            job.states_in(self.stage, found),
            arrivals,
            batch=job.progress.batch,
            siblings=self.siblings,
            evict=job.progress.evict,
            replays=job.progress.replays,
            subjects=self._subjects(frame),
            missing=self._missing,
        )

    def _reject(self, rejected: Mapping[int, Cause]) -> None:
        """Collect the rows that the filter rejects."""
        signatures, collector = self.rows.signatures, self.work.collector
        for number, cause in sorted(rejected.items()):
            row = self.frame.row(number, named=True)
            own = self.work.node(row)
            late = row.get(schema.LATE)
            collector.lost(
                RejectedRecord(own, self.stage.name, cause.reason, cause.detail, raised=cause.raised),
                standing(row, signatures, rekeyed=False, siblings=siblings_of(self.siblings, own.topic)),
                redriven(row, signatures),
                indices_of(row),
                proven=late == Route.MISSING or not (late or row.get(schema.AGAIN)),
                late=bool(late),
                arrived=True,
                fixed=self.stage.fixed(indices_of(row)),
            )

    def onward(self) -> Rows:
        passed = super().onward()
        later = self.work.job.flow.stages[self.stage.index + 1 :]
        if any(isinstance(one.aggregate.fold, Judging) and one.aggregate.fold.reads_stamps for one in later):
            return passed
        return replace(passed, frame=passed.frame.drop(schema.STAMP, strict=False))
