"""Checks heads, tails and checksums of many envelopes at once."""

from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aggregations.columns.arrays import Ints, Mask
from envelope.codec import HEAD, SEAL_BYTES, SEAL_TAG

_POLYNOMIAL: Final = 0x82F63B78
"""CRC32C, reflected (RFC 3720, appendix B.4)."""


def _table() -> npt.NDArray[np.uint32]:
    crc: npt.NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(_POLYNOMIAL), crc >> 1)
    return crc


_TABLE: Final = _table()


def spans(array: pa.BinaryArray) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
    """Return starts and lengths of the values, and the buffer that contains them. The length of a null is 0."""
    _, offsets, data = array.buffers()
    if len(array) == 0 or data is None:
        return np.zeros(len(array), np.int64), np.zeros(len(array), np.int64), np.zeros(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    lengths = np.diff(bounds)
    if array.null_count:
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    return bounds[:-1], lengths, np.frombuffer(data, np.uint8)


def intact(values: pa.BinaryArray, most_bytes: int) -> tuple[Mask, Mask]:
    """Find the values with a valid head, tail and checksum.

    Args:
        values: Serialized envelopes.
        most_bytes: The size limit of a whole message.

    Returns:
        Two masks: values with a seal and the right checksum; and values without a seal at their head, which are
        valid only if no other field announces a seal. A value in neither mask may still be valid: framed, or with
        the field order of another writer.
    """
    starts, lengths, data = spans(values)
    fits = (lengths > 2) & (lengths <= most_bytes)
    head = fits & _bytes_at(starts, lengths, data, 0, HEAD[:2])
    sealed = head & _bytes_at(starts, lengths, data, 2, HEAD[2:])
    tail = (lengths >= SEAL_BYTES) & _bytes_at(starts, lengths, data, lengths - SEAL_BYTES, SEAL_TAG)
    plain = head & ~sealed & ~tail
    sealed &= tail & (lengths >= len(HEAD) + SEAL_BYTES)
    if sealed.all():
        return _checksums_match(values, starts + lengths, data), plain
    rows = np.flatnonzero(sealed)
    sealed[rows] = _checksums_match(values.take(pa.array(rows)), (starts + lengths)[rows], data)
    return sealed, plain


def stored(values: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Return the last four bytes of each value as a number: the checksum, if it ends with one. 0 for shorter values."""
    starts, lengths, data = spans(values)
    if not len(data):
        return np.zeros(len(values), np.uint32)
    return np.where(lengths >= 4, _last_four(starts + np.maximum(lengths, 4), data), np.uint32(0))


def begins(values: pa.BinaryArray, head: bytes) -> Mask:
    """Find the values that begin with `head`."""
    starts, lengths, data = spans(values)
    return _bytes_at(starts, lengths, data, 0, head)


def _bytes_at(
    starts: Ints,
    lengths: Ints,
    data: npt.NDArray[np.uint8],
    at: Any,
    wanted: bytes,
) -> Mask:
    """Whether each value contains `wanted` at `at`; false for shorter values."""
    room = (lengths >= at + len(wanted)) & (at >= 0)
    if not len(data):
        return np.zeros(len(starts), np.bool_)
    where = np.where(room, starts + at, 0)
    for i, byte in enumerate(wanted):
        room = room & (data[np.minimum(where + i, len(data) - 1)] == byte)
    return np.asarray(room)


def _last_four(ends: Ints, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The four bytes before each end, little-endian."""
    first, second, third, fourth = (data[np.minimum(ends - 4 + i, len(data) - 1)].astype(np.uint32) for i in range(4))
    return np.asarray(first | second << 8 | third << 16 | fourth << 24, np.uint32)


def _checksums_match(values: pa.BinaryArray, ends: Ints, data: npt.NDArray[np.uint8]) -> Mask:
    """Whether each checksum matches the bytes before it.

    The CRC of the whole value is computed in C, without slicing it. It is compared with the stored checksum extended
    by tag and checksum. The extension maps different checksums to different results, so the comparison is exact.
    """
    whole = np.fromiter(map(google_crc32c.value, values.to_pylist()), np.uint32, len(values))
    stored = _last_four(ends, data)
    crc = ~stored
    added = [
        *(np.full(len(crc), byte, np.uint32) for byte in SEAL_TAG),
        *(stored >> shift & 0xFF for shift in (0, 8, 16, 24)),
    ]
    for byte in added:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return np.asarray(~crc == whole)
