"""Rows on their way from a task to those of the next stage."""

import io
import uuid
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.values import with_values
from aggregations.engine.job import dumps, loads
from aggregations.engine.path import route_of
from aggregations.engine.rows import Rows, by_partition, key_codes, together

_EXACT: Final = frozenset(
    {pl.Binary(), pl.Boolean(), pl.String(), pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16()}
    | {pl.UInt32(), pl.UInt64()}
)
"""Types whose equal values are the same; 0.0 and -0.0 are not."""
_SENT: Final = frozenset({schema.OFFSET, schema.MADE, schema.TOMBSTONE})
"""Columns that are always sent: one of them at least shows how many rows there are, the others go with values."""


def pack(arrivals: Rows, routes: int, directory: str = "") -> list[bytes]:
    """Divide arrivals by key: one payload per route, empty for a route without arrivals.

    A column that has the same value in all rows is sent as this value: most columns of a batch are such.

    Args:
        arrivals: The rows.
        routes: Number of routes.
        directory: Where the other columns go, in files whose names are sent; empty: they are sent.
    """
    frame = arrivals.frame
    if not frame.height:
        return [b""] * routes
    codes, keys = key_codes(frame)
    route = np.fromiter((route_of(key, routes) for key in keys), np.int64, len(keys))[codes]
    same = {name: (dtype, frame.item(0, name)) for name, dtype in frame.schema.items() if _is_same(frame, name)}
    differ = frame.drop(same)
    payloads = []
    for number in range(routes):
        part, values = _own_values(differ.filter(pl.Series(route == number)), arrivals.values)
        names = [name for name in frame.columns if name in same or name in part.columns]
        payloads.append(
            dumps((_columns(part, directory), names, same, arrivals.signatures, values)) if part.height else b""
        )
    return payloads


def unpack(payloads: Sequence[bytes]) -> Rows:
    """Combine payloads of several tasks."""
    parts = []
    for payload in payloads:
        columns, names, same, signatures, values = loads(payload)
        whole = [pl.lit(same[name][1], same[name][0]).alias(name) if name in same else pl.col(name) for name in names]
        parts.append(Rows(pl.read_ipc(columns).select(whole), signatures, values))
    rows = together(parts, None)
    return by_partition(rows) if len(parts) > 1 else rows


def _is_same(frame: pl.DataFrame, name: str) -> bool:
    """Whether a column has the same value in all rows, and may be left out."""
    column = frame.get_column(name)
    if name in _SENT or column.dtype not in _EXACT:
        return False
    if nulls := column.null_count():
        return nulls == len(column)
    return column[0] == column[-1] and bool((column == column.head(1)).all())


def _own_values(part: pl.DataFrame, values: Sequence[Any] | None) -> tuple[pl.DataFrame, list[Any] | None]:
    """Some rows with only their values."""
    if values is None:
        return part, None
    return with_values(part, [values[number] for number in part.get_column(schema.MADE)])


def _columns(frame: pl.DataFrame, directory: str) -> bytes | str:
    """The rows in Arrow's IPC format, or the name of a file with them."""
    if directory:
        path = f"{directory}/{uuid.uuid4().hex}"
        frame.write_ipc(path, compression="uncompressed")
        return path
    buffer = io.BytesIO()
    frame.write_ipc(buffer, compression="lz4")
    return buffer.getvalue()
