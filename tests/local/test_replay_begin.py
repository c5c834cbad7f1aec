"""What a rebuild on a real broker begins with and what it leaves: snapshots, outputs, closed windows, tombstones."""

import threading
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import polars as pl
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.snapshots import Snapshot, read_snapshot
from envelope import decode
from jobs.backup import snapshot
from jobs.replay import Swapped, drop, plan_replay, pointer_of, rebuild, swap
from jobs.snapshot_places import Place
from jobs.views import states
from tests.integration.test_retire import sent
from tests.support.flows import closing, fleet
from tests.support.options import called
from tests.support.world import World, legs, republished

pytestmark = [pytest.mark.integration]


class Site:
    """A flow, and the commands on it."""

    def __init__(self, world: World, work: File) -> None:
        self.world = world
        self.work = work

    def options(self, flow: Flow[Any], **options: Any) -> dict[str, Any]:
        return {"kafka": self.world.settings, "stores": self.world.stores(flow), **options}

    def rebuild(self, flow: Flow[Any], **options: Any) -> Any:
        return called(rebuild, flow, why="a test", **self.options(flow, dead_letters=self.world.dead, **options))

    def swap(self, flow: Flow[Any], **options: Any) -> Swapped:
        return called(
            swap, flow, why="a test", **self.options(flow, dead_letters=self.world.dead, work=self.work, **options)
        )

    def delete(self, first: int) -> None:
        """Delete the records of the source below an offset."""
        admin = AdminClient({"bootstrap.servers": self.world.settings.bootstrap})
        places = [TopicPartition(self.world.topic, n, first) for n in self.world.ends(fleet(self.world.topic))]
        for future in admin.delete_records(places).values():
            future.result(30)


@pytest.fixture
def site(world: World, tmp_path: File) -> Site:
    return Site(world, tmp_path / "work")


@pytest.mark.parametrize("place", [File("fleet.snapshot"), "lmdb://copies#monday"], ids=["file", "store"])
def test_a_rebuild_from_a_snapshot_needs_no_records_from_before_it(
    place: Place, site: Site, tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world, flow, flights = site.world, fleet(site.world.topic), legs(200)
    world.send(republished(flights, range(120)))
    world.run(flow)
    saved = snapshot(flow, place, stores=world.stores(flow))
    world.send(republished(flights, range(100, 160)))
    world.run(flow)
    before = [world.results(flow, stage) for stage in ("aircraft", "carrier")]
    site.delete(min(saved.positions[world.topic].values()))
    assert (
        "begin with a snapshot that was made later (--snapshot FILE)"
        in called(plan_replay, flow, **site.options(flow)).refused[0].remedy
    )
    plan = called(plan_replay, flow, **site.options(flow, snapshot=place))
    named = place if isinstance(place, str) else str(place.absolute())
    assert (plan.records, plan.snapshot, plan.refused) == (60, named, [])
    assert pointer_of(flow, world.stores(flow)).rebuild is None

    done = site.rebuild(flow, snapshot=place, max_records=20)
    assert (done.report.records, done.behind) == (60, 0)
    assert called(plan_replay, flow, **site.options(flow)).snapshot == named
    world.send(republished(flights, range(150, 200)))
    world.run(flow)
    swapped = site.swap(flow)
    assert (swapped.live, swapped.report.records) == (2, 50)
    assert swapped.differences.comparison.differences == 0
    assert before != [world.results(flow, stage) for stage in ("aircraft", "carrier")]
    world.send(republished(flights, range(200)))  # all of them are copies
    after = [world.results(flow, stage) for stage in ("aircraft", "carrier")]
    world.run(flow)
    assert [world.results(flow, stage) for stage in ("aircraft", "carrier")] == after
    assert sum(one["legs"] for one in after[0].values()) == sum(leg.minutes > 0 for leg in flights)

    called(drop, flow, 1, stores=world.stores(flow), why="a test", accept=["no-rollback"])
    assert [world.results(flow, stage) for stage in ("aircraft", "carrier")] == after


def test_outputs_that_were_held_leave_with_the_swap(site: Site, topic: Callable[..., str]) -> None:
    world, flights, other = site.world, legs(150), topic(name="other", partitions=2)
    old, new = (fleet(world.topic).publish(out) for out in (topic(name="out"), other))
    world.send(republished(flights, range(90)))
    world.run(old)
    assert site.rebuild(new, outputs=True, max_records=25).report.outputs == sum(
        leg.minutes > 0 for leg in flights[:90]
    )
    assert world.records(other) == []
    world.send(republished(flights, range(80, 120)))
    world.run(old)
    swapped = site.swap(new)
    assert swapped.outputs == len(world.records(other)) == sum(leg.minutes > 0 for leg in flights[:120])
    world.send(republished(flights, range(110, 150)))
    world.run(new)
    records = world.records(other)
    assert len(records) == sum(leg.minutes > 0 for leg in flights)
    at: dict[tuple[bytes | None, int], list[int]] = {}
    for record in records:
        hop = decode(record.value).chain[-1]
        at.setdefault((record.key, hop.partition), []).append(hop.offset)
    assert all(found == sorted(found) for found in at.values())


@pytest.mark.parametrize("outputs", [False, True], ids=["dropped", "held"])
def test_a_rebuild_goes_on_after_its_topic_grew_unless_it_holds_outputs_in_order(
    site: Site, topic: Callable[..., str], outputs: bool
) -> None:
    world, flights, stop = site.world, legs(150), threading.Event()
    flow = fleet(world.topic).publish(topic(name="out"))
    world.send(republished(flights, range(90)))
    world.run(flow)
    site.rebuild(flow, outputs=outputs, max_records=25, progress=lambda _: stop.set(), stop=stop)
    world.topics.add_partitions(world.topic, 5)
    world.send(republished(flights, range(90, 150)))
    world.run(flow, accept=["grown-undrained"])
    if outputs:
        with pytest.raises(RunRefusedError, match="--accept grown-undrained"):
            site.rebuild(flow)
    assert site.rebuild(flow, accept=["grown-undrained"] if outputs else []).behind == 0
    for stage in ("aircraft", "carrier"):
        rebuilt = states(flow, stage, world.stores(flow), generation=2)
        assert {view.key: view.state for view in rebuilt} == world.results(flow, stage)


def newest(world: World, topic: str) -> dict[bytes | None, Snapshot | None]:
    """The last record of each key; None if it is a tombstone."""
    found: dict[bytes | None, Snapshot | None] = {}
    for record in world.records(topic):
        found[record.key] = None if record.value is None else read_snapshot(record.value)
    return found


def test_keys_that_the_rebuild_does_not_have_get_tombstones(site: Site, topic: Callable[..., str]) -> None:
    world, out = site.world, topic(name="states")
    source = fleet(world.topic, stages=0)
    old = source.aggregate("carrier", "carrier", Fields(legs=count())).publish_states(out)
    new = (
        source.filter(pl.col("carrier") != "AA")
        .aggregate("carrier", "carrier", Fields(legs=count()))
        .publish_states(out)
    )
    world.send(republished(legs(60)))
    world.run(old)
    assert b"AA" in newest(world, out)
    site.rebuild(new, redefine=True)
    swapped = site.swap(new)
    found = newest(world, out)
    assert found.pop(b"AA") is None
    assert {one.generation for one in found.values() if one} == {2}
    assert swapped.states == len(found) == len(world.results(new, "carrier"))


def test_windows_that_a_rebuild_has_closed_are_published_by_the_swap(site: Site, topic: Callable[..., str]) -> None:
    world, final = site.world, topic(name="final")
    flow = closing(world.topic, final)
    messages = sent(legs(240))
    world.send(messages[:140])
    world.run(flow)
    before = newest(world, final)
    assert len(before) > 10
    site.rebuild(flow, max_records=30)
    assert newest(world, final) == before
    world.send(messages[140:180])
    world.run(flow, max_records=20)
    live = newest(world, final)
    swapped = site.swap(flow)
    found = newest(world, final)
    assert swapped.outputs == len(found) == len(live) > len(before)
    assert {one.generation for one in found.values() if one} == {2}
    assert {key: one and one.state for key, one in found.items()} == {
        key: one and one.state for key, one in live.items()
    }
    world.send(messages[180:])
    world.run(flow)
    oracle = {one.key: read_snapshot(one.value).state for one in world.oracle(flow).outputs}
    assert {key: one and one.state for key, one in newest(world, final).items()} == oracle
