"""Built-in aggregates of one field.

Each aggregate is defined by its fold of one value at a time (`add`). For speed it also has a polars
expression for a whole batch (`batch`), and merges the result of that into a state (`join`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from aggregations.definition.expressions import Expression, check_column, describe_expression, parsed, text_of
from aggregations.definition.values import checked, exact
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
        where: Boolean column or expression: elements for which it is not true are skipped; None skips none.
    """

    of: Expression | None = None
    by: Expression | None = None
    where: Expression | None = None
    kind: ClassVar[str] = ""
    ordered: ClassVar[bool] = False
    numeric: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    """Its state is its result, and can be declared with `Fields.added`."""
    selects: ClassVar[bool] = False
    """Its result consists of values that it folded, so it is not rounded."""
    zero: ClassVar[Any] = None

    def __post_init__(self) -> None:
        for given in (self.of, self.by):
            if given is not None:
                check_column(f"{self.kind}()", given)
        if self.where is not None:
            check_column(f"{self.kind}(where=)", self.where)
        if self.of is None and self.kind != Count.kind:
            raise FlowError(f"{self.kind}() takes a column name or a polars expression; got None")

    @property
    def reads(self) -> bool:
        """Whether it evaluates anything per element."""
        return self.of is not None or self.where is not None

    @property
    def input(self) -> pl.Expr | None:
        """What it folds: null for an element that it skips. None if it reads nothing."""
        value = pl.lit(value=True) if self.of is None else parsed(self.of)
        if self.where is not None:
            return pl.when(parsed(self.where)).then(value)
        return None if self.of is None else value

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        """Return the state with one more value; `value` is never null unless the aggregate reads nothing."""
        raise NotImplementedError

    def batch(self, value: pl.Expr) -> pl.Expr:
        """The aggregate of a group of rows, as input of `join`. Not for ordered aggregates."""
        raise NotImplementedError

    def join(self, state: Any, partial: Any) -> Any:
        """Merge a batch's aggregate into the state; `partial` is null when there was nothing to fold."""
        raise NotImplementedError

    def merge(self, state: Any, other: Any) -> Any:
        """The state that holds what two states hold together.

        Raises:
            EnvelopeError: `OVERFLOW`: the state would exceed its range.
        """
        raise NotImplementedError

    @property
    def mergeable(self) -> bool:
        """Whether it has a `merge`."""
        return type(self).merge is not FieldAggregate.merge

    def result(self, state: Any) -> Any:
        """The state as readers see it."""
        return state

    def comparable(self, state: Any) -> Any:
        """What two folds of the same values have in common, up to rounding, whatever their order and their batches.

        It is the result, unless the aggregate depends on order or on chance.
        """
        result = self.result(state)
        return exact(result) if self.selects else result

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
        return self._text(describe_expression, self.options())

    def __str__(self) -> str:
        return self._text(text_of, {**self.options(), **self.result_options()})

    def _text(self, text: Callable[[Expression], str], options: Mapping[str, Any]) -> str:
        given = [text(one) for one in (self.of, self.by) if one is not None]
        given += [f"{name}={value!r}" for name, value in options.items()]
        if self.where is not None:
            given.append(f"where={text(self.where)}")
        return f"{self.kind}({', '.join(given)})"

    def options(self) -> dict[str, Any]:
        """Options that determine the state, by name."""
        return {}

    def result_options(self) -> dict[str, Any]:
        """Options that determine only the result, by name."""
        return {}

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        """Type of the result as a column, given the type of `input`; None if the result is not a column."""
        return None


class SequenceAggregate(FieldAggregate):
    """An aggregate that folds the values of a batch in order, key by key, rather than by a polars expression."""

    def prepared(self, values: pl.Series) -> Sequence[Any]:
        """The values of a batch, none of them null, in the form that `extend` takes."""
        return values.to_list()

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        """Return the state with more values, as `add` would fold them one by one.

        Args:
            state: State so far.
            values: A part of what `prepared` returned, not empty.
            at: Where they stand, in ascending order; empty unless the aggregate is ordered.

        Raises:
            EnvelopeError: A value cannot be folded.
        """
        raise NotImplementedError


class Count(FieldAggregate):
    """Number of elements, or of non-null values."""

    kind = "count"
    plain = True
    zero = 0

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return pl.Int64()

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return state + 1

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.count() if self.reads else pl.len()

    def join(self, state: Any, partial: Any) -> Any:
        return state + partial

    def merge(self, state: Any, other: Any) -> Any:
        return checked(state + other)

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return type(state) is int and state >= 0


class Total(FieldAggregate):
    """Sum of the values; 0 without values."""

    kind = "total"
    numeric = True
    plain = True
    zero = 0

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return pl.Float64() if of.is_float() else pl.Int64()

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return checked(state + value)

    def batch(self, value: pl.Expr) -> pl.Expr:
        return pl.when(value.count() > 0).then(value.sum())

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else checked(state + partial)

    def merge(self, state: Any, other: Any) -> Any:
        return checked(state + other)

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return type(state) in (int, float)


class _Extreme(FieldAggregate):
    plain = True
    selects = True

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return _stored_type(of)

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else self.add(state, partial, None, ((), ""))

    def merge(self, state: Any, other: Any) -> Any:
        return self.join(state, other)

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        return state is None or _comparable(state, of)


class Minimum(_Extreme):
    """Smallest value; null without values."""

    kind = "minimum"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return value if state is None or value < state else state

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.min()


class Maximum(_Extreme):
    """Largest value; null without values."""

    kind = "maximum"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return value if state is None or value > state else state

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.max()


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

    def merge(self, state: Any, other: Any) -> Any:
        return [checked(state[0] + other[0]), state[1] + other[1]]

    def result(self, state: Any) -> Any:
        return state[0] / state[1] if state[1] else None

    def comparable(self, state: Any) -> Any:
        """Sum and number of values: a value that is missing or doubled need not change the mean."""
        return state

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return pl.Float64()

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
    selects = True

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return [by, list(at[0]), at[1], value] if state is None or _rank(by, at) < _stored(state) else state

    def merge(self, state: Any, other: Any) -> Any:
        return state if other is None else self.add(state, other[3], other[0], (tuple(other[1]), other[2]))

    def result(self, state: Any) -> Any:
        return None if state is None else state[3]

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return _stored_type(of)

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


def _stored_type(of: pl.DataType) -> pl.DataType:
    """Type of values of a column after they were stored: states have no narrow types."""
    if of.is_float():
        return pl.Float64()
    return pl.Int64() if of.is_integer() and of not in (pl.UInt64, pl.Int128) else of


def _comparable(value: Any, dtype: pl.DataType | None) -> bool:
    """Whether a stored value can be compared with values of a dtype: text with text, numbers with numbers."""
    if not isinstance(value, bool | int | float | str):
        return False
    return dtype is None or dtype == pl.Null or isinstance(value, str) == (dtype == pl.String)


def count(of: Expression | None = None, *, where: Expression | None = None) -> FieldAggregate:
    """Number of elements; with `of`, of its non-null values.

    Args:
        of: Column name or expression.
        where: Boolean column name or expression; only elements for which it is true are folded. Every aggregate
            takes it.
    """
    return Count(of, where=where)


def total(of: Expression, *, where: Expression | None = None) -> FieldAggregate:
    """Sum of `of`; exact for integers, within 64 bits."""
    return Total(of, where=where)


def minimum(of: Expression, *, where: Expression | None = None) -> FieldAggregate:
    """Smallest value of `of`."""
    return Minimum(of, where=where)


def maximum(of: Expression, *, where: Expression | None = None) -> FieldAggregate:
    """Largest value of `of`."""
    return Maximum(of, where=where)


def mean(of: Expression, *, where: Expression | None = None) -> FieldAggregate:
    """Arithmetic mean of `of`."""
    return Mean(of, where=where)


def first(of: Expression, by: Expression | None = None, *, where: Expression | None = None) -> FieldAggregate:
    """Value of `of` at the lowest position, or with the lowest `by`; the position breaks ties. Not by arrival."""
    return First(of, by, where)


def last(of: Expression, by: Expression | None = None, *, where: Expression | None = None) -> FieldAggregate:
    """Value of `of` at the highest position, or with the highest `by`; the position breaks ties. Not by arrival."""
    return Last(of, by, where)
