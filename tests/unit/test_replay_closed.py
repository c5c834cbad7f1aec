"""Published states of a rebuild: windows that it has closed are held until the swap, and keys that are gone are found."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.windows import Window, tumbling
from aggregations.run.binding import bind
from aggregations.run.held_outputs import held_outputs
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Snapshot, read_snapshot
from envelope import TopicPartition
from jobs.backup import snapshot
from jobs.replaying.beginning import beginning_of, fill_from_snapshot
from jobs.replaying.generations import Generations, begin_rebuild, generations_of
from jobs.replaying.leaving import tombstones
from persistence.commit.faults import use
from tests.support.pure import bare, batch, fresh_store
from tests.support.replays import Crash, CrashAt, author_of
from tests.unit.test_windows import COUNT, MINUTE, NOW, SCREWS, at

GONE = tumbling("5m", retention="0s")
MINUTES = [0, 1, 6, 7, 12, 13, 3, 18, 24, 25]
RECORDS = [at(n, minute) for n, minute in enumerate(MINUTES)]
RECORDS_AT = [NOW + minute * MINUTE for minute in MINUTES]


def closing_flow(window: Window = GONE, **fields: Any) -> Flow[Any]:
    """A flow that publishes the number of fastenings of a screw in each window when it closes."""
    fold = Fields(n=count(), **fields) if fields else COUNT
    stage = Flow("fastening").source(SCREWS).aggregate("screw", "screw", fold, window=window)
    return stage.publish_states("final", on="close")


@contextmanager
def rebuilding(flow: Flow[Any], urls: dict[str, str]) -> Iterator[tuple[Generations, MemoryRunner]]:
    """A rebuild, begun or continued, with its run."""
    with generations_of(flow, urls) as found:
        pointer, note = begin_rebuild(found, author_of("rebuild"), live=1, redefined=False)
        assert pointer.rebuild is not None
        with closing(MemoryRunner(flow, urls, ends={}, generation=pointer.rebuild.generation, rebuilt=note)) as run:
            yield found, run


def held(found: Generations) -> list[Snapshot]:
    return [read_snapshot(one.value) for one in held_outputs(found.stores[0], found.ref(2))]


def told(snapshots: list[Snapshot]) -> dict[str | None, Any]:
    return {one.window_start: one.state for one in snapshots}


def test_a_rebuild_holds_every_window_that_it_has_closed_also_those_that_have_left() -> None:
    flow, urls = closing_flow(), bind(closing_flow(), {}, fresh_store())
    with closing(MemoryRunner(flow, urls, ends={})) as live:
        for one in RECORDS:
            live.process([one])
        published = [read_snapshot(one.value) for one in live.outputs]
    with rebuilding(flow, urls) as (found, run):
        run.process(RECORDS[:3])
        run.process(RECORDS[3:])
        assert run.outputs == []
        assert run.report.outputs == len(published)
        assert told(held(found)) == told(published)
        assert {one.generation for one in held(found)} == {2}
        assert len(run.results("screw")) == 1, "the windows have left the store"
        assert not {*run.results("screw")} & {one.key for one in held_outputs(found.stores[0], found.ref(2))}


@pytest.mark.parametrize("applied", [False, True])
def test_one_that_dies_at_any_effect_holds_each_of_them(*, applied: bool) -> None:
    flow = closing_flow()
    with closing(MemoryRunner(flow, bind(flow, {}, fresh_store()), ends={})) as oracle:
        oracle.process(RECORDS)
        wanted = told([read_snapshot(one.value) for one in oracle.outputs])

    def fold(urls: dict[str, str]) -> dict[str | None, Any]:
        with rebuilding(flow, urls) as (found, run):
            first = run.run.start.get(TopicPartition("screws", 0), 0)
            for one in RECORDS[first:]:
                run.process([one])
            return told(held(found))

    def lived() -> dict[str, str]:
        urls = bind(flow, {}, fresh_store())
        with closing(MemoryRunner(flow, urls, ends={})) as live:
            live.process(RECORDS)
        return urls

    trial = lived()
    with use(CrashAt(0, applied=False)) as counted:
        fold(trial)
    for nth in range(1, counted.reached + 1):
        urls = lived()
        with use(CrashAt(nth, applied=applied)), pytest.raises(Crash):
            fold(urls)
        assert fold(urls) == wanted


def keys(flow: Flow[Any], urls: dict[str, str], stage: str) -> set[bytes]:
    with generations_of(flow, urls) as found:
        return {key for _, key in tombstones(found, 2, 1, flow.stage(stage))}


def test_keys_that_only_the_old_generation_has_are_found() -> None:
    source = Flow("fleet").source(bare()).filter(pl.col("minutes") > 0)
    old = source.aggregate("aircraft", "tail", Fields(n=count())).publish_states("aircraft")
    new = (
        source.filter(pl.col("tail") != "N1")
        .aggregate("aircraft", "tail", Fields(n=count()))
        .publish_states("aircraft")
    )
    urls = bind(old, {}, fresh_store())
    with closing(MemoryRunner(old, urls, ends={})) as live:
        live.process(batch(*range(9)))
    with generations_of(new, urls) as found:
        _, note = begin_rebuild(found, author_of("rebuild"), live=1, redefined=True)
    with closing(MemoryRunner(new, urls, ends={}, generation=2, rebuilt=note)) as rebuild:
        rebuild.process(batch(*range(9)))
    assert keys(new, urls, "aircraft") == {b"N1"}
    assert keys(old, urls, "aircraft") == {b"N1"}


def test_a_window_that_has_left_the_new_generation_is_not_one_of_them() -> None:
    kept, urls = closing_flow(tumbling("5m")), bind(closing_flow(), {}, fresh_store())
    with closing(MemoryRunner(kept, urls, ends={})) as live:
        live.process(RECORDS)
        assert len(live.results("screw")) == 6
    gone = closing_flow(late=total("at"))
    with rebuilding(gone, urls) as (_, run):
        run.process(RECORDS)
        assert len(run.results("screw")) == 1
    assert keys(gone, urls, "screw") == set()


def test_keys_of_another_kind_of_window_are_found() -> None:
    plain = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT).publish_states("final")
    urls = bind(plain, {}, fresh_store())
    with closing(MemoryRunner(plain, urls, ends={})) as live:
        live.process(RECORDS)
    with rebuilding(closing_flow(), urls) as (_, run):
        run.process(RECORDS)
    assert keys(closing_flow(), urls, "screw") == {b"s"}


def test_windows_in_the_snapshot_of_a_rebuild_are_published_again_under_its_generation(tmp_path: Path) -> None:
    flow, file = closing_flow(tumbling("5m")), tmp_path / "snapshot"
    urls = bind(flow, {}, fresh_store())
    with closing(MemoryRunner(flow, urls, ends={})) as live:
        live.process(RECORDS[:6])
    snapshot(flow, file, stores=urls)
    with closing(MemoryRunner(flow, urls, ends={})) as live:
        live.process(RECORDS[6:])
    with generations_of(flow, urls) as found:
        begins = beginning_of(found, found.pointer(), 1, file)
        assert begins is not None
        pointer, note = begin_rebuild(found, author_of("rebuild"), live=1, redefined=False, origin=begins.origin)
        assert pointer.rebuild is not None
        fill_from_snapshot(found, pointer.rebuild, note)
        with closing(MemoryRunner(flow, urls, ends={}, generation=2, rebuilt=note)) as run:
            run.process(RECORDS[6:])
        with closing(MemoryRunner(flow, bind(flow, {}, fresh_store()), ends={})) as oracle:
            oracle.process(RECORDS)
            assert told(held(found)) == told([read_snapshot(one.value) for one in oracle.outputs])
        assert {one.generation for one in held(found)} == {2}


def test_sessions_that_the_rebuild_does_not_have_are_found_by_their_own_keys() -> None:
    source = Flow("fastening").source(SCREWS)
    old = source.aggregate("screw", "screw", COUNT, window=session("2m")).publish_states("final", on="close")
    new = source.filter(pl.col("at") != RECORDS_AT[5]).aggregate("screw", "screw", COUNT, window=session("2m"))
    new = new.publish_states("changes").publish_states("final", on="close")
    urls = bind(old, {}, fresh_store())
    with closing(MemoryRunner(old, urls, ends={})) as live:
        live.process(RECORDS)
        before = {*live.results("screw")}
    with rebuilding(new, urls) as (found, run):
        run.process(RECORDS)
        after = {*run.results("screw")}
        assert {one.key for one in held_outputs(found.stores[0], found.ref(2))} < after
        stage, removed = new.stage("screw"), before - after
        assert {*tombstones(found, 2, 1, stage)} == {(("final",), key) for key in removed}
    assert [key[-42:] for key in removed] == [b"@2025-11-24T16:12:00Z/2025-11-24T16:13:00Z"]
