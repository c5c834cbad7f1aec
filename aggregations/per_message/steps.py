"""The steps between source and stages, applied to elements: the per-message path."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import NO_COLUMNS, Expression, is_mapping
from aggregations.definition.flow import Divert, Filter, FlatMap, Map, Predicate, Publish, Step
from aggregations.definition.lookups import Lookup
from aggregations.definition.operators import Branch
from aggregations.definition.schemas import Schema, schema_after
from aggregations.per_message.cause import Cause, refusal
from aggregations.per_message.lookups import Tables, look_up, no_tables
from aggregations.per_message.publishing import (
    Marking,
    OutputMessage,
    Publisher,
    at_fork,
    names_topic,
    of_fork,
    output_of,
)
from aggregations.per_message.rows import evaluate_elements
from envelope import (
    EnvelopeError,
    Node,
    Reason,
)
from envelope.raised import Raised


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


@dataclass(slots=True)
class Applied:
    """Result of steps applied to elements.

    `marking` marks what they publish, if given; `tables` has what they look up; `publisher` makes messages.
    """

    elements: list[Element[Any]]
    schema: Schema
    rejected: list[RejectedElement] = field(default_factory=list)
    outputs: list[OutputMessage] = field(default_factory=list)
    filtered: int = 0
    marking: Marking | None = None
    tables: Tables = no_tables
    publisher: Publisher | None = None

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
    publisher: Publisher | None = None,
) -> Applied:
    """Run the steps in order.

    If any flat-mapped item of a record fails in a step, the record is rejected as a whole.

    Args:
        steps: The steps.
        elements: The elements.
        schema: Columns before the steps.
        marking: Marks what the steps publish.
        tables: What the steps look up.
        publisher: Makes the messages of publish steps; None for `output_of`.
    """
    return Applied(list(elements), schema, marking=marking, tables=tables, publisher=publisher).after(steps)


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
        applied.schema = schema_after(step, applied.schema)
        return
    rows = applied.columns(step.columns)
    rows = applied.survivors(list(map(_beside, applied.elements, rows)))
    applied.elements = [
        element.of({**element.value, **row}) for element, row in zip(applied.elements, rows, strict=True)
    ]
    applied.schema = schema_after(step, applied.schema)


def _flat_map(applied: Applied, step: FlatMap) -> None:
    if not callable(step.items):
        _explode(applied, step.column, step.items)
        applied.schema = schema_after(step, applied.schema)
        return
    function = step.items
    collections = applied.each(lambda element: list(function(element)))
    applied.elements = [
        element.nth(n, value)
        for element, collection in zip(applied.elements, collections, strict=True)
        for n, value in enumerate(collection)
    ]
    applied.schema = schema_after(step, applied.schema)


def _explode(applied: Applied, column: str, items: Expression) -> None:
    made = map(_beside, applied.elements, applied.evaluated({column: items}))
    rows = applied.survivors([_listed(row, column) for row in made])
    applied.elements = [
        element.nth(n, {**element.value, column: item})
        for element, row in zip(applied.elements, rows, strict=True)
        for n, item in enumerate(row[column] or ())
    ]


def _beside(element: Element[Any], row: Any) -> Any:
    """New columns of an element, or why it has none: they are added to the columns of its value."""
    if isinstance(row, EnvelopeError) or is_mapping(element.value):
        return row
    return EnvelopeError(Reason.MISSING_FIELD, NO_COLUMNS)


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
    output = (applied.publisher or output_of)(step, applied.marking)
    results = [called(output, *pair) for pair in zip(applied.elements, keys, topics, strict=True)]
    applied.outputs += [one for one in applied.survivors(results) if one is not None]


def _branch(applied: Applied, step: Branch) -> None:
    taken = applied.elements
    if step.when is not None:
        leaves = _true(applied, step.when)
        taken = [element for element, away in zip(applied.elements, leaves, strict=True) if away]
        applied.elements = [element for element, away in zip(applied.elements, leaves, strict=True) if not away]
    depth = len(taken[0].indices) if taken else 0
    marking = at_fork(applied.marking, depth)
    inner = apply_steps(step.steps, taken, applied.schema, marking, applied.tables, applied.publisher)
    applied.rejected += inner.rejected
    applied.filtered += inner.filtered
    applied.outputs += of_fork(inner.outputs, depth)
    if failed := {one.element.own for one in inner.rejected if one.whole}:
        applied.elements = [element for element in applied.elements if element.own not in failed]


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
