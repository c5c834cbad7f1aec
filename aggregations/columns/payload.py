"""Payloads of a whole batch as columns."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor
from ptars import HandlerPool

from aggregations.columns.arrays import Ints, Mask, Spans
from aggregations.definition.json_types import SHALLOW_BYTES, plain
from aggregations.definition.payloads import Json, Payload, Protobuf, Raw, decoded
from aggregations.definition.protobuf import is_column, trimmed
from envelope.codec import varint
from envelope.framing import SCHEMA_ID_FRAME

PayloadColumns: TypeAlias = Callable[[Spans], tuple[pl.DataFrame, Mask]]
"""Takes payloads; returns the columns of those that could be read, and which these are."""

_FLAT: Final[
    dict[int, tuple[str, Any]]
] = {  # by type of a field: its name in `payload_reading`, and type of the numbers
    FieldDescriptor.TYPE_INT32: ("INT32", np.int32),
    FieldDescriptor.TYPE_INT64: ("INT64", np.int64),
    FieldDescriptor.TYPE_UINT32: ("UINT32", np.uint32),
    FieldDescriptor.TYPE_UINT64: ("INT64", np.uint64),
    FieldDescriptor.TYPE_SINT32: ("SINT32", np.int32),
    FieldDescriptor.TYPE_SINT64: ("SINT64", np.int64),
    FieldDescriptor.TYPE_FIXED32: ("FIXED32", np.uint32),
    FieldDescriptor.TYPE_SFIXED32: ("FIXED32", np.int32),
    FieldDescriptor.TYPE_FIXED64: ("FIXED64", np.uint64),
    FieldDescriptor.TYPE_SFIXED64: ("FIXED64", np.int64),
    FieldDescriptor.TYPE_FLOAT: ("FIXED32", np.float32),
    FieldDescriptor.TYPE_DOUBLE: ("FIXED64", np.float64),
    FieldDescriptor.TYPE_BOOL: ("BOOL", np.bool_),
    FieldDescriptor.TYPE_STRING: ("STRING", pa.string()),
    FieldDescriptor.TYPE_BYTES: ("BYTES", pa.binary()),
}


def payload_columns(payload: Payload, columns: frozenset[str] | None) -> PayloadColumns:
    """Return the function that reads payloads.

    It returns the results of `payload.reader(columns)` for each value, with the types of `payload.schema`.

    Args:
        payload: Kind of the payloads.
        columns: The columns needed; None for all.
    """
    schema = {name: kind for name, kind in payload.schema.items() if columns is None or name in columns}
    match payload:
        case Json():
            # A value that is not a JSON object is rejected even if no column is needed.
            return _json(payload, columns, schema)
        case Protobuf():
            return _protobuf(payload, columns)
        case Raw() if schema:
            return lambda payloads: (pl.DataFrame({"value": _series(payloads.array(pa.binary()))}), _all(payloads))
        case Raw():
            return lambda payloads: (pl.DataFrame(height=len(payloads.starts)), _all(payloads))
    raise TypeError(f"no columns can be made of {payload!r}")


def _protobuf(payload: Protobuf, columns: frozenset[str] | None) -> PayloadColumns:
    from aggregations.columns.payload_reading import read_payloads

    message = trimmed(payload.type, columns).DESCRIPTOR
    bounds, fields, oneofs = _table(message)
    flat = all(field.type in _FLAT and not field.is_repeated for field in message.fields)
    tails = dict.fromkeys((frame_of([0]), frame_of(payload.type.indexes)))
    handler = None if flat else HandlerPool([message.file]).get_for_message(message)

    def read(payloads: Spans) -> tuple[pl.DataFrame, Mask]:
        for tail in tails:
            payloads = _unframed(payloads, tail)
        rows = len(payloads.starts)
        good = np.empty(rows, np.bool_)
        numbers, sizes = np.empty((2, len(message.fields), rows), np.int64)
        read_payloads(tuple(payloads), bounds, fields, oneofs, good, numbers, sizes)
        if not good.all():
            payloads = payloads.at(good)
            numbers, sizes = numbers.compress(good, axis=1), sizes.compress(good, axis=1)
        if handler is None:
            series = [
                _column(field, payloads.data, numbers[place], sizes[place])
                for place, field in enumerate(message.fields)
                if is_column(field)
            ]
            return pl.DataFrame(series) if series else pl.DataFrame(height=len(payloads.starts)), good
        try:
            batch = handler.array_to_record_batch(payloads.array(pa.binary()))
        except ValueError:  # not expected, as they are valid; the other reader decides
            batch, good = handler.array_to_record_batch(pa.array([], pa.binary())), ~good & good
        frame = pl.from_arrow(_wanted(batch, message))
        assert isinstance(frame, pl.DataFrame)
        wide = {name: new for name, kind in frame.schema.items() if (new := _widened(kind)) != kind}
        return frame.cast(wide) if wide else frame, good  # type: ignore[arg-type]  # polars' own types

    return read


def frame_of(indexes: Sequence[int]) -> bytes:
    """What follows the schema id in Schema Registry's frame of a message with these indexes; see `strip_frame`."""
    return b"\0" if [*indexes] == [0] else b"".join(varint(2 * number) for number in (len(indexes), *indexes))


def _unframed(payloads: Spans, tail: bytes) -> Spans:
    """Payloads without the frame of Schema Registry that ends like this; others are left as they are."""
    size = SCHEMA_ID_FRAME + len(tail)
    rows = np.flatnonzero(payloads.lengths > 0)
    rows = rows[payloads.data[payloads.starts[rows]] == 0]
    if not len(rows):
        return payloads
    rows = rows[payloads.lengths[rows] >= size]
    for place, byte in enumerate(tail, start=SCHEMA_ID_FRAME):
        rows = rows[payloads.data[payloads.starts[rows] + place] == byte]
    starts, lengths = payloads.starts.copy(), payloads.lengths.copy()
    starts[rows] += size
    lengths[rows] -= size
    return Spans(payloads.data, starts, lengths)


def _widened(kind: Any) -> Any:
    """A type with 64-bit floating-point numbers in place of those with 32 bits."""
    match kind:
        case pl.Float32():
            return pl.Float64()
        case pl.List():
            return pl.List(_widened(kind.inner))
        case pl.Struct():
            return pl.Struct({one.name: _widened(one.dtype) for one in kind.fields})
    return kind


def _wanted(found: Any, message: Any) -> Any:
    """A batch, or an array of structs, without the fields that are no columns."""
    is_batch = isinstance(found, pa.RecordBatch)
    arrays = {
        field.name: _inside(found.column(field.name) if is_batch else found.field(field.name), field)
        for field in message.fields
        if is_column(field)
    }
    if is_batch:
        return pa.RecordBatch.from_arrays([*arrays.values()], names=[*arrays])
    return pa.StructArray.from_arrays([*arrays.values()], names=[*arrays], mask=found.is_null())


def _inside(found: pa.Array, field: Any) -> pa.Array:
    if field.message_type is None or not _has_rivals(field.message_type):
        return found
    if not field.is_repeated:
        return _wanted(found, field.message_type)
    values = _wanted(found.values, field.message_type)
    return pa.ListArray.from_arrays(found.offsets, values, mask=found.is_null() if found.null_count else None)


def _has_rivals(message: Any) -> bool:
    return any(not is_column(one) or (one.message_type and _has_rivals(one.message_type)) for one in message.fields)


def _table(message: Any) -> tuple[Ints, Ints, Ints]:
    """The arguments `bounds`, `fields` and `oneofs` of `read_payloads`, for a message that does not contain itself."""
    from aggregations.columns import payload_reading

    found: list[list[tuple[int, int, int, int]]] = []
    oneofs: list[tuple[int, int]] = []
    count = 0

    def add(message: Any, *, within: bool) -> int:
        nonlocal count
        number, first = len(found), count
        rows: list[tuple[int, int, int, int]] = []
        found.append(rows)
        oneofs.append((first, first))
        count += len(message.oneofs)
        for place, field in enumerate(message.fields):
            if field.message_type is None:
                kind, target = getattr(payload_reading, _FLAT[field.type][0]), -1 if within else place
            else:
                kind, target = payload_reading.MESSAGE, add(field.message_type, within=True)
            own = field.containing_oneof
            oneof = -1 if own is None or len(own.fields) == 1 else first + own.index
            rows.append((field.number, kind + payload_reading.REPEATED * field.is_repeated, target, oneof))
        oneofs[number] = first, count
        return number

    add(message, within=False)
    bounds = np.cumsum([0, *map(len, found)], dtype=np.int64)
    fields = np.array([row for rows in found for row in rows], np.int64).reshape(-1, 4)
    return bounds, fields, np.array(oneofs, np.int64)


def _column(field: Any, data: Any, numbers: Ints, sizes: Ints) -> pl.Series:
    """A column of a field that is neither repeated nor a message."""
    kind = _FLAT[field.type][1]
    absent = sizes == 0 if field.has_presence else None
    if isinstance(kind, pa.DataType):
        series = _series(Spans(data, numbers, np.maximum(sizes - 1, 0)).array(kind))
    elif kind is np.float32:
        series = pl.Series(numbers.astype(np.uint32).view(kind).astype(np.float64))
    elif kind is np.float64:
        series = pl.Series(np.ascontiguousarray(numbers).view(kind))
    else:
        series = pl.Series(numbers.astype(kind))
    if absent is not None and absent.any():
        series = series.set(pl.Series(absent), None)
    return series.alias(field.name)


def _all(payloads: Spans) -> Mask:
    return np.ones(len(payloads.starts), np.bool_)


def _series(array: pa.Array) -> pl.Series:
    found = pl.from_arrow(array)
    assert isinstance(found, pl.Series)
    return found


def _json(payload: Json, columns: frozenset[str] | None, schema: dict[str, pl.DataType]) -> PayloadColumns:
    decoder = payload.decoder(columns)
    fields = [attrgetter(f"f{i}") for i in range(len(schema))]

    def read(payloads: Spans) -> tuple[pl.DataFrame, Mask]:
        payloads = _unframed(payloads, b"")
        texts = payloads.array(pa.binary()).to_pylist()
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
            _json_series(name, list(map(field, rows)), kind)
            for field, (name, kind) in zip(fields, schema.items(), strict=True)
        ]
        return pl.DataFrame(series) if series else pl.DataFrame(height=len(rows)), good

    return read


def _json_series(name: str, values: list[object], kind: pl.DataType) -> pl.Series:
    """A column of values that msgspec has read."""
    if not kind.is_nested():
        return pl.Series(name, values, dtype=kind)
    make = plain(kind)
    arrow = pl.Series(dtype=kind).to_arrow(compat_level=pl.CompatLevel.oldest()).type
    found = pl.from_arrow(pa.array(values if make is None else list(map(make, values)), type=arrow))
    assert isinstance(found, pl.Series)
    return found.alias(name)
