"""The engine that runs a flow in one process, without Spark."""

from typing import TYPE_CHECKING

from persistence.lazy import lazy

if TYPE_CHECKING:
    from aggregations.local.runner import run_local

__all__ = ["run_local"]

__getattr__, __dir__ = lazy(__name__, {"runner": ["run_local"]})
