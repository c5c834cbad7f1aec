"""What Redis and Cassandra keep beside live states: held outputs, snapshots, and a generation that is rebuilt."""

import uuid
from contextlib import closing

import pytest

from aggregations.definition.flow import Flow
from aggregations.engine.held import forget_held
from aggregations.per_message.publishing import OutputMessage
from aggregations.run.held_outputs import HELD_OUTPUTS, held_outputs, hold_outputs
from aggregations.run.memory import MemoryRunner
from envelope import Node
from jobs.backup import restore, snapshot
from jobs.snapshot_places import remove
from persistence.cassandra import apply_schema
from persistence.names import FlowRef
from persistence.registry import open_store
from persistence.snapshot_store import snapshot_ref
from tests.support.pure import FLEET, bare, fresh_store, leg
from tests.support.replays import NEW, Land

pytestmark = [pytest.mark.integration]


@pytest.fixture(params=["redis", "cassandra"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}?prefix=held-{uuid.uuid4().hex[:8]}"
    keyspace = f"{request.getfixturevalue('cassandra_url')}/held_{uuid.uuid4().hex[:8]}?replication=1&buckets=8"
    apply_schema(keyspace)
    return keyspace


def test_outputs_are_read_in_the_order_of_attempts_and_removed(url: str) -> None:
    flow = FlowRef(f"held-{uuid.uuid4().hex}", 2)
    made = [OutputMessage("out", b"k%d" % (n % 7), b"v" * 3_000, own=Node("legs", 0, n, "")) for n in range(600)]
    with closing(open_store(url)) as store:
        epoch = store.acquire_epoch(flow)
        for attempt in (3, 1, 2, 2):
            part = made[(attempt - 1) * 200 : attempt * 200]
            hold_outputs(store, flow, part, epoch=epoch, batch=attempt, attempt=attempt)
        assert [(one.key, one.value) for one in held_outputs(store, flow)] == [(one.key, one.value) for one in made]
        assert len([*store.scan(flow.stage(HELD_OUTPUTS))]) == 9
        forget_held(store, flow.stage(HELD_OUTPUTS), epoch=epoch)
        assert [*held_outputs(store, flow)] == []
        store.drop(flow)
        assert store.installed_epoch(flow) == 0


def test_a_snapshot_is_read_replaced_and_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persistence.snapshot_store._BYTES", 1_000)
    flow = Flow(f"held-{uuid.uuid4().hex}").source(bare()).aggregate("aircraft", "tail", FLEET)
    live, place = {"aircraft": fresh_store()}, f"{url}#monday"
    parts = [[leg(n, f"N{n % 50}") for n in range(begin, begin + 100)] for begin in (0, 100)]
    for number, part in enumerate(parts):
        with closing(MemoryRunner(flow, live, ends={})) as run:
            run.process(part)
        saved = snapshot(flow, place, stores=live, replace=bool(number))
    target = {"aircraft": url}  # beside the snapshot, of which it sees nothing
    assert restore(flow, place, stores=target).states == saved.states == {"aircraft": 50}
    with closing(MemoryRunner(flow, target, ends={})) as copy, closing(MemoryRunner(flow, live, ends={})) as run:
        assert copy.results("aircraft") == run.results("aircraft")
        assert {*copy.process(parts[0]).verdicts["aircraft"]} == {"duplicate"}
    ref = snapshot_ref(flow.name, "monday")
    with closing(open_store(url)) as store:
        assert len([*store.scan(ref)]) == -(-saved.bytes // 1_000) + 1
        remove(place, flow.name)
        assert [*store.scan(ref)] == []
        assert store.load_manifest(FlowRef(flow.name)) is not None


def test_a_generation_is_rebuilt_swapped_in_taken_back_and_dropped(url: str) -> None:
    land = Land({"aircraft": url, "carrier": url}, length=12)
    land.go_on(5)
    land.rebuild(NEW)
    land.length = 20
    land.go_on(4)
    assert land.swap().done
    land.go_on(20)  # the run of generation 1 was fenced
    land.go_on(20)
    assert land.position(2) == 20
    assert land.results(2) == land.expected(2, 20)
    assert land.roll_back().live == 1
    land.length = 24
    land.go_on(20)  # that of generation 2 was fenced, too
    land.go_on(20)
    assert land.results(1) == land.expected(1, 24)
    assert {*land.published} == {*range(1, 24)}
    land.drop(2)
    assert land.results(2) == {"aircraft": {}, "carrier": {}}
