"""Run one system once: progress by committed offsets, CPU of its processes, and its result beside the exact one."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import polars as pl
from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks import processes
from benchmarks.peers.base import Peer, Task
from benchmarks.workload import COLUMNS, PARTITIONS
from persistence.kafka import KafkaSettings, Topics

POLL_SECONDS: Final = 0.1
BROKER_SECONDS: Final = 60.0
"""What the broker may take for an answer while systems keep every core busy."""
STALL_SECONDS: Final = 600.0
"""A run without a commit for this long has failed."""
END_SECONDS: Final = 600.0
"""What a system may take to write its states out and to end."""


class RunFailed(RuntimeError):
    """A run ended early or stalled; the text quotes its log."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a run.

    Attributes:
        seconds: Since the process was started.
        events: Events committed by then.
        cpu: CPU seconds used by then, by part: those of the system, and `kafka` and the store's server. Empty if
            processes of the system had ended before they could be read.
    """

    seconds: float
    events: int
    cpu: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """A result beside the exact one.

    Attributes:
        keys: Keys whose row differs or is missing, and keys that should not be there.
        events: Sum over keys of the difference of counts.
        missing: Exact count of all keys minus the counted: above zero when events were lost.
    """

    keys: int = 0
    events: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured in one run.

    Attributes:
        first: The first commit.
        half: The first commit at or after half of the events.
        last: The commit of the last event.
        difference: The result beside the exact one.
        peak_mb: Peak resident memory by part, MB.
    """

    first: Mark
    half: Mark
    last: Mark
    difference: Difference
    peak_mb: Mapping[str, int] = field(default_factory=dict)

    @property
    def warm(self) -> float | None:
        """Events a second from `half` to `last`; None when one commit was both."""
        events = self.last.events - self.half.events
        return events / (self.last.seconds - self.half.seconds) if events else None

    @property
    def from_start(self) -> float:
        """Events a second from the start of the process to the last commit."""
        return self.last.events / self.last.seconds

    @property
    def warm_cpu(self) -> dict[str, float] | None:
        """CPU seconds for a million events from `half` to `last`, by part; None when it is not known."""
        events = self.last.events - self.half.events
        if not events or not self.half.cpu or not self.last.cpu:
            return None
        return {part: (used - self.half.cpu.get(part, 0.0)) / events * 1e6 for part, used in self.last.cpu.items()}


def compare(found: pl.DataFrame, expected: pl.DataFrame) -> Difference:
    """Compare a result with the exact one; both have the columns `COLUMNS` and a row per key."""
    both = expected.join(found, on="key", how="full", coalesce=True, suffix="_found")
    fields = [name for name in COLUMNS if name != "key"]
    apart = both.filter(pl.any_horizontal(pl.col(name).ne_missing(pl.col(f"{name}_found")) for name in fields))
    difference = apart["count"].fill_null(0) - apart["count_found"].fill_null(0)
    return Difference(apart.height, int(difference.abs().sum()), int(difference.sum()))


def measure(peer: Peer, task: Task, servers: Mapping[str, int], progress: Callable[[int], None]) -> Run:
    """Run a system until it has committed every event of its topic.

    Args:
        peer: The system, prepared.
        task: What it has to do.
        servers: Process ids of the broker and of the store's server, by name.
        progress: Told the number of committed events.

    Raises:
        RunFailed: The system ended early, or committed nothing for `STALL_SECONDS`.
    """
    settings = KafkaSettings(task.bootstrap)
    topics = Topics(settings, timeout=BROKER_SECONDS)
    for topic, partitions in peer.topics(task).items():
        topics.create(topic, partitions)
    command = peer.command(task)
    with task.log.open("wb") as out, Committed(settings, task.run, task.topic) as committed:
        began = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **peer.environment(task)},
            start_new_session=True,
        )
        try:
            marks, peak = _watch(child, committed, task.filled.workload.events, servers, began, progress, task.log)
            with contextlib.suppress(BrokenPipeError):
                peer.finish(task, child)
            _wait(child, task.log)
        finally:
            if child.poll() is None:
                processes.end(child.pid)
    difference = compare(peer.result(task), task.filled.expected)
    topics.delete([name for name in topics.names() if name.startswith(task.run)])
    return Run(*marks, difference, peak)


class Committed:
    """Events that a consumer group has committed, as another program sees them."""

    def __init__(self, settings: KafkaSettings, group: str, topic: str) -> None:
        Topics(settings, timeout=BROKER_SECONDS).group_offsets(
            group, [topic]
        )  # until the broker has a coordinator for the group
        self._consumer = Consumer(settings.client(group_id=group, enable_auto_commit=False))
        self._parts = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._last = 0

    def __call__(self) -> int:
        """Ask the broker, and return the last answer if it has none now. The consumer never joins the group."""
        with contextlib.suppress(KafkaException):
            self._last = sum(max(part.offset, 0) for part in self._consumer.committed(self._parts, timeout=10))
        return self._last

    def __enter__(self) -> "Committed":
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _watch(
    child: "subprocess.Popen[bytes]",
    committed: Callable[[], int],
    events: int,
    servers: Mapping[str, int],
    began: float,
    progress: Callable[[int], None],
    log: Path,
) -> tuple[tuple[Mark, Mark, Mark], dict[str, int]]:
    first = half = None
    before = processes.spent({name: [pid] for name, pid in servers.items()})
    seen, moved = 0, began
    known: set[str] = set()
    while True:
        ended = child.poll() is not None  # asked first: it may commit and end between the two questions
        now = committed()
        seconds = time.perf_counter() - began
        if now > seen:
            seen, moved = now, time.perf_counter()
            progress(now)
            if first is None or (half is None and now * 2 >= events) or now >= events:
                parts = processes.parts(child.pid)
                used = processes.spent(parts | {name: [pid] for name, pid in servers.items()})
                whole = child.poll() is None and known <= set(parts)
                known |= set(parts)
                mark = Mark(seconds, now, {part: used[part] - before.get(part, 0.0) for part in used} if whole else {})
                first = first or mark
                half = half or (mark if now * 2 >= events else None)
                if now >= events:
                    assert half is not None
                    return (first, half, mark), processes.memory(parts)
        if ended:
            raise RunFailed(f"ended after {now:,} of {events:,} events with code {child.returncode}: {_tail(log)}")
        if time.perf_counter() - moved > STALL_SECONDS:
            raise RunFailed(
                f"committed nothing for {STALL_SECONDS:.0f} s, at {now:,} of {events:,} events: {_tail(log)}"
            )
        time.sleep(POLL_SECONDS)


def _wait(child: "subprocess.Popen[bytes]", log: Path) -> None:
    try:
        code = child.wait(END_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"did not end within {END_SECONDS:.0f} s of its last commit: {_tail(log)}") from error
    if code:
        raise RunFailed(f"ended with code {code} after its last commit: {_tail(log)}")


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-5:])[-2000:] or "it wrote nothing"
