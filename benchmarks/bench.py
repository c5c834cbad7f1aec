"""Fill the topics, let every system take its turn, round by round."""

import math
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import redis

from benchmarks.measure import BROKER_SECONDS, RunFailed, measure
from benchmarks.peers.base import Peer, PeerUnavailable, Task
from benchmarks.peers.kafka_streams import VERSION
from benchmarks.report import Subject
from benchmarks.workload import PARTITIONS, Filled, Workload, fill
from jobs import stack
from jobs.screen import progress, say
from persistence.errors import StoreError
from persistence.kafka import BrokerError, KafkaSettings, Topics

BATCHES: Final = 6
"""A topic is at least this many micro-batches, so that the second half of it is several."""
_SLACK: Final = 16
"""Records more than a share of the topic: Spark rounds down per partition, and a batch would be left with the rest."""
HEAP_MB: Final = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        peers: The systems.
        events: Records of each topic.
        slow_events: Records of the topics of slow systems.
        keys: Numbers of keys, a topic each.
        resent: Share of re-sent records.
        seed: Seed of the draw.
        rounds: Runs of each system.
        batch: Most records of a micro-batch.
    """

    peers: Sequence[Peer]
    events: int
    slow_events: int
    keys: Sequence[int]
    resent: float
    seed: int
    rounds: int
    batch: int


def bench(plan: Plan, logs: Path, subjects: list[Subject]) -> None:
    """Measure every system at every number of keys.

    Args:
        plan: What to measure.
        logs: Directory for the logs of runs that failed.
        subjects: Gets a subject for each system and number of keys; what an interrupted benchmark has measured is there.

    Raises:
        StackError: A server did not start.
    """
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as temporary:
        work = Path(temporary)
        reasons = {peer: _prepared(peer, work) for peer in plan.peers}
        stores = {peer.store for peer, reason in reasons.items() if not reason}
        with stack.ephemeral(redis="redis" in stores, cassandra="cassandra" in stores, heap_mb=HEAP_MB) as servers:
            for number, keys in enumerate(plan.keys):
                here = {peer: _subject(plan, peer, keys, reason) for peer, reason in reasons.items()}
                subjects += here.values()
                able = {peer: subject for peer, subject in here.items() if not subject.unavailable}
                _at(plan, f"t{number}", able, servers, work, logs)


def _subject(plan: Plan, peer: Peer, keys: int, unavailable: str) -> Subject:
    events = min(plan.slow_events, plan.events) if peer.slow else plan.events
    return Subject(peer.name, peer.store, peer.guarantee, keys, events, unavailable=unavailable)


def environment() -> dict[str, Any]:
    """Return what the figures depend on: the machine, how busy it is before, and versions."""
    cores = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(line.partition(":")[2].strip() for line in cores)),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "pyspark": version("pyspark"),
        "kafka_streams": VERSION,
    }


def _prepared(peer: Peer, work: Path) -> str:
    """Prepare a system; return why it cannot run, empty if it can."""
    try:
        peer.prepare(work)
    except PeerUnavailable as error:
        say(f"{peer.name} is left out: {error}")
        return str(error)
    return ""


def _at(
    plan: Plan, topic: str, subjects: Mapping[Peer, Subject], servers: stack.StackState, work: Path, logs: Path
) -> None:
    """Measure systems at one number of keys."""
    settings = KafkaSettings(servers.kafka)
    filled: dict[int, Filled] = {}
    for number, (events, keys) in enumerate(sorted({(one.events, one.keys) for one in subjects.values()})):
        filled[events] = _filled(settings, f"{topic}{number}", Workload(events, keys, plan.resent, plan.seed))
    for number in range(plan.rounds):
        for peer, subject in subjects.items():
            if subject.failed:
                continue
            title = f"round {number + 1} of {plan.rounds}: {peer.name} on {peer.store}, {subject.keys:,} keys"
            with _home(work) as home, progress(title, subject.events, "events") as bar:
                task = _task(peer, filled[subject.events], servers, home, plan.batch)
                try:
                    subject.runs.append(measure(peer, task, _pids(peer, servers), bar))
                except (RunFailed, BrokerError, StoreError) as error:
                    subject.failed = f"{error}{_kept(task, logs)}"
                    say(f"{peer.name} on {peer.store}: {subject.failed}")
    Topics(settings, timeout=BROKER_SECONDS).delete([one.topic for one in filled.values()])


def _kept(task: Task, logs: Path) -> str:
    """Keep the log of a run that failed, and say where."""
    if not task.log.exists():
        return ""
    kept = logs / f"{task.run}.log"
    shutil.copy(task.log, kept)
    return f" (log: {kept})"


def _filled(settings: KafkaSettings, topic: str, workload: Workload) -> Filled:
    Topics(settings, timeout=BROKER_SECONDS).create(topic, PARTITIONS)
    title = (
        f"{workload.events:,} envelopes of {workload.keys:,} keys, {workload.resent:.0%} re-sent, seed {workload.seed}"
    )
    with progress(title, workload.events, "events") as bar:
        filled = fill(settings, topic, workload, bar)
    say(f"{filled.unique:,} unique events, {filled.bytes_per_event:.0f} bytes each")
    return filled


def _task(peer: Peer, filled: Filled, servers: stack.StackState, home: Path, batch: int) -> Task:
    server = servers.find(peer.store)
    address = server.address if server else ""
    if peer.store == "redis":  # the states of the run before are in nobody's way
        with redis.Redis.from_url(address) as client:
            client.flushall()
    run = f"{peer.name}-{peer.store}-{uuid.uuid4().hex[:6]}"
    return Task(run, filled, servers.kafka, address, home, batch_size(filled.workload.events, batch))


def batch_size(events: int, most: int) -> int:
    """Return the records of a micro-batch: equal parts of the topic, at least `BATCHES` of them, of at most about `most`."""
    return math.ceil(events / max(BATCHES, math.ceil(events / most))) + _SLACK


def _pids(peer: Peer, servers: stack.StackState) -> dict[str, int]:
    return {server.name: server.pid for server in servers.servers if server.name in ("kafka", peer.store)}


@contextmanager
def _home(work: Path) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(dir=work))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)
