"""The engine that runs a flow on Spark."""

from aggregations.spark.engine import Engine, run_flow

__all__ = ["Engine", "run_flow"]
