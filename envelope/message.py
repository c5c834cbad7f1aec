"""The envelope and its hops as plain immutable values."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

FORMAT = 1
"""The format version that this code writes, and the newest version that it reads."""


class Tombstones(StrEnum):
    """What to do with tombstones: records without a value, which delete a key in a compacted topic."""

    SKIP = "skip"
    """Skip and count them."""
    DEAD_LETTER = "dead_letter"
    """Send them to the dead-letter topic with the reason `empty`."""
    ELEMENT = "element"
    """Pass them to the flow with None as value. They have no chain: their lineage is their own coordinates."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop through a republish service: the record that it read, and how the output relates to that record.

    Attributes:
        topic: Topic of the record that was read.
        partition: Its partition.
        offset: Its offset.
        via: Name of the republisher.
        index: Fan-out index of the message among the outputs of that input, from 0; None when it is not given.
        count: Number of outputs of that input.
        rekeyed: The output's key differs from the input's.
        pass_through: A hop through a retry or dead-letter topic, left out of the lineage.
        topic_id: Kafka's id of the topic, base64 as Kafka's tools print it; empty when unknown.
        leader_epoch: Leader epoch of the record.
        timestamp_ms: Timestamp of the record in milliseconds since 1970.
        cluster: Name of the Kafka cluster; empty when there is only one.
        keyless: The output has no key, or the input was republished and had no key: the partition is arbitrary.
        unknown: Serialized fields of a newer schema, kept unchanged.
    """

    topic: str
    partition: int
    offset: int
    via: str = ""
    index: int | None = None
    count: int | None = None
    rekeyed: bool = False
    pass_through: bool = False
    topic_id: str = ""
    leader_epoch: int | None = None
    timestamp_ms: int | None = None
    cluster: str = ""
    keyless: bool = False
    unknown: bytes = b""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload with its identity and its source chain.

    Attributes:
        payload: The event itself.
        chain: Hops, the first republisher's input first. Empty for a message from an ordinary producer.
        key: The record key it was produced with; None for a null key.
        event_id: Identity of the event; empty when it has none.
        event_time_us: Event time in microseconds since 1970.
        payload_type: Protobuf full name of the payload, or a name the teams agreed on.
        content_type: Media type of the payload.
        producer: Producer name (Pulsar PIP-6), with `sequence`.
        sequence: Sequence number given by that producer.
        destination: Topic it was produced to; checked on read when present.
        traceparent: W3C trace context.
        format: Format version.
        unknown: Serialized fields of a newer schema, kept unchanged.
        producer_epoch: Session of the producer; a higher one replaces the earlier ones of the same name.
        last_sequence: Last sequence number of a batch that begins with `sequence`; None for a single message.
        sequence_per_partition: The producer numbers each partition by itself, without holes.
    """

    payload: bytes
    chain: tuple[Hop, ...] = ()
    key: bytes | None = None
    event_id: str = ""
    event_time_us: int | None = None
    payload_type: str = ""
    content_type: str = ""
    producer: str = ""
    sequence: int | None = None
    destination: str = ""
    traceparent: str = ""
    format: int = FORMAT
    unknown: bytes = b""
    producer_epoch: int | None = None
    last_sequence: int | None = None
    sequence_per_partition: bool = False

    def with_hop(self, hop: Hop) -> Self:
        """Return the envelope with `hop` appended to its chain."""
        return replace(self, chain=(*self.chain, hop))

    def with_chain(self, chain: Iterable[Hop]) -> Self:
        """Return the envelope with another chain."""
        return replace(self, chain=tuple(chain))
