"""Facts about a record that expressions can use as columns, such as `_key`: what functions read from the element.

Their names begin with an underscore; those of a payload's columns do not.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import polars as pl

from aggregations.definition.element import Element

KEY: Final = "_key"
TOPIC: Final = "_topic"
PARTITION: Final = "_partition"
OFFSET: Final = "_offset"
TIMESTAMP: Final = "_timestamp"
EVENT_TIME: Final = "_event_time_us"
EVENT_ID: Final = "_event_id"

SYSTEM_COLUMNS: Final[Mapping[str, pl.DataType]] = MappingProxyType(
    {
        KEY: pl.Binary(),
        TOPIC: pl.String(),
        PARTITION: pl.Int32(),
        OFFSET: pl.Int64(),
        TIMESTAMP: pl.Int64(),
        EVENT_TIME: pl.Int64(),
        EVENT_ID: pl.String(),
    }
)
"""Columns that every element has, whatever its payload, and their types."""

_ATTRIBUTES: Final[Mapping[str, Callable[[Element[Any]], Any]]] = {
    KEY: attrgetter("key"),
    TOPIC: attrgetter("topic"),
    PARTITION: attrgetter("partition"),
    OFFSET: attrgetter("offset"),
    TIMESTAMP: attrgetter("timestamp_ms"),
    EVENT_TIME: attrgetter("event_time_us"),
    EVENT_ID: attrgetter("event_id"),
}


def system_values(element: Element[Any], names: frozenset[str]) -> dict[str, Any]:
    """The values of some of `SYSTEM_COLUMNS` for an element."""
    return {name: _ATTRIBUTES[name](element) for name in names}
