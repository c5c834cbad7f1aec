"""Calls in which fields of `RunOptions` stand beside the other arguments."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from aggregations.engine.options import RunOptions

T = TypeVar("T")
_FIELDS = {one.name for one in fields(RunOptions)}


def called(function: Callable[..., T], *arguments: Any, **given: Any) -> T:
    """Call a function with its positional arguments, the options among `given`, and the other keywords."""
    options = RunOptions(**{name: value for name, value in given.items() if name in _FIELDS})
    rest = {name: value for name, value in given.items() if name not in _FIELDS}
    return function(*arguments, options, **rest)
