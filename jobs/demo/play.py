"""Runs the demo: produces, republishes with one crash, aggregates with two, and checks the results."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import polars as pl

from jobs import stack, views
from jobs.demo import audit, children, flights, nonsense
from jobs.demo.flow import DEAD, LEGS, RAW, VIA, flow
from jobs.demo.home import KINDS, bound
from jobs.screen import Bar, progress, steps
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Message, Topics
from persistence.registry import risks

PARTITIONS: Final = 4
_SLICE: Final = 20_000
_REPUBLISH_BATCHES: Final = 12
_JOB_BATCHES: Final = 8

REPUBLISHER_CRASH: Final = "republish:commit.before"
"""The outputs of a batch are acknowledged, its offsets are not committed: the whole batch is sent again."""
JOB_CRASHES: Final = ("persist:aircraft.before@3", "manifest.before@2")
"""First: the carriers' states are written, the aircraft's are not. Second: all states are written, the manifest is not."""


@dataclass(slots=True)
class Result:
    """Results of the demo.

    Attributes:
        flights: Flights produced.
        nonsense: Malformed records produced among flights and legs.
        messages: Records in the topic that the job read.
        resent: Number of copies in that topic.
        crashes: Fault points at which a process killed itself.
        records: Records in the batches that the job committed.
        verdicts: Count per stage and verdict, over all of those.
        dead_letters: Count per reason code in the dead-letter topic.
        keys: Number of states per stage.
        mismatches: One line for each key or dead letter that is wrong.
        carriers: States of the carriers.
        naive: Totals of a consumer that adds up every message.
        generation: Generation of the states.
        phases: Seconds per phase.
    """

    flights: int
    nonsense: int = 0
    messages: int = 0
    resent: int = 0
    crashes: list[str] = field(default_factory=list)
    records: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    dead_letters: Counter[str] = field(default_factory=Counter)
    keys: dict[str, int] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    carriers: dict[str, dict[str, Any]] = field(default_factory=dict)
    naive: dict[str, dict[str, Any]] = field(default_factory=dict)
    generation: int = 1
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether every aircraft, every carrier and every dead letter is correct."""
        return not self.mismatches

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())


def play(count: int, store: str, home: Path, *, generation: int = 1) -> Result:
    """Run the whole demo.

    Args:
        count: Flights, at most `flights.ALL`.
        store: URL of the store; or `redis`, `cassandra` or `mixed` (aircraft in Redis, carriers in Cassandra) to start
            servers for it.
        home: An empty directory for servers, logs and Spark's own files.
        generation: Generation of the states, new to the store.

    Raises:
        DemoError: A process failed, or was not killed at its fault point.
        StackError: The broker did not start.
        JarsUnavailable: Jars could not be downloaded.
    """
    result = Result(count, generation=generation)
    table = flights.load(count)
    kinds = KINDS.get(store, ())
    try:
        with _phase(result, "servers"), steps("servers") as step:
            servers = stack.up(home / "stack", redis="redis" in kinds, cassandra="cassandra" in kinds, progress=step)
        kafka = KafkaSettings(servers.kafka)
        stores = bound(store, servers)
        with _phase(result, "produce"):
            _produce(kafka, table, result)
        with _phase(result, "republish"):
            _republish(kafka, home, result)
        with _phase(result, "aggregate"):
            _aggregate(kafka, stores, home, result)
        with _phase(result, "check"):
            _check(kafka, stores, table, result)
    finally:
        stack.down(home / "stack")
    return result


def _produce(kafka: KafkaSettings, table: pl.DataFrame, result: Result) -> None:
    topics = Topics(kafka)
    for topic, partitions in ((RAW, PARTITIONS), (LEGS, PARTITIONS), (DEAD, 1)):
        topics.create(topic, partitions)
    records = flights.messages(table)
    bad = nonsense.in_raw()
    places = random.Random(2013)  # the same places in every run
    for one in bad:
        records.insert(places.randrange(len(records)), Message(value=one.value, key=one.key))
    result.nonsense += len(bad)
    with AcknowledgedProducer(kafka) as producer, progress("flights", len(records), "records") as bar:
        for start in range(0, len(records), _SLICE):
            producer.send_many(RAW, records[start : start + _SLICE])
            bar(start)
        producer.flush()
        bar(len(records))


def _republish(kafka: KafkaSettings, home: Path, result: Result) -> None:
    total = result.flights + result.nonsense
    arguments = [
        *("republish", "jobs.demo.flow:legs", "--from", RAW, "--input", "json", "--to", LEGS, "--via", VIA),
        *("--tombstones", "dead_letter"),
        *("--instance", "demo"),
        *("--dead-letters", DEAD, "--batch", str(max(total // _REPUBLISH_BATCHES, 1)), "--until-caught-up"),
        *("--bootstrap", kafka.bootstrap, "--json"),
    ]
    # A republisher reads at least a thousand records between two commits, so few flights make few batches.
    crash = f"{REPUBLISHER_CRASH}@{min(max(total // 5000, 1), 4)}"
    with progress("republisher", total, "records") as bar:
        reports = _Reports(bar, "consumed", cumulative=True)
        children.run("republisher, killed", arguments, home, fault=crash, on_line=reports)
        result.crashes.append(crash)
        reports.resolve()
        # Malformed records are written directly to the topic.
        bad = nonsense.in_legs()
        with AcknowledgedProducer(kafka) as producer:
            producer.send_many(LEGS, [Message(value=one.value, key=one.key) for one in bad])
            producer.flush()
        result.nonsense += len(bad)
        children.run("republisher", arguments, home, on_line=reports)


def _aggregate(kafka: KafkaSettings, stores: Mapping[str, str], home: Path, result: Result) -> None:
    marks = Topics(kafka).marks([LEGS])
    total = sum(ends.high for ends in marks.values())
    arguments = [
        *("run", "jobs.demo.flow:flow", "--generation", str(result.generation)),
        *(text for stage, url in stores.items() for text in ("--store", f"{stage}={url}")),
        *_accepted(stores),
        *("--dead-letters", DEAD, "--max-records", str(max(total // _JOB_BATCHES, 1)), "--until-caught-up"),
        # The three runs take seconds: the JVM's fast compiler (C1) alone halves their time.
        *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
        *("--bootstrap", kafka.bootstrap, "--json"),
    ]
    with progress("aggregation", total, "records") as bar:
        reports = _Reports(bar, "records", cumulative=False)
        for number, fault in enumerate((*JOB_CRASHES, ""), start=1):
            children.run(f"job {number}", arguments, home, fault=fault, on_line=reports)
            if fault:
                result.crashes.append(fault)
    for line in reports.lines:
        if "batch" in line:
            result.records += line["records"]
            for stage, counts in line["verdicts"].items():
                result.verdicts.setdefault(stage, Counter()).update(counts)


def _accepted(stores: Mapping[str, str]) -> tuple[str, ...]:
    """Accepted risks: a local Cassandra has one node, so there is no second copy."""
    alone = any("replication-1" in risks(url) for url in stores.values())
    return ("--accept", "replication-1") if alone else ()


def _check(kafka: KafkaSettings, stores: Mapping[str, str], table: pl.DataFrame, result: Result) -> None:
    states = {
        stage.name: {
            view.key.decode(): view.state
            for view in views.states(flow, stage.name, stores, generation=result.generation)
        }
        for stage in flow.stages
    }
    with progress("check", None, "records read again") as bar:
        raw = audit.scan(kafka, RAW, {one.value: one.reason for one in nonsense.in_raw()}, bar, legs=False)
        legs = audit.scan(kafka, LEGS, {one.value: one.reason for one in nonsense.in_legs()}, bar, legs=True)
    dead = audit.dead_letters(kafka, DEAD)
    result.messages, result.resent = legs.records, legs.resent
    result.dead_letters = Counter(reason for reason, _ in dead.values())
    result.keys = {stage: len(found) for stage, found in states.items()}
    result.carriers, result.naive = states["carrier"], audit.naive(legs.legs)
    result.mismatches = [
        *audit.differences(flights.expected(table, "tailnum"), states["aircraft"], "aircraft"),
        *audit.differences(flights.expected(table, "carrier"), states["carrier"], "carrier"),
        *audit.unaccounted({**raw.unusable, **legs.unusable}, dead),
    ]
    if result.records != result.messages:
        result.mismatches.append(f"{result.messages} messages, {result.records} in committed batches")


class _Reports:
    """Collects the reports of a process, and updates the progress bar."""

    def __init__(self, bar: Bar, counter: str, *, cumulative: bool) -> None:
        self.lines: list[dict[str, Any]] = []
        self._bar = bar
        self._counter = counter
        self._cumulative = cumulative
        self._before = self._now = 0

    def __call__(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if line.get("done") or self._counter not in line:
            return
        count = line[self._counter]
        self._now = count if self._cumulative else self._now + count
        self._bar(self._before + self._now)

    def resolve(self) -> None:
        """Prepare for the next process, which resumes where this one ended."""
        self._before += self._now
        self._now = 0


@contextmanager
def _phase(result: Result, name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    result.phases[name] = round(time.monotonic() - began, 3)
