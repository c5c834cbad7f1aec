"""Payloads of a whole batch as columns."""

from collections.abc import Callable
from operator import attrgetter
from typing import TypeAlias

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
from ptars import HandlerPool

from aggregations.columns.seal import Mask
from aggregations.payload import Json, Payload, Protobuf, Raw
from aggregations.protobuf import trimmed

PayloadColumns: TypeAlias = Callable[[pa.BinaryArray], tuple[pl.DataFrame, Mask]]
"""Payloads in; the columns of those that could be read, and which these are, out."""


def payload_columns(payload: Payload, columns: frozenset[str] | None) -> PayloadColumns:
    """Return the function that reads payloads whose structure has been checked.

    It gives what `payload.reader(columns)` gives value by value, with the types of `payload.schema`.
    """
    schema = {name: kind for name, kind in payload.schema.items() if columns is None or name in columns}
    match payload:
        case Json():
            # What is no JSON object is refused even where no column is needed.
            return _json(payload, columns, schema)
        case _ if not schema:
            return lambda payloads: (pl.DataFrame(height=len(payloads)), np.ones(len(payloads), np.bool_))
        case Protobuf():
            return _protobuf(payload, columns, schema)
        case Raw():
            return lambda payloads: (pl.DataFrame({"value": pl.from_arrow(payloads)}), np.ones(len(payloads), np.bool_))
    raise TypeError(f"no columns can be made of {payload!r}")


def _protobuf(payload: Protobuf, columns: frozenset[str] | None, schema: dict[str, pl.DataType]) -> PayloadColumns:
    descriptor = trimmed(payload.type, columns).DESCRIPTOR
    handler = HandlerPool([descriptor.file]).get_for_message(descriptor)

    def read(payloads: pa.BinaryArray) -> tuple[pl.DataFrame, Mask]:
        try:
            batch = handler.array_to_record_batch(payloads)
        except ValueError:
            # The structure is right, so this is not expected; the other reader is to decide.
            return pl.DataFrame(schema=schema), np.zeros(len(payloads), np.bool_)
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        return frame.select(list(schema)), np.ones(len(payloads), np.bool_)

    return read


def _json(payload: Json, columns: frozenset[str] | None, schema: dict[str, pl.DataType]) -> PayloadColumns:
    decode = payload.decoder(columns).decode
    fields = [attrgetter(f"f{i}") for i in range(len(schema))]

    def decode_or_none(one: bytes) -> msgspec.Struct | None:
        try:
            return decode(one)
        except ValueError:
            return None

    def read(payloads: pa.BinaryArray) -> tuple[pl.DataFrame, Mask]:
        texts = payloads.to_pylist()
        try:
            rows: list[msgspec.Struct | None] = list(map(decode, texts))
        except ValueError:
            rows = [decode_or_none(text) for text in texts]
        good = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        if not good.all():
            rows = [row for row in rows if row is not None]
        series = [
            pl.Series(name, list(map(field, rows)), dtype=kind)
            for field, (name, kind) in zip(fields, schema.items(), strict=True)
        ]
        return pl.DataFrame(series) if series else pl.DataFrame(height=len(rows)), good

    return read
