"""A flow as text, one line a step: what `headwater describe` shows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from aggregations.definition.expressions import name_of, text_of
from aggregations.definition.fields import Fields
from aggregations.definition.operators import (
    Aggregate,
    Divert,
    Filter,
    FlatMap,
    Map,
    Publish,
    PublishStates,
    Step,
    calls_of,
    keeps_columns,
)

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow

_METHODS = {
    Filter: "filter",
    Map: "map",
    FlatMap: "flat_map",
    Divert: "divert",
    Aggregate: "aggregate",
    Publish: "publish",
    PublishStates: "publish_states",
}


class Line(NamedTuple):
    """The source or a step of a flow.

    Attributes:
        step: Name of the method of `Flow` that adds it.
        what: Its content: the topic, the expression, or the name of the function.
        path: `vectorised`, also with Python for a part of the step, or `per message`; empty where nothing is computed.
    """

    step: str
    what: str
    path: str


def lines_of(flow: "Flow[Any]") -> Iterator[Line]:
    """The source and the steps of a flow, in order."""
    yield Line(
        "source",
        flow.topic.name if flow.topic else "(none)",
        "" if flow.is_columnar else "per message: tombstones have no columns",
    )
    columnar = flow.is_columnar
    for step in flow.steps:
        yield Line(_METHODS[type(step)], _content(step), _path(step, columnar=columnar))
        columnar = columnar and (isinstance(step, PublishStates) or keeps_columns(step))


def _content(step: Step | Aggregate | PublishStates) -> str:
    match step:
        case Filter(argument) | Divert(argument) | FlatMap(argument):
            return text_of(argument)
        case Map(columns, function):
            return ", ".join(columns) if function is None else name_of(function)
        case Publish(topic) | PublishStates(topic):
            return topic
        case Aggregate(name=name, key=key, fold=fold, emit=emit, window=window):
            by = text_of(key) if window is None else f"{text_of(key)}, {window}"
            text = f"{name} by {by}: {fold.describe() if isinstance(fold, Fields) else name_of(type(fold))}"
            return text if emit is None else f"{text}, emit {name_of(emit)}"


def _path(step: Step | Aggregate | PublishStates, *, columnar: bool) -> str:
    if isinstance(step, PublishStates):
        return ""
    if not columnar:
        return "per message"
    if not keeps_columns(step):
        called = "emit" if isinstance(step, Aggregate) else "its function"
        return f"per message from here: {called} replaces the values"
    calls = calls_of(step)
    return f"vectorised, with Python for {calls}" if calls else "vectorised"
