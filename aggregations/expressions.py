"""Column names and polars expressions: the vectorised way to say what a step does."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import polars as pl

from aggregations.errors import FlowError

Expression: TypeAlias = str | pl.Expr
"""A column's name, or a polars expression over the columns, evaluated row by row."""

# Nodes of a serialized polars expression that look at other rows than the one they compute.
_SEVERAL_ROWS = frozenset(
    """Agg Over Window Explode Filter Slice Sort SortBy Gather Rolling Len Shift Diff PctChange CumSum CumProd CumMin
    CumMax CumCount Rank Reverse Unique UniqueCounts ValueCounts FillNullWithStrategy DropNulls DropNans Interpolate
    InterpolateBy ForwardFill BackwardFill RollingExpr RollingExprBy ArgUnique ArgSort ArgMin ArgMax ArgWhere Mode TopK
    TopKBy BottomK Entropy EwmMean EwmStd EwmVar Histogram Hist Rle RleId SetSortedFlag Random Sample""".split()  # noqa: SIM905 - a list of 47 words
)
# Below these, names are columns and values of the user.
_NAMES = frozenset(
    {"Column", "Literal", "ListExpr", "StringExpr", "StructExpr", "ArrayExpr", "TemporalExpr", "BinaryNamespace"}
)


def expression(of: Expression) -> pl.Expr:
    """Return the expression, refusing one that a batch border would change.

    Raises:
        FlowError: It aggregates, sorts, shifts or filters: its result would depend on the batch.
    """
    found = pl.col(of) if isinstance(of, str) else of
    for node in _nodes(_tree(found)):
        if node in _SEVERAL_ROWS:
            raise FlowError(f"{found} looks at several rows ({node}); a step sees one row at a time")
    return found


def _tree(found: pl.Expr) -> Any:
    with warnings.catch_warnings():
        # Readable, and not meant to be read by another version of polars: it is not.
        warnings.simplefilter("ignore")
        try:
            return json.loads(found.meta.serialize(format="json"))
        except Exception as error:
            raise FlowError(f"{found} cannot be inspected; give a plain function of the element instead") from error


def _nodes(tree: Any) -> Iterable[str]:
    if isinstance(tree, dict):
        for name, below in tree.items():
            yield name
            if name not in _NAMES:
                yield from _nodes(below)
    elif isinstance(tree, list):
        for below in tree:
            yield from _nodes(below)
    elif isinstance(tree, str):
        yield tree


def columns_of(expressions: Iterable[pl.Expr]) -> frozenset[str]:
    """Names of the columns that the expressions read."""
    return frozenset(name for one in expressions for name in one.meta.root_names())


def frame_of(values: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None) -> pl.DataFrame:
    """Return one row per mapping; `schema` gives the dtypes where they are known."""
    if schema:
        names = list(schema)
        data = {name: [value.get(name) for value in values] for name in names}
        return pl.DataFrame(data, schema=dict(schema), strict=False)
    return pl.from_dicts([dict(value) for value in values], infer_schema_length=None)


def evaluate(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, list[int]]:
    """Evaluate expressions for every row.

    An expression that raises fails only the rows it raises for.

    Returns:
        The columns of `wanted`, one row per row of `frame`, null in failed rows; and the failed rows' indices.
    """
    selection = [one.alias(name) for name, one in wanted.items()]
    whole = _whole(frame, selection)
    if whole is not None:
        return whole, []
    rows = [_whole(frame.slice(i, 1), selection) for i in range(frame.height)]
    failed = [i for i, row in enumerate(rows) if row is None]
    good = [row for row in rows if row is not None]
    if not good:
        return pl.DataFrame({name: [None] * frame.height for name in wanted}), failed
    blank = pl.DataFrame({name: [None] for name in wanted}, schema=good[0].schema)
    return pl.concat([blank if row is None else row for row in rows], how="vertical_relaxed"), failed


def _whole(frame: pl.DataFrame, selection: Sequence[pl.Expr]) -> pl.DataFrame | None:
    try:
        # The extra column keeps the height when every expression is a literal.
        return frame.select(pl.int_range(pl.len()).alias("_height"), *selection).drop("_height")
    except Exception:
        return None


def key_bytes(value: Any) -> bytes | None:
    """The canonical bytes of a stage key: text as UTF-8, integers in decimal, bytes as they are.

    Raises:
        FlowError: The key is of another type.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool) or not isinstance(value, int):
        raise FlowError(f"a key of type {type(value).__name__}: use text, bytes or an integer")
    return str(value).encode()


def is_mapping(value: Any) -> bool:
    """Whether an element's value has columns."""
    return isinstance(value, Mapping)


def name_of(function: Callable[..., Any]) -> str:
    """A readable name of a callable."""
    return getattr(function, "__qualname__", type(function).__qualname__)
