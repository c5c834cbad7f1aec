"""Applies a flow's steps to frames: expressions to whole columns, functions to the rows as elements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.elements import Elements
from aggregations.columns.publishing import published
from aggregations.definition.element import Element
from aggregations.definition.expressions import CANNOT, NO_COLUMNS, Expression, columns_of, expression
from aggregations.definition.flow import Divert, Filter, FlatMap, Map, Predicate, Publish, Step
from aggregations.definition.held import unheld
from aggregations.definition.integers import LEFT_64_BITS, select_exact
from aggregations.definition.lookups import Lookup, Missing
from aggregations.definition.operators import Branch
from aggregations.definition.schemas import Passed, Schema
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.per_message.cause import Cause
from aggregations.per_message.lookups import NO_ENTRY, Tables, lookup_key, new_columns, no_tables
from aggregations.per_message.publishing import Marking, OutputMessage, at_fork, names_topic, of_fork
from aggregations.per_message.rows import evaluate_elements
from aggregations.per_message.steps import called, truth_of
from envelope import EnvelopeError, Reason

AsElements: TypeAlias = Callable[[pl.DataFrame, Sequence[Any] | None], Elements]
"""Returns the rows of a frame as elements, given the values that functions made of them, if any did."""

TRANSFORM_FAILED, OVERFLOW, NO_VALUE = 1, 2, 3
FAILURES: Mapping[int, tuple[Reason, str]] = {
    TRANSFORM_FAILED: (Reason.TRANSFORM_FAILED, CANNOT),
    OVERFLOW: (Reason.OVERFLOW, LEFT_64_BITS),
    NO_VALUE: (Reason.MISSING_FIELD, NO_COLUMNS),
}
"""Reasons why an expression has no result for a row."""
_CAUSES: Final = [Cause(*FAILURES[code]) for code in (TRANSFORM_FAILED, OVERFLOW, NO_VALUE)]
_DIVERTED: Final = Cause(Reason.DIVERTED, "the flow diverted it")
_LOOKED: Final = "_looked_up"
_FOUND: Final = "_found"
_OWN: Final = (schema.TOPIC, schema.PARTITION, schema.OFFSET)


class Rejected(NamedTuple):
    """Rejected rows.

    Attributes:
        frame: The rows, as before the rejecting step.
        cause: Why.
        whole: With them all other items of their records are rejected.
    """

    frame: pl.DataFrame
    cause: Cause
    whole: bool = True


@dataclass(slots=True)
class Stepped:
    """A frame after some steps.

    Attributes:
        frame: The remaining rows.
        elements: Returns rows as elements, for functions.
        values: The values that functions made, by the numbers of `schema.MADE`; None if none did.
        rejected: Rejected rows.
        filtered: Number of rows that filters removed.
        outputs: Messages that steps publish.
        tables: What steps look up.
        columns: The columns of `values`.
    """

    frame: pl.DataFrame
    elements: AsElements
    values: list[Any] | None = None
    rejected: list[Rejected] = field(default_factory=list)
    filtered: int = 0
    outputs: list[OutputMessage] = field(default_factory=list)
    tables: Tables = no_tables
    columns: Schema = field(default_factory=Passed)

    def rows(self) -> Elements:
        """The remaining rows as elements."""
        return self.elements(self.frame, self.values)

    def keep(self, mask: Mask) -> pl.DataFrame:
        """Keep the rows of the mask; return the others."""
        if mask.all():
            return self.frame.clear()
        kept = pl.Series(mask)
        others = self.frame.filter(~kept)
        self.frame = self.frame.filter(kept)
        return others

    def reject(self, failed: npt.NDArray[np.integer], causes: Sequence[Cause]) -> Mask:
        """Reject rows, and with each row all rows of its record.

        Args:
            failed: For each row the number of its cause, from 1; 0 for none.
            causes: The causes. That of a record is the one of its last row that failed.

        Returns:
            The mask of the rows that remain.
        """
        if not failed.any():
            return np.ones(len(failed), np.bool_)
        if schema.item_columns(self.frame.columns):
            last = pl.col("failed").filter(pl.col("failed") > 0).last().over(*_OWN)
            spread = self.frame.select(*_OWN, pl.Series("failed", failed)).select(last.fill_null(0))
            failed = spread.to_series().to_numpy()
        kept: Mask = failed == 0
        for number, cause in enumerate(causes, start=1):
            if (mine := failed == number).any():
                self.rejected.append(Rejected(self.frame.filter(pl.Series(mine)), cause))
        self.keep(kept)
        return kept

    def succeeded(self, results: Sequence[Any]) -> list[Any]:
        """Reject the rows whose result is an error; return the results of the others."""
        numbers: dict[Cause, int] = {}
        failed = np.zeros(len(results), np.int64)
        for row, one in enumerate(results):
            if isinstance(one, EnvelopeError):
                failed[row] = numbers.setdefault(Cause.of(one), len(numbers) + 1)
        kept = self.reject(failed, list(numbers))
        return list(results) if kept.all() else [one for one, stays in zip(results, kept, strict=True) if stays]

    def each(self, of: Expression | Callable[[Element[Any]], Any]) -> list[Any]:
        """Evaluate an argument for every row; reject the rows for which that fails."""
        if isinstance(of, str | pl.Expr) and self.values is not None:
            found = self.succeeded(evaluate_elements(list(self.rows()), {"_": of}, self.columns))
            return [row["_"] for row in found]
        if isinstance(of, str | pl.Expr):
            return evaluated(self, {"_": expression(of)}).to_series().to_list()
        return self.succeeded([called(of, element) for element in self.rows()])


def apply_columns(
    steps: Sequence[Step],
    frame: pl.DataFrame,
    elements: AsElements,
    marking: Marking | None = None,
    tables: Tables = no_tables,
) -> Stepped:
    """Run steps over a frame, in order.

    Args:
        steps: The steps, of which no function replaces the values.
        frame: The rows.
        elements: Returns rows as elements, for functions.
        marking: Marks what the steps publish.
        tables: What the steps look up.
    """
    stepped = Stepped(frame, elements, tables=tables)
    for step in steps:
        match step:
            case Filter(keep):
                stepped.filtered += stepped.keep(_predicate(stepped, keep)).height
            case Divert(when):
                away = _predicate(stepped, when)
                if away.any():
                    stepped.rejected.append(Rejected(stepped.keep(~away), _DIVERTED, whole=False))
            case Map(columns, _):
                found = _added(stepped, {name: expression(of) for name, of in columns.items()})
                stepped.frame = stepped.frame.with_columns(found.get_columns())
            case FlatMap(items=str() | pl.Expr() as items):
                lists = _added(stepped, {step.column: expression(items)})
                stepped.frame = _exploded(stepped.frame, lists.to_series())
            case Lookup():
                _look_up(stepped, step)
            case Publish():
                _publish(stepped, step, marking)
            case Branch():
                _branch(stepped, step, marking)
            case _:
                raise AssertionError(f"{type(step).__name__} cannot be done on columns")
    return stepped


def _publish(stepped: Stepped, step: Publish, marking: Marking | None) -> None:
    keys = _publish_keys(stepped, step)
    topics = [None] * len(keys) if names_topic(step) else stepped.each(step.topic)
    if len(topics) < len(keys):  # no topic could be chosen for some rows
        keys = _publish_keys(stepped, step)
    outputs = stepped.succeeded(published(stepped.rows(), step, marking, keys, topics))
    stepped.outputs += [one for one in outputs if one is not None]


def _publish_keys(stepped: Stepped, step: Publish) -> list[Any]:
    return stepped.frame.get_column(schema.KEY).to_list() if step.key is None else stepped.each(step.key)


def _branch(stepped: Stepped, step: Branch, marking: Marking | None) -> None:
    from aggregations.columns.values import apply_all  # which uses this module

    taken = stepped.frame
    if step.when is not None:
        leaves = _predicate(stepped, step.when)
        taken = stepped.frame.filter(pl.Series(leaves))
        stepped.frame = stepped.frame.filter(~pl.Series(leaves))
    depth = len(schema.item_columns(taken.columns))
    inner = apply_all(
        step.steps, taken, stepped.elements, at_fork(marking, depth), stepped.values, stepped.columns, stepped.tables
    )
    stepped.rejected += inner.rejected
    stepped.filtered += inner.filtered
    stepped.outputs += of_fork(inner.outputs, depth)
    for one in inner.rejected:
        if one.whole:
            stepped.frame = stepped.frame.join(one.frame.select(_OWN), on=list(_OWN), how="anti", maintain_order="left")


def _look_up(stepped: Stepped, step: Lookup) -> None:
    """Add the columns of a table's rows."""
    keys = evaluated(stepped, {_LOOKED: expression(step.key)}).get_column(_LOOKED)
    unique = keys.drop_nulls().unique(maintain_order=True)
    found = [lookup_key(value) for value in unique.to_list()]
    wanted = sorted(key for key in found if isinstance(key, bytes))
    rows = stepped.tables(step.table, wanted) if wanted else {}
    of_keys = [rows.get(key) if isinstance(key, bytes) else None for key in found]
    columns = [new_columns(step, row) for row in of_keys]
    table = pl.DataFrame(
        {
            _LOOKED: unique,
            _FOUND: [row is not None for row in of_keys],
            **{name: pl.Series([one[name] for one in columns], dtype=dtype) for name, dtype in step.types.items()},
        }
    )
    joined = keys.to_frame().join(table, on=_LOOKED, how="left", maintain_order="left")
    has = joined.get_column(_FOUND).fill_null(value=False).to_numpy()
    added = joined.select(list(step.columns))
    if (gone := schema.tombstones(stepped.frame)) is not None:  # a tombstone has no columns, so it gets none
        added = added.select(pl.when(pl.Series(~gone)).then(pl.all()))
    stepped.frame = stepped.frame.with_columns(added.get_columns())
    if step.missing is Missing.DEAD_LETTER:
        stepped.reject((~has).astype(np.uint8), [NO_ENTRY])
    elif step.missing is Missing.DROP:
        stepped.filtered += stepped.keep(has).height


def _exploded(frame: pl.DataFrame, lists: pl.Series) -> pl.DataFrame:
    """One row for each item of the lists, with its index; none for null and for an empty list."""
    sizes = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    rows = frame.with_columns(lists).filter(pl.Series(sizes > 0)).explode(lists.name)
    return numbered(rows, sizes)


def numbered(rows: pl.DataFrame, sizes: Ints) -> pl.DataFrame:
    """Items of a flat-map, with their indices.

    Args:
        rows: A row for each item, in the order of their elements.
        sizes: Number of items of each element.
    """
    index = np.arange(rows.height) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = f"{schema.ITEM}{len(schema.item_columns(rows.columns))}"
    return rows.with_columns(pl.Series(place, index.astype(np.uint32)))


def evaluated(stepped: Stepped, wanted: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """Evaluate expressions for every row; reject the rows for which an evaluation fails."""
    found, failed = evaluate_columns(stepped.frame, wanted)
    kept = stepped.reject(failed, _CAUSES)
    return found if kept.all() else found.filter(pl.Series(kept))


def _added(stepped: Stepped, wanted: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """Evaluate expressions for columns to add; reject the rows for which that fails, and those without columns."""
    found = evaluated(stepped, wanted)
    gone = schema.tombstones(stepped.frame)
    if gone is None:
        return found
    return found.filter(pl.Series(stepped.reject(np.where(gone, NO_VALUE, 0), _CAUSES)))


def evaluate_columns(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, npt.NDArray[np.uint8]]:
    """Evaluate expressions for every row.

    Returns:
        The columns of `wanted`, and for every row 0 or the number of the reason in `FAILURES` why it cannot be
        evaluated; the columns of such rows have no meaning.
    """
    failed = np.zeros(frame.height, np.uint8)
    if not wanted:
        return pl.DataFrame(), failed
    if (gone := schema.tombstones(frame)) is not None and _needs_value(wanted):
        rows = np.flatnonzero(~gone)
        values, failed[rows] = evaluate_columns(frame[rows].drop(schema.TOMBSTONE), wanted)
        failed[gone] = NO_VALUE
        return _spread(values, rows, frame.height), failed
    found, good = _select(frame, wanted), np.arange(frame.height)
    if found is None:
        _find_bad(frame, wanted, failed, 0)
        good = np.flatnonzero(failed == 0)
        # Every row was tried, alone or with others, so this cannot raise.
        found = select_exact(frame[good], wanted)
    values, overflow = found
    if (bad := unheld(values)) is not None:
        failed[good[bad.to_numpy()]] = TRANSFORM_FAILED
    if overflow is not None:
        failed[good[overflow.to_numpy()]] = OVERFLOW
    return values if len(good) == frame.height else _spread(values, good, frame.height), failed


def _spread(values: pl.DataFrame, rows: Ints, height: int) -> pl.DataFrame:
    """The values of some rows, in a frame for all; those of the other rows have no meaning."""
    if not len(rows):
        return values.clear(height)
    places = np.zeros(height, np.int64)
    places[rows] = np.arange(len(rows))
    return values[places]


def _needs_value(wanted: Mapping[str, pl.Expr]) -> bool:
    """Whether expressions read more than the columns that every element has."""
    roots = columns_of(wanted.values())
    return not roots or not roots <= SYSTEM_COLUMNS.keys()


def _predicate(stepped: Stepped, of: Predicate) -> Mask:
    if not isinstance(of, str | pl.Expr):
        return np.array(stepped.each(truth_of(of)), np.bool_)
    found = evaluated(stepped, {"predicate": expression(of)})
    return found.get_column("predicate").fill_null(value=False).to_numpy()


def _select(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, pl.Series | None] | None:
    try:
        return select_exact(frame, wanted)
    except (Exception, pl.exceptions.PanicException):
        return None


def _find_bad(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr], failed: npt.NDArray[np.uint8], start: int) -> None:
    """Mark the rows that fail, by bisection."""
    if _select(frame, wanted) is not None:
        return
    if frame.height == 1:
        failed[start] = TRANSFORM_FAILED
        return
    half = frame.height // 2
    _find_bad(frame.slice(0, half), wanted, failed, start)
    _find_bad(frame.slice(half), wanted, failed, start + half)
