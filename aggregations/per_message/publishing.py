"""What publish steps make of elements: messages with the chain of their record and this flow's hop."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import key_bytes
from aggregations.definition.flow import Publish
from envelope import Envelope, EnvelopeError, Hop, Node, Position, Reason, Route, encode
from envelope.deadletter import size_of
from envelope.limits import DEFAULT_LIMITS
from envelope.redrive import HEALED, LATE
from envelope.times import micros_of
from persistence.finite_json import json_of


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


@dataclass(frozen=True, slots=True)
class Marking:
    """Decides what publish steps publish, and marks it.

    Attributes:
        mark: Returns an element with the route that its output is marked with; None if it must not be published.
        is_plain: It returns every element that did not come by a pass-through hop as it is.
        largest: Largest record that can be produced to a topic, in bytes, by topic; without a broker it is empty.
    """

    mark: Callable[[Element[Any]], Element[Any] | None]
    is_plain: bool = False
    largest: Mapping[str, int] = field(default_factory=dict)

    def refused(self, topic: str, key: bytes | None, value: bytes) -> str:
        """Why an output cannot be produced to its topic, or read there; empty if it can."""
        if size_of(key, value, ()) > self.largest.get(topic, sys.maxsize):
            return f"an output of {len(value)} bytes, {topic} takes {self.largest[topic]}"
        most = DEFAULT_LIMITS.message_bytes
        return f"an output of {len(value)} bytes, the limit is {most}" if len(value) > most else ""


Output: TypeAlias = Callable[[Element[Any], Any, Any], OutputMessage | None]
"""Makes a message of an element, its key, and its topic if an expression chooses that; None for no message."""


Publisher: TypeAlias = Callable[[Publish, Marking | None], Output]
"""Returns what makes the messages of a publish step."""


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
            return marking.mark(element)
        found = marking.mark(replace(element, indices=element.indices[:depth]))
        return None if found is None else replace(element, route=found.route)

    return replace(marking, mark=marked)


def of_fork(outputs: Iterable[OutputMessage], depth: int) -> list[OutputMessage]:
    """Outputs of a branch, as outputs of the elements that entered it: they are withheld with these."""
    return [replace(one, indices=one.indices[:depth]) for one in outputs]


def names_topic(step: Publish) -> bool:
    """Whether the topic of an output needs no expression: there is only one, or a function chooses it."""
    return not step.topics or not isinstance(step.topic, str | pl.Expr)


def output_of(step: Publish, marking: Marking | None) -> Output:
    """Return what makes the messages of a publish step.

    It raises `EnvelopeError` if a topic is not one of the step's, or does not take a message of this size.
    """

    def output(element: Element[Any], key: Any, topic: Any) -> OutputMessage | None:
        topic = chosen_topic(step, element, topic)
        key = key_bytes(key)
        marked = element if marking is None else marking.mark(element)
        if marked is None:
            return None
        order = element.lineage.standing(indices=element.indices).position
        value = encode(_republished(marked, step, key, topic))
        if marking is not None and (why := marking.refused(topic, key, value)):
            raise EnvelopeError(Reason.PAYLOAD_TOO_LARGE, why)
        return OutputMessage(topic, key, value, (), order, element.own, element.indices)

    output.__qualname__ = f"publish to {', '.join(step.targets)}"
    return output


def chosen_topic(step: Publish, element: Element[Any], found: Any) -> Any:
    """The topic of an output, given the one that an expression chose, if one does.

    Raises:
        EnvelopeError: It is not one of the step's.
    """
    if names_topic(step):
        found = step.topic(element) if callable(step.topic) else step.topic
    if step.topics and found not in step.topics:
        raise EnvelopeError(Reason.BAD_TOPIC, "publish() chose a topic that is not in topics=")
    return found


def payload_of(step: Publish, element: Element[Any]) -> tuple[bytes, str]:
    """Payload and content type of an output."""
    if step.value is not None:
        return step.value(element), ""
    return json_of(element.value), "application/json"


def _republished(element: Element[Any], step: Publish, key: bytes | None, topic: str) -> Envelope:
    """The envelope of a published element: its chain with this hop appended."""
    hop = Hop(
        element.topic,
        element.partition,
        element.offset,
        via=step.name,
        index=item_index(element.indices),
        rekeyed=key != element.key,
        keyless=key is None or (element.key is None and bool(element.chain)),
        topic_id=element.own.topic_id,
        cluster=element.own.cluster,
    )
    payload, content_type = payload_of(step, element)
    return Envelope(
        payload=payload,
        chain=(*element.chain, *_late(element, hop), hop),
        key=key,
        event_id=element.event_id,
        event_time_us=time_to_send(element.event_time_us, element.timestamp_ms),
        content_type=content_type,
        destination=topic,
    )


def time_to_send(event_time_us: int, timestamp_ms: int) -> int | None:
    """The event time that an output has: none if it is only that of a record without a timestamp, which Kafka shows as -1."""
    return None if timestamp_ms < 0 and event_time_us == micros_of(timestamp_ms) else event_time_us


def _late(element: Element[Any], hop: Hop) -> tuple[Hop, ...]:
    """Marks a late-folded element: a reader that has received newer events must not treat it as a copy."""
    if element.route is Route.PLAIN:
        return ()
    lineage, missing = element.lineage, element.route is Route.MISSING
    if lineage.healed if missing else lineage.pass_through:
        return ()
    return (replace(hop, via=HEALED if missing else LATE, index=None, rekeyed=False, pass_through=True),)


def item_index(indices: tuple[int, ...]) -> int:
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
