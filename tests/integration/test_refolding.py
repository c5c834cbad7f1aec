"""History on a real broker is folded again: with another definition, and against the live states."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.local import executor, run_local
from aggregations.report import Report
from jobs.backup import snapshot
from jobs.refolding.audit import Audit, audit
from jobs.refolding.rehearse import Rehearsal, rehearse
from persistence.protocol import FlowRef, Write
from persistence.record import decode_record, encode_record
from persistence.registry import open_store
from tests.messages import Leg
from tests.support.flows import fleet, totals
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]

BEGIN_US = 1_600_000_000_000_000
MINUTE_US = 60_000_000


@pytest.fixture(params=[0, executor.FEW_RECORDS], ids=["compiled", "by message"])
def world(
    request: pytest.FixtureRequest,
    kafka: str,
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    monkeypatch.setattr(executor, "FEW_RECORDS", request.param)
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, runner=run_local)
    with closing(made) as world:
        yield world


def history(world: World, count: int = 200) -> list[Any]:
    """Legs with copies, some of them late, records without an envelope and diverted ones."""
    sent = legs(count)
    again = [*range(count), *range(count // 2, count)]
    poison = [Sent(b"no envelope", b"N1"), alone(Leg(tail="N1", carrier="AA", minutes=-1))]
    world.send([*republished(sent, again[: count // 2]), *poison, *republished(sent, again[count // 2 :])])
    return sent


def rehearsed(world: World, flow: Flow[Any], against: Flow[Any], *ranges: str, **options: Any) -> Rehearsal:
    work = world.directory / "work"
    try:
        return rehearse(flow, against, kafka=world.settings, ranges=ranges, work=work, **options)
    finally:
        assert [one.name for one in work.iterdir()] == ["lock"] if work.exists() else True


def audited(world: World, flow: Flow[Any], **options: Any) -> Audit:
    work = world.directory / "work"
    before = untouched(world, flow)
    try:
        return audit(flow, kafka=world.settings, stores=world.stores(flow), work=work, **options)
    finally:
        assert [one.name for one in work.iterdir()] == ["lock"]
        assert untouched(world, flow) == before


def untouched(world: World, flow: Flow[Any]) -> Any:
    """The live states, with their versions, and what is in the dead-letter topic."""
    found = [{key: (one.state, one.version, one.epoch) for key, one in views.items()} for views in world.untimed(flow)]
    return found, world.manifest(flow), len(world.records(world.dead))


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


def delete_before(world: World, *places: tuple[int, int]) -> None:
    """Delete the records of the source before these offsets, by partition, as retention does."""
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    wanted = [TopicPartition(world.topic, partition, offset) for partition, offset in places]
    for deleted in admin.delete_records(wanted).values():
        deleted.result(20)


def tamper(world: World, flow: Flow[Any], stage: str, key: bytes, **changed: Any) -> None:
    """Change the state of a key in its store, as an error of the engine would."""
    ref = FlowRef(flow.name, 1)
    with closing(open_store(world.stores(flow)[stage])) as store:
        stored = store.load(ref.stage(stage), [key])[key]
        record = decode_record(stored.value, ref.stage(stage), key)
        wrong = encode_record(msgspec.structs.replace(record, state={**record.state, **changed}))
        store.save(
            ref.stage(stage), [Write(key, stored.version, wrong)], epoch=store.installed_epoch(ref), batch=1_000_000
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
        (["/2020-01-01T00:00:00Z"], 0),
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


def test_live_states_without_an_error_have_not_drifted(world: World) -> None:
    sent, flow = history(world), fleet(world.topic)
    world.run(flow, max_records=30)
    found = audited(world, flow)
    assert not found.drifted
    assert found.live == found.folded.states
    assert found.folded.records == len(world.records())
    assert found.comparison.stages["aircraft"].same == len(totals(sent, "tail"))
    world.send(republished(sent, range(150, 200)))
    assert audited(world, flow).folded.records == found.folded.records  # the flow has not read more
    world.run(flow)
    assert not audited(world, flow).drifted


def test_a_live_state_with_an_error_has_drifted(world: World) -> None:
    sent, flow = history(world), fleet(world.topic)
    world.run(flow)
    truth = totals(sent, "carrier")
    tamper(world, flow, "carrier", b"AA", minutes=truth[b"AA"]["minutes"] - 7)
    found = audited(world, flow)
    assert found.drifted
    carriers = found.comparison.stages["carrier"]
    assert (carriers.changed, carriers.fields["minutes"].total) == (1, 7)
    [one] = carriers.sample
    assert (one.key, one.new) == (b"AA", truth[b"AA"])
    assert found.comparison.stages["aircraft"].differences == 0
    assert not audited(world, flow, stages=["aircraft"]).drifted
    assert not audited(world, flow, keys=[b"DL"]).drifted
    with pytest.raises(RunRefusedError, match="no state of key N99"):
        audited(world, flow, keys=[b"N99"])


def test_an_audit_begins_with_a_snapshot_when_the_beginning_was_deleted(world: World, tmp_path: Path) -> None:
    sent, flow, file = legs(200), fleet(world.topic), tmp_path / "fleet.snapshot"
    world.send(republished(sent, range(120)))
    world.run(flow)
    snapshot(flow, file, stores=world.stores(flow))
    world.send(republished(sent, range(80, 200)))
    world.run(flow)
    ends = world.ends(flow)
    delete_before(world, (0, 1), (1, 1))
    with pytest.raises(RunRefusedError, match="--snapshot"):
        audited(world, flow)
    found = audited(world, flow, snapshot=file)
    assert not found.drifted
    assert found.folded.records < len(world.records())
    tamper(world, flow, "aircraft", sent[0].tail.encode(), legs=0)
    assert audited(world, flow, snapshot=file).comparison.differences == 1
    delete_before(world, *((partition, end) for partition, end in ends.items()))
    with pytest.raises(RunRefusedError, match="later snapshot"):
        audited(world, flow, snapshot=file)
    later = tmp_path / "later.snapshot"
    snapshot(flow, later, stores=world.stores(flow))
    assert audited(world, flow, snapshot=later).folded.records == 0


def test_states_that_cannot_be_compared_are_refused(world: World, tmp_path: Path) -> None:
    history(world)
    flow = fleet(world.topic)
    with pytest.raises(RunRefusedError, match="contain nothing of it"):
        audit(flow, kafka=world.settings, stores=world.stores(flow), work=tmp_path / "work")
    stop = threading.Event()
    told: list[str] = []

    def at_work(_: Report) -> None:
        with pytest.raises(RunRefusedError, match="a run is at work"):
            audited(world, flow)
        told.append("refused")
        stop.set()

    world.run(flow, max_records=50, until_caught_up=False, progress=at_work, stop=stop)
    assert told == ["refused"]
    assert not audited(world, flow).drifted
    with pytest.raises(DefinitionChangedError, match="with the code that made them"):
        audited(world, published(world, "out"))
    with pytest.raises(RunRefusedError, match="no stage 'ship'"):
        audited(world, flow, stages=["ship"])
