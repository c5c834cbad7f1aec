"""Where a flow begins to read topics that it has never read."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, TypeAlias, cast

from aggregations.errors import FlowError

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
Start: TypeAlias = str | datetime | Mapping[int, int]
"""`earliest`, the beginning of every partition; `latest`, its end; the first record of every partition whose timestamp
is at or after a time with a time zone; or the offset of every partition."""
Starts: TypeAlias = Start | Mapping[str, Start]
"""A start position for all sources of a flow, or one by topic; a topic that is not named begins at its beginning."""

_OFFSETS: Final = re.compile(r"\d+:\d+(,\d+:\d+)*", re.ASCII)
_NAMED: Final = re.compile(r"([\w.-]+)=(.+)", re.ASCII)
_WAYS: Final = "earliest, latest, a time with its zone such as 2026-11-24T06:00:00Z, or PARTITION:OFFSET,..."


def parse(text: str) -> Start:
    """Read a start position from text.

    Args:
        text: `earliest`, `latest`, a time in ISO 8601 with its zone, or the offset of each partition as in `0:120,1:95`.

    Raises:
        FlowError: It is none of these.
    """
    if text in (EARLIEST, LATEST):
        return text
    if _OFFSETS.fullmatch(text):
        found: dict[int, int] = {}
        for one in text.split(","):
            partition, offset = map(int, one.split(":"))
            if partition in found:
                raise FlowError(f"start={text!r} names partition {partition} twice")
            found[partition] = offset
        return found
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise FlowError(f"start={text!r}: it takes {_WAYS}") from None
    return checked(time)


def checked(start: Start) -> Start:
    """The start position in one of its forms, checked without a broker.

    Raises:
        FlowError: It is invalid.
    """
    if isinstance(start, str):
        return parse(start)
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise FlowError(
                f"start={start.isoformat()} has no time zone; append Z for UTC, or an offset such as +02:00"
            )
        if start > datetime.now(UTC):
            raise FlowError(f"start={start.isoformat()} is in the future")
        return start
    if not isinstance(start, Mapping):
        raise FlowError(f"start= takes {_WAYS}; got a {type(start).__name__}")
    if not start or any(type(one) is not int or one < 0 for pair in start.items() for one in pair):
        raise FlowError("start= takes an offset of 0 or greater for every partition")
    return start


def parse_all(texts: Sequence[str]) -> Starts:
    """Read start positions from text, as for `parse`: one, or one for each topic as in `orders=latest`.

    Raises:
        FlowError: One is invalid, there is more than one for all topics, or a topic occurs twice.
    """
    named = [_NAMED.fullmatch(text) for text in texts]
    if len(texts) == 1 and named[0] is None:
        return parse(texts[0])
    found: dict[str, Start] = {}
    for text, one in zip(texts, named, strict=True):
        if one is None or one[1] in found:
            raise FlowError(f"start={text!r}: give one position, or one as TOPIC=POSITION for each topic")
        found[one[1]] = parse(one[2])
    return found


def checked_starts(starts: Starts, topics: Collection[str]) -> Starts:
    """Start positions, checked without a broker.

    Args:
        starts: The positions.
        topics: The flow's sources.

    Raises:
        FlowError: One is invalid, a topic is not a source, or offsets do not name their topic.
    """
    if (named := _by_topic(starts)) is None:
        found = checked(cast("Start", starts))
        if isinstance(found, Mapping) and len(topics) > 1:
            raise FlowError(f"start= gives offsets; name their topic, one of {', '.join(topics)}")
        return found
    if unknown := [topic for topic in named if topic not in topics]:
        raise FlowError(f"start= names {unknown[0]}, which is not a source of the flow; it reads {', '.join(topics)}")
    return {topic: checked(start) for topic, start in named.items()}


def start_of(starts: Starts, topic: str, *, table: bool = False) -> Start:
    """The start position of a topic. That of a table is its beginning, unless its name is given."""
    named = _by_topic(starts)
    if named is None:
        return EARLIEST if table else cast("Start", starts)
    return named.get(topic, EARLIEST)


def _by_topic(starts: Starts) -> Mapping[str, Start] | None:
    """The start positions by topic; None if there is one for all."""
    if isinstance(starts, Mapping) and any(isinstance(one, str) for one in starts):
        return {str(topic): cast("Start", start) for topic, start in starts.items()}
    return None


def offsets(
    start: Start, topic: str, marks: Mapping[int, tuple[int, int]], at: Callable[[int], Mapping[int, int]]
) -> dict[int, int]:
    """The offset to read first, by partition.

    Args:
        start: A checked start position.
        topic: The topic, for errors.
        marks: First and end offset by partition.
        at: Returns, for a time in milliseconds since 1970, the first offset by partition whose record has this timestamp
            or a later one; negative when there is none.

    Raises:
        FlowError: Offsets are given and a partition has none, does not exist, or does not have the offset in its log.
    """
    if isinstance(start, datetime):
        found = at(round(start.timestamp() * 1000))
        return {
            partition: min(found[partition], high) if found[partition] >= 0 else high
            for partition, (_, high) in marks.items()
        }
    if isinstance(start, str):
        return {partition: low if start == EARLIEST else high for partition, (low, high) in marks.items()}
    if start.keys() != marks.keys():
        raise FlowError(
            f"start= gives offsets of partitions {_list(start)} of {topic}, which has partitions {_list(marks)}; give all of them"
        )
    for partition, (low, high) in sorted(marks.items()):
        if not low <= start[partition] <= high:
            raise FlowError(f"start={partition}:{start[partition]}: the log of {topic}:{partition} is {low} to {high}")
    return dict(start)


def _list(partitions: Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(partitions)))
