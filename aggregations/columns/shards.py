"""Spreads ids over a number of states, in compiled code: `envelope.filters.arrival.shard_of` for whole columns."""

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from numba import int64

from aggregations.columns.arrays import Ints, Mask, Spans
from aggregations.columns.checksum import tables_of
from envelope.filters.arrival import shard_of
from persistence.compiled import compiled

_CRC32: Final = tables_of(0xEDB88320)[0]
"""Of the polynomial that `zlib.crc32` has, reflected."""
_ONES: Final = 0xFFFFFFFF
_NONE, _LEFT = -1, -2

# What `shard_of` writes before and behind the bytes of an id.
_FRAMES: Final[dict[pl.DataType, tuple[bytes, bytes]]] = {pl.String(): (b'"', b'"'), pl.Binary(): (b"\"b'", b"'\"")}
_PLAIN: Final = np.zeros(256, np.bool_)
"""Bytes that it writes as they are."""
_PLAIN[0x20:0x7F] = True
_PLAIN[[ord(one) for one in "\"'\\"]] = False


def shards_of(ids: pl.Series, shards: int) -> pl.Series:
    """`shard_of` for many ids, Binary; null for null.

    Args:
        ids: String, Binary or integers.
        shards: Number of states.
    """
    before, behind = _FRAMES.get(ids.dtype, (b"", b""))
    texts = ids if ids.dtype in _FRAMES else ids.cast(pl.String)
    found = np.empty(len(ids), np.int64)
    spans = Spans.of(texts.to_arrow(compat_level=pl.CompatLevel.oldest()))
    _shards(spans, _PLAIN, _bytes(before), _bytes(behind), _CRC32, shards, found)
    keys = pl.Series([b"%d/%d" % (number, shards) for number in range(shards)], dtype=pl.Binary)
    scopes = keys.gather(pl.Series(np.maximum(found, 0)))
    left = np.flatnonzero(found == _LEFT)
    if len(left):
        scopes = scopes.scatter(left, [shard_of(one, shards) for one in ids.gather(left).to_list()])
    return scopes if (found != _NONE).all() else pl.select(pl.when(pl.Series(found != _NONE)).then(scopes)).to_series()


def _bytes(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


@compiled(allocates=False)
def _added(crc: int, data: npt.NDArray[np.uint8], first: int, last: int, table: npt.NDArray[np.uint32]) -> int:
    """The CRC after more bytes."""
    for place in range(first, last):
        crc = int64(table[(crc ^ data[place]) & 255]) ^ (crc >> 8)
    return crc


@compiled(allocates=False)
def _shards(
    ids: Spans,
    plain: Mask,
    before: npt.NDArray[np.uint8],
    behind: npt.NDArray[np.uint8],
    table: npt.NDArray[np.uint32],
    shards: int,
    found: Ints,
) -> None:
    """Find the number of each id's state: `_NONE` for null, `_LEFT` where a byte is escaped."""
    for row in range(len(found)):
        if ids.lengths[row] < 0:
            found[row] = _NONE
            continue
        first, last = ids.starts[row], ids.starts[row] + ids.lengths[row]
        escaped = False
        for place in range(first, last):
            escaped = escaped or not plain[ids.data[place]]
        if escaped:
            found[row] = _LEFT
            continue
        crc = _added(_ONES, before, 0, len(before), table)
        crc = _added(crc, ids.data, first, last, table)
        crc = _added(crc, behind, 0, len(behind), table)
        found[row] = (crc ^ _ONES) % shards
