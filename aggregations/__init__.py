"""Flows, folds, windows and verdicts. Only `aggregations.spark` knows Spark."""
