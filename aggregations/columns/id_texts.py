"""The JSON text of ids, as `envelope.filters.index.to_json` and msgspec make it, in compiled code.

Two ids are equal if their texts are. Text that JSON would escape is not written, nor are numbers beyond 63 bits.
"""

from typing import Final, NamedTuple

import msgspec
import numpy as np
import polars as pl

from aggregations.columns.arrays import Ints, Mask, Spans
from aggregations.columns.json_writing import put, put_number
from aggregations.columns.record_text import CLOSE, COMMA, END, OPEN, QUOTE, Bytes
from envelope.filters.index import quoted
from persistence.compiled import compiled

TEXT, BYTES, NUMBER = 0, 1, 2
_NUMBERS: Final = (pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16(), pl.UInt32(), pl.UInt64())
KINDS: Final[dict[pl.DataType, int]] = {pl.String(): TEXT, pl.Binary(): BYTES, **dict.fromkeys(_NUMBERS, NUMBER)}
"""What ids in a column are, by its type."""
_FRAME: Final = 32
"""More than the bytes of an id's text around the bytes or the number itself."""
_ENCODED: Final = len(b"%00")
_PERCENT: Final = ord("%")
_HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_NONE, _TOO_LARGE = -1, -2
"""Lengths of a part that is null, and of a number beyond 63 bits, which is not a valid id."""
_AS_BYTES: Final = np.frombuffer(b'{"bytes":"', np.uint8)
QUOTED: Final = slice(len(_AS_BYTES) - 1, -1)
"""Where the quoted text is in the text of an id that is bytes."""


def _plain(byte: int, kind: int) -> bool:
    """Whether a byte is written as it is."""
    if kind == BYTES:
        return quoted(bytes([byte])).encode() == bytes([byte])
    return byte >= 0x80 or msgspec.json.encode(chr(byte)) == b'"%c"' % byte


_PLAIN: Final[Mask] = np.array([[_plain(byte, kind) for byte in range(256)] for kind in (TEXT, BYTES)])


class _Part(NamedTuple):
    """Part of the ids.

    Attributes:
        kind: What it is.
        data: Contains the texts or bytes.
        starts: Where they start.
        lengths: Their lengths; `_NONE` for null, `_TOO_LARGE` for a number that is not written.
        numbers: The numbers.
    """

    kind: int
    data: Bytes
    starts: Ints
    lengths: Ints
    numbers: Ints

    @classmethod
    def of(cls, column: pl.Series) -> "_Part":
        kind = KINDS[column.dtype]
        if kind == NUMBER:
            whole = column.cast(pl.Int64, strict=False)
            numbers = np.require(whole.fill_null(0).to_numpy(), np.int64, ["C", "W"])
            lengths = np.where(column.is_null().to_numpy(), _NONE, np.where(whole.is_null().to_numpy(), _TOO_LARGE, 0))
            return cls(kind, np.frombuffer(b"", np.uint8), np.zeros(len(column), np.int64), lengths, numbers)
        spans = Spans.of(column.to_arrow(compat_level=pl.CompatLevel.oldest()))
        return cls(kind, spans.data, spans.starts, spans.lengths, np.zeros(0, np.int64))


class Identities(NamedTuple):
    """The ids of rows as JSON text.

    Attributes:
        text: Other text, and behind it the texts of the ids.
        first: Where each begins.
        last: Where each ends: at its beginning if there is no id, and before it if it cannot be written here.
    """

    text: Bytes
    first: Ints
    last: Ints

    @classmethod
    def of(cls, before: bytes | Bytes, columns: list[pl.Series]) -> "Identities":
        """The ids that are in a column, or the pairs that are in two; there is none if one of them is null.

        Args:
            before: The other text.
            columns: The columns, each of a type in `KINDS`.
        """
        parts = [_Part.of(column) for column in columns]
        rows = len(columns[0])
        size = sum(_ENCODED * int(np.maximum(part.lengths, 0).sum()) + _FRAME * rows for part in parts)
        text = np.empty(len(before) + size, np.uint8)
        text[: len(before)] = np.frombuffer(before, np.uint8)
        first, last = np.empty(rows, np.int64), np.empty(rows, np.int64)
        end = _write(parts[0], parts[-1], len(parts) > 1, text, len(before), first, last)
        return cls(text[:end], first, last)


@compiled(allocates=False)
def _put_part(out: Bytes, at: int, part: _Part, row: int) -> int:
    """Write a part and return where it ends; -1 if a character of it has to be escaped. Bytes are percent-encoded."""
    if part.kind == NUMBER:
        return put_number(out, at, part.numbers[row])
    if part.kind == BYTES:
        at = put(out, at, _AS_BYTES, 0, len(_AS_BYTES))
    else:
        out[at] = QUOTE
        at += 1
    start = part.starts[row]
    for i in range(start, start + part.lengths[row]):
        byte = part.data[i]
        if _PLAIN[part.kind, byte]:
            out[at] = byte
            at += 1
        elif part.kind == BYTES:
            out[at], out[at + 1], out[at + 2] = _PERCENT, _HEX[byte >> 4], _HEX[byte & 15]
            at += 3
        else:
            return -1
    out[at] = QUOTE
    at += 1
    if part.kind == BYTES:
        out[at] = END
        at += 1
    return at


@compiled(allocates=False)
def _write(one: _Part, other: _Part, pair: bool, out: Bytes, at: int, first: Ints, last: Ints) -> int:
    """Write the ids of all rows, and return where the last one ends."""
    for row in range(len(first)):
        first[row] = last[row] = at
        if one.lengths[row] == _NONE or other.lengths[row] == _NONE:
            continue
        if one.lengths[row] == _TOO_LARGE or other.lengths[row] == _TOO_LARGE:
            last[row] = -1
            continue
        end = at
        if pair:
            out[at] = OPEN
            end = _put_part(out, at + 1, one, row)
            if end >= 0:
                out[end] = COMMA
                end = _put_part(out, end + 1, other, row)
            if end >= 0:
                out[end] = CLOSE
                end += 1
        else:
            end = _put_part(out, at, one, row)
        last[row] = end
        at = max(at, end)
    return at
