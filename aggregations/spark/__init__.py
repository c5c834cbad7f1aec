"""The engine that runs a flow on Spark."""
