"""What a stage emits as columns: the state of every key before and after each of its rows, without a call per row.

`aggregations.per_message.emitting` is the reference.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from aggregations.columns.arrays import Ints, Mask, arrow
from aggregations.columns.fold import OPERATIONS, run_whole, whole_inputs
from aggregations.columns.record_text import WHOLE
from aggregations.columns.records import States
from aggregations.columns.steps import evaluate_columns
from aggregations.definition.aggregates import At, FieldAggregate
from aggregations.definition.emit import CONDITION, NEW, OLD, Emit
from aggregations.definition.fields import Fields
from aggregations.per_message.emitting import typed
from envelope import EnvelopeError


class Emitted(NamedTuple):
    """What a stage emits for rows.

    Attributes:
        columns: The columns, one row for each of them.
        passes: Rows for which the condition is true.
        failed: Rows for which it cannot be computed, and perhaps others of their keys: they are folded message by
            message.
    """

    columns: pl.DataFrame
    passes: Mask
    failed: Mask


def emit_columns(
    emit: Emit,
    fields: Fields,
    kinds: Sequence[int],
    types: Mapping[str, pl.DataType],
    inputs: pl.DataFrame,
    read: pl.DataFrame,
    keys: Ints,
    at: Sequence[At] | None,
    stored: States,
) -> Emitted:
    """Emit for accepted rows.

    Args:
        emit: What to emit.
        fields: The fold.
        kinds: See `aggregations.columns.fold.kinds_of`.
        types: See `aggregations.per_message.emitting.emitted_types`.
        inputs: Inputs of the fields, in the order in which rows are folded.
        read: Columns of the element that `emit` reads.
        keys: Key of every row; those of one key together.
        at: Position and lane of every row; required if a field is ordered.
        stored: The states before.
    """
    failed = np.zeros(len(keys), np.bool_)
    states: list[pl.Series] = []
    names = list(fields.fields)
    for name in emit.fields:
        field, number, dtype = fields.fields[name], names.index(name), types[OLD + name]
        if kinds[number] == WHOLE:
            states += _whole(name, number, field, inputs, keys, stored)
        else:
            states += _others(name, number, field, dtype, inputs, keys, at, stored, failed)
    # A frame without columns has no rows.
    frame = pl.DataFrame([pl.Series("\0row", np.arange(len(keys))), *read.get_columns(), *states])
    columns, bad = evaluate_columns(frame, emit.wanted())
    failed |= bad != 0
    passes = np.ones(len(keys), np.bool_)
    if emit.condition is not None:
        passes = columns.get_column(CONDITION).cast(pl.Boolean).fill_null(value=False).to_numpy()
        columns = columns.drop(CONDITION)
    return Emitted(columns, passes, failed)


def _whole(
    name: str, number: int, field: FieldAggregate, inputs: pl.DataFrame, keys: Ints, stored: States
) -> list[pl.Series]:
    """A field whose states are integers or null, before and after each row."""
    numbers, valid = whole_inputs(name, field, inputs, len(keys))
    known = stored.values.known[number].copy()
    if field.zero is not None:
        known |= ~stored.exists
    old, new = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    was, there = np.empty(len(keys), np.uint8), np.empty(len(keys), np.uint8)
    states = np.require(stored.values.whole[number], np.int64, ["C", "W"])
    run_whole(OPERATIONS[type(field)], keys, numbers, valid, states, known, old, was, new, there)
    return [
        pl.Series(f"{begin}{name}", arrow(values, mask.astype(np.bool_)))
        for begin, values, mask in ((OLD, old, was), (NEW, new, there))
    ]


def _others(
    name: str,
    number: int,
    field: FieldAggregate,
    dtype: pl.DataType,
    inputs: pl.DataFrame,
    keys: Ints,
    at: Sequence[At] | None,
    stored: States,
    failed: Mask,
) -> list[pl.Series]:
    """Any other field, before and after each row; marks the rows of keys whose states are not of the type."""
    column = inputs.get_column(name)
    values = (column.cast(pl.Float64) if column.dtype == pl.Float32 else column).to_list()
    by = inputs.get_column(f"{name}.by").to_list() if field.by is not None else None
    old: list[Any] = [None] * len(keys)
    new: list[Any] = [None] * len(keys)
    bounds = [*np.flatnonzero(np.diff(keys, prepend=-1)).tolist(), len(keys)]
    for first, last in pairwise(bounds):
        key = int(keys[first])
        state: Any = list(field.zero) if isinstance(field.zero, tuple) else field.zero
        if stored.exists[key]:
            state = msgspec.json.decode(stored.text(number, key))
        try:
            shown = typed(name, field.result(state), dtype)
            for row in range(first, last):
                old[row] = shown
                if values[row] is not None and (by is None or by[row] is not None):
                    place: At = at[row] if at is not None else ((), "")
                    state = field.add(state, values[row], None if by is None else by[row], place)
                    shown = typed(name, field.result(state), dtype)
                new[row] = shown
        except EnvelopeError:
            failed[first:last] = True
    return [pl.Series(OLD + name, old, dtype), pl.Series(NEW + name, new, dtype)]
