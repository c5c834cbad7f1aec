"""Counts which hops sent records again: republishers, redrives and retry topics."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from envelope import Lineage, Position
from jobs.explaining.copies import Events, Read, Resend, hops_of, resend_of
from jobs.explaining.log import Reader, Span
from jobs.explaining.ranges import spans_of
from jobs.tracing import Place
from persistence.kafka import KafkaSettings


class Passage(NamedTuple):
    """A hop between two topics.

    Attributes:
        via: Name of the republisher, or of the hop that a redrive or a retry topic adds.
        source: Topic that it reads.
        target: Topic that it writes.
        kind: `republisher`, `redrive` or `retry`.
    """

    via: str
    source: str
    target: str
    kind: str


@dataclass(slots=True)
class Resent:
    """What one hop sent again.

    Attributes:
        passage: The hop.
        records: Records of the range that went through it, those sent again included.
        resent: Records that it sent again: an earlier record of the range is the same event up to this hop.
        events: Events that it sent again at least once.
        first: The first of these records by its timestamp; None if there is none.
        last: The last of them.
        first_ms: Timestamp of the first, in milliseconds since 1970; None if there is none.
        last_ms: Timestamp of the last.
        times_ms: Timestamp of each.
    """

    passage: Passage
    records: int = 0
    resent: int = 0
    events: int = 0
    first: Place | None = None
    last: Place | None = None
    first_ms: int | None = None
    last_ms: int | None = None
    times_ms: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, place: Place, time_ms: int, *, again: bool) -> None:
        """Count a record that it sent again; `again` if it had sent the event again before."""
        self.resent += 1
        self.events += not again
        self.times_ms.append(time_ms)
        if self.first_ms is None or time_ms < self.first_ms:
            self.first, self.first_ms = place, time_ms
        if self.last_ms is None or time_ms >= self.last_ms:
            self.last, self.last_ms = place, time_ms

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        return {
            **self.passage._asdict(),
            "records": self.records,
            "resent": self.resent,
            "events": self.events,
            "first": None if self.first is None else str(self.first),
            "first_ms": self.first_ms,
            "last": None if self.last is None else str(self.last),
            "last_ms": self.last_ms,
        }


@dataclass(slots=True)
class Blame:
    """Which hops sent records of a range again.

    Attributes:
        spans: The range.
        hops: The hops, the one that sent most again first.
        records: Records read.
        resent: Records whose event is in the range before.
        unread: Records that have no envelope where one is expected, or cannot be read.
        grouped: Records that have the position of an earlier one, and may be its siblings: `siblings="group"`.
        expired: Offsets of the range that retention has deleted.
        first_ms: Lowest timestamp of a record, in milliseconds since 1970; None without records.
        last_ms: Highest timestamp.
    """

    spans: Sequence[Span]
    hops: Sequence[Resent] = ()
    records: int = 0
    resent: int = 0
    unread: int = 0
    expired: int = 0
    grouped: int = 0
    first_ms: int | None = None
    last_ms: int | None = None


def blame(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    ranges: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Blame:
    """Count by hop the records that were sent again, in a range of the topics that a flow reads.

    A record was sent again if an earlier record of the range has the same position on the same path. The hop is the one
    from which on the coordinates of the two differ: it read one record and sent two. Where `siblings="group"` folds records
    of one position as siblings, they are counted apart. The range is read in order of topics
    and partitions; for each event about 0.3 KB are held in memory.

    Args:
        flow: The flow.
        kafka: Settings of the Kafka cluster.
        ranges: See `jobs.explaining.ranges.spans_of`.
        progress: Called with the number of offsets read, and their total.

    Raises:
        UsageError: A range is invalid.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    with closing(Reader(kafka)) as reader:
        spans = spans_of(ranges, list(flow.topics), reader)
        ids = {topic: reader.log(topic).topic_id for topic in flow.topics}
        events = Events(flow, reader.topic_ids(ids))
        count, total, done, expired = _Count(), sum(span.last - span.first for span in spans), 0, 0
        for span in spans:
            expired += max(min(span.last, reader.log(span.topic).low[span.partition]) - span.first, 0)
            for record in reader.records(span):
                count.add(record, events.of(record))
                if progress is not None:
                    progress(done + record.offset + 1 - span.first, total)
            done += span.last - span.first
    hops = sorted(count.hops.values(), key=lambda one: (-one.resent, -one.records, one.passage))
    return Blame(
        spans, hops, count.records, count.resent, count.unread, expired, count.grouped, count.first_ms, count.last_ms
    )


class _Count:
    """Counts records, in the order in which they are read."""

    def __init__(self) -> None:
        self.hops: dict[Passage, Resent] = {}
        self.records = self.resent = self.unread = self.grouped = 0
        self.first_ms: int | None = None
        self.last_ms: int | None = None
        self._seen: dict[str, dict[Position, tuple[int, ...] | Lineage]] = {}
        self._again: set[tuple[Passage, str, Position]] = set()

    def add(self, record: Record, read: Read | None) -> None:
        """Count a record."""
        self.records += 1
        at = record.timestamp_ms
        self.first_ms = at if self.first_ms is None else min(self.first_ms, at)
        self.last_ms = at if self.last_ms is None else max(self.last_ms, at)
        if read is None:
            self.unread += 1
            return
        (group, position), lineage = read.event, read.lineage
        for one in hops_of(lineage):
            self._hop(_passage(one)).records += 1
        seen = self._seen.setdefault(group, {})
        if (known := seen.get(position)) is None:
            seen[position] = lineage if lineage.pass_through else _flat(lineage)
            return
        if read.grouped and not lineage.pass_through:
            self.grouped += 1
            return
        self.resent += 1
        first = known if isinstance(known, Lineage) else _lineage(known, lineage.reduced())
        if (resend := resend_of(first, lineage)) is None:
            return
        passage = _passage(resend)
        place = Place(record.topic, record.partition, record.offset)
        again = (passage, group, position)
        self._hop(passage).add(place, at, again=again in self._again)
        self._again.add(again)

    def _hop(self, passage: Passage) -> Resent:
        return self.hops.setdefault(passage, Resent(passage))


def _passage(hop: Resend) -> Passage:
    return Passage(hop.via, hop.read.topic, hop.target, hop.kind)


def _flat(lineage: Lineage) -> tuple[int, ...]:
    """Partition and offset of every node: the path of its event has the rest."""
    return tuple(number for node in lineage.nodes for number in (node.partition, node.offset))


def _lineage(flat: tuple[int, ...], other: Lineage) -> Lineage:
    """The lineage of another record of an event.

    Args:
        flat: What `_flat` made of it.
        other: Lineage of a record of the event, without pass-through hops.
    """
    places = zip(flat[::2], flat[1::2], strict=True)
    nodes = zip(other.nodes, places, strict=True)
    return Lineage(tuple(replace(node, partition=at[0], offset=at[1]) for node, at in nodes), other.edges)
