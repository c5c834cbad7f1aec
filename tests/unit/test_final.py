"""Windows whose states are published when they close: when, with what, and what no longer changes them."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import Window, hopping, tumbling
from aggregations.errors import FlowError, RunRefusedError
from aggregations.run import final
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Snapshot, read_snapshot
from envelope import TopicPartition
from jobs.backup import restore, snapshot
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from tests.simulation.stores import open_store
from tests.support.both import Both
from tests.support.pure import fresh_store
from tests.unit.test_windows import COUNT, NOW, SCREWS, at, counts

_names = itertools.count()
FIVE = tumbling("5m")
GONE = tumbling("5m", retention="0s")


class Crash(BaseException):
    """The process dies."""


def crash() -> Any:
    raise Crash


def closing(window: Window = FIVE, topic: Topic = SCREWS) -> Flow[Any]:
    """A flow that publishes the number of fastenings of a screw in each window when it closes."""
    stage = Flow("fastening").source(topic).aggregate("screw", "screw", COUNT, window=window)
    return stage.publish_states("final", on="close")


def snapshots(runner: MemoryRunner) -> list[tuple[str, Snapshot]]:
    return [((output.key or b"").decode(), read_snapshot(output.value)) for output in runner.outputs]


def published(runner: MemoryRunner) -> list[tuple[str, int]]:
    """The minute at which each published window starts, and its count, in the order of publication."""
    return [(key[-9:-4], snapshot.state["n"]) for key, snapshot in snapshots(runner)]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "stage 'screw' has none"),
        ({"expire_after": "1d"}, r"has expire_after='1d'. With window=session\('1d'\)"),
    ],
)
def test_a_stage_without_windows_that_close_is_refused(options: Any, wanted: str) -> None:
    stage = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, **options)
    with pytest.raises(FlowError, match=wanted):
        stage.publish_states("final", on="close")


@pytest.mark.parametrize("on", ["closed", "", None, 5])
def test_another_moment_is_refused(on: Any) -> None:
    stage = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, window=FIVE)
    with pytest.raises(FlowError, match="on= takes one of update, close"):
        stage.publish_states("final", on=on)


def test_it_is_part_of_the_definition_of_its_stage_and_of_all_behind_it_and_only_if_it_is_given() -> None:
    def made(*on: str) -> tuple[str, ...]:
        flow = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, window=FIVE)
        for number, one in enumerate(on):
            flow = flow.publish_states(f"states-{number}", on=one)
        return tuple(flow.aggregate("all", pl.lit("all"), COUNT, window=FIVE).definitions.values())

    plain, updated, closed, both, twice = (
        made(),
        made("update"),
        made("close"),
        made("update", "close"),
        made(*["close"] * 2),
    )
    assert plain == updated
    assert closed == both
    assert {*plain}.isdisjoint(closed)
    assert closed[0] == twice[0]
    last = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, window=FIVE)
    behind = last.aggregate("all", pl.lit("all"), COUNT, window=FIVE).publish_states("states", on="close").definitions
    assert behind["screw"] == plain[0]
    assert behind["all"] not in (plain[1], closed[1])


def test_the_description_says_when_states_are_published() -> None:
    lines = closing().publish_states("changes").describe()
    assert "final on close" in lines
    assert closing().describe_svg().count(">final<") == 1


@pytest.mark.parametrize(
    ("window", "minutes", "wanted"),
    [
        (FIVE, [1, 2, 4, 6], [("16:00", 3)]),
        (FIVE, [1, 4], []),
        (tumbling("5m", lateness="2m"), [1, 6, 4], []),
        (tumbling("5m", lateness="2m"), [1, 6, 4, 7], [("16:00", 2)]),
        (hopping("10m", "5m"), [1, 6, 10], [("15:55", 1), ("16:00", 2)]),
        (GONE, [1, 12, 3], [("16:00", 1)]),
    ],
)
def test_a_window_is_published_when_the_watermark_passes_its_end_and_its_lateness(
    window: Window, minutes: Sequence[int], wanted: list[tuple[str, int]]
) -> None:
    whole, single = Both(closing(window)), Both(closing(window))
    whole.process([at(offset, minute) for offset, minute in enumerate(minutes)])
    for offset, minute in enumerate(minutes):
        single.process([at(offset, minute)])
    assert published(whole.memory) == published(single.memory) == wanted


def test_a_final_snapshot_is_the_stored_state_with_its_version_and_its_window() -> None:
    both = Both(closing())
    both.process([at(0, 1)])
    both.process([at(1, 2)])
    both.process([at(2, 6)])
    [(key, snapshot)] = snapshots(both.memory)
    assert key == "s@2025-11-24T16:00:00Z"
    window = ("2025-11-24T16:00:00Z", "2025-11-24T16:05:00Z")
    assert snapshot == Snapshot("fastening", "screw", 1, 2, 1, 1, {"n": 2}, *window, batch=3)
    assert both.memory.states("screw")[key.encode()].version == 2
    assert both.memory.report.outputs == 1


def test_changes_and_final_states_go_to_topics_of_their_own() -> None:
    both = Both(closing().publish_states("changes"))
    both.process([at(0, 1)])
    both.process([at(1, 2), at(2, 6)])
    found = [(output.topic, read_snapshot(output.value).state["n"]) for output in both.memory.outputs]
    assert found == [("changes", 1), ("changes", 2), ("changes", 1), ("final", 2)]
    assert both.memory.report.outputs == 4


def test_the_slowest_partition_of_all_sources_holds_windows_open() -> None:
    both = Both(closing())
    both.process([at(0, 20), at(0, 1, partition=1, screw="t")])
    assert published(both.memory) == []
    both.process([at(1, 4, partition=1, screw="t")])
    both.process([at(2, 5, partition=1, screw="t")])
    assert published(both.memory) == [("16:00", 2)]


def test_a_window_that_contains_only_a_hole_is_not_published() -> None:
    refusing = Fields(n=count(), air=total(pl.col("screw").cast(pl.Int64)))
    stage = Flow("fastening").source(SCREWS).aggregate("screw", "screw", refusing, window=FIVE)
    both = Both(stage.publish_states("final", on="close"))
    both.process([at(0, 1, screw="no number"), at(1, 2, screw="7"), at(2, 6, screw="8")])
    assert [one.hole for one in both.dead_letters] == [True]
    assert [key for key, _ in snapshots(both.memory)] == ["7@2025-11-24T16:00:00Z"]


def test_many_windows_are_published_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final, "PAGE", 7)
    made = closing()
    runner = MemoryRunner(made, bind(made, {}, fresh_store()))
    with faults.use(Injector()) as injector:
        runner.process([at(n, n // 4, screw=f"s{n}") for n in range(40)])
        runner.process([at(40, 30)])
    assert len({output.key for output in runner.outputs}) == len(runner.outputs) == 40
    assert injector.reached["close:screw"] == 6


IDLE = Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m")


@pytest.mark.parametrize("on", ["update", "close"])
def test_a_silent_partition_that_returns_changes_no_window_that_is_published(on: str) -> None:
    seconds = [0.0]
    stage = Flow("fastening").source(IDLE).aggregate("screw", "screw", COUNT, window=FIVE)
    made = stage.publish_states("states", on=on)
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), clock=lambda: seconds[0])
    runner.process([at(0, 1), at(0, 1, partition=1, screw="t"), at(1, 2, partition=1, screw="t")])
    seconds[0] = 300.0
    runner.process([at(1, 20)])
    runner.process([at(2, 3, partition=1, screw="t"), at(3, 20, partition=1, screw="t")])
    closes = on == "close"
    assert counts(runner)["t@2025-11-24T16:00:00Z"] == (2 if closes else 3)
    assert runner.report.verdicts["screw"].get("window_closed", 0) == closes
    assert counts(runner)["t@2025-11-24T16:20:00Z"] == 1, "what is open for all stays open"
    if closes:
        assert sorted(published(runner)) == [("16:00", 1), ("16:00", 2)]


def test_an_added_partition_changes_no_window_that_is_published() -> None:
    both = Both(closing())
    both.process([at(0, 1), at(1, 2), at(2, 6)])
    both.process([at(0, 3, partition=1, screw="t"), at(1, 7, partition=1, screw="t")])
    assert counts(both.memory) == {
        "s@2025-11-24T16:00:00Z": 2,
        "s@2025-11-24T16:05:00Z": 1,
        "t@2025-11-24T16:05:00Z": 1,
    }
    assert both.memory.report.verdicts["screw"]["window_closed"] == 1
    assert published(both.memory) == [("16:00", 2)]


POINTS = ["load", "publish", "persist:screw", "manifest", "close:screw", "ledger", "remove:screw", "write:screw"]


@pytest.mark.parametrize("outcome", list(FaultOutcome))
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_whatever_crashes_each_window_is_published_before_it_leaves_and_only_repeated_unchanged(
    point: str, nth: int, outcome: FaultOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final, "PAGE", 3)
    made, url = closing(GONE), f"simulated://final-{next(_names)}"
    stores = bind(made, {}, url)
    batches = [
        [at(n, 1 + n % 3, screw=f"s{n % 5}") for n in range(10)],
        [at(10, 7), at(11, 8)],
        [at(12, 14)],
    ]
    runners = [MemoryRunner(made, stores)]
    with faults.use(Injector([Fault(point, outcome, nth)], crash)):
        for batch in batches:
            while True:
                start = runners[-1].run.start.get(TopicPartition("screws", 0), 0)
                try:
                    runners[-1].process([one for one in batch if one.offset >= start])
                    break
                except (Crash, Transient):
                    runners.append(MemoryRunner(made, stores))
    runners[-1].close()
    found = [one for runner in runners for one in snapshots(runner)]
    final_states = {key: snapshot.state["n"] for key, snapshot in found}
    assert final_states == {**{f"s{n}@2025-11-24T16:00:00Z": 2 for n in range(5)}, "s@2025-11-24T16:05:00Z": 2}
    assert {(snapshot.state["n"], snapshot.version) for _, snapshot in found} == {(2, 1)}
    assert counts(runners[-1]) == {"s@2025-11-24T16:10:00Z": 1}
    repeats = len(found) - len(final_states)
    assert repeats == 0 or (point in ("close:screw", "ledger") and len(runners) > 1)
    assert MemoryRunner(made, stores).outputs == []


def test_nothing_leaves_before_it_is_published() -> None:
    made, url = closing(GONE), f"simulated://final-{next(_names)}"
    runner = MemoryRunner(made, bind(made, {}, url))
    runner.process([at(0, 1)])
    with faults.use(Injector([Fault("close", FaultOutcome.ERROR)])), pytest.raises(Transient):
        runner.process([at(1, 6)])
    assert len(counts(runner)) == 2
    assert runner.run.manifest is not None
    assert runner.run.manifest.published == {"screw": NOW // 1_000}, "windows that ended before the first one"
    again = MemoryRunner(made, bind(made, {}, url))
    assert published(again) == [("16:00", 1)]
    assert len(counts(again)) == 1


def test_windows_that_had_closed_before_are_published_once_the_flow_asks_for_it() -> None:
    url = fresh_store()
    plain = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, window=FIVE)
    before = MemoryRunner(plain, bind(plain, {}, url))
    before.process([at(0, 1), at(1, 6)])
    before.close()
    made = plain.publish_states("final", on="close")
    with pytest.raises(RunRefusedError, match="definition"):
        MemoryRunner(made, bind(made, {}, url))
    after = MemoryRunner(made, bind(made, {}, url), accept=["definition"])
    assert published(after) == [("16:00", 1)]
    after.process([at(2, 11)])
    assert published(after) == [("16:00", 1), ("16:05", 1)]


def two_stores() -> tuple[Flow[Any], dict[str, str]]:
    """A stage, and behind it, in a store of its own, one whose windows are published."""
    made = Flow("fastening").source(SCREWS).aggregate("seen", "screw", COUNT)
    made = made.aggregate("screw", "screw", COUNT, window=FIVE).publish_states("final", on="close")
    urls = {name: f"simulated://final-{name}-{next(_names)}" for name in ("seen", "screw")}
    return made, bind(made, urls)


@pytest.mark.parametrize("back", ["seen", "screw"])
def test_a_store_that_was_set_back_publishes_again_only_what_it_keeps(back: str) -> None:
    made, stores = two_stores()
    first = MemoryRunner(made, stores)
    first.process([at(0, 1)])
    first.close()
    copy = open_store(stores[back]).copy()
    second = MemoryRunner(made, stores)
    second.process([at(1, 2), at(2, 6)])
    second.close()
    assert published(second) == [("16:00", 2)]
    open_store(stores[back]).restore(copy)
    if back == "screw":
        with pytest.raises(RunRefusedError):
            MemoryRunner(made, stores)
    third = MemoryRunner(made, stores, accept=["store-went-back", "downstream-behind"])
    third.process([at(1, 2), at(2, 6)])
    assert published(third) == ([] if back == "seen" else [("16:00", 1)])


def test_the_manifest_of_the_stages_own_store_counts() -> None:
    made, stores = two_stores()
    runner = MemoryRunner(made, stores)
    runner.process([at(0, 1)])
    with faults.use(Injector([Fault("ledger", FaultOutcome.BEFORE, 2)], crash)), pytest.raises(Crash):
        runner.process([at(1, 6)])
    manifests = {name: open_store(url).load_manifest(runner.run.ref) for name, url in stores.items()}
    ends = {name: one.published["screw"] for name, one in manifests.items() if one is not None}
    assert ends["seen"] < ends["screw"]
    assert MemoryRunner(made, stores).outputs == []


def test_a_restored_flow_publishes_the_windows_that_close_after_its_snapshot(tmp_path: Path) -> None:
    made = closing()
    stores, file = bind(made, {}, fresh_store()), tmp_path / "states.snapshot"
    live = MemoryRunner(made, stores)
    live.process([at(0, 1), at(1, 6)])
    live.close()
    snapshot(made, file, stores=stores)
    target = bind(made, {}, fresh_store())
    with pytest.raises(RunRefusedError, match="stage screw publishes its states to final"):
        restore(made, file, stores=target)
    restore(made, file, stores=target, accept=["snapshot-versions"])
    restored = MemoryRunner(made, target)
    assert restored.outputs == []
    restored.process([at(2, 4), at(3, 7), at(4, 10)])
    assert published(restored) == [("16:05", 2)]
