"""Names of the engine's own columns. They begin with an underscore, and payload columns do not."""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.definition.system import (
    CHAIN,
    EVENT_ID,
    EVENT_TIME,
    HEADERS,
    KEY,
    OFFSET,
    PARTITION,
    TIMESTAMP,
    TOPIC,
)

__all__ = ["CHAIN", "EVENT_ID", "EVENT_TIME", "HEADERS", "KEY", "OFFSET", "PARTITION", "TIMESTAMP", "TOPIC"]

# `_headers` is present if an expression of the flow reads it, or if the flow calls functions and a record has headers;
# without an expression that reads it, it is null where a record has none. `_chain` is present if an expression reads it.

ROW: Final = "_row"
SIGNATURE: Final = "_signature"
EXOTIC: Final = "_exotic"
AGAIN: Final = "_again"
"""The row may be a copy (`Element.again`). Boolean, null for false; present only if a row may be one."""
VALUE: Final = "_value"
"""The record's value, from which functions and tables get the chain. Binary; present only if the flow has some and a
record has a chain."""
TOMBSTONE: Final = "_tombstone"
"""The row is a tombstone, without payload: its element's value is None. Boolean, null for false; present only if a row is
one."""
LATE: Final = "_late"
"""`Element.route`, as text, of a message that a stage of this flow folded late. String; present only if a row has one."""
MADE: Final = "_made"
"""Number of the value that a function made, in the list of values beside the frame: it replaces the payload's columns.
Int64; present after the first such function."""

TIME: Final = "_time"
"""`Element.time_us`. Int64, null if it has no valid one; present in a flow with windows."""
BEFORE: Final = "_before"
"""`Element.before_us`. Int64; present in a flow with windows."""

STAMP: Final = "_stamp"
"""`Element.stamp`. Struct of `STAMP_FIELDS`, null without one; present if a filter of the flow reads it."""
STAMP_FIELDS: Final[dict[str, pl.DataType]] = {
    "producer": pl.String(),
    "sequence": pl.Int64(),
    "last": pl.Int64(),
    "epoch": pl.Int64(),
    "contiguous": pl.Boolean(),
}
STAMP_NAMES: Final = tuple(STAMP_FIELDS)
STAMPS: Final = pl.Struct(STAMP_FIELDS)
"""Type of the column."""

ITEM: Final = "_i"
"""The index in each flat-map that the row went through: `_i0`, `_i1`, … UInt32; present after a flat-map."""

SYSTEM: Final[dict[str, pl.DataType]] = {
    ROW: pl.UInt32(),
    TOPIC: pl.String(),
    PARTITION: pl.Int32(),
    OFFSET: pl.Int64(),
    KEY: pl.Binary(),
    TIMESTAMP: pl.Int64(),
    EVENT_TIME: pl.Int64(),
    EVENT_ID: pl.String(),
    SIGNATURE: pl.UInt32(),
    EXOTIC: pl.Boolean(),
}
"""System columns and their types. The position columns follow them."""

MISSING: Final = -2
"""Represents a missing position component in an array. It is below every index and below `NO_INDEX`, so that, as with
tuples, a shorter position sorts before a longer one that begins with it."""


def tombstones(frame: pl.DataFrame) -> npt.NDArray[np.bool_] | None:
    """The rows that are tombstones; None if no row is one."""
    if TOMBSTONE not in frame.columns:
        return None
    found = frame.get_column(TOMBSTONE).fill_null(value=False).to_numpy()
    return found if found.any() else None


def is_position(name: str) -> bool:
    """Whether a column contains a component of positions."""
    return name.startswith("_p") and name[2:].isdecimal()


def position(component: int) -> str:
    """Return the name of a position component's column, Int64, null where a position is shorter.

    `_p0` is the root offset.
    """
    return f"_p{component}"


def item_columns(columns: Iterable[str]) -> list[str]:
    """The names of the columns of indices, in the order of the flat-maps."""
    return sorted(
        (name for name in columns if name.startswith(ITEM) and name[2:].isdecimal()), key=lambda i: int(i[2:])
    )
