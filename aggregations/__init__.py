"""Flows: how to define them, bind them to stores, and run them.

    from aggregations import Fields, Flow, MemoryRunner, Topic, count, run_flow, total

Importing this package imports nothing else: a name is imported when it is first used, and Spark only for `run_flow`,
`plan_flow` and `Aggregator`.
"""

from typing import TYPE_CHECKING, Final

from persistence.lazy import lazy

if TYPE_CHECKING:
    from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
    from aggregations.definition.aggregates_exact import collect, histogram, standard_deviation, variance
    from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
    from aggregations.definition.element import Element, Record
    from aggregations.definition.emit import Emit
    from aggregations.definition.fields import Fields
    from aggregations.definition.flow import Flow
    from aggregations.definition.folds import Fold
    from aggregations.definition.sessions import SessionWindow, session
    from aggregations.definition.source import Json, Raw, Topic
    from aggregations.definition.window_columns import window_columns
    from aggregations.definition.windows import Window, hopping, tumbling
    from aggregations.engine.options import RunOptions
    from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
    from aggregations.local import run_local
    from aggregations.run.binding import bind
    from aggregations.run.memory import MemoryRunner
    from aggregations.run.snapshots import Latest, Snapshot, read_snapshot
    from aggregations.spark import Aggregator, run_flow
    from aggregations.spark.checks import plan_flow

__all__ = [
    "Aggregator",
    "DefinitionChangedError",
    "Element",
    "Emit",
    "Fields",
    "Flow",
    "FlowError",
    "Fold",
    "Json",
    "Latest",
    "MemoryRunner",
    "Raw",
    "Record",
    "RunOptions",
    "RunRefusedError",
    "SessionWindow",
    "Snapshot",
    "Topic",
    "Window",
    "approximate_distinct",
    "bind",
    "collect",
    "count",
    "first",
    "histogram",
    "hopping",
    "last",
    "maximum",
    "mean",
    "minimum",
    "plan_flow",
    "quantiles",
    "read_snapshot",
    "run_flow",
    "run_local",
    "session",
    "standard_deviation",
    "top",
    "total",
    "tumbling",
    "variance",
    "window_columns",
]

_MODULES: Final = {
    "definition.aggregates": ("count", "first", "last", "maximum", "mean", "minimum", "total"),
    "definition.aggregates_exact": ("collect", "histogram", "standard_deviation", "variance"),
    "definition.aggregates_sketches": ("approximate_distinct", "quantiles", "top"),
    "definition.element": ("Element", "Record"),
    "definition.emit": ("Emit",),
    "definition.fields": ("Fields",),
    "definition.flow": ("Flow",),
    "definition.folds": ("Fold",),
    "definition.sessions": ("SessionWindow", "session"),
    "definition.source": ("Json", "Raw", "Topic"),
    "definition.window_columns": ("window_columns",),
    "definition.windows": ("Window", "hopping", "tumbling"),
    "engine.options": ("RunOptions",),
    "errors": ("DefinitionChangedError", "FlowError", "RunRefusedError"),
    "run.binding": ("bind",),
    "run.memory": ("MemoryRunner",),
    "run.snapshots": ("Latest", "Snapshot", "read_snapshot"),
    "local": ("run_local",),
    "spark": ("Aggregator", "run_flow"),
    "spark.checks": ("plan_flow",),
}

__getattr__, __dir__ = lazy(__name__, _MODULES)
