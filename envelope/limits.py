"""Size limits of a message, and Kafka's limits on topic names and coordinates."""

import re
from dataclasses import dataclass
from typing import Any, Final

from envelope.errors import EnvelopeError, Reason

MAX_PARTITION = 2**31 - 1
MAX_OFFSET = 2**63 - 1
MAX_INDEX = 2**32 - 1
OFFSET_BITS: Final = 45
"""Bits of an offset beside a leader epoch: 35 trillion records of a partition, and 262,143 changes of its leader."""
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
MAX_EPOCH: Final = 2 ** (63 - OFFSET_BITS) - 1

# org.apache.kafka.common.internals.Topic: legal characters, at most 249 of them, neither "." nor "..".
_TOPIC = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]+\Z")


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, checked before memory of that size is allocated.

    Attributes:
        hops: Hops in a chain.
        payload_bytes: Bytes of one payload.
        overhead_bytes: Bytes that a message may have in addition to its payload.
        topic_chars: Characters of a topic name; Kafka's own limit is 249.
    """

    hops: int = 32
    payload_bytes: int = 1 << 20
    overhead_bytes: int = 1 << 16
    topic_chars: int = 249

    @property
    def message_bytes(self) -> int:
        """Maximum size of a whole serialized envelope, in bytes."""
        return self.payload_bytes + self.overhead_bytes


DEFAULT_LIMITS = Limits()


def check_topic(topic: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return `topic` if Kafka would accept the name.

    Raises:
        EnvelopeError: `BAD_TOPIC`. The text gives the length, not the name, which may contain control characters.
    """
    if not topic:
        raise EnvelopeError(Reason.MISSING_FIELD, "a hop has no topic")
    if len(topic) > limits.topic_chars or not _TOPIC.match(topic):
        raise EnvelopeError(Reason.BAD_TOPIC, f"Kafka does not allow this topic name of {len(topic)} characters")
    return topic


def root_number(offset: int, epoch: int | None) -> int:
    """A root's offset with the leader epoch in which the record was written.

    A log that lost its end (KIP-320) gives an offset twice, in two epochs. Within a log neither epochs nor offsets descend.
    """
    return offset if epoch is None or epoch <= 0 else epoch << OFFSET_BITS | offset


def number_of(record: Any) -> int | None:
    """`root_number` of a record, which may have a `leader_epoch`; None for one without an offset."""
    return None if record.offset is None else root_number(record.offset, getattr(record, "leader_epoch", None))


def branch_id(topic_id: str, number: int) -> str:
    """Topic id of the records of a branch of a log (`persistence.manifest.Progress`): from 1 on their offsets were used before."""
    return f"{topic_id}~{number}" if number else topic_id


def broker_id(topic_id: str) -> str:
    """The id by which the broker knows the topic of a record."""
    return topic_id.partition("~")[0]


def check_coordinates(partition: int | None, offset: int | None, epoch: int | None = None) -> tuple[int, int]:
    """Return partition and offset if both are present and in Kafka's range, and there is a `root_number`.

    Raises:
        EnvelopeError: `MISSING_FIELD` or `BAD_COORDINATES`.
    """
    if partition is None or offset is None:
        raise EnvelopeError(Reason.MISSING_FIELD, "a hop needs a partition and an offset")
    # No record can have offset 2**63 - 1: the log end offset, one higher, would not fit into 64 bits.
    if not (0 <= partition <= MAX_PARTITION and 0 <= offset < MAX_OFFSET):
        raise EnvelopeError(Reason.BAD_COORDINATES, f"partition {partition}, offset {offset}")
    if epoch is not None and epoch > 0 and (epoch > MAX_EPOCH or offset >> OFFSET_BITS):
        raise EnvelopeError(Reason.BAD_COORDINATES, f"offset {offset} in leader epoch {epoch}")
    return partition, offset
