"""Runs without Spark as processes: killed at every step of a commit, alternately with Spark, frozen, and taken over."""

import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path as File

import pytest

from aggregations.local import executor
from tests.messages import Leg
from tests.support.flows import BROKEN, Path, fleet, shared, totals
from tests.support.runs import BUCKETS, EVERY, Jvm, Run, kill_everywhere, some_legs
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HISTORY = 512
"""Longer than a lane becomes here, so that histories show every root that a state holds."""
LEGS = 18 * 27
"""Legs: as many for each of the 18 steps at which a commit to two stores is killed."""
COMPILED, BY_MESSAGE = 0, executor.FEW_RECORDS
DEAD = [Sent(b"no envelope"), alone(Leg(tail="N1", carrier="AA", minutes=-1))]


@pytest.fixture
def world_of(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[Callable[..., World]]:
    """Makes a world with a topic of two partitions and a dead-letter topic."""
    made: list[World] = []

    def make(**options: object) -> World:
        made.append(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def redis(redis_url: str) -> str:
    """URL of a Redis of the test's own."""
    return f"{redis_url}?buckets={BUCKETS}&prefix=local-{uuid.uuid4().hex[:8]}"


def check_totals(world: World, sent: list[Leg]) -> None:
    flow = fleet(world.topic)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.parametrize(
    ("path", "few"), [("columns", COMPILED), pytest.param("messages", BY_MESSAGE, marks=pytest.mark.kills)]
)
@pytest.mark.parametrize("every", EVERY)
def test_a_run_that_is_killed_in_its_commits_is_exact_in_the_end(
    world_of: Callable[..., World], redis: str, path: Path, few: int, tmp_path: File, every: int
) -> None:
    world = world_of(urls={"aircraft": redis, "carrier": f"lmdb://{tmp_path}/states"})
    sent = some_legs(LEGS)
    kill_everywhere(world, ("fleet", world.topic, path), sent, DEAD, None, local=lambda _: True, few=few, every=every)
    check_totals(world, sent)


@pytest.mark.kills
@pytest.mark.parametrize("few", [COMPILED, BY_MESSAGE], ids=["compiled", "by message"])
def test_a_run_that_is_killed_while_items_of_a_record_are_under_several_keys_is_exact_in_the_end(
    world_of: Callable[..., World], redis: str, few: int
) -> None:
    world = world_of(urls={"carrier": redis, "aircraft": redis})
    sold = ["AA+UA", "DL+HA+AA", "UA+DL", "HA", "WN+B6+UA+HA"]
    sent = [
        Leg(tail=leg.tail, carrier=sold[i % len(sold)], minutes=leg.minutes) for i, leg in enumerate(some_legs(400))
    ]
    poison = alone(Leg(tail="N1", carrier=f"AA+DL+{BROKEN}+UA", minutes=1000))
    made = ("shared", world.topic, HISTORY)
    kill_everywhere(world, made, sent, [Sent(b"no envelope"), poison], None, local=lambda _: True, few=few)
    legs_of = [(leg, leg.carrier.split("+")) for leg in sent]
    flow = shared(world.topic, HISTORY)
    counts = {key: state["legs"] for key, state in world.results(flow, "carrier").items()}
    assert counts == {
        one.encode(): sum(carriers.count(one) for _, carriers in legs_of)
        for one in {carrier for _, carriers in legs_of for carrier in carriers}
    }


@pytest.mark.spark
@pytest.mark.parametrize("every", EVERY)
def test_runs_on_spark_and_without_it_continue_each_other_where_they_are_killed(
    world_of: Callable[..., World], redis: str, jvm: Jvm, tmp_path: File, every: int
) -> None:
    world = world_of(urls={"aircraft": redis, "carrier": f"sqlite://{tmp_path}/states.db"})
    sent = some_legs(LEGS)
    kill_everywhere(world, ("fleet", world.topic), sent, DEAD, jvm, local=lambda n: n % 2 == 1, every=every)
    check_totals(world, sent)


@pytest.mark.spark
@pytest.mark.parametrize("first", ["spark", "local"])
def test_the_newer_of_a_run_on_spark_and_one_without_it_fences_the_older(
    world_of: Callable[..., World], jvm: Jvm, first: str
) -> None:
    world = world_of(apart=True)
    sent, made = legs(300), ("fleet", world.topic)
    flow = fleet(world.topic)
    world.send(republished(sent))
    frozen = Run(world, made, local=first == "local", jvm=None, max_records=10, freeze=True)
    newer = None
    try:
        frozen.await_freeze()
        newer = Run(world, made, local=first == "spark", jvm=jvm if first == "local" else None)
        assert newer.wait() == 0, newer.errors
        before = world.views(flow, "aircraft"), world.views(flow, "carrier")
        frozen.signal(signal.SIGCONT)
        assert frozen.wait() == 1
        assert "Fenced" in frozen.errors
    finally:
        frozen.end()
        if newer is not None:
            newer.end()
    assert (world.views(flow, "aircraft"), world.views(flow, "carrier")) == before
    check_totals(world, sent)


def test_a_process_that_runs_a_flow_without_spark_never_imports_it(world_of: Callable[..., World]) -> None:
    """The process itself checks this at its end."""
    world = world_of()
    world.send(alone(leg) for leg in legs(60))
    for few in (COMPILED, BY_MESSAGE):
        run = Run(world, ("fleet", world.topic), local=True, few=few)
        try:
            assert run.wait() == 0, run.errors
        finally:
            run.end()
        world.send(alone(leg) for leg in legs(60))
