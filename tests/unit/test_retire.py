"""States of closed windows leave the store: when, with what, and what becomes of what comes later."""

import itertools
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping, tumbling
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.retire import Retirement
from envelope import Reason
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from tests.simulation.stores import open_store
from tests.support.both import Both
from tests.support.pure import fresh_store
from tests.unit.test_windows import SCREWS, at, counts, flow

_names = itertools.count()
GONE = tumbling("5m", retention="0s")


class Crash(BaseException):
    """The process dies."""


def crash() -> Any:
    raise Crash


def verdicts(runner: MemoryRunner, stage: str = "screw") -> dict[str, int]:
    return dict(runner.report.verdicts[stage])


def windows(runner: MemoryRunner, stage: str = "screw") -> set[str]:
    """The starts of the windows in the store."""
    return {key[-10:] for key in counts(runner, stage)}


@pytest.mark.parametrize("retention", ["-1m", "soon", 5])
def test_a_retention_that_is_no_length_is_refused(retention: Any) -> None:
    with pytest.raises(FlowError, match="retention="):
        tumbling("5m", retention=retention)


def test_the_retention_is_not_part_of_the_definition() -> None:
    assert flow(tumbling("5m", retention="7d")).definitions == flow(tumbling("5m")).definitions
    assert str(tumbling("5m", retention="7d")) == "tumbling 5m, kept for 7d"


@pytest.mark.parametrize(
    ("window", "last", "left"),
    [
        (tumbling("5m", retention="0s"), 9, {"16:05:00Z"}),
        (tumbling("5m", retention="0s"), 10, {"16:10:00Z"}),
        (tumbling("5m", lateness="2m", retention="3m"), 9, {"16:00:00Z", "16:05:00Z"}),
        (tumbling("5m", lateness="2m", retention="3m"), 10, {"16:05:00Z", "16:10:00Z"}),
        (hopping("10m", "5m", retention="0s"), 9, {"16:00:00Z", "16:05:00Z"}),
        (hopping("10m", "5m", retention="0s"), 10, {"16:05:00Z", "16:10:00Z"}),
    ],
)
def test_a_window_leaves_when_the_watermark_passes_its_end_its_lateness_and_its_retention(
    window: Any, last: int, left: set[str]
) -> None:
    both = Both(flow(window))
    both.process([at(0, 1), at(1, 6), at(2, last)])
    assert {one[-9:] for one in windows(both.memory)} == left


def test_a_state_leaves_with_its_positions_and_is_counted() -> None:
    both = Both(flow(GONE))
    both.process([at(0, 1), at(1, 2), at(2, 1, screw="t")])
    both.process([at(3, 7)])
    assert both.memory.report.removed == {"screw": 2}
    assert set(both.memory.states("screw")) == {b"s@2025-11-24T16:05:00Z"}
    assert not open_dues(both.memory) - set(both.memory.states("screw"))


def open_dues(runner: MemoryRunner) -> set[bytes]:
    [store] = {id(one): one for one in runner.run.stores.values()}.values()
    return {key for dues in store._dues.values() for key in dues}  # type: ignore[attr-defined]


def test_by_default_a_window_stays_for_a_day_of_event_time() -> None:
    both = Both(
        flow(tumbling("5m"), Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", ahead="3d"))
    )
    both.process([at(0, 1), at(1, 24 * 60 + 4)])
    assert len(counts(both.memory)) == 2
    both.process([at(2, 24 * 60 + 5)])
    assert len(counts(both.memory)) == 2
    assert both.memory.report.removed == {"screw": 1}


def test_a_late_copy_of_a_removed_window_is_not_folded_anew() -> None:
    both = Both(flow(GONE))
    both.process([at(0, 1), at(1, 7)])
    both.process([at(2, 1)])
    assert counts(both.memory) == {"s@2025-11-24T16:05:00Z": 1}
    assert verdicts(both.memory) == {"accepted": 2, "window_closed": 1}


def test_a_redriven_letter_of_a_removed_window_follows_the_late_policy() -> None:
    def refuses(state: dict[str, int], element: Any) -> dict[str, int]:
        raise ValueError

    class Picky:
        def zero(self) -> dict[str, int]:
            return {"n": 0}

        def fold(self, state: dict[str, int], element: Any) -> dict[str, int]:
            return refuses(state, element) if element.value["screw"] == "bad" else {"n": state["n"] + 1}

    late = tumbling("5m", retention="0s", late="dead_letter")
    both = Both(Flow("fastening").source(SCREWS).aggregate("screw", "screw", Picky(), window=late))
    both.process([at(0, 1, screw="bad"), at(1, 2)])
    assert both.reasons() == [(0, Reason.FOLD_FAILED)]
    both.process([at(2, 9)])
    both.process([both.redriven(both.dead_letters[0], 3)])
    assert both.reasons()[1:] == [(3, Reason.WINDOW_CLOSED)]
    assert set(counts(both.memory)) == {"s@2025-11-24T16:05:00Z"}


def test_an_idle_partition_finds_the_windows_removed_closed_for_its_records() -> None:
    seconds = [0.0]
    made = flow(GONE, Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m"))
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), clock=lambda: seconds[0])
    runner.process([at(0, 1), at(0, 1, partition=1, screw="t")])
    seconds[0] = 300.0
    runner.process([at(1, 20)])
    assert set(counts(runner)) == {"s@2025-11-24T16:20:00Z"}
    runner.process(
        [at(1, 2, partition=1, screw="t"), at(2, 19, partition=1, screw="t"), at(3, 20, partition=1, screw="t")]
    )
    assert counts(runner) == {"s@2025-11-24T16:20:00Z": 1, "t@2025-11-24T16:20:00Z": 1}
    assert verdicts(runner)["window_closed"] == 2


@pytest.mark.parametrize(("first", "then"), [("0s", "1h"), ("1h", "0s")])
def test_a_window_that_has_left_does_not_come_back_with_another_retention(first: str, then: str) -> None:
    seconds, url = [0.0], fresh_store()
    topic = Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m", ahead="3d")

    def runner(retention: str) -> MemoryRunner:
        made = flow(tumbling("5m", retention=retention), topic)
        return MemoryRunner(made, bind(made, {}, url), clock=lambda: seconds[0])

    before = runner(first)
    before.process([at(0, 1), at(0, 1, partition=1, screw="t"), at(1, 2, partition=1, screw="t")])
    seconds[0] = 300.0
    before.process([at(1, 20)])
    before.close()
    after = runner(then)
    if then == "0s":
        assert windows(after) == {"T16:20:00Z"}, "a shorter retention holds for the windows in the store, too"
    after.process([at(2, 1, partition=1, screw="t")])
    assert set(counts(after)) == {"s@2025-11-24T16:20:00Z"}
    assert verdicts(after) == {"window_closed": 1}


@pytest.mark.parametrize("outcome", list(FaultOutcome))
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", ["remove:screw", "write:screw"])
def test_a_removal_that_was_interrupted_is_completed_by_the_next_run(
    point: str, nth: int, outcome: FaultOutcome
) -> None:
    made, url = flow(GONE), f"simulated://retire-{next(_names)}"
    screws = [f"s{n}" for n in range(20)]
    runner = MemoryRunner(made, bind(made, {}, url))
    runner.process([at(n, 1, screw=one) for n, one in enumerate(screws)])
    fault = Fault(point, outcome, (nth if point.startswith("write") else 1) + 1 * point.startswith("write"))
    with faults.use(Injector([fault], crash)), pytest.raises((Crash, Transient)):
        runner.process([at(20, 7)])  # its one save, and then one step for each of three buckets
    runner = MemoryRunner(made, bind(made, {}, url))
    assert set(counts(runner)) == {"s@2025-11-24T16:05:00Z"}
    removed = {one.removed for one in open_store(url).marks(runner.run.stage_ref(made.stages[0])).values()}
    assert len(removed) == 1
    assert removed != {None}


@pytest.mark.parametrize("outcome", [FaultOutcome.BEFORE, FaultOutcome.ERROR])
@pytest.mark.parametrize("point", ["fold", "persist:screw", "manifest"])
def test_nothing_leaves_before_the_manifest_that_closes_its_window(point: str, outcome: FaultOutcome) -> None:
    made, store = flow(GONE), fresh_store()
    runner = MemoryRunner(made, bind(made, {}, store))
    runner.process([at(0, 1)])
    with faults.use(Injector([Fault(point, outcome)], crash)), pytest.raises((Crash, Transient)):
        runner.process([at(1, 7)])
    runner = MemoryRunner(made, bind(made, {}, store))
    assert "s@2025-11-24T16:00:00Z" in counts(runner)
    runner.process([at(1, 2)])  # the broker lost the other one: this window is still open
    assert counts(runner)["s@2025-11-24T16:00:00Z"] == 2


def test_a_stage_finds_what_it_removed_closed_when_the_store_before_it_was_set_back() -> None:
    made = (
        Flow("fastening")
        .source(SCREWS)
        .aggregate("all", "screw", Fields(n=count()))
        .aggregate("screw", "screw", Fields(n=count()), window=GONE)
    )
    up, down = (f"simulated://retire-{next(_names)}" for _ in range(2))
    stores = {"all": up, "screw": down}
    runner = MemoryRunner(made, stores)
    copy = open_store(up).copy()
    runner.process([at(0, 1), at(1, 2)])
    runner.process([at(2, 7)])
    assert counts(runner) == {"s@2025-11-24T16:05:00Z": 1}
    open_store(up).restore(copy)
    runner = MemoryRunner(made, stores, accept=["store-empty", "store-went-back"])
    assert runner.run.start == {}
    runner.process([at(0, 1), at(1, 2), at(2, 7)])
    assert counts(runner) == {"s@2025-11-24T16:05:00Z": 1}
    assert counts(runner, "all") == {"s": 3}
    assert verdicts(runner) == {"window_closed": 2, "duplicate": 1}


def test_a_run_learns_how_far_a_stage_was_removed_from_the_furthest_bucket() -> None:
    made, url = flow(GONE), f"simulated://retire-{next(_names)}"
    runner = MemoryRunner(made, bind(made, {}, url))
    runner.process([at(0, 1)])
    store, ref = open_store(url), runner.run.stage_ref(made.stages[0])
    later = max(one.removed or 0 for one in store.marks(ref).values()) + 77
    store._remove_from(ref, "1", later, runner.run.epoch, {})
    assert Retirement(runner.run).removed == {"screw": later}
