"""A flow without a stage over two topics whose driver is killed at every step of its commit: readers of its outputs lose nothing."""

import signal
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path as File
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import decode
from envelope.dedup.lineage import position_order
from persistence.commit.faults import DEAD_LETTER, EPOCH, LEDGER, Fault, FaultOutcome
from persistence.commit.steps import CommitStep
from tests.messages import Leg
from tests.support.flows import PATHS, Path, relay
from tests.support.runs import EVERY, Jvm, Run, some_legs
from tests.support.world import Sent, World, alone, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

OUTCOMES = (FaultOutcome.BEFORE, FaultOutcome.AFTER)
POINTS = (
    EPOCH,
    LEDGER,
    CommitStep.PUBLISH,
    DEAD_LETTER,
    CommitStep.MANIFEST.of(END_OF_FLOW),
    CommitStep.RETURN,
    CommitStep.OFFSETS,
)
SOLD = ["AA+UA", "DL+HA+AA", "UA+DL", "HA"]
FUELS = 4
"""Records of the second source in each batch."""
LEG = Json({"tail": str, "carrier": str, "minutes": int})


def faults(path: Path) -> list[Fault]:
    """Every point for each path: what one meets before the effect, the other meets after it."""
    shift = PATHS.index(path)
    return [Fault(point, OUTCOMES[(i + shift) % 2]) for i, point in enumerate(POINTS)]


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store."""
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path)) as world:
        yield world


@pytest.mark.parametrize("path", ["columns", pytest.param("messages", marks=pytest.mark.kills)])
@pytest.mark.parametrize("every", EVERY)
def test_a_relay_that_is_killed_is_exact_for_its_readers_in_the_end(
    world: World, topic: Callable[..., str], path: Path, every: int, jvm: Jvm
) -> None:
    out, fuels, planned = topic(partitions=2, name="out"), topic(name="fuels"), faults(path)[::every]
    made = ("relay", world.topic, out, path, fuels)
    sent = [
        Leg(tail=leg.tail, carrier=SOLD[i % len(SOLD)], minutes=leg.minutes)
        for i, leg in enumerate(some_legs(24 * len(planned)))
    ]
    started: list[Run] = []
    try:
        for n, fault in enumerate(planned):
            # The republisher was killed as well: its last outputs come again.
            world.send(republished(sent, range(max(0, 24 * n - 8), 24 * n + 24)))
            world.send([Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA", minutes=-1))])
            world.send([Sent(b'{"tail": "N1", "carrier": "fuel", "litres": 5}', b"N1")] * FUELS, fuels)
            started.append(Run(world, made, str(fault), jvm=jvm))
            assert started[-1].wait() == -signal.SIGKILL, f"{fault} was not met: {started[-1].errors}"
        started.append(Run(world, made, jvm=jvm))
        assert started[-1].wait() == 0, started[-1].errors
    finally:
        for process in started:
            process.end()
    world.check(relay(*made[1:]))
    outputs = world.records(out)
    firsts: dict[Any, list[Any]] = defaultdict(list)
    seen: set[Any] = set()
    for one in outputs:
        chain = decode(one.value or b"").chain
        event = chain[0].topic, chain[0].partition, chain[0].offset, chain[-1].index
        if event not in seen:
            firsts[one.partition, *event[:2]].append(position_order(event[2:]))
        seen.add(event)
    assert len(outputs) > len(seen)
    assert all(found == sorted(found) for found in firsts.values())
    legs = {("raw", i % 3, i // 3, n) for i, leg in enumerate(sent) for n in range(1 + leg.carrier.count("+"))}
    assert seen == legs | {(fuels, 0, n, 0) for n in range(FUELS * len(planned))}
    reader: Flow[Any] = Flow("reader").source(Topic(out, LEG)).aggregate("carrier", "carrier", Fields(legs=count()))
    runner = MemoryRunner(reader, bind(reader, {}, f"memory://{uuid.uuid4().hex}"))
    for start in range(0, len(outputs), 50):
        runner.process(outputs[start : start + 50])
    sold = [one for leg in sent for one in leg.carrier.split("+")] + ["fuel"] * FUELS * len(planned)
    assert {key.decode(): state["legs"] for key, state in runner.results("carrier").items()} == {
        one: sold.count(one) for one in sold
    }
