"""Flows: how to define them, bind them to stores, and run them.

    from aggregations import Fields, Flow, MemoryRunner, Topic, count, run_flow, total

Importing this package does not import Spark; the first access to `run_flow` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.folds import Fold
from aggregations.definition.source import Json, Raw, Topic
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner

if TYPE_CHECKING:
    from aggregations.spark import run_flow

__all__ = [
    "DefinitionChangedError",
    "Element",
    "Fields",
    "Flow",
    "FlowError",
    "Fold",
    "Json",
    "MemoryRunner",
    "Raw",
    "Record",
    "RunRefusedError",
    "Topic",
    "bind",
    "count",
    "first",
    "last",
    "maximum",
    "mean",
    "minimum",
    "run_flow",
    "total",
]


def __getattr__(name: str) -> Any:
    if name == "run_flow":
        return import_module("aggregations.spark").run_flow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
