"""What a stage emits as columns, for one element: the reference for the vectorised path."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import polars as pl

from aggregations.definition.emit import CONDITION, NEW, OLD, Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Stage
from aggregations.definition.operators import Aggregate, emit_input
from aggregations.definition.schemas import Passed, Schema, emit_types
from aggregations.definition.values import INT64
from aggregations.per_message.rows import evaluate_values
from envelope import EnvelopeError, Reason

_KINDS: Mapping[pl.DataType, tuple[type, ...]] = {
    pl.Int64(): (int,),
    pl.UInt64(): (int,),
    pl.Int128(): (int,),
    pl.Float64(): (float, int),
    pl.Boolean(): (bool,),
    pl.String(): (str,),
    pl.List(pl.Float64()): (list,),
    pl.Null(): (),
}
_RANGES: Mapping[pl.DataType, range] = {pl.Int64(): range(-INT64, INT64), pl.UInt64(): range(2 * INT64)}


def emitted_types(stage: Stage) -> Schema:
    """Types of the columns that the `Emit` of a stage reads; none if it has none."""
    return emit_types(stage.aggregate, stage.arriving) if isinstance(stage.aggregate.emit, Emit) else {}


def typed(field: str, value: Any, dtype: pl.DataType) -> Any:
    """A result of a field as a value of its column.

    Raises:
        EnvelopeError: `FOLD_FAILED`: it is of another type, because an earlier definition made the state.
    """
    if value is None:
        return None
    kinds = _KINDS[dtype]
    if type(value) not in kinds or (dtype in _RANGES and value not in _RANGES[dtype]):
        raise EnvelopeError(
            Reason.FOLD_FAILED,
            f"field {field!r} is a {type(value).__name__} in a state of an earlier definition; emit= needs {dtype}",
        )
    return float(value) if dtype == pl.Float64 else value


def emitted_row(
    stage: Aggregate,
    inputs: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    types: Schema,
    *,
    always: bool = False,
) -> dict[str, Any] | None:
    """The columns that a stage passes on for an element; None if its condition is not true.

    Args:
        stage: The stage; it has an `Emit`.
        inputs: Values of `Aggregate.inputs` for the element.
        before: State of the fold before the element.
        after: The state after it.
        types: Types of the columns that the `Emit` reads.
        always: Ignore the condition.

    Raises:
        EnvelopeError: An expression cannot be evaluated.
    """
    emit, fold = stage.emit, stage.fold
    assert isinstance(emit, Emit)
    assert isinstance(fold, Fields)
    row = {name: inputs[emit_input(name)] for name in emit.read}
    for begin, state in ((OLD, before), (NEW, after)):
        for name in emit.fields:
            row[begin + name] = value = fold.fields[name].result(state[name])
            if begin + name in types:
                with suppress(EnvelopeError) if isinstance(types, Passed) else nullcontext():
                    row[begin + name] = typed(name, value, types[begin + name])
    [found] = evaluate_values([row], emit.wanted(), types)
    if isinstance(found, EnvelopeError):
        raise found
    passes = found.pop(CONDITION, True)
    return found if passes or always else None
