"""The times of batches in the manifest."""

import json
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs import states
from persistence.manifest import Manifest
from persistence.times import MOST_TIMES, Committed, committed, committed_by

FLOW = Flow("visits").source(Topic("visits", Json({"page": str}), envelope=False))
FLOW = FLOW.aggregate("page", "page", Fields(visits=count()), co_partitioned=False)


def test_a_batch_was_committed_at_the_first_listed_time_that_is_not_before_it() -> None:
    times = ((1, 3, 300), (1, 7, 700), (2, 7, 900), (2, 8, 950))
    asked = [(1, 1), (1, 3), (1, 4), (1, 8), (2, 8), (2, 9), (3, 1)]
    assert [committed_by(times, *one) for one in asked] == [300, 300, 700, 900, 950, None, None]
    assert committed_by((), 1, 1) is None


def test_a_manifest_that_is_written_again_does_not_move_the_time_of_its_batch() -> None:
    times = committed((), 1, 1, 100)
    assert committed(times, 1, 1, 200) == times
    assert committed(committed(times, 2, 1, 300), 1, 1, 400) == ((1, 1, 100), (2, 1, 300))


def test_a_clock_that_goes_back_does_not_make_a_batch_older_than_the_one_before() -> None:
    assert committed(committed((), 1, 1, 100), 1, 2, 50) == ((1, 1, 100), (1, 2, 100))


def test_the_list_is_short_and_an_age_is_never_too_high_and_too_low_by_a_third_at_most() -> None:
    times: tuple[Committed, ...] = ()
    last = 200_000  # a batch a second for two days
    for batch in range(last):
        times = committed(times, 1 + batch // 50_000, batch, batch * 1000)
    assert len(times) == MOST_TIMES
    for batch in range(0, last, 97):
        by = committed_by(times, 1 + batch // 50_000, batch)
        assert by is not None
        age, shown = (last - batch) * 1000, last * 1000 - by
        assert age * 2 / 3 <= shown <= age


def test_the_age_of_a_state_is_that_of_the_batch_that_wrote_it_last(tmp_path: Path) -> None:
    stores = bind(FLOW, {}, f"lmdb://{tmp_path}/states")
    now = 1000.0
    runner = MemoryRunner(FLOW, stores, clock=lambda: now)
    for offset, page in enumerate("aba"):
        now = 2000.0 + offset
        runner.process([Record("visits", 0, offset, b"v", json.dumps({"page": page}).encode())])
    now = 3000.0
    runner.close()
    by = {view.key: view.written_by_ms for view in states(FLOW, "page", stores)}
    assert by == {b"a": 2_002_000, b"b": 2_001_000}

    def keys(older: int | None = None, newer: int | None = None) -> list[bytes]:
        return [view.key for view in states(FLOW, "page", stores, older_than_ms=older, newer_than_ms=newer)]

    assert (keys(older=2_002_000), keys(newer=2_002_000)) == ([b"b"], [b"a"])
    assert keys(older=2_003_000, newer=2_001_000) == [b"a", b"b"]
    after = pl.col("_written_by") > datetime(1970, 1, 1, 0, 33, 21, 500_000, UTC)
    assert states(FLOW, "page", stores, where=after).frame()["_key"].to_list() == ["a"]


def test_a_state_of_a_batch_that_was_not_committed_is_newer_than_any_time(tmp_path: Path) -> None:
    stores = bind(FLOW, {}, f"lmdb://{tmp_path}/states")
    runner = MemoryRunner(FLOW, stores, clock=lambda: 2000.0)
    runner.process([Record("visits", 0, 0, b"v", b'{"page": "a"}')])
    runner.process([Record("visits", 0, 1, b"v", b'{"page": "b"}')])
    runner.close()
    store = runner.run.stores["page"]
    other = store.acquire_epoch(runner.run.ref)
    store.save_manifest(runner.run.ref, Manifest(other, 1, times=((1, 1, 2_000_000),)))
    assert {view.key: view.written_by_ms for view in states(FLOW, "page", stores)} == {b"a": 2_000_000, b"b": None}
    assert [view.key for view in states(FLOW, "page", stores, newer_than_ms=9_000_000)] == [b"b"]
    assert [view.key for view in states(FLOW, "page", stores, older_than_ms=9_000_000)] == [b"a"]


def test_times_go_on_in_the_next_run(tmp_path: Path) -> None:
    stores = bind(FLOW, {}, f"sqlite://{tmp_path}/states.db")
    for number in range(3):
        runner = MemoryRunner(FLOW, stores, clock=lambda number=number: 1000.0 * (number + 1))
        runner.process([Record("visits", 0, number, b"v", json.dumps({"page": f"{number}"}).encode())])
        runner.close()
    assert [view.written_by_ms for view in states(FLOW, "page", stores)] == [1_000_000, 2_000_000, 3_000_000]
