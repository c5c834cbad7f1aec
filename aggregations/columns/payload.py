"""Payloads of a whole batch as columns."""

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import TypeAlias

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
from ptars import HandlerPool

from aggregations.columns.arrays import Mask
from aggregations.columns.structure import Structure
from aggregations.definition.json_types import SHALLOW_BYTES, plain
from aggregations.definition.payloads import Json, Payload, Protobuf, Raw, decoded
from aggregations.definition.protobuf import trimmed

PayloadColumns: TypeAlias = Callable[[pa.BinaryArray], tuple[pl.DataFrame, Mask]]
"""Takes payloads; returns the columns of those that could be read, and which these are."""


def payload_columns(payload: Payload, columns: frozenset[str] | None, *, checked: bool) -> PayloadColumns:
    """Return the function that reads payloads.

    It returns the results of `payload.reader(columns)` for each value, with the types of `payload.schema`.

    Args:
        payload: Kind of the payloads.
        columns: The columns needed; None for all.
        checked: `Structure` has checked the payloads, within their envelopes.
    """
    schema = {name: kind for name, kind in payload.schema.items() if columns is None or name in columns}
    match payload:
        case Json():
            # A value that is not a JSON object is rejected even if no column is needed.
            return _json(payload, columns, schema)
        case Protobuf():
            return _protobuf(payload, columns, schema, None if checked else Structure.of_payload(payload.type, columns))
        case Raw() if schema:
            return lambda payloads: (pl.DataFrame({"value": pl.from_arrow(payloads)}), _all(payloads))
        case Raw():
            return lambda payloads: (pl.DataFrame(height=len(payloads)), _all(payloads))
    raise TypeError(f"no columns can be made of {payload!r}")


def _protobuf(
    payload: Protobuf,
    columns: frozenset[str] | None,
    schema: dict[str, pl.DataType],
    structure: Structure | None,
) -> PayloadColumns:
    descriptor = trimmed(payload.type, columns).DESCRIPTOR
    handler = HandlerPool([descriptor.file]).get_for_message(descriptor)

    def parse(payloads: pa.BinaryArray) -> pl.DataFrame:
        batch = handler.array_to_record_batch(payloads)
        if not schema:
            return pl.DataFrame(height=len(payloads))
        frame = pl.from_arrow(batch.select(list(schema)))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def read(payloads: pa.BinaryArray) -> tuple[pl.DataFrame, Mask]:
        try:
            frame = parse(payloads)
            if structure is None or structure.all_valid(payloads):
                return frame, _all(payloads)
        except ValueError:
            pass  # the columnar parser does not say which row it was
        if structure is not None:
            valid = structure.valid(payloads)
            with suppress(ValueError):
                return parse(payloads.filter(pa.array(valid))), valid
        # Not expected if the structure is valid; the other reader decides.
        return parse(payloads[:0]), ~_all(payloads)

    return read


def _all(payloads: pa.BinaryArray) -> Mask:
    return np.ones(len(payloads), np.bool_)


def _json(payload: Json, columns: frozenset[str] | None, schema: dict[str, pl.DataType]) -> PayloadColumns:
    decoder = payload.decoder(columns)
    fields = [attrgetter(f"f{i}") for i in range(len(schema))]

    def read(payloads: pa.BinaryArray) -> tuple[pl.DataFrame, Mask]:
        texts = payloads.to_pylist()
        rows: list[msgspec.Struct | None]
        try:
            if max(map(len, texts), default=0) > SHALLOW_BYTES:
                rows = [decoded(decoder, text) for text in texts]
            else:
                rows = list(map(decoder.decode, texts))
        except ValueError:
            rows = [decoded(decoder, text) for text in texts]
        good = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        if not good.all():
            rows = [row for row in rows if row is not None]
        series = [
            _series(name, list(map(field, rows)), kind)
            for field, (name, kind) in zip(fields, schema.items(), strict=True)
        ]
        return pl.DataFrame(series) if series else pl.DataFrame(height=len(rows)), good

    return read


def _series(name: str, values: list[object], kind: pl.DataType) -> pl.Series:
    """A column of values that msgspec has read."""
    if not kind.is_nested():
        return pl.Series(name, values, dtype=kind)
    make = plain(kind)
    arrow = pl.Series(dtype=kind).to_arrow(compat_level=pl.CompatLevel.oldest()).type
    found = pl.from_arrow(pa.array(values if make is None else list(map(make, values)), type=arrow))
    assert isinstance(found, pl.Series)
    return found.alias(name)
