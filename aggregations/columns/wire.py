"""Reads the wire format of protobuf in compiled code: it accepts what is plainly valid, and leaves the rest alone.

What is not accepted need not be invalid: groups, overlong tags, a field with another wire type. `RecordDecoder`, which
uses the reference parser, decides about each of these. So it is enough here never to accept what it would reject, and
to read the same from what is accepted (protobuf's "Encoding"). No position outside a value is ever read: each is
compared with the end of the value, or of the field, first.
"""

from typing import Any, Final

from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from persistence.compiled import helper

_EIGHTS: Final = int64(-0x7F7F7F7F7F7F7F80)
"""The highest bit of each of eight bytes."""
LOW: Final = 0xFFFFFFFF
"""The low 32 bits."""


def load(context: Any, builder: Any, kind: Any, arguments: tuple[Any, Any], bits: int) -> Any:
    """Emit the load of `bits` from an array of bytes at a position, which need not be aligned.

    Args:
        context: numba's target context.
        builder: llvmlite's builder.
        kind: numba's type of the array.
        arguments: The array and the position, as llvmlite's values.
        bits: The width of the integer that is loaded, the lowest byte first.
    """
    array, at = arguments
    data = context.make_array(kind)(context, builder, array).data
    read = builder.load(builder.bitcast(builder.gep(data, [at]), ir.IntType(bits).as_pointer()))
    read.align = 1
    return read


@intrinsic  # type: ignore[untyped-decorator]
def word(context: Any, array: Any, at: Any) -> Any:
    """The eight bytes from `at` on as a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return load(context, builder, signature.args[0], arguments, 64)

    return types.int64(array, types.int64), generate


@helper
def varint(data: Any, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, as 64 bits, and the position after it; -1 if it is not complete or has more bits."""
    if at >= end:
        return 0, -1
    byte = int64(data[at])
    at += 1
    if byte < 128:
        return byte, at
    value, shift = byte & 127, 7
    while at < end and shift < 64:
        byte = int64(data[at])
        at += 1
        if shift == 63 and byte > 1:
            return 0, -1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1


@helper
def short(data: Any, at: int, end: int) -> tuple[int, int]:
    """A number of at most 32 bits in its shortest form: a tag, or a length."""
    if at < end and data[at] < 128:
        return int64(data[at]), at + 1
    value, after = varint(data, at, end)
    if after < 0 or after - at > 5 or value > LOW or (after - at > 1 and data[after - 1] == 0):
        return 0, -1
    return value, after


@helper
def span(data: Any, at: int, end: int) -> tuple[int, int]:
    """Start and end of the bytes whose length is at `at`; an end of -1 if they are not complete."""
    size, start = short(data, at, end)
    if start < 0 or size > end - start:
        return 0, -1
    return start, start + size


@helper
def skipped(data: Any, at: int, end: int, wire: int) -> int:
    """The position after a field of a wire type; -1 if it is not complete, or a group."""
    if wire == 0:
        return varint(data, at, end)[1]
    if wire == 2:
        return span(data, at, end)[1]
    size = 8 if wire == 1 else 4 if wire == 5 else -1
    return at + size if 0 < size <= end - at else -1


@helper
def little(data: Any, at: int, size: int) -> int:
    """The number in `size` bytes at `at`, the lowest byte first."""
    value = int64(0)
    for i in range(size):
        value |= int64(data[at + i]) << (8 * i)
    return value


@helper
def is_text(data: Any, at: int, end: int) -> bool:
    """Whether bytes are UTF-8 (RFC 3629)."""
    while at < end:
        if end - at >= 8 and word(data, at) & _EIGHTS == 0:
            at += 8
            continue
        first = data[at]
        if first < 0x80:
            at += 1
            continue
        more = 1 if 0xC2 <= first <= 0xDF else 2 if 0xE0 <= first <= 0xEF else 3 if 0xF0 <= first <= 0xF4 else 0
        if more == 0 or more >= end - at:
            return False
        second = data[at + 1]
        low = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        high = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        if second < low or second > high:
            return False
        for i in range(2, more + 1):
            if data[at + i] & 0xC0 != 0x80:
                return False
        at += 1 + more
    return True
