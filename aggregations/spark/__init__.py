"""The engine that runs a flow on Spark."""

from aggregations.spark.engine import run_flow

__all__ = ["run_flow"]
