"""Archives of topics in Parquet, as a query of Spark's writes them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aggregations.definition.element import Record

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


def row(offset: int | None, value: bytes = b"", **changed: Any) -> dict[str, Any]:
    """A row of an archive."""
    made = {"key": b"k", "value": value, "topic": "legs", "partition": 0, "offset": offset, "timestamp": 1_000}
    return made | {"headers": []} | changed


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of records that were read from Kafka."""
    return [
        {
            "key": one.key,
            "value": one.value,
            "topic": one.topic,
            "partition": one.partition,
            "offset": one.offset,
            "timestamp": one.timestamp_ms * 1_000,
            "headers": [{"key": name, "value": value} for name, value in one.headers],
        }
        for one in records
    ]


def write(
    path: Path, rows: Iterable[Mapping[str, Any]], *, without: str = "", group: int = 1 << 20, **types: pa.DataType
) -> str:
    """Write rows into a file, perhaps without a column or with other types, and return the location of the archive."""
    schema = pa.schema([pa.field(one.name, types.get(one.name, one.type)) for one in SCHEMA if one.name != without])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([*rows], schema), path, row_group_size=group)
    return f"parquet:{path}"
