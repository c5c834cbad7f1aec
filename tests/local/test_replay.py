"""A generation is rebuilt from a real topic while the live one goes on, and the two are swapped."""

import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path as File
from typing import Any

import pytest
from msgspec import structs

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine import group_offsets
from aggregations.engine.group_offsets import GroupOffsets
from aggregations.engine.held import HELD
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.run.binding import bind
from jobs.cli.signals import Stopped
from jobs.dead_letters.redrive import redrive
from jobs.explaining.explain import explain
from jobs.replay import Swapped, abandon, plan_replay, pointer_of, rebuild, rollback, swap
from jobs.replaying.generations import generations_of
from jobs.replaying.results import Differences
from jobs.tracing import Place
from jobs.views import states
from persistence.commit.faults import use
from persistence.errors import Fenced
from persistence.pointer import Pointer
from persistence.protocol import Write
from tests.messages import Leg
from tests.support.flows import fleet
from tests.support.options import called
from tests.support.replays import Crash, CrashAt
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]

REPEAT = GroupOffsets.repeat
DEAD = [alone(Leg(tail="N1", carrier="AA", minutes=-1)), alone(Leg(tail="N2", carrier="UA", minutes=-2))]


class Once:
    """Calls something right before the `nth` effect at a point."""

    def __init__(self, point: str, nth: int, action: Callable[[], object]) -> None:
        self._point = point
        self._left = nth
        self._action = action

    def effect(self, point: str, action: Callable[[], Any]) -> Any:
        self._left -= point == self._point
        if not self._left:
            self._left = -1
            self._action()
        return action()


class Site:
    """A flow that publishes what passes its stages, with two definitions of its second stage."""

    def __init__(self, world: World, out: str, work: File) -> None:
        self.world = world
        self.out = out
        self.work = work
        self.old = fleet(world.topic).publish(out)
        first = fleet(world.topic, stages=1)
        self.new = first.aggregate("carrier", "carrier", Fields(legs=count(), hours=total("hours"))).publish(out)

    def options(self, **options: Any) -> dict[str, Any]:
        return {"kafka": self.world.settings, "stores": self.world.stores(self.old), **options}

    def rebuild(self, flow: Flow[Any], **options: Any) -> Any:
        return called(rebuild, flow, why="hours", **self.options(dead_letters=self.world.dead, **options))

    def swap(self, flow: Flow[Any], **options: Any) -> Swapped:
        return called(swap, flow, why="hours", **self.options(dead_letters=self.world.dead, work=self.work, **options))

    def outputs(self) -> Counter[bytes | None]:
        return Counter(record.value for record in self.world.records(self.out))

    def letters(self) -> Counter[int]:
        return Counter(letter.generation for letter, _ in self.world.dead_letters())


@pytest.fixture
def site(world: World, topic: Callable[..., str], tmp_path: File) -> Site:
    return Site(world, topic(name="out"), tmp_path / "work")


def test_a_rebuild_with_another_definition_becomes_live_and_is_rolled_back(site: Site) -> None:
    world, sent = site.world, legs(200)
    world.send([*republished(sent[:100], [*range(100), *range(40, 60)]), *DEAD])
    world.run(site.old)
    offsets = world.topics.group_offsets("fleet", site.old.topics)
    outputs, letters = site.outputs(), site.letters()
    assert letters == {1: 2}
    with pytest.raises(DefinitionChangedError, match=r"stage carrier.*--redefine"):
        called(plan_replay, site.new, **site.options())
    plan = called(plan_replay, site.new, **site.options(redefine=True))
    assert (plan.live, plan.generation, plan.begun, plan.redefined) == (1, 2, False, ("carrier",))
    assert plan.records == sum(world.ends(site.old).values()) == 122
    assert plan.keys == {"aircraft": 8, "carrier": 3}
    assert plan.rate is not None
    assert plan.rate.records == 122
    assert pointer_of(site.new, world.stores(site.new)) == Pointer()

    world.send(republished(sent, range(100, 150)))  # the live generation has not read these
    done = site.rebuild(site.new, redefine=True, max_records=50)
    assert (done.generation, done.live, done.behind, done.report.records) == (2, 1, 0, 122)
    assert done.report.reasons == {"diverted": 2}
    world.run(site.old)
    assert (site.letters(), world.topics.group_offsets("fleet", site.old.topics) == offsets) == (letters, False)
    offsets, outputs = world.topics.group_offsets("fleet", site.old.topics), site.outputs()
    shown: list[Differences] = []
    swapped = site.swap(site.new, agreed=lambda differ: shown.append(differ) or True)  # type: ignore[func-returns-value]
    assert (swapped.done, swapped.live, swapped.previous, swapped.dead_letters) == (True, 2, 1, 2)
    assert swapped.report.records == 50
    assert swapped.differences.uncompared == ("carrier",)
    assert swapped.differences.comparison.stages["aircraft"].same == 8
    assert shown == [swapped.differences]
    assert site.letters() == {1: 2, 2: 2}
    assert (site.outputs(), world.topics.group_offsets("fleet", site.old.topics)) == (outputs, offsets)

    world.send(republished(sent, range(130, 200)))
    with pytest.raises(DefinitionChangedError):
        world.run(site.old)
    world.run(site.new)
    world.check(site.new)
    assert "hours" in world.results(site.new, "carrier")[b"AA"]
    assert max(site.outputs().values()) == 1
    assert site.outputs().total() == sum(leg.minutes != 0 for leg in sent)

    assert called(rollback, site.old, why="a mistake", **site.options()).live == 1
    world.run(site.old)
    world.check(site.old)
    changes = pointer_of(site.old, world.stores(site.old)).changes
    assert [(one.what, one.generation, one.why) for one in changes] == [
        ("rebuild", 2, "hours"),
        ("swap", 2, "hours"),
        ("rollback", 1, "a mistake"),
    ]


def test_dead_letters_of_a_rebuild_fill_its_holes_after_the_swap(site: Site) -> None:
    world = site.world
    world.send([*republished(legs(30)), *DEAD])
    world.run(site.old)
    site.rebuild(site.old)
    site.swap(site.old)
    before = world.results(site.old, "carrier")[b"AA"]["legs"]

    def mended(key: bytes | None, _value: bytes | None) -> bytes | None:
        return alone(Leg(tail=(key or b"").decode(), carrier="AA", minutes=1000)).value

    redrive(world.settings, world.dead, apply=True, mend=mended)
    report = world.run(site.old)
    assert report.records == 4
    assert report.verdicts["aircraft"]["redriven"] == 2  # and not those of generation 1
    assert world.results(site.old, "carrier")[b"AA"]["legs"] == before + 2


def test_a_rebuild_names_the_records_of_a_log_that_was_written_anew_as_the_live_generation_does(site: Site) -> None:
    world, branches = site.world, ((7, 3),)
    world.send([*republished(legs(30)), *DEAD])
    world.run(site.old)
    with generations_of(site.old, bind(site.old, world.stores(site.old))) as found:
        for _, store in found.run.distinct_stores():
            noted = store.load_manifest(found.ref(1))
            assert noted is not None
            at = {place: structs.replace(one, branches=branches) for place, one in noted.positions[world.topic].items()}
            epoch = store.acquire_epoch(found.ref(1))
            store.save_manifest(found.ref(1), structs.replace(noted, epoch=epoch, positions={world.topic: at}))
    site.rebuild(site.old)
    with generations_of(site.old, bind(site.old, world.stores(site.old))) as found:
        assert {one.branches for one in found.progress(2).values()} == {branches}


def test_dead_letters_of_a_rebuild_that_are_dropped_are_never_folded(site: Site) -> None:
    world = site.world
    world.send([*republished(legs(30)), *DEAD])
    world.run(site.old)
    site.rebuild(site.old)
    swapped = site.swap(site.old, drop_letters=True)
    assert (swapped.done, swapped.dropped, swapped.dead_letters) == (True, 2, 0)
    assert site.letters() == {1: 2}
    views = [view for stage in ("aircraft", "carrier") for view in world.views(site.old, stage).values()]
    assert not any(view.histories.holes for view in views)
    letter, _ = world.dead_letters()[0]  # generation 1 has sent it
    given = {"kafka": world.settings, "stores": world.stores(site.old), "dead_letters": world.dead}
    [found] = explain(site.old, Place(letter.topic, letter.partition, letter.offset), **given)
    assert found.why.endswith("the dead-letter topic does not have it: retention deleted it, or a swap dropped it")
    before = world.results(site.old, "carrier")
    redrive(world.settings, world.dead, apply=True)
    world.send(DEAD)
    report = world.run(site.old)
    assert report.records == 4
    assert report.verdicts["aircraft"]["redriven"] == 0
    assert site.letters() == {1: 2, 2: 2}  # of the two records that were sent again; those of generation 1 are copies
    assert world.results(site.old, "carrier") == before


def test_a_run_at_work_is_stopped_by_the_swap(site: Site) -> None:
    world = site.world
    world.send(republished(legs(40)))
    world.run(site.old)
    site.rebuild(site.old)
    world.send(republished(legs(60), range(40, 60)))
    swapped: list[Swapped] = []
    with pytest.raises(Fenced):
        world.run(site.old, max_records=5, progress=lambda _: swapped or swapped.append(site.swap(site.old)))
    assert swapped[0].done
    before = {view.key: view for view in world.views(site.old, "aircraft").values()}
    with pytest.raises(RunRefusedError, match="generation 2 is live"):
        world.run(site.old, generation=1)
    assert {view.key: view for view in world.views(site.old, "aircraft").values()} == before
    world.run(site.old)
    world.check(site.old)
    assert site.outputs().total() >= sum(leg.minutes != 0 for leg in legs(60))


def test_what_cannot_be_rebuilt_is_refused_and_nothing_is_written(site: Site, topic: Callable[..., str]) -> None:
    world = site.world
    with pytest.raises(RunRefusedError, match="contain nothing of it"):
        site.rebuild(site.old)
    world.send(republished(legs(40)))
    world.run(site.old)
    with pytest.raises(RunRefusedError, match="no generation is being rebuilt"):
        site.swap(site.old)
    with pytest.raises(RunRefusedError, match="no earlier generation"):
        called(rollback, site.old, why="", **site.options())
    with pytest.raises(RunRefusedError, match="no generation is being rebuilt"):
        called(abandon, site.old, stores=world.stores(site.old), why="")
    assert pointer_of(site.old, world.stores(site.old)) == Pointer()


def test_records_that_kafka_has_deleted_are_not_rebuilt_unless_the_loss_is_accepted(site: Site) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    world = site.world
    world.send(republished(legs(60)))
    world.run(site.old)
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    for future in admin.delete_records([TopicPartition(world.topic, 0, 5)]).values():
        future.result(30)
    plan = called(plan_replay, site.old, **site.options())  # it shows the loss
    assert {(one.partition, one.start, one.first): one.deleted for one in plan.ranges if one.deleted} == {(0, 0, 5): 5}
    assert [one.risk for one in plan.refused] == ["lost-records"]
    assert plan.records == sum(world.ends(site.old).values()) - 5
    with pytest.raises(RunRefusedError, match=r"from offset 0 on.*offsets 0 to 4 were deleted.*lost-records"):
        site.rebuild(site.old)
    assert pointer_of(site.old, world.stores(site.old)) == Pointer()
    done = site.rebuild(site.old, accept=["lost-records"])
    assert done.report.records == sum(world.ends(site.old).values()) - 5
    swapped = site.swap(site.old, accept=["lost-records"], agreed=lambda _: False)
    assert not swapped.done
    assert swapped.differences.comparison.differences > 0
    world.run(site.old)
    assert called(abandon, site.old, stores=world.stores(site.old), why="incomplete").rebuild is None
    plan = called(plan_replay, site.old, **site.options(accept=["lost-records"]))
    assert (plan.generation, [*plan.refused]) == (3, [])
    end = world.ends(site.old)[0]
    world.send(republished(legs(90), range(60, 90)))
    for future in admin.delete_records([TopicPartition(world.topic, 0, end + 1)]).values():
        future.result(30)
    plan = called(
        plan_replay, site.old, **site.options()
    )  # what the live generation has not read is no loss of the rebuild
    assert f"offsets 0 to {end - 1} were deleted" in plan.refused[0].what


def test_a_dead_letter_that_another_command_holds_while_others_are_sent_is_kept(site: Site) -> None:
    world = site.world
    world.send([*republished(legs(30)), *DEAD])
    world.run(site.old)
    site.rebuild(site.old)

    def held_since() -> None:
        with generations_of(site.old, world.stores(site.old)) as found:
            ref, store = found.ref(2), found.stores[0]
            epoch = store.acquire_epoch(ref)
            store.save(ref.stage(HELD), [Write(b"new", 0, b"a letter", due=epoch)], epoch=epoch, batch=1)

    with use(Once("held", 2, held_since)), pytest.raises(Fenced):
        site.swap(site.old)
    with generations_of(site.old, world.stores(site.old)) as found:
        assert b"new" in dict(found.stores[0].scan(found.ref(2).stage(HELD)))
        assert found.pointer().closing == 0


def test_a_signal_in_the_second_attempt_of_a_swap_leaves_the_live_generation_as_it_is(site: Site) -> None:
    def died(_: Differences) -> bool:
        raise Crash

    def interrupted(*_: object, **__: object) -> Any:
        raise Stopped

    def pointer() -> Pointer:
        return pointer_of(site.old, world.stores(site.old))

    world = site.world
    world.send(republished(legs(30)))
    world.run(site.old)
    site.rebuild(site.old)
    with pytest.raises(Crash):
        site.swap(site.old, agreed=died)
    assert pointer().closing == 1
    with pytest.raises(Stopped):
        site.swap(site.old, runner=interrupted, take_over=True)
    left = pointer()
    assert left.rebuild is not None
    assert (left.live, left.closing, left.rebuild.worker) == (1, 0, "")
    world.send(republished(legs(40), range(30, 40)))
    world.run(site.old)
    world.check(site.old)


def test_a_rebuild_that_died_between_the_starts_of_two_topics_begins_where_the_flow_began(
    site: Site, topic: Callable[..., str]
) -> None:
    world, other = site.world, topic(name="more")
    leg = Json({"tail": str})
    flow = (
        Flow("fleet")
        .source(Topic(world.topic, leg, envelope=False), Topic(other, leg, envelope=False))
        .aggregate("aircraft", "tail", Fields(n=count()), co_partitioned=False)
    )
    for name in (world.topic, other):
        world.send([Sent(b'{"tail": "N1"}', b"N1")] * 3, topic=name)
    world.run(flow, start="latest")
    for name in (world.topic, other):
        world.send([Sent(b'{"tail": "N1"}', b"N1")] * 2, topic=name)
    world.run(flow)
    for nth in range(1, 20):
        stores = world.stores(flow)
        with use(CrashAt(nth, applied=True)), suppress(Crash, RuntimeError):
            called(rebuild, flow, why="dies", kafka=world.settings, stores=stores, take_over=True)
            break
        done = called(rebuild, flow, why="again", kafka=world.settings, stores=stores, take_over=True)
        [found] = states(flow, "aircraft", stores, generation=done.generation)
        assert found.state == {"n": 4}, nth
        called(abandon, flow, stores=stores, why="the next one")
    assert nth > 5


def test_a_rebuild_that_adds_a_lookup_reads_its_table_before_what_looks_it_up(
    site: Site, topic: Callable[..., str]
) -> None:
    world, table = site.world, topic(name="owners", partitions=2)
    source = Flow("fleet").source(Topic(world.topic, Json({"tail": str}), envelope=False))
    source = source.aggregate("aircraft", "tail", Fields(n=count()))
    owners = Topic(table, Json({"owner": str}), envelope=False)
    joined = source.lookup("owners", owners, key="tail", columns=["owner"], missing="drop")
    old, new = (one.aggregate("owner", key, Fields(n=count())) for one, key in ((source, "tail"), (joined, "owner")))
    tails = [b"N1", b"N2", b"N3"]
    world.send([Sent(b'{"tail": "%s"}' % tail, tail) for tail in tails * 3])
    world.send(
        [Sent(b'{"owner": "%s"}' % owner, tail) for tail, owner in zip(tails, (b"a", b"b", b"a"), strict=True)],
        topic=table,
    )
    options = {"kafka": world.settings, "stores": world.stores(new), "dead_letters": world.dead}
    world.run(old)
    called(rebuild, new, why="owners", redefine=True, accept=["newest-rows"], **options)
    assert called(swap, new, why="owners", accept=["newest-rows"], work=site.work, **options).done
    world.run(new)
    assert world.results(new, "owner") == {b"a": {"n": 6}, b"b": {"n": 3}}


def test_a_store_that_does_not_keep_keys_in_order(site: Site, redis_url: str) -> None:
    world = site.world
    source = Flow(f"fleet-{uuid.uuid4().hex}").source(Topic(world.topic, payload=Leg))
    flow = source.aggregate("aircraft", "tail", Fields(n=count())).aggregate("carrier", "carrier", Fields(n=count()))
    world.urls = {"aircraft": redis_url, "carrier": f"lmdb://{world.directory}/states"}
    world.send(republished(legs(60)))
    world.run(flow)
    options = {"kafka": world.settings, "stores": world.stores(flow)}
    called(rebuild, flow, why="lost states", **options)
    plan = called(plan_replay, flow, work=site.work, **options)
    assert plan.differences is not None
    swapped = called(swap, flow, why="lost states", work=site.work, **options)
    for found in (plan.differences, swapped.differences):
        assert {stage: one.same for stage, one in found.comparison.stages.items()} == {"aircraft": 8, "carrier": 3}
        assert found.comparison.differences == 0
    assert pointer_of(flow, world.stores(flow)).live == 2


def test_an_idle_run_that_a_swap_has_fenced_sends_nothing_and_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    world = site.world
    world.send(republished(legs(40)))
    world.run(site.old)
    site.rebuild(site.old)
    before = site.outputs()

    def fenced(act: Callable[[], object]) -> None:
        """A run that has nothing to read is fenced by a swap; then something happens, and it ends."""
        idle, ended = threading.Event(), list[BaseException]()
        monkeypatch.setattr(GroupOffsets, "repeat", lambda *given: (idle.set(), REPEAT(*given)))

        def run() -> None:
            try:
                world.run(site.old, until_caught_up=False, trigger_seconds=0.1)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert idle.wait(30)
        site.swap(site.old)
        act()
        thread.join(30)
        assert [type(one) for one in ended] == [Fenced]

    fenced(lambda: world.send(republished(legs(60), range(40, 60))))
    assert site.outputs() == before
    site.rebuild(site.old)
    fenced(lambda: monkeypatch.setattr(group_offsets, "OFFSETS_SECONDS", 0.0))
    world.run(site.old)
    world.check(site.old)
