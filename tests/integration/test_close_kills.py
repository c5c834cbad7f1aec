"""A run that is killed while it publishes windows that have closed: each is published, with the same state every time.

So is a run of everything that has to do with time: sessions, windows that overlap, states that expire.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as File
from typing import Any

import pytest

from aggregations.definition.flow import Flow
from aggregations.local import executor
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Snapshot, read_snapshot
from persistence.commit.faults import Fault, FaultOutcome
from tests.integration.test_retire import sent
from tests.messages import Leg
from tests.support.flows import closing
from tests.support.runs import Jvm, Made, Run, commit_faults, flow_of
from tests.support.world import Sent, World, legs, same

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


def killed(
    world: World, made: Made, flown: list[Leg], faults: Sequence[Fault], jvm: Jvm | None, **options: Any
) -> None:
    """Kill successive runs, each at one of the faults, then let one complete. Each has an hour of legs to read."""
    messages = sent(flown)
    size = len(messages) // (1 + len(faults)) + 1
    for number, fault in enumerate([*faults, None]):
        world.send(messages[number * size : (number + 1) * size])
        world.send([Sent(b"no envelope")])
        run = Run(world, made, "" if fault is None else str(fault), jvm=jvm, local=jvm is None, **options)
        try:
            assert run.wait() == (0 if fault is None else -signal.SIGKILL), (fault, run.errors)
        finally:
            run.end()


def check(world: World, final: str, faults: Sequence[Fault], jvm: Jvm | None) -> None:
    flow = closing(world.topic, final)
    flown = legs((1 + len(faults)) * EACH)
    killed(world, ("closing", world.topic, final), flown, faults, jvm, **({"few": 0} if jvm is None else {}))
    check_closed(world, final, world.check(flow), faults)


def check_closed(world: World, final: str, oracle: MemoryRunner, faults: Sequence[Fault]) -> set[bytes | None]:
    """Check that each window that the oracle published is published, with the same state every time; return the keys."""
    found: dict[bytes | None, list[Snapshot]] = {}
    for record in world.records(final):
        found.setdefault(record.key, []).append(read_snapshot(record.value))
    assert {key: every[0].state for key, every in found.items()} == {
        output.key: read_snapshot(output.value).state for output in oracle.outputs if output.topic == final
    }
    assert len(found) > 10 * len(faults)
    for every in found.values():
        assert {(one.version, str(one.state)) for one in every} == {(every[0].version, str(every[0].state))}
    again = sum(len(every) - 1 for every in found.values())
    assert (again > 0) is any(fault.point in ("close:tails", "ledger") and fault.outcome is AFTER for fault in faults)
    return {*found}


def test_windows_are_published_and_never_change_although_the_run_is_killed(
    world: World, topic: Callable[..., str]
) -> None:
    check(world, topic(name="final"), FAULTS, None)


@pytest.mark.kills
@pytest.mark.spark
def test_windows_are_published_and_never_change_although_the_driver_of_spark_is_killed(
    world: World, topic: Callable[..., str], jvm: Jvm
) -> None:
    check(world, topic(name="final"), [Fault("close:tails", AFTER), Fault("remove:tails", BEFORE)], jvm)


def every_fault(flow: Flow[Any]) -> list[Fault]:
    """A kill at every step of a commit to a store for each stage, and of what follows it."""
    names = [stage.name for stage in flow.stages]
    later = ["close:tails", "ledger", *(f"remove:{name}" for name in names)]
    return [*commit_faults(flow, names), *(Fault(point, outcome) for point in later for outcome in (BEFORE, AFTER))]


FEW = [Fault("persist:worst", AFTER), Fault("remove:worst", BEFORE)]


@pytest.mark.parametrize(
    ("where", "few"),
    [
        ("local", FEW),
        pytest.param("local", None, marks=pytest.mark.kills),
        pytest.param("by message", None, marks=pytest.mark.kills),
        pytest.param("spark", None, marks=[pytest.mark.kills, pytest.mark.spark]),
    ],
)
def test_sessions_hopping_windows_expiry_a_branch_and_changed_columns_are_exact_wherever_the_run_is_killed(
    world: World, topic: Callable[..., str], request: pytest.FixtureRequest, where: str, few: list[Fault] | None
) -> None:
    made = ("shifts", world.topic, topic(name="final"), topic(name="aside"))
    flow = flow_of(made)
    faults = every_fault(flow) if few is None else few
    jvm = request.getfixturevalue("jvm") if where == "spark" else None
    options = {} if jvm else {"few": 0 if where == "local" else executor.FEW_RECORDS}
    flown = [
        # Every second leg is of an aircraft that flies in one hour only: its state expires, and leaves.
        Leg(tail=leg.tail + f".{i // EACH}" * (i % 2), carrier=leg.carrier, minutes=leg.minutes)
        for i, leg in enumerate(legs((1 + len(faults)) * EACH))
    ]
    killed(world, made, flown, faults, jvm, **options)
    oracle = world.oracle(flow)
    for stage in ("worst", "hours"):
        same(world.results(flow, stage), oracle.results(stage))
    published = check_closed(world, made[2], oracle, faults)
    held, sessions = world.results(flow, "tails"), oracle.results("tails")
    assert held.items() <= sessions.items()
    assert sessions.keys() - held.keys() <= published, "a session leaves a state that is written after it was published"
    wanted = [(one.key, one.value) for one in oracle.outputs if one.topic == made[3]]
    found = [(one.key, one.value) for one in world.records(made[3])]
    assert {*found} == {*wanted}
    assert len(wanted) > len(faults)
    assert (oracle.report.removed["worst"] > 0, oracle.report.removed["hours"] > 0) == (True, True)
