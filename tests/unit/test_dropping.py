"""A generation that is dropped is gone from every store; none that is needed is dropped."""

import contextlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest

from aggregations.errors import FlowError, RunRefusedError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.backup import restore, snapshot
from jobs.replay import drop, pointer_of
from jobs.replaying.dropping import NO_ROLLBACK
from jobs.replaying.generations import generations_of
from persistence.commit.faults import use
from persistence.errors import Terminal
from persistence.names import FlowRef
from persistence.registry import open_store
from tests.support.options import called
from tests.support.pure import batch, fleet, fresh_store
from tests.support.replays import NEW, OLD, CrashAt, Land, dies

FLOW = fleet()
ACCEPTED: dict[str, Any] = {"why": "a test", "accept": [NO_ROLLBACK]}


def swapped() -> Land:
    """Generation 2 is live after a swap, and its run has folded more."""
    land = Land.on(apart=True, length=12)
    land.go_on(5)
    land.rebuild(NEW)
    land.swap()
    land.go_on(3)
    return land


def is_gone(land: Land, generation: int) -> bool:
    with generations_of(OLD, land.urls) as found:
        ref = found.ref(generation)
        return not any(
            store.installed_epoch(ref) or store.load_manifest(ref) or [*store.scan(ref.stage(stage))]
            for store in found.stores
            for stage in ("aircraft", "carrier", "headwater.held-outputs")
        )


def check(land: Land, generation: int) -> None:
    land.length += 3
    for _ in range(land.length):
        land.go_on(3)
    assert land.pointer().live == generation
    assert land.results(generation) == land.expected(generation, land.length)


@pytest.mark.parametrize("applied", [False, True])
def test_a_drop_that_dies_at_any_effect_is_repeated(*, applied: bool) -> None:
    trial = swapped()
    with use(CrashAt(0, applied=False)) as counted:
        trial.drop(1)
    assert counted.reached > 6, counted.points
    for nth in range(1, counted.reached + 1):
        land = swapped()
        assert dies(lambda land=land: land.drop(1), nth, applied=applied)  # type: ignore[misc]
        land.go_on(1)
        if land.pointer().previous == 0:
            with pytest.raises(RunRefusedError, match="no earlier generation is left"):
                land.roll_back()
        with contextlib.suppress(RunRefusedError):  # nothing is left of it
            land.drop(1)
        assert is_gone(land, 1)
        check(land, 2)
        assert [one.what for one in land.pointer().changes] == ["rebuild", "swap", "drop"]


def test_the_generation_before_is_kept_unless_the_way_back_is_given_up() -> None:
    land = swapped()
    with pytest.raises(RunRefusedError, match=r"generation 1: it was live before generation 2.*--accept no-rollback"):
        called(drop, OLD, 1, stores=land.urls, why="a test")
    assert land.pointer().previous == 1
    assert called(drop, OLD, 1, stores=land.urls, **ACCEPTED).previous == 0
    assert is_gone(land, 1)
    with pytest.raises(RunRefusedError, match="generation 1: the stores contain nothing of it"):
        called(drop, OLD, 1, stores=land.urls, **ACCEPTED)
    check(land, 2)


def test_the_live_generation_and_a_rebuild_are_kept() -> None:
    land = swapped()
    assert land.rebuild(NEW) == 3
    before = land.results(2), land.results(3)
    with pytest.raises(RunRefusedError, match="generation 2: it is live"):
        called(drop, OLD, 2, stores=land.urls, **ACCEPTED)
    with pytest.raises(RunRefusedError, match=r"generation 3: it is being rebuilt.*--abandon"):
        called(drop, OLD, 3, stores=land.urls, **ACCEPTED)
    with pytest.raises(RunRefusedError, match="generation 7: the stores contain nothing of it"):
        called(drop, OLD, 7, stores=land.urls, **ACCEPTED)
    with pytest.raises(ValueError, match="count from 1"):
        called(drop, OLD, 0, stores=land.urls, **ACCEPTED)
    with pytest.raises(FlowError, match="unknown risk nothing"):
        called(drop, OLD, 1, stores=land.urls, why="", accept=["nothing"])
    assert (land.results(2), land.results(3)) == before


def test_a_frozen_run_of_a_dropped_generation_writes_nothing() -> None:
    land = Land.on(apart=True, length=12)
    land.go_on(5)
    assert land.run is not None
    land.stale.append(land.run)
    land.run = None
    land.rebuild(NEW)
    land.swap()
    land.drop(1)
    assert not land.wake(0, 3)
    with pytest.raises(Terminal, match="the store has epoch 0"):
        land.stale[0].process(land.records(5, 7))
    assert is_gone(land, 1)


def ran(urls: dict[str, str], generation: int, *, ends: bool = True) -> None:
    run = MemoryRunner(FLOW, urls, ends={}, generation=generation)
    run.process(batch(1, 2, 3))
    if ends:
        run.close()


def test_a_generation_that_was_run_by_hand_is_dropped_unless_its_run_may_be_at_work() -> None:
    urls = bind(FLOW, {}, fresh_store())
    ran(urls, 1)
    ran(urls, 2, ends=False)
    with pytest.raises(RunRefusedError, match=r"generation 2: a run may be at work on it.*--take-over"):
        called(drop, FLOW, 2, stores=urls, why="a test")
    assert pointer_of(FLOW, urls).version == 0
    called(drop, FLOW, 2, stores=urls, why="a test", take_over=True)
    with pytest.raises(RunRefusedError, match="generation 1 is live"):
        ran(urls, 2)
    ran(urls, 3)
    assert called(drop, FLOW, 3, stores=urls, why="a test").newest == 3


def test_the_first_generation_is_dropped_if_the_settings_name_another_one() -> None:
    urls = bind(FLOW, {}, fresh_store())
    ran(urls, 1)
    with pytest.raises(RunRefusedError, match="generation 2: it is live, and the stores contain nothing of it"):
        called(drop, FLOW, 1, stores=urls, why="a test", generation=2)
    ran(urls, 2)
    assert called(drop, FLOW, 1, stores=urls, why="a test", generation=2).live == 2
    ran(urls, 2)


def test_what_an_interrupted_restore_left_is_dropped(tmp_path: Path) -> None:
    source, target = bind(FLOW, {}, fresh_store()), bind(FLOW, {}, fresh_store())
    for number in (1, 2):
        with closing(MemoryRunner(FLOW, source, ends={})) as run:
            run.process(batch(number))
        snapshot(FLOW, tmp_path / str(number), stores=source)
    assert dies(lambda: restore(FLOW, tmp_path / "1", stores=target), 4, applied=True)
    with pytest.raises(RunRefusedError, match="--drop 1"):
        restore(FLOW, tmp_path / "2", stores=target)
    called(drop, FLOW, 1, stores=target, why="another snapshot")
    assert restore(FLOW, tmp_path / "2", stores=target).batch == 2


def left_in_sqlite(path: Path) -> list[object]:
    """Generation and name of each stage that is left, and the number of states."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT flow.generation, stage.name FROM stage JOIN flow ON flow.id = stage.flow WHERE flow.generation > 0"
        )
        [(states,)] = connection.execute(
            "SELECT count(*) FROM state JOIN stage ON stage.id = state.stage WHERE stage.name <> 'pointer'"
        )
        return [sorted(rows), states]


def left_in_lmdb(path: Path) -> list[object]:
    names, states = set(), 0
    for shard in sorted(path.iterdir()):
        with lmdb.open(str(shard), readonly=True) as environment, environment.begin() as transaction:
            keys = [bytes(key) for key, _ in transaction.cursor()]
        assert not [key for key in keys if b"/fleet/1" in key]
        stages = [key.split(b"/") for key in keys if key.startswith(b"stage/fleet/2/")]
        names |= {(int(one[2]), one[3].decode()) for one in stages}
        states += len([key for key in keys if key[:1] == b"\0"])
    return [sorted(names), states - 1]  # the pointer


@pytest.mark.parametrize(("scheme", "left"), [("sqlite", left_in_sqlite), ("lmdb", left_in_lmdb)])
def test_nothing_is_left_of_it_in_an_embedded_store(
    scheme: str, left: Callable[[Path], list[object]], tmp_path: Path
) -> None:
    urls = bind(FLOW, {}, f"{scheme}://{tmp_path / 'states'}")
    for number in (1, 2):
        ran(urls, number)
    with closing(open_store(urls["aircraft"])) as store:
        kept = [dict(store.scan(FlowRef("fleet", 2).stage(stage))) for stage in ("aircraft", "carrier")]
    called(drop, FLOW, 1, stores=urls, why="a test", generation=2)
    assert left(tmp_path / "states") == [[(2, "aircraft"), (2, "carrier")], sum(map(len, kept))]
    with closing(open_store(urls["aircraft"])) as store:
        assert kept == [dict(store.scan(FlowRef("fleet", 2).stage(stage))) for stage in ("aircraft", "carrier")]
