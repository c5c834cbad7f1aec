"""`Fields` over whole columns: aggregates a batch per key and joins the results to the states."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from aggregations.columns.arrays import Mask
from aggregations.definition.aggregates import Mean, Total
from aggregations.definition.fields import Fields
from aggregations.definition.values import INT64
from envelope import EnvelopeError

# Half of the 64-bit range: if the sum of absolute values is below it, no intermediate sum left the range.
# The rounding error of the floating-point estimate is far smaller than the other half.
_SAFE = 2.0**62
# Not valid as names of fields, which are columns of the same frame.
CODE = "\0code"
_PLACE = "\0place"
_SIZE = "\0size"  # appended to the name of a field, like the next one
_BATCH = "\0batch"
_WITHIN_64_BITS = frozenset({pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64})


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
        elif column.dtype.is_integer() and column.dtype not in _WITHIN_64_BITS:
            within = column.cast(pl.Int128, strict=False).is_between(-INT64, 2 * INT64 - 1).fill_null(value=False)
            bad |= (column.is_not_null() & ~within).to_numpy()
    return bad


def fold_fields(
    fields: Fields,
    rows: pl.DataFrame,
    at: Sequence[tuple[tuple[int | str, ...], str]] | None,
    states: Mapping[int, Any],
) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Fold accepted rows.

    Args:
        fields: The fold.
        rows: Column `CODE` (the key's number) and the inputs of the fields; sorted by key, position and lane.
        at: Position and lane of every row; required if a field is ordered.
        states: State by key number; keys without one are missing.

    Returns:
        The new states, and the keys that must be folded message by message because a total may leave its range.
    """
    grouped = _partials(fields, rows)
    new: dict[int, dict[str, Any]] = {}
    unfit: list[int] = []
    zero = fields.zero()
    plain = {name: field for name, field in fields.fields.items() if not field.ordered}
    ordered = {name: field for name, field in fields.fields.items() if field.ordered}
    codes = grouped.get_column(CODE).to_list()
    partials = {name: grouped.get_column(f"{name}{_BATCH}").to_list() for name in plain}
    places = {name: grouped.get_column(f"{name}{_BATCH}").to_list() for name in ordered}
    inputs = {
        name: (rows.get_column(name), rows.get_column(f"{name}.by") if field.by is not None else None)
        for name, field in ordered.items()
    }
    sums = {
        name: grouped.get_column(f"{name}{_SIZE}").to_list() for name in plain if f"{name}{_SIZE}" in grouped.columns
    }
    for i, code in enumerate(codes):
        state = dict(states.get(code) or zero)
        try:
            if any(sizes[i] is not None and sizes[i] + _size(state[name]) >= _SAFE for name, sizes in sums.items()):
                unfit.append(code)
                continue
            for name, field in plain.items():
                state[name] = field.join(state[name], partials[name][i])
        except EnvelopeError:
            unfit.append(code)
            continue
        for name, field in ordered.items():
            place = places[name][i]
            if place is not None:
                assert at is not None
                values, by = inputs[name]
                state[name] = field.add(state[name], values[place], None if by is None else by[place], at[place])
        new[code] = state
    return new, unfit


def _size(state: Any) -> float:
    return abs(float(state[0] if isinstance(state, list) else state))


def _partials(fields: Fields, rows: pl.DataFrame) -> pl.DataFrame:
    casts: list[pl.Expr] = []
    aggregates: list[pl.Expr] = []
    for name, field in fields.fields.items():
        value = pl.col(name)
        if field.of is None:
            aggregates.append(field.batch(value).alias(f"{name}{_BATCH}"))
            continue
        dtype = rows.schema[name]
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
        if isinstance(field, Total | Mean) and not dtype.is_float():
            # A value that does not fit is null here, and also too large for the sum of sizes to be safe.
            casts += [value.cast(pl.Int64, strict=False), value.cast(pl.Float64).abs().alias(f"{name}{_SIZE}")]
            aggregates.append(pl.col(f"{name}{_SIZE}").sum())
        elif dtype == pl.Float32:
            casts.append(value.cast(pl.Float64))
        aggregates.append(field.batch(value).alias(f"{name}{_BATCH}"))
    frame = rows.with_columns(pl.int_range(pl.len()).alias(_PLACE), *casts)
    return frame.group_by(CODE).agg(aggregates)
