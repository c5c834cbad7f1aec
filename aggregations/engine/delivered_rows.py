"""Rows with the columns of Spark's Kafka source as records that can be folded: in order, once, in the types of a fetch."""

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from aggregations.engine.fetch import CHUNK_BYTES, CHUNK_RECORDS
from aggregations.engine.message_objects import HEADERS
from envelope import TopicPartition

WIDE_BYTES: Final = 1 << 30
"""Size from which rows are ordered in arrays of any size."""
_COLUMNS: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "headers": "array<struct<key:string,value:binary>>",
}


def columns(*, headers: bool) -> dict[str, str]:
    """Columns of Spark's Kafka source that are read, with their types in Spark; `headers` only if the flow reads them."""
    return {name: kind for name, kind in _COLUMNS.items() if headers or name != "headers"}


def converted(name: str, column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """A column in the type that `Fetcher.read` gives it."""
    if name == "timestamp":
        return pc.cast(column, pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.timestamp("ms"))
    if name == "headers":  # Spark writes null for none
        return pc.coalesce(column.cast(HEADERS), pa.scalar([], HEADERS))
    return column.cast(pa.binary()) if name in ("key", "value") else column


def in_order(table: pa.Table) -> tuple[pa.Table, tuple[int, ...]]:
    """The rows of one partition in order of offsets, the first of each offset.

    Args:
        table: The rows, with a column `offset` (int64).

    Returns:
        The rows, and the offsets whose rows differ.
    """
    offsets = table.column("offset").combine_chunks()
    if table.nbytes > WIDE_BYTES:  # what is ordered is one array, and a binary one has at most 2 GiB
        table = _cast(table, pa.binary(), pa.large_binary())
    least = pc.min(pc.pairwise_diff(offsets)).as_py() if len(offsets) > 1 else 1
    if least < 0:
        table = table.take(pc.sort_indices(offsets))
        offsets = table.column("offset").combine_chunks()
    if least > 0:
        return table, ()
    first = pa.concat_arrays([pa.array([True]), pc.not_equal(offsets[1:], offsets[:-1])])
    again = pc.indices_nonzero(pc.invert(first)).to_pylist()
    differ = [offsets[row].as_py() for row in again if not table.slice(row, 1).equals(table.slice(row - 1, 1))]
    return table.filter(first), tuple(dict.fromkeys(differ))


def chunked(table: pa.Table) -> Iterator[pa.Table]:
    """The rows in parts of at most `CHUNK_RECORDS` rows, and of about `CHUNK_BYTES` bytes."""
    most = min(CHUNK_RECORDS, max(CHUNK_BYTES * table.num_rows // max(table.nbytes, 1), 1))
    for start in range(0, table.num_rows, most):
        part = table.slice(start, most)
        if pa.large_binary() in part.schema.types:  # a copy, whose offsets begin at 0
            part = _cast(part.take(pa.array(range(part.num_rows))), pa.large_binary(), pa.binary())
        yield part.combine_chunks()


def _cast(table: pa.Table, kind: pa.DataType, to: pa.DataType) -> pa.Table:
    """The table with columns of a type in another one."""
    fields = [one.with_type(to) if one.type == kind else one for one in table.schema]
    return table.cast(pa.schema(fields))


def of_partition(table: pa.Table, place: TopicPartition) -> pa.Table:
    """The rows with columns `partition` (int32) and `topic` (dictionary), as `Fetcher.read` yields them."""
    rows = table.num_rows
    topics = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows), pa.array([place.topic]))
    partitions = pa.repeat(pa.scalar(place.partition, pa.int32()), rows)
    return table.append_column("topic", topics).append_column("partition", partitions)
