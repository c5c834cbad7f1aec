"""Declarative folds: named fields of built-in aggregates over columns.

Each aggregate folds one value at a time (`add`), which is the definition, and knows the polars
expression of a whole batch (`batch`) and how its result joins a state (`join`), which is the fast way.
Nulls are skipped, as SQL's aggregates do. NaN and infinities are refused before anything is folded.
Integers are exact and must stay within 64 bits; floating totals agree up to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from aggregations.definition.expressions import Expression, describe_expression, parsed
from aggregations.errors import FlowError
from envelope import EnvelopeError, Position, Reason, position_order

INT64 = 2**63
At = tuple[Position, str]
"""Where a value stands: position and lane, compared in this order."""


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

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        """Return the state with one value more; `value` is never null unless `of` is None."""
        raise NotImplementedError

    def batch(self, value: pl.Expr) -> pl.Expr:
        """The aggregate of a group of rows, as `join` takes it. Not for ordered aggregates."""
        raise NotImplementedError

    def join(self, state: Any, partial: Any) -> Any:
        """Return the state with a batch's aggregate; `partial` is null when there was nothing to fold."""
        raise NotImplementedError

    def result(self, state: Any) -> Any:
        """What a reader sees of the state."""
        return state

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


class Total(FieldAggregate):
    """Sum of the values, 0 of none."""

    kind = "total"
    numeric = True
    zero = 0

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return checked(state + value)

    def batch(self, value: pl.Expr) -> pl.Expr:
        return pl.when(value.count() > 0).then(value.sum())

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else checked(state + partial)


class Minimum(FieldAggregate):
    """Smallest value, null of none."""

    kind = "minimum"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return value if state is None or value < state else state

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.min()

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else self.add(state, partial, None, ((), ""))


class Maximum(FieldAggregate):
    """Largest value, null of none."""

    kind = "maximum"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return value if state is None or value > state else state

    def batch(self, value: pl.Expr) -> pl.Expr:
        return value.max()

    def join(self, state: Any, partial: Any) -> Any:
        return state if partial is None else self.add(state, partial, None, ((), ""))


class Mean(FieldAggregate):
    """Arithmetic mean, null of none. The state is [sum, count]."""

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


class First(FieldAggregate):
    """Value of the lowest position, or of the lowest `by`. The state is [by, position, lane, value]."""

    kind = "first"
    ordered = True

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return [by, list(at[0]), at[1], value] if state is None or _rank(by, at) < _stored(state) else state

    def result(self, state: Any) -> Any:
        return None if state is None else state[3]


class Last(First):
    """Value of the highest position, or of the highest `by`. The state is [by, position, lane, value]."""

    kind = "last"

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return [by, list(at[0]), at[1], value] if state is None or _rank(by, at) > _stored(state) else state


def _rank(by: Any, at: At) -> tuple[Any, ...]:
    return (*(() if by is None else (by,)), position_order(tuple(at[0])), at[1])


def _stored(state: Any) -> tuple[Any, ...]:
    return _rank(state[0], (tuple(state[1]), state[2]))


def count(of: Expression | None = None) -> FieldAggregate:
    """Number of elements; with `of`, of its non-null values."""
    return Count(of)


def total(of: Expression) -> FieldAggregate:
    """Sum of `of`; integers exactly, within 64 bits."""
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
    """Value of `of` with the lowest position, or with the lowest `by`; ties go by position. Not by arrival."""
    return First(of, by)


def last(of: Expression, by: Expression | None = None) -> FieldAggregate:
    """Value of `of` with the highest position, or with the highest `by`; ties go by position. Not by arrival."""
    return Last(of, by)


@dataclass(frozen=True, init=False)
class Fields:
    """A fold made of named aggregates: `Fields(legs=count(), minutes=total("air_minutes"))`.

    Its state is a JSON object with one member per field.
    """

    fields: Mapping[str, FieldAggregate]

    def __init__(self, **fields: FieldAggregate) -> None:
        if not fields:
            raise FlowError("Fields() needs at least one field")
        for name, field in fields.items():
            if not isinstance(field, FieldAggregate):
                raise FlowError(f"field {name!r} is a {type(field).__name__}; use count(), total(...) and the like")
            if f"{name}.by" in fields:
                raise FlowError(f"field {name + '.by'!r} has the name of what orders field {name!r}; rename one")
            field.describe()
        object.__setattr__(self, "fields", dict(fields))

    def zero(self) -> dict[str, Any]:
        """The state before anything was folded."""
        return {
            name: list(field.zero) if isinstance(field.zero, tuple) else field.zero
            for name, field in self.fields.items()
        }

    def inputs(self) -> dict[str, pl.Expr]:
        """The expressions to evaluate per element: `name` and, where it has one, `name.by`."""
        wanted: dict[str, pl.Expr] = {}
        for name, field in self.fields.items():
            if field.of is not None:
                wanted[name] = parsed(field.of)
            if field.by is not None:
                wanted[f"{name}.by"] = parsed(field.by)
        return wanted

    def check(self, dtypes: Mapping[str, pl.DataType]) -> None:
        """Check the types of what `inputs` evaluates to.

        Raises:
            FlowError: A field reads what its aggregate does not take.
        """
        for name, dtype in dtypes.items():
            if not (dtype.is_integer() or dtype.is_float() or dtype in (pl.String, pl.Boolean, pl.Null)):
                raise FlowError(f"field {name!r} is of type {dtype}; cast it to a number or to text")
            if dtype == pl.String and name in self.fields and self.fields[name].numeric:
                raise FlowError(f"field {name!r} is a {self.fields[name].kind} of text; cast it to a number")

    def add(self, state: Mapping[str, Any], values: Mapping[str, Any], at: At) -> dict[str, Any]:
        """Return the state with one element more.

        Args:
            state: State so far.
            values: What `inputs` gave for the element.
            at: Where it stands.

        Raises:
            EnvelopeError: `OVERFLOW`, `NOT_FINITE` or `BAD_PAYLOAD`; the state is unchanged.
        """
        new = dict(state)
        for name, field in self.fields.items():
            if field.of is None:
                new[name] = field.add(new[name], None, None, at)
                continue
            value, by = values[name], values.get(f"{name}.by")
            if value is None or (field.by is not None and by is None):
                continue
            check_value(name, value, numeric=field.numeric)
            if field.by is not None:
                check_value(f"{name}.by", by)
            new[name] = field.add(new[name], value, by, at)
        return new

    def result(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a reader sees of a state: one value per field."""
        return {name: field.result(state[name]) for name, field in self.fields.items()}

    def describe(self) -> str:
        """Canonical text of the fold: part of the stage's definition hash."""
        return "Fields(" + ", ".join(f"{name}={field.describe()}" for name, field in self.fields.items()) + ")"


def checked(number: Any) -> Any:
    """Return the sum if it is in range.

    Raises:
        EnvelopeError: `OVERFLOW`: an integer beyond 64 bits or a float beyond its range.
    """
    if isinstance(number, int):
        if not -INT64 <= number < INT64:
            raise EnvelopeError(Reason.OVERFLOW, "an integer total would leave 64 bits")
    elif number in (float("inf"), float("-inf")):
        raise EnvelopeError(Reason.OVERFLOW, "a floating total would leave its range")
    return number


def check_value(name: str, value: Any, *, numeric: bool = False) -> None:
    """Check that a field can fold a value, and that its state can be stored.

    Raises:
        EnvelopeError: `NOT_FINITE`, `OVERFLOW`, or `BAD_PAYLOAD` for a type that the aggregate does not take.
    """
    match value:
        case bool():
            return
        case int():
            # From -2^63 to what the largest unsigned type holds.
            if not -INT64 <= value < 2 * INT64:
                raise EnvelopeError(Reason.OVERFLOW, f"field {name!r} is an integer beyond 64 bits")
        case float():
            if value - value != 0:
                raise EnvelopeError(Reason.NOT_FINITE, f"field {name!r} is NaN or infinite")
        case str() if not numeric:
            if not is_utf8(value):
                raise EnvelopeError(Reason.BAD_PAYLOAD, f"field {name!r} has half a surrogate pair in its text")
        case _:
            raise EnvelopeError(
                Reason.BAD_PAYLOAD, f"field {name!r} is a {type(value).__name__}; use numbers, text or booleans"
            )


def is_utf8(text: str) -> bool:
    """Whether UTF-8, and with it JSON, can hold the text."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
