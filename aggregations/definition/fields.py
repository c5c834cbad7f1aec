"""Declarative folds: named fields of built-in aggregates over columns.

Nulls are skipped, as in SQL. NaN and infinities are rejected before anything is folded.
Integers are exact and must stay within 64 bits; floating-point totals agree up to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import polars as pl

from aggregations.definition.aggregates import At, FieldAggregate
from aggregations.definition.expressions import parsed
from aggregations.definition.values import check_value
from aggregations.errors import FlowError
from envelope import EnvelopeError


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
            raise FlowError("Fields() needs at least one field: Fields(orders=count())")
        for name, field in fields.items():
            if not isinstance(field, FieldAggregate):
                raise FlowError(
                    f"field {name!r} takes an aggregate such as count() or total(...); got {type(field).__name__}"
                )
            if f"{name}.by" in fields:
                raise FlowError(
                    f"field {name + '.by'!r} clashes with the order column of field {name!r}; rename one of them"
                )
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
                text or boolean. None means that nothing was folded; the other aggregates accept only None.

        Raises:
            FlowError: A field does not exist, or its aggregate cannot start with the value.
        """
        states = {}
        for name, start in starts.items():
            field = self.fields.get(name)
            if field is None:
                raise FlowError(f"added(): no field {name!r}; the fields are {', '.join(self.fields)}")
            try:
                check_value(name, start if field.plain and start is not None else 0)
            except EnvelopeError as error:
                raise FlowError(f"added(): {error.detail}") from error
            if start is not None and not (field.plain and field.fits(start)):
                raise FlowError(
                    f"added(): {field.kind} {name!r} cannot start with {start!r}; use None if nothing was folded"
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
            return "the state was not made by Fields"
        for name, field in self.fields.items():
            if name not in state:
                if name not in self.starts:
                    return f"field {name!r} is missing; declare its value in earlier states with .added({name}=...)"
            elif not field.fits(state[name], dtypes.get(name), dtypes.get(f"{name}.by")):
                return f"field {name!r} is not the state of {field.describe()}"
        return ""

    def carried(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state of another definition to this one: declared fields are added, unknown fields are left out.

        Args:
            state: A state without a `misfit`.
        """
        known = {**self.zero(), **self.starts, **state}
        return {name: _stored(known[name]) for name in self.fields}

    def zero(self) -> dict[str, Any]:
        """The state before anything was folded."""
        return {name: _stored(field.zero) for name, field in self.fields.items()}

    def inputs(self) -> dict[str, pl.Expr]:
        """The expressions to evaluate per element: `name` and, where it has one, `name.by`."""
        wanted: dict[str, pl.Expr] = {}
        for name, field in self.fields.items():
            if (value := field.input) is not None:
                wanted[name] = value
            if field.by is not None:
                wanted[f"{name}.by"] = parsed(field.by)
        return wanted

    def conditions(self) -> dict[str, pl.Expr]:
        """The conditions of fields that have one, by the field's name."""
        return {name: parsed(field.where) for name, field in self.fields.items() if field.where is not None}

    def check(self, dtypes: Mapping[str, pl.DataType]) -> None:
        """Check the types of what `inputs` evaluates to.

        Raises:
            FlowError: A field's input has a type that its aggregate does not accept.
        """
        for name, dtype in dtypes.items():
            if not (dtype.is_integer() or dtype.is_float() or dtype in (pl.String, pl.Boolean, pl.Null)):
                remedy = (
                    "fold a number or text derived from it, such as its len()"
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
            if not field.reads:
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

    def merge(self, state: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the elements of two states.

        Raises:
            EnvelopeError: `OVERFLOW`: a field would exceed its range.
        """
        return {name: field.merge(state[name], other[name]) for name, field in self.fields.items()}

    def result(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state as readers see it: one value per field."""
        return {name: field.result(state[name]) for name, field in self.fields.items()}

    def describe(self) -> str:
        """Canonical text of the fold: part of the stage's definition hash."""
        return self._text({name: field.describe() for name, field in self.fields.items()})

    def __str__(self) -> str:
        return self._text(self.fields)

    def _text(self, fields: Mapping[str, object]) -> str:
        text = f"Fields({', '.join(f'{name}={field}' for name, field in fields.items())})"
        starts = ", ".join(f"{name}={start!r}" for name, start in sorted(self.starts.items()))
        return f"{text}.added({starts})" if starts else text


def _stored(state: Any) -> Any:
    """A state as it is stored and folded: the zero of an aggregate is immutable, its states are lists."""
    return list(state) if isinstance(state, tuple) else state
