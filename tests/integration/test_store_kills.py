"""A driver that is killed at every step of its commits to Cassandra."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path as File

import pytest

from persistence.cassandra import apply_schema
from tests.messages import Leg
from tests.support.flows import fleet, totals
from tests.support.runs import BUCKETS, EVERY, ONE_NODE, Jvm, kill_everywhere, some_legs
from tests.support.world import Sent, World, alone

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def world(cassandra_url: str, kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic, and one store for both stages."""
    url = f"{cassandra_url}/kills?replication=1&buckets={BUCKETS}"
    apply_schema(url)
    urls = {"aircraft": url, "carrier": url}
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, urls=urls)) as world:
        yield world


@pytest.mark.parametrize("every", EVERY)
def test_a_run_that_is_killed_in_its_commits_to_cassandra_is_exact_in_the_end(world: World, every: int) -> None:
    check(world, None, every)


@pytest.mark.kills
@pytest.mark.spark
def test_a_driver_that_is_killed_in_its_commits_to_cassandra_is_exact_in_the_end(world: World, jvm: Jvm) -> None:
    check(world, jvm, 1)


def check(world: World, jvm: Jvm | None, every: int) -> None:
    sent = some_legs(16 * 24)
    dead = [Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA", minutes=-1))]
    kill_everywhere(
        world, ("fleet", world.topic), sent, dead, jvm, local=lambda _: jvm is None, every=every, accept=ONE_NODE
    )
    flow = fleet(world.topic)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")
