"""Names of the engine's own columns: all of them begin with an underscore, no payload column does."""

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
"""It may be a copy (`Element.again`). Boolean; there only where a row is one, null for false."""
LATE: Final = "_late"
"""`Element.route` of what a stage of this flow folded late, as text. String; there only where a row has one."""

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
"""System columns and their types. Behind them stand the position columns."""

MISSING: Final = -2
"""Stands in an array for a position component that is not there: below every index, and below `NO_INDEX`, so that
a shorter position comes before a longer one that begins with it, as with tuples."""


def position(component: int) -> str:
    """Return the name of a position component's column, Int64, null where a position is shorter.

    `_p0` is the root offset.
    """
    return f"_p{component}"
