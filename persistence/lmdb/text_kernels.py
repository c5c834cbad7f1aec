"""What `persistence.lmdb.texts` does with many values, compiled."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from persistence.compiled import compiled, copy_bytes

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Ints: TypeAlias = npt.NDArray[np.int64]


class Tables(NamedTuple):
    """Texts as arrays.

    Attributes:
        first: Where each text begins in `data`, and the last one ends.
        data: The texts, one after the other.
        begin: Where the texts that begin with a byte begin in `by_byte`, by that byte, and the last ones end.
        by_byte: Numbers of the texts by their first byte, and then the longest first.
    """

    first: _Ints
    data: _Bytes
    begin: _Ints
    by_byte: _Ints


def tables(texts: Sequence[bytes]) -> Tables:
    """The texts as arrays."""
    order = sorted(range(len(texts)), key=lambda i: (texts[i][0], -len(texts[i])))
    counts = np.bincount([one[0] for one in texts] or np.zeros(0, np.int64), minlength=256)
    begin, first = np.zeros(257, np.int64), np.zeros(len(texts) + 1, np.int64)
    np.cumsum(counts, out=begin[1:])
    np.cumsum([len(one) for one in texts], out=first[1:])
    return Tables(first, np.frombuffer(b"".join(texts), np.uint8), begin, np.array(order, np.int64))


@cache
def load() -> None:
    """Compile what `shorten` and `restore` run, or load it from the disk."""
    texts = tables([b"a"])
    restore(shorten([b"a"], texts) or [], 0, texts)


def shorten(values: Sequence[bytes], texts: Tables) -> list[bytes] | None:
    """`Texts.shortened`, for at least one text."""
    data, bounds = _joined(values)
    out, ends = np.empty(len(data), np.uint8), np.zeros_like(bounds)
    return _divided(out, ends) if _shorten(data, bounds, *texts, out, ends) else None


def restore(values: Sequence[bytes], skip: int, texts: Tables) -> list[bytes]:
    """`Texts.restored`."""
    data, bounds = _joined(values)
    ends = np.zeros_like(bounds)
    if not _measure(data, bounds, skip, texts.first, ends):
        raise LookupError("a byte stands for no text")
    out = np.empty(ends[-1], np.uint8)
    _restore(data, bounds, skip, texts.first, texts.data, out)
    return _divided(out, ends)


def _joined(values: Sequence[bytes]) -> tuple[_Bytes, _Ints]:
    """The values, one after the other, and where each begins and the last ends."""
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=bounds[1:])
    return np.frombuffer(b"".join(values), np.uint8), bounds


def _divided(data: _Bytes, bounds: _Ints) -> list[bytes]:
    whole = data[: bounds[-1]].tobytes()
    return [whole[first:last] for first, last in pairwise(bounds.tolist())]


@compiled(allocates=False)
def _shorten(
    data: _Bytes, bounds: _Ints, first: _Ints, texts: _Bytes, begin: _Ints, by_byte: _Ints, out: _Bytes, ends: _Ints
) -> bool:
    """Shorten values, and say where each ends; False if one has a byte that stands for a text."""
    at = 0
    for value in range(len(bounds) - 1):
        i, last = bounds[value], bounds[value + 1]
        while i < last:
            byte = data[i]
            if byte < 32:
                return False
            size = 1
            for place in range(begin[byte], begin[byte + 1]):
                text = by_byte[place]
                start, length = first[text], first[text + 1] - first[text]
                if length > last - i:
                    continue
                same = 1
                while same < length and data[i + same] == texts[start + same]:
                    same += 1
                if same == length:
                    byte, size = np.uint8(text + 1), length
                    break
            out[at] = byte
            at += 1
            i += size
        ends[value + 1] = at
    return True


@compiled(allocates=False)
def _measure(data: _Bytes, bounds: _Ints, skip: int, first: _Ints, ends: _Ints) -> bool:
    """Say where each restored value ends; False if a byte stands for no text."""
    at = 0
    for value in range(len(bounds) - 1):
        for i in range(bounds[value] + skip, bounds[value + 1]):
            byte = np.int64(data[i])
            if byte >= 32:
                at += 1
            elif 0 < byte < len(first):
                at += first[byte] - first[byte - 1]
            else:
                return False
        ends[value + 1] = at
    return True


@compiled(allocates=False)
def _restore(data: _Bytes, bounds: _Ints, skip: int, first: _Ints, texts: _Bytes, out: _Bytes) -> None:
    """Restore values that `_measure` accepts."""
    at = 0
    for value in range(len(bounds) - 1):
        for i in range(bounds[value] + skip, bounds[value + 1]):
            byte = np.int64(data[i])
            if byte >= 32:
                out[at] = data[i]
                at += 1
            else:
                count = first[byte] - first[byte - 1]
                copy_bytes(out, at, texts, first[byte - 1], count)
                at += count
