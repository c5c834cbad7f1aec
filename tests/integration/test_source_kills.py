"""Real runs that read two topics, killed at every step of the commit: one topic of envelopes, one of plain JSON."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from persistence.commit.faults import EPOCH, Fault, FaultOutcome
from persistence.commit.steps import CommitStep
from tests.messages import Leg
from tests.support.flows import served
from tests.support.runs import EVERY, Jvm, Run, check_invariants
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

POINTS = (
    EPOCH,
    CommitStep.PUBLISH,
    CommitStep.PERSIST.of("carrier"),
    CommitStep.PERSIST.of("aircraft"),
    CommitStep.MANIFEST.of("carrier"),
    CommitStep.MANIFEST.of("aircraft"),
    CommitStep.RETURN,
    CommitStep.OFFSETS,
)
# What the driver itself does is broken in its second batch, what its tasks do wherever it comes first.
SECOND = (CommitStep.MANIFEST, CommitStep.RETURN, CommitStep.OFFSETS)
WHERE: tuple[tuple[Literal["columns", "messages", "tombstones"], int], ...] = (
    ("columns", 2),
    ("columns", 3),
    ("tombstones", 2),
)
"""Paths, and numbers of partitions of the second topic: with 2 both topics are folded while they are read."""


def faults(shift: int) -> list[Fault]:
    """Every point; what one run meets before the effect, the next one meets after it."""
    outcomes = (FaultOutcome.BEFORE, FaultOutcome.AFTER)
    return [
        Fault(point, outcomes[(i + shift) % 2], 2 if point.partition(":")[0] in SECOND else 1)
        for i, point in enumerate(POINTS)
    ]


def fuel(place: int) -> Sent:
    key = f"N{place % 8}"
    return Sent(json.dumps({"tail": key, "carrier": "AA", "litres": 1 + place % 5}).encode(), key.encode())


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: Path) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store for each stage."""
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, apart=True)) as world:
        yield world


@pytest.mark.parametrize("where", [WHERE[0], *(pytest.param(one, marks=pytest.mark.kills) for one in WHERE[1:])])
@pytest.mark.parametrize("every", EVERY)
def test_a_run_of_two_topics_that_is_killed_is_exact_in_the_end(
    world: World,
    topic: Callable[..., str],
    where: tuple[Literal["columns", "messages", "tombstones"], int],
    jvm: Jvm,
    every: int,
) -> None:
    path, partitions = where
    fuels, planned = topic(partitions=partitions, name="fuels"), faults(WHERE.index(where))[::every]
    flow, made = served(world.topic, fuels, path), ("served", world.topic, fuels, path)
    sent = [leg for leg in legs(600) if leg.minutes][: 16 * len(planned)]
    started: list[Run] = []
    try:
        for n, fault in enumerate(planned):
            # The republisher was killed as well: its last outputs come again.
            world.send(republished(sent, range(max(0, 16 * n - 6), 16 * n + 16)))
            world.send([Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA"))])
            world.send([*map(fuel, range(12 * n, 12 * n + 12)), Sent(b"no JSON")], fuels)
            started.append(Run(world, made, str(fault), jvm=jvm, max_records=20))
            assert started[-1].wait() == -signal.SIGKILL, f"{fault} was not met: {started[-1].errors}"
            check_invariants(world, flow)
        started.append(Run(world, made, jvm=jvm))
        assert started[-1].wait() == 0, started[-1].errors
    finally:
        for process in started:
            process.end()
    world.check(flow)
    found = world.results(flow, "aircraft")
    assert sum(state["fuels"] for state in found.values()) == 12 * len(planned)
    assert sum(state["litres"] for state in found.values()) == sum(1 + n % 5 for n in range(12 * len(planned)))
    assert sum(state["legs"] for state in found.values()) == len(sent)
    assert sum(state["minutes"] for state in found.values()) == sum(leg.minutes for leg in sent)
    carriers = world.results(flow, "carrier")
    assert {sum(state[name] for state in carriers.values()) for name in ("legs",)} == {len(sent)}
    assert world.ends(flow, topic=fuels).keys() == set(range(partitions))
