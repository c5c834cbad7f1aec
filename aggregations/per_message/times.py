"""Event times of the records that a flow reads, and windows of the elements at a stage, message by message.

Whether a window is closed for an element is decided by the log of the element's own partition alone: by the latest
event time of the records before its own. The order in which partitions are read, and where a batch ends, therefore
change no verdict. The window of an element is also closed if its state has left the store: for a copy that comes back
when a store was set back, or for a record of a partition that was idle. `aggregations.columns.times` does the same for whole columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from aggregations.definition.element import Element
from aggregations.definition.expiry import Expiry
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import SessionWindow
from aggregations.definition.source import Topic
from aggregations.definition.times import NO_TIME, checked_time
from aggregations.definition.windows import Window, start_bytes
from aggregations.per_message.rows import evaluate_elements
from aggregations.per_message.steps import Applied
from envelope import EnvelopeError, Reason, TopicPartition
from persistence.manifest import Manifest

Times: TypeAlias = dict[TopicPartition, int]
"""Latest event time by topic and partition, in microseconds since 1970."""


class InWindow(NamedTuple):
    """Where an element of a windowed stage belongs.

    Attributes:
        user_key: The stage's key.
        key: Key of its state.
        closed: The window is closed for it.
    """

    user_key: bytes
    key: bytes
    closed: bool


def times_in(manifest: Manifest | None, topic_ids: Mapping[str, str]) -> Times:
    """The latest event times in a manifest, of the current topics.

    Args:
        manifest: The manifest.
        topic_ids: Current topic id by consumed topic.
    """
    return (
        {}
        if manifest is None
        else {
            TopicPartition(topic, partition): progress.time_us
            for topic, parts in manifest.positions.items()
            for partition, progress in parts.items()
            if progress.time_us is not None and topic_ids.get(topic, "") == manifest.topic_ids.get(topic, "")
        }
    )


def latest(first: int | None, second: int | None) -> int | None:
    """The later of two times; None counts as earlier than any."""
    return second if first is None else first if second is None else max(first, second)


def with_times(
    elements: Sequence[Element[Any]], given: Sequence[int | None], flow: Flow[Any], read: Mapping[TopicPartition, int]
) -> tuple[list[Element[Any]], Times]:
    """Check the event times of elements, and note the latest event time before each.

    Args:
        elements: Elements of the flow's sources, in order of offsets within each partition.
        given: Event time of each as its record and envelope give it; see `Decoded.time_us`.
        flow: The flow.
        read: Latest event time by topic and partition before the first of them.

    Returns:
        The elements, and the latest event times after the last of them, of their partitions.
    """
    sources = {name: flow.source_of(name) for name in {element.topic for element in elements}}
    declared = {name: _declared(elements, name, topic) for name, topic in sources.items() if topic.time is not None}
    times, found = Times(), []
    for element, given_us in zip(elements, given, strict=True):
        place = TopicPartition(element.topic, element.partition)
        time_us = next(declared[element.topic]) if element.topic in declared else given_us
        ahead = sources[element.topic].ahead_seconds
        before, valid = times.get(place, read.get(place)), checked_time(time_us, element.timestamp_ms, ahead)
        # The declared time is the event's own; the envelope's may be that of another clock.
        event_time = element.event_time_us if valid is None else valid
        found.append(replace(element, event_time_us=event_time, time_us=valid, before_us=before))
        if (after := latest(before, valid)) is not None:
            times[place] = after
    return found, times


def enter_windows(
    applied: Applied, keys: Sequence[bytes], window: Window | SessionWindow, removed: int | None = None
) -> list[InWindow]:
    """Put each element into its windows: it is replaced by one item for each, in order of time.

    All sessions of a key are in one state: an element stays as it is.

    Elements without a valid event time are rejected.

    Args:
        applied: The elements; it is changed.
        keys: The stage's key of each.
        window: The stage's windows.
        removed: Due time up to which states of the stage have left the store, in seconds since 1970.

    Returns:
        Where each of the remaining elements and items belongs.
    """
    no_time = EnvelopeError(Reason.BAD_EVENT_TIME, NO_TIME)
    pairs = zip(applied.elements, keys, strict=True)
    kept = applied.survivors([no_time if element.time_us is None else key for element, key in pairs])
    elements, found = [], []
    for element, key in zip(applied.elements, kept, strict=True):
        assert element.time_us is not None
        if isinstance(window, SessionWindow):
            elements.append(element)
            closed = is_late(window, element.time_us, element.before_us, removed)
            found.append(InWindow(key, key, closed))
            continue
        for n, start in enumerate(window.starts(element.time_us)):
            elements.append(element if window.each == 1 else element.nth(n, element.value))
            closed = is_late(window, start, element.before_us, removed)
            found.append(InWindow(key, key + start_bytes(start), closed))
    applied.elements = elements
    return found


def enter_expiring(
    applied: Applied, keys: Sequence[bytes], expiry: Expiry, removed: int | None = None
) -> list[InWindow]:
    """Find the elements that come too late for a stage whose states expire.

    Elements without a valid event time are rejected.

    Args:
        applied: The elements; it is changed.
        keys: The stage's key of each.
        expiry: When states expire.
        removed: Due time up to which states of the stage have left the store, in seconds since 1970.

    Returns:
        Of each of the remaining elements: its key, and whether its state may have expired.
    """
    no_time = EnvelopeError(Reason.BAD_EVENT_TIME, NO_TIME)
    pairs = zip(applied.elements, keys, strict=True)
    kept = applied.survivors([no_time if element.time_us is None else key for element, key in pairs])
    found = []
    for element, key in zip(applied.elements, kept, strict=True):
        assert element.time_us is not None
        closed = is_late(expiry, element.time_us, element.before_us, removed)
        found.append(InWindow(key, key, closed))
    return found


def is_late(times: Window | SessionWindow | Expiry, at: int, before_us: int | None, removed: int | None) -> bool:
    """Whether an element comes too late.

    Args:
        times: The stage's windows, or when its states expire.
        at: Start of the element's window, in seconds since 1970; with sessions and expiry its time, in microseconds.
        before_us: The latest event time of its partition's log before it, in microseconds since 1970; None if there is none.
        removed: Due time up to which states of the stage have left the store, in seconds since 1970; None if none has.
    """
    closes_us = times.ends_us(at) if isinstance(times, Expiry) else times.closes_us(at)
    return (before_us is not None and closes_us <= before_us) or times.is_removed(at, removed)


def _declared(elements: Sequence[Element[Any]], name: str, topic: Topic) -> Iterator[int | None]:
    """The times that the expression of a topic gives for its elements, in their order."""
    assert topic.time is not None
    mine = [element for element in elements if element.topic == name]
    return map(_micros, evaluate_elements(mine, {"_": topic.time}, topic.schema))


def _micros(row: Any) -> int | None:
    """The time that an expression gave in milliseconds; None if it could not be evaluated."""
    time_ms = None if isinstance(row, EnvelopeError) else row["_"]
    return None if time_ms is None else time_ms * 1_000
