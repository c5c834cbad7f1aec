"""A rebuild that begins with a snapshot has the states of one that begins where the flow began, wherever it dies."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.backup import snapshot
from jobs.replaying.beginning import beginning_of, fill_from_snapshot
from jobs.replaying.generations import begin_rebuild, generations_of
from jobs.snapshot_places import Place
from persistence.commit.faults import use
from tests.support.letters import LEGS, Count, Sum, back, feed, leg, legs, runner
from tests.support.pure import fresh_store
from tests.support.replays import NEW, OLD, CrashAt, Land, author_of, dies


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.snapshot"


@pytest.fixture(params=["file", "store"])
def place(request: pytest.FixtureRequest, file: Path) -> Place:
    return file if request.param == "file" else f"{fresh_store()}#monday"


def interrupted(file: Place) -> Land:
    """A rebuild that died after it had written the first states of its snapshot."""
    trial = saved(file)
    with use(CrashAt(0, applied=False)) as counted:
        trial.rebuild(OLD, file=file)
    land = saved(file)
    assert dies(lambda: land.rebuild(OLD, file=file), counted.points.index("restore") + 3, applied=True)
    land.code[2] = OLD
    return land


def saved(file: Place) -> Land:
    """A live generation whose snapshot has the first 5 records, and whose run is at work on the next ones."""
    land = Land.on(apart=True, length=12)
    land.go_on(5)
    land.save(file)
    land.go_on(3)
    return land


def effects(action: Callable[[], object]) -> int:
    with use(CrashAt(0, applied=False)) as counted:
        action()
    return counted.reached


def check(land: Land, generation: int) -> None:
    land.length += 3
    for _ in range(land.length):
        land.go_on(3)
    assert land.pointer().live == generation
    assert land.results(generation) == land.expected(generation, land.length)
    assert {*land.published} == {*range(1, land.length)}


def test_it_reads_only_what_comes_after_the_snapshot(place: Place) -> None:
    land = saved(place)
    read: list[int] = []
    before = MemoryRunner.process

    def process(run: MemoryRunner, records: object) -> object:
        found = [*records]  # type: ignore[call-overload]
        read.extend(one.offset for one in found)
        return before(run, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryRunner, "process", process)
        assert land.rebuild(OLD, file=place) == 2
    assert read == [5, 6, 7]
    assert land.results(2) == land.expected(2, 8)
    land.swap()
    check(land, 2)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("place", "named"), [("file", False), ("store", True)], indirect=["place"])
def test_one_that_dies_at_any_effect_is_repeated_with_or_without_its_place(
    place: Place, *, applied: bool, named: bool
) -> None:
    trial = saved(place)
    total = effects(lambda: trial.rebuild(OLD, file=place))
    assert total > 20
    for nth in range(1, total + 1):
        land = saved(place)
        assert dies(lambda land=land: land.rebuild(OLD, file=place), nth, applied=applied)  # type: ignore[misc]
        begun = land.pointer().rebuild is not None
        land.go_on(1)
        land.rebuild(OLD, file=place if named or not begun else None)
        assert land.results(2) == land.expected(2, land.position(1))
        land.swap()
        check(land, 2)


def test_a_swap_completes_a_restore_that_was_interrupted(place: Place) -> None:
    land = interrupted(place)
    with generations_of(OLD, land.urls) as found:
        assert any(one.restoring for _, one in found.manifests(2) if one)
    land.swap()
    check(land, 2)


def test_another_snapshot_is_refused_once_it_has_begun(file: Path) -> None:
    land = saved(file)
    other = file.with_name("other")
    land.save(other)
    land.rebuild(OLD, file=file)
    with pytest.raises(RunRefusedError, match=r"generation 2: its rebuild began with another snapshot, .*--abandon"):
        land.rebuild(OLD, file=other)
    moved = file.rename(file.with_name("moved"))
    land.rebuild(OLD, file=moved)
    rebuild = land.pointer().rebuild
    assert rebuild is not None
    assert rebuild.origin is not None
    assert rebuild.origin.generations == (1,)


def test_a_snapshot_for_a_rebuild_that_began_at_the_start_is_refused(place: Place) -> None:
    land = saved(place)
    land.rebuild(OLD)
    with pytest.raises(RunRefusedError, match="began where the flow began"):
        land.rebuild(OLD, file=place)


def test_a_file_that_is_gone_or_replaced_before_its_states_were_written_is_asked_for(file: Path) -> None:
    land = interrupted(file)
    moved = file.rename(file.with_name("moved"))
    with pytest.raises(RunRefusedError, match=r"does not have all of its states yet\. Give it with --snapshot"):
        land.rebuild(OLD)
    land.save(file)
    with pytest.raises(RunRefusedError, match=r"fleet\.snapshot is another one"):
        land.rebuild(OLD)
    assert land.rebuild(OLD, file=moved) == 2
    assert land.results(2) == land.expected(2, 8)


@pytest.mark.parametrize("url", ["memory://ann:secret@{}", "memory://{}?token=secret"])
def test_a_password_of_the_store_with_the_snapshot_is_not_kept_and_is_asked_for(url: str) -> None:
    land = interrupted(place := f"{url.format(fresh_store().removeprefix('memory://'))}#monday")
    rebuild = land.pointer().rebuild
    assert rebuild is not None
    assert rebuild.origin is not None
    assert rebuild.origin.file.endswith("#monday")
    assert "secret" not in rebuild.origin.file
    with pytest.raises(RunRefusedError, match=r"Give it with --snapshot: the password and the options"):
        land.rebuild(OLD)
    assert land.rebuild(OLD, file=place) == 2
    assert land.results(2) == land.expected(2, 8)


def test_a_snapshot_of_another_definition_or_flow_or_ahead_of_the_live_generation_is_refused(place: Place) -> None:
    land = saved(place)
    with pytest.raises(DefinitionChangedError, match="made by another definition"):
        land.rebuild(NEW, file=place)
    behind = Land.on(apart=True, length=12)
    behind.go_on(3)
    with pytest.raises(RunRefusedError, match=r"contains legs:0 up to 5, and the generation up to 3.*earlier snapshot"):
        behind.rebuild(OLD, file=place)
    assert behind.pointer().rebuild is None
    assert land.pointer().rebuild is None


def test_a_snapshot_of_a_rebuild_continues_the_generations_before(place: Place) -> None:
    land = saved(place)
    land.rebuild(OLD, file=place)
    land.swap()
    land.go_on(2)
    land.save(place)
    land.rebuild(OLD, file=place)
    rebuild = land.pointer().rebuild
    assert rebuild is not None
    assert rebuild.origin is not None
    assert rebuild.origin.generations == (2, 1)
    with generations_of(OLD, land.urls) as found:
        notes = [one.rebuilt for _, one in found.manifests(3) if one]
    assert [one.continues for one in notes if one] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("later", [False, True])
def test_a_dead_letter_of_the_snapshots_generation_fills_the_hole_of_a_later_stage(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, later: bool
) -> None:
    """The letter is from before the snapshot, or from after it: then the rebuild has rejected its record as well."""
    flow = Flow("fleet").source(LEGS).aggregate("all", "k", Count()).aggregate("totals", "c", Sum())
    urls = bind(flow, {}, fresh_store())
    with closing(runner(flow, urls["all"], ends={})) as live:
        feed(live, legs(60, bad=5))
    snapshot(flow, place, stores=urls)
    with closing(runner(flow, urls["all"], ends={})) as live:
        feed(live, [leg(n, v=5000 if n == 70 else 1) for n in range(60, 100)])
        after = live.dead_letters
    with closing(runner(flow, ends={})) as oracle:
        feed(oracle, legs(100, bad=5))
        [before] = oracle.dead_letters
    assert (before.stage, before.hole) == ("totals", True)
    with generations_of(flow, urls) as found:
        begins = beginning_of(found, found.pointer(), 1, place)
        assert begins is not None
        pointer, note = begin_rebuild(found, author_of("rebuild"), live=1, redefined=False, origin=begins.origin)
        assert pointer.rebuild is not None
        fill_from_snapshot(found, pointer.rebuild, note)
    monkeypatch.setattr(Sum, "broken", True)
    with closing(runner(flow, urls["all"], ends={}, generation=2, rebuilt=note)) as rebuild:
        feed(rebuild, [leg(n, v=5000 if n == 70 else 1) for n in range(60, 100)])
        mine = rebuild.dead_letters
        assert [one.record.offset for one in mine] == [one.record.offset for one in after] == [70]
        monkeypatch.setattr(Sum, "broken", False)
        assert rebuild.results("totals") == {b"UA": {"n": 98, "sum": 98}}
        letters = [back(after[0], 100, "fleet"), back(mine[0], 101, "fleet", 1, generation=2)] if later else []
        rebuild.process(letters or [back(before, 100, "fleet")])
        assert rebuild.results("totals") == {b"UA": {"n": 99, "sum": 5098}}
        rebuild.process([back((after if later else [before])[0], 102, "fleet")])
        assert rebuild.results("totals") == {b"UA": {"n": 99, "sum": 5098}}
