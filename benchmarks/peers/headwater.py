"""headwater by its own command line, as a user runs it."""

import subprocess
from contextlib import closing
from typing import Any

import polars as pl

from aggregations.run.states import state_of
from benchmarks.peers.base import HEAP, Peer, Task, module
from benchmarks.workload import COLUMNS
from persistence.cassandra import apply_schema
from persistence.protocol import FlowRef
from persistence.registry import open_store


class Headwater(Peer):
    """`headwater run` on one store."""

    name = "headwater"

    def __init__(self, store: str) -> None:
        self.store = store
        self.slow = store == "cassandra"

    def command(self, task: Task) -> list[str]:
        """The command line. It runs until it was measured, since a process that has ended shows no CPU time."""
        options = {
            "--store": self.url(task),
            "--bootstrap": task.bootstrap,
            "--group": task.run,
            "--dead-letters": f"{task.run}-dlq",
            "--max-records": str(task.batch),
            "--conf": f"spark.driver.memory={HEAP.removeprefix('-Xmx')}",
        }
        if self.store == "cassandra":
            apply_schema(self.url(task))
            options["--accept"] = "replication-1"  # one node
        given = [word for pair in options.items() for word in pair]
        return module("jobs.cli", "run", "benchmarks.peers.flow:flow", *given)

    def environment(self, task: Task) -> dict[str, str]:
        return {"BENCH_TOPIC": task.topic, "BENCH_RUN": task.run}

    def topics(self, task: Task) -> dict[str, int]:
        return {f"{task.run}-dlq": 1}

    def finish(self, task: Task, child: "subprocess.Popen[bytes]") -> None:
        child.terminate()

    def result(self, task: Task) -> pl.DataFrame:
        """Read every state through the store's own interface."""
        stage = FlowRef(task.run).stage("keys")
        rows: dict[str, list[Any]] = {column: [] for column in COLUMNS}
        with closing(open_store(self.url(task))) as store:
            for key, stored in store.scan(stage):
                fold = state_of(stored, stage, key).fold
                rows["key"].append(key.decode())
                for field in ("count", "sum", "max"):
                    rows[field].append(fold[field])
        return pl.DataFrame(rows, schema=COLUMNS)

    def url(self, task: Task) -> str:
        """Return the URL of the store of a run."""
        if self.store == "cassandra":
            return f"{task.server}/{task.run.replace('-', '_')}?replication=1"
        return task.server or f"{self.store}://{task.home}/states.db"
