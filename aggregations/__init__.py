"""Flows, folds, windows and verdicts. Only `aggregations.spark` knows Spark.

What a flow is written with:

    from aggregations import Fields, Flow, Topic, count, total
"""

from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields, count, first, last, maximum, mean, minimum, total
from aggregations.definition.flow import Flow
from aggregations.definition.folds import Fold
from aggregations.definition.source import Json, Raw, Topic
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError

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
