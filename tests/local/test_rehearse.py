"""Two definitions of a flow are compared on the history of a real broker."""

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.windows import tumbling
from aggregations.errors import RunRefusedError
from jobs.refolding.rehearse import Rehearsal, rehearse
from tests.messages import Leg
from tests.support.flows import FUELS, fleet, relay
from tests.support.options import called
from tests.support.refolding import at_times, delete_before, history
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]


def rehearsed(world: World, flow: Flow[Any], against: Flow[Any], *ranges: str, **options: Any) -> Rehearsal:
    work = world.directory / "work"
    try:
        return called(rehearse, flow, against, kafka=world.settings, ranges=ranges, work=work, **options)
    finally:
        assert [one.name for one in work.iterdir()] == ["lock"] if work.exists() else True


def published(world: World, target: str, *, doubled: str = "") -> Flow[Any]:
    """Two stages behind a filter, which publish each leg; minutes of one carrier may count twice."""
    minutes = pl.when(pl.col("carrier") == doubled).then(pl.col("minutes") * 2).otherwise(pl.col("minutes"))
    return (
        Flow("fleet")
        .source(Topic(world.topic, payload=Leg))
        .filter(pl.col("minutes") != 0)
        .divert(pl.col("minutes") < 0)
        .aggregate("aircraft", "tail", Fields(legs=count(), worst=maximum("minutes")))
        .publish(target)
        .aggregate("carrier", "carrier", Fields(legs=count(), minutes=total(minutes)))
    )


def test_the_same_definition_makes_the_same_states_and_nothing_leaves(world: World, topic: Callable[..., str]) -> None:
    sent, target = history(world), topic(name="out")
    found = rehearsed(world, published(world, target), published(world, target))
    assert not found.differs
    assert found.old == found.new
    assert found.new.records == len(world.records())
    assert sum(found.new.dead_letters.values()) == 2
    assert found.new.outputs == sum(leg.minutes > 0 for leg in sent)
    assert found.comparison.stages["aircraft"].same == len({leg.tail for leg in sent if leg.minutes})
    assert world.records(target) == world.records(world.dead) == []
    assert world.topics.group_offsets("fleet", [world.topic]) == {}


def test_partitions_that_are_added_meanwhile_are_not_read(world: World, topic: Callable[..., str]) -> None:
    flow, told = fleet(world.topic).publish(topic(name="out")), list[str]()

    def grow(what: str, _done: int, _total: int | None) -> None:
        if not told and what.startswith("records folded"):
            world.topics.add_partitions(world.topic, 3)
            told.append(what)

    world.send(republished(legs(150)))
    found = rehearsed(world, flow, flow, max_records=20, progress=grow)
    assert told == ["records folded with the old definition"]
    assert not found.differs
    assert found.new.records == 150


def test_another_definition_changes_exactly_the_keys_that_it_changes(world: World, topic: Callable[..., str]) -> None:
    sent, target = history(world), topic(name="out")
    found = rehearsed(world, published(world, target, doubled="AA"), published(world, target))
    assert found.differs
    assert found.comparison.stages["aircraft"].differences == 0
    carriers = found.comparison.stages["carrier"]
    doubled = sum(leg.minutes for leg in sent if leg.carrier == "AA")
    assert (carriers.changed, carriers.same, [one.key for one in carriers.sample]) == (1, 2, [b"AA"])
    assert (carriers.fields["minutes"].total, carriers.fields["legs"].changed) == (doubled, 0)
    only = rehearsed(world, published(world, target, doubled="AA"), published(world, target), keys=[b"DL"])
    assert (only.differs, only.new.states) == (False, {"carrier": 1})
    stage = rehearsed(world, published(world, target, doubled="AA"), published(world, target), stages=["aircraft"])
    assert (stage.differs, list(stage.comparison.stages)) == (False, ["aircraft"])


def test_dead_letters_outputs_and_stages_of_one_definition_are_differences(
    world: World, topic: Callable[..., str]
) -> None:
    history(world)
    source = Flow("fleet").source(Topic(world.topic, payload=Leg))
    diverts = source.divert(pl.col("minutes") < 0)
    fold = Fields(legs=count())
    found = rehearsed(world, source.aggregate("aircraft", "tail", fold), diverts.aggregate("aircraft", "tail", fold))
    assert found.differs
    assert sum(found.old.dead_letters.values()) == 1 + sum(found.new.dead_letters.values())
    target = topic(name="out")
    plain = source.aggregate("aircraft", "tail", fold)
    found = rehearsed(world, plain.publish(target), plain)
    assert (found.differs, found.comparison.differences, found.old.outputs) == (True, 0, 0)
    assert found.new.outputs == 201
    found = rehearsed(world, plain.aggregate("carrier", "carrier", fold), plain)
    assert (found.comparison.stages["carrier"].only_new, found.comparison.stages["aircraft"].differences) == (3, 0)


def test_a_part_of_history_is_folded(world: World) -> None:
    sent = legs(60)
    world.send([alone(leg, partition=i % 2) for i, leg in enumerate(sent)])
    flow = Flow("all").source(Topic(world.topic, payload=Leg))
    flow = flow.aggregate("all", pl.lit("all"), Fields(legs=count()), co_partitioned=False)
    for ranges, records in (
        ([], 60),
        ([world.topic], 60),
        ([f"{world.topic}:1"], 30),
        ([f"{world.topic}:0:3-9", f"{world.topic}:1:29-29"], 8),
        (["2020-01-01T00:00:00Z/"], 60),
    ):
        found = rehearsed(world, flow, flow, *ranges)
        assert (found.new.records, found.history.records) == (records, records)
        assert not found.differs
    assert rehearsed(world, flow, flow, f"{world.topic}:0:3-9").history.as_json() == {world.topic: {"0": [3, 10]}}


def test_what_the_topics_do_not_have_is_refused(world: World) -> None:
    world.send(alone(leg, partition=0) for leg in legs(20))
    delete_before(world, (0, 5))
    flow = fleet(world.topic)
    for ranges, said in (
        (["other"], "the flow reads"),
        ([f"{world.topic}:7"], "partitions 0 to 1"),
        ([f"{world.topic}:0:9-6"], "reversed"),
        ([f"{world.topic}:0:4-9"], "its log begins at 5"),
        ([f"{world.topic}:0:6-20"], "its last record is 19"),
        ([f"{world.topic}:0:20-30"], "ends before offset 20"),
        ([f"{world.topic}:0:6-7", f"{world.topic}:0:9-9"], "several ranges"),
        (["2020-01-01T00:00:00Z/"], "begins at 5"),
        (["2099-01-01T00:00:00Z/"], "no record of these times"),
        (["/1999-01-01T00:00:00Z"], "no record of these times"),
    ):
        with pytest.raises(RunRefusedError, match=said) as refused:
            rehearsed(world, flow, flow, *ranges)
        assert "\n" not in str(refused.value)
    with pytest.raises(RunRefusedError, match="no stage 'ship'"):
        rehearsed(world, flow, flow, stages=["ship"])
    with pytest.raises(RunRefusedError, match="no state of key N99"):
        rehearsed(world, flow, flow, keys=[b"N99"])
    missing = fleet("nowhere")
    with pytest.raises(RunRefusedError, match="nowhere"):
        rehearsed(world, missing, missing)


def test_a_flow_without_a_stage_is_compared_by_what_it_publishes(world: World, topic: Callable[..., str]) -> None:
    history(world)
    target = topic(name="out")
    same = rehearsed(world, relay(world.topic, target), relay(world.topic, target))
    assert (same.differs, same.new.outputs > 200, world.records(target)) == (False, True, [])
    fewer = Flow("relay").source(Topic(world.topic, Leg)).filter(pl.col("carrier") != "AA").publish(target)
    assert rehearsed(world, fewer, relay(world.topic, target)).differs


def test_windows_that_are_published_when_they_close_are_counted_and_not_sent(
    world: World, topic: Callable[..., str]
) -> None:
    target, fold = topic(name="closed"), Fields(legs=count())
    source = Flow("closing").source(Topic(world.topic, Leg))
    flow = source.aggregate("window", "tail", fold, window=tumbling("10m", retention="10m"))
    flow = flow.publish_states(target, on="close")
    world.send(at_times(legs(200)))
    found = rehearsed(world, flow, flow)
    assert found.new.outputs > 20, found.as_json()
    assert (found.differs, world.records(target)) == (False, [])
    world.run(flow, max_records=50)
    assert len(world.records(target)) == found.new.outputs


def test_a_definition_with_another_source_reads_that_as_well(world: World, topic: Callable[..., str]) -> None:
    history(world)
    fuels = topic(partitions=2, name="fuels")
    world.send([Sent(b'{"tail": "N1", "carrier": "AA", "litres": 3}', b"N1") for _ in range(4)], fuels)
    before = Flow("served").source(Topic(world.topic, payload=Leg)).filter(pl.col("minutes") > 0)
    fold = Fields(legs=count("minutes"))
    after = before.merge(Flow("fuels").source(Topic(fuels, FUELS, envelope=False)))
    found = rehearsed(world, after.aggregate("aircraft", "tail", fold), before.aggregate("aircraft", "tail", fold))
    assert found.new.records - found.old.records == 4
    assert found.comparison.differences == 0
