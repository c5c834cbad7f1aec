"""A driver that is killed at every step of its commits to Redis, while items scatter, and between four stages in two stores."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path as File
from typing import Any

import pytest

from aggregations.engine.path import route_of
from persistence.cassandra import apply_schema
from tests.messages import Leg
from tests.support.flows import BROKEN, four_stages, shared
from tests.support.runs import BUCKETS, ONE_NODE, Jvm, kill_everywhere, some_legs, store_faults
from tests.support.world import Sent, World, alone

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

ROUTES = 2
"""Number of tasks after a shuffle: the driver's threads, by default those of `local[2]`."""
HISTORY = 512
"""Longer than a lane becomes here, so that histories show every root that a state holds."""


@pytest.fixture
def redis(redis_url: str) -> str:
    """URL of a Redis of the test's own."""
    return f"{redis_url}?buckets={BUCKETS}&prefix=kills-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def world_of(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[Callable[..., World]]:
    """Makes a world on stores by stage, with a topic of two partitions and a dead-letter topic."""
    made: list[World] = []

    def make(**urls: str) -> World:
        made.append(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, urls=urls))
        return made[-1]

    yield make
    for world in made:
        world.close()


def state(minutes: list[int]) -> dict[str, int]:
    """What is known of legs that took so long."""
    return {"legs": len(minutes), "minutes": sum(minutes), "worst": max(minutes)}


def folded(legs: list[Any], keys: Callable[[Any], list[str]]) -> dict[bytes, dict[str, int]]:
    """The plain fold of legs under the keys of each."""
    found: dict[bytes, list[int]] = {}
    for leg in legs:
        for key in keys(leg):
            found.setdefault(key.encode(), []).append(leg.minutes)
    return {key: state(minutes) for key, minutes in found.items()}


@pytest.mark.kills
def test_a_driver_that_is_killed_while_items_of_a_record_scatter_is_exact_in_the_end(
    world_of: Callable[..., World], redis: str, jvm: Jvm
) -> None:
    world = world_of(carrier=redis, aircraft=redis)
    sold = ["AA+UA", "DL+HA+AA", "UA+DL", "HA", "WN+B6+UA+HA"]
    sent = [
        Leg(tail=leg.tail, carrier=sold[i % len(sold)], minutes=leg.minutes) for i, leg in enumerate(some_legs(400))
    ]
    routes = [{route_of(one.encode(), ROUTES) for one in leg.carrier.split("+")} for leg in sent]
    assert sum(len(one) == ROUTES for one in routes) > len(sent) // 2
    poison = alone(Leg(tail="N1", carrier=f"AA+DL+{BROKEN}+UA", minutes=1000))
    kill_everywhere(world, ("shared", world.topic, HISTORY), sent, [Sent(b"no envelope"), poison], jvm)
    flow = shared(world.topic, HISTORY)
    assert world.results(flow, "carrier") == folded(sent, lambda leg: leg.carrier.split("+"))
    assert world.results(flow, "aircraft") == folded(sent, lambda leg: [leg.tail] * len(leg.carrier.split("+")))


@pytest.mark.kills
def test_a_driver_that_is_killed_between_the_stores_of_its_four_stages_is_exact_in_the_end(
    world_of: Callable[..., World], redis: str, cassandra_url: str, jvm: Jvm
) -> None:
    cassandra = f"{cassandra_url}/four?replication=1&buckets={BUCKETS}"
    apply_schema(cassandra)
    world = world_of(aircraft=redis, carrier=redis, remainder=cassandra, pair=cassandra)
    sent = some_legs(12 * 24)
    dead = [Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA", minutes=-1))]
    kill_everywhere(world, ("four_stages", world.topic, HISTORY), sent, dead, jvm, store_faults, accept=ONE_NODE)
    flow = four_stages(world.topic, HISTORY)
    assert world.results(flow, "aircraft") == folded(sent, lambda leg: [leg.tail])
    assert world.results(flow, "carrier") == folded(sent, lambda leg: [leg.carrier])
    assert world.results(flow, "remainder") == folded(sent, lambda leg: [str(leg.minutes % 6)])
    assert world.results(flow, "pair") == folded(sent, lambda leg: [f"{leg.carrier} {leg.tail}"])
