"""A topic that grows while a flow lags: a republisher that places records by key, its records, and their readers."""

import json
from dataclasses import dataclass, field
from typing import Any

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, encode

MAX_AGE = 300.0


def flow(history: int = 4, stages: int = 1) -> Flow:
    """Counts per key; with a second stage, per key again."""
    found = Flow("growing").source(Topic("legs", Json({"k": str})))
    for number in range(stages):
        found = found.aggregate(f"s{number}", "k", Fields(n=count()), history=history)
    return found


@dataclass
class Legs:
    """The topic in the broker.

    Attributes:
        partitions: Records by partition.
        placing: Number of partitions that the producer has seen.
        written: Roots written so far, each with its key.
        now: The time in seconds.
    """

    partitions: list[list[Record]]
    placing: int = 0
    written: list[int] = field(default_factory=list)
    now: float = 1_000_000.0
    read: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, partitions: int) -> "Legs":
        return cls([[] for _ in range(partitions)], partitions)

    def grow(self, partitions: int, *, known: bool = True) -> None:
        """Add partitions; a producer that has not seen them continues as before."""
        self.partitions += [[] for _ in range(partitions - len(self.partitions))]
        if known:
            self.placing = partitions

    def write(self, *keys: int) -> None:
        """Let the republisher write one event of each key."""
        for key in keys:
            self.written.append(key)
            self._send(len(self.written) - 1)

    def send_again(self, root: int) -> None:
        """Let the republisher begin again at this root, as after a crash."""
        for one in range(root, len(self.written)):
            self._send(one)

    def _send(self, root: int) -> None:
        key = self.written[root]
        partition = key % self.placing
        log = self.partitions[partition]
        body = json.dumps({"k": f"k{key}"}).encode()
        chain = (Hop("raw", 0, root, via="rep", index=0, topic_id="R"),)
        name = f"k{key}".encode()
        log.append(Record("legs", partition, len(log), name, encode(Envelope(body, chain, key=name)), topic_id="T"))

    def ends(self) -> dict[int, int]:
        """Next offset by partition."""
        return {number: len(log) for number, log in enumerate(self.partitions)}

    def start(self, of: Flow, stores: dict[str, str], **options: Any) -> MemoryRunner:
        """Start a run that resumes at the manifest."""
        runner = MemoryRunner(of, stores, whole=self.ends, clock=lambda: self.now, metadata_max_age=MAX_AGE, **options)
        self.read = runner.run.positions("legs")
        return runner

    def fold(self, runner: MemoryRunner, **most: int) -> None:
        """Fold one batch: at most this many records of a partition, as `p0=3`, and all records of the others."""
        records = []
        for number, log in enumerate(self.partitions):
            begin = self.read.get(number, 0)
            found = log[begin : begin + most.get(f"p{number}", len(log))]
            self.read[number] = begin + len(found)
            records += found
        runner.process(records)

    def expected(self) -> dict[bytes, dict[str, int]]:
        """The expected states: every event once."""
        return {f"k{key}".encode(): {"n": self.written.count(key)} for key in set(self.written)}
