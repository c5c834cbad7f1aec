"""A run that is killed while its batch is half written, and a table that changes before the next run: a record is folded once."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path as File

import pytest

from aggregations.local import executor
from persistence.commit.faults import Fault, FaultOutcome
from tests.support.flows import spending
from tests.support.runs import Jvm, Run
from tests.support.world import Sent, World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MERCHANTS = [f"m{number}" for number in range(4)]
CATEGORIES = ["food", "toys", "books", "games", "tools"]
FAULTS = [
    Fault("load:merchant", FaultOutcome.AFTER),
    Fault("fold", FaultOutcome.AFTER),
    Fault("publish", FaultOutcome.AFTER),
    Fault("persist:category", FaultOutcome.BEFORE),
    Fault("persist:category", FaultOutcome.AFTER),
    Fault("persist:card", FaultOutcome.BEFORE),
    Fault("persist:card", FaultOutcome.AFTER),
    Fault("manifest:category", FaultOutcome.AFTER),
    Fault("manifest:card", FaultOutcome.AFTER),
    Fault("manifest:merchant", FaultOutcome.BEFORE),
]
SOME = [
    Fault("persist:category", FaultOutcome.AFTER),
    Fault("persist:card", FaultOutcome.BEFORE),
    Fault("manifest:card", FaultOutcome.AFTER),
]
COMPILED, BY_MESSAGE = 0, executor.FEW_RECORDS


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """Every stage has a store of its own."""
    made = World(kafka, topic(partitions=2, name="payments"), topic(name="dead"), tmp_path, apart=True)
    yield made
    made.close()


def send_rows(world: World, table: str, turn: int) -> dict[str, str]:
    """Give every merchant another category than before."""
    rows = {name: CATEGORIES[(turn + number) % len(CATEGORIES)] for number, name in enumerate(MERCHANTS)}
    world.send([Sent(json.dumps({"category": one}).encode(), name.encode()) for name, one in rows.items()], table)
    return rows


def send_payments(world: World, turn: int) -> list[str]:
    """Send some payments; return their merchants."""
    paid = [(f"card-{(turn + number) % 7}", MERCHANTS[number % 3]) for number in range(24)]
    world.send(
        Sent(json.dumps({"card": card, "merchant": to, "cents": 1}).encode(), card.encode()) for card, to in paid
    )
    return [to for _, to in paid]


def check(world: World, table: str, faults: list[Fault], jvm: Jvm | None, **options: object) -> None:
    made = ("spending", world.topic, table)
    counts: Counter[bytes] = Counter()
    started: list[Run] = []
    try:
        rows = send_rows(world, table, 0)
        started.append(Run(world, made, jvm=jvm, local=jvm is None, **options))
        assert started[-1].wait() == 0, started[-1].errors
        for turn, fault in enumerate(faults, start=1):
            paid = send_payments(world, turn)
            counts += Counter(rows[one].encode() for one in paid)
            started.append(Run(world, made, str(fault), jvm=jvm, local=jvm is None, **options))
            assert started[-1].wait() == -signal.SIGKILL, f"{fault} was not met: {started[-1].errors}"
            rows = send_rows(world, table, turn)
            # Smaller batches than the one that was killed: all of its records keep their rows.
            started.append(Run(world, made, jvm=jvm, local=jvm is None, **{**options, "max_records": 7}))
            assert started[-1].wait() == 0, started[-1].errors
    finally:
        for run in started:
            run.end()
    flow = spending(world.topic, table)
    assert {key: one["n"] for key, one in world.results(flow, "category").items()} == counts
    assert sum(one["n"] for one in world.results(flow, "card").values()) == counts.total()
    assert {key.decode(): one["category"] for key, one in world.results(flow, "merchant").items()} == rows


@pytest.mark.parametrize(
    ("few", "faults"),
    [
        pytest.param(COMPILED, SOME, id="some steps"),
        pytest.param(COMPILED, FAULTS, id="compiled", marks=pytest.mark.kills),
        pytest.param(BY_MESSAGE, FAULTS, id="by message", marks=pytest.mark.kills),
    ],
)
def test_records_of_a_killed_batch_keep_the_rows_that_they_found(
    world: World, topic: Callable[..., str], few: int, faults: list[Fault]
) -> None:
    check(world, topic(name="merchants", cleanup_policy="compact"), faults, None, few=few)


@pytest.mark.kills
@pytest.mark.spark
def test_records_of_a_killed_batch_keep_the_rows_that_they_found_on_spark(
    world: World, topic: Callable[..., str], jvm: Jvm
) -> None:
    check(world, topic(name="merchants", cleanup_policy="compact"), SOME, jvm)
