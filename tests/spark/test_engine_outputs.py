"""The output of a flow can be folded again, by any key and in any batches of its reader."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import decode
from envelope.dedup.lineage import position_order
from tests.messages import Leg
from tests.support.flows import Totals, carrier, fleet, tail
from tests.support.world import World, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]

LEG = Json({"tail": str, "carrier": str, "minutes": int})


def two_stages(source: str) -> Flow[Any]:
    return fleet(source, "messages")


def shuffled_first_stage(source: str) -> Flow[Any]:
    flow: Flow[Any] = Flow("shuffled").source(Topic(source, payload=Leg))
    return flow.aggregate("carrier", carrier, Totals(), co_partitioned=False)


@pytest.mark.parametrize("key", [None, tail], ids=["the record's key", "a key of its own"])
@pytest.mark.parametrize("made", [two_stages, shuffled_first_stage])
def test_outputs_of_several_tasks_are_in_the_order_of_their_roots(
    world: World, topic: Callable[..., str], made: Callable[[str], Flow[Any]], key: Any
) -> None:
    out = topic(partitions=2, name="out")
    flow = made(world.topic).publish_states(topic(name="states")).publish(out, key=key)
    sent = [leg for leg in legs(900, tails=3) if leg.minutes]
    world.send(republished(sent))
    world.run(flow)
    positions: dict[Any, list[Any]] = defaultdict(list)
    for record in world.records(out):
        root = decode(record.value or b"").chain[0]
        positions[record.partition, root.topic, root.partition].append(position_order((root.offset,)))
    assert sum(map(len, positions.values())) == len(sent)
    assert {place: found for place, found in positions.items() if found != sorted(found)} == {}


def test_a_second_flow_folds_them_all_in_batches_of_its_own(world: World, topic: Callable[..., str]) -> None:
    out = topic(partitions=2, name="out")
    sent = [leg for leg in legs(900, tails=3) if leg.minutes]
    world.send(republished(sent))
    world.run(two_stages(world.topic).publish(out))
    second: Flow[Any] = (
        Flow("second")
        .source(Topic(out, LEG))
        .aggregate("tails", "tail", Fields(legs=count(), minutes=total("minutes")))
    )
    report = world.run(second, max_records=100)
    assert report.batches > 5
    assert {key: state["legs"] for key, state in world.results(second, "tails").items()} == {
        leg.tail.encode(): sum(other.tail == leg.tail for other in sent) for leg in sent
    }
