"""headwater in a Spark application: behind Spark's own Kafka source, and over a copy of the topic in Parquet.

Run as a module it is the application:

    python -m benchmarks.peers.stream kafka BOOTSTRAP GROUP STORE BATCH
    python -m benchmarks.peers.stream parquet BOOTSTRAP GROUP STORE BATCH DIRECTORY

It ends when its standard input is closed, after everything was folded.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from aggregations.engine.fetch import Fetcher
from aggregations.engine.ranges import Range
from benchmarks.peers.base import HEAP, Peer, Task, module
from benchmarks.peers.connector import fetch_connector, kafka_connector
from benchmarks.peers.headwater import Headwater
from persistence.kafka import KafkaSettings, Topics


class HeadwaterStream(Headwater):
    """The aggregator as the function of `foreachBatch` of Spark's Kafka source."""

    name = "headwater-stream"
    source: ClassVar[str] = "kafka"

    def prepare(self, work: Path) -> None:
        """Fetch the Kafka connector of Spark."""
        fetch_connector()

    def command(self, task: Task) -> list[str]:
        given = (task.bootstrap, task.run, self.url(task), str(task.batch), *self.more(task))
        return module("benchmarks.peers.stream", self.source, *given)

    def environment(self, task: Task) -> dict[str, str]:
        return {**super().environment(task), "PYSPARK_PYTHON": sys.executable}

    def finish(self, task: Task, child: "subprocess.Popen[bytes]") -> None:
        Peer.finish(self, task, child)

    def more(self, task: Task) -> list[str]:
        """Return further arguments, before anything is timed."""
        return []


class HeadwaterArchive(HeadwaterStream):
    """The aggregator folds a copy of the topic, as a connector would have written it: files of a batch each."""

    name = "headwater-archive"
    source = "parquet"

    def prepare(self, work: Path) -> None:
        """It needs nothing."""

    def more(self, task: Task) -> list[str]:
        """Return the directory of the copy, which is written here."""
        directory = task.home.parent / f"archive-{task.topic}"
        if not directory.exists():
            write_archive(task, directory)
        return [str(directory)]


def write_archive(task: Task, directory: Path) -> None:
    """Write a topic to Parquet, a file for each batch of each partition."""
    directory.mkdir()
    settings = KafkaSettings(task.bootstrap)
    fetcher = Fetcher(settings, task.topic, "archive", compiled=False)
    for place, mark in Topics(settings).marks([task.topic]).items():
        for start in range(mark.low, mark.high, task.batch // 4):
            one = Range(place.partition, start, min(start + task.batch // 4, mark.high), task.topic)
            table = pa.concat_tables(fetcher.read([one], stays=True))
            times = table.column("timestamp").cast(pa.timestamp("ms", tz="UTC"))
            table = table.set_column(table.schema.get_field_index("timestamp"), "timestamp", times)
            topics = table.column("topic").cast(pa.string())
            table = table.set_column(table.schema.get_field_index("topic"), "topic", topics)
            pq.write_table(table, directory / f"{place.partition}-{start}.parquet")
    fetcher.close()


def main(source: str, bootstrap: str, group: str, store: str, batch: str, directory: str = "") -> None:
    """Fold the topic up to where it ends now, or its copy."""
    from pyspark.sql import SparkSession

    from benchmarks.peers.flow import flow

    found = kafka_connector() if source == "kafka" else []
    conf = {
        "spark.driver.memory": HEAP.removeprefix("-Xmx"),
        "spark.jars": ",".join(map(str, found)),
        "spark.driver.extraClassPath": os.pathsep.join(map(str, found)),
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    given = {"stores": store, "kafka": KafkaSettings(bootstrap), "group": group, "max_records": int(batch)}
    with flow.aggregator(**given) as aggregator, tempfile.TemporaryDirectory() as checkpoint:
        if source == "parquet":
            aggregator.fold(spark.read.parquet(directory))
        else:
            options = {
                "kafka.bootstrap.servers": bootstrap,
                "subscribe": ",".join(flow.topics),
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": batch,
            }
            rows = spark.readStream.format("kafka").options(**options).load()
            writer = rows.writeStream.foreachBatch(aggregator).option("checkpointLocation", checkpoint)
            writer.trigger(availableNow=True).start().awaitTermination()
        sys.stdin.read()  # until it was measured
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
