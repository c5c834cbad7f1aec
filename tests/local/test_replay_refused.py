"""What a rebuild, a swap and a rollback refuse on a real broker: one line with the remedy, and nothing is written."""

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path as File
from typing import Any

import msgspec
import pytest

from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.errors import FlowError, RunRefusedError
from aggregations.local import run_local
from aggregations.run.snapshots import Latest, read_snapshot
from aggregations.spark.checks import plan_flow
from jobs.environment import UsageError
from jobs.replay import abandon, plan_replay, pointer_of, rebuild, rollback, swap
from jobs.replaying.generations import Generations, generations_of
from jobs.views import states
from persistence.kafka import BrokerError
from persistence.pointer import Pointer, Rebuild
from tests.messages import Leg
from tests.support.flows import TOTALS, fleet, spending
from tests.support.options import called
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]


class Fleet:
    """A flow that has run, and the commands on it."""

    def __init__(self, world: World, flow: Flow[Any], work: File) -> None:
        self.world = world
        self.flow = flow
        self.work = work
        world.send(republished(legs(60)))
        world.run(flow)

    def options(self, **options: Any) -> dict[str, Any]:
        return {"kafka": self.world.settings, "stores": self.world.stores(self.flow), **options}

    def rebuild(self, **options: Any) -> Any:
        return called(rebuild, self.flow, **self.options(why="a test", dead_letters=self.world.dead, **options))

    def swap(self, **options: Any) -> Any:
        given = {"why": "a test", "dead_letters": self.world.dead, "work": self.work, **options}
        return called(swap, self.flow, **self.options(**given))

    def pointer(self) -> Pointer:
        return pointer_of(self.flow, self.world.stores(self.flow))

    def change(self, change: Callable[[Generations], Any]) -> None:
        with generations_of(self.flow, self.world.stores(self.flow)) as found:
            change(found)


@pytest.fixture
def fleet_of(world: World, tmp_path: File) -> Fleet:
    return Fleet(world, fleet(world.topic), tmp_path / "work")


def working(fleet: Fleet, worker: str) -> None:
    """Let a process be at work on the rebuild."""

    def change(found: Generations) -> None:
        pointer = found.pointer()
        assert pointer.rebuild is not None
        found.change(pointer, rebuild=msgspec.structs.replace(pointer.rebuild, worker=worker))

    fleet.change(change)


def test_two_replays_at_once(fleet_of: Fleet) -> None:
    fleet_of.rebuild()
    host = socket.gethostname()
    working(fleet_of, f"{host}/{os.getppid()}")
    before = fleet_of.pointer()
    said = rf"generation 2: another `headwater replay` is at work.*process {os.getppid()} on {host}.*--take-over"
    for command in (fleet_of.rebuild, fleet_of.swap):
        with pytest.raises(RunRefusedError, match=said):
            command()
    plan = called(plan_replay, fleet_of.flow, **fleet_of.options())  # it only reads
    assert plan.pointer.rebuild is not None
    assert plan.pointer.rebuild.process == f"process {os.getppid()} on {host}"
    with pytest.raises(RunRefusedError, match=said):
        called(abandon, fleet_of.flow, stores=fleet_of.world.stores(fleet_of.flow), why="")
    assert fleet_of.pointer() == before
    working(fleet_of, "elsewhere/1")
    with pytest.raises(RunRefusedError, match="process 1 on elsewhere"):
        fleet_of.rebuild()
    assert fleet_of.rebuild(take_over=True).behind == 0
    working(fleet_of, f"{host}/4194305")  # it has ended
    assert fleet_of.swap().done


def test_a_run_on_the_generation_that_is_rebuilt(fleet_of: Fleet) -> None:
    fleet_of.rebuild()
    with pytest.raises(RunRefusedError, match="`headwater replay` rebuilds it"):
        fleet_of.world.run(fleet_of.flow, generation=2)


def test_a_generation_that_was_run_by_hand_is_left_alone(fleet_of: Fleet) -> None:
    fleet_of.world.run(fleet_of.flow, generation=2)
    assert fleet_of.rebuild().generation == 3


def test_stores_that_are_not_those_of_the_live_generation(fleet_of: Fleet, tmp_path: File) -> None:
    stores = fleet_of.world.stores(fleet_of.flow)
    other = {**stores, "carrier": f"sqlite:///{tmp_path}/other.db"}
    with pytest.raises(RunRefusedError, match="store of stage carrier has nothing of it"):
        called(plan_replay, fleet_of.flow, kafka=fleet_of.world.settings, stores=other)
    with pytest.raises(RunRefusedError, match="contain nothing of it"):
        called(
            plan_replay, fleet_of.flow, kafka=fleet_of.world.settings, stores=dict.fromkeys(stores, other["carrier"])
        )


def test_a_topic_that_does_not_exist_any_more_or_was_created_again(fleet_of: Fleet) -> None:
    world = fleet_of.world
    world.topics.delete([world.topic])
    with pytest.raises(RunRefusedError, match="does not exist"):
        fleet_of.rebuild()
    world.topics.create(world.topic, 2)
    with pytest.raises(RunRefusedError, match="was created again"):
        fleet_of.rebuild()
    assert fleet_of.pointer() == Pointer()
    world.send(republished(legs(80), range(60, 80)))
    world.run(fleet_of.flow, accept=["topic-recreated"])
    said = r"states contain events of the former topic.*--accept lost-records"
    with pytest.raises(RunRefusedError, match=said):
        fleet_of.rebuild()
    [lost] = called(plan_replay, fleet_of.flow, **fleet_of.options()).refused
    assert "contain events of the former topic" in lost.what
    assert fleet_of.pointer() == Pointer()
    assert fleet_of.rebuild(accept=["lost-records"]).report.records == 20


def test_lookups_find_the_newest_rows_only_if_that_is_accepted(world: World, topic: Callable[..., str]) -> None:
    table = topic(name="merchants", cleanup_policy="compact")
    flow = spending(world.topic, table)
    for category in (b"food", b"toys"):
        world.send([Sent(b'{"category": "%s"}' % category, b"m0")], table)
        world.send([Sent(b'{"card": "c", "merchant": "m0", "cents": 5}', b"c")] * 3)
        world.run(flow)
    options = {"kafka": world.settings, "stores": world.stores(flow)}
    with pytest.raises(RunRefusedError, match=r"behind the lookup in table merchant .*\(--accept newest-rows\)"):
        called(rebuild, flow, why="a test", **options)
    assert [one.risk for one in called(plan_replay, flow, **options).refused] == ["newest-rows"]
    assert pointer_of(flow, world.stores(flow)) == Pointer()
    done = called(rebuild, flow, why="a test", accept=["newest-rows"], **options)
    called(rebuild, flow, why="to catch up", **options)
    found = {view.key: view.state["cents"] for view in states(flow, "category", options["stores"], generation=2)}
    assert (done.generation, found) == (2, {b"toys": 30})


def test_the_generation_of_a_settings_file(fleet_of: Fleet) -> None:
    with pytest.raises(RunRefusedError, match="generation 3: the stores contain nothing of it"):
        called(plan_replay, fleet_of.flow, **fleet_of.options(generation=3))
    fleet_of.rebuild(generation=1)
    with pytest.raises(UsageError, match=r"remove `generation` from headwater.toml before the swap"):
        fleet_of.swap(generation=1)
    fleet_of.swap()
    with pytest.raises(RunRefusedError, match=r"generation 2 is live\. Remove `generation`"):
        called(plan_replay, fleet_of.flow, **fleet_of.options(generation=1))


def test_a_swap_that_was_interrupted(fleet_of: Fleet) -> None:
    fleet_of.rebuild()
    fleet_of.change(lambda found: found.change(found.pointer(), closing=1))
    for begins in (run_local, partial(plan_flow, master="local[1]")):
        with pytest.raises(RunRefusedError, match="repeat `headwater replay --swap`"):
            called(begins, fleet_of.flow, **fleet_of.options(dead_letters=fleet_of.world.dead))
    with pytest.raises(RunRefusedError, match="Repeat --swap, or keep the live generation with --rollback"):
        fleet_of.rebuild()
    with pytest.raises(RunRefusedError, match="First keep generation 1 with --rollback"):
        called(abandon, fleet_of.flow, stores=fleet_of.world.stores(fleet_of.flow), why="")
    assert called(rollback, fleet_of.flow, **fleet_of.options(why="")).live == 1
    fleet_of.world.run(fleet_of.flow)
    with pytest.raises(RunRefusedError, match=r"it is being rebuilt, and not live.*--abandon"):
        called(rollback, fleet_of.flow, **fleet_of.options(why=""))
    assert fleet_of.pointer().rebuild == Rebuild(2, 1)


def test_a_flow_for_the_differences_that_is_not_the_live_one(fleet_of: Fleet) -> None:
    world = fleet_of.world
    other = fleet(world.topic, stages=1).aggregate("carrier", "tail", TOTALS)
    with pytest.raises(RunRefusedError, match="stage carrier was made by another definition than that of --against"):
        called(plan_replay, fleet_of.flow, **fleet_of.options(against=other))


def test_published_states_are_sent_by_the_swap_and_refuse_the_way_back(
    world: World, topic: Callable[..., str], tmp_path: File
) -> None:
    out = topic(name="states")
    flow = fleet(world.topic, stages=1).publish_states(out)
    site = Fleet(world, flow, tmp_path / "work")
    before = len(world.records(out))
    with pytest.raises(RunRefusedError, match="no earlier generation is left"):
        called(rollback, flow, **site.options(why=""))
    site.rebuild()
    with pytest.raises(RunRefusedError, match="To give it up, use --abandon"):
        called(rollback, flow, **site.options(why=""))
    assert len(world.records(out)) == before
    swapped = site.swap()
    assert swapped.states == len(world.results(flow, "aircraft")) == 8
    latest = Latest()
    for record in world.records(out):
        latest.apply(record.key or b"", read_snapshot(record.value))
    assert {snapshot.generation for _, snapshot in latest} == {2}
    assert {key: latest.state(key) for key, _ in latest} == world.results(flow, "aircraft")
    with pytest.raises(RunRefusedError, match=r"publishes its states to .*--accept snapshot-versions"):
        called(rollback, flow, **site.options(why=""))
    world.send(republished(legs(80), range(60, 80)))
    world.run(flow)
    for record in world.records(out):
        latest.apply(record.key or b"", read_snapshot(record.value))
    assert {key: latest.state(key) for key, _ in latest} == world.results(flow, "aircraft")
    assert called(rollback, flow, **site.options(why="", accept=["snapshot-versions"])).live == 1


def recreated(fleet: Fleet) -> None:
    """The live generation reads the topic to its end, then another topic of its name."""
    world = fleet.world
    world.send(republished(legs(80), range(60, 80)))
    world.run(fleet.flow)
    world.topics.delete([world.topic])
    world.topics.create(world.topic, 2)
    world.send(republished(legs(100), range(80, 100)))
    world.run(fleet.flow, accept=["topic-recreated"])


def test_a_topic_that_was_created_again_since_the_rebuild_began(fleet_of: Fleet) -> None:
    fleet_of.rebuild()
    recreated(fleet_of)
    before = fleet_of.pointer()
    said = r"generation 2: topic .* was created again since it read the former one.*--accept lost-records"
    [lost] = called(plan_replay, fleet_of.flow, **fleet_of.options()).refused
    assert "was created again since it read the former one" in lost.what
    for command in (lambda: fleet_of.swap(accept=["topic-recreated"]), fleet_of.rebuild):
        with pytest.raises(RunRefusedError, match=said):
            command()
    assert fleet_of.pointer().live == before.live == 1
    assert fleet_of.pointer().closing == 0
    fleet_of.world.run(fleet_of.flow)
    found = fleet_of.swap(accept=["topic-recreated", "lost-records"])
    assert found.differences.comparison.differences > 0  # they show the loss


def test_a_topic_that_was_created_again_since_the_swap(fleet_of: Fleet) -> None:
    fleet_of.rebuild()
    fleet_of.swap()
    recreated(fleet_of)
    options = {**fleet_of.options(), "why": "a test"}
    with pytest.raises(RunRefusedError, match=r"generation 1: topic .* was created again since it read the former one"):
        called(rollback, fleet_of.flow, **options)
    assert fleet_of.pointer().live == 2
    assert called(rollback, fleet_of.flow, **options, accept=["lost-records"]).live == 1


def aggregated(topic: str) -> Flow[Any]:
    """States that remember one position, so that each record that is read too late is lost."""
    return Flow("fleet").source(Topic(topic, Leg)).aggregate("aircraft", "tail", TOTALS, history=1)


def test_partitions_that_were_added_and_are_not_read(world: World, tmp_path: File) -> None:
    flow, stop = aggregated(world.topic), threading.Event()
    fleet = Fleet(world, flow, tmp_path / "work")
    world.topics.add_partitions(world.topic, 4)
    moved = [Leg(tail="moved", carrier="AA", minutes=1) for _ in range(16)]
    others = [alone(Leg(tail=f"X{number}", carrier="AA", minutes=1), partition=1) for number in range(40)]
    # The first two were written by a producer that did not know the new partitions.
    world.send([*others, *republished(moved, (0, 3), partition=1), *republished(moved, (6, 9, 12, 15), partition=3)])
    world.run(flow, max_records=4, stop=stop, progress=lambda _: stop.set())
    fleet.rebuild()
    with pytest.raises(RunRefusedError, match=r"partitions were added to .* It stays live"):
        fleet.swap()
    assert (fleet.pointer().live, fleet.pointer().closing) == (1, 0)
    world.run(flow, max_records=4, metadata_max_age=0)
    assert fleet.swap().differences.comparison.differences == 0
    world.run(flow)
    assert world.results(flow, "aircraft")[b"moved"]["legs"] == 6


def test_a_dead_letter_topic_that_does_not_exist_is_refused_before_anything_is_folded(fleet_of: Fleet) -> None:
    options = fleet_of.options(why="a test", dead_letters="nowhere")
    with pytest.raises(BrokerError, match="nowhere"):
        called(rebuild, fleet_of.flow, **options)
    with pytest.raises(FlowError, match="the flow's source"):
        called(rebuild, fleet_of.flow, **{**options, "dead_letters": fleet_of.world.topic})
    assert fleet_of.pointer() == Pointer()
    assert fleet_of.rebuild().report.records == 60
    with pytest.raises(BrokerError, match="nowhere"):
        called(swap, fleet_of.flow, work=fleet_of.work, **options)
    assert (fleet_of.pointer().live, fleet_of.pointer().closing) == (1, 0)
