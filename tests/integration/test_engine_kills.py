"""Real runs as processes: killed at every write to their stores, or frozen while another run takes over."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path as File

import pytest

from aggregations.run.memory import MemoryRunner
from persistence.commit.faults import EPOCH, Fault, FaultOutcome
from persistence.commit.steps import CommitStep
from tests.messages import Leg
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.runs import EVERY, Jvm, Run, check_invariants
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

OUTCOMES = (FaultOutcome.BEFORE, FaultOutcome.AFTER)
POINTS = (
    EPOCH,
    CommitStep.PERSIST.of("carrier"),
    CommitStep.PERSIST.of("aircraft"),
    CommitStep.MANIFEST.of("carrier"),
    CommitStep.MANIFEST.of("aircraft"),
)
"""Every effect on a store of its own for each stage. At the other steps of a commit, which no store has a part in, both
paths are killed in `test_store_kills.py` and `test_stage_kills.py`."""
# What the driver itself does is broken in its second batch, what its tasks do wherever it comes first.
SECOND = (CommitStep.MANIFEST,)


def faults(path: Path) -> list[Fault]:
    """Every point for each path: what one meets before the effect, the other meets after it."""
    shift = PATHS.index(path)
    return [
        Fault(point, OUTCOMES[(i + shift) % 2], 2 if point.partition(":")[0] in SECOND else 1)
        for i, point in enumerate(POINTS)
    ]


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store for each stage."""
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, apart=True)) as world:
        yield world


@pytest.mark.parametrize("path", ["columns", pytest.param("messages", marks=pytest.mark.kills)])
@pytest.mark.parametrize("every", EVERY)
def test_a_run_that_is_killed_at_writes_to_its_stores_is_exact_in_the_end(
    world: World, path: Path, every: int, jvm: Jvm
) -> None:
    flow, planned = fleet(world.topic, path), faults(path)[::every]
    sent = [leg for leg in legs(600) if leg.minutes][: 24 * len(planned)]
    started: list[Run] = []
    try:
        for n, fault in enumerate(planned):
            # The republisher was killed as well: its last outputs come again.
            world.send(republished(sent, range(max(0, 24 * n - 8), 24 * n + 24)))
            world.send([Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA", minutes=-1))])
            started.append(Run(world, ("fleet", world.topic, path), str(fault), jvm=jvm, max_records=20))
            assert started[-1].wait() == -signal.SIGKILL, f"{fault} was not met: {started[-1].errors}"
            check_invariants(world, flow)
        started.append(Run(world, ("fleet", world.topic, path), jvm=jvm))
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
    frozen = Run(world, ("fleet", world.topic), max_records=10, freeze=True)
    try:
        frozen.await_freeze()
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
