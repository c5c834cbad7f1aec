"""The steps between source and stages, applied to elements: the per-message path."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, key_bytes
from aggregations.definition.flow import Divert, Filter, FlatMap, Map, Predicate, Publish, Step
from aggregations.definition.lookups import Lookup
from aggregations.definition.operators import Branch
from aggregations.definition.schemas import Schema, schema_after
from aggregations.per_message.cause import Cause, refusal
from aggregations.per_message.lookups import Tables, look_up, no_tables
from aggregations.per_message.rows import evaluate_elements
from envelope import (
    Envelope,
    EnvelopeError,
    Hop,
    Node,
    Position,
    Reason,
    Route,
    encode,
)
from envelope.raised import Raised
from envelope.redrive import HEALED, LATE


@dataclass(frozen=True, slots=True)
class RejectedElement:
    """An element that a step could not process, or that the flow diverts.

    Attributes:
        element: The element as it stood before the step.
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        whole: Every other item of its record is rejected with it.
        raised: Exception of user code, when that is the reason; else None.
    """

    element: Element[Any]
    reason: Reason
    detail: str
    whole: bool = True
    raised: Raised | None = None

    @classmethod
    def because(cls, element: Element[Any], cause: Cause) -> "RejectedElement":
        """An element that cannot be used, with its whole record."""
        return cls(element, cause.reason, cause.detail, raised=cause.raised)


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A message to be produced.

    Attributes:
        topic: Topic.
        key: Its key.
        value: Its value.
        headers: Its headers.
        order: Position of the element; outputs of one root partition are produced in this order.
        own: Coordinates of the element's record; None for a snapshot.
        indices: Its index in each flat-map.
    """

    topic: str
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes | None], ...] = ()
    order: Position = ()
    own: Node | None = None
    indices: tuple[int, ...] = ()


Marking: TypeAlias = Callable[[Element[Any]], Element[Any] | None]
"""Returns an element with the route that its output is marked with; None if it must not be published."""


@dataclass(slots=True)
class Applied:
    """Result of steps applied to elements; `marking` marks what they publish, if given; `tables` has what they look up."""

    elements: list[Element[Any]]
    schema: Schema
    rejected: list[RejectedElement] = field(default_factory=list)
    outputs: list[OutputMessage] = field(default_factory=list)
    filtered: int = 0
    marking: Marking | None = None
    tables: Tables = no_tables

    def after(self, steps: Sequence[Step]) -> "Applied":
        """Run further steps, and return the same object."""
        for step in steps:
            _STEPS[type(step)](self, step)
        return self

    def each(self, argument: Predicate | Callable[[Element[Any]], Any]) -> list[Any]:
        """Evaluate an argument for every element; elements for which it raises are rejected and removed."""
        if isinstance(argument, str | pl.Expr):
            return [row["_"] for row in self.columns({"_": argument})]
        return self.survivors([called(argument, element) for element in self.elements])

    def columns(self, wanted: Mapping[str, Expression]) -> list[Any]:
        """Evaluate expressions for every element, like `each`: one mapping of names to values per element."""
        return self.survivors(self.evaluated(wanted))

    def evaluated(self, wanted: Mapping[str, Expression]) -> list[Any]:
        """As `columns`, with an `EnvelopeError` for each element for which it fails."""
        return evaluate_elements(self.elements, wanted, self.schema)

    def survivors(self, results: Sequence[Any]) -> list[Any]:
        """Remove the elements whose result is an error, with every other item of their records."""
        causes = {
            element.own: result
            for element, result in zip(self.elements, results, strict=True)
            if isinstance(result, EnvelopeError)
        }
        if not causes:
            return list(results)
        kept = []
        survivors = []
        for element, result in zip(self.elements, results, strict=True):
            if element.own in causes:
                self.rejected.append(RejectedElement.because(element, Cause.of(causes[element.own])))
            else:
                kept.append(element)
                survivors.append(result)
        self.elements = kept
        return survivors


def apply_steps(
    steps: Sequence[Step],
    elements: Sequence[Element[Any]],
    schema: Schema,
    marking: Marking | None = None,
    tables: Tables = no_tables,
) -> Applied:
    """Run the steps in order.

    If any flat-mapped item of a record fails in a step, the record is rejected as a whole.

    Args:
        steps: The steps.
        elements: The elements.
        schema: Columns before the steps; None when a callable determines the value.
        marking: Marks what the steps publish.
        tables: What the steps look up.
    """
    return Applied(list(elements), schema, marking=marking, tables=tables).after(steps)


def withhold(applied: Applied) -> None:
    """Remove outputs that a record, or a diverted item of it, published before the step that rejected it.

    They are published when the record comes back, as messages that readers have not received.
    """
    rejected = [(one.element.own, () if one.whole else one.element.indices) for one in applied.rejected]
    applied.outputs = without_rejected(applied.outputs, rejected)


def without_rejected(
    outputs: Sequence[OutputMessage], rejected: Iterable[tuple[Node, tuple[int, ...]]]
) -> list[OutputMessage]:
    """The outputs of other records and items than these: own coordinates, and indices, none for the whole record."""
    items: dict[Node | None, list[tuple[int, ...]]] = {}
    for own, indices in rejected:
        items.setdefault(own, []).append(indices)
    return [one for one in outputs if not any(_within(item, one.indices) for item in items.get(one.own, ()))]


def _within(item: tuple[int, ...], indices: tuple[int, ...]) -> bool:
    """Whether an output belongs to an item; an output published before the flat-map belongs to all of its items."""
    return indices[: len(item)] == item


def _filter(applied: Applied, step: Filter) -> None:
    kept = _true(applied, step.keep)
    applied.filtered += sum(1 for keep in kept if not keep)
    applied.elements = [element for element, keep in zip(applied.elements, kept, strict=True) if keep]


def _divert(applied: Applied, step: Divert) -> None:
    away = _true(applied, step.when)
    for element, leaves in zip(applied.elements, away, strict=True):
        if leaves:
            applied.rejected.append(RejectedElement(element, Reason.DIVERTED, "the flow diverted it", whole=False))
    applied.elements = [element for element, leaves in zip(applied.elements, away, strict=True) if not leaves]


def _map(applied: Applied, step: Map) -> None:
    if step.function is not None:
        values = applied.each(step.function)
        applied.elements = [element.of(value) for element, value in zip(applied.elements, values, strict=True)]
        applied.schema = None
        return
    rows = applied.columns(step.columns)
    applied.elements = [
        element.of({**element.value, **row}) for element, row in zip(applied.elements, rows, strict=True)
    ]
    if applied.schema is not None:
        applied.schema = schema_after(step, applied.schema)


def _flat_map(applied: Applied, step: FlatMap) -> None:
    if not callable(step.items):
        _explode(applied, step.column, step.items)
        if applied.schema is not None:
            applied.schema = schema_after(step, applied.schema)
        return
    function = step.items
    collections = applied.each(lambda element: list(function(element)))
    applied.elements = [
        element.nth(n, value)
        for element, collection in zip(applied.elements, collections, strict=True)
        for n, value in enumerate(collection)
    ]
    applied.schema = None


def _explode(applied: Applied, column: str, items: Expression) -> None:
    rows = applied.survivors([_listed(row, column) for row in applied.evaluated({column: items})])
    applied.elements = [
        element.nth(n, {**element.value, column: item})
        for element, row in zip(applied.elements, rows, strict=True)
        for n, item in enumerate(row[column] or ())
    ]


def _listed(row: Any, column: str) -> Any:
    """The row, or why it has no list to flat-map."""
    if isinstance(row, EnvelopeError) or isinstance(row[column], list | tuple | None):
        return row
    return EnvelopeError(Reason.TRANSFORM_FAILED, "flat_map() needs a list")


def _publish(applied: Applied, step: Publish) -> None:
    keys = [element.key for element in applied.elements] if step.key is None else applied.each(step.key)
    topics = [None] * len(keys) if names_topic(step) else applied.each(step.topic)
    if len(topics) < len(keys):  # no topic could be chosen for some elements
        keys = [element.key for element in applied.elements] if step.key is None else applied.each(step.key)
    output = output_of(step, applied.marking)
    results = [called(output, *pair) for pair in zip(applied.elements, keys, topics, strict=True)]
    applied.outputs += [one for one in applied.survivors(results) if one is not None]


def _branch(applied: Applied, step: Branch) -> None:
    taken = applied.elements
    if step.when is not None:
        leaves = _true(applied, step.when)
        taken = [element for element, away in zip(applied.elements, leaves, strict=True) if away]
        applied.elements = [element for element, away in zip(applied.elements, leaves, strict=True) if not away]
    depth = len(taken[0].indices) if taken else 0
    inner = apply_steps(step.steps, taken, applied.schema, at_fork(applied.marking, depth), applied.tables)
    applied.rejected += inner.rejected
    applied.filtered += inner.filtered
    applied.outputs += of_fork(inner.outputs, depth)
    if failed := {one.element.own for one in inner.rejected if one.whole}:
        applied.elements = [element for element in applied.elements if element.own not in failed]


def at_fork(marking: Marking | None, depth: int) -> Marking | None:
    """Marks what a branch publishes as the element that entered it: the ledger has no items that a branch makes.

    Args:
        marking: The marking of the main line.
        depth: Number of flat-maps before the branch.
    """
    if marking is None:
        return None

    def marked(element: Element[Any]) -> Element[Any] | None:
        if len(element.indices) == depth:
            return marking(element)
        found = marking(replace(element, indices=element.indices[:depth]))
        return None if found is None else replace(element, route=found.route)

    return marked


def of_fork(outputs: Iterable[OutputMessage], depth: int) -> list[OutputMessage]:
    """Outputs of a branch, as outputs of the elements that entered it: they are withheld with these."""
    return [replace(one, indices=one.indices[:depth]) for one in outputs]


def names_topic(step: Publish) -> bool:
    """Whether the topic of an output needs no expression: there is only one, or a function chooses it."""
    return not step.topics or not isinstance(step.topic, str | pl.Expr)


def output_of(step: Publish, marking: Marking | None) -> Callable[[Element[Any], Any, Any], OutputMessage | None]:
    """Return the function that makes a published message; None for no message.

    Its arguments are an element, its key, and its topic if an expression chooses that. It raises `EnvelopeError` if the
    topic is not one of the step's.
    """

    def output(element: Element[Any], key: Any, topic: Any) -> OutputMessage | None:
        if names_topic(step):
            topic = step.topic(element) if callable(step.topic) else step.topic
        if step.topics and topic not in step.topics:
            raise EnvelopeError(Reason.BAD_TOPIC, "publish() chose a topic that is not in topics=")
        key = key_bytes(key)
        marked = element if marking is None else marking(element)
        if marked is None:
            return None
        order = element.lineage.standing(indices=element.indices).position
        return OutputMessage(
            topic, key, encode(_republished(marked, step, key, topic)), (), order, element.own, element.indices
        )

    output.__qualname__ = f"publish to {', '.join(step.targets)}"
    return output


def _republished(element: Element[Any], step: Publish, key: bytes | None, topic: str) -> Envelope:
    """The envelope of a published element: its chain with this hop appended."""
    hop = Hop(
        element.topic,
        element.partition,
        element.offset,
        via=step.name,
        index=_index(element.indices),
        rekeyed=key != element.key,
        keyless=key is None or (element.key is None and bool(element.chain)),
        topic_id=element.own.topic_id,
        cluster=element.own.cluster,
    )
    if step.value is not None:
        payload, content_type = step.value(element), ""
    else:
        payload, content_type = msgspec.json.encode(element.value), "application/json"
    return Envelope(
        payload=payload,
        chain=(*element.chain, *_late(element, hop), hop),
        key=key,
        event_id=element.event_id,
        event_time_us=element.event_time_us,
        content_type=content_type,
        destination=topic,
    )


def _late(element: Element[Any], hop: Hop) -> tuple[Hop, ...]:
    """Marks a late-folded element: a reader that has received newer events must not treat it as a copy."""
    if element.route is Route.PLAIN:
        return ()
    lineage, missing = element.lineage, element.route is Route.MISSING
    if lineage.healed if missing else lineage.pass_through:
        return ()
    return (replace(hop, via=HEALED if missing else LATE, index=None, rekeyed=False, pass_through=True),)


def _index(indices: tuple[int, ...]) -> int:
    """A unique number for an item of nested collections, the same in every run.

    Raises:
        EnvelopeError: A nested collection has too many items to be numbered.
    """
    if len(indices) < 2:
        return indices[0] if indices else 0
    bits = 32 // len(indices)
    if any(one >> bits for one in indices):
        raise EnvelopeError(
            Reason.TRANSFORM_FAILED, f"one of {len(indices)} nested collections has more than {1 << bits} items"
        )
    index = 0
    for one in indices:
        index = index << bits | one
    return index


_STEPS: Mapping[type, Callable[[Applied, Any], None]] = {
    Filter: _filter,
    Divert: _divert,
    Map: _map,
    FlatMap: _flat_map,
    Lookup: look_up,
    Publish: _publish,
    Branch: _branch,
}


def _true(applied: Applied, predicate: Predicate) -> list[bool]:
    if isinstance(predicate, str | pl.Expr):
        return [bool(result) for result in applied.each(predicate)]
    return applied.each(truth_of(predicate))


def truth_of(predicate: Callable[[Element[Any]], Any]) -> Callable[[Element[Any]], bool]:
    """Return the predicate with its result as a boolean."""

    def truth(element: Element[Any]) -> bool:
        return bool(predicate(element))

    truth.__qualname__ = getattr(predicate, "__qualname__", "a step")
    return truth


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of user code; an `EnvelopeError` if it raises."""
    try:
        return function(*arguments)
    except Exception as error:  # user code may raise anything
        return refusal(error, Reason.TRANSFORM_FAILED, getattr(function, "__qualname__", "a step"))
