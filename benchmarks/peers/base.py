"""What the benchmark asks of a system."""

import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import polars as pl

from benchmarks.workload import COLUMNS, Filled

EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"
HEAP: Final = "-Xmx2g"
"""Heap of each Java process of a system; Spark's `spark.driver.memory` is the same."""


class PeerUnavailable(RuntimeError):
    """A system cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a system: drain a topic.

    Attributes:
        run: Name of this run alone: consumer group, application id, prefix of its own topics.
        filled: The topic and its exact result.
        bootstrap: Address of the broker.
        server: Address of the store's server; empty for an embedded store.
        home: Empty directory for state and logs.
        batch: Records of a micro-batch.
    """

    run: str
    filled: Filled
    bootstrap: str
    server: str
    home: Path
    batch: int

    @property
    def topic(self) -> str:
        """The topic to drain."""
        return self.filled.topic

    @property
    def log(self) -> Path:
        """What the system writes to its terminal."""
        return self.home / "log"

    @property
    def output(self) -> Path:
        """Where a system that writes its result itself writes it: lines `key TAB count TAB sum TAB max`."""
        return self.home / "result.tsv"


class Peer(ABC):
    """A system on one store.

    It consumes from the earliest offset and commits its progress as offsets of the consumer group `Task.run`.

    Attributes:
        name: What it is called in options and results.
        store: Where its states are: `lmdb`, `sqlite`, `rocksdb`, `memory` (embedded), `redis` or `cassandra` (a
            server).
        guarantee: What it claims when processes fail: `EXACTLY_ONCE` or `AT_LEAST_ONCE`.
        slow: Whether it gets the small number of events.
    """

    name: ClassVar[str]
    store: str
    guarantee: ClassVar[str] = EXACTLY_ONCE
    slow: bool = False

    def prepare(self, work: Path) -> None:  # noqa: B027 - most need nothing
        """Fetch and compile what it needs, before anything is timed.

        Args:
            work: Directory for files that all its runs use.

        Raises:
            PeerUnavailable: It cannot run here.
        """

    @abstractmethod
    def command(self, task: Task) -> list[str]:
        """Return the command that drains the topic; its standard input stays open."""

    def environment(self, task: Task) -> dict[str, str]:
        """Return variables for the command."""
        return {}

    def topics(self, task: Task) -> dict[str, int]:
        """Return the topics to create for a run, with their partitions; their names begin with `Task.run`."""
        return {}

    def finish(self, task: Task, child: "subprocess.Popen[bytes]") -> None:
        """Tell a process that waits for it to end, now that all is committed and measured."""
        assert child.stdin is not None
        child.stdin.close()

    def result(self, task: Task) -> pl.DataFrame:
        """Return the states after the process has ended: columns of `COLUMNS`."""
        return pl.read_csv(task.output, separator="\t", has_header=False, schema=COLUMNS)


def module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a Python module."""
    return [sys.executable, "-m", name, *arguments]
