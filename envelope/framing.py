"""Framing that other serializers put in front of a message: the "wire format" of Confluent's Schema Registry."""

from collections.abc import Sequence
from typing import Any, Final

from envelope.errors import EnvelopeError, Reason

_MAGIC: Final = b"\0"
_FIRST: Final = [0]
SCHEMA_ID_FRAME: Final = 5
"""Bytes of the frame in front of JSON and Avro: a zero byte and the schema id."""


def strip_frame(value: bytes, indexes: Sequence[int] | None = None) -> bytes:
    """Return a protobuf message without its frame; an unframed `value` is returned unchanged.

    The frame is a zero byte, a 4-byte schema id and the message indexes: the place of the message type in its schema,
    as a zigzag varint count followed by that many zigzag varints, or a single zero for the first message. Early Python
    serializers wrote the indexes as plain varints, which shows where the count is odd; this is looked at if a type is
    expected. No protobuf message begins with a zero byte, so the detection is exact.

    Args:
        value: The value.
        indexes: Message indexes of the type that is expected, in its own file; None for any type. The schema in the registry
            may be another file, of which the type is the first message: these indexes are accepted, too.

    Raises:
        EnvelopeError: `UNKNOWN_PAYLOAD_TYPE`: the frame names another message type.
    """
    if not value.startswith(_MAGIC):
        return value
    count, position = _varint(value, SCHEMA_ID_FRAME)
    plain = indexes is not None and bool(count & 1)  # as zigzag it is below zero
    found = []
    size = count if plain else 0 if count & 1 else count >> 1
    for _ in range(min(size, len(value))):
        index, position = _varint(value, position)
        found.append(index if plain else (index >> 1) ^ -(index & 1))
    if position > len(value):
        return value
    if indexes is not None and (found or _FIRST) not in (_FIRST, [*indexes]):
        raise EnvelopeError(
            Reason.UNKNOWN_PAYLOAD_TYPE,
            f"the frame of Schema Registry says message {found} of its schema, and the declared type is {[*indexes]} of its "
            "file; declare the type that is written",
        )
    return value[position:]


def indexes_of(descriptor: Any) -> tuple[int, ...]:
    """Message indexes of a type, given its protobuf descriptor: its number in its file, and so on within messages."""
    parent = descriptor.containing_type
    beside = descriptor.file.message_types_by_name.values() if parent is None else parent.nested_types
    own = [one.full_name for one in beside].index(descriptor.full_name)
    return (own,) if parent is None else (*indexes_of(parent), own)


def _varint(value: bytes, position: int) -> tuple[int, int]:
    """Read one varint; the position after it is past the end when `value` is too short."""
    number = shift = 0
    while position < len(value) and shift < 64:
        byte = value[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    return 0, len(value) + 1
