"""Flows, folds, windows and verdicts. Only `aggregations.spark` knows Spark.

What a flow is written with:

    from aggregations import Fields, Flow, Topic, count, total
"""

from aggregations.element import Element, Record
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from aggregations.fields import Fields, count, first, last, maximum, mean, minimum, total
from aggregations.flow import Flow
from aggregations.folds import Fold
from aggregations.source import Json, Raw, Topic

__all__ = [
    "DefinitionChangedError",
    "Element",
    "Fields",
    "Flow",
    "FlowError",
    "Fold",
    "Json",
    "Raw",
    "Record",
    "RunRefusedError",
    "Topic",
    "count",
    "first",
    "last",
    "maximum",
    "mean",
    "minimum",
    "total",
]
