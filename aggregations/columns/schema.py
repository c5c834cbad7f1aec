"""Names of the engine's own columns. They begin with an underscore, and payload columns do not."""

from typing import Final

import polars as pl

ROW: Final = "_row"
TOPIC: Final = "_topic"
PARTITION: Final = "_partition"
OFFSET: Final = "_offset"
KEY: Final = "_key"
TIMESTAMP: Final = "_timestamp_ms"
EVENT_TIME: Final = "_event_time_us"
EVENT_ID: Final = "_event_id"
SIGNATURE: Final = "_signature"
EXOTIC: Final = "_exotic"
AGAIN: Final = "_again"
"""The row may be a copy (`Element.again`). Boolean, null for false; present only if a row may be one."""
LATE: Final = "_late"
"""`Element.route`, as text, of a message that a stage of this flow folded late. String; present only if a row has one."""

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


def position(component: int) -> str:
    """Return the name of a position component's column, Int64, null where a position is shorter.

    `_p0` is the root offset.
    """
    return f"_p{component}"
