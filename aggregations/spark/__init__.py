"""The engine that runs a flow on Spark.

Importing this package imports nothing else: Spark's daemon begins here, in every run.
"""

from typing import TYPE_CHECKING

from persistence.lazy import lazy

if TYPE_CHECKING:
    from aggregations.spark.aggregator import Aggregator
    from aggregations.spark.runner import run_flow

__all__ = ["Aggregator", "run_flow"]

__getattr__, __dir__ = lazy(__name__, {"aggregator": ["Aggregator"], "runner": ["run_flow"]})
