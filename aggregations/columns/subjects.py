"""Rows as a filter of known parameters judges them: only what such a filter reads, at a fraction of an element's cost."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.signature import Signature
from aggregations.definition.headers import header_of
from envelope.filters.producers import Stamp

INPUT: Final = "_in:"
"""Begins the names of the columns that a stage reads."""


class Subject:
    """A row, with the attributes of an element that filters of known parameters read."""

    __slots__ = (
        "chained",
        "event_id",
        "event_time_us",
        "headers",
        "key",
        "offset",
        "partition",
        "stamp",
        "timestamp_ms",
        "topic",
        "value",
    )
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: dict[str, Any]
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...]
    stamp: Stamp | None
    chained: bool
    event_id: str
    event_time_us: int


def subjects_of(frame: pl.DataFrame, signatures: Sequence[Signature]) -> list[Any]:
    """The rows of a frame.

    Args:
        frame: System columns, columns `_in:NAME`, and optionally `schema.STAMP`.
        signatures: By the codes of `_signature`.
    """
    size = frame.height
    chained = np.array([one.republished for one in signatures], np.bool_)
    headers = {name: header for name in frame.columns if (header := header_of(name.removeprefix(INPUT))) is not None}
    names = [name for name in frame.columns if name.startswith(INPUT) and name not in headers]
    plain = [name.removeprefix(INPUT) for name in names]
    cells = [frame.get_column(name).to_list() for name in names]
    values = [dict(zip(plain, row, strict=True)) for row in zip(*cells, strict=True)] if cells else [{}] * size
    found = []
    for row in zip(
        frame.get_column(schema.TOPIC).to_list(),
        frame.get_column(schema.PARTITION).to_list(),
        frame.get_column(schema.OFFSET).to_list(),
        frame.get_column(schema.KEY).to_list(),
        values,
        frame.get_column(schema.TIMESTAMP).to_list(),
        _headers(frame, headers),
        stamps_of(frame, size),
        chained[frame.get_column(schema.SIGNATURE).to_numpy()].tolist(),
        frame.get_column(schema.EVENT_ID).to_list(),
        frame.get_column(schema.EVENT_TIME).to_list(),
        strict=True,
    ):
        one = Subject()
        (
            one.topic,
            one.partition,
            one.offset,
            one.key,
            one.value,
            one.timestamp_ms,
            one.headers,
            one.stamp,
            one.chained,
            one.event_id,
            one.event_time_us,
        ) = row
        found.append(one)
    return found


def stamps_of(frame: pl.DataFrame, size: int) -> list[Stamp | None]:
    """What the envelopes of rows say about their producers."""
    if schema.STAMP not in frame.columns:
        return [None] * size
    column = frame.get_column(schema.STAMP)
    fields = [column.struct.field(name).to_list() for name in schema.STAMP_NAMES]
    missing = column.is_null().to_list()
    return [None if gone else Stamp(*row) for gone, *row in zip(missing, *fields, strict=True)]


def _headers(frame: pl.DataFrame, columns: Mapping[str, str]) -> list[tuple[tuple[str, bytes | None], ...]]:
    """The headers that the filter reads, by name of the column, each once: the last one of its name."""
    if not columns:
        return [()] * frame.height
    cells = [[(header, value) for value in frame.get_column(name).to_list()] for name, header in columns.items()]
    return list(zip(*cells, strict=True))
