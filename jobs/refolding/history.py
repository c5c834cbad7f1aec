"""The part of Kafka's history that is folded: a range of offsets for each partition, checked against the logs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.definition.stages import continues
from aggregations.errors import DefinitionChangedError, RunRefusedError
from envelope import TopicPartition
from jobs.explaining.log import Log, Reader, Span
from jobs.explaining.ranges import OPTION, RangeError, spans_of
from persistence.kafka import TopicMissing
from persistence.manifest import Manifest

Offsets = dict[str, dict[int, int]]
"""An offset by topic and partition."""


@dataclass(frozen=True, slots=True)
class History:
    """What is read.

    Attributes:
        first: Offset of the first record, by topic and partition.
        end: Offset after the last record, by topic and partition; the partitions are those of `first`.
        archived: Number of records that are read from an archive.
    """

    first: Offsets
    end: Offsets
    archived: int = 0

    @property
    def records(self) -> int:
        """Number of offsets."""
        return sum(
            end - self.first[topic][partition] for topic, ends in self.end.items() for partition, end in ends.items()
        )

    def starts(self, flow: Flow[Any]) -> Offsets:
        """The offset to begin at in every partition of a flow's topics."""
        return {topic: self.first[topic] for topic in flow.topics}

    def ends(self, flow: Flow[Any]) -> dict[TopicPartition, int]:
        """The offset to stop at, by topic and partition of a flow's topics."""
        return {
            TopicPartition(topic, partition): end for topic in flow.topics for partition, end in self.end[topic].items()
        }

    def as_json(self) -> dict[str, dict[str, list[int]]]:
        """First and end offset, by topic and partition, of the partitions that are read."""
        return {
            topic: {
                str(partition): [first, self.end[topic][partition]]
                for partition, first in sorted(firsts.items())
                if first < self.end[topic][partition]
            }
            for topic, firsts in sorted(self.first.items())
        }


def chosen(ranges: Iterable[str], flows: Sequence[Flow[Any]], reader: Reader) -> History:
    """The history that a person chose.

    Args:
        ranges: As for `spans_of`. Without one, all that the topics have. Otherwise only these are read, and every table
            that they do not name, whole: times do not apply to tables.
        flows: The flows that fold it.
        reader: Shows what the topics have.

    Raises:
        UsageError: A range is malformed.
        RunRefusedError: A range is reversed, names an unknown topic or partition, begins before or ends after the log,
            or a partition has several; a topic does not exist.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    topics = list(dict.fromkeys(topic for flow in flows for topic in flow.topics))
    tables = {topic for flow in flows for part in flow.tables.values() for topic in part.topics}
    ranges = list(ranges)
    timed = [text for text in ranges if "/" in text]
    named = [text for text in ranges if "/" not in text]
    try:
        logs = {topic: reader.log(topic) for topic in topics}
        between = spans_of(timed, [one for one in topics if one not in tables], reader) if timed else []
        spans = between + (spans_of(named, topics, reader) if named or not timed else [])
    except (RangeError, TopicMissing) as error:
        raise RunRefusedError(str(error)) from error
    if timed and not any(one.first < one.last for one in between):
        raise RunRefusedError(f"{OPTION} {timed[0]}: the topics have no record of these times; give others")
    _check_times(timed, between, logs)
    covered = {one.topic for one in spans}
    spans += [span for topic in tables - covered for span in spans_of([topic], topics, reader)]
    return _with_archived(_history(spans, logs), reader)


def _check_times(timed: Sequence[str], spans: Sequence[Span], logs: Mapping[str, Log]) -> None:
    """Refuse times from before the first record of a log: records of these times may have been deleted."""
    for text in timed:
        for one in spans if not text.startswith("/") else ():
            low = logs[one.topic].low[one.partition]
            if 0 < low == one.first < logs[one.topic].high[one.partition]:
                raise RunRefusedError(
                    f"{OPTION} {text}: the log of {one.topic}:{one.partition} begins at {low}, and records before it may "
                    "have had these times. Give a later time, or offsets"
                )


def _history(spans: Sequence[Span], logs: Mapping[str, Log]) -> History:
    first = {topic: dict(log.low) for topic, log in logs.items()}
    end = {topic: dict(log.low) for topic, log in logs.items()}  # nothing of a partition without a range
    seen: set[tuple[str, int]] = set()
    for one in spans:
        log, place = logs[one.topic], f"{one.topic}:{one.partition}"
        if (one.topic, one.partition) in seen:
            raise RunRefusedError(f"{OPTION}: {place} has several ranges; give one that contains them")
        seen.add((one.topic, one.partition))
        low, high = log.low[one.partition], log.high[one.partition]
        if one.first < low:
            raise RunRefusedError(
                f"{OPTION}: {place} is to be read from {one.first}, but its log begins at {low}: the records before were "
                f"deleted. Begin at {low} or later, or read them from an archive (--history parquet:PATH)"
            )
        if one.last > high:
            raise RunRefusedError(
                f"{OPTION}: {place} is to be read up to {one.last - 1}, but its last record is {high - 1}. End there"
            )
        first[one.topic][one.partition], end[one.topic][one.partition] = one.first, max(one.last, one.first)
    return History(first, end)


def recorded(flow: Flow[Any], live: Manifest, begun: Manifest | None, reader: Reader) -> History:
    """The history of live states: from the flow's start, or from where other states end, up to where the live ones end.

    Args:
        flow: The flow.
        live: Manifest of the live states.
        begun: Manifest of the states that the fold begins with; None if it begins without states.
        reader: Shows what the topics have.

    Raises:
        RunRefusedError: The beginning is unknown or not in the log, a topic was created again, the live states end
            beyond the log or before the beginning, or they continue those of an earlier definition or generation.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    if begun is None:
        _check_definitions(flow, live)
        _check_generation(flow, live)
    first: Offsets = {}
    end: Offsets = {}
    for topic in flow.topics:
        try:
            log = reader.log(topic)
        except TopicMissing as error:
            raise RunRefusedError(str(error)) from error
        _check_same(flow, topic, log, live, begun)
        first[topic], end[topic] = dict(log.low), dict(log.low)
        for partition, progress in live.positions.get(topic, {}).items():
            start = _start(topic, partition, live, begun)
            first[topic][partition], end[topic][partition] = _within(log, partition, start, progress.next_offset, begun)
    return _with_archived(History(first, end), reader)


def _with_archived(history: History, reader: Reader) -> History:
    """The history, with the number of records that are read from the reader's archive."""
    spans = [
        Span(topic, partition, first, history.end[topic][partition])
        for topic, firsts in history.first.items()
        for partition, first in firsts.items()
    ]
    return replace(history, archived=sum(map(reader.archived, spans)))


def _start(topic: str, partition: int, live: Manifest, begun: Manifest | None) -> int:
    if begun is not None and (at := begun.positions.get(topic, {}).get(partition)) is not None:
        return at.next_offset
    return live.starting_offsets.get(topic, {}).get(partition, 0)


def _within(log: Log, partition: int, start: int, end: int, begun: Manifest | None) -> tuple[int, int]:
    """The offsets to read, checked against the log of the partition."""
    place = f"{log.topic}:{partition}"
    low, high = log.low.get(partition, 0), log.high.get(partition, 0)
    if end > high:
        raise RunRefusedError(
            f"{place} is folded up to {end}, but its log ends at {high}: the broker lost records, or this is another "
            "cluster. Correct the address"
        )
    if start > end:
        raise RunRefusedError(
            f"{place}: the snapshot ends at {start}, after the live states, at {end}. Use an earlier one"
        )
    if start < low and start < end:
        began = f"the snapshot ends at {start}" if begun is not None else f"the flow began at {start}"
        if begun is None and not start:
            began = "the flow began at the beginning of the log"
        raise RunRefusedError(
            f"{place}: {began}, but the records before {low} were deleted. Begin with a later snapshot (--snapshot FILE), or "
            "read them from an archive (--history parquet:PATH)"
        )
    return max(start, low), max(end, low)


def _check_same(flow: Flow[Any], topic: str, log: Log, live: Manifest, begun: Manifest | None) -> None:
    """Check that the states contain no events of another topic of this name."""
    known = [one.topic_ids.get(topic, log.topic_id) for one in (live, begun) if one is not None]
    if any(one != log.topic_id for one in known) or (begun is None and len(live.incarnations.get(topic, ())) > 1):
        raise RunRefusedError(
            f"flow {flow.name}: topic {topic} was created again, and the states contain events of the former one. Begin with "
            "a snapshot that was made since (--snapshot FILE)"
        )


def _check_generation(flow: Flow[Any], live: Manifest) -> None:
    """Check that no dead letter of another generation was redriven into the states."""
    if live.rebuilt is not None and live.rebuilt.continues:
        raise RunRefusedError(
            f"flow {flow.name}: the generation began with a snapshot of generation {live.rebuilt.continues[0]}, whose dead "
            "letters count as its own. Begin with a snapshot that was made since (--snapshot FILE)"
        )


def _check_definitions(flow: Flow[Any], live: Manifest) -> None:
    """Check that no state was made by an earlier definition of its stage."""
    for stage in flow.stages:
        if not all(continues(stage.definition, one) for one in live.earlier.get(stage.name, ())):
            raise DefinitionChangedError(
                f"flow {flow.name}: states of stage {stage.name} were begun by an earlier definition (--accept definition). "
                "Begin with a snapshot that was made since (--snapshot FILE)"
            )
