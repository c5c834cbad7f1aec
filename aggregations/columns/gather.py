"""Copies spans of a buffer in compiled code."""

from typing import Any

from numba import types

from aggregations.columns.json_writing import put
from persistence.compiled import BYTES, NUMBERS, compiled


@compiled(types.void(BYTES, types.Array(types.int64, 1, "A", readonly=True), NUMBERS, types.uint8[::1]))
def gather(data: Any, starts: Any, bounds: Any, out: Any) -> None:
    """Copy spans of `data` to `out`, which has one after the other, between `bounds`."""
    for row in range(len(starts)):
        put(out, bounds[row], data, starts[row], starts[row] + bounds[row + 1] - bounds[row])
