"""A snapshot in a file or in a store is of one batch; restored into empty stores, the flow continues exactly."""

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from jobs.backup import restore, snapshot
from jobs.cli.errors import Exit
from jobs.environment import UsageError
from jobs.snapshot_places import Place, remove, shown
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Fenced, Transient
from persistence.findings import Finding
from persistence.memory import MemoryStore
from persistence.memory import open_store as memory
from persistence.names import FlowRef
from persistence.protocol import Stored
from persistence.registry import open_store
from persistence.snapshot_store import SnapshotStoreWriter, snapshot_ref
from tests.support.cli import run as headwater
from tests.support.pure import batch, fresh_store, leg
from tests.unit.test_backup import FLOW, KINDS, Crash, crash, held, ran, store, stores
from tests.unit.test_filter_steps import NUMBERS, counted, order
from tests.unit.test_lookups import by_category, merchant, paid

SNAPSHOTS = FlowRef("fleet.snapshots", 0)


@pytest.fixture(params=["file", *KINDS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return tmp_path / "fleet.snapshot" if request.param == "file" else f"{store(tmp_path, request.param)}#monday"


@pytest.mark.parametrize(("kind", "other"), [*itertools.product(KINDS, KINDS)])
def test_a_restored_flow_has_the_same_states_and_continues_exactly(
    kind: str, other: str, tmp_path: Path, place: Place
) -> None:
    urls = stores(store(tmp_path, kind))
    with closing(ran(urls, batch(*range(5)), [*batch(5, 6), Record("legs", 0, 7, None, b"")])) as live:
        before, manifest = held(live), live.run.manifest
        saved = snapshot(FLOW, place, stores=urls)
        assert (saved.states, saved.batch) == ({"aircraft": 3, "carrier": 2}, 2)
        assert saved.positions == {"legs": {0: 8}}
        empty = stores(store(tmp_path, other))
        done = restore(FLOW, place, stores=empty)
        assert (done.states, done.expired) == (saved.states, 0)
        rest = batch(*range(8, 14))
        assert manifest is not None
        with closing(MemoryRunner(FLOW, empty, ends={})) as copy:
            assert held(copy) == before
            assert copy.run.manifest is not None
            assert copy.run.manifest.positions == manifest.positions
            assert (copy.run.manifest.dead, copy.run.manifest.seen) == (manifest.dead, manifest.seen)
            assert copy.run.epoch > live.run.epoch
            assert not copy.run.crashed
            copy.process(batch(3, 4))  # copies: dropped
            copy.process(rest)
            live.process(batch(3, 4))
            live.process(rest)
            assert {name: live.results(name) for name in held(live)} == {
                name: copy.results(name) for name in held(copy)
            }


@pytest.mark.parametrize("outcome", FaultOutcome)
def test_a_restore_that_dies_at_any_point_is_repeated_and_no_run_begins_before(
    outcome: FaultOutcome, tmp_path: Path, place: Place
) -> None:
    source = {"aircraft": fresh_store(), "carrier": fresh_store()}
    live = ran(source, batch(*range(6)))
    snapshot(FLOW, place, stores=source)
    reached = Injector()
    with faults.use(reached):
        restore(FLOW, place, stores={"aircraft": fresh_store(), "carrier": fresh_store()})
    points = [(name, nth + 1) for name, times in reached.reached.items() for nth in range(times)]
    assert {name for name, _ in points} >= {"epoch", "restore"}
    assert len(points) >= 8
    for name, nth in points:
        urls = {"aircraft": fresh_store(), "carrier": fresh_store()}
        with faults.use(Injector([Fault(name, outcome, nth)], crash)), pytest.raises((Crash, Transient)):
            restore(FLOW, place, stores=urls)
        noted = [memory(url).load_manifest(FlowRef("fleet")) for url in urls.values()]
        if any(one and one.restoring for one in noted):
            with pytest.raises(RunRefusedError, match="headwater restore"):
                MemoryRunner(FLOW, urls)
            restore(FLOW, place, stores=urls)
        elif all(noted):
            with pytest.raises(RunRefusedError, match="contains states"):
                restore(FLOW, place, stores=urls)  # it was complete
        else:
            restore(FLOW, place, stores=urls)
        with closing(MemoryRunner(FLOW, urls, ends={})) as copy:
            assert held(copy) == held(live)


def test_a_run_that_begins_while_the_states_are_read_is_noticed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(*range(6)))
    scan = MemoryStore.scan

    def disturbed(self: MemoryStore, stage: Any, **options: Any) -> Iterator[tuple[bytes, Stored]]:
        for i, one in enumerate(scan(self, stage, **options)):
            if i == 1 and stage.stage == "carrier":
                monkeypatch.setattr(MemoryStore, "scan", scan)
                ran(urls, batch(7))
            yield one

    monkeypatch.setattr(MemoryStore, "scan", disturbed)
    with pytest.raises(RunRefusedError, match="began meanwhile"):
        snapshot(FLOW, place, stores=urls)
    with pytest.raises(UsageError):
        restore(FLOW, place, stores=stores(fresh_store()))


WINDOWED = (
    Flow("screws")
    .source(Topic("legs", Json({"tail": str, "at": int}), envelope=False, time="at"))
    .aggregate("window", "tail", Fields(n=count()), window=tumbling("5m", retention="0s"))
    .aggregate("visit", "tail", Fields(n=count()), window=session("5m", retention="0s"))
    .aggregate("ever", "tail", Fields(n=count(), at=total("at")), expire_after="1h")
)


def at(offset: int, minute: int) -> Record:
    time_ms = minute * 60_000
    return replace(leg(offset, "N1", at=time_ms), timestamp_ms=time_ms)


def test_states_that_have_left_stay_away_and_the_others_leave_in_time(place: Place) -> None:
    urls, target = stores(fresh_store(), WINDOWED), stores(fresh_store(), WINDOWED)
    live = ran(urls, [at(0, 1), at(1, 7)], [at(2, 13)], flow=WINDOWED)
    assert len(live.states("window")) == 1
    snapshot(WINDOWED, place, stores=urls)
    restore(WINDOWED, place, stores=target)
    with closing(MemoryRunner(WINDOWED, target, ends={})) as copy:
        assert held(copy) == held(live)
        late, later = [at(3, 2), at(4, 14)], [at(5, 19), at(6, 90)]
        for part in (late, later):
            assert copy.process(part).verdicts == live.process(part).verdicts
            assert held(copy) == held(live)
        assert copy.states("window").keys() == live.states("window").keys()


def test_tables_and_filter_steps_are_restored_with_the_rest(place: Place) -> None:
    filtered, looked = counted(NUMBERS), by_category()
    for flow, before, after in (
        (filtered, [order(n, n) for n in range(1, 4)], [order(4, 3), order(5, 5)]),
        (looked, [merchant(0, "m", "food"), paid(0, "m", 5)], [paid(1, "m", 7), paid(2, "x")]),
    ):
        urls, target = stores(fresh_store(), flow), stores(fresh_store(), flow)
        live = ran(urls, before, flow=flow)
        snapshot(flow, place, stores=urls, replace=True)
        restore(flow, place, stores=target)
        with closing(MemoryRunner(flow, target, ends={})) as copy:
            assert held(copy) == held(live)
            assert copy.process(after).verdicts == live.process(after).verdicts
            assert held(copy) == held(live)


def saved_in(url: str, place: str, *parts: list[Record]) -> Any:
    ran(stores(url), *parts).close()
    return snapshot(FLOW, place, stores=stores(url), replace=True)


def is_of(place: str) -> dict[str, Any] | None:
    """The results that the snapshot has, restored into other stores; None if there is none."""
    target = stores(fresh_store())
    try:
        restore(FLOW, place, stores=target)
    except UsageError:
        return None
    return results_in(target)


def results_in(urls: dict[str, str]) -> dict[str, Any]:
    with closing(MemoryRunner(FLOW, urls, ends={})) as run:
        return {stage: run.results(stage) for stage in urls}


@pytest.mark.parametrize("outcome", FaultOutcome)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_snapshot_that_dies_at_any_point_is_the_earlier_one_or_the_new_one(
    outcome: FaultOutcome, *, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persistence.snapshot_store._BYTES", 300)
    with faults.use(counter := Injector()):
        saved_in(fresh_store(), f"{fresh_store()}#a", batch(*range(6)))
    points = counter.reached["snapshot"]
    assert points > 5
    for nth in range(1, points + 1):
        url, place = fresh_store(), f"{fresh_store()}#a"
        if earlier:
            saved_in(url, place, batch(0, 1, 2))
        before = is_of(place)
        with faults.use(Injector([Fault("snapshot", outcome, nth)], crash)), pytest.raises((Crash, Transient)):
            saved_in(url, place, batch(*range(3, 6)))
        new = results_in(stores(url))
        assert before != new
        assert is_of(place) in ([before] if nth < points - 1 else [before, new] if nth == points - 1 else [new])
        saved = saved_in(url, place, batch(6))
        assert is_of(place) == results_in(stores(url)) != new
        left = [key for key, _ in memory(place.partition("#")[0]).scan(snapshot_ref("fleet", "a"))]
        assert len(left) == -(-saved.bytes // 300) + 1  # nothing of the one that died


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_in_a_store_of_the_flow_is_no_state_of_it(kind: str, tmp_path: Path) -> None:
    url = store(tmp_path, kind)
    with closing(ran(stores(url), batch(*range(6)))) as live:
        place = f"{url}#monday"
        snapshot(FLOW, place, stores=stores(url))
        before = held(live)
        live.process(batch(6))  # it is not fenced
        assert held(live) != before
    with pytest.raises(RunRefusedError, match="contains states"):
        restore(FLOW, place, stores=stores(url))
    with closing(open_store(url)) as opened:
        assert opened.load_manifest(SNAPSHOTS) is None
        opened.drop(FlowRef("fleet"))
    restore(FLOW, place, stores=stores(url))
    with closing(MemoryRunner(FLOW, stores(url), ends={})) as again:
        assert held(again) == before


def test_of_two_snapshots_at_once_the_older_command_is_fenced() -> None:
    url, place = fresh_store(), f"{fresh_store()}#a"
    older = SnapshotStoreWriter(memory(place.partition("#")[0]), snapshot_ref("fleet", "a"))
    older.write(b"x" * 10)
    saved_in(url, place, batch(1))
    before = is_of(place)
    with pytest.raises(Fenced, match=r"another command has begun.*Repeat this one"):
        older.complete()
    assert is_of(place) == before


def test_of_two_snapshots_at_once_none_is_replaced_that_was_not_there_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    url, other, place = fresh_store(), fresh_store(), f"{fresh_store()}#a"
    for one, part in ((url, batch(1)), (other, batch(1, 2))):
        ran(stores(one), part).close()

    def overtaken(*given: Any) -> bool:
        snapshot(FLOW, place, stores=stores(other), replace=True)
        return False

    monkeypatch.setattr("jobs.snapshot_places.has_snapshot", overtaken)
    with pytest.raises(UsageError, match="--replace"):
        snapshot(FLOW, place, stores=stores(url))
    assert is_of(place) == results_in(stores(other))


def test_a_snapshot_of_which_a_part_is_missing_or_damaged_is_refused_and_nothing_is_written() -> None:
    url, place, target = fresh_store(), f"{fresh_store()}#a", fresh_store()
    saved_in(url, place, batch(1))
    states = memory(place.partition("#")[0])._stages[snapshot_ref("fleet", "a")]
    [part] = [key for key in states if key != b"snapshot"]
    stored = states[part]
    states[part] = replace_value(stored, stored.value[:-1])
    with pytest.raises(RunRefusedError, match=r"#a: the snapshot .*nothing was written"):
        restore(FLOW, place, stores=stores(target))
    del states[part]
    with pytest.raises(RunRefusedError, match=r"a part of the snapshot is missing.*nothing was written"):
        restore(FLOW, place, stores=stores(target))
    assert memory(target).installed_epoch(FlowRef("fleet")) == 0


def replace_value(stored: Stored, value: bytes) -> Stored:
    return Stored(stored.version, stored.epoch, stored.batch, value)


def test_it_is_removed_and_others_stay() -> None:
    url, store_of = fresh_store(), fresh_store()
    for name in ("a", "b"):
        saved_in(url, f"{store_of}#{name}", batch(1))
    remove(f"{store_of}#a", "fleet")
    assert [*memory(store_of).scan(snapshot_ref("fleet", "a"))] == []
    is_of(f"{store_of}#b")
    with pytest.raises(UsageError, match="no such snapshot of flow fleet"):
        remove(f"{store_of}#a", "fleet")
    SnapshotStoreWriter(memory(store_of), snapshot_ref("fleet", "a")).write(b"x" * 300_000)  # then it is killed
    remove(f"{store_of}#a", "fleet")
    assert [*memory(store_of).scan(snapshot_ref("fleet", "a"))] == []
    with pytest.raises(UsageError, match="is a file: delete it"):
        remove(Path("a"), "fleet")


def test_names_that_cannot_be_used_and_what_is_shown(tmp_path: Path) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(1)).close()
    for name in ("a b", "a/b", "x" * 101):
        with pytest.raises(UsageError, match="not a valid name of a snapshot"):
            snapshot(FLOW, f"{fresh_store()}#{name}", stores=urls)
    with pytest.raises(UsageError, match="File name too long"):
        snapshot(FLOW, tmp_path / ("x" * 300), stores=urls)
    with pytest.raises(UsageError, match="File name too long"):
        restore(FLOW, tmp_path / ("x" * 300), stores=stores(fresh_store()))
    longest = tmp_path / ("語" * 85)  # of three bytes
    snapshot(FLOW, longest, stores=urls)
    assert [*tmp_path.iterdir()] == [longest]
    assert shown("redis://ann:secret@cache:6379/1?timeout=3#monday") == "redis://...@cache:6379/1?timeout=...#monday"
    assert shown("sqlite:///a.db") == "sqlite:///a.db#latest"


def test_the_commands_save_in_a_store_restore_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flow, place = "tests.support.pure_flow:flow", f"sqlite://{tmp_path}/copies.db#monday"
    ran(stores(f"sqlite://{tmp_path}/a.db"), batch(1, 2, 3)).close()
    words = ("snapshot", flow, "--store", f"sqlite://{tmp_path}/a.db", "--to")
    assert headwater(monkeypatch, *words, place, "--json") == Exit.DONE
    assert json.loads(capsys.readouterr().out)["file"] == place
    assert headwater(monkeypatch, *words, place) == Exit.USAGE
    assert "--replace" in capsys.readouterr().err
    lossy = Finding("no-aof", "the server has no append-only file", "Set `appendonly yes`", unsafe=True)
    monkeypatch.setattr("persistence.registry.preflight", lambda url: [lossy] if "copies.db" in url else [])
    assert headwater(monkeypatch, *words, place, "--replace") == Exit.DONE
    assert f"the store of the snapshot: {lossy}" in capsys.readouterr().err
    assert headwater(monkeypatch, *words, "memory://x#a") == Exit.USAGE
    assert "in the memory of one process: give another one with --to" in capsys.readouterr().err
    for long in (words, ("restore", flow, "--store", "sqlite://b.db", "--from")):
        for url in ("", "sqlite://", "lmdb://", f"sqlite://{'a/' * 2100}"):
            assert headwater(monkeypatch, *long, url + "x" * 300) == Exit.USAGE
            assert "x: File name too long" in capsys.readouterr().err.splitlines()[-1]
    back = ("restore", flow, "--store", f"lmdb://{tmp_path}/b", "--from")
    assert headwater(monkeypatch, *back, place) == Exit.DONE
    assert headwater(monkeypatch, *back, place.replace("monday", "friday")) == Exit.REFUSED
    assert "no such snapshot" in capsys.readouterr().err
    assert headwater(monkeypatch, "snapshot", flow, "--remove", place) == Exit.DONE
    assert headwater(monkeypatch, "snapshot", flow, "--remove", place) == Exit.REFUSED
    assert headwater(monkeypatch, "snapshot", flow) == Exit.USAGE
    assert "give --to FILE" in capsys.readouterr().err
