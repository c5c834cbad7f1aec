"""Filters over the rows of a batch: their rulings, and the states of their scopes after it.

Compiled code judges the rows of the filters that it knows. What it leaves, and the rows of other filters, are judged row
by row by the filter itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import Ints
from aggregations.columns.judge import VERDICTS
from aggregations.columns.records import StoredStates, Texts
from aggregations.columns.rulings import Rulings
from aggregations.definition.judging import Judging
from aggregations.per_message.judging import ruled
from envelope import Verdict
from envelope.filters.arrival import Filter, FromEnvelope, FromValue, Scope
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.interval import IntervalFilter
from envelope.filters.producers import ProducerFilter, envelope_stamp
from envelope.filters.sequence import SequenceFilter

_CODES: Final = {verdict: number for number, verdict in enumerate(VERDICTS)}


def stamped(name: str) -> str:
    """Name of an envelope's field among the columns that a filter reads; not valid as the name of a payload's column."""
    return f"_{name}"


def rulings_of(
    rule: Filter[Any],
    inputs: pl.DataFrame,
    subjects: Callable[[Ints], Sequence[Any]],
    codes: Ints,
    stored: StoredStates,
) -> Rulings:
    """Judge rows.

    Args:
        rule: The filter.
        inputs: The columns that it reads, if they are known: those of the payload by name, those of the envelope by
            `stamped`, and key, offset and timestamp.
        subjects: Returns some of the rows as the filter judges them.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
    """
    found = _compiled(rule, inputs, codes, stored) if len(codes) else None
    if found is None:
        found = Rulings.of(len(codes), stored)
        found.left[:] = True
    rows = np.flatnonzero(found.left[codes])
    if len(rows):
        found.rejected = {row: cause for row, cause in found.rejected.items() if not found.left[codes[row]]}
        _one_by_one(rule, subjects(rows), rows, codes[rows], stored, found)
    return found


def _compiled(rule: Filter[Any], inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    """The rulings of compiled code; None if there is none for the filter and its columns."""
    if not inputs.width:
        return None
    if type(rule) is SequenceFilter:
        return _sequences(rule, inputs, codes, stored)
    if type(rule) is EventIdFilter or type(rule) is IntervalFilter:
        return _ids(rule, inputs, codes, stored)
    if type(rule) is ProducerFilter and rule.stamp is envelope_stamp:
        return _producers(rule, inputs, codes, stored)
    return None


def _sequences(rule: SequenceFilter, inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    from aggregations.columns.judging_sequences import INTEGERS, judge_sequences

    numbers = _column(rule.sequence, inputs)
    if numbers is None or numbers.dtype not in INTEGERS:
        return None
    return judge_sequences(rule, numbers, inputs.get_column(schema.KEY), codes, stored)


def _ids(
    rule: EventIdFilter | IntervalFilter, inputs: pl.DataFrame, codes: Ints, stored: StoredStates
) -> Rulings | None:
    from aggregations.columns.id_states import MOST_MS
    from aggregations.columns.id_texts import KINDS
    from aggregations.columns.judging_ids import judge_ids

    key = inputs.get_column(schema.KEY)
    identity = [key] if isinstance(rule, IntervalFilter) and rule.keyed else []
    times = inputs.get_column(schema.TIMESTAMP) if rule.time is None else _column(rule.time, inputs)
    if rule.id is not None:
        if (ids := _column(rule.id, inputs)) is None or ids.dtype not in KINDS:
            return None
        identity.append(ids)
    if times is None or times.dtype != pl.Int64 or times.null_count() or not times.is_between(-MOST_MS, MOST_MS).all():
        return None
    scoped = np.ones(len(codes), np.bool_)
    if isinstance(rule, EventIdFilter) and rule.scope_by is Scope.KEY:
        scoped = key.is_not_null().to_numpy().copy()
    time, offset = times.to_numpy().copy(), inputs.get_column(schema.OFFSET).to_numpy().copy()
    return judge_ids(rule, identity, time, offset, scoped, codes, stored)


def _producers(rule: ProducerFilter, inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    from aggregations.columns.judging_producers import judge_producers

    times = inputs.get_column(schema.TIMESTAMP) if rule.time is None else _column(rule.time, inputs)
    if schema.STAMP not in inputs.columns or times is None or times.dtype != pl.Int64 or times.null_count():
        return None
    return judge_producers(rule, inputs.get_column(schema.STAMP), times.to_numpy(), codes, stored)


def _column(extractor: Any, inputs: pl.DataFrame) -> pl.Series | None:
    """The column that an extractor reads; None if it is not known."""
    name = ""
    if isinstance(extractor, FromValue):
        name = extractor.name
    elif isinstance(extractor, FromEnvelope):
        name = stamped(extractor.name)
    return inputs.get_column(name) if name in inputs.columns else None


def _one_by_one(
    rule: Filter[Any], subjects: Sequence[Any], rows: Ints, codes: Ints, stored: StoredStates, found: Rulings
) -> None:
    """Judge the rows of some states, all of their rows, in a loop."""
    texts, rulings = Texts(found.values, found.texts), []
    current, state, scoped = -1, None, not Judging(rule).by_key
    for row, code, subject in zip(rows.tolist(), codes.tolist(), subjects, strict=True):
        if code != current:
            if current >= 0:
                texts.put(0, current, rule.dump(state))
            current = code
            state = rule.load(msgspec.json.decode(stored.text(0, code))) if stored.exists[code] else rule.zero()
        ruling, state = ruled(rule, state, subject, scoped=scoped)
        rulings.append(ruling)
        if ruling.verdict is Verdict.REJECTED:
            found.reject(row, ruling.reason, ruling.detail)
        if ruling.warning:
            found.warnings.append(ruling.warning)
    texts.put(0, current, rule.dump(state))
    found.verdicts[rows] = [_CODES[one.verdict] for one in rulings]
    found.forward[rows] = [one.forward for one in rulings]
    found.texts = texts.joined()
