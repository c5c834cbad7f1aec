"""Records as a DataFrame with the columns of Spark's Kafka source, and as files that a stream reads."""

import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aggregations.definition.element import Record

SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "headers array<struct<key:string,value:binary>>"
)


def row(record: Record) -> tuple[Any, ...]:
    stamp = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
    place = (record.topic, record.partition, record.offset)
    return (record.key, record.value, *place, stamp, 0, [*record.headers])


def frame(spark: SparkSession, records: Iterable[Record], *, shuffled: int | None = None, tasks: int = 3) -> DataFrame:
    """A DataFrame of records, in another order if `shuffled` is the seed of one."""
    rows = [row(record) for record in records]
    if shuffled is not None:
        random.Random(shuffled).shuffle(rows)
    return spark.createDataFrame(rows, SCHEMA).repartition(tasks) if rows else spark.createDataFrame([], SCHEMA)


class Files:
    """A directory of Parquet files; a stream reads each of them as one batch."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.directory = directory
        directory.mkdir()

    def add(self, *records: Record) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        stamp = pa.timestamp("us", "UTC")
        header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        kinds = [pa.binary(), pa.binary(), pa.string(), pa.int32(), pa.int64(), stamp, pa.int32(), header]
        names = [one.split()[0] for one in SCHEMA.split(", ")[:-1]] + ["headers"]
        columns = list(zip(*map(row, records), strict=True))
        as_dicts = [[{"key": k, "value": v} for k, v in one] for one in columns[-1]]
        arrays = [pa.array(one, kind) for one, kind in zip([*columns[:-1], as_dicts], kinds, strict=True)]
        number = len([*self.directory.glob("*.parquet")])
        hidden = self.directory / f".{number}"
        pq.write_table(pa.table(arrays, names), hidden)
        hidden.rename(self.directory / f"{number:05d}.parquet")

    def stream(self) -> DataFrame:
        read = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return read.parquet(str(self.directory))


def query(rows: DataFrame, aggregator: Any, checkpoint: Path | str) -> None:
    """Run a query until it has read everything."""
    writer = rows.writeStream.foreachBatch(aggregator).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def chunked(records: Sequence[Record], size: int) -> list[Sequence[Record]]:
    return [records[start : start + size] for start in range(0, len(records), size)]
