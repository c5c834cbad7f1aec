"""Kafka Streams, exactly once, at its best setting for this work."""

import subprocess
from pathlib import Path
from struct import Struct
from typing import Any, Final

import polars as pl
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.peers.base import AT_LEAST_ONCE, HEAP, Peer, PeerUnavailable, Task
from benchmarks.workload import COLUMNS, PARTITIONS
from jobs.stack import jars
from jobs.stack.java import java
from persistence.cassandra import apply_schema
from persistence.kafka import KafkaSettings, Topics

VERSION: Final = "4.3.1"
STREAMS: Final = (f"org.apache.kafka:kafka-streams:{VERSION}", "org.slf4j:slf4j-simple:1.7.36@jar")
"""The library, and a log to standard error; without a binding its errors are lost."""
CASSANDRA_STORE: Final = (
    "dev.thriving.oss:kafka-streams-cassandra-state-store:0.8.6",
    "com.datastax.oss:java-driver-core:4.17.0",
)
COMPILER: Final = ("org.eclipse.jdt:ecj:3.39.0",)
"""A compiler in a jar: a Java runtime is enough."""
SOURCES: Final = Path(__file__).parents[1] / "kafka_streams"

_FOLD: Final = Struct(">qqi")
"""Count, sum and maximum at the beginning of a state: State.java."""

SETTINGS: Final = {
    "processing.guarantee": "exactly_once_v2",
    "commit.interval.ms": "1000",
    "statestore.cache.max.bytes": str(256 << 20),
    "num.stream.threads": "2",
    "replication.factor": "1",
    "auto.offset.reset": "earliest",
    # As headwater's own consumer settings: large fetches, many records a poll.
    "max.poll.records": "20000",
    "max.partition.fetch.bytes": str(8 << 20),
    "fetch.max.bytes": str(64 << 20),
    "receive.buffer.bytes": str(1 << 20),
    "producer.compression.type": "lz4",
    "producer.linger.ms": "5",
    "producer.batch.size": str(256 << 10),
}


class KafkaStreams(Peer):
    """One process of two threads, states in RocksDB with a changelog topic."""

    name = "kafka-streams"
    sink = ""

    def __init__(self, store: str = "rocksdb") -> None:
        self.store = store
        self._class_path: list[str] = []

    def prepare(self, work: Path) -> None:
        """Resolve the jars and compile the sources."""
        try:
            found = self._resolve()
            (compiler,) = jars.resolve("ecj", COMPILER)
        except jars.JarsUnavailable as error:
            raise PeerUnavailable(str(error)) from error
        classes = work / self.name
        class_path = [str(jar) for jar in found]
        command = [java(), "-jar", str(compiler), "-17", "-d", str(classes), "-cp", ":".join(class_path)]
        done = subprocess.run([*command, *self._sources()], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerUnavailable(f"its sources do not compile: {done.stderr.strip()[:2000]}")
        self._class_path = [str(classes), *class_path]

    def _resolve(self) -> list[Path]:
        return jars.resolve("kafka-streams", STREAMS)

    def _sources(self) -> list[str]:
        return [str(SOURCES / f"{name}.java") for name in ("Aggregate", "Envelope", "State")]

    def command(self, task: Task) -> list[str]:
        """Write the settings, and run the class `Aggregate` with them."""
        settings = SETTINGS | {
            "application.id": task.run,
            "bootstrap.servers": task.bootstrap,
            "state.dir": str(task.home / "state"),
            "bench.topic": task.topic,
            "bench.sink": self.sink and f"{task.run}-{self.sink}",
            "bench.store": "rocksdb",
        }
        file = task.home / "bench.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in (settings | self._more(task)).items()))
        log = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return [java(), HEAP, log, "-cp", ":".join(self._class_path), "Aggregate", str(file)]

    def _more(self, task: Task) -> dict[str, str]:
        return {}

    def topics(self, task: Task) -> dict[str, int]:
        return {f"{task.run}-{self.sink}": PARTITIONS} if self.sink else {}

    def finish(self, task: Task, child: "subprocess.Popen[bytes]") -> None:
        """Ask for the states; the process ends when they are written."""
        assert child.stdin is not None
        child.stdin.write(f"{task.output}\n".encode())
        child.stdin.flush()


class KafkaStreamsSink(KafkaStreams):
    """The same, and every changed state of a commit goes to an output topic, in the same transaction."""

    name = "kafka-streams-sink"
    sink = "sink"

    def result(self, task: Task) -> pl.DataFrame:
        """Read the last state of each key from the output topic, committed transactions only."""
        settings = KafkaSettings(task.bootstrap)
        topic = f"{task.run}-{self.sink}"
        ends = {part: mark.high for (_, part), mark in Topics(settings).marks([topic]).items() if mark.high}
        states: dict[bytes, bytes] = {}
        consumer = Consumer(
            settings.client(group_id=task.run, isolation_level="read_committed", enable_partition_eof=True)
        )
        consumer.assign([TopicPartition(topic, part, OFFSET_BEGINNING) for part in ends])
        while ends:
            records: list[Any] = consumer.consume(20_000, 1.0)
            for record in records:
                if (error := record.error()) is None:
                    states[record.key()] = record.value()
                elif error.code() == KafkaError._PARTITION_EOF:
                    ends.pop(record.partition(), None)
                else:
                    raise KafkaException(error)
        consumer.close()
        rows = [(key.decode(), *_FOLD.unpack_from(state)) for key, state in states.items()]
        return pl.DataFrame(rows, schema=COLUMNS, orient="row")


class KafkaStreamsCassandra(KafkaStreams):
    """States in Cassandra, written for each event: what is written there is not part of Kafka's transactions."""

    name = "kafka-streams-cassandra"
    guarantee = AT_LEAST_ONCE
    slow = True

    def __init__(self, store: str = "cassandra") -> None:
        super().__init__(store)

    def _resolve(self) -> list[Path]:
        return jars.resolve("kafka-streams-cassandra", (*STREAMS, *CASSANDRA_STORE))

    def _sources(self) -> list[str]:
        return [*super()._sources(), str(SOURCES / "OnCassandra.java")]

    def _more(self, task: Task) -> dict[str, str]:
        keyspace = task.run.replace("-", "_")
        apply_schema(f"{task.server}/{keyspace}?replication=1")  # also creates tables of headwater, which stay empty
        address = task.server.removeprefix("cassandra://")
        return {"bench.store": "OnCassandra", "bench.cassandra": address, "bench.keyspace": keyspace}
