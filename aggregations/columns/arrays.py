"""Numpy arrays of integers and of truth values, and values as spans of a buffer."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
N = TypeVar("N", bound=np.generic)

NEVER: Final = np.iinfo(np.int64).min
"""Represents a missing time in an array: it is earlier than any."""
_NO_BYTES: Final = np.frombuffer(b"", np.uint8)  # read-only, as all others: for another kind code is compiled again


def arrow(values: npt.NDArray[Any], valid: Mask | None = None) -> pa.Array:
    """An Arrow array of numbers or truth values; numbers are not copied.

    `pa.array` would import pandas, if it is installed: 0.7 s in each process.

    Args:
        values: The values.
        valid: Where there is a value; None if everywhere.
    """
    kind = pa.from_numpy_dtype(values.dtype)
    data = _packed(values) if pa.types.is_boolean(kind) else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None if valid is None else validity(valid), data])


def numbers(array: pa.Array, kind: type[N]) -> npt.NDArray[N]:
    """The values of an Arrow array of numbers without nulls, not copied; `to_numpy` would import pandas.

    Args:
        array: The array.
        kind: Type of its numbers.
    """
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * np.dtype(kind).itemsize)


def binary(values: Sequence[bytes | None]) -> pa.Array:
    """An Arrow array of byte strings, at most 2 GiB in all; `pa.array` would import pandas."""
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if one is None else len(one) for one in values], out=bounds[1:])
    if bounds[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{bounds[-1]} bytes do not fit into one array")
    valid = validity(np.array([one is not None for one in values], np.bool_))
    data = b"".join(one for one in values if one is not None)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [valid, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(data)]
    )


def validity(valid: Mask) -> pa.Buffer | None:
    """Where there is a value, as Arrow's bits; None if everywhere."""
    return None if valid.all() else _packed(valid)


def _packed(mask: Mask) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


class Spans(NamedTuple):
    """Values within a buffer.

    Attributes:
        data: The buffer.
        starts: Where each value starts.
        lengths: Number of its bytes; -1 for null.
    """

    data: npt.NDArray[np.uint8]
    starts: Ints
    lengths: Ints

    @classmethod
    def of(cls, array: pa.BinaryArray | pa.StringArray | pa.LargeBinaryArray | pa.LargeStringArray) -> "Spans":
        """The values of an array, which are not copied."""
        _, offsets, data = array.buffers()
        if len(array) == 0 or offsets is None:
            return cls(_NO_BYTES, np.zeros(len(array), np.int64), np.zeros(len(array), np.int64))
        large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        bounds = np.frombuffer(offsets, np.int64 if large else np.int32)[
            array.offset : array.offset + len(array) + 1
        ].astype(np.int64)
        lengths = np.diff(bounds)
        if array.null_count:
            lengths[array.is_null().to_numpy(zero_copy_only=False)] = -1
        return cls(_NO_BYTES if data is None else np.frombuffer(data, np.uint8), bounds[:-1], lengths)

    def at(self, rows: Ints | Mask) -> "Spans":
        """Some of the values."""
        return Spans(self.data, self.starts[rows], self.lengths[rows])

    def array(self, kind: pa.DataType) -> pa.Array:
        """Copy the values, none of which is null, to an array of `pa.binary()`, or of `pa.string()` if they are text."""
        from aggregations.columns.gather import gather

        bounds = np.zeros(len(self.starts) + 1, np.int64)
        np.cumsum(self.lengths, out=bounds[1:])
        out = np.empty(int(bounds[-1]), np.uint8)
        gather(self.data, self.starts, bounds, out)
        buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(out)]
        return pa.Array.from_buffers(kind, len(self.starts), buffers)
