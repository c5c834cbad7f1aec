"""Facts about a record that expressions can use as columns, such as `_key`: what functions read from the element.

Their names begin with an underscore; those of a payload's columns do not. `aggregations.definition.stability` says which
may decide.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import polars as pl

from aggregations.definition.element import Element
from envelope import Hop

KEY: Final = "_key"
TOPIC: Final = "_topic"
PARTITION: Final = "_partition"
OFFSET: Final = "_offset"
TIMESTAMP: Final = "_timestamp"
EVENT_TIME: Final = "_event_time_us"
EVENT_ID: Final = "_event_id"
HEADERS: Final = "_headers"
CHAIN: Final = "_chain"

_HOP: Final = {
    "topic": pl.String(),
    "partition": pl.Int32(),
    "offset": pl.Int64(),
    "via": pl.String(),
    "index": pl.Int64(),
    "count": pl.Int64(),
    "rekeyed": pl.Boolean(),
    "pass_through": pl.Boolean(),
    "topic_id": pl.String(),
    "leader_epoch": pl.Int32(),
    "timestamp_ms": pl.Int64(),
    "cluster": pl.String(),
    "keyless": pl.Boolean(),
}
"""Fields of a hop in `_chain`, as `envelope.Hop` names them: all but the serialized ones of a newer schema."""
SYSTEM_COLUMNS: Final[Mapping[str, pl.DataType]] = MappingProxyType(
    {
        KEY: pl.Binary(),
        TOPIC: pl.String(),
        PARTITION: pl.Int32(),
        OFFSET: pl.Int64(),
        TIMESTAMP: pl.Int64(),
        EVENT_TIME: pl.Int64(),
        EVENT_ID: pl.String(),
        HEADERS: pl.List(pl.Struct({"key": pl.String(), "value": pl.Binary()})),
        CHAIN: pl.List(pl.Struct(_HOP)),
    }
)
"""Columns that every element has, whatever its payload, and their types. `_headers` and `_chain` are empty lists where
there are none."""
LISTS: Final = frozenset({HEADERS, CHAIN})
"""Those that cost more than a look: they are made only for flows whose expressions read them."""

_ATTRIBUTES: Final[Mapping[str, Callable[[Element[Any]], Any]]] = {
    KEY: attrgetter("key"),
    TOPIC: attrgetter("topic"),
    PARTITION: attrgetter("partition"),
    OFFSET: attrgetter("offset"),
    TIMESTAMP: attrgetter("timestamp_ms"),
    EVENT_TIME: attrgetter("event_time_us"),
    EVENT_ID: attrgetter("event_id"),
    HEADERS: lambda element: [{"key": name, "value": value} for name, value in element.headers],
    CHAIN: lambda element: hop_values(element.chain),
}


def hop_values(chain: Iterable[Hop]) -> list[dict[str, Any]]:
    """The value of `_chain` for a chain."""
    return [{name: getattr(hop, name) for name in _HOP} for hop in chain]


def system_values(element: Element[Any], names: frozenset[str]) -> dict[str, Any]:
    """The values of some of `SYSTEM_COLUMNS` for an element."""
    return {name: _ATTRIBUTES[name](element) for name in names}
