"""Which step of a flow removed an element before a stage: a filter, a branch, or a `flat_map` without items."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aggregations.definition.description import line_of
from aggregations.definition.element import Element
from aggregations.definition.flow import Flow
from aggregations.definition.operators import Branch, Step
from aggregations.definition.schemas import Schema
from aggregations.per_message.merging import merged
from aggregations.per_message.steps import Applied


class Removed(NamedTuple):
    """An element that a step removed from the main line.

    Attributes:
        indices: Its index in each flat-map before the step.
        step: The step, as `describe` shows it.
        branch: The branch that it took; empty if it took none.
    """

    indices: tuple[int, ...]
    step: str
    branch: str = ""


def removed(
    flow: Flow[Any], index: int, elements: Sequence[Element[Any]], schema: Schema, steps: Sequence[Step]
) -> Iterator[Removed]:
    """The elements that steps remove; those that fail in a step are not among them.

    Args:
        flow: The flow.
        index: Index of the stage that the steps lead to; the number of stages for those after the last one.
        elements: The elements before the steps, all of one record.
        schema: Their columns.
        steps: The steps.
    """
    if index == 0 and flow.merges and elements:
        [own] = [one for one in flow.inputs if one.topic.name == elements[0].topic]
        yield from _removed(own.steps, elements, own.topic.schema)
        met = merged(flow, elements)
        elements, schema = met.elements, met.schema
    yield from _removed(steps, elements, schema)


def _removed(steps: Sequence[Step], elements: Sequence[Element[Any]], schema: Schema) -> Iterator[Removed]:
    applied = Applied(list(elements), schema)
    for step in steps:
        before = applied.elements
        applied.after([step])
        if any(one.whole for one in applied.rejected):
            return
        diverted = {(one.element.own, one.element.indices) for one in applied.rejected}
        for element in before:
            stays = any(one.indices[: len(element.indices)] == element.indices for one in applied.elements)
            if not stays and (element.own, element.indices) not in diverted:
                yield Removed(element.indices, line_of(step), step.name if isinstance(step, Branch) else "")
