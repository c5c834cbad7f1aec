"""Which records of a topic are the same event, and which hop sent the event again."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from envelope import Envelope, EnvelopeError, Lineage, Node, Position, Siblings, decode
from envelope.codec import redriven_payload
from envelope.dedup.lineage import Edge, position_order
from envelope.redrive import HEALED, LATE, VIA, read_via
from jobs.explaining.log import Reader, Span
from jobs.tracing import Place

_MARKS: Final = (HEALED, LATE)
"""Names of marks before a hop, which read the record that the hop reads."""


class Event(NamedTuple):
    """Identity of an event among the records of a topic.

    Attributes:
        group: Path, root partition and root topic id.
        position: Root offset and the index of every hop.
    """

    group: str
    position: Position


class Read(NamedTuple):
    """A record as far as its event is concerned.

    Attributes:
        event: The event.
        lineage: Its lineage, with the root's topic id.
        event_id: Event id of its envelope; empty without one.
        grouped: Nothing tells it from its siblings, and the flow folds those of one batch: `Siblings.GROUP`.
    """

    event: Event
    lineage: Lineage
    event_id: str
    grouped: bool = False


class Resend(NamedTuple):
    """Who made two records of one.

    Attributes:
        via: Name of the republisher, or of the hop that a redrive or a retry topic adds.
        read: The record that it read more than once.
        target: Topic that it wrote.
        kind: `republisher`, `redrive` or `retry`.
    """

    via: str
    read: Node
    target: str
    kind: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Another record of the same event.

    Attributes:
        place: Its coordinates.
        timestamp_ms: Its timestamp in milliseconds since 1970.
        resend: The hop that sent the event again; None if it is not known.
        letter: The dead letter that it was redriven from; None if it was not redriven.
        lineage: Its lineage, with the root's topic id; None if it is not known.
        record: The record; None if it is not known.
    """

    place: Place
    timestamp_ms: int
    resend: Resend | None
    letter: Place | None = None
    lineage: Lineage | None = None
    record: Record | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The copy as a JSON object."""
        by = self.resend
        return {
            "copy": str(self.place),
            "timestamp_ms": self.timestamp_ms,
            "sent_again_by": None if by is None else by.via,
            "kind": None if by is None else by.kind,
            "read_again": None if by is None else str(by.read),
            "letter": None if self.letter is None else str(self.letter),
        }


class Near(NamedTuple):
    """The neighbourhood of a record.

    Attributes:
        copies: Other records of its event.
        overtaken: An earlier record of its partition, or one with its key in another, has a higher position on its path.
    """

    copies: tuple[Copy, ...] = ()
    overtaken: bool = False


class Events:
    """Finds the event of each record of a flow's sources.

    Args:
        flow: The flow.
        topic_ids: Current id by topic, for roots without a topic id.
    """

    def __init__(self, flow: Flow[Any], topic_ids: Mapping[str, str]) -> None:
        self._flow = flow
        self._topic_ids = topic_ids

    def of(self, record: Record) -> Read | None:
        """The event of a record; None if it cannot be read, or is a tombstone."""
        topic = self._flow.source_of(record.topic)
        envelope = envelope_of(record.value, enveloped=topic.envelope)
        if envelope is None and (topic.envelope or record.value is None):
            return None
        chain, event_id = (envelope.chain, envelope.event_id) if envelope else ((), "")
        own = Node(record.topic, record.partition, record.offset, record.topic_id, topic.cluster)
        lineage = Lineage.of(topic.retries.marked(chain, record.topic), own).resolved(self._topic_ids)
        identity = event_id if topic.siblings is Siblings.EVENT_ID else ""
        standing = lineage.standing(event_id=identity)
        grouped = standing.ambiguous and topic.siblings is Siblings.GROUP
        return Read(Event(standing.group, standing.position), lineage, event_id, grouped)

    def near(self, of: Record, read: Read, records: Iterable[Record]) -> "Near":
        """The other records of an event among some records, and whether one that came before it overtook it.

        Args:
            of: The record.
            read: Its event.
            records: Records of the same topic.
        """
        found, overtaken = [], False
        for record in records:
            if record.node == of.node or (other := self.of(record)) is None or other.event.group != read.event.group:
                continue
            if other.event == read.event:
                first, later = (read, other) if _before(of, record) else (other, read)
                resend = resend_of(first.lineage, later.lineage)
                place = Place(record.topic, record.partition, record.offset)
                letter = letter_of(other.lineage)
                found.append(Copy(place, record.timestamp_ms, resend, letter, other.lineage, record))
            elif record.offset < of.offset if record.partition == of.partition else record.key == of.key:
                order = position_order(other.event.position) > position_order(read.event.position)
                overtaken = overtaken or order
        return Near(tuple(found), overtaken)


def around(reader: Reader, record: Record, search: int) -> list[Span]:
    """The ranges in which copies of a record are searched.

    Args:
        reader: Reads the topic.
        record: The record.
        search: Number of offsets before it, and after it, in its partition, and in the others together around its timestamp.
    """
    spans = [Span(record.topic, record.partition, max(record.offset - search, 0), record.offset + search + 1)]
    others = reader.log(record.topic).high.keys() - {record.partition}
    if others and record.timestamp_ms >= 0:
        at, each = reader.offsets_at(record.topic, record.timestamp_ms), max(search // len(others), 1)
        spans += [Span(record.topic, part, max(at[part] - each, 0), at[part] + each + 1) for part in sorted(others)]
    return spans


def resend_of(first: Lineage, later: Lineage) -> Resend | None:
    """The hop at which the lineages of two records of one event part: it read one record and sent two.

    Args:
        first: Lineage of the first record.
        later: Lineage of the later one.

    Returns:
        None if both have the same coordinates, or other roots.
    """
    same = 0
    for one, other in zip(first.nodes, later.nodes, strict=False):
        if (one.topic, one.partition, one.offset) != (other.topic, other.partition, other.offset):
            break
        same += 1
    # A redriven record has more hops than the record that was rejected.
    made = later if len(later.nodes) > same else first
    if not same or len(made.nodes) <= same:
        return None
    at = next(i for i in range(same - 1, len(made.edges)) if made.edges[i].via not in _MARKS)
    return _hop(made, at)


def hops_of(lineage: Lineage) -> Iterator[Resend]:
    """The hops of a lineage, as if each had sent it again. A redrive, which adds two hops, is one."""
    for at, edge in enumerate(lineage.edges):
        before = lineage.edges[at - 1] if at else None
        second = before is not None and before.pass_through and before.via not in _MARKS and edge.pass_through
        if edge.via not in _MARKS and not second:
            yield _hop(lineage, at)


def _hop(lineage: Lineage, at: int) -> Resend:
    edges, last, edge = lineage.edges, at, lineage.edges[at]
    while (
        edge.pass_through
        and last + 1 < len(edges)
        and edges[last + 1].pass_through
        and edges[last + 1].via not in _MARKS
    ):
        last += 1
    return Resend(edge.via, lineage.nodes[at], lineage.nodes[last + 1].topic, kind_of(edge))


def kind_of(edge: Edge) -> str:
    """What made a record of another one: a republisher, a redrive or a retry topic."""
    if not edge.pass_through or edge.via in _MARKS:
        return "republisher"
    return "redrive" if edge.via == VIA or read_via(edge.via) is not None else "retry"


def letter_of(lineage: Lineage) -> Place | None:
    """The dead letter that a record was redriven from; None if it was not redriven."""
    if lineage.redrive is None:
        return None
    node = lineage.nodes[-2]
    return Place(node.topic, node.partition, node.offset)


def envelope_of(value: bytes | None, *, enveloped: bool) -> Envelope | None:
    """The envelope of a record's value; None if it has none, or cannot be read.

    Args:
        value: The value.
        enveloped: The topic has envelopes; otherwise only its redriven records do.
    """
    try:
        return decode(value) if enveloped else redriven_payload(value)
    except EnvelopeError:
        return None


def _before(one: Record, other: Record) -> bool:
    """Whether a record was produced before another one: in one partition by its offset, else by its timestamp."""
    if one.partition == other.partition:
        return one.offset < other.offset
    return (one.timestamp_ms, one.partition) <= (other.timestamp_ms, other.partition)
