"""Ranges of topics, as a person writes them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from jobs.environment import NotThereError, UsageError
from jobs.explaining.log import Reader, Span
from jobs.settings import time

OPTION: Final = "--range"
_OFFSETS: Final = re.compile(r"(\d{1,19})-(\d{1,19})", re.ASCII)
_WRITE: Final = "write TOPIC, TOPIC:PARTITION, TOPIC:PARTITION:FIRST-LAST or TIME/TIME"


class RangeError(NotThereError):
    """The topics do not have a range."""


def spans_of(texts: Iterable[str], topics: Sequence[str], reader: Reader) -> list[Span]:
    """The ranges of offsets that are meant, as far as the topics still have them.

    Args:
        texts: `TOPIC`, `TOPIC:PARTITION`, `TOPIC:PARTITION:FIRST-LAST` with both offsets inclusive, or `TIME/TIME` in
            all topics, from the first time until before the second; a missing time stands for the beginning or the end.
            Without a text everything in the topics.
        topics: The topics that may be named.
        reader: Shows what the topics have.

    Returns:
        The ranges in order, without overlaps.

    Raises:
        UsageError: A text is malformed.
        RangeError: A text names an unknown topic or partition, is reversed, or is beyond the end of the log.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    given = [span for text in texts for span in _spans(text, topics, reader)]
    if not given:
        given = [span for topic in topics for span in _of_topic(topic, reader)]
    merged: list[Span] = []
    for span in sorted(given, key=lambda one: (one.topic, one.partition, one.first)):
        before = merged[-1] if merged else None
        if before and (before.topic, before.partition) == (span.topic, span.partition) and span.first <= before.last:
            merged[-1] = Span(span.topic, span.partition, before.first, max(before.last, span.last))
        else:
            merged.append(span)
    return merged


def _spans(text: str, topics: Sequence[str], reader: Reader) -> Iterator[Span]:
    if "/" in text:
        yield from _between(text, topics, reader)
        return
    topic, *more = text.split(":")
    if topic not in topics:
        raise RangeError(f"{OPTION} {text}: the flow reads {', '.join(topics)}; {_WRITE}")
    if not more:
        yield from _of_topic(topic, reader)
        return
    log, partition = reader.log(topic), int(more[0]) if more[0].isascii() and more[0].isdecimal() else -1
    if partition not in log.high or len(more) > 2:
        raise RangeError(f"{OPTION} {text}: {topic} has partitions 0 to {len(log.high) - 1}; {_WRITE}")
    if len(more) == 1:
        yield Span(topic, partition, log.low[partition], log.high[partition])
        return
    if (found := _OFFSETS.fullmatch(more[1])) is None:
        raise UsageError(f"{OPTION} {text}: {_WRITE}")
    first, last = map(int, found.groups())
    if first > last:
        raise RangeError(f"{OPTION} {text}: the range is reversed; write {topic}:{partition}:{last}-{first}")
    if first >= log.end[partition]:
        raise RangeError(f"{OPTION} {text}: {topic}:{partition} ends before offset {log.end[partition]}")
    yield Span(topic, partition, first, last + 1)


def _of_topic(topic: str, reader: Reader) -> Iterator[Span]:
    log = reader.log(topic)
    return (Span(topic, partition, log.low[partition], high) for partition, high in log.high.items())


def _between(text: str, topics: Sequence[str], reader: Reader) -> Iterator[Span]:
    begin, _, end = text.partition("/")
    times = [_ms(time(one, OPTION)) if one else None for one in (begin, end)]
    if None not in times and times[0] > times[1]:  # type: ignore[operator]
        raise RangeError(f"{OPTION} {text}: the range is reversed; write {end}/{begin}")
    for topic in topics:
        log = reader.log(topic)
        first, last = (None if at is None else reader.offsets_at(topic, at) for at in times)
        for partition, high in log.high.items():
            start = log.low[partition] if first is None else first[partition]
            yield Span(topic, partition, start, high if last is None else last[partition])


def _ms(at: datetime) -> int:
    return round(at.astimezone(UTC).timestamp() * 1000)
