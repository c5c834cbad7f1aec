"""Input and output of a transform."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from envelope import Envelope, Hop, Lineage, Node
from envelope import envelope_pb2 as pb
from envelope.codec import from_message
from envelope.dedup.retries import NO_RETRIES
from envelope.headers import Headers
from envelope.limits import DEFAULT_LIMITS

RETRY_PREFIX: Final = "hw-retry-"
RETRY_ATTEMPT: Final = f"{RETRY_PREFIX}attempt"


class Keep(Enum):
    """Placeholder for the input's value."""

    KEEP = "keep"

    def __repr__(self) -> str:
        return self.name


KEEP: Final = Keep.KEEP


class InputRecord:
    """One input record, as its transform sees it. Do not change it.

    If the topic is itself republished, another delivery of the event has another `partition`, `offset` and
    `timestamp_ms`, other hops after the first one, and may have other headers: they must not decide about outputs.

    Attributes:
        topic: Topic it was read from.
        partition: Its partition.
        offset: Its offset.
        key: Its key.
        value: Its value as Kafka delivered it, envelope included.
        headers: Its headers; names may repeat. A name that is not UTF-8 is U+FFFD.
        timestamp_ms: Its timestamp in milliseconds since 1970; None when the topic gives none.
        leader_epoch: Its leader epoch; None when unknown.
        topic_id: Kafka's id of the topic.
        cluster: Name of the Kafka cluster; empty when there is only one.
        data: The payload as its source declares it: the parsed JSON, or a protobuf message; else None.
    """

    __slots__ = (
        "_chain",
        "cluster",
        "data",
        "headers",
        "key",
        "leader_epoch",
        "message",
        "offset",
        "partition",
        "retries",
        "timestamp_ms",
        "topic",
        "topic_id",
        "value",
        "way",
        "wrapped",
    )

    message: pb.Envelope

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        leader_epoch: int | None = None,
        topic_id: str = "",
        cluster: str = "",
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.key = key
        self.value = value
        self.headers = headers
        self.timestamp_ms = timestamp_ms
        self.leader_epoch = leader_epoch
        self.topic_id = topic_id
        self.cluster = cluster
        self.data: Any = None
        self.wrapped: bytes | None = None
        self.way: Sequence[str] = ()
        self.retries = NO_RETRIES
        self._chain: tuple[Hop, ...] | None = None

    def __repr__(self) -> str:
        return f"InputRecord({self.node})"

    @property
    def node(self) -> Node:
        """Its coordinates."""
        return Node(self.topic, self.partition, self.offset, self.topic_id, self.cluster, self.leader_epoch)

    @property
    def payload(self) -> bytes:
        """The event itself: the envelope's payload, or the value when there is no envelope."""
        return self.message.payload

    @property
    def envelope(self) -> Envelope:
        """The envelope it came in, or a new envelope for it."""
        return from_message(self.message, DEFAULT_LIMITS)

    @property
    def chain(self) -> tuple[Hop, ...]:
        """The hops that it came through before it was written to this topic."""
        if self._chain is None:
            self._chain = self.retries.marked(self.envelope.chain, self.topic)
        return self._chain

    @property
    def lineage(self) -> Lineage:
        """The chain and the record itself."""
        return Lineage.of(self.chain, self.node)

    @property
    def root(self) -> Node:
        """The record that caused the event: the article's "root cause"."""
        return self.lineage.root

    @property
    def event_id(self) -> str:
        """Identity of the event; empty when it has none."""
        return self.message.event_id

    @property
    def event_time_us(self) -> int | None:
        """Event time in microseconds since 1970; the record's own timestamp when it came without an envelope."""
        return self.message.event_time_us if self.message.HasField("event_time_us") else None

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; more than 1 when it came from a retry topic."""
        return number_in(self.headers, RETRY_ATTEMPT) or 1


class OutputRecord(NamedTuple):
    """One message to produce. Fields that are not given keep the input's values.

    Attributes:
        payload: The event itself.
        key: InputRecord key; `rekeyed` in the hop follows from comparing it with the input's.
        topic: One of the republisher's targets; None for the first.
        payload_type: Type of the payload, for example a protobuf full name.
        content_type: Media type of the payload.
        event_id: Identity of the event.
        event_time_us: Event time in microseconds since 1970.
        headers: InputRecord headers.
    """

    payload: bytes | Keep = KEEP
    key: bytes | Keep | None = KEEP
    topic: str | None = None
    payload_type: str | Keep = KEEP
    content_type: str | Keep = KEEP
    event_id: str | Keep = KEEP
    event_time_us: int | Keep | None = KEEP
    headers: Headers | Keep = KEEP

    def changes(self) -> dict[str, Any]:
        """Fields of the envelope that differ from the input's, key and destination left out."""
        changed: dict[str, Any] = {}
        if self.payload is not KEEP:
            changed["payload"] = self.payload
        if self.payload_type is not KEEP:
            changed["payload_type"] = self.payload_type
        if self.content_type is not KEEP:
            changed["content_type"] = self.content_type
        if self.event_id is not KEEP:
            changed["event_id"] = self.event_id
        if self.event_time_us is not KEEP:
            changed["event_time_us"] = self.event_time_us
        return changed


PASS: Final = OutputRecord()
"""The input unchanged, with one more hop."""

Transform: TypeAlias = Callable[[InputRecord], OutputRecord | Iterable[OutputRecord] | None]
"""None drops the record. The outputs, their order, keys and topics must be the same in every run and for each delivery of
an event: the order determines their fan-out index."""


def number_in(headers: Headers, name: str) -> int:
    """The number in the last header of a name, at most 18 digits; 0 without one."""
    found = [value for one, value in headers if one == name]
    return int(found[-1]) if found and found[-1] and len(found[-1]) <= 18 and found[-1].isdigit() else 0


def identity(record: InputRecord) -> OutputRecord:
    """The transform that forwards every record unchanged."""
    return PASS
