"""Where the elements of several inputs meet, message by message."""

from collections.abc import Sequence
from typing import Any

from aggregations.definition.element import Element
from aggregations.definition.expressions import is_mapping
from aggregations.definition.flow import Flow
from aggregations.definition.inputs import merged_schema
from aggregations.definition.schemas import Passed
from aggregations.per_message.publishing import Marking
from aggregations.per_message.steps import Applied, apply_steps


def merged(flow: Flow[Any], elements: Sequence[Element[Any]], marking: Marking | None = None) -> Applied:
    """Run elements through the steps of their inputs. After these, all have the same columns.

    Args:
        flow: A flow with several sources.
        elements: Elements of any of them.
        marking: Marks what the steps publish.
    """
    schema = merged_schema(flow.inputs)
    whole = Applied([], schema, marking=marking)
    for one in flow.inputs:
        mine = [element for element in elements if element.topic == one.topic.name]
        applied = apply_steps(one.steps, mine, one.topic.schema, marking)
        whole.rejected += applied.rejected
        whole.outputs += applied.outputs
        whole.filtered += applied.filtered
        found = applied.elements
        whole.elements += found if isinstance(schema, Passed) else [_with_columns(element, schema) for element in found]
    return whole


def _with_columns(element: Element[Any], columns: Sequence[str] | Any) -> Element[Any]:
    """The element with exactly these columns: null where its input does not have one. A tombstone has none."""
    value = element.value
    return element.of({name: value.get(name) for name in columns}) if is_mapping(value) else element
