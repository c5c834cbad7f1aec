"""Expressions over the values of single elements: what the per-message path evaluates.

The result for a value depends only on that value, never on the rest of the batch: values that a function made share a
frame only with values of the same names and types, since polars would combine integers and floats in one column, and
would fill a missing column with nulls.

What a function passes on has the type of its column, if it fits. So null, an empty list and a small number are in an
expression what they are without the function. Other values have types of their own, which a null and an empty list do
not have: they get the first of some types with which the expression can be evaluated.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, product
from math import isnan
from typing import Any

import numpy as np
import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import CANNOT, NO_COLUMNS, TRIED, Expression, columns_of, is_mapping, parsed
from aggregations.definition.held import unheld
from aggregations.definition.integers import LEFT_64_BITS, select_exact
from aggregations.definition.schemas import Passed, Schema
from aggregations.definition.system import SYSTEM_COLUMNS, system_values
from envelope import EnvelopeError, Reason

_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
_BY_TYPE = frozenset({float, str, bool, bytes})
"""Types of which a column has all values or none; of an enumeration it has some."""
_INT64 = 2**63
_ABSENT = object()
_ALONE = object()
_ROW = "\0row"  # not a valid column name of a message
_FILLS = ((pl.Null(), pl.Int64()), *((kind, kind) for kind in TRIED))
"""Types to try for nulls, and for nulls in lists: a null fits every other operand of an expression."""
_MOST_FILLS = 200
"""Combinations that are tried: all of two columns."""


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
        schema: Dtypes of the columns.

    Returns:
        One result per value: a mapping with the names of `wanted`, or an `EnvelopeError` with the reason.
    """
    names = {name: _plain_name(of) for name, of in wanted.items()}
    if all(column is not None for column in names.values()):
        return [_looked_up(value, names) for value in values]
    needed = {name: parsed(of) for name, of in wanted.items()}
    roots = sorted(columns_of(needed.values()))
    results: list[Any] = [_checked(value, roots) for value in values]
    for rows, types in _alike(results, roots, needed, schema):
        found = _evaluated([results[i] for i in rows], roots, needed, types, strict=isinstance(schema, Passed))
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


def _alike(
    values: Sequence[Any], roots: Sequence[str], needed: Mapping[str, pl.Expr], schema: Schema
) -> Iterable[tuple[list[int], Mapping[str, pl.DataType]]]:
    """Indices of the values that may share a frame, and the types of its columns, as far as they are known."""
    rows = [i for i, value in enumerate(values) if not isinstance(value, EnvelopeError)]
    types = {name: dtype for name in roots if (dtype := SYSTEM_COLUMNS.get(name) or schema.get(name)) is not None}
    if not isinstance(schema, Passed):
        return [(rows, types)] if rows else []
    fit = {name: _fitting([values[i][name] for i in rows], dtype) for name, dtype in types.items()}
    groups: dict[Any, list[int]] = {}
    for at, i in enumerate(rows):
        known = tuple(name for name in types if fit[name][at])
        alike = _signature([values[i][name] for name in roots if name not in known])
        groups.setdefault((known, i if alike is _ALONE else (alike,)), []).append(i)
    found = []
    for (known, _), mine in groups.items():
        of_known = {name: types[name] for name in known}
        found.append((mine, _completed(of_known, values[mine[0]], roots, needed)))
    return found


def _fitting(values: Sequence[Any], dtype: pl.DataType) -> list[bool]:
    """Whether a column of this type has each value as it is."""
    try:
        found = pl.Series(values, dtype=dtype, strict=True).to_list()
    except (Exception, pl.exceptions.PanicException):
        kinds = set(map(type, values)) - {type(None)}
        if len(values) < 2 or (len(kinds) == 1 and kinds <= _BY_TYPE and not isinstance(dtype, pl.Enum)):
            return [one is None for one in values]
        half = len(values) // 2
        return _fitting(values[:half], dtype) + _fitting(values[half:], dtype)
    pairs = zip(values, found, strict=True)
    return [(type(one) in _SCALARS and type(one) is type(of) and one == of) or _is_same(one, of) for one, of in pairs]


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types."""
    match other:
        case list():
            return isinstance(value, list | tuple) and len(value) == len(other) and all(map(_is_same, value, other))
        case dict():
            return (
                is_mapping(value) and value.keys() == other.keys() and all(_is_same(value[k], other[k]) for k in other)
            )
    value = plain(value)
    return type(value) is type(other) and (
        value == other or (isinstance(other, float) and isnan(other) and isnan(value))
    )


def _signature(values: Sequence[Any]) -> Any:
    kinds = tuple(type(one) for one in values)
    small = all(-_INT64 <= one < _INT64 for one in values if type(one) is int)
    return kinds if small and _SCALARS.issuperset(kinds) else _ALONE


def _completed(
    types: Mapping[str, pl.DataType], value: Mapping[str, Any], roots: Sequence[str], needed: Mapping[str, pl.Expr]
) -> Mapping[str, pl.DataType]:
    """The types of the columns of a value, and of those like it, with types for nulls and the items of empty lists."""
    own: dict[str, list[Any]] = {}
    for name in roots:
        if name not in types:
            with suppress(Exception, pl.exceptions.PanicException):
                dtype = pl.Series([value[name]], strict=True).dtype
                own[name] = list(dict.fromkeys(_filled(dtype, null, item) for null, item in _FILLS))
    open_ = any(len(kinds) > 1 for kinds in own.values())
    for chosen in islice(product(*own.values()), _MOST_FILLS) if open_ else ():
        filled = {**types, **dict(zip(own, chosen, strict=True))}
        with suppress(Exception, pl.exceptions.PanicException):
            pl.DataFrame(schema=filled).select(**needed)
            return filled
    return types


def _filled(dtype: Any, null: Any, item: Any) -> Any:
    """A type with other types for nulls, and for nulls in lists."""
    match dtype:
        case pl.Null():
            return null
        case pl.List():
            return pl.List(_filled(dtype.inner, item, item))
        case pl.Struct():
            return pl.Struct({field.name: _filled(field.dtype, null, item) for field in dtype.fields})
    return dtype


def _evaluated(
    values: Sequence[Mapping[str, Any]],
    roots: Sequence[str],
    needed: Mapping[str, pl.Expr],
    types: Mapping[str, pl.DataType],
    *,
    strict: bool,
) -> list[Any]:
    """Evaluate for every value; if that raises, for each half: only the values that raise fail."""
    # A frame without columns would have no rows.
    data: dict[str, Any] = {_ROW: range(len(values)), **{name: [value[name] for value in values] for name in roots}}
    try:
        frame = pl.DataFrame(data, schema_overrides=types, strict=strict)
        found, overflow = select_exact(frame, needed)
        found = found if overflow is None else found.filter(~overflow)
        if unheld(found) is not None:
            raise ValueError(CANNOT)
    except (Exception, pl.exceptions.PanicException) as error:
        if len(values) == 1:
            # Polars has no type for an integer that long.
            return [_OVERFLOW if isinstance(error, OverflowError) else _FAILED]
        half = len(values) // 2
        parts = (values[:half], values[half:])
        return [row for part in parts for row in _evaluated(part, roots, needed, types, strict=strict)]
    rows = found.iter_rows(named=True)
    return list(rows) if overflow is None else [_OVERFLOW if left else next(rows) for left in overflow]
