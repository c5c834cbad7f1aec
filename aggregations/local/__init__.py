"""The engine that runs a flow in one process, without Spark."""

from typing import TYPE_CHECKING

from persistence.lazy import lazy

if TYPE_CHECKING:
    from aggregations.local.refold import fold_range
    from aggregations.local.runner import run_local

__all__ = ["fold_range", "run_local"]

__getattr__, __dir__ = lazy(__name__, {"refold": ["fold_range"], "runner": ["run_local"]})
