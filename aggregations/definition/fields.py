"""Declarative folds: named fields of built-in aggregates over columns.

Each aggregate is defined by its fold of one value at a time (`add`). For speed it also has a polars
expression for a whole batch (`batch`), and merges the result of that into a state (`join`).
Nulls are skipped, as in SQL. NaN and infinities are rejected before anything is folded.
Integers are exact and must stay within 64 bits; floating-point totals agree up to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import polars as pl

from aggregations.definition.expressions import Expression, describe_expression, parsed
from aggregations.errors import FlowError
from envelope import EnvelopeError, Position, Reason, position_order

INT64 = 2**63
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


@dataclass(frozen=True, init=False)
class Fields:
    """A fold made of named aggregates: `Fields(legs=count(), minutes=total("air_minutes"))`.

    Its state is a JSON object with one member per field.

    Attributes:
        fields: Aggregate by field name.
        starts: Initial values that `added` declared, by field name.
    """

    fields: Mapping[str, FieldAggregate]
    starts: Mapping[str, Any]

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
        object.__setattr__(self, "starts", {})

    def added(self, **starts: Any) -> "Fields":
        """Declare fields that were added after the flow had states, with their values in those earlier states.

            Fields(legs=count(), late=count("late")).added(late=0)

        A value applies only to states that do not have the field yet. New keys begin at zero as usual. The declaration
        is part of the definition: keep it as long as the generation.

        Args:
            starts: Value so far by field: for `count` and `total` a number, for `minimum` and `maximum` a number,
                text or boolean. None means that nothing was folded; `mean`, `first` and `last` accept only None.

        Raises:
            FlowError: A field does not exist, or its aggregate cannot start with the value.
        """
        states = {}
        for name, start in starts.items():
            field = self.fields.get(name)
            if field is None:
                raise FlowError(f"added(): no field {name!r}; there are {', '.join(self.fields)}")
            plain = field.kind not in ("mean", "first", "last")
            try:
                check_value(name, start if plain and start is not None else 0)
            except EnvelopeError as error:
                raise FlowError(f"added(): {error.detail}") from error
            if start is not None and not (plain and field.fits(start)):
                raise FlowError(
                    f"added(): {field.kind} {name!r} cannot begin with {start!r}; None means nothing folded"
                )
            states[name] = field.zero if start is None else start
        new = Fields(**self.fields)
        object.__setattr__(new, "starts", {**self.starts, **states})
        return new

    def misfit(self, state: Any, dtypes: Mapping[str, pl.DataType] = MappingProxyType({})) -> str:
        """Explain why a state of another definition cannot be continued; empty when it can.

        Args:
            state: The stored state.
            dtypes: Types of `inputs`, if known.
        """
        if not isinstance(state, dict):
            return "the state is not one of Fields"
        for name, field in self.fields.items():
            if name not in state:
                if name not in self.starts:
                    return f"field {name!r} is missing; declare what earlier states have in it, .added({name}=...)"
            elif not field.fits(state[name], dtypes.get(name), dtypes.get(f"{name}.by")):
                return f"field {name!r} is not the state of {field.describe()}"
        return ""

    def carried(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state of another definition to this one: declared fields are added, unknown fields are left out.

        Args:
            state: A state without a `misfit`.
        """
        known = {**self.zero(), **self.starts, **state}
        return {name: list(known[name]) if isinstance(known[name], tuple) else known[name] for name in self.fields}

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
            FlowError: A field's input has a type that its aggregate does not accept.
        """
        for name, dtype in dtypes.items():
            if not (dtype.is_integer() or dtype.is_float() or dtype in (pl.String, pl.Boolean, pl.Null)):
                remedy = (
                    "fold a number or text of it, such as its len()"
                    if dtype.is_nested()
                    else "cast it to a number or to text"
                )
                raise FlowError(f"field {name!r} is of type {dtype}; {remedy}")
            if dtype == pl.String and name in self.fields and self.fields[name].numeric:
                raise FlowError(f"field {name!r} is a {self.fields[name].kind} of text; cast it to a number")

    def add(self, state: Mapping[str, Any], values: Mapping[str, Any], at: At) -> dict[str, Any]:
        """Return the state with one more element.

        Args:
            state: State so far.
            values: Values of `inputs` for the element.
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
        """The state as readers see it: one value per field."""
        return {name: field.result(state[name]) for name, field in self.fields.items()}

    def describe(self) -> str:
        """Canonical text of the fold: part of the stage's definition hash."""
        text = "Fields(" + ", ".join(f"{name}={field.describe()}" for name, field in self.fields.items()) + ")"
        starts = ", ".join(f"{name}={start!r}" for name, start in sorted(self.starts.items()))
        return f"{text}.added({starts})" if starts else text


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
        EnvelopeError: `NOT_FINITE`, `OVERFLOW`, or `BAD_PAYLOAD` for a type that the aggregate does not accept.
    """
    match value:
        case bool():
            return
        case int():
            # From -2^63 to the maximum of the largest unsigned type.
            if not -INT64 <= value < 2 * INT64:
                raise EnvelopeError(Reason.OVERFLOW, f"field {name!r} is an integer beyond 64 bits")
        case float():
            if value - value != 0:
                raise EnvelopeError(Reason.NOT_FINITE, f"field {name!r} is NaN or infinite")
        case str() if not numeric:
            if not is_utf8(value):
                raise EnvelopeError(Reason.BAD_PAYLOAD, f"field {name!r} contains half a surrogate pair")
        case _:
            raise EnvelopeError(
                Reason.BAD_PAYLOAD, f"field {name!r} is a {type(value).__name__}; use numbers, text or booleans"
            )


def is_utf8(text: str) -> bool:
    """Whether UTF-8, and therefore JSON, can encode the text."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
