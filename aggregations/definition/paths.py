"""What a step needs: which path it takes, which functions it calls, and which expressions it evaluates."""

from collections.abc import Iterable

import polars as pl

from aggregations.definition.expressions import parsed
from aggregations.definition.fields import Fields
from aggregations.definition.judging import Judging
from aggregations.definition.lookups import LatestRow, Lookup
from aggregations.definition.operators import (
    Aggregate,
    Branch,
    Divert,
    Filter,
    FlatMap,
    Map,
    Publish,
    PublishStates,
    Step,
    is_columnar,
)


def is_vectorised(step: Step | Aggregate) -> bool:
    """Whether a step needs no Python call per element."""
    return not calls_of(step)


def keeps_columns(step: Step | Aggregate) -> bool:
    """Whether the columns after a step are known: no function replaces the elements' values."""
    match step:
        case Map(_, function):
            return function is None
        case Aggregate():
            return not step.makes
        case FlatMap(items):
            return is_columnar(items)
        case _:
            return True


def calls_fold(stage: Aggregate) -> bool:
    """Whether the fold of a stage reads elements, and not only the columns of `Aggregate.inputs`."""
    fold = stage.fold
    return not fold.is_known if isinstance(fold, Judging) else not isinstance(fold, Fields)


def calls_of(step: Step | Aggregate) -> str:
    """What a step calls for each element in Python, as text; empty for a vectorised step."""
    match step:
        case Filter(argument) | Divert(argument):
            return "" if is_columnar(argument) else "its function"
        case Map(_, function):
            return "" if function is None else "its function"
        case FlatMap(items):
            return "" if is_columnar(items) else "its function"
        case Publish():
            return "the encoding of its messages"
        case Lookup():
            return ""
        case Branch(when=when):
            called = {"its function": when is not None and not is_columnar(when)}
            return ", ".join([name for name, calls in called.items() if calls] + ["its steps"] * _calls(step.steps))
        case Aggregate(fold=Judging() as judging):
            return "" if judging.is_known else "its filter"
        case Aggregate(key=key, fold=fold):
            known = isinstance(fold, Fields | LatestRow)
            called = {"its key": not is_columnar(key), "its fold": not known, "emit": step.makes}
            return ", ".join(name for name, calls in called.items() if calls)


def _calls(steps: Iterable[Step]) -> bool:
    return not all(map(is_vectorised, steps))


def expressions_of(step: Step | Aggregate | PublishStates) -> list[pl.Expr]:
    """Every expression of a step."""
    arguments: list[object]
    match step:
        case Filter(argument) | Divert(argument) | FlatMap(argument) | Lookup(key=argument):
            arguments = [argument]
        case Publish(topic, key):
            arguments = [key, *([topic] if step.topics else [])]
        case Branch(when=when):
            return [
                *([parsed(when)] if isinstance(when, str | pl.Expr) else []),
                *(one for inner in step.steps for one in expressions_of(inner)),
            ]
        case Map(columns):
            arguments = list(columns.values())
        case Aggregate(key=key):
            rows = [name for name, _ in step.fold.columns] if isinstance(step.fold, LatestRow) else []
            arguments = [key, *step.inputs().values(), *rows]
        case _:
            arguments = []
    return [parsed(one) for one in arguments if isinstance(one, str | pl.Expr)]
