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
from aggregations.definition.headers import header_column
from aggregations.definition.judging import Judging
from aggregations.per_message.judging import ruled
from envelope import Verdict
from envelope.filters.arrival import Filter, FromEnvelope, FromHeader, FromValue, Scope, resting, tracking
from envelope.filters.distinct import DistinctSession, DistinctTumbling
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.interval import IntervalFilter
from envelope.filters.producers import ProducerFilter, envelope_stamp
from envelope.filters.sequence import SequenceFilter
from envelope.filters.turns import time_extractor

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
    *,
    missing: int = 0,
) -> Rulings:
    """Judge rows.

    Args:
        rule: The filter.
        inputs: The columns that it reads, if they are known: those of the payload by name, headers by `header_column`,
            those of the envelope by `stamped`, and topic, partition, offset, key and timestamp.
        subjects: Returns some of the rows as the filter judges them.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
        missing: Number of listed dead letters that may still come to the filter.
    """
    tracks = missing > 0 and hasattr(rule, "track")
    found = _compiled(rule, inputs, codes, stored) if len(codes) and not tracks else None
    if found is None:
        found = Rulings.of(len(codes), stored)
        found.left[:] = True
    rows = np.flatnonzero(found.left[codes])
    if len(rows):
        found.rejected = {row: cause for row, cause in found.rejected.items() if not found.left[codes[row]]}
        _one_by_one(rule, subjects(rows), rows, codes[rows], stored, found, missing=missing)
    return found


def _compiled(rule: Filter[Any], inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    """The rulings of compiled code; None if there is none for the filter and its columns."""
    if not inputs.width:
        return None
    if type(rule) is SequenceFilter:
        return _sequences(rule, inputs, codes, stored)
    if type(rule) in (DistinctSession, DistinctTumbling, EventIdFilter, IntervalFilter):
        return _remembered(rule, inputs, codes, stored)
    if type(rule) is ProducerFilter and rule.stamp is envelope_stamp:
        return _producers(rule, inputs, codes, stored)
    return None


def _sequences(rule: SequenceFilter, inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    from aggregations.columns.judging_sequences import NUMBERS, judge_sequences

    numbers = _column(rule.sequence, inputs)
    if numbers is None or numbers.dtype not in NUMBERS:
        return None
    return judge_sequences(rule, numbers, inputs.get_column(schema.KEY), codes, stored)


def _remembered(rule: Any, inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    """The rulings of a filter that remembers ids or keys until a time."""
    from aggregations.columns.id_states import MOST_MS
    from aggregations.columns.id_texts import KINDS
    from aggregations.columns.judging_ids import judge_ids
    from aggregations.columns.judging_sessions import judge_sessions

    key, times = inputs.get_column(schema.KEY), times_of(rule, inputs)
    if times is None or not times.is_between(-MOST_MS, MOST_MS).all():
        return None
    time = times.to_numpy().copy()
    scoped = np.ones(len(codes), np.bool_)
    if not isinstance(rule, IntervalFilter) and rule.scope_by is Scope.KEY:
        scoped = key.is_not_null().to_numpy().copy()
    if isinstance(rule, DistinctSession):
        return judge_sessions(rule, key, time, scoped, codes, stored)
    identity, places, place = [key], pl.Series([], dtype=pl.String), np.zeros(0, np.int64)
    if isinstance(rule, EventIdFilter) or (isinstance(rule, IntervalFilter) and not rule.keyed):
        identity = []
    elif isinstance(rule, IntervalFilter) and rule.key is not None:
        if (changed := _column(rule.key, inputs)) is None or changed.dtype not in (pl.String(), pl.Binary()):
            return None
        identity = [changed.cast(pl.Binary)]
    if isinstance(rule, IntervalFilter) and rule.partitions:
        places, place = _places(inputs)
    if not isinstance(rule, DistinctTumbling) and rule.id is not None:
        if (ids := _column(rule.id, inputs)) is None or ids.dtype not in KINDS:
            return None
        identity.append(ids)
    if Judging(rule).spans:
        scoped = identity[0].is_not_null().to_numpy().copy()
    offset = inputs.get_column(schema.OFFSET).to_numpy().copy()
    return judge_ids(rule, identity, time, offset, scoped, codes, stored, places, place)


def _places(inputs: pl.DataFrame) -> tuple[pl.Series, Ints]:
    """Texts of topics and partitions, and the number of each row's text: most rows have the same few."""
    topic, partition = inputs.get_column(schema.TOPIC), inputs.get_column(schema.PARTITION).to_numpy()
    topics, partitions = topic.unique().to_list(), int(partition.max()) + 1
    place = partition.astype(np.int64)
    for number, one in enumerate(topics[1:], 1):
        place[(topic == one).to_numpy()] += number * partitions
    return pl.Series([f"{one}:{number}" for one in topics for number in range(partitions)]), place


def _producers(rule: ProducerFilter, inputs: pl.DataFrame, codes: Ints, stored: StoredStates) -> Rulings | None:
    from aggregations.columns.judging_producers import judge_producers

    times = times_of(rule, inputs)
    if schema.STAMP not in inputs.columns or times is None:
        return None
    return judge_producers(rule, inputs.get_column(schema.STAMP), times.to_numpy(), codes, stored)


def times_of(rule: Any, inputs: pl.DataFrame) -> pl.Series | None:
    """The times by which a filter judges; None if they are not in a column, or a row may have none.

    Args:
        rule: The filter.
        inputs: As of `rulings_of`.
    """
    time = time_extractor(rule)
    times = inputs.get_column(schema.TIMESTAMP) if time is None else _column(time, inputs)
    return None if times is None or times.dtype != pl.Int64 or times.null_count() else times


def _column(extractor: Any, inputs: pl.DataFrame) -> pl.Series | None:
    """The column that an extractor reads; None if it is not known."""
    name = ""
    if isinstance(extractor, FromHeader):
        name = header_column(extractor.name)
    elif isinstance(extractor, FromValue):
        name = extractor.name
    elif isinstance(extractor, FromEnvelope):
        name = stamped(extractor.name)
    return inputs.get_column(name) if name in inputs.columns else None


def _one_by_one(
    rule: Filter[Any],
    subjects: Sequence[Any],
    rows: Ints,
    codes: Ints,
    stored: StoredStates,
    found: Rulings,
    *,
    missing: int,
) -> None:
    """Judge the rows of some states, all of their rows, in a loop."""
    texts, rulings = Texts(found.values, found.texts), []
    current, state, scoped = -1, None, not (Judging(rule).by_key or Judging(rule).spans)
    for row, code, subject in zip(rows.tolist(), codes.tolist(), subjects, strict=True):
        if code != current:
            if current >= 0:
                texts.put(0, current, rule.dump(resting(rule, state)))
            current = code
            state = rule.load(msgspec.json.decode(stored.text(0, code))) if stored.exists[code] else rule.zero()
            state = tracking(rule, state, on=missing > 0)
        ruling, state = ruled(rule, state, subject, scoped=scoped)
        rulings.append(ruling)
        if ruling.verdict is Verdict.REJECTED:
            found.reject(row, ruling.reason, ruling.detail)
        if ruling.warning:
            found.warnings.append(ruling.warning)
    texts.put(0, current, rule.dump(resting(rule, state)))
    found.verdicts[rows] = [_CODES[one.verdict] for one in rulings]
    found.forward[rows] = [one.forward for one in rulings]
    found.texts = texts.joined()
