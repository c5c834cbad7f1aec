"""Frames of states as Arrow record batches, with the types that Spark reads."""

from typing import Any

import polars as pl
import pyarrow as pa

_PLAIN = {
    pl.String: pa.string(),
    pl.Binary: pa.binary(),
    pl.Int64: pa.int64(),
    pl.Float64: pa.float64(),
    pl.Boolean: pa.bool_(),
}


def arrow_schema(schema: pl.Schema) -> pa.Schema:
    """The Arrow schema of a table of states; every column may be null."""
    return pa.schema([pa.field(name, _type_of(dtype)) for name, dtype in schema.items()])


def batch_of(frame: pl.DataFrame) -> pa.RecordBatch:
    """A frame as one record batch."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(arrow_schema(frame.schema))
    [batch] = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    return batch


def _type_of(dtype: Any) -> pa.DataType:
    if isinstance(dtype, pl.List):
        return pa.list_(_type_of(dtype.inner))
    if isinstance(dtype, pl.Struct):
        return pa.struct([pa.field(one.name, _type_of(one.dtype)) for one in dtype.fields])
    if isinstance(dtype, pl.Datetime):
        return pa.timestamp("us", tz="UTC")
    if isinstance(dtype, pl.Decimal):
        return pa.decimal128(dtype.precision, dtype.scale)
    return _PLAIN[dtype.base_type()]
