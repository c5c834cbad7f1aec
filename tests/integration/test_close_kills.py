"""A run that is killed while it publishes windows that have closed: each is published, with the same state every time."""

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as File

import pytest

from aggregations.run.snapshots import Snapshot, read_snapshot
from persistence.commit.faults import Fault, FaultOutcome
from tests.integration.test_retire import sent
from tests.support.flows import closing
from tests.support.runs import Jvm, Run
from tests.support.world import World, legs

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BEFORE, AFTER = FaultOutcome.BEFORE, FaultOutcome.AFTER
FAULTS = [
    Fault("persist:tails", AFTER),
    Fault("manifest:carriers", AFTER),
    Fault("manifest:tails", AFTER),
    Fault("close:tails", BEFORE),
    Fault("close:tails", AFTER),
    Fault("ledger", BEFORE),
    Fault("ledger", AFTER),
    Fault("remove:tails", BEFORE),
    Fault("remove:tails", AFTER),
]
EACH = 60
"""Legs, and minutes of event time, that each run reads before it is killed."""


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """Every stage has a store of its own."""
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, apart=True)
    yield made
    made.close()


def check(world: World, final: str, faults: Sequence[Fault], jvm: Jvm | None) -> None:
    made, flow = ("closing", world.topic, final), closing(world.topic, final)
    messages = sent(legs((1 + len(faults)) * EACH))
    size = len(messages) // (1 + len(faults)) + 1
    for number, fault in enumerate([*faults, None]):
        world.send(messages[number * size : (number + 1) * size])
        options = {"few": 0} if jvm is None else {}
        run = Run(world, made, "" if fault is None else str(fault), jvm=jvm, local=jvm is None, **options)
        try:
            assert run.wait() == (0 if fault is None else -signal.SIGKILL), (fault, run.errors)
        finally:
            run.end()
    found: dict[bytes | None, list[Snapshot]] = {}
    for record in world.records(final):
        found.setdefault(record.key, []).append(read_snapshot(record.value))
    oracle = world.check(flow)
    assert {key: every[0].state for key, every in found.items()} == {
        output.key: read_snapshot(output.value).state for output in oracle.outputs
    }
    assert len(found) > 10 * len(faults)
    for every in found.values():
        assert {(one.version, str(one.state)) for one in every} == {(every[0].version, str(every[0].state))}
    again = sum(len(every) - 1 for every in found.values())
    assert (again > 0) is any(fault.point in ("close:tails", "ledger") and fault.outcome is AFTER for fault in faults)


def test_windows_are_published_and_never_change_although_the_run_is_killed(
    world: World, topic: Callable[..., str]
) -> None:
    check(world, topic(name="final"), FAULTS, None)


@pytest.mark.spark
def test_windows_are_published_and_never_change_although_the_driver_of_spark_is_killed(
    world: World, topic: Callable[..., str], jvm: Jvm
) -> None:
    check(world, topic(name="final"), [Fault("close:tails", AFTER), Fault("remove:tails", BEFORE)], jvm)
