"""Steps on rows whose values a function made: message by message, while the rest of each row stays in columns."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from aggregations.columns import schema
from aggregations.columns.elements import row_of
from aggregations.columns.publishing import publisher
from aggregations.columns.steps import AsElements, Rejected, Stepped, apply_columns
from aggregations.definition.element import Element
from aggregations.definition.flow import FlatMap, Step
from aggregations.definition.paths import keeps_columns
from aggregations.definition.schemas import Schema
from aggregations.per_message.cause import Cause
from aggregations.per_message.lookups import Tables, no_tables
from aggregations.per_message.publishing import Marking
from aggregations.per_message.steps import apply_steps


def parts_of(steps: Sequence[Step], *, made: bool) -> tuple[Sequence[Step], Sequence[Step]]:
    """Divide steps into those on columns and those on values: from the first whose function replaces the values.

    Args:
        steps: The steps.
        made: Functions made the values before the first step.
    """
    first = 0 if made else next((n for n, step in enumerate(steps) if not keeps_columns(step)), len(steps))
    return steps[:first], steps[first:]


def apply_all(
    steps: Sequence[Step],
    frame: pl.DataFrame,
    elements: AsElements,
    marking: Marking | None,
    values: list[Any] | None,
    columns: Schema,
    tables: Tables = no_tables,
) -> Stepped:
    """Run steps over rows, in order: on columns, then on the values that functions made.

    Args:
        steps: The steps.
        frame: The rows.
        elements: Returns rows as elements, for functions.
        marking: Marks what the steps publish.
        values: The values that functions made before the steps, by the numbers of `schema.MADE`; None if none did.
        columns: The columns of these values.
        tables: What the steps look up.
    """
    on_columns, on_values = parts_of(steps, made=values is not None)
    stepped = apply_columns(on_columns, frame, elements, marking, tables)
    stepped.values, stepped.columns = values, columns
    apply_values(on_values, stepped, marking)
    return stepped


def apply_values(steps: Sequence[Step], stepped: Stepped, marking: Marking | None = None) -> None:
    """Run steps over the values of rows, in order.

    Args:
        steps: The steps; the first one replaces the values, if no step before it did.
        stepped: The rows; it is changed.
        marking: Marks what the steps publish.
    """
    if not steps:
        return
    before, columns = stepped.frame, stepped.columns
    if stepped.values is None:
        columns = {name: dtype for name, dtype in before.schema.items() if not name.startswith("_")}
    rows = stepped.rows()
    applied = apply_steps(steps, list(rows), columns, marking, publisher=publisher(rows))
    stepped.columns = applied.schema
    further = sum(isinstance(step, FlatMap) for step in steps)
    stepped.frame, stepped.values = with_values(
        _rows(before, applied.elements, further), [element.value for element in applied.elements]
    )
    stepped.filtered += applied.filtered
    stepped.outputs += applied.outputs
    owned = _owned(before)
    groups: dict[tuple[Cause, bool, int], list[Element[Any]]] = {}
    for one in applied.rejected:
        cause = Cause(one.reason, one.detail, one.raised)
        more = len(one.element.indices) - owned[row_of(one.element)]
        groups.setdefault((cause, one.whole, more), []).append(one.element)
    for (cause, whole, more), elements in groups.items():
        stepped.rejected.append(Rejected(_rows(before, elements, more), cause, whole))


def with_values(frame: pl.DataFrame, values: list[Any]) -> tuple[pl.DataFrame, list[Any]]:
    """Rows with the values that a function made of them: their numbers in the list are a column."""
    frame = frame.drop(schema.TOMBSTONE, strict=False)
    return frame.with_columns(pl.int_range(len(values), dtype=pl.Int64, eager=True).alias(schema.MADE)), values


def _owned(frame: pl.DataFrame) -> list[int]:
    """Number of flat-maps that each row went through."""
    items = schema.item_columns(frame.columns)
    if not items:
        return [0] * frame.height
    return frame.select(pl.sum_horizontal(pl.col(items).is_not_null().cast(pl.Int64))).to_series().to_list()


def _rows(frame: pl.DataFrame, elements: Sequence[Element[Any]], further: int) -> pl.DataFrame:
    """The rows of a frame from which elements were made, with their indices in further flat-maps."""
    found = frame[[row_of(element) for element in elements]]
    before = len(schema.item_columns(frame.columns))
    return found.with_columns(
        pl.Series(
            f"{schema.ITEM}{before + place}", [element.indices[place - further] for element in elements], pl.UInt32
        )
        for place in range(further)
    )
