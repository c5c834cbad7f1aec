"""Real runs as processes: killed at every step of the commit, or frozen while another run takes over."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path as File
from typing import Any

import pytest

from aggregations.flow import Flow
from aggregations.memory import MemoryRunner
from envelope import decode
from jobs.views import View
from persistence.faults import DEAD_LETTER, SPEC, TERM, Fault, Outcome
from persistence.steps import Step
from tests.messages import Leg
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

ROOT = File(__file__).parents[2]
OUTCOMES = (Outcome.BEFORE, Outcome.AFTER)
POINTS = (
    TERM,
    Step.LOAD.of("aircraft"),
    Step.FOLD,
    Step.PUBLISH,
    DEAD_LETTER,
    Step.PERSIST.of("carrier"),
    Step.PERSIST.of("aircraft"),
    Step.MANIFEST.of("carrier"),
    Step.MANIFEST.of("aircraft"),
    Step.RETURN,
    Step.OFFSETS,
)
"""Every effect of a run in the order of a commit, but the first step: that is Spark's own."""
# What the driver itself does is broken in its second batch, what its tasks do wherever it comes first.
SECOND = (Step.MANIFEST, Step.RETURN, Step.OFFSETS)


def faults(path: Path) -> list[Fault]:
    """Half of all points and outcomes for each path: what one meets before the effect, the other meets after it."""
    shift = PATHS.index(path)
    return [
        Fault(point, OUTCOMES[(i + shift) % 2], 2 if point.partition(":")[0] in SECOND else 1)
        for i, point in enumerate(POINTS)
    ]


class Process:
    """A run in a session of its own, so that all it started can be ended with it."""

    def __init__(self, world: World, flow: Flow[Any], path: Path, fault: str = "", **options: Any) -> None:
        arguments = {
            "kafka": world.settings.bootstrap,
            "topic": world.topic,
            "path": path,
            "stores": world.stores(flow),
            "dead_letters": world.dead,
            **options,
        }
        self._errors = world.directory / f"stderr-{len(list(world.directory.glob('stderr-*')))}"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.run_fleet", json.dumps(arguments)],
                cwd=ROOT,
                env={**os.environ, SPEC: fault},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Wait for its end, not for that of the JVM and the workers that it leaves behind, and return the exit code."""
        return self._process.wait(timeout=300)

    def await_batch(self) -> None:
        """Return when it has committed a batch."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"batch\n", self.errors

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it started and that is still there."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End it, and all that it started."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def errors(self) -> str:
        """What it wrote to its standard error."""
        return self._errors.read_text()


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store for each stage."""
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, apart=True)) as world:
        yield world


def roots(views: Mapping[bytes, View]) -> set[tuple[int, int]]:
    """Partition and offset of every root that the states of a stage hold; the topic of all of them is `raw`."""
    return {
        (int(lane.removeprefix("raw:").partition("#")[0]), int(position[0]))
        for view in views.values()
        for lane, window in view.windows.lanes.items()
        for position in window.held
    }


def check_invariants(world: World, flow: Flow[Any]) -> None:
    """What the manifest counts as folded the first stage holds, and what it holds the second one holds."""
    ends = world.ends(flow, "aircraft")
    counted = {
        (hop.partition, hop.offset)
        for record in world.records()
        if record.key and record.offset < ends.get(record.partition, 0)
        for hop in decode(record.value).chain
    }
    # In this order: a task that outlived its driver may still write, a stage only after the one behind it.
    upstream = roots(world.views(flow, "aircraft"))
    assert counted <= upstream <= roots(world.views(flow, "carrier"))


@pytest.mark.parametrize("path", PATHS)
def test_a_run_that_is_killed_at_every_step_of_its_commits_is_exact_in_the_end(world: World, path: Path) -> None:
    flow, planned = fleet(world.topic, path), faults(path)
    sent = [leg for leg in legs(600) if leg.minutes][: 24 * len(planned)]
    started: list[Process] = []
    try:
        for n, fault in enumerate(planned):
            # The republisher was killed as well: its last outputs come again.
            world.send(republished(sent, range(max(0, 24 * n - 8), 24 * n + 24)))
            world.send([Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA", minutes=-1))])
            started.append(Process(world, flow, path, str(fault), max_records=20))
            assert started[-1].wait() == -signal.SIGKILL, f"{fault} was not met: {started[-1].errors}"
            check_invariants(world, flow)
        started.append(Process(world, flow, path))
        assert started[-1].wait() == 0, started[-1].errors
    finally:
        for process in started:
            process.end()
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")


def test_a_run_that_was_frozen_while_another_one_took_over_is_fenced_when_it_wakes(world: World) -> None:
    flow, sent = fleet(world.topic), legs(300)
    world.send(republished(sent))
    frozen = Process(world, flow, "columns", max_records=10)
    try:
        frozen.await_batch()
        frozen.signal(signal.SIGSTOP)
        with closing(MemoryRunner(flow, world.stores(flow))) as successor:
            successor.process(world.records())
        before = world.views(flow, "aircraft"), world.views(flow, "carrier")
        frozen.signal(signal.SIGCONT)
        assert frozen.wait() == 1
        assert "Fenced" in frozen.errors
    finally:
        frozen.end()
    assert (world.views(flow, "aircraft"), world.views(flow, "carrier")) == before
    assert world.results(flow, "carrier") == totals(sent, "carrier")
