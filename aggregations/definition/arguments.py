"""Checks of the arguments with which a flow is defined."""

from typing import Any

import polars as pl

from aggregations.definition.expressions import expression
from aggregations.definition.folds import Fold, check_state
from aggregations.errors import FlowError
from envelope import EnvelopeError
from envelope.limits import check_topic


def topic_name(name: str) -> str:
    """The name of a topic.

    Raises:
        FlowError: Kafka does not allow it.
    """
    try:
        return check_topic(name)
    except EnvelopeError as error:
        raise FlowError(f"{name!r} is not a topic name that Kafka allows") from error


def check_zero(name: str, fold: Fold[Any]) -> None:
    """Check that a stage's fold starts from a state.

    Raises:
        FlowError: `zero` raises, or a JSON round trip would change what it returns.
    """
    try:
        check_state(fold.zero())
    except Exception as error:  # user code may raise anything
        detail = error.detail if isinstance(error, EnvelopeError) else type(error).__name__
        raise FlowError(f"stage {name!r}: zero() of its fold does not return a state: {detail}") from error


def check_callable(what: str, function: Any, *, needed: bool = False) -> None:
    """Check that an argument is a function.

    Raises:
        FlowError: It is not; without `needed`, None is allowed.
    """
    if not callable(function) and (needed or function is not None):
        raise FlowError(f"{what} takes a function, not a {type(function).__name__}")


def check_argument(argument: Any) -> None:
    """Check that an argument is a column's name, an expression over one row, or a function.

    Raises:
        FlowError: It is none of them.
    """
    if isinstance(argument, str | pl.Expr):
        expression(argument)
    elif not callable(argument):
        raise FlowError(f"a {type(argument).__name__} is neither a column, an expression nor a callable")
