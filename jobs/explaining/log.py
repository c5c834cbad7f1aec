"""Reads single records and ranges of topics, and shows what the topics still have."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Part

from aggregations.definition.element import Record
from aggregations.engine.archived import archived
from aggregations.engine.roots import RootTopics
from envelope import TopicPartition
from envelope.limits import branch_id
from jobs.dead_letters.letters import Letters
from jobs.tracing import Found, Place
from persistence.kafka import BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.errors import broker_error, passes
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import assign
from persistence.manifest import Progress

_SECONDS: Final = 10.0
_WAIT_SECONDS: Final = 0.02
_MOST: Final = 10_000
"""Records that are taken from the client at a time."""


@dataclass(frozen=True, slots=True)
class Log:
    """A topic as the broker has it now.

    Attributes:
        topic: The topic.
        topic_id: Its current id.
        low: First offset in the log, by partition.
        high: Next offset, by partition, as a consumer of committed records sees it.
        end: Next offset that a record gets, by partition.
    """

    topic: str
    topic_id: str
    low: dict[int, int]
    high: dict[int, int]
    end: dict[int, int]

    def found(self, place: Place) -> Found:
        """Whether the log has an offset; `FOUND` also if it has no record there."""
        if not 0 <= place.offset < self.end.get(place.partition, 0):
            return Found.BEYOND
        return Found.EXPIRED if place.offset < self.low[place.partition] else Found.FOUND


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one partition, the first inclusive, the last exclusive."""

    topic: str
    partition: int
    first: int
    last: int


class Reader:
    """Reads what a cluster has: records, dead letters, ids of topics.

    Args:
        settings: Settings of the Kafka cluster.
        topics: Administrative access to its topics, which may have an archive; None for access without one.

    Attributes:
        archive: The archive; None for none. What is in it counts as in the log, and only `records` does not read it.
        logs: Progress of a flow by partition: in branches of a log its records have topic ids of their own.
    """

    def __init__(self, settings: KafkaSettings, topics: Topics | None = None) -> None:
        self._settings = settings
        self._topics = topics or Topics(settings)
        self.archive = archived(self._topics)
        self.logs: Mapping[TopicPartition, Progress] = {}
        self._logs: dict[str, Log] = {}
        self._reads: Consumer | None = None

    def log(self, topic: str) -> Log:
        """A topic as it was when it was first asked for.

        Raises:
            BrokerError: Kafka does not answer, has no such topic, or does not let this user read it.
        """
        if topic not in self._logs:
            self._topics.check_rights(read=[topic])
            facts = self._topics.describe([topic])[topic]
            marks, ends = self._topics.marks([topic]), self._topics.ends([topic])
            self._logs[topic] = Log(
                topic,
                facts.topic_id,
                {partition: one.low for (_, partition), one in marks.items()},
                {partition: one.high for (_, partition), one in marks.items()},
                {partition: end for (_, partition), end in ends.items()},
            )
        return self._logs[topic]

    def own_id(self, place: Place) -> str:
        """Topic id of a record, as the flow reads it."""
        return branch_id(self.log(place.topic).topic_id, self.branch(place))

    def branch(self, place: Place) -> int:
        """Number of the branch of its log that a record belongs to."""
        progress = self.logs.get(TopicPartition(place.topic, place.partition))
        return 0 if progress is None else progress.branch(place.offset)

    def offsets_at(self, topic: str, time_ms: int) -> dict[int, int]:
        """By partition, the first offset whose record has this timestamp or a later one; the end if there is none."""
        high, found = self.log(topic).high, self._topics.offsets_at(topic, time_ms)
        return {partition: at if (at := found.get(partition, -1)) >= 0 else end for partition, end in high.items()}

    def letters(self, topic: str) -> Letters:
        """The dead letters of a topic."""
        return Letters(self._settings, topic)

    def topic_ids(self, known: Mapping[str, str]) -> Mapping[str, str]:
        """Id by topic: a known one, else the current one; without topics that the broker does not show."""
        return RootTopics({}, (), known, self._settings).topic_ids

    def record(self, place: Place) -> Record | None:
        """The record at a place; None if the log has none at this offset."""
        return next(self.records(Span(place.topic, place.partition, place.offset, place.offset + 1)), None)

    def records(self, span: Span) -> Iterator[Record]:
        """The records of a range that Kafka has now, in order of offsets. One range is read at a time.

        Raises:
            BrokerError: Kafka does not answer, or refuses a request.
        """
        log = self.log(span.topic)
        border = self.archive.until.get(TopicPartition(span.topic, span.partition), 0) if self.archive else 0
        first = max(span.first, log.low.get(span.partition, 0), border)
        last = min(span.last, log.high.get(span.partition, 0))
        if first >= last:
            return
        consumer = self._consumer()
        assign(consumer, [Part(span.topic, span.partition, first)])
        for message in _messages(consumer, (span.topic, span.partition), last - first):
            if first <= message.offset() < last:
                yield _record(message, self.own_id(Place(span.topic, span.partition, message.offset())))
            if message.offset() + 1 >= last:
                return

    def count(self, span: Span) -> int:
        """Number of records of a range, in the archive and in Kafka."""
        return self.archived(span) + sum(1 for _ in self.records(span))

    def archived(self, span: Span) -> int:
        """Number of records of a range that are read from the archive."""
        place = TopicPartition(span.topic, span.partition)
        return 0 if self.archive is None else self.archive.count(place, span.first, span.last)

    def close(self) -> None:
        """Release the connections."""
        if self._reads is not None:
            self._reads.close()
            self._reads = None

    def _consumer(self) -> Consumer:
        if self._reads is None:
            options: dict[str, Any] = {"enable_auto_commit": False, "enable_partition_eof": True}
            config = self._settings.client(group_id="headwater-explain", **options)
            # A fetch at the end of a log would hold up the next range for half a second.
            self._reads = Consumer(config | {"isolation.level": "read_committed", "fetch.wait.max.ms": 10})
        return self._reads


def _messages(consumer: Consumer, place: tuple[str, int], most: int) -> Iterator[Any]:
    """What a consumer of one partition reads, up to the end of the partition."""
    deadline, what = time.monotonic() + _SECONDS, f"reading {place[0]}:{place[1]}"
    while True:
        for message in consumer.consume(min(most, _MOST), _WAIT_SECONDS):
            if (message.topic(), message.partition()) != place:
                continue  # of the range before
            if (error := message.error()) is None:
                deadline = time.monotonic() + _SECONDS
                yield message
            elif error.name() == "_PARTITION_EOF":
                return
            elif not passes(error):
                raise broker_error(error, what)
        if time.monotonic() > deadline:
            raise BrokerUnavailable(f"{what}: no answer", "Run the command again; that is safe")


def _record(message: Any, topic_id: str) -> Record:
    headers = tuple(headers_of(message))
    place = (message.topic(), message.partition(), message.offset())
    return Record(*place, message.key(), message.value(), message.timestamp()[1], headers, topic_id)
