"""The engine that runs a flow on Spark.

Importing this package imports nothing else: Spark's daemon begins here, in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aggregations.spark.engine import run_flow

__all__ = ["run_flow"]


def __getattr__(name: str) -> Any:
    if name == "run_flow":
        return import_module("aggregations.spark.engine").run_flow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
