"""Expressions over the values of single elements: what the per-message path evaluates.

The result for a value depends only on that value, never on the rest of the batch: values without a
declared schema share a frame only with values of the same names and types, since polars would
combine integers and floats in one column, and would fill a missing column with nulls.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import CANNOT, NO_COLUMNS, Expression, columns_of, is_mapping, parsed
from aggregations.definition.integers import LEFT_64_BITS, select_exact
from aggregations.definition.schemas import Schema
from aggregations.definition.system import SYSTEM_COLUMNS, system_values
from envelope import EnvelopeError, Reason

_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
_INT64 = 2**63
_ABSENT = object()
_ALONE = object()
_ROW = "\0row"  # not a valid column name of a message


def evaluate_elements(elements: Sequence[Element[Any]], wanted: Mapping[str, Expression], schema: Schema) -> list[Any]:
    """Evaluate expressions over the columns of each element: those of its value, and `SYSTEM_COLUMNS`.

    See `evaluate_values`. An expression that reads only system columns needs no value with columns.
    """
    if not wanted:
        return [{} for _ in elements]
    roots = columns_of(map(parsed, wanted.values()))
    system = roots & SYSTEM_COLUMNS.keys()
    if not system:
        return evaluate_values([element.value for element in elements], wanted, schema)

    def columns(element: Element[Any]) -> Any:
        if roots == system:
            return system_values(element, system)
        return {**element.value, **system_values(element, system)} if is_mapping(element.value) else element.value

    return evaluate_values(list(map(columns, elements)), wanted, schema)


def evaluate_values(values: Sequence[Any], wanted: Mapping[str, Expression], schema: Schema) -> list[Any]:
    """Evaluate expressions over the columns of each value.

    Args:
        values: Mappings of column names to values; anything else has no columns.
        wanted: Expressions by name of the result.
        schema: Dtypes of the columns, where they are known.

    Returns:
        One result per value: a mapping with the names of `wanted`, or an `EnvelopeError` with the reason.
    """
    names = {name: _plain_name(of) for name, of in wanted.items()}
    if all(column is not None for column in names.values()):
        return [_looked_up(value, names) for value in values]
    needed = {name: parsed(of) for name, of in wanted.items()}
    roots = sorted(columns_of(needed.values()))
    results: list[Any] = [_checked(value, roots) for value in values]
    for rows in _alike(results, roots, schema):
        found = _evaluated([results[i] for i in rows], roots, needed, schema)
        for i, row in zip(rows, found, strict=True):
            results[i] = row
    return results


def plain(value: Any) -> Any:
    """Convert a number or text of a library's own type, such as numpy's, to Python's type."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, np.generic):
        return value.item()
    kinds: tuple[type, ...] = (int, float, str, bytes)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


_FAILED = EnvelopeError(Reason.TRANSFORM_FAILED, CANNOT)
_OVERFLOW = EnvelopeError(Reason.OVERFLOW, LEFT_64_BITS)


def _plain_name(argument: Expression) -> str | None:
    if isinstance(argument, str):
        return argument
    return argument.meta.output_name() if argument.meta.is_column() else None


def _looked_up(value: Any, names: Mapping[str, str | None]) -> Any:
    """Plain columns need no frame."""
    found = _checked(value, names.values())
    return found if isinstance(found, EnvelopeError) else {name: plain(found[column]) for name, column in names.items()}


def _checked(value: Any, roots: Iterable[str | None]) -> Any:
    if not is_mapping(value):
        return EnvelopeError(Reason.MISSING_FIELD, NO_COLUMNS)
    missing = {str(name) for name in roots if value.get(name, _ABSENT) is _ABSENT}
    if missing:
        return EnvelopeError(Reason.MISSING_FIELD, f"no column {', '.join(sorted(missing))}")
    return value


def _alike(values: Sequence[Any], roots: Sequence[str], schema: Schema) -> Iterable[list[int]]:
    """Indices of the values that may share a frame."""
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if not isinstance(value, EnvelopeError):
            alike = None if schema else _signature([value[name] for name in roots])
            groups.setdefault(i if alike is _ALONE else (alike,), []).append(i)
    return groups.values()


def _dtype(column: str, schema: Schema) -> pl.DataType | None:
    return SYSTEM_COLUMNS.get(column) or (schema or {}).get(column)


def _signature(values: Sequence[Any]) -> Any:
    kinds = tuple(type(one) for one in values)
    small = all(-_INT64 <= one < _INT64 for one in values if type(one) is int)
    return kinds if small and _SCALARS.issuperset(kinds) else _ALONE


def _evaluated(
    values: Sequence[Mapping[str, Any]], roots: Sequence[str], needed: Mapping[str, pl.Expr], schema: Schema
) -> list[Any]:
    """Evaluate for every value; if that raises, for each half: only the values that raise fail."""
    # A frame without columns would have no rows.
    data: dict[str, Any] = {_ROW: range(len(values)), **{name: [value[name] for value in values] for name in roots}}
    known = {name: dtype for name in roots if (dtype := _dtype(name, schema)) is not None}
    try:
        frame = pl.DataFrame(data, schema_overrides=known, strict=not schema)
        found, overflow = select_exact(frame, needed)
    except (Exception, pl.exceptions.PanicException) as error:
        if len(values) == 1:
            # Polars has no type for an integer that long.
            return [_OVERFLOW if isinstance(error, OverflowError) else _FAILED]
        half = len(values) // 2
        return [row for part in (values[:half], values[half:]) for row in _evaluated(part, roots, needed, schema)]
    rows = list(found.iter_rows(named=True))
    return rows if overflow is None else [_OVERFLOW if left else row for row, left in zip(rows, overflow, strict=True)]
