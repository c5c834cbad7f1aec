"""Columns and types along a flow: what each step makes of them, and whether its expressions fit."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeAlias

import polars as pl

from aggregations.definition.emit import CONDITION, NEW, OLD, Emit
from aggregations.definition.expressions import Expression, columns_of, parsed, text_of
from aggregations.definition.fields import Fields
from aggregations.definition.held import check_held
from aggregations.definition.integers import select_exact
from aggregations.definition.judging import Judging
from aggregations.definition.lookups import Lookup
from aggregations.definition.operators import Aggregate, Branch, Divert, Filter, FlatMap, Map, Publish, Step
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.errors import FlowError


class Passed(dict[str, pl.DataType]):
    """The columns before a function that replaced the elements' values, and what later steps make of them.

    A value that the function passes on under its name has the type of the column, if it fits. Nothing else is known.
    """


Schema: TypeAlias = Mapping[str, pl.DataType]
"""Columns and their types; `Passed` when a callable determines the value."""
UNKNOWN: Final[Schema] = Passed()
"""Nothing is known of the values."""


def schema_after(step: object, schema: Schema) -> Schema:
    """The columns after a step, given the columns `schema` before it.

    Raises:
        FlowError: A column is missing, or types do not fit.
    """
    match step:
        case Map(columns, None):
            new = types_of({name: parsed(of) for name, of in columns.items()}, schema)
            return _replaced(schema, columns, new)
        case FlatMap(str() | pl.Expr() as items):
            return _replaced(schema, [step.column], _item_type(step.column, items, schema))
        case Lookup():
            return _replaced(schema, step.types, step.types)
        case Map() | FlatMap():
            return Passed(schema)
        case Aggregate(emit=Emit() as emit):
            wanted = {name: parsed(of) for name, of in emit.columns.items()}
            return types_of(wanted, emit_types(step, schema))
        case Aggregate(emit=emit) if emit is not None:
            return Passed(schema)
        case _:
            return schema


def check_columns(step: Step | Aggregate, schema: Mapping[str, pl.DataType]) -> None:
    """Plan a step's expressions, so that missing columns and wrong types are reported when the flow is defined.

    Raises:
        FlowError: A column is missing, types do not fit, or an aggregate does not accept the type of a field's input.
    """
    match step:
        case Filter(argument) | Divert(argument) | Branch(when=argument) if isinstance(argument, str | pl.Expr):
            dtype = types_of({"": parsed(argument)}, schema)[""]
            if dtype not in (pl.Boolean, pl.Null):
                raise FlowError(f"{text_of(argument)} is of type {dtype}, not Boolean")
        case Map(_, None) | FlatMap(str() | pl.Expr()):
            schema_after(step, schema)
        case Lookup(key=key):
            step.check_free(schema)
            _check_key(key, schema)
        case Publish(topic, key):
            if isinstance(key, str | pl.Expr):
                _check_key(key, schema)
            if step.topics and isinstance(topic, str | pl.Expr):
                dtype = types_of({"": parsed(topic)}, schema)[""]
                if dtype not in (pl.String, pl.Null):
                    raise FlowError(f"{text_of(topic)} is of type {dtype}, not String")
        case Aggregate(key=key, fold=fold):
            if isinstance(key, str | pl.Expr):
                _check_key(key, schema)
            if isinstance(fold, Judging):
                types_of(fold.inputs(), schema)
            if isinstance(fold, Fields):
                for name, dtype in types_of(fold.conditions(), schema).items():
                    if dtype not in (pl.Boolean, pl.Null):
                        raise FlowError(f"where= of field {name!r} is of type {dtype}, not Boolean")
                fold.check(types_of(fold.inputs(), schema))
            if isinstance(step.emit, Emit):
                types = types_of(step.emit.wanted(), emit_types(step, schema))
                if (dtype := types.get(CONDITION, pl.Boolean())) not in (pl.Boolean, pl.Null):
                    raise FlowError(f"emit=: when() is of type {dtype}, not Boolean")
                for name, dtype in types.items():
                    check_held(name, dtype)


def emit_types(stage: Aggregate, schema: Schema) -> Schema:
    """Types of the columns that the `Emit` of a stage reads, given the columns `schema` that arrive there.

    Raises:
        FlowError: A column is missing, or has a name of a column of the state.
    """
    emit, fold = stage.emit, stage.fold
    assert isinstance(emit, Emit)
    assert isinstance(fold, Fields)
    passed = isinstance(schema, Passed)
    if not passed and (clashing := sorted(name for name in schema if name.startswith((OLD, NEW)))):
        raise FlowError(f"emit=: column {clashing[0]} has a name of the state's columns; rename it before the stage")
    wanted = fold.inputs()
    inputs = types_of(wanted, schema)
    types = types_of({name: pl.col(name) for name in emit.read}, schema)
    for name in emit.fields:
        if name in inputs or name not in wanted:
            dtype = fold.fields[name].result_type(inputs.get(name, pl.Boolean()))
            assert dtype is not None
            types |= {OLD + name: dtype, NEW + name: dtype}
    return types


def types_of(wanted: Mapping[str, pl.Expr], schema: Schema) -> dict[str, pl.DataType]:
    """Result types of expressions over the columns of `schema`; of `Passed` columns those that are known, as `Passed`.

    Raises:
        FlowError: A column is missing, or types do not fit.
    """
    if isinstance(schema, Passed):
        known = Passed()
        for name, of in wanted.items():
            with suppress(FlowError):
                known |= types_of({name: of}, dict(schema))
        return known
    missing = columns_of(wanted.values()) - set(schema) - SYSTEM_COLUMNS.keys()
    if missing:
        raise FlowError(f"no column {', '.join(sorted(missing))}; the columns are {', '.join(sorted(schema))}")
    try:
        return dict(select_exact(pl.DataFrame(schema={**schema, **SYSTEM_COLUMNS}), wanted)[0].schema)
    except FlowError:
        raise
    except (Exception, pl.exceptions.PanicException) as error:
        raise FlowError(f"an expression does not fit the columns: {type(error).__name__}: {error}") from error


def _replaced(schema: Schema, columns: Iterable[str], new: Schema) -> Schema:
    """The columns after a step that replaces some of them."""
    if not isinstance(schema, Passed):
        for name, dtype in new.items():
            check_held(name, dtype)
    unknown = {*columns} - new.keys()
    found = {name: dtype for name, dtype in {**schema, **new}.items() if name not in unknown}
    return Passed(found) if isinstance(schema, Passed) else found


def _item_type(column: str, items: Expression, schema: Schema) -> Schema:
    """The type of the items of a list."""
    dtype = types_of({column: parsed(items)}, schema).get(column)
    if isinstance(dtype, pl.List):
        return {column: pl.Series(dtype=dtype).explode().dtype}
    if isinstance(schema, Passed):
        return {}
    raise FlowError(f"{text_of(items)} is of type {dtype}, not a list")


def _check_key(key: Expression, schema: Mapping[str, pl.DataType]) -> None:
    dtype = types_of({"": parsed(key)}, schema)[""]
    if not (dtype.is_integer() or dtype in (pl.String, pl.Binary, pl.Null)):
        raise FlowError(f"the key is of type {dtype}; use text, bytes or an integer")
