"""Changes of a flow that has begun. Each must be refused."""

from dataclasses import replace
from enum import StrEnum
from typing import Any

from aggregations.definition.flow import Aggregate, Flow, Input
from aggregations.definition.source import Json, Topic
from envelope import Siblings
from tests.simulation.functions import Seen
from tests.simulation.topology import COLUMNS, FINAL, Spec


class Change(StrEnum):
    """A change."""

    STAGE = "one more stage"
    PARTITIONING = "the consumed partition becomes part of lanes, or is no longer part of them"
    SOURCE = "siblings without an index are distinguished by other means"


def changed(spec: Spec, change: Change | None) -> Flow[Any]:
    """The flow of a world, with or without a change."""
    flow = spec.flow
    if not spec.folds and change in (Change.STAGE, Change.PARTITIONING):
        return flow.aggregate("added", "g", Seen("added"))
    if change is Change.STAGE:
        return replace(spec, stages=(*spec.stages, replace(spec.stages[-1], name="added"))).flow
    if change is Change.PARTITIONING:
        steps = (
            replace(one, co_partitioned=not one.co_partitioned) if isinstance(one, Aggregate) else one
            for one in flow.steps
        )
        return replace(flow, steps=tuple(steps))
    if change is Change.SOURCE and spec.second:
        return replace(flow, inputs=flow.inputs[:1])
    if change is Change.SOURCE:
        return replace(flow, inputs=(Input(Topic(FINAL, Json(COLUMNS), siblings=Siblings.GROUP)),))
    return flow
