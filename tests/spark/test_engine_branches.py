"""Branches on Spark: before a stage, and behind one whose tasks have other keys than the outputs."""

from collections import Counter
from collections.abc import Callable

import polars as pl
import pytest

from aggregations.definition.element import Element
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from envelope import Reason
from tests.messages import Leg
from tests.support.flows import TOTALS
from tests.support.world import World, alone, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def short(element: Element[object]) -> bool:
    return bool(element["minutes"] < 5)


def test_branches_publish_what_the_in_memory_runner_publishes(world: World, topic: Callable[..., str]) -> None:
    copies, long, inner, first, second = (topic(partitions=2, name=f"out{n}") for n in range(5))
    chosen = pl.when(pl.col("carrier") == "AA").then(pl.lit(first)).otherwise(pl.col("carrier"))
    flow = (
        Flow("branching")
        .source(Topic(world.topic, payload=Leg))
        .also_to("copies", lambda flow: flow.map(minutes=pl.col("minutes") * 2).publish(copies))
        .branch(
            "long",
            pl.col("minutes") > 15,
            lambda flow: flow.also_to("inner", lambda one: one.publish(inner)).publish(long),
        )
        .aggregate("carrier", "carrier", TOTALS, co_partitioned=False)
        .branch("short", short, lambda flow: flow.publish(chosen, topics=[first, second]))
        .publish(second)
    )
    flow = flow.branch("none", pl.lit(value=False), lambda one: one.divert(pl.lit(value=True)))
    world.send(republished([leg for leg in legs(200) if leg.carrier == "AA"]))
    world.send([alone(Leg(tail="N1", carrier="XX", minutes=1))])
    world.run(flow)
    oracle = world.check(flow)
    assert [one.reason for one in oracle.dead_letters] == [Reason.BAD_TOPIC]
    found = Counter(
        (name, one.key, one.value) for name in (copies, long, inner, first, second) for one in world.records(name)
    )
    assert found == Counter((one.topic, one.key, one.value) for one in oracle.outputs)
    assert {name for name, _, _ in found} == {copies, long, inner, first, second}
