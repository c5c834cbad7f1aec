"""Column names and polars expressions: the vectorised way to define a step."""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import polars as pl

from aggregations.definition.arguments import located
from aggregations.errors import FlowError

Expression: TypeAlias = str | pl.Expr
"""A column's name, or a polars expression over the columns, evaluated row by row."""

CANNOT = "an expression cannot be evaluated for it"
NO_COLUMNS = "the element's value has no columns, but an expression needs them"

# Details of literals and operands that polars prints and readers do not need. The parentheses of a call stay.
_OPERAND = re.compile(r"(?<!\w)\((col\(\"[^\"]*\"\)|dyn \w+: [^()]*)\)")
_TYPE = re.compile(r"\bdyn (int|float|str): ")
_PARAMETER = re.compile(r"(\([^()]*\))\(\)")  # a call with a parameter of its own, as in `timestamp(ms)()`
# Polars' comparisons in which two nulls are equal, as SQL says it.
_NULL_SAFE = {" !=v ": " is distinct from ", " ==v ": " is not distinct from "}
TRIED: tuple[Any, ...] = (
    pl.Int64,
    pl.String,
    pl.Boolean,
    pl.Float64,
    pl.Binary,
    pl.Datetime("us"),
    pl.Date,
    pl.Duration,
    pl.List(pl.Int64),
    pl.Array(pl.Int64, 2),
    pl.Struct({"a": pl.Int64}),
)
"""Types to try for columns, so that polars can plan an expression whose columns have no types."""
# Nodes of a serialized expression that read other rows, for expressions that polars plans for none of these types.
_SEVERAL_ROWS = frozenset(
    """Agg Over History Explode Filter Slice Sort SortBy Gather Rolling RollingExpr RollingExprBy RollingFunction
    RollingFunctionBy Len Shift Diff PctChange CumSum CumProd CumMin CumMax CumCount CumulativeEval Rank Reverse Unique
    UniqueCounts ValueCounts FillNullWithStrategy DropNulls DropNans Interpolate InterpolateBy ForwardFill BackwardFill
    ArgUnique ArgSort ArgMin ArgMax ArgWhere Mode TopK TopKBy BottomK Entropy EwmMean EwmStd EwmVar Histogram Hist Rle
    RleId SetSortedFlag Random Sample Head Tail IndexOf""".split()  # noqa: SIM905 - a list of words
)
# Python code in an expression: its serialized form is a pickle, so the definition hash would not be stable.
_PYTHON = frozenset({"AnonymousFunction", "PythonFunction", "PythonUdf", "Python"})
# Below these nodes, names are the user's columns and values.
_NAMES = frozenset(
    {"Column", "Literal", "ListExpr", "StringExpr", "StructExpr", "ArrayExpr", "TemporalExpr", "BinaryNamespace"}
)
_OF_LISTS = frozenset({"ListExpr", "ArrayExpr"})
# Functions whose result is as long as some of their arguments say, from the first of these on.
_AS_LONG_AS = {"RepeatBy": 1, "PadStart": 1, "PadEnd": 1, "ZFill": 1, "LinearSpaces": 2} | dict.fromkeys(
    ("IntRanges", "DateRanges", "DatetimeRanges", "TimeRanges"), 0
)


def parsed(argument: Expression) -> pl.Expr:
    """Return the polars expression, unchecked."""
    return pl.col(argument) if isinstance(argument, str) else argument


def expression(argument: Expression) -> pl.Expr:
    """Return the polars expression. The result for a row must depend on that row alone.

    Raises:
        FlowError: It returns several columns, contains Python code, or aggregates, sorts, shifts or
            filters: its result would depend on where a batch ends. Or a column says how long its result is: one record
            could take all memory.
    """
    found = parsed(argument)
    if found.meta.has_multiple_outputs():
        raise FlowError(f"{argument if isinstance(argument, str) else found} selects several columns; name each one")
    if found.meta.is_column():
        return found
    tree = _tree(found)
    for node in _nodes(tree):
        if node == "ToPhysical" and '"Categorical": {' in json.dumps(tree):
            raise FlowError(f"{found} numbers texts in the order in which a process sees them; cast to pl.Enum instead")
        if node in _PYTHON:
            raise FlowError(f"{found} contains Python code; pass a plain function of the element instead")
        if node in _SEVERAL_ROWS:
            raise FlowError(f"{found} reads several rows ({node}); an expression sees one row at a time")
    if unbounded := next(_unbounded(tree), ""):
        raise FlowError(
            f"{found} makes values as long as a record says ({unbounded}), and one record could take all memory; pass a "
            "plain function of the element, which checks the length first"
        )
    if _filters_commute(found) is False:
        raise FlowError(f"{found} needs several rows; an expression sees one row at a time")
    return found


def check_column(what: str, argument: object) -> None:
    """Check that an argument is a column's name or an expression over one row.

    Raises:
        FlowError: It is neither.
    """
    if not isinstance(argument, str | pl.Expr):
        got = type(argument).__name__
        raise FlowError(
            f"{what} takes a column name or a polars expression, such as pl.lit(1) for a constant; got {got}"
        )
    with located(what):
        expression(argument)


def check_argument(what: str, argument: object) -> None:
    """Check that an argument is a column's name, an expression over one row, or a function.

    Raises:
        FlowError: It is none of them.
    """
    if isinstance(argument, str | pl.Expr):
        with located(what):
            expression(argument)
    elif not callable(argument):
        raise FlowError(
            f"{what} takes a column name, a polars expression or a function of the element; got {type(argument).__name__}"
        )


def _filters_commute(found: pl.Expr) -> bool | None:
    """Whether polars would push a filter of rows below the expression.

    It does so exactly if each row's result depends on that row alone, and it has this knowledge of each of its
    functions. None if it cannot plan the expression for any type of column.
    """
    for dtype in TRIED:
        rows = pl.LazyFrame(schema={**dict.fromkeys(found.meta.root_names(), dtype), "_keep": pl.Boolean})
        with suppress(Exception, pl.exceptions.PanicException):
            plan = rows.with_columns(found.alias("_result")).filter(pl.col("_keep")).explain()
            return not plan.lstrip().startswith("FILTER")
    return None


def _tree(found: pl.Expr) -> Any:
    with warnings.catch_warnings():
        # Polars warns that another version of polars may not read it.
        warnings.simplefilter("ignore")
        try:
            return json.loads(found.meta.serialize(format="json"))
        except Exception as error:
            raise FlowError(f"{found} cannot be inspected; pass a plain function of the element instead") from error


def _nodes(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, below in tree.items():
            yield name
            if name == "Alias":
                yield from _nodes([one for one in below if not isinstance(one, str)])
            elif name not in _NAMES:
                yield from _nodes(below)
            elif name in _OF_LISTS and "Sample" in below:
                yield "Sample"
    elif isinstance(tree, list):
        for below in tree:
            yield from _nodes(below)
    elif isinstance(tree, str):
        yield tree


def _unbounded(tree: Any) -> Iterator[str]:
    """The functions in an expression whose result is as long as a column says."""
    for below in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _unbounded(below)
    name = tree.get("function") if isinstance(tree, dict) else None
    while isinstance(name, dict) and name:  # a function stands within its namespace, and has its options in itself
        inner, options = next(iter(name.items()))
        name = inner if inner in _AS_LONG_AS else options
    if isinstance(name, str) and name in _AS_LONG_AS:
        said = json.dumps(tree["input"][_AS_LONG_AS[name] :])
        if '"Column"' in said or '"Element"' in said:
            yield name


def describe_expression(argument: Expression) -> str:
    """Canonical text of an expression, with every argument: part of a stage's definition hash.

    A plain column is its name. `str` would leave out arguments, such as the decimals of `round`.
    """
    found = expression(argument)
    if found.meta.is_column():
        return found.meta.output_name()
    return json.dumps(_tree(found), sort_keys=True, separators=(",", ":"))


def columns_of(expressions: Iterable[pl.Expr]) -> frozenset[str]:
    """Names of the columns that the expressions read."""
    return frozenset(name for one in expressions for name in one.meta.root_names())


def key_bytes(value: Any) -> bytes | None:
    """The canonical bytes of a stage key: text as UTF-8, integers in decimal, bytes unchanged.

    Raises:
        FlowError: The key is of another type, or text that UTF-8 cannot encode.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise FlowError("the key contains an unpaired surrogate, which UTF-8 cannot encode") from error
    if isinstance(value, bool) or not isinstance(value, int):
        raise FlowError(f"the key is of type {type(value).__name__}; use text, bytes or an integer")
    return str(value).encode()


def is_mapping(value: Any) -> bool:
    """Whether an element's value has columns."""
    return isinstance(value, Mapping)


def name_of(function: Callable[..., Any]) -> str:
    """A readable name of a callable."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def text_of(argument: Expression | Callable[..., Any]) -> str:
    """A column's name, an expression as short text, or the name of a callable."""
    if isinstance(argument, pl.Expr):
        text = _PARAMETER.sub(r"\1", _TYPE.sub("", _OPERAND.sub(r"\1", str(argument))))
        for printed, meant in _NULL_SAFE.items():
            text = text.replace(printed, meant)
        return text
    return argument if isinstance(argument, str) else name_of(argument)
