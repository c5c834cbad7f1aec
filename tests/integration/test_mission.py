"""The whole chain on a real broker: two republishers and two flows, each a process that is killed three times."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from aggregations.run.snapshots import Latest, read_snapshot
from envelope import decode
from jobs.demo import audit
from jobs.views import states
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, known_points
from persistence.commit.steps import CommitStep
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Message, Topics
from tests.support import mission
from tests.support.spark import FAST

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.kills]

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("MISSION_SEED", "229"))
ORDERS = 2000
KILLS = 3
_SENT_AGAIN = (f"{faults.REPUBLISH_FLUSH}.after", f"{faults.REPUBLISH_COMMIT}.before")
# Every batch of these flows comes by: to fetch is Spark's own, SQLite has no fences, every record can be used.
_MET_BY_A_RUN = {
    faults.EPOCH,
    "write",
    *(step.value for step in CommitStep if step is not CommitStep.FETCH),
}
_MET_BY_A_REPUBLISHER = {faults.REPUBLISH_PRODUCE, faults.REPUBLISH_FLUSH, faults.REPUBLISH_COMMIT}
SECONDS = 300
"""Longest that one process may take: without it a fault that is never met would hang the test."""


@dataclass(frozen=True)
class Kill:
    """One end of a process: at a fault point, or from outside, some time after its n-th commit."""

    fault: str = ""
    commits: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.fault or f"SIGKILL {self.seconds:.2f} s after commit {self.commits}"


@dataclass(frozen=True)
class Service:
    """A process of the chain: its name, its command, its flow unless it is a republisher, and its ends."""

    name: str
    command: Sequence[str]
    flow: Flow[Any] | None
    kills: Sequence[Kill]


def points(flow: Flow[Any] | None) -> Iterator[str]:
    """Every point that a republisher, or a run of this flow, comes by when all records can be used."""
    for point in map(str, known_points()):
        kind, _, name = point.partition(":")
        if flow is None:
            if point in _MET_BY_A_REPUBLISHER:
                yield point
        elif kind in _MET_BY_A_RUN:
            yield from (f"{kind}:{stage.name}" for stage in flow.stages) if name == "STAGE" else [kind]


def kills(rng: random.Random, flow: Flow[Any] | None) -> list[Kill]:
    """Fault points, then one kill from outside: until that it may read everything, and then meet no fault any more.

    The first of a republisher is one behind which it must send again: acknowledged and not committed.
    """
    chosen = [] if flow is not None else [Kill(f"{rng.choice(_SENT_AGAIN)}@{rng.choice([1, 2])}")]
    for point in rng.sample(list(points(flow)), KILLS - 1 - len(chosen)):
        nth = 1 if point == faults.EPOCH else rng.choice([1, 2])
        chosen.append(Kill(str(Fault(point, rng.choice([FaultOutcome.BEFORE, FaultOutcome.AFTER]), nth))))
    return [*chosen, Kill(commits=rng.choice([1, 2, 3]), seconds=rng.random() / 2)]


def orders(rng: random.Random) -> list[dict[str, Any]]:
    """Orders of a few customers at a few tills: none to three items each."""
    return [
        {
            "till": f"till {rng.randrange(5)}",
            "customer": f"customer {rng.randrange(12)}",
            "items": [[f"article {rng.randrange(9)}", rng.randrange(1, 100)] for _ in range(rng.randrange(4))],
        }
        for _ in range(ORDERS)
    ]


class Chain:
    """Runs services side by side, kills them, and starts them again until all have caught up, upstream first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[subprocess.Popen[str]] = []
        self._failed = threading.Event()

    def run(self, services: Sequence[Service]) -> None:
        """Return when every service has been killed as planned and has then caught up with the one before it."""
        done: Future[None] | None = None
        lives = []
        try:
            with ThreadPoolExecutor(len(services)) as threads:
                for service in services:
                    done = threads.submit(self._live, service, done)
                    lives.append(done)
            for one in lives:
                one.result()
        finally:
            self._end()

    def _live(self, service: Service, upstream: Future[None] | None) -> None:
        try:
            for number, kill in enumerate(service.kills, start=1):
                self._die(service, number, kill)
            if upstream is not None:
                upstream.result()
            process, log = self._start(service, 0, "--until-caught-up")
            process.communicate(timeout=SECONDS)
            assert process.returncode == 0, f"{service.name}: {log.read_text()}"
        except BaseException:
            self._failed.set()
            self._end()
            raise

    def _die(self, service: Service, number: int, kill: Kill) -> None:
        """One life of a service that ends as planned, and not otherwise."""
        few = () if service.flow is None else ("--max-records", "150")
        process, log = self._start(service, number, *few, fault=kill.fault)
        if kill.fault:
            process.communicate(timeout=SECONDS)
        else:
            late = threading.Timer(SECONDS, process.kill)
            late.start()
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(kill.commits + (service.flow is not None))]  # the plan
            late.cancel()
            assert all(said), f"{service.name}, {kill}: {log.read_text()}"
            time.sleep(kill.seconds)  # a moment that nothing in the process has chosen
            assert process.poll() is None, f"{service.name}, {kill}: {log.read_text()}"
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        assert process.returncode == -signal.SIGKILL, f"{service.name}, {kill}: {log.read_text()}"
        assert not self._failed.is_set(), f"{service.name}: another service failed"

    def _start(
        self, service: Service, number: int, *more: str, fault: str = ""
    ) -> tuple["subprocess.Popen[str]", Path]:
        log = self._directory / f"{service.name}-{number}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobs.cli", *service.command, *more],
                cwd=ROOT,
                env={**os.environ, faults.SPEC: fault, "PYTHONPATH": str(ROOT), "TMPDIR": str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        self._started.append(process)
        return process, log

    def _end(self) -> None:
        """End every process, and what it had started in its session."""
        for process in list(self._started):
            if process.poll() is None:
                process.kill()


def republisher(rng: random.Random, kafka: str, name: str, source: str, target: str, kind: str) -> Service:
    command = (
        *("republish", f"tests.support.mission:{name}", "--from", source, "--to", target, "--input", kind),
        *("--via", name, "--instance", name, "--batch", "100", "--bootstrap", kafka, "--json"),
    )
    return Service(name, command, None, kills(rng, None))


def aggregator(rng: random.Random, kafka: str, flow: Flow[Any], stores: Mapping[str, str]) -> Service:
    command = (
        *("run", f"tests.support.mission:{flow.name}", "--bootstrap", kafka, "--json"),
        *(text for stage, url in stores.items() for text in ("--store", f"{stage}={url}")),
        *("--trigger", "200ms"),
        *(text for name, value in FAST.items() for text in ("--conf", f"{name}={value}")),
    )
    return Service(flow.name, command, flow, kills(rng, flow))


def copies(settings: KafkaSettings, topic: str) -> int:
    """Messages of a topic that are copies of an earlier one: same root, same position among its outputs."""
    places = []
    for _, _, record in audit.read(settings, topic):
        chain = decode(record.value()).chain
        places.append((chain[0].partition, chain[0].offset, tuple(hop.index for hop in chain)))
    return len(places) - len(set(places))


def test_a_chain_of_which_every_process_is_killed_three_times_is_exact_at_its_end(kafka: str, tmp_path: Path) -> None:
    rng, settings = random.Random(SEED), KafkaSettings(kafka)
    for name, partitions in mission.PARTITIONS.items():
        Topics(settings, timeout=30).create(name, partitions)
    stores = {
        flow.name: bind(flow, {stage.name: f"sqlite:///{tmp_path}/{stage.name}.db" for stage in flow.stages})
        for flow in (mission.sales, mission.demand)
    }
    services = [
        republisher(rng, kafka, "by_customer", mission.ORDERS, mission.CUSTOMERS, "json"),
        republisher(rng, kafka, "by_item", mission.CUSTOMERS, mission.ITEMS, "envelope"),
        aggregator(rng, kafka, mission.sales, stores["sales"]),
        aggregator(rng, kafka, mission.demand, stores["demand"]),
    ]
    print(f"seed {SEED}")
    for service in services:
        print(f"{service.name}: {', '.join(map(str, service.kills))}")
    sold = orders(rng)
    with AcknowledgedProducer(settings) as producer:
        producer.send_many(
            mission.ORDERS, [Message(key=one["till"].encode(), value=json.dumps(one).encode()) for one in sold]
        )
        producer.flush()
    Chain(tmp_path).run(services)

    def found(flow: Flow[Any], stage: str) -> dict[bytes, Any]:
        return {view.key: view.state for view in states(flow, stage, stores[flow.name])}

    by_article = mission.totals(sold, "article")
    assert found(mission.sales, "customer") == mission.totals(sold, "customer")
    assert found(mission.sales, "article") == by_article
    assert found(mission.demand, "demand") == by_article
    latest = Latest()
    for _, _, record in audit.read(settings, mission.ARTICLES):
        latest.apply(record.key() or b"", read_snapshot(record.value()))
    assert {key: snapshot.state for key, snapshot in latest} == by_article
    again = {topic: copies(settings, topic) for topic in (mission.CUSTOMERS, mission.ITEMS, mission.SOLD)}
    print(f"copies: {again}")
    # States are exact although every copy was read: they were dropped.
    assert again[mission.CUSTOMERS] > 0
    assert again[mission.ITEMS] > 0
