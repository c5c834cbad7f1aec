"""`Emit`: what a stage passes on, as columns of the state before and after each element."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final, TypeAlias

import polars as pl

from aggregations.definition.arguments import check_callable
from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, check_column, columns_of, describe_expression, parsed
from aggregations.definition.fields import Fields
from aggregations.errors import FlowError

OLD: Final = "old."
"""Begins the names of the columns of the state before an element."""
NEW: Final = "new."
"""Begins the names of the columns of the state after an element."""
CONDITION: Final = "\0condition"  # not valid as a name of a column


@dataclass(frozen=True, init=False)
class Emit:
    """What a stage passes on for each element that it folds: a row of columns, or nothing.

        Emit(tail="tail", minutes="new.minutes", before=pl.col("old.minutes")).changed()

    The expressions read the element's columns, and those of the state's result before and after the element:
    `old.FIELD` and `new.FIELD` for each field of the stage's `Fields`. The columns replace those of the element.

    Attributes:
        columns: Column name or expression by name of the new column.
        condition: Boolean expression: elements for which it is not true are not passed on; None passes all.
    """

    columns: Mapping[str, Expression]
    condition: pl.Expr | None

    def __init__(self, **columns: Expression) -> None:
        if not columns:
            raise FlowError('Emit() needs at least one column: Emit(total="new.total")')
        for name, column in columns.items():
            check_column(f"Emit({name}=...)", column)
            if name.startswith(("_", OLD, NEW)):
                raise FlowError(f"Emit(): column names that begin with _, {OLD} and {NEW} are reserved; rename {name}")
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "condition", None)

    def when(self, condition: Expression) -> "Emit":
        """Pass on only elements for which a Boolean column or expression is true; it reads the same columns."""
        check_column("when()", condition)
        found = parsed(condition)
        new = Emit(**self.columns)
        object.__setattr__(new, "condition", found if self.condition is None else self.condition & found)
        return new

    def changed(self) -> "Emit":
        """Pass on only elements that change a field of the state of which the columns read `new.FIELD`."""
        names = sorted(name for name in columns_of(map(parsed, self.columns.values())) if name.startswith(NEW))
        if not names:
            raise FlowError("changed() needs a column that reads the new state, such as Emit(total='new.total')")
        fields = [name.removeprefix(NEW) for name in names]
        return self.when(reduce(or_, (pl.col(NEW + one).ne_missing(pl.col(OLD + one)) for one in fields)))

    def wanted(self) -> dict[str, pl.Expr]:
        """The expressions to evaluate, and the condition as `CONDITION` if there is one."""
        wanted = {name: parsed(of) for name, of in self.columns.items()}
        return wanted if self.condition is None else {**wanted, CONDITION: self.condition}

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the state that it reads."""
        names = (name for name in columns_of(self.wanted().values()) if name.startswith((OLD, NEW)))
        return tuple(sorted({name[len(NEW) :] for name in names}))

    @property
    def read(self) -> tuple[str, ...]:
        """Columns of the element that it reads."""
        names = columns_of(self.wanted().values())
        return tuple(sorted(name for name in names if not name.startswith((OLD, NEW))))

    def describe(self, fold: Fields) -> str:
        """Canonical text, with the options of the fields that only their results depend on."""
        given = [f"{name}={describe_expression(of)}" for name, of in self.columns.items()]
        if self.condition is not None:
            given.append(f"when {describe_expression(self.condition)}")
        shown = ((name, fold.fields[name].result_options()) for name in self.fields)
        given += [f"{name} {options}" for name, options in shown if options]
        return f"Emit({', '.join(given)})"


Emitting: TypeAlias = Emit | Callable[[Element[Any], Any], Iterable[Any]]
"""What a stage passes on: columns, or a function of the element and the state after it that returns a collection."""


def check_emit(emit: object, fold: object) -> None:
    """Check what a stage passes on.

    Raises:
        FlowError: It is neither a function nor an `Emit`, or an `Emit` reads something that the state does not have.
    """
    if not isinstance(emit, Emit):
        check_callable("emit=", emit)
        return
    if not isinstance(fold, Fields):
        raise FlowError("emit=Emit(...) needs a fold of Fields(...); pass a function of the element and the state")
    for name in emit.fields:
        if (field := fold.fields.get(name)) is None:
            raise FlowError(f"emit=: the state has no field {name!r}; the fields are {', '.join(fold.fields)}")
        if field.result_type(pl.Int64()) is None:
            raise FlowError(f"emit=: the result of {field.kind} {name!r} is not a column; emit it by a function")
