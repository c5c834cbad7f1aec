"""Sessions whose states are published when they close: when, with what, and what no longer changes them."""

from collections.abc import Sequence
from typing import Any

import pytest

from aggregations.definition.flow import Flow
from aggregations.definition.sessions import SessionWindow, session
from aggregations.definition.times import LATEST_US
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Snapshot, read_snapshot
from tests.support.both import Both
from tests.support.pure import fresh_store
from tests.unit.test_final import IDLE
from tests.unit.test_windows import COUNT, MINUTE, NOW, SCREWS, at

TWO = session("2m")


def closing(window: SessionWindow = TWO) -> Flow[Any]:
    """A flow that publishes the number of fastenings of a screw in each session when it closes."""
    stage = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, window=window)
    return stage.publish_states("final", on="close")


def published(runner: MemoryRunner) -> list[tuple[str, int]]:
    """First and last minute of each published session, and its count, in the order of publication."""
    found = [((output.key or b"").decode(), read_snapshot(output.value)) for output in runner.outputs]
    return [(f"{key[13:18]}-{key[34:39]}", snapshot.state["n"]) for key, snapshot in found]


@pytest.mark.parametrize(
    ("window", "minutes", "wanted"),
    [
        (TWO, [1, 2, 6], []),  # an element of minute 4 may still come, and join it
        (TWO, [1, 2, 6, 4, 7], []),  # and did
        (TWO, [1, 2, 7], [("16:01-16:02", 2)]),
        (session("2m", lateness="1m"), [1, 2, 7], []),
        (session("2m", lateness="1m"), [1, 2, 8], [("16:01-16:02", 2)]),
        (session("2m", retention="0s"), [1, 8, 15], [("16:01-16:01", 1), ("16:08-16:08", 1)]),
        (TWO, [1, 4, 7, 10], [("16:01-16:01", 1), ("16:04-16:04", 1)]),  # the key never rests
    ],
)
def test_a_session_is_published_when_no_element_can_join_it(
    window: SessionWindow, minutes: Sequence[int], wanted: list[tuple[str, int]]
) -> None:
    whole, single = Both(closing(window)), Both(closing(window))
    whole.process([at(offset, minute) for offset, minute in enumerate(minutes)])
    for offset, minute in enumerate(minutes):
        single.process([at(offset, minute)])
    assert published(whole.memory) == published(single.memory) == wanted


def test_a_final_snapshot_is_one_session_with_its_times() -> None:
    both = Both(closing())
    both.process([at(0, 1)])
    both.process([at(1, 2)])
    both.process([at(2, 8)])
    [output] = both.memory.outputs
    assert output.key == b"s@2025-11-24T16:01:00Z/2025-11-24T16:02:00Z"
    window = ("2025-11-24T16:01:00Z", "2025-11-24T16:02:00Z")
    assert read_snapshot(output.value) == Snapshot("fastening", "screw", 1, 3, 1, 1, {"n": 2}, *window, batch=3)


def test_a_published_session_stays_in_the_store_for_its_retention() -> None:
    both = Both(closing())
    both.process([at(0, 1), at(1, 8)])
    both.process([at(2, 9)])
    assert published(both.memory) == [("16:01-16:01", 1)]
    assert [state["n"] for state in both.results("screw").values()] == [1, 2]


@pytest.mark.parametrize("on", ["update", "close"])
def test_a_silent_partition_that_returns_changes_no_session_that_is_published(on: str) -> None:
    seconds = [0.0]
    stage = Flow("fastening").source(IDLE).aggregate("screw", "screw", COUNT, window=TWO)
    made = stage.publish_states("states", on=on)
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), clock=lambda: seconds[0])
    runner.process([at(0, 1), at(0, 1, partition=1, screw="t"), at(1, 2, partition=1, screw="t")])
    seconds[0] = 300.0
    runner.process([at(1, 20)])
    runner.process([at(2, 3, partition=1, screw="t"), at(3, 20, partition=1, screw="t")])
    closes = on == "close"
    assert [state["n"] for key, state in runner.results("screw").items() if key[:1] == b"t"] == [2 if closes else 3, 1]
    assert runner.report.verdicts["screw"].get("window_closed", 0) == closes
    if closes:
        assert sorted(published(runner)) == [("16:01-16:01", 1), ("16:01-16:02", 2)]


def test_an_element_that_is_near_a_published_session_is_too_late() -> None:
    seconds = [0.0]
    made = Flow("fastening").source(IDLE).aggregate("screw", "screw", COUNT, window=TWO)
    made = made.publish_states("final", on="close")
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), clock=lambda: seconds[0])
    runner.process([at(0, 1), at(0, 1, partition=1, screw="t"), at(1, 2, partition=1, screw="t")])
    seconds[0] = 300.0
    runner.process([at(1, 7)])
    assert sorted(published(runner)) == [("16:01-16:01", 1), ("16:01-16:02", 2)]
    runner.process([at(2, 4, partition=1, screw="t"), at(3, 5, partition=1, screw="t")])
    assert runner.report.verdicts["screw"]["window_closed"] == 1
    assert [state["n"] for key, state in runner.results("screw").items() if key[:1] == b"t"] == [2, 1]


def test_a_key_with_an_event_at_the_latest_valid_time_is_looked_through() -> None:
    both, last = Both(closing(session("7h"))), LATEST_US // 60_000_000 - NOW // MINUTE
    stamp = NOW + last * MINUTE
    both.process([at(0, last - 60_000, stamp=stamp), at(1, last, stamp=stamp)])
    assert [read_snapshot(one.value).state["n"] for one in both.memory.outputs] == [1]
