"""Topics of Kafka together with their archive: where their logs begin then, and what neither of the two has."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from aggregations.definition.flow import Flow
from aggregations.engine.archive import Archive, contradicted, open_archive
from aggregations.engine.fetch import Fetcher
from aggregations.engine.options import RunOptions
from aggregations.engine.ranges import Range
from aggregations.errors import RunRefusedError
from aggregations.run.deliveries import spanned
from aggregations.run.risks import Risk, unsafe
from envelope import TopicPartition
from persistence.findings import Finding
from persistence.kafka import KafkaSettings, TopicMissing, Topics
from persistence.kafka.facts import Watermarks

_SHOWN: Final = 8
"""Missing ranges of a partition that are named."""
_COMPARED: Final = ["key", "value", "timestamp"]


class ArchivedTopics(Topics):
    """Topics whose logs begin where their archive does.

    Args:
        settings: Settings of the Kafka cluster.
        location: Location of the archive, as for `open_archive`.
        topics: The topics that a flow reads.
        headers: It reads their headers.

    Attributes:
        archive: The archive.

    Raises:
        RunRefusedError: As for `open_archive`; the archive is of another topic; or a topic does not exist.
        BrokerError: Kafka does not answer, or refuses a request.
    """

    def __init__(self, settings: KafkaSettings, location: str, topics: Collection[str], *, headers: bool) -> None:
        super().__init__(settings)
        try:
            marks = super().marks(topics)
        except TopicMissing as error:
            raise RunRefusedError(str(error)) from error
        self.archive = open_archive(location, topics, headers=headers).beside(marks)
        self._check_ends(topics)
        for topic in topics:
            self._check_records(settings, {place: one for place, one in marks.items() if place.topic == topic})

    def marks(self, names: Iterable[str]) -> dict[TopicPartition, Watermarks]:
        """Return the ends of every partition; the first offset is that of the archive if Kafka's is later."""
        found = super().marks(names).items()
        return {place: replace(one, low=self.archive.low(place, one.low)) for place, one in found}

    def offsets_at(self, name: str, time_ms: int) -> dict[int, int]:
        """Return by partition the first offset whose record has this timestamp or a later one; -1 if there is none."""
        found = super().offsets_at(name, time_ms)
        for partition in found:
            if (archived := self.archive.first_at(TopicPartition(name, partition), time_ms)) is not None:
                found[partition] = archived
        return found

    def _check_ends(self, topics: Collection[str]) -> None:
        ends = self.ends(topics)
        for place, runs in self.archive.runs.items():
            if (last := runs[-1][1]) > ends.get(place, 0):
                raise RunRefusedError(
                    f"{self.archive.location} has {place.topic}:{place.partition} up to offset {last - 1}, and Kafka's log "
                    f"ends at {ends.get(place, 0)}: it is of another topic of that name, or of another cluster. Give the "
                    "archive of this topic"
                )

    def _check_records(self, settings: KafkaSettings, marks: Mapping[TopicPartition, Watermarks]) -> None:
        """Compare the first and the last record that both the archive and Kafka have."""
        both = {
            place: (one.low, end - 1)
            for place, one in marks.items()
            if (end := min(self.archive.until.get(place, 0), one.high)) > one.low
        }
        if not both:
            return
        topic = next(iter(both)).topic
        with closing(Fetcher(settings, topic, "headwater-history", compiled=False)) as kafka:
            for which in (0, 1):
                ranges = [Range(place.partition, at[which], at[which] + 1, topic) for place, at in both.items()]
                for table in kafka.read(ranges, stays=False):
                    for row in range(table.num_rows):
                        self._check_record(topic, table.slice(row, 1))

    def _check_record(self, topic: str, theirs: pa.Table) -> None:
        place, offset = TopicPartition(topic, theirs["partition"][0].as_py()), theirs["offset"][0].as_py()
        for mine in self.archive.records(place, offset, offset + 1):
            if not mine.select(_COMPARED).equals(theirs.select(_COMPARED)):
                raise contradicted(self.archive.location, place, offset, "and Kafka have different records")


def topics_with_archive(options: RunOptions, *flows: Flow[Any]) -> Topics:
    """Administrative access to the topics of flows, whose logs begin with the archive if there is one.

    Raises:
        FlowError: The archive's location is not one.
        RunRefusedError: As for `ArchivedTopics`.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    if (location := options.archive) is None:
        return Topics(options.broker)
    names = list(dict.fromkeys(topic for flow in flows for topic in flow.topics))
    headers = any(flow.reads_headers for flow in flows)
    return ArchivedTopics(options.broker, location, names, headers=headers)


def archived(topics: Topics) -> Archive | None:
    """The archive of topics; None if they have none."""
    return topics.archive if isinstance(topics, ArchivedTopics) else None


def gaps(flow: str, archive: Archive | None, ranges: Iterable[Range]) -> list[Finding]:
    """Findings about offsets that neither the archive nor Kafka has.

    Args:
        flow: Name of the flow.
        archive: The archive; None for none.
        ranges: What is read.
    """
    if archive is None:
        return []
    texts = []
    for one in ranges:
        if holes := archive.missing(one.place, one.start, one.end):
            named = ", ".join(map(spanned, holes[:_SHOWN]))
            more = f" and {len(holes) - _SHOWN} more ranges" if holes[_SHOWN:] else ""
            texts.append(f"offsets {named}{more} of {one.topic}:{one.partition}")
    if not texts:
        return []
    return [
        unsafe(
            Risk.GAP,
            f"flow {flow}: {archive.location} lacks {', '.join(texts)}, which Kafka no longer has",
            "Complete the archive. If nothing is missing, because they were markers of transactions or compacted, accept the risk",
        )
    ]
