"""Brings the rows of a DataFrame to the tasks that fold them: every partition of a topic whole, in order, once.

    the DataFrame's tasks: cut by topic and partition, as Arrow | one task for each slot: order, drop what came twice

Between the two, blocks of many records move, never single rows. What the second step made is kept until the batch is
committed: attempts at the batch fold the same records.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark import RDD, StorageLevel

from aggregations.engine.delivered_rows import chunked, columns, converted, in_order, of_partition
from aggregations.engine.fetch import CHUNK_BYTES, CHUNK_RECORDS
from aggregations.engine.ranges import Range
from aggregations.errors import FlowError, RunRefusedError, TasksLostError
from aggregations.run.deliveries import Delivered, joined
from envelope import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RECORD: Final = ("key", "value", "offset", "timestamp")
_BLOCK: Final = "topic string, partition int, records binary"
_NOWHERE: Final = ""
"""Topic of a block that stands for rows without a topic, a partition or an offset that a record can have."""

Chunk = tuple[Delivered, bytes]
"""Some records of one partition, in order: what they are, and an Arrow stream of `key` and `value` (binary), `offset`
(int64), `timestamp` (timestamp[ms]) and, if they are read, `headers`."""


def check_rows(rows: "DataFrame", flow: str, *, headers: bool) -> None:
    """Check that a DataFrame has the columns of Spark's Kafka source.

    Raises:
        FlowError: It lacks one, one has another type, or it is a DataFrame of Spark Connect.
    """
    if not hasattr(rows, "_jdf"):
        raise FlowError(
            f"flow {flow}: aggregators need a classic Spark session (got {type(rows).__module__}.{type(rows).__name__}); "
            "run the program with spark-submit, or with SPARK_REMOTE unset"
        )
    types = dict(rows.dtypes)
    needed = columns(headers=headers)
    for name, kind in needed.items():
        if name not in types:
            option = '; give the stream option("includeHeaders", True)' if name == "headers" else ""
            raise FlowError(
                f"flow {flow}: the DataFrame has no column {name!r}; it needs the columns of Spark's Kafka source: "
                f"{', '.join(needed)}{option}"
            )
        if types[name] != kind:
            raise FlowError(f"flow {flow}: column {name!r} is {types[name]}; it must be {kind}, so cast it")


@dataclass(frozen=True)
class Gathered:
    """The records of a batch, kept by Spark until `release`.

    Attributes:
        delivered: What there is of each partition.
        rows: The records, in one partition for each slot.
    """

    delivered: Mapping[TopicPartition, Delivered]
    rows: "RDD[Chunk]"

    def release(self) -> None:
        """Let Spark drop the records."""
        with suppress(Py4JError, ConnectionError, AttributeError):  # Spark may have ended
            self.rows.unpersist()


def gather(rows: "DataFrame", flow: str, slots: int, *, topics: Iterable[str], headers: bool) -> Gathered:
    """Order the rows of a DataFrame and keep them.

    Args:
        rows: The DataFrame; see `check_rows`.
        flow: Name of the flow.
        slots: Number of slots; a partition is in the slot of its number.
        topics: Topics that the flow reads.
        headers: Read headers, too.

    Raises:
        RunRefusedError: A row is of another topic, or has no topic, partition or offset.
    """
    blocks = rows.select(*columns(headers=headers)).mapInArrow(_cut, _BLOCK).rdd.map(_by_slot)
    ordered = blocks.partitionBy(slots, int).mapPartitions(_ordered, preservesPartitioning=True)
    kept = ordered.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        told = kept.mapPartitions(_whats).collect()
        if len(told) != slots:  # PySpark takes a stream of results that breaks off for a complete one
            raise TasksLostError(f"Spark delivered what {len(told)} tasks of {slots} gathered")
        delivered = joined(one for its in told for one in its)
        known = {*topics}
        for place in delivered:
            if place.topic == _NOWHERE:
                raise without_place(flow)
            if place.topic not in known:
                raise RunRefusedError(
                    f"flow {flow}: the DataFrame has rows of topic {place.topic}, and the flow reads {', '.join(sorted(known))}; "
                    "filter them out, or subscribe to these topics only"
                )
    except BaseException:
        kept.unpersist()
        raise
    return Gathered(delivered, kept)


def without_place(flow: str) -> RunRefusedError:
    """The error for rows that are no records of a topic."""
    return RunRefusedError(
        f"flow {flow}: the DataFrame has rows without a topic, partition or offset, or with a negative one; filter them out"
    )


def _what(chunk: Chunk) -> Delivered:
    return chunk[0]


def _whats(chunks: Iterable[Chunk]) -> Iterator[list[Delivered]]:
    yield [*map(_what, chunks)]


def _by_slot(row: Any) -> tuple[int, tuple[str, int, bytes]]:
    return row.partition, (row.topic, row.partition, bytes(row.records))


def _cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Divide rows by topic and partition, in blocks of many."""
    waiting: dict[tuple[str, int], list[pa.RecordBatch]] = {}
    rows = size = 0
    for batch in batches:
        for place, part in _divided(batch):
            waiting.setdefault(place, []).append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
        if rows >= CHUNK_RECORDS or size >= CHUNK_BYTES:
            yield from _blocks(waiting)
            waiting, rows, size = {}, 0, 0
    yield from _blocks(waiting)


def _divided(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.RecordBatch]]:
    topic, partition, offset = (batch.column(name) for name in ("topic", "partition", "offset"))
    least = [pc.min(one).as_py() or 0 for one in (partition, offset)]
    if topic.null_count or partition.null_count or offset.null_count or min(least) < 0:
        yield (_NOWHERE, 0), _records(batch.slice(0, 0))
        return
    if not batch.num_rows:
        return
    codes = topic.dictionary_encode()
    names, lowest = codes.dictionary.to_pylist(), pc.min_max(partition).as_py()
    if len(names) == 1 and lowest["min"] == lowest["max"]:
        yield (names[0], lowest["min"]), _records(batch)
        return
    for code, name in enumerate(names):
        mine = pc.equal(codes.indices, code)
        for number in pc.unique(partition.filter(mine)).to_pylist():
            yield (name, number), _records(batch.filter(pc.and_(mine, pc.equal(partition, number))))


def _records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of a block, in the types of a fetch."""
    names = [name for name in (*_RECORD, "headers") if name in batch.schema.names]
    return pa.RecordBatch.from_arrays([converted(name, batch.column(name)) for name in names], names=names)


def _blocks(waiting: Mapping[tuple[str, int], Sequence[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    for (topic, partition), parts in waiting.items():
        columns = [[topic], [partition], [_stream(pa.Table.from_batches(parts))]]
        types = [pa.string(), pa.int32(), pa.binary()]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=["topic", "partition", "records"])


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _ordered(blocks: Iterable[tuple[int, tuple[str, int, bytes]]]) -> Iterator[Chunk]:
    """Order the records of every partition, and leave out what came twice."""
    found: dict[tuple[str, int], list[pa.Table]] = {}
    for _, (topic, partition, records) in blocks:
        found.setdefault((topic, partition), []).append(_table(records))
    for (topic, partition), parts in sorted(found.items()):
        yield from _chunks(TopicPartition(topic, partition), pa.concat_tables(parts))


def _table(records: bytes) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(records)).read_all()


def _chunks(place: TopicPartition, table: pa.Table) -> Iterator[Chunk]:
    table, contradicted = in_order(table)
    for part in chunked(table) if table.num_rows else [table]:
        yield _described(place, part, contradicted), _stream(part)
        contradicted = ()


def _described(place: TopicPartition, table: pa.Table, contradicted: tuple[int, ...]) -> Delivered:
    offsets = table.column("offset").combine_chunks()
    if not len(offsets):
        return Delivered(place, 0, 0, 0)
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    holes: list[tuple[int, int]] = []
    if last - first + 1 > len(offsets):
        steps = pc.subtract(offsets[1:], offsets[:-1])
        wide = pc.indices_nonzero(pc.greater(steps, 1)).to_pylist()
        holes = [(offsets[row].as_py() + 1, offsets[row + 1].as_py()) for row in wide]
    return Delivered(place, first, last + 1, len(offsets), tuple(holes), contradicted)


def tables(chunks: Iterable[Chunk], ranges: Sequence[Range]) -> Iterator[pa.Table]:
    """The records of some ranges, as `aggregations.engine.fetch.Fetcher.read` yields them: those of a topic together.

    Args:
        chunks: What a slot has, in order.
        ranges: The ranges that are folded.
    """
    wanted = {one.place: one for one in ranges}
    for what, records in chunks:
        one = wanted.get(what.place)
        if one is None or what.end <= one.start or what.first >= one.end:
            continue
        table = _table(records)
        if what.first < one.start or what.end > one.end:
            offsets = table.column("offset")
            inside = pc.and_(pc.greater_equal(offsets, one.start), pc.less(offsets, one.end))
            table = table.filter(inside)
        yield of_partition(table, what.place)


def check_same(chunks: Sequence[Chunk], delivered: Mapping[TopicPartition, Delivered], slot: int, slots: int) -> None:
    """Check that a slot still has what the driver was told: Spark reads rows again that it has lost.

    Raises:
        TasksLostError: It has other records.
    """
    mine = {place: one for place, one in delivered.items() if place.partition % slots == slot}
    if joined(map(_what, chunks)) != mine:
        raise TasksLostError("Spark lost records of the batch, and its source delivered others when it was read again")
