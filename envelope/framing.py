"""Framing that other serializers put in front of a protobuf message."""

from typing import Final

_MAGIC: Final = b"\0"
_SCHEMA_ID_BYTES: Final = 4


def strip_frame(value: bytes) -> bytes:
    """Return `value` without Confluent Schema Registry framing; an unframed `value` is returned unchanged.

    The frame is a zero byte, a 4-byte schema id and the message indexes: a zigzag varint count
    followed by that many zigzag varints, or a single zero for the first message of the schema
    (Confluent's "wire format"). No envelope begins with a zero byte, so the detection is exact.
    """
    if not value.startswith(_MAGIC):
        return value
    count, position = _zigzag(value, len(_MAGIC) + _SCHEMA_ID_BYTES)
    for _ in range(min(max(count, 0), len(value))):
        _, position = _zigzag(value, position)
    return value[position:] if position <= len(value) else value


def _zigzag(value: bytes, position: int) -> tuple[int, int]:
    """Read one zigzag varint; the position after it is past the end when `value` is too short."""
    number = shift = 0
    while position < len(value) and shift < 64:
        byte = value[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), position
        shift += 7
    return 0, len(value) + 1
