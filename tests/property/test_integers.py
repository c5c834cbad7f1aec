"""Whole numbers in expressions against Python's own integers, vectorised and message by message."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.columns.steps import FAILURES, evaluate_columns
from aggregations.definition.schemas import UNKNOWN
from aggregations.per_message.rows import evaluate_values
from envelope import EnvelopeError, Reason

DTYPES: dict[str, pl.DataType] = {
    "i8": pl.Int8(),
    "i16": pl.Int16(),
    "i32": pl.Int32(),
    "i64": pl.Int64(),
    "u8": pl.UInt8(),
    "u16": pl.UInt16(),
    "u32": pl.UInt32(),
    "u64": pl.UInt64(),
}
Row = dict[str, int | None]


class Overflow(Exception):
    """A result would leave 64 bits."""


@dataclass(frozen=True)
class Epoch:
    """An expression, and what it means in Python."""

    expr: pl.Expr
    value: Callable[[Row], int | None]
    text: str

    def __repr__(self) -> str:
        return self.text


def bounds(dtype: pl.DataType) -> tuple[int, int]:
    bits = int(str(dtype).lstrip("UInt"))
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.is_signed_integer() else (0, (1 << bits) - 1)


def numbers(dtype: pl.DataType) -> st.SearchStrategy[int | None]:
    low, high = bounds(dtype)
    near = st.sampled_from([low, low + 1, high - 1, high, 0, 1, max(low, -1), max(low, -2), 2, high // 2, 3])
    return st.none() | near | near | st.integers(low, high)


rows = st.lists(st.fixed_dictionaries({name: numbers(dtype) for name, dtype in DTYPES.items()}), min_size=1, max_size=4)
literals = st.sampled_from([0, 1, -1, 2, 3, 10, 127, 128, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), 2**63])


def column(name: str) -> Epoch:
    return Epoch(pl.col(name), lambda row: row[name], name)


def literal(number: int) -> Epoch:
    return Epoch(pl.lit(number), lambda _: number, str(number))


def computed(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise Overflow
    return number


def binary(symbol: str, left: Epoch, right: Epoch) -> Epoch:
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "+": lambda one, other: one + other,
        "-": lambda one, other: one - other,
        "*": lambda one, other: one * other,
        "//": lambda one, other: one // other,
        "%": lambda one, other: one % other,
    }
    operation = operations[symbol]

    def value(row: Row) -> int | None:
        one, other = left.value(row), right.value(row)
        if one is None or other is None or (symbol in ("//", "%") and other == 0):
            return None
        return computed(operation(one, other))

    return Epoch(operation(left.expr, right.expr), value, f"({left} {symbol} {right})")


def absolute(of: Epoch) -> Epoch:
    def value(row: Row) -> int | None:
        one = of.value(row)
        return None if one is None else computed(abs(one))

    return Epoch(of.expr.abs(), value, f"abs({of})")


def negative(of: Epoch) -> Epoch:
    def value(row: Row) -> int | None:
        one = of.value(row)
        return None if one is None else computed(-one)

    return Epoch(-of.expr, value, f"-({of})")


def power(of: Epoch, exponent: int) -> Epoch:
    def value(row: Row) -> int | None:
        one = of.value(row)
        return None if one is None else computed(one**exponent)

    return Epoch(of.expr**exponent, value, f"({of} ** {exponent})")


def summed(*epochs: Epoch) -> Epoch:
    def value(row: Row) -> int | None:
        found = [epoch.value(row) for epoch in epochs]
        return computed(sum(one for one in found if one is not None))

    return Epoch(pl.sum_horizontal(epoch.expr for epoch in epochs), value, f"sum{epochs}")


def chosen(name: str, limit: int, then: Epoch, otherwise: Epoch) -> Epoch:
    """Only the branch that is taken can overflow."""

    def value(row: Row) -> int | None:
        tested = row[name]
        return (then if tested is not None and tested < limit else otherwise).value(row)

    expr = pl.when(pl.col(name) < limit).then(then.expr).otherwise(otherwise.expr)
    return Epoch(expr, value, f"({then} if {name} < {limit} else {otherwise})")


leaves = st.sampled_from(list(DTYPES)).map(column) | literals.map(literal)


@st.composite
def epochs(draw: st.DrawFn, depth: int = 3) -> Epoch:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(leaves)
    inner = epochs(depth - 1)
    match draw(st.sampled_from(["+", "-", "*", "//", "%", "abs", "-x", "**", "sum", "when"])):
        case "abs":
            return absolute(draw(inner))
        case "-x":
            return negative(draw(inner))
        case "**":
            return power(draw(inner), draw(st.integers(0, 70)))
        case "sum":
            return summed(draw(inner), draw(inner), draw(leaves))
        case "when":
            name, limit = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from([0, 100]))
            return chosen(name, limit, draw(inner), draw(inner))
        case symbol:
            return binary(symbol, draw(inner), draw(inner))


def expected(epoch: Epoch, row: Row) -> Any:
    try:
        return epoch.value(row)
    except Overflow:
        return Reason.OVERFLOW


@settings(max_examples=3 * settings.default.max_examples)
@given(epochs(), rows)
def test_every_expression_is_what_python_computes_or_refused_as_overflow(epoch: Epoch, rows: list[Row]) -> None:
    wanted = [expected(epoch, row) for row in rows]
    found, failed = evaluate_columns(pl.DataFrame(rows, schema=DTYPES), {"_": epoch.expr})
    vectorised = zip(found.get_column("_").to_list(), failed.tolist(), strict=True)
    assert [FAILURES[code][0] if code else value for value, code in vectorised] == wanted
    values = evaluate_values(rows, {"_": epoch.expr}, DTYPES)
    assert [one.reason if isinstance(one, EnvelopeError) else one["_"] for one in values] == wanted
    # Without a schema a value has the types that Python's integers take; a null has none.
    known = [(row, one) for row, one in zip(rows, wanted, strict=True) if None not in row.values()]
    values = evaluate_values([row for row, _ in known], {"_": epoch.expr}, UNKNOWN)
    assert [one.reason if isinstance(one, EnvelopeError) else one["_"] for one in values] == [one for _, one in known]
