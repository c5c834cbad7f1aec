"""The steps between source and stages, applied to elements: the per-message path."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, key_bytes
from aggregations.definition.flow import END_OF_FLOW, Aggregate, Divert, Filter, FlatMap, Map, Predicate, Publish, Step
from aggregations.definition.operators import Schema, schema_after
from aggregations.errors import FlowError
from aggregations.per_message.cause import Cause, refusal
from aggregations.per_message.ledger import Entry, Ledger
from aggregations.per_message.rows import evaluate_elements
from aggregations.per_message.stage import Arrival, inputs_of, passed_on
from envelope import (
    Envelope,
    EnvelopeError,
    Hop,
    Lineage,
    Node,
    Position,
    Reason,
    Route,
    Siblings,
    Standing,
    Verdict,
    encode,
)
from envelope.raised import Raised
from envelope.redrive import HEALED, LATE


@dataclass(frozen=True, slots=True)
class Rejected:
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
    def because(cls, element: Element[Any], cause: Cause) -> "Rejected":
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


@dataclass(slots=True)
class Applied:
    """Result of steps applied to elements."""

    elements: list[Element[Any]]
    schema: Schema
    rejected: list[Rejected] = field(default_factory=list)
    outputs: list[OutputMessage] = field(default_factory=list)
    filtered: int = 0


@dataclass(slots=True)
class Tail:
    """Elements that are passed on after the last stage.

    Attributes:
        applied: The elements.
        filled: Entries of the ledger that are no longer missing.
        copies: Redriven elements that were not missing.
        items: For records with only some missing items, the indices of these items in the tail's flat-maps.
    """

    applied: Applied
    filled: set[Entry] = field(default_factory=set)
    copies: int = 0
    items: dict[Node, frozenset[Position]] = field(default_factory=dict)


def apply_steps(
    steps: Sequence[Step],
    elements: Sequence[Element[Any]],
    schema: Schema,
    only: Mapping[Node, frozenset[Position]] | None = None,
) -> Applied:
    """Run the steps in order.

    If any flat-mapped item of a record fails in a step, the record is rejected as a whole.

    Args:
        steps: The steps.
        elements: The elements.
        schema: Columns before the steps; None when a callable determines the value.
        only: Items to pass on, by their indices, for the given records.
    """
    applied = Applied(list(elements), schema)
    for step in steps:
        _STEPS[type(step)](applied, step)
        if only and isinstance(step, FlatMap):
            applied.elements = [one for one in applied.elements if one.own not in only or _leads_to(one, only[one.own])]
    return applied


def withhold(applied: Applied) -> None:
    """Remove outputs that a record, or a diverted item of it, published before the step that rejected it.

    After the last stage they are published when the record is redriven, as messages that readers have not received.
    """
    whole = frozenset(one.element.own for one in applied.rejected if one.whole)
    items: dict[Node | None, list[tuple[int, ...]]] = {}
    for one in applied.rejected:
        if not one.whole:
            items.setdefault(one.element.own, []).append(one.element.indices)
    if whole or items:
        applied.outputs = [
            output
            for output in without_rejected(applied.outputs, whole)
            if not any(_within(item, output.indices) for item in items.get(output.own, ()))
        ]


def without_rejected(outputs: Iterable[OutputMessage], records: Collection[Node | None]) -> list[OutputMessage]:
    """The outputs of other records than these."""
    return [output for output in outputs if output.own not in records]


def _within(item: tuple[int, ...], indices: tuple[int, ...]) -> bool:
    """Whether an output belongs to an item; an output published before the flat-map belongs to all of its items."""
    return indices[: len(item)] == item


def _leads_to(element: Element[Any], items: frozenset[Position]) -> bool:
    indices = element.indices
    return any(item[: len(indices)] == indices[: len(item)] for item in items)


def _filter(applied: Applied, step: Filter) -> None:
    kept = _true(applied, step.keep)
    applied.filtered += sum(1 for keep in kept if not keep)
    applied.elements = [element for element, keep in zip(applied.elements, kept, strict=True) if keep]


def _divert(applied: Applied, step: Divert) -> None:
    away = _true(applied, step.when)
    for element, leaves in zip(applied.elements, away, strict=True):
        if leaves:
            applied.rejected.append(Rejected(element, Reason.DIVERTED, "the flow diverts it", whole=False))
    applied.elements = [element for element, leaves in zip(applied.elements, away, strict=True) if not leaves]


def _map(applied: Applied, step: Map) -> None:
    if step.function is not None:
        values = _each(applied, step.function)
        applied.elements = [element.of(value) for element, value in zip(applied.elements, values, strict=True)]
        applied.schema = None
        return
    rows = _survivors(applied, _evaluated(applied, step.columns))
    applied.elements = [
        element.of({**element.value, **row}) for element, row in zip(applied.elements, rows, strict=True)
    ]
    if applied.schema is not None:
        applied.schema = schema_after(step, applied.schema)


def _flat_map(applied: Applied, step: FlatMap) -> None:
    collections = _each(applied, lambda element: list(step.function(element)))
    applied.elements = [
        element.nth(n, value)
        for element, collection in zip(applied.elements, collections, strict=True)
        for n, value in enumerate(collection)
    ]
    applied.schema = None


def _publish(applied: Applied, step: Publish) -> None:
    keys = [element.key for element in applied.elements] if step.key is None else _each(applied, step.key)
    output = output_of(step)
    results = [called(output, *pair) for pair in zip(applied.elements, keys, strict=True)]
    applied.outputs += _survivors(applied, results)


def output_of(step: Publish) -> Callable[[Element[Any], Any], OutputMessage]:
    """Return the function that makes a published message from an element and its key."""

    def output(element: Element[Any], key: Any) -> OutputMessage:
        key = key_bytes(key)
        order = element.lineage.standing(indices=element.indices).position
        return OutputMessage(
            step.topic, key, encode(_republished(element, step, key)), (), order, element.own, element.indices
        )

    output.__qualname__ = f"publish to {step.topic}"
    return output


def _republished(element: Element[Any], step: Publish, key: bytes | None) -> Envelope:
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
        destination=step.topic,
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
    """One number for a place in nested collections: the same in every run, and unique.

    Raises:
        EnvelopeError: A nested collection has too many items to be numbered.
    """
    if len(indices) < 2:
        return indices[0] if indices else 0
    bits = 32 // len(indices)
    if any(one >> bits for one in indices):
        raise EnvelopeError(
            Reason.TRANSFORM_FAILED, f"more than {1 << bits} items in one of {len(indices)} nested collections"
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
    Publish: _publish,
}


def _each(applied: Applied, argument: Predicate | Callable[[Element[Any]], Any]) -> list[Any]:
    """Evaluate an argument for every element; elements for which it raises are rejected and removed."""
    if isinstance(argument, str | pl.Expr):
        return [row["_"] for row in _survivors(applied, _evaluated(applied, {"_": argument}))]
    return _survivors(applied, [called(argument, element) for element in applied.elements])


def _evaluated(applied: Applied, wanted: Mapping[str, Expression]) -> list[Any]:
    return evaluate_elements(applied.elements, wanted, applied.schema)


def _true(applied: Applied, predicate: Predicate) -> list[bool]:
    if isinstance(predicate, str | pl.Expr):
        return [bool(result) for result in _each(applied, predicate)]
    return _each(applied, truth_of(predicate))


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
    except Exception as error:  # the user's code: anything may come
        return refusal(error, Reason.TRANSFORM_FAILED, getattr(function, "__qualname__", "a step"))


def _survivors(applied: Applied, results: Sequence[Any]) -> list[Any]:
    """Remove the elements whose result is an error, with every other item of their records."""
    causes = {
        element.own: result
        for element, result in zip(applied.elements, results, strict=True)
        if isinstance(result, EnvelopeError)
    }
    if not causes:
        return list(results)
    kept = []
    survivors = []
    for element, result in zip(applied.elements, results, strict=True):
        if element.own in causes:
            applied.rejected.append(Rejected.because(element, Cause.of(causes[element.own])))
        else:
            kept.append(element)
            survivors.append(result)
    applied.elements = kept
    return survivors


def arrive(
    stage: Aggregate,
    applied: Applied,
    *,
    ledger: Ledger,
    topic_ids: Mapping[str, str],
    incarnation: Callable[[str, str], Verdict | None],
    siblings: Siblings,
    later: Collection[str] = (),
) -> list[Arrival]:
    """Bring elements to a stage: key, standing and the inputs of its fields. Failures go to `applied.rejected`.

    Args:
        stage: The stage.
        applied: The elements.
        ledger: The flow's dead letters that left no hole.
        topic_ids: Current topic id by topic.
        incarnation: Verdict for a root topic's id.
        siblings: Policy for equal positions without index and id.
        later: Names of the stages after this one: a record redriven to one of them only passes through.
    """
    raw = _each(applied, stage.key)
    keys = _survivors(applied, [stage_key(value) for value in raw])
    inputs = inputs_of(stage, applied.elements, applied.schema)
    arrivals = []
    for element, key, values in zip(applied.elements, keys, inputs, strict=True):
        lineage = element.lineage.resolved(topic_ids)
        standing = standing_of(element, lineage, siblings, rekeyed=key != element.key or not stage.co_partitioned)
        root, back = lineage.root, lineage.redriven
        age = incarnation(root.topic, root.topic_id) if root.cluster == lineage.own.cluster else None
        transit = (
            back is not None
            and back.redrive.stage in later
            and ledger.mine(back.redrive)
            and element.route is Route.PLAIN
        )
        entries = ledger.entries(stage.name, standing, back, element.indices)
        route = ledger.route(stage.name, standing, back, entries)
        if route is not standing.route:
            standing = replace(standing, route=route)
        arrivals.append(Arrival(element, key, standing, age, values, transit, entries, back))
    return arrivals


def standing_of(element: Element[Any], lineage: Lineage, siblings: Siblings, *, rekeyed: bool = False) -> Standing:
    """Where an element stands, without the ledger; its `lineage` contains the root's topic id."""
    return lineage.standing(
        rekeyed=rekeyed,
        keyless=element.key is None,
        branch=element.branch,
        indices=element.indices,
        event_id=element.event_id if siblings is Siblings.EVENT_ID else "",
        late=element.route,
    )


def enter_tail(applied: Applied, *, ledger: Ledger, topic_ids: Mapping[str, str], siblings: Siblings) -> "Tail":
    """Select the elements for the steps after the last stage: redriven elements only if they are missing there."""
    kept: list[Element[Any]] = []
    tail = Tail(applied)
    for element in applied.elements:
        lineage = element.lineage.resolved(topic_ids)
        back = lineage.redriven
        if element.route is not Route.PLAIN or back is None or back.redrive.stage != END_OF_FLOW:
            kept.append(element)
            continue
        standing = standing_of(element, lineage, siblings)
        entries = ledger.entries(END_OF_FLOW, standing, back, element.indices, whole=True)
        route = ledger.route(END_OF_FLOW, standing, back, entries)
        if route is Route.COPY:
            tail.copies += 1
            continue
        tail.filled.update(entries)
        missing = [entry.position[len(standing.position) :] for entry in entries if entry.group == standing.group]
        if missing and all(missing):
            tail.items[element.own] = frozenset((*element.indices, *item) for item in missing)
        kept.append(replace(element, route=passed_on(route)))
    applied.elements = kept
    return tail


def stage_key(value: Any) -> bytes | EnvelopeError:
    """The canonical bytes of a stage's key, or why it is not one."""
    try:
        key = key_bytes(value)
    except FlowError as error:
        return EnvelopeError(Reason.BAD_PAYLOAD, str(error))
    return EnvelopeError(Reason.NULL_KEY, "the stage's key is null") if key is None else key
