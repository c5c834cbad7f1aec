"""Appends one hop to each of many envelopes, in compiled code."""

from typing import Any

from numba import types, uint8

from aggregations.columns.checksum import crc32c
from aggregations.columns.json_writing import put
from persistence.compiled import NUMBERS, SPANS, borrowed, compiled, helper

_CHAIN_TAG = 0x4A
_VARINT_BYTES = 10
"""Of the longest number."""
FRAME_BYTES = 1 + 3 * _VARINT_BYTES
"""Most bytes of a hop around its front, middle and back: the tag, the length, the offset and the time."""


@helper
def _put_varint(out: Any, at: int, value: int) -> int:
    while value > 127:
        out[at] = uint8(value & 127 | 128)
        value >>= 7
        at += 1
    out[at] = uint8(value)
    return at + 1


@helper
def _varint_bytes(value: int) -> int:
    size = 1
    while value > 127:
        value >>= 7
        size += 1
    return size


@compiled(
    types.void(
        SPANS,
        NUMBERS,
        SPANS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        types.int64,
        types.boolean[::1],
        types.uint8[::1],
        types.int64[::1],
    )
)
def append_hops(
    values: Any,
    key_lengths: Any,
    parts: Any,
    own: Any,
    offsets: Any,
    times: Any,
    most_bytes: int,
    good: Any,
    out: Any,
    ends: Any,
) -> None:
    """Append a hop to sealed envelopes: the bytes of `append_hop(value, encode_hop(hop))`.

    Args:
        values: The envelopes' bytes, starts and lengths.
        key_lengths: Bytes of the records' keys.
        parts: The same for the parts of hops, three for each number in `own`: what is before the offset, between the
            offset and the time, and behind the time.
        own: Number of each record's parts.
        offsets: Offsets of the records, above zero.
        times: Times of the records in milliseconds, above zero.
        most_bytes: Most bytes of a result and its key.
        good: Which envelopes are valid; set to False for those that are not sealed, or whose result is too large.
        out: Buffer of the results, one behind the other: at least the bytes of the valid envelopes and their hops.
        ends: Set to the end of each record's result.
    """
    data, starts, lengths = borrowed(values[0]), values[1], values[2]
    part_data, part_starts, part_lengths = borrowed(parts[0]), parts[1], parts[2]
    at = 0
    for row in range(len(starts)):
        ends[row] = at
        if not good[row]:
            continue
        start, size, part = starts[row], lengths[row] - 6, 3 * own[row]
        good[row] = False
        if size < 4 or data[start + 2] != 0x10 or data[start + 3] != 1 or data[start + size] != 0xFD:
            continue
        if data[start + size + 1] != 0x7F:
            continue
        front, middle, back = part_lengths[part], part_lengths[part + 1], part_lengths[part + 2]
        body = front + _varint_bytes(offsets[row]) + middle + _varint_bytes(times[row]) + back
        if lengths[row] + 1 + _varint_bytes(body) + body + key_lengths[row] > most_bytes:
            continue
        begin = at
        at = put(out, at, data, start, start + size)
        out[at] = _CHAIN_TAG
        at = _put_varint(out, at + 1, body)
        at = put(out, at, part_data, part_starts[part], part_starts[part] + front)
        at = _put_varint(out, at, offsets[row])
        at = put(out, at, part_data, part_starts[part + 1], part_starts[part + 1] + middle)
        at = _put_varint(out, at, times[row])
        at = put(out, at, part_data, part_starts[part + 2], part_starts[part + 2] + back)
        crc = crc32c(out, begin, at)
        out[at], out[at + 1] = 0xFD, 0x7F
        for i in range(4):
            out[at + 2 + i] = uint8(crc >> (8 * i) & 255)
        at += 6
        ends[row] = at
        good[row] = True
