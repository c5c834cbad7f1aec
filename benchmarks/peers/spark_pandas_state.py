"""Spark's own stateful operator: `applyInPandasWithState`, the rule and the fold in Python, states in Spark's store.

Run as a module it is the job:

    python -m benchmarks.peers.spark_pandas_state BOOTSTRAP TOPIC GROUP BATCH RESULT

It drains the topic up to where it ends, commits its progress to the consumer group after each batch, since Spark keeps
it in the checkpoint only, and ends when its standard input is closed.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers.base import HEAP, Peer, Task, module
from benchmarks.peers.connector import fetch_connector, kafka_connector
from envelope import TopicPartition, decode
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import KafkaSettings, Topics

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming.state import GroupState

RESULT: Final = "key string, count long, sum long, max long"
STATE: Final = "count long, sum long, max long, lanes string"


class SparkPandasState(Peer):
    """The same number of cores as headwater, four shuffle partitions."""

    name = "spark-pandas-state"
    store = "rocksdb"
    slow = True

    def prepare(self, work: Path) -> None:
        """Fetch the Kafka connector of Spark."""
        fetch_connector()

    def command(self, task: Task) -> list[str]:
        given = (task.bootstrap, task.topic, task.run, str(task.batch), str(task.output))
        return module("benchmarks.peers.spark_pandas_state", *given)


def fold(key: tuple[Any, ...], frames: "Iterable[pd.DataFrame]", state: "GroupState") -> "Iterator[pd.DataFrame]":
    """Fold one key's records of a batch, in the order of their offsets; leave out copies."""
    import pandas as pd

    count, added, highest, text = state.get if state.exists else (0, 0, None, "{}")
    lanes = json.loads(text)
    for value in pd.concat(frames).sort_values("offset")["value"]:
        envelope = decode(bytes(value))
        if envelope.key != key[0]:
            raise ValueError("the record's key is not the envelope's")
        lane = "|".join(f"{hop.topic_id or hop.topic}/{hop.partition}/{hop.via}" for hop in envelope.chain)
        position = [number for hop in envelope.chain for number in (hop.offset, hop.index)]
        if position <= lanes.get(lane, []):
            continue
        leg = Leg.FromString(envelope.payload)
        lanes[lane] = position
        count, added = count + 1, added + leg.air_minutes
        highest = leg.arr_delay if highest is None else max(highest, leg.arr_delay)
    state.update((count, added, highest, json.dumps(lanes)))
    yield pd.DataFrame({"key": [key[0].decode()], "count": [count], "sum": [added], "max": [highest]})


def job(bootstrap: str, topic: str, group: str, batch: str, result: str) -> None:
    """Drain the topic up to where it ends now, and write the states."""
    from pyspark.sql import SparkSession

    from aggregations.spark.session import session

    settings = KafkaSettings(bootstrap)
    conf = {
        "spark.driver.memory": HEAP.removeprefix("-Xmx"),
        "spark.sql.shuffle.partitions": "4",
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",  # RocksDB's files need it
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    found: dict[str, tuple[int, int, int]] = {}

    def collect(rows: Any, _number: int) -> None:
        found.update({row["key"]: (row["count"], row["sum"], row["max"]) for row in rows.collect()})

    found_jars = kafka_connector()
    conf |= {
        "spark.jars": ",".join(map(str, found_jars)),
        "spark.driver.extraClassPath": os.pathsep.join(map(str, found_jars)),
    }
    with session(group, conf=conf) as context, tempfile.TemporaryDirectory() as checkpoint:
        source = {
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": batch,
            "kafka.bootstrap.servers": settings.bootstrap,
        }
        query = (
            SparkSession(context)
            .readStream.format("kafka")
            .options(**source)
            .load()
            .select("key", "value", "offset")
            .groupBy("key")
            .applyInPandasWithState(fold, RESULT, STATE, "update", "NoTimeout")
            .writeStream.outputMode("update")
            .foreachBatch(collect)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        topics, committed = Topics(settings), None
        while True:
            active = query.isActive
            last = query.lastProgress
            ends = json.loads(last.json)["sources"][0]["endOffset"] if last else None
            if ends and ends != committed:
                topics.alter_group_offsets(
                    group, {TopicPartition(topic, int(part)): end for part, end in ends[topic].items()}
                )
                committed = ends
            if not active:
                break
            time.sleep(0.1)
        query.awaitTermination()
        sys.stdin.read()  # until it was measured
    with Path(result).open("w") as out:
        out.writelines(f"{key}\t{count}\t{added}\t{highest}\n" for key, (count, added, highest) in found.items())


if __name__ == "__main__":
    from benchmarks.peers import spark_pandas_state

    spark_pandas_state.job(*sys.argv[1:6])  # imported, so that workers import `fold` too
