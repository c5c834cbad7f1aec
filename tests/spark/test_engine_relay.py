"""A flow without a stage on Spark: it publishes in the order of offsets, rejects, and takes rejected records back."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aggregations.definition.element import Record
from aggregations.definition.flow import END_OF_FLOW
from envelope import decode
from envelope.dedup.lineage import position_order
from jobs.dead_letters.redrive import redrive
from tests.messages import Leg
from tests.support.flows import PATHS, Path, relay
from tests.support.world import Sent, World, alone, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]

SOLD = ["AA+UA", "DL", "HA+DL+UA", "WN"]


def some(count: int) -> list[Any]:
    return [Leg(tail=f"N{i % 5}", carrier=SOLD[i % len(SOLD)], minutes=1 + i % 9) for i in range(count)]


def places(outputs: Sequence[Record]) -> Counter[Any]:
    """Root and item of every output."""
    chains = [decode(one.value or b"").chain for one in outputs]
    return Counter((chain[0].topic, chain[0].partition, chain[0].offset, chain[-1].index) for chain in chains)


def expected(legs: Sequence[Any]) -> set[Any]:
    return {("raw", i % 3, i // 3, n) for i, leg in enumerate(legs) for n in range(1 + leg.carrier.count("+"))}


@pytest.mark.parametrize("path", PATHS)
def test_it_publishes_every_item_once_in_the_order_of_its_root(
    world: World, topic: Callable[..., str], path: Path
) -> None:
    out, sent = topic(partitions=2, name="out"), some(300)
    flow = relay(world.topic, out, path)
    world.send(republished(sent, range(200)))
    first = world.run(flow)
    world.send(republished(sent, range(200, 300)))
    second = world.run(flow)
    outputs = world.records(out)
    assert places(outputs) == Counter(expected(sent))
    assert first.outputs + second.outputs == len(outputs)
    assert sum(world.ends(flow).values()) == 300
    orders: dict[Any, list[Any]] = defaultdict(list)
    for one in outputs:
        chain = decode(one.value or b"").chain
        orders[one.partition, chain[0].partition].append(position_order((chain[0].offset, chain[-1].index)))
    assert all(found == sorted(found) for found in orders.values())


@pytest.mark.parametrize(("path", "partitions"), [("columns", 3), ("messages", 2)])
def test_several_sources_are_published_once_each_whatever_their_partitions(
    world: World, topic: Callable[..., str], path: Path, partitions: int
) -> None:
    out, fuels, sent = topic(name="out"), topic(partitions=partitions, name="fuels"), some(100)
    flow = relay(world.topic, out, path, fuels)
    world.send(republished(sent))
    world.send((Sent(b'{"tail": "N%d", "litres": 5}' % i, b"N%d" % i) for i in range(60)), fuels)
    report = world.run(flow, max_records=70)
    outputs = world.records(out)
    found = places(outputs)
    assert {place: times for place, times in found.items() if place[0] == "raw"} == Counter(expected(sent))
    fuelled = {place[1:3] for place in found if place[0] == fuels}
    assert len(outputs) == report.outputs == sum(found.values()) == len(expected(sent)) + len(fuelled)
    assert len(fuelled) == 60
    world.send([alone(Leg(tail="N9", carrier="AA", minutes=-1))])
    world.send([Sent(b"no JSON")], fuels)
    assert world.run(flow).reasons == {"bad_payload": 1, "diverted": 1}
    assert {letter.topic for letter, _ in world.dead_letters()} == {world.topic, fuels}
    assert world.ends(flow, topic=fuels) == {
        partition: marks.high for (_, partition), marks in world.topics.marks([fuels]).items()
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_rejected_record_comes_back_and_is_published_once(
    world: World, topic: Callable[..., str], path: Path
) -> None:
    out = topic(name="out")
    flow = relay(world.topic, out, path)
    world.send([*republished(some(20)), Sent(b"no envelope", b"N9"), alone(Leg(tail="N9", carrier="AA", minutes=-1))])
    report = world.run(flow)
    assert report.reasons == {"not_an_envelope": 1, "diverted": 1}
    assert {letter.stage for letter, _ in world.dead_letters()} == {"", END_OF_FLOW}
    good = alone(Leg(tail="N9", carrier="AA+UA", minutes=1)).value or b""
    for _ in range(2):
        redrive(world.settings, world.dead, apply=True, mend=lambda _key, _value: good)
        world.run(flow)
    assert sum(b"N9" in decode(one.value or b"").payload for one in world.records(out)) == 4
