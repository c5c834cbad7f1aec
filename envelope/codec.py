"""Converts bytes to `Envelope` and back, and appends a hop without parsing.

A sealed envelope begins with `format` and `sealed` and ends with `checksum`, a CRC32C of
every byte before it. Protobuf merges the repeated fields of concatenated messages, so a hop
is appended by writing its bytes in place of the checksum, and the CRC is extended from its
old value. Torn, merged and bit-flipped messages are therefore detected before parsing;
without the checksum, 86 % of single-bit flips would parse.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import google_crc32c
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from envelope import envelope_pb2 as pb
from envelope.errors import EnvelopeError, Reason
from envelope.framing import strip_frame
from envelope.limits import DEFAULT_LIMITS, MAX_INDEX, Limits, check_coordinates, check_topic
from envelope.message import FORMAT, Envelope, Hop
from envelope.redrive import read_via

HEAD: Final = b"\x08\x01\x10\x01"
"""First bytes of a sealed envelope: format = 1, sealed = true."""
SEAL_TAG: Final = b"\xfd\x7f"
"""Tag of `checksum`: field 2047, wire type fixed32."""
SEAL_BYTES: Final = 6
_FORMAT_TAG: Final = 0x08
CHAIN_TAG: Final = b"\x4a"
"""Tag of a hop."""

_SEALING: Final = ("format", "sealed", "checksum")

_crc32c: Final[Callable[[bytes], int]] = google_crc32c.value
_extend_crc32c: Final[Callable[[int, bytes], int]] = google_crc32c.extend
_from_string: Final = pb.Envelope.FromString


def encode(envelope: Envelope, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Serialize and seal an envelope.

    Raises:
        EnvelopeError: The envelope exceeds a limit, a hop's coordinates are invalid, or the
            format is not the version that this code writes.
    """
    if envelope.format != FORMAT:
        raise EnvelopeError(Reason.UNSUPPORTED_FORMAT, f"this code writes format {FORMAT}, not {envelope.format}")
    _check_sizes(len(envelope.chain), len(envelope.payload), limits)
    message = pb.Envelope(
        event_id=envelope.event_id,
        payload_type=envelope.payload_type,
        payload=envelope.payload,
        content_type=envelope.content_type,
        producer=envelope.producer,
        destination=envelope.destination,
        traceparent=envelope.traceparent,
        event_time_us=envelope.event_time_us,
        key=envelope.key,
        sequence=envelope.sequence,
        producer_epoch=envelope.producer_epoch,
        last_sequence=envelope.last_sequence,
        sequence_per_partition=envelope.sequence_per_partition,
    )
    hops = b"".join(encode_hop(hop, limits) for hop in envelope.chain)
    return seal(HEAD + message.SerializeToString() + hops + envelope.unknown)


def encode_hop(hop: Hop, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Serialize one hop as it appears in an envelope: tag, length, fields.

    Raises:
        EnvelopeError: Invalid topic, coordinates or index.
    """
    check_topic(hop.topic, limits)
    check_coordinates(hop.partition, hop.offset, hop.leader_epoch)
    for number in (hop.index, hop.count):
        if number is not None and not 0 <= number <= MAX_INDEX:
            raise EnvelopeError(Reason.BAD_COORDINATES, f"the fan-out index or count {number} is out of range")
    message = pb.Hop(
        topic=hop.topic,
        partition=hop.partition,
        offset=hop.offset,
        via=hop.via,
        index=hop.index,
        count=hop.count,
        rekeyed=hop.rekeyed,
        pass_through=hop.pass_through,
        topic_id=hop.topic_id,
        leader_epoch=hop.leader_epoch,
        timestamp_ms=hop.timestamp_ms,
        cluster=hop.cluster,
        keyless=hop.keyless,
    )
    body = message.SerializeToString() + hop.unknown
    return CHAIN_TAG + varint(len(body)) + body


def append_hop(
    value: bytes,
    hop: Hop | bytes,
    *,
    key: bytes | None = None,
    destination: str = "",
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Append one hop to the serialized envelope `value` by concatenation.

    The payload and unknown fields are not changed. The checksum is extended, not recomputed, so
    earlier damage stays detectable. An envelope without a checksum gets one. The reader checks
    the length of the chain.

    Args:
        value: A serialized envelope, without foreign framing.
        hop: The hop, or its bytes from `encode_hop`.
        key: New record key; None keeps the old key.
        destination: Topic it will be produced to; empty keeps the old destination.
        limits: Limits for the hop.

    Raises:
        EnvelopeError: `value` does not begin or end like an envelope, or the hop is invalid.
    """
    tail = hop if isinstance(hop, bytes) else encode_hop(hop, limits)
    if key is not None or destination:
        # Protobuf: if a singular field occurs twice, the last value counts.
        tail = pb.Envelope(key=key, destination=destination).SerializeToString() + tail
    if is_sealed(value):
        return append_bytes(value, tail)
    check_head(value, limits)
    return seal(HEAD + value[len(HEAD) - 2 :] + tail)


def append_bytes(value: bytes, tail: bytes) -> bytes:
    """Append serialized fields to an envelope that is known to be sealed: `append_hop` without its checks."""
    crc = _extend_crc32c(int.from_bytes(value[-4:], "little"), tail)
    return value[:-SEAL_BYTES] + tail + SEAL_TAG + crc.to_bytes(4, "little")


def decode(value: bytes | None, limits: Limits = DEFAULT_LIMITS) -> Envelope:
    """Parse and check one serialized envelope.

    Confluent Schema Registry framing before the envelope is detected and stripped.

    Raises:
        EnvelopeError: With the reason code of the first rule that is broken.
    """
    return from_message(parse(strip_frame(value) if value else b"", limits), limits)


def redriven_payload(value: bytes | None, limits: Limits = DEFAULT_LIMITS) -> Envelope | None:
    """The envelope of a redriven record of a topic without envelopes; None for any other value.

    Such an envelope is recognised by its last hop, which goes through the dead-letter topic.
    """
    if value is None or not value.startswith(HEAD):
        return None
    try:
        message = decode(value, limits)
    except EnvelopeError:
        return None
    last = message.chain[-1] if message.chain else None
    return message if last is not None and last.pass_through and read_via(last.via) else None


def from_message(message: pb.Envelope, limits: Limits = DEFAULT_LIMITS) -> Envelope:
    """Convert the result of `parse` to an immutable value and check its hops.

    Raises:
        EnvelopeError: A hop without topic, partition or offset, or with invalid ones.
    """
    return Envelope(
        payload=message.payload,
        chain=tuple(_hop(hop, limits) for hop in message.chain),
        key=message.key if message.HasField("key") else None,
        event_id=message.event_id,
        event_time_us=message.event_time_us if message.HasField("event_time_us") else None,
        payload_type=message.payload_type,
        content_type=message.content_type,
        producer=message.producer,
        sequence=message.sequence if message.HasField("sequence") else None,
        destination=message.destination,
        traceparent=message.traceparent,
        format=message.format,
        unknown=_unknown(message),
        producer_epoch=message.producer_epoch if message.HasField("producer_epoch") else None,
        last_sequence=message.last_sequence if message.HasField("last_sequence") else None,
        sequence_per_partition=message.sequence_per_partition,
    )


def parse(value: bytes, limits: Limits = DEFAULT_LIMITS) -> pb.Envelope:
    """Parse and check one serialized envelope except its individual hops, at a fifth of the cost of `decode`.

    Sufficient for a reader that only forwards the envelope: the writer that sealed it checked the hops.

    Raises:
        EnvelopeError: With the reason code of the first rule that is broken.
    """
    body, tail = value[:-SEAL_BYTES], value[-SEAL_BYTES:]
    sealed = body[:4] == HEAD
    if not (
        sealed
        and tail[:2] == SEAL_TAG
        and _crc32c(body) == int.from_bytes(tail[2:], "little")
        and len(value) <= limits.message_bytes
    ):
        check_head(value, limits)
        check_seal(value)
    try:
        message = _from_string(value)
    except DecodeError as error:
        raise EnvelopeError(Reason.MALFORMED, "not valid protobuf") from error
    if message.format != FORMAT:  # the field occurs twice
        raise EnvelopeError(Reason.UNSUPPORTED_FORMAT, f"this code reads format {FORMAT}; upgrade headwater")
    if sealed or message.sealed or message.HasField("checksum"):
        if not sealed:  # another writer's order of fields, or a bit flip: an envelope that claims a seal must have it
            _check_tail(value)
            _check_crc(value)
        if message.checksum != int.from_bytes(value[-4:], "little"):
            raise EnvelopeError(Reason.TRUNCATED, "the last bytes are part of another field, not a checksum")
    if len(message.chain) > limits.hops or len(message.payload) > limits.payload_bytes:
        _check_sizes(len(message.chain), len(message.payload), limits)
    return message


def rewrite(message: pb.Envelope, hops: bytes = b"", limits: Limits = DEFAULT_LIMITS, **fields: Any) -> bytes:
    """Serialize and seal a parsed envelope with some fields changed and `hops` appended to its chain.

    The arguments are those of `Rewriter`.

    Raises:
        EnvelopeError: `PAYLOAD_TOO_LARGE`.
    """
    return Rewriter(message, limits).write(hops, fields)


class Rewriter:
    """Serializes and seals a parsed envelope, once or several times, with some fields changed and a longer chain.

    Unknown fields are kept. The message itself is not changed.

    Args:
        message: Result of `parse`.
        limits: Limits for the payload. The reader checks the length of the chain.
    """

    __slots__ = ("_changed", "_copy", "_limits", "_message")

    def __init__(self, message: pb.Envelope, limits: Limits = DEFAULT_LIMITS) -> None:
        self._message = message
        self._limits = limits
        self._copy: pb.Envelope | None = None
        self._changed: Mapping[str, Any] = {}

    def write(self, hops: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return the serialized envelope.

        Args:
            hops: Bytes of hops, from `encode_hop`, which are appended to the chain.
            fields: Name and new value of each field that changes; None clears the field.

        Raises:
            EnvelopeError: `PAYLOAD_TOO_LARGE`.
        """
        copy = self._copy
        if copy is None or not self._changed.keys() <= fields.keys():  # the copy has a change that is not wanted now
            copy = self._copy = pb.Envelope()
            copy.CopyFrom(self._message)
            for name in _SEALING:
                copy.ClearField(name)
        self._changed = fields
        for name, field in fields.items():
            if field is None:
                copy.ClearField(name)
            else:
                setattr(copy, name, field)
        if "payload" in fields:
            _check_sizes(0, len(copy.payload), self._limits)
        return seal(HEAD + copy.SerializeToString() + hops)


def is_sealed(value: bytes) -> bool:
    """Whether `value` is marked as ending in a checksum.

    Raises:
        EnvelopeError: `TRUNCATED` when it is marked so and does not end in one.
    """
    if not value.startswith(HEAD):
        return False
    _check_tail(value)
    return True


def check_head(value: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check size, magic bytes and version, before anything else is read.

    Raises:
        EnvelopeError: `EMPTY`, `PAYLOAD_TOO_LARGE`, `NOT_AN_ENVELOPE`, `UNSUPPORTED_FORMAT`, or `TRUNCATED` for
            a value that ends after the format version.
    """
    if not value:
        raise EnvelopeError(Reason.EMPTY, "the record has no value")
    if len(value) > limits.message_bytes:
        raise EnvelopeError(
            Reason.PAYLOAD_TOO_LARGE, f"the message has {len(value)} bytes; the limit is {limits.message_bytes}"
        )
    if value[0] != _FORMAT_TAG or len(value) == 1 or value[1] == 0:
        raise EnvelopeError(Reason.NOT_AN_ENVELOPE, "the value does not begin with a format version")
    if value[1] != FORMAT:
        raise EnvelopeError(Reason.UNSUPPORTED_FORMAT, f"this code reads format {FORMAT}; upgrade headwater")
    if len(value) == 2:
        raise EnvelopeError(Reason.TRUNCATED, "the envelope ends after its format version")


def check_seal(value: bytes) -> None:
    """Check the checksum of a value that has one.

    Raises:
        EnvelopeError: `TRUNCATED` or `CHECKSUM_MISMATCH`.
    """
    # A bit flip in `sealed` itself must not disable the check, so in that case the tail decides. Otherwise the tail
    # must not decide: one in 65,536 payloads contains the checksum's tag at this place by chance.
    flipped = value[-SEAL_BYTES:-4] == SEAL_TAG and (value[2] ^ HEAD[2]).bit_count() <= 1
    if flipped or is_sealed(value):
        _check_crc(value)


def _check_tail(value: bytes) -> None:
    if value[-SEAL_BYTES:-4] != SEAL_TAG:
        raise EnvelopeError(Reason.TRUNCATED, "the envelope is marked as sealed and does not end in its checksum")


def _check_crc(value: bytes) -> None:
    if _crc32c(value[:-SEAL_BYTES]) != int.from_bytes(value[-4:], "little"):
        raise EnvelopeError(Reason.CHECKSUM_MISMATCH, "the envelope was changed after it was written")


def _hop(message: pb.Hop, limits: Limits) -> Hop:
    check_topic(message.topic, limits)
    partition, offset = check_coordinates(
        message.partition if message.HasField("partition") else None,
        message.offset if message.HasField("offset") else None,
        message.leader_epoch,
    )
    return Hop(
        topic=message.topic,
        partition=partition,
        offset=offset,
        via=message.via,
        index=message.index if message.HasField("index") else None,
        count=message.count if message.HasField("count") else None,
        rekeyed=message.rekeyed,
        pass_through=message.pass_through,
        topic_id=message.topic_id,
        leader_epoch=message.leader_epoch if message.HasField("leader_epoch") else None,
        timestamp_ms=message.timestamp_ms if message.HasField("timestamp_ms") else None,
        cluster=message.cluster,
        keyless=message.keyless,
        unknown=_unknown(message),
    )


def _unknown(message: pb.Envelope | pb.Hop) -> bytes:
    """The serialized fields of `message` that the schema does not name.

    Raises:
        EnvelopeError: `MALFORMED` when a field of the schema has the wrong wire type.
    """
    unknown = UnknownFieldSet(message)
    if not len(unknown):
        return b""
    known = type(message).DESCRIPTOR.fields_by_number
    if any(unknown[i].field_number in known for i in range(len(unknown))):
        raise EnvelopeError(Reason.MALFORMED, "a field does not have the wire type of the schema")
    rest = type(message)()
    rest.CopyFrom(message)  # type: ignore[arg-type]
    for field, _ in message.ListFields():
        rest.ClearField(field.name)
    return rest.SerializeToString()


def _check_sizes(hops: int, payload_bytes: int, limits: Limits) -> None:
    if hops > limits.hops:
        raise EnvelopeError(Reason.TOO_MANY_HOPS, f"the chain has {hops} hops; the limit is {limits.hops}")
    if payload_bytes > limits.payload_bytes:
        raise EnvelopeError(
            Reason.PAYLOAD_TOO_LARGE, f"the payload has {payload_bytes} bytes; the limit is {limits.payload_bytes}"
        )


def seal(body: bytes) -> bytes:
    """Append the checksum of the fields before it."""
    return body + SEAL_TAG + _crc32c(body).to_bytes(4, "little")


def hop_bytes(hop: pb.Hop) -> bytes:
    """Serialize a hop of a checked envelope: `encode_hop` without its checks."""
    body = hop.SerializeToString()
    return CHAIN_TAG + varint(len(body)) + body


def varint(number: int) -> bytes:
    """Encode a non-negative number as a protobuf varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
