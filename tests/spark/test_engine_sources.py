"""Flows with two sources on Spark and a real broker: one topic of envelopes, one of plain JSON."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.windows import tumbling
from aggregations.engine.job import Job
from aggregations.engine.partitioners import SAMPLED
from aggregations.errors import RunRefusedError
from aggregations.run.plan import Plan
from aggregations.spark.action import Action
from envelope import Reason
from jobs.dead_letters.discard import discard
from jobs.dead_letters.redrive import redrive
from persistence.kafka import Topics
from persistence.murmur2 import parts_of
from tests.messages import Leg
from tests.support.flows import FUELS, served
from tests.support.world import Sent, World, alone, legs, republished, same

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Path = Literal["columns", "messages", "tombstones"]


def fuel(place: int, litres: Any = 10, *, tails: int = 8, carrier: str = "AA", partition: int = -1) -> Sent:
    """Fuel for one of the aircraft of `legs`."""
    key = f"N{place % tails}"
    body = json.dumps({"tail": key, "carrier": carrier, "litres": litres}).encode()
    return Sent(body, key.encode(), partition=partition)


def expected(sent: Sequence[Any], litres: Sequence[int], key: str = "tail") -> dict[bytes, dict[str, int]]:
    """States of `served`."""
    zero = {"legs": 0, "minutes": 0, "fuels": 0, "litres": 0}
    found: dict[bytes, dict[str, int]] = {}
    for leg in sent:
        if leg.minutes:
            state = found.setdefault(getattr(leg, key).encode(), dict(zero))
            state["legs"] += 1
            state["minutes"] += leg.minutes
    for place, one in enumerate(litres):
        if one > 0:
            state = found.setdefault(f"N{place % 8}".encode() if key == "tail" else b"AA", dict(zero))
            state["fuels"] += 1
            state["litres"] += one
    return found


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """The jobs of all attempts."""
    found: list[Job] = []
    execute = Action.execute

    def seen(self: Action, job: Job) -> Any:
        found.append(job)
        return execute(self, job)

    monkeypatch.setattr(Action, "execute", seen)
    yield found


@pytest.mark.parametrize("path", ["columns", "messages", "tombstones"])
def test_topics_with_equal_partitions_are_folded_while_they_are_read(
    world: World, topic: Callable[..., str], jobs: list[Job], path: Path
) -> None:
    fuels, sent = topic(partitions=2, name="fuels"), legs(120)
    flow, litres = served(world.topic, fuels, path), list(range(80))
    world.send(republished(sent))
    world.send((fuel(place, one) for place, one in enumerate(litres)), fuels)
    world.send([Sent(b"no JSON", b"N1"), fuel(3, -5)], fuels)
    world.send([Sent(b"no envelope", b"N1")])
    report = world.run(flow, max_records=50)
    assert report.records == 120 + 80 + 3
    assert all(job.folds_while_reading for job in jobs)
    assert all({one.topic for slot in job.attempt.tasks for one in slot.ranges} == {world.topic, fuels} for job in jobs)
    assert all(slot.number == one.partition % 2 for job in jobs for slot in job.attempt.tasks for one in slot.ranges)
    assert world.results(flow, "aircraft") == expected(sent, litres)
    assert world.results(flow, "carrier") == expected(sent, litres, "carrier")
    world.check(flow)
    # Everything again at new offsets: the republished legs are copies, plain records are new ones.
    world.send(republished(sent))
    world.send((fuel(place, one) for place, one in enumerate(litres)), fuels)
    world.run(flow)
    assert world.results(flow, "aircraft") == {
        key: {**state, "fuels": 2 * state["fuels"], "litres": 2 * state["litres"]}
        for key, state in expected(sent, litres).items()
    }


@pytest.mark.parametrize("path", ["columns", "tombstones"])
def test_topics_with_different_partitions_are_shuffled(
    world: World, topic: Callable[..., str], jobs: list[Job], path: Path
) -> None:
    fuels, sent = topic(partitions=3, name="fuels"), legs(90)
    flow, litres = served(world.topic, fuels, path), list(range(60))
    world.send(republished(sent))
    world.send((fuel(place, one) for place, one in enumerate(litres)), fuels)
    world.run(flow, max_records=40)
    assert not any(job.folds_while_reading for job in jobs)
    assert world.results(flow, "aircraft") == expected(sent, litres)
    oracle = world.check(flow)
    assert oracle.run.growths == {}
    assert {name for job in jobs for name in job.attempt.shared} == set()


@pytest.mark.parametrize("path", ["columns", "tombstones"])
def test_keys_in_other_partitions_of_the_other_topic_are_found_and_shuffled_and_are_no_growth(
    world: World, topic: Callable[..., str], jobs: list[Job], path: Path
) -> None:
    fuels, sent = topic(partitions=2, name="fuels"), legs(60)
    flow, litres = served(world.topic, fuels, path), [7] * 40
    world.send(republished(sent))
    other = [fuel(place, one) for place, one in enumerate(litres)]
    world.send([Sent(one.value, one.key, partition=1 - parts_of([one.key or b""], 2)[0]) for one in other], fuels)
    # What the start of the run looks at does not show it.
    world.send([Sent(fuel(0, 0).value, partition=n % 2) for n in range(2 * SAMPLED)], fuels)
    world.run(flow)
    assert [job.folds_while_reading for job in jobs] == [True, False]
    assert jobs[-1].attempt.shared == frozenset()
    assert jobs[-1].progress.evict
    assert world.results(flow, "aircraft") == expected(sent, litres)
    world.check(flow)


def test_topics_of_different_partitioners_are_shuffled_from_the_first_batch_on(
    world: World, topic: Callable[..., str], jobs: list[Job], caplog: pytest.LogCaptureFixture
) -> None:
    fuels, sent = topic(partitions=2, name="fuels"), legs(60)
    flow, litres = served(world.topic, fuels), [7] * 40
    world.send(republished(sent))
    world.send((fuel(place, one) for place, one in enumerate(litres)), fuels, partitioner="consistent_random")
    with caplog.at_level(logging.WARNING, "headwater.engine"):
        world.run(flow, max_records=40)
    assert len(jobs) > 1
    assert not any(job.folds_while_reading for job in jobs)
    assert [one.message for one in caplog.records if "shuffle" in one.message and "partitioner=murmur2" in one.message]
    assert world.results(flow, "aircraft") == expected(sent, litres)
    world.check(flow)


def test_windows_sketches_and_a_branch_over_two_sources_are_those_of_the_oracle_in_any_batches(
    world: World, topic: Callable[..., str]
) -> None:
    fuels, aside = topic(partitions=2, name="fuels"), topic(name="aside")
    fold = Fields(n=count(), fuels=count("litres"), kinds=approximate_distinct("carrier"), usual=top("litres", 2))
    flow = (
        Flow("both")
        .source(Topic(world.topic, payload=Leg, time=pl.col("minutes") * 60_000), Topic(fuels, FUELS, envelope=False))
        .branch("much", pl.col("litres") > 50, lambda flow: flow.publish(aside))
        .aggregate(
            "aircraft", "tail", fold, window=tumbling("1d", lateness="1d"), emit=Emit(carrier="carrier", n="new.n")
        )
        .aggregate("carrier", "carrier", Fields(n=count(), ranks=quantiles("n")))
    )
    sent = legs(150)
    world.send(republished(sent, [*range(100), *range(60, 150)]))
    world.send((fuel(place, place) for place in range(80)), fuels)
    world.run(flow, max_records=70)
    oracle = world.check(flow)
    found = [(one.key, one.value) for one in world.records(aside)]
    assert sorted(found) == sorted((one.key, one.value) for one in oracle.outputs)
    assert len(found) == 29
    assert sum(one["n"] for one in world.results(flow, "carrier").values()) == len(sent) + 51


def test_a_key_in_two_partitions_of_one_topic_is_its_growth_beside_a_topic_of_another_number(
    world: World, topic: Callable[..., str], jobs: list[Job]
) -> None:
    fuels = topic(partitions=3, name="fuels")
    flow = served(world.topic, fuels)
    sent = legs(40, tails=1)
    world.send(republished(sent[:20], partition=0))
    world.send([*republished(sent, range(20, 40), partition=1)])
    world.send([fuel(0, 5, tails=1)], fuels)
    world.run(flow)
    assert [sorted(job.attempt.shared) for job in jobs] == [[], [world.topic]]
    assert not jobs[-1].progress.evict
    assert world.results(flow, "aircraft")[b"N0"]["legs"] == len([leg for leg in sent if leg.minutes])


def test_one_topic_that_grows_while_the_flow_runs_is_shuffled_from_then_on_and_nothing_is_lost(
    world: World, topic: Callable[..., str], jobs: list[Job]
) -> None:
    fuels, sent = topic(partitions=2, name="fuels"), legs(120)
    flow, litres = served(world.topic, fuels), list(range(60))
    world.send(republished(sent, range(60)))
    world.send((fuel(place, one) for place, one in enumerate(litres)), fuels)
    grown: list[bool] = []

    def grow(_: object) -> None:
        if not grown:
            grown.append(True)
            world.topics.add_partitions(world.topic, 4)
            world.send(republished(sent, range(50, 120)))  # with copies, on other partitions

    world.run(flow, max_records=30, progress=grow)
    world.run(flow)
    assert [jobs[0].folds_while_reading, jobs[-1].folds_while_reading] == [True, False]
    assert (jobs[0].progress.evict, jobs[-1].progress.evict) == (True, False)
    assert world.results(flow, "aircraft") == expected(sent, litres)
    assert world.results(flow, "carrier") == expected(sent, litres, "carrier")
    # The other one, too: they have the same number again.
    world.topics.add_partitions(fuels, 4)
    world.send((fuel(place, 1) for place in range(8)), fuels)
    world.run(flow)
    assert jobs[-1].attempt.tasks
    assert world.results(flow, "aircraft")[b"N0"]["fuels"] == expected(sent, litres)[b"N0"]["fuels"] + 1


def test_one_topic_that_was_created_again_is_refused_and_then_folded_anew_beside_the_other(
    world: World, topic: Callable[..., str]
) -> None:
    fuels, sent = topic(partitions=2, name="fuels"), legs(40)
    flow = served(world.topic, fuels)
    world.send(republished(sent, range(20)))
    world.send((fuel(place) for place in range(8)), fuels)
    world.run(flow)
    world.topics.delete([fuels])
    world.topics.create(fuels, 2)
    world.send((fuel(place, 3) for place in range(8)), fuels)
    world.send(republished(sent, range(20, 40)))
    with pytest.raises(RunRefusedError, match=rf"topic {fuels} was created again.*--accept topic-recreated"):
        world.run(flow)
    world.run(flow, accept=["topic-recreated"])
    found = world.results(flow, "aircraft")
    assert {state["litres"] for state in found.values()} == {13}
    same({key: {**state, "fuels": 0, "litres": 0} for key, state in found.items()}, expected(sent, []))
    assert world.run(flow).records == 0


def test_a_source_that_is_added_begins_where_it_is_told_and_the_states_go_on(
    world: World, topic: Callable[..., str]
) -> None:
    fuels, sent, plans = topic(partitions=2, name="fuels"), legs(40), list[Plan]()
    one = Flow("grows").source(Topic(world.topic, payload=Leg))
    two = Flow("grows").source(Topic(world.topic, payload=Leg), served(world.topic, fuels).topics[fuels])
    one, two = (flow.aggregate("aircraft", "tail", Fields(n=count())) for flow in (one, two))
    world.send(republished(sent))
    world.run(one)
    world.send((fuel(place) for place in range(8)), fuels)
    before = world.results(one, "aircraft")
    report = world.run(two, start={fuels: "latest"}, planned=plans.append)
    assert report.records == 0
    assert [(plan.topic, [part.skipped for part in plan.partitions]) for plan in plans] == [
        (world.topic, [0, 0]),
        (fuels, [part.high for part in plans[1].partitions]),
    ]
    assert sum(part.high for part in plans[1].partitions) == 8
    world.send((fuel(place) for place in range(8)), fuels)
    assert world.run(two).records == 8
    assert world.results(two, "aircraft") == {key: {"n": state["n"] + 1} for key, state in before.items()}
    with pytest.raises(RunRefusedError, match="stage aircraft has definition"):
        world.run(one)


def test_dead_letters_go_back_to_their_own_topic_and_are_discarded_by_it(
    world: World, topic: Callable[..., str]
) -> None:
    fuels = topic(partitions=2, name="fuels")
    flow = served(world.topic, fuels)
    broken = Leg(tail="N1", carrier="AA", minutes=3).SerializeToString()
    world.send([alone(Leg(tail="N1", carrier="AA", minutes=5)), Sent(broken, b"N1")])
    world.send([fuel(1, 4), fuel(1, -4), Sent(b"no JSON", b"N1")], fuels)
    world.run(flow)
    found = {(letter.topic, letter.reason, letter.form) for letter, _ in world.dead_letters()}
    assert {(name, reason) for name, reason, _ in found} == {
        (world.topic, Reason.NOT_AN_ENVELOPE),
        (fuels, Reason.DIVERTED),
        (fuels, Reason.BAD_PAYLOAD),
    }
    fixed = json.dumps({"tail": "N1", "carrier": "AA", "litres": 1}).encode()
    result = redrive(world.settings, world.dead, apply=True, mend=lambda _, value: broken if value == broken else fixed)
    assert {place[0] for place in result.done} == {world.topic, fuels}
    world.run(flow)
    assert world.results(flow, "aircraft")[b"N1"] == {"legs": 2, "minutes": 8, "fuels": 3, "litres": 6}
    left = discard(world.settings, world.dead, flow, world.stores(flow), apply=True)
    assert not left.done, "everything was folded"


def test_the_consumer_group_shows_the_offsets_of_all_topics(world: World, topic: Callable[..., str]) -> None:
    fuels = topic(partitions=2, name="fuels")
    flow = served(world.topic, fuels)
    world.send(republished(legs(20)))
    world.send((fuel(place) for place in range(8)), fuels)
    world.run(flow, group="lag-of-two")
    names = [world.topic, fuels]
    committed = Topics(world.settings).group_offsets("lag-of-two", names)
    assert committed == {place: marks.high for place, marks in world.topics.marks(names).items()}
