"""Why a message was refused: one closed set of reason codes, and the error that carries one."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envelope.message import Hop
    from envelope.raised import Raised


class Reason(StrEnum):
    """Reason code of a rejected message, written to the dead-letter topic and counted by name."""

    EMPTY = "empty"
    """The record has no value, or one of zero bytes."""
    NOT_AN_ENVELOPE = "not_an_envelope"
    """The value does not start as an envelope does: foreign, framed or compressed bytes."""
    MALFORMED = "malformed"
    """The value starts as an envelope but is not valid protobuf."""
    UNSUPPORTED_FORMAT = "unsupported_format"
    """The envelope's format version is newer than this code."""
    TRUNCATED = "truncated"
    """The envelope says that it ends in a checksum and does not."""
    CHECKSUM_MISMATCH = "checksum_mismatch"
    """The checksum differs from the one of the bytes before it."""
    MISSING_FIELD = "missing_field"
    """A hop without topic, partition or offset, or a payload without a field that the flow needs."""
    NULL_KEY = "null_key"
    """The stage's key of this message is null."""
    KEY_MISMATCH = "key_mismatch"
    """The envelope's key differs from the record's key."""
    BAD_TOPIC = "bad_topic"
    """A topic name that Kafka would not allow."""
    BAD_COORDINATES = "bad_coordinates"
    """A negative partition or offset, or one that Kafka cannot have."""
    TOO_MANY_HOPS = "too_many_hops"
    """The chain is longer than the limit."""
    CHAIN_LOOP = "chain_loop"
    """The chain passes the same topic, partition and offset twice."""
    FOREIGN_ROOT = "foreign_root"
    """The root topic is not one of those that are allowed."""
    ROOT_BEYOND_END = "root_beyond_end"
    """The root's offset is beyond the end of its topic: folded, it would silence its key for ever."""
    PAYLOAD_TOO_LARGE = "payload_too_large"
    """The payload, or the whole message, is over the limit."""
    UNKNOWN_PAYLOAD_TYPE = "unknown_payload_type"
    """The payload is of another type than the source declares."""
    BAD_PAYLOAD = "bad_payload"
    """The payload does not parse as what the source declares."""
    WRONG_DESTINATION = "wrong_destination"
    """The envelope was written for another topic."""
    NOT_FINITE = "not_finite"
    """A NaN or an infinity where a fold needs a number."""
    OVERFLOW = "overflow"
    """An integer total would leave 64 bits."""
    TRANSFORM_FAILED = "transform_failed"
    """A map, filter, flat_map or key function raised."""
    TOO_MANY_SIBLINGS = "too_many_siblings"
    """Its root has as many messages without a fan-out index in the state as a state tells apart by event id."""
    TOO_MANY_LANES = "too_many_lanes"
    """It is the first of its lane, and the state has as many lanes as it may."""
    TOO_MANY_OUTPUTS = "too_many_outputs"
    """A transform made more outputs of one input than are allowed."""
    FOLD_FAILED = "fold_failed"
    """A fold raised."""
    UNPROVEN = "unproven"
    """It came back by a retry or redrive route below the floor, and nothing shows whether it was folded."""
    DIVERTED = "diverted"
    """The flow's own `divert` step sent it to the dead-letter topic."""


class EnvelopeError(ValueError):
    """A message that cannot be used, with the reason code to file it under.

    The text names the rule that was broken and never quotes the message's payload.

    Attributes:
        reason: Reason code.
        chain: Source chain of the message, where its envelope could be read.
        raised: What user code raised, where that is the reason.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.chain: tuple[Hop, ...] | None = None
        self.raised: Raised | None = None

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"
