"""Built-in aggregates of one field.

Each aggregate is defined by its fold of one value at a time (`add`). For speed it also has a polars
expression for a whole batch (`batch`), and merges the result of that into a state (`join`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from aggregations.definition.expressions import Expression, check_column, describe_expression
from aggregations.definition.values import checked
from aggregations.errors import FlowError
from envelope import Position
from envelope.dedup.lineage import position_order

At = tuple[Position, str]
"""Where a value stands: its position and its lane, compared in this order."""


@dataclass(frozen=True, slots=True)
class FieldAggregate:
    """One built-in aggregate.

    Attributes:
        of: Column or expression it reads; None when it reads none.
        by: Column or expression that orders values, for `first` and `last`; None for the position.
    """

    of: Expression | None = None
    by: Expression | None = None
    kind: ClassVar[str] = ""
    ordered: ClassVar[bool] = False
    numeric: ClassVar[bool] = False
    zero: ClassVar[Any] = None

    def __post_init__(self) -> None:
        for given in (self.of, self.by):
            if given is not None:
                check_column(f"{self.kind}()", given)
        if self.of is None and self.kind != Count.kind:
            raise FlowError(f"{self.kind}() takes a column name or a polars expression; got None")

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        """Return the state with one more value; `value` is never null unless `of` is None."""
        raise NotImplementedError

    def batch(self, value: pl.Expr) -> pl.Expr:
        """The aggregate of a group of rows, as input of `join`. Not for ordered aggregates."""
        raise NotImplementedError

    def join(self, state: Any, partial: Any) -> Any:
        """Merge a batch's aggregate into the state; `partial` is null when there was nothing to fold."""
        raise NotImplementedError

    def result(self, state: Any) -> Any:
        """The state as readers see it."""
        return state

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        """Whether a stored state is valid for this aggregate.

        Args:
            state: State stored under the field's name, possibly by another aggregate.
            of: Type of `of`, if known.
            by: Type of `by`, if known.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Canonical text: part of the stage's definition hash."""
        given = [describe_expression(one) for one in (self.of, self.by) if one is not None]
        return f"{self.kind}({', '.join(given)})"


class Count(FieldAggregate):
    """Number of elements, or of non-null values."""

    kind = "count"
    zero = 0

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return state + 1

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.count() if self.of is not None else pl.len()

    def join(self, state: Any, partial: Any) -> Any:
        return state + partial

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return type(state) is int and state >= 0


class Total(FieldAggregate):
    """Sum of the values; 0 without values."""

    kind = "total"
    numeric = True
    zero = 0

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return checked(state + value)

    def batch(self, value: pl.Expr) -> pl.Expr:
        return pl.when(value.count() > 0).then(value.sum())

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else checked(state + partial)

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return type(state) in (int, float)


class _Extreme(FieldAggregate):
    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return state is None or _comparable(state, of)


class Minimum(_Extreme):
    """Smallest value; null without values."""

    kind = "minimum"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return value if state is None or value < state else state

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.min()

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else self.add(state, partial, None, ((), ""))


class Maximum(_Extreme):
    """Largest value; null without values."""

    kind = "maximum"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return value if state is None or value > state else state

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.max()

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else self.add(state, partial, None, ((), ""))


class Mean(FieldAggregate):
    """Arithmetic mean; null without values. The state is [sum, count]."""

    kind = "mean"
    numeric = True
    zero = (0, 0)

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return [checked(state[0] + value), state[1] + 1]

    def batch(self, value: pl.Expr) -> pl.Expr:
        return pl.struct(sum=value.sum(), count=value.count())

    def join(self, state: Any, partial: Any) -> Any:
        if not partial["count"]:
            return state
        return [checked(state[0] + partial["sum"]), state[1] + partial["count"]]

    def result(self, state: Any) -> Any:
        return state[0] / state[1] if state[1] else None

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return (
            isinstance(state, list)
            and len(state) == len(self.zero)
            and type(state[0]) in (int, float)
            and type(state[1]) is int
        )


class First(FieldAggregate):
    """Value at the lowest position, or with the lowest `by`. The state is [by, position, lane, value]."""

    kind = "first"
    ordered = True

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return [by, list(at[0]), at[1], value] if state is None or _rank(by, at) < _stored(state) else state

    def result(self, state: Any) -> Any:
        return None if state is None else state[3]

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        if state is None:
            return True
        if not isinstance(state, list) or len(state) != 4 or not isinstance(state[1], list):
            return False
        return state[0] is None if self.by is None else _comparable(state[0], by)


class Last(First):
    """Value at the highest position, or with the highest `by`. The state is [by, position, lane, value]."""

    kind = "last"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return [by, list(at[0]), at[1], value] if state is None or _rank(by, at) > _stored(state) else state


def _rank(by: Any, at: At) -> tuple[Any, ...]:
    return (*(() if by is None else (by,)), position_order(tuple(at[0])), at[1])


def _stored(state: Any) -> tuple[Any, ...]:
    return _rank(state[0], (tuple(state[1]), state[2]))


def _comparable(value: Any, dtype: pl.DataType | None) -> bool:
    """Whether a stored value can be compared with values of a dtype: text with text, numbers with numbers."""
    if not isinstance(value, bool | int | float | str):
        return False
    return dtype is None or dtype == pl.Null or isinstance(value, str) == (dtype == pl.String)


def count(of: Expression | None = None) -> FieldAggregate:
    """Number of elements; with `of`, of its non-null values."""
    return Count(of)


def total(of: Expression) -> FieldAggregate:
    """Sum of `of`; exact for integers, within 64 bits."""
    return Total(of)


def minimum(of: Expression) -> FieldAggregate:
    """Smallest value of `of`."""
    return Minimum(of)


def maximum(of: Expression) -> FieldAggregate:
    """Largest value of `of`."""
    return Maximum(of)


def mean(of: Expression) -> FieldAggregate:
    """Arithmetic mean of `of`."""
    return Mean(of)


def first(of: Expression, by: Expression | None = None) -> FieldAggregate:
    """Value of `of` at the lowest position, or with the lowest `by`; the position breaks ties. Not by arrival."""
    return First(of, by)


def last(of: Expression, by: Expression | None = None) -> FieldAggregate:
    """Value of `of` at the highest position, or with the highest `by`; the position breaks ties. Not by arrival."""
    return Last(of, by)
