"""Why a message was rejected: a closed set of reason codes, and the error that carries one."""

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
    """The value does not start like an envelope: foreign, framed or compressed bytes."""
    MALFORMED = "malformed"
    """The value starts like an envelope but is not valid protobuf."""
    UNSUPPORTED_FORMAT = "unsupported_format"
    """The envelope's format version is newer than this code supports."""
    TRUNCATED = "truncated"
    """The envelope is marked as ending in a checksum and does not end in one."""
    CHECKSUM_MISMATCH = "checksum_mismatch"
    """The checksum does not match the bytes before it."""
    MISSING_FIELD = "missing_field"
    """A hop lacks its topic, partition or offset, or a payload lacks a field that the flow needs."""
    NULL_KEY = "null_key"
    """The stage's key is null for this message."""
    KEY_TOO_LONG = "key_too_long"
    """The stage's key has more bytes than the store of the stage takes."""
    KEY_MISMATCH = "key_mismatch"
    """The envelope's key differs from the record's key."""
    BAD_TOPIC = "bad_topic"
    """A topic name that Kafka would not allow, or a topic that the flow does not declare."""
    BAD_COORDINATES = "bad_coordinates"
    """A negative partition or offset, or one that Kafka cannot assign."""
    TOO_MANY_HOPS = "too_many_hops"
    """The chain is longer than the limit."""
    CHAIN_LOOP = "chain_loop"
    """The chain passes through one topic twice; retry and dead-letter topics do not count."""
    FOREIGN_ROOT = "foreign_root"
    """The root topic is not one of the allowed topics."""
    ROOT_BEYOND_END = "root_beyond_end"
    """The root's offset is beyond the end of its topic: if folded, its key's later messages would be dropped."""
    PAYLOAD_TOO_LARGE = "payload_too_large"
    """The payload, or the whole message, exceeds its limit."""
    UNKNOWN_PAYLOAD_TYPE = "unknown_payload_type"
    """The payload's type differs from the one that the source declares."""
    BAD_PAYLOAD = "bad_payload"
    """The payload does not parse as the type that the source declares."""
    WRONG_DESTINATION = "wrong_destination"
    """The envelope was written for another topic."""
    NOT_FINITE = "not_finite"
    """A NaN or an infinity where a fold needs a number."""
    OVERFLOW = "overflow"
    """An integer total would exceed 64 bits."""
    BAD_EVENT_TIME = "bad_event_time"
    """It has no event time, or an invalid one, and the stage has windows."""
    WINDOW_CLOSED = "window_closed"
    """Its window is closed, and the stage sends late messages to the dead-letter topic."""
    TOO_MANY_SESSIONS = "too_many_sessions"
    """It begins a session, and the state of its key already has the maximum number of sessions."""
    TRANSFORM_FAILED = "transform_failed"
    """A map, filter, flat_map or key function raised."""
    MISSING_ENTRY = "missing_entry"
    """The table that the flow looks up has no row for its key."""
    TOO_MANY_SIBLINGS = "too_many_siblings"
    """The state already holds the maximum number of messages of its root that have no fan-out index."""
    TOO_MANY_LANES = "too_many_lanes"
    """It is the first of its lane, and the state already has the maximum number of lanes."""
    TOO_MANY_OUTPUTS = "too_many_outputs"
    """A transform returned more outputs for one input than allowed."""
    FOLD_FAILED = "fold_failed"
    """A fold raised."""
    BAD_SEQUENCE = "bad_sequence"
    """The sequence number is not an integer of 64 bits."""
    OUT_OF_SEQUENCE = "out_of_sequence"
    """The sequence number is lower than the last one, or not the next one, and the filter's policy refuses it."""
    UNPROVEN = "unproven"
    """It arrived below the floor by a retry or redrive route, and nothing shows whether it was folded before."""
    DIVERTED = "diverted"
    """The flow's own `divert` step sent it to the dead-letter topic."""


class EnvelopeError(ValueError):
    """A message that cannot be used, with its reason code.

    The text names the rule that was broken and never quotes the message's payload.

    Attributes:
        reason: Reason code.
        chain: Source chain of the message; None when its envelope could not be read.
        raised: Exception of user code, when that is the reason; else None.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.chain: tuple[Hop, ...] | None = None
        self.raised: Raised | None = None

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"
