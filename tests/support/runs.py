"""Runs of a flow as separate processes, for tests that kill or freeze them."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.spark.jvm import EXECUTABLES, MASTER, environment_of, python_ahead
from envelope import decode
from jobs.views import View
from persistence.commit.faults import DEAD_LETTER, SPEC, Fault, FaultOutcome
from persistence.commit.steps import CommitStep
from persistence.murmur2 import parts_of
from tests.messages import Leg
from tests.support import flows
from tests.support.spark import FAST, python_path
from tests.support.world import Sent, World, republished

ROOT = Path(__file__).parents[2]

Made = tuple[str, *tuple[Any, ...]]
"""Name of the function in `flows` that makes a flow, and its arguments, to pass to another process."""


ONE_NODE = ["replication-1"]
"""Risks of a Cassandra with one node."""
EVERY = [pytest.param(15, id="some steps"), pytest.param(1, id="every step", marks=pytest.mark.kills)]
"""Of `kill_everywhere`: a run on Spark or Cassandra takes seconds, and there are two dozen steps."""
BUCKETS = 2
"""Buckets of the stores, so that each has several keys of every batch. Redis and Cassandra divide keys alike."""


def flow_of(made: Made) -> Flow[Any]:
    """The flow made by this function."""
    name, *arguments = made
    flow: Flow[Any] = getattr(flows, name)(*arguments)
    return flow


@dataclass(frozen=True, slots=True)
class Jvm:
    """A Spark JVM for successive runs: its start is most of the cost of a run on a few records.

    A driver that is killed leaves running tasks and a query in it, as it would on the machines of a cluster. The next
    driver ends them and starts Spark again.
    """

    environment: Mapping[str, str]
    log: Path

    @property
    def errors(self) -> str:
        """What it and the workers in it wrote to their standard error."""
        return self.log.read_text()


@contextmanager
def started_jvm(log: Path) -> Iterator[Jvm]:
    """Start a JVM of Spark, and what its Python processes are forked from; end them with the block."""
    conf = SparkConf(loadDefaults=False).setAll([*FAST.items()])
    inherited = {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": python_path(ROOT)}
    with log.open("wb") as output, patch.dict(os.environ, inherited):
        ahead = python_ahead({MASTER: "local[2]"}, environment_of(os.environ, "local[2]"))
        assert ahead is not None
        python = dict.fromkeys(EXECUTABLES, ahead.executable)
        with patch.dict(os.environ, python):
            gateway = launch_gateway(conf, {"stdout": output, "stderr": output})
    try:
        parameters = gateway.java_parameters
        port, token = str(parameters.port), parameters.auth_token
        yield Jvm({"PYSPARK_GATEWAY_PORT": port, "PYSPARK_GATEWAY_SECRET": token, **python}, log)
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        ahead.end()


class Run:
    """A run in its own session, so that all its children can be ended with it.

    Args:
        world: Its topics and stores.
        made: How its flow is made.
        fault: The fault that kills it, as in `HEADWATER_FAULT`.
        jvm: The JVM to run in; it starts its own without one.
        local: Run it without Spark.
        options: More arguments of `run_flow`, or of `run_local`.
    """

    def __init__(
        self,
        world: World,
        made: Made,
        fault: str = "",
        *,
        jvm: Jvm | None = None,
        local: bool = False,
        **options: Any,
    ) -> None:
        flow, *arguments = made
        given = {
            "flow": flow,
            "arguments": arguments,
            "kafka": world.settings.bootstrap,
            "stores": world.stores(flow_of(made)),
            "dead_letters": world.dead,
            **options,
        }
        self._errors = world.directory / f"stderr-{len(list(world.directory.glob('stderr-*')))}"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"tests.support.{'run_local' if local else 'run_flow'}", json.dumps(given)],
                cwd=ROOT,
                env={**os.environ, **(jvm.environment if jvm else {}), SPEC: fault},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Wait until it ends, not for its JVM and workers, and return the exit code."""
        return self._process.wait(timeout=300)

    def await_batch(self) -> None:
        """Return when it has committed a batch."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"batch\n", self.errors

    def await_freeze(self) -> None:
        """Return when it has stopped after a batch; it was started with `freeze=True`."""
        self.await_batch()
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all its remaining children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End it and all its children."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def errors(self) -> str:
        """What it wrote to its standard error."""
        return self._errors.read_text()


def commit_faults(flow: Flow[Any], stores: Iterable[str]) -> list[Fault]:
    """A kill at every step of a commit and at every stage, in the order of the steps.

    Steps with an effect outside the process are killed before and after it. Reading, folding and returning have none,
    so one kill each is enough.

    Args:
        flow: The flow.
        stores: Its stores by the name of the first stage in each, upstream first.
    """
    names = [stage.name for stage in flow.stages]
    inside = [*(CommitStep.LOAD.of(name) for name in names), CommitStep.FOLD]
    return [
        *(Fault(point, FaultOutcome.BEFORE) for point in inside),
        *(
            Fault(point, end)
            for point in (CommitStep.PUBLISH, DEAD_LETTER)
            for end in (FaultOutcome.BEFORE, FaultOutcome.AFTER)
        ),
        *store_faults(flow, stores),
        Fault(CommitStep.RETURN, FaultOutcome.BEFORE),
        *(Fault(CommitStep.OFFSETS, end) for end in (FaultOutcome.BEFORE, FaultOutcome.AFTER)),
    ]


def store_faults(flow: Flow[Any], stores: Iterable[str]) -> list[Fault]:
    """A kill before and after everything that a commit writes to stores, in the order of the steps."""
    written = [
        *(CommitStep.PERSIST.of(stage.name) for stage in reversed(flow.stages)),
        *(CommitStep.MANIFEST.of(name) for name in reversed([*stores])),
    ]
    return [Fault(point, end) for point in written for end in (FaultOutcome.BEFORE, FaultOutcome.AFTER)]


def some_legs(count: int) -> list[Any]:
    """Legs of which any two dozen have several tails, carriers, remainders and pairs in every bucket."""
    carriers, rng = ["AA", "DL", "UA", "B6"], random.Random(13)
    return [
        Leg(tail=f"N{i % 8}", carrier=carriers[(i + i // 8) % 4], minutes=rng.randrange(1, 20)) for i in range(count)
    ]


def kill_everywhere(
    world: World,
    made: Made,
    legs: Sequence[Any],
    dead: Sequence[Sent],
    jvm: Jvm | None,
    faults_of: Callable[[Flow[Any], Iterable[str]], list[Fault]] = commit_faults,
    *,
    local: Callable[[int], bool] = lambda _: False,
    every: int = 1,
    **options: Any,
) -> None:
    """Kill successive runs, each at the next of some steps of its commit, then let one complete.

    Every run has more to read: as many new legs as the others, the last ones of the previous run again, and malformed
    records. Each reads everything in one batch.

    Args:
        world: Topics and stores.
        made: How the flow is made.
        legs: All legs to fold.
        dead: Records that become dead letters.
        jvm: The JVM of Spark; None if no run is on Spark.
        faults_of: The steps, for a flow and its stores.
        local: Whether the run of this number is one without Spark.
        every: Leave out steps between these.
        options: More arguments of `run_flow` and `run_local`.
    """
    flow = flow_of(made)
    faults = faults_of(flow, _stores(world, flow))[::every]
    size, before = len(legs) // len(faults), len(jvm.errors) if jvm else 0
    started: list[Run] = []
    try:
        for n, fault in enumerate(faults):
            # The republisher was also killed: it sends its last outputs again.
            end = len(legs) if n + 1 == len(faults) else size * (n + 1)
            world.send(republished(legs, range(max(0, size * n - 8), end)))
            world.send(dead)
            check_is_a_real_batch(world, flow)
            started.append(Run(world, made, str(fault), jvm=jvm, local=local(n), **options))
            assert started[-1].wait() == -signal.SIGKILL, f"{fault} was not met: {started[-1].errors}"
            check_invariants(world, flow)
        started.append(Run(world, made, jvm=jvm, local=local(len(faults)), **options))
        assert started[-1].wait() == 0, started[-1].errors
    finally:
        for run in started:
            run.end()
    said = (jvm.errors[before:] if jvm else "") + "".join(run.errors for run in started)
    assert [fault for fault in faults if f"injected fault {fault} at {fault.point}" not in said] == []
    world.check(flow)


def _stores(world: World, flow: Flow[Any]) -> list[str]:
    """The stores of a flow, by the name of the first stage in each, upstream first."""
    first: dict[str, str] = {}
    for stage, url in world.stores(flow).items():
        first.setdefault(url, stage)
    return list(first.values())


def check_is_a_real_batch(world: World, flow: Flow[Any]) -> None:
    """The next run's batch has several partitions, and several keys in every bucket of the store of every stage."""
    ends = [world.ends(flow, stage.name) for stage in flow.stages]
    batch = [one for one in world.records() if one.offset >= min(end.get(one.partition, 0) for end in ends)]
    assert len({record.partition for record in batch}) > 1
    oracle = world.oracle(flow, batch)
    for stage in flow.stages:
        keys = Counter(parts_of(list(oracle.states(stage.name)), BUCKETS))
        assert len(keys) == BUCKETS, (stage.name, keys)
        assert min(keys.values()) > 1, (stage.name, keys)


def roots(views: Mapping[bytes, View]) -> set[tuple[str, int, int]]:
    """Topic, partition and offset of every root that the states of a stage hold."""
    return {
        (topic, int(partition), int(position[0]))
        for view in views.values()
        for lane, history in view.histories.lanes.items()
        for topic, _, partition in [lane.partition("#")[0].rpartition(":")]
        for position in history.held
    }


def roots_in(record: Record, flow: Flow[Any]) -> set[tuple[str, int, int]]:
    """The root of a record: one without a chain is none in a topic of envelopes, and its own root in another one."""
    if not flow.topics[record.topic].envelope:
        return {(record.topic, record.partition, record.offset)}
    return {(hop.topic, hop.partition, hop.offset) for hop in decode(record.value).chain}


def check_invariants(world: World, flow: Flow[Any]) -> None:
    """Check that the stages hold everything below their store's manifest, and everything that upstream stages hold.

    Records without a key are those that the flow rejects.
    """
    records = {topic: world.records(topic) for topic in flow.topics}
    upstream: set[tuple[str, int, int]] = set()
    # In this order: a task that outlives its driver may still write, a stage only after the stage downstream of it.
    for stage in flow.stages:
        counted: set[tuple[str, int, int]] = set()
        for topic, found in records.items():
            ends = world.ends(flow, stage.name, topic)
            below = [one for one in found if one.key and one.offset < ends.get(one.partition, 0)]
            counted = counted.union(*(roots_in(one, flow) for one in below))
        held = roots(world.views(flow, stage.name))
        assert upstream <= held
        assert counted <= held
        upstream = held
