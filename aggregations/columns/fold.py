"""`Fields` over whole columns: aggregates a batch per key and joins the results to the states."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.float_fold import OF_FLOATS, fold_floats
from aggregations.columns.record_text import TEXT, WHOLE, Values
from aggregations.columns.records import States, Texts
from aggregations.definition.aggregates import (
    At,
    Count,
    FieldAggregate,
    Maximum,
    Mean,
    Minimum,
    SequenceAggregate,
    Total,
)
from aggregations.definition.fields import Fields
from aggregations.definition.values import INT64
from envelope import EnvelopeError
from persistence.compiled import compiled

# Half of the 64-bit range: if the sum of absolute values is below it, no intermediate sum left the range.
# The rounding error of the floating-point estimate is far smaller than the other half.
_SAFE = 2.0**62
# Not valid as names of fields, which are columns of the same frame.
CODE = "\0code"
_PLACE = "\0place"
_SIZE = "\0size"  # appended to the name of a field, like the next one
_BATCH = "\0batch"
_WITHIN_64_BITS = frozenset({pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32})
_UP_TO_64_BITS = _WITHIN_64_BITS | {pl.UInt64}

COUNT, TOTAL, MINIMUM, MAXIMUM = range(4)
OPERATIONS = {Count: COUNT, Total: TOTAL, Minimum: MINIMUM, Maximum: MAXIMUM}


class Folded(NamedTuple):
    """States after a batch.

    Attributes:
        values: Values in the states, by key.
        texts: Contains the texts of values.
        unfit: Whether a key must be folded message by message, because a total may leave its range.
    """

    values: Values
    texts: bytes
    unfit: Mask


def unfit_rows(fields: Fields, inputs: pl.DataFrame, rows: int) -> Mask:
    """Rows with a value that a field rejects: NaN, infinite or beyond 64 bits. Their keys are folded message by message.

    Args:
        fields: The fold.
        inputs: Its inputs; without columns if no field reads one.
        rows: Number of rows.
    """
    bad = np.zeros(rows, np.bool_)
    for name in fields.inputs():
        column = inputs.get_column(name)
        if column.dtype.is_float():
            bad |= (~column.is_finite()).fill_null(value=False).to_numpy()
        elif column.dtype.is_integer() and column.dtype not in _UP_TO_64_BITS:
            within = column.cast(pl.Int128, strict=False).is_between(-INT64, 2 * INT64 - 1).fill_null(value=False)
            bad |= (column.is_not_null() & ~within).to_numpy()
    return bad


def kinds_of(fields: Fields, dtypes: Mapping[str, pl.DataType]) -> list[int]:
    """Which fields are integers or null in every state: counts, and totals and extremes of integers.

    Args:
        fields: The fold.
        dtypes: Types of its inputs.
    """
    return [
        WHOLE if isinstance(field, Count) or (type(field) in OPERATIONS and dtypes[name] in _WITHIN_64_BITS) else TEXT
        for name, field in fields.fields.items()
    ]


def fold_fields(
    fields: Fields,
    kinds: Sequence[int],
    inputs: pl.DataFrame,
    keys: Ints,
    at: Sequence[At] | None,
    stored: States,
) -> Folded:
    """Fold accepted rows.

    Args:
        fields: The fold.
        kinds: See `kinds_of`.
        inputs: Inputs of the fields, in the order in which rows are folded; without columns if no field reads one.
        keys: Key of every row.
        at: Position and lane of every row; required if a field is ordered.
        stored: The states before.
    """
    values = Values.of(len(kinds), len(stored.exists))
    unfit = np.zeros(len(stored.exists), np.bool_)
    others: dict[str, FieldAggregate] = {}
    for i, (name, field) in enumerate(fields.fields.items()):
        if kinds[i] == TEXT:
            others[name] = field
            continue
        numbers, known = whole_inputs(name, field, inputs, len(keys))
        values.whole[i], values.known[i] = stored.values.whole[i], stored.values.known[i]
        if field.zero is not None:
            values.known[i] |= ~stored.exists
        fold_whole(OPERATIONS[type(field)], keys, numbers, known, values.whole[i], values.known[i], unfit)
    if not others:
        return Folded(values, b"", unfit)
    texts = _fold_others(fields, others, inputs, keys, at, stored, values, unfit)
    return Folded(values, texts, unfit)


def whole_inputs(name: str, field: FieldAggregate, inputs: pl.DataFrame, rows: int) -> tuple[Ints, Mask]:
    """The integers that a field folds, and which of them are not null."""
    known, numbers = np.ones(rows, np.bool_), np.zeros(rows, np.int64)
    if field.reads:
        column = inputs.get_column(name)
        known = column.is_not_null().to_numpy()
        if not isinstance(field, Count):
            numbers = column.cast(pl.Int64).fill_null(0).to_numpy()
    # The same kinds of arrays whatever the column: for others a function would be compiled once more.
    return np.require(numbers, np.int64, ["C", "W"]), np.require(known, np.bool_, ["C", "W"])


@compiled(allocates=False)
def fold_whole(
    operation: int,
    keys: Ints,
    numbers: Ints,
    valid: Mask,
    states: Ints,
    known: npt.NDArray[np.uint8],
    unfit: Mask,
) -> None:
    """Fold integers, sorted by key, into the states of their keys.

    Args:
        operation: Which aggregate it is.
        keys: Key of every row.
        numbers: The integers.
        valid: Which of them are not null.
        states: State by key.
        known: 0 for a state that is null, else 1.
        unfit: Is set for keys whose total may leave its range.
    """
    size, before = 0.0, -1
    for row in range(len(keys)):
        key = keys[row]
        if key != before:
            before, size = key, abs(float(states[key]))
        if not valid[row]:
            continue
        number = numbers[row]
        if operation == COUNT:
            if size >= _SAFE:
                unfit[key] = True
            states[key] += 1
        elif operation == TOTAL:
            size += abs(float(number))
            if size >= _SAFE:
                unfit[key] = True
            states[key] += number
        elif not known[key] or (number < states[key] if operation == MINIMUM else number > states[key]):
            states[key] = number
        known[key] = 1


@compiled(allocates=False)
def run_whole(
    operation: int,
    keys: Ints,
    numbers: Ints,
    valid: Mask,
    states: Ints,
    known: npt.NDArray[np.uint8],
    old: Ints,
    was: npt.NDArray[np.uint8],
    new: Ints,
    there: npt.NDArray[np.uint8],
) -> None:
    """Fold integers, sorted by key, as `fold_whole` does, and keep the state before and after each row.

    Args:
        operation: Which aggregate it is.
        keys: Key of every row.
        numbers: The integers.
        valid: Which of them are not null.
        states: State by key, before the rows.
        known: 0 for a state that is null, else 1.
        old: Receives the state before each row.
        was: Receives 0 where it is null, else 1.
        new: Receives the state after each row.
        there: Receives 0 where it is null, else 1.
    """
    key, state, exists = -1, 0, 0
    for row in range(len(keys)):
        if keys[row] != key:
            key = keys[row]
            state, exists = states[key], int(known[key])
        old[row], was[row] = state, exists
        if valid[row]:
            number = numbers[row]
            if operation == COUNT:
                state += 1
            elif operation == TOTAL:
                state += number
            elif not exists or (number < state if operation == MINIMUM else number > state):
                state = number
            exists = 1
        new[row], there[row] = state, exists


def _fold_others(
    fields: Fields,
    others: Mapping[str, FieldAggregate],
    inputs: pl.DataFrame,
    keys: Ints,
    at: Sequence[At] | None,
    stored: States,
    values: Values,
    unfit: Mask,
) -> bytes:
    """Fold fields whose states are not integers, key by key; return their texts."""
    texts = Texts(values)
    places = {name: i for i, name in enumerate(fields.fields)}
    grouping: dict[str, FieldAggregate] = {}
    for name, field in others.items():
        if isinstance(field, SequenceAggregate):
            _fold_sequence(places[name], field, inputs.get_column(name), keys, at, stored, texts, unfit)
        elif type(field) in OF_FLOATS and inputs.schema[name].is_float():
            fold_floats(places[name], field, inputs.get_column(name), keys, stored, texts, unfit)
        else:
            grouping[name] = field
    if not grouping:
        return texts.joined()
    grouped = _partials(grouping, inputs.with_columns(pl.Series(CODE, keys)))
    codes = grouped.get_column(CODE).to_list()
    for name, field in grouping.items():
        i, partials = places[name], grouped.get_column(f"{name}{_BATCH}").to_list()
        sizes = grouped.get_column(f"{name}{_SIZE}").to_list() if f"{name}{_SIZE}" in grouped.columns else None
        of = inputs.get_column(name)
        by = inputs.get_column(f"{name}.by") if field.by is not None else None
        for row, code in enumerate(codes):
            state: Any = list(field.zero) if isinstance(field.zero, tuple) else field.zero
            if stored.exists[code]:
                state = msgspec.json.decode(stored.text(i, code))
            try:
                if sizes is not None and sizes[row] is not None and sizes[row] + _size(state) >= _SAFE:
                    unfit[code] = True
                elif not field.ordered:
                    state = field.join(state, partials[row])
                elif (place := partials[row]) is not None:
                    assert at is not None
                    state = field.add(state, of[place], None if by is None else by[place], at[place])
            except (EnvelopeError, TypeError):  # text and a number in the values of a function
                unfit[code] = True
            texts.put(i, code, state)
    return texts.joined()


def _fold_sequence(
    number: int,
    field: SequenceAggregate,
    column: pl.Series,
    keys: Ints,
    at: Sequence[At] | None,
    stored: States,
    texts: Texts,
    unfit: Mask,
) -> None:
    """Fold the values of one field, sorted by key, into the states of their keys.

    Args:
        number: Number of the field.
        field: The field.
        column: Its input.
        keys: Key of every row.
        at: Position and lane of every row, if the field is ordered.
        stored: The states before.
        texts: Receives the new states.
        unfit: Is set for keys with a value that the field rejects.
    """
    known = column.is_not_null().to_numpy()
    values = field.prepared(column.drop_nulls())
    places = [at[row] for row in np.flatnonzero(known).tolist()] if field.ordered and at is not None else []
    # Where the known values of each key begin and end.
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    bounds = np.concatenate(([0], np.cumsum(known)))[[*begins.tolist(), len(keys)]].tolist()
    for i, code in enumerate(keys[begins].tolist()):
        first, last = bounds[i], bounds[i + 1]
        state: Any = msgspec.json.decode(stored.text(number, code)) if stored.exists[code] else field.zero
        try:
            if first < last:
                state = field.extend(state, values[first:last], places[first:last])
        except (EnvelopeError, TypeError):
            unfit[code] = True
        texts.put(number, code, state)


def _size(state: Any) -> float:
    return abs(float(state[0] if isinstance(state, list) else state))


def _partials(fields: Mapping[str, FieldAggregate], rows: pl.DataFrame) -> pl.DataFrame:
    casts: list[pl.Expr] = []
    aggregates: list[pl.Expr] = []
    for name, field in fields.items():
        value = pl.col(name)
        if field.ordered:
            known = value.is_not_null()
            if field.by is not None:
                known &= pl.col(f"{name}.by").is_not_null()
            places = pl.col(_PLACE).filter(known)
            if field.by is not None:
                by = pl.col(f"{name}.by").filter(known)
                # A stable sort keeps the order of equal positions.
                places = places.sort_by(by, maintain_order=True)
            aggregates.append((places.first() if field.kind == "first" else places.last()).alias(f"{name}{_BATCH}"))
            continue
        if isinstance(field, Total | Mean):
            # A value that does not fit is null here, and also too large for the sum of sizes to be safe.
            casts += [value.cast(pl.Int64, strict=False), value.cast(pl.Float64).abs().alias(f"{name}{_SIZE}")]
            aggregates.append(pl.col(f"{name}{_SIZE}").sum())
        aggregates.append(field.batch(value).alias(f"{name}{_BATCH}"))
    frame = rows.with_columns(pl.int_range(pl.len()).alias(_PLACE), *casts)
    return frame.group_by(CODE).agg(aggregates)
