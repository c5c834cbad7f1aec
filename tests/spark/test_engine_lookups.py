"""Lookups on a broker: tables are read first, elements read the rows of before their batch, and runs continue each other."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jobs.dead_letters.redrive import redrive
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.flows import spending
from tests.support.world import Sent, World

pytestmark = [pytest.mark.spark, pytest.mark.integration]

CATEGORIES = {"m1": "food", "m2": "toys", "m3": "food"}


def merchants(categories: dict[str, str | None]) -> list[Sent]:
    return [
        Sent(None if one is None else json.dumps({"category": one}).encode(), name.encode())
        for name, one in categories.items()
    ]


def payments(count: int, seed: int) -> list[tuple[str, str]]:
    """Card and merchant of each."""
    rng = random.Random(seed)
    return [(f"card-{rng.randrange(9)}", f"m{rng.randrange(1, 5)}") for _ in range(count)]


def sent(paid: Sequence[tuple[str, str]]) -> list[Sent]:
    return [Sent(json.dumps({"card": card, "merchant": to, "cents": 1}).encode(), card.encode()) for card, to in paid]


def spent(paid: Sequence[tuple[str, str]], rows: dict[str, str | None]) -> Counter[bytes]:
    return Counter((rows.get(to) or "unknown").encode() for _, to in paid)


@pytest.fixture
def table(topic: Callable[..., str]) -> str:
    """A compacted topic of three partitions."""
    return topic(name="merchants", partitions=3, cleanup_policy="compact")


def test_tables_are_read_first_and_each_element_keeps_the_row_of_its_batch(world: World, table: str) -> None:
    flow = spending(world.topic, table)
    first, second = payments(150, 1), payments(90, 2)
    world.send(merchants(CATEGORIES), table)
    world.send(sent(first))
    report = world.run(flow, max_records=40)
    assert report.batches > 4
    counts = spent(first, CATEGORIES)
    assert {key: one["n"] for key, one in world.results(flow, "category").items()} == counts
    changed: dict[str, str | None] = {"m1": "books", "m2": None, "m4": "toys"}
    world.send(merchants(changed), table)
    world.send(sent(second))
    world.run(flow)
    counts += spent(second, {**CATEGORIES, **changed})
    assert {key: one["n"] for key, one in world.results(flow, "category").items()} == counts
    assert world.results(flow, "merchant") == {
        b"m1": {"category": "books"},
        b"m3": {"category": "food"},
        b"m4": {"category": "toys"},
    }
    with_manifest = open_store(world.stores(flow)["merchant"])
    manifest = with_manifest.load_manifest(FlowRef(flow.name))
    with_manifest.close()
    assert manifest is not None
    assert manifest.unfinished == {}
    assert sum(one.next_offset for one in manifest.positions[table].values()) == len(CATEGORIES) + len(changed)


def test_an_element_without_a_row_becomes_a_dead_letter_and_is_folded_once_the_row_is_there(
    world: World, table: str
) -> None:
    flow = spending(world.topic, table, "dead_letter")
    paid = [("c1", "m1"), ("c1", "m9"), ("c2", "m1")]
    world.send(merchants(CATEGORIES), table)
    world.send(sent(paid))
    world.run(flow)
    [(letter, _)] = world.dead_letters()
    assert (letter.reason, letter.stage, letter.hole) == ("missing_entry", "category", False)
    world.check(flow)
    redrive(world.settings, world.dead, apply=True)
    world.run(flow)
    assert [again.reason for again, _ in world.dead_letters()] == ["missing_entry"] * 2, "the row is still missing"
    world.send(merchants({"m9": "toys"}), table)
    for _ in range(2):
        redrive(world.settings, world.dead, apply=True)
        world.run(flow)
    assert {key: one["n"] for key, one in world.results(flow, "category").items()} == {b"food": 2, b"toys": 1}
    assert world.results(flow, "card")[b"c1"]["n"] == 2
    assert len(world.dead_letters()) == 2


def test_the_table_of_a_flow_has_a_plan_of_its_own(world: World, table: str) -> None:
    flow: Any = spending(world.topic, table)
    world.send(merchants(CATEGORIES), table)
    world.send(sent(payments(5, 3)))
    plans: list[Any] = []
    world.run(flow, planned=plans.append, start="latest")
    assert {plan.topic: sum(one.lag for one in plan.partitions) for plan in plans} == {world.topic: 0, table: 3}
    assert world.results(flow, "merchant").keys() == {b"m1", b"m2", b"m3"}
    assert world.results(flow, "category") == {}
    world.send(sent([("c", "m1")]))
    world.run(flow)
    assert world.results(flow, "category") == {b"food": {"n": 1, "cents": 1}}
