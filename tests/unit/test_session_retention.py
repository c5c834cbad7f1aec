"""Sessions that no element can change any more leave the state of their key, and a state without others its store."""

from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Reason
from tests.support.both import Both
from tests.support.pure import fresh_store
from tests.unit.test_sessions import Listing, at, flow, found

GONE = session("10s", retention="0s")
SECOND_US = 1_000_000


@pytest.mark.parametrize("retention", ["-1m", "soon", 5])
def test_a_retention_that_is_no_length_is_refused(retention: Any) -> None:
    with pytest.raises(FlowError, match="retention="):
        session("10s", retention=retention)


def test_the_retention_is_not_part_of_the_definition() -> None:
    assert flow(session("10s", retention="7d")).definitions == flow(session("10s")).definitions
    assert str(session("10s", retention="7d")) == "session 10s, kept for 7d"
    assert str(session("10s", retention="24h")) == "session 10s"


def test_a_session_is_due_when_the_next_element_in_time_can_no_longer_join_it() -> None:
    window = session("10s", lateness="5s", retention="0s")
    due = window.due(7 * SECOND_US)
    # An element of second 17 joins it, and is not too late if the log of its partition has reached second 32.
    assert window.due_until(32 * SECOND_US) < due
    assert window.closes_us(17 * SECOND_US) > 32 * SECOND_US
    assert window.due_until(33 * SECOND_US) == due
    assert window.is_removed(7 * SECOND_US, due)
    assert not window.is_removed(8 * SECOND_US, due)
    assert not window.is_removed(7 * SECOND_US, None)


def test_the_time_until_which_sessions_are_due_rises_in_steps() -> None:
    window = session("5m", retention="1d")
    times = {window.due_until(second * SECOND_US) for second in range(0, 200_000, 60)}
    assert len(times) < 200_000 * 16 // window.stays + 3


@pytest.mark.parametrize("retention", ["0s", "7s", "5m", "1d"])
@pytest.mark.parametrize("gap", ["1s", "10s", "2m", "1h"])
def test_a_store_notes_few_due_times_and_a_state_leaves_when_it_is_due(gap: str, retention: str) -> None:
    window = session(gap, lateness="1s", retention=retention)
    times = [window.changes * SECOND_US * n // 999 for n in range(1_000)]
    assert len({window.noted_due(time) for time in times}) <= 33
    for time in times[::37]:
        due, noted = window.due(time), window.noted_due(time)
        assert due <= noted <= due + max(window.changes // 4, 1)
        for second in range(0, 2 * window.stays, max(window.stays // 200, 1)):
            until = window.due_until(second * SECOND_US)
            assert (due <= until) == (noted <= until)


def test_a_due_session_leaves_the_state_when_its_key_is_written() -> None:
    both = Both(flow(GONE))
    both.process([at(0, 0), at(1, 20)])
    both.process([at(2, 21)])
    assert found(both) == {(0, 0): 1, (20, 21): 2}
    both.process([at(3, 22)])
    assert found(both) == {(20, 22): 3}


def test_the_state_of_a_key_leaves_with_its_last_session_and_is_counted() -> None:
    both = Both(flow(GONE))
    both.process([at(0, 0, screw="t"), at(1, 5), at(2, 20)])
    assert set(both.memory.states("screw")) == {b"s", b"t"}
    both.process([at(3, 21)])
    assert set(both.memory.states("screw")) == {b"s"}
    assert both.memory.report.removed == {"screw": 1}
    both.process([at(4, 0, screw="t"), at(5, 21, screw="t")])
    assert found(both) == {(5, 5): 1, (20, 21): 2} | {(21, 21): 1}
    assert both.memory.report.verdicts["screw"]["window_closed"] == 1


def test_by_default_sessions_stay_for_a_day_of_event_time() -> None:
    both = Both(flow(session("10s")))
    both.process([at(0, 0), at(1, 24 * 3_600)])
    both.process([at(2, 24 * 3_600 + 5)])
    assert len(found(both)) == 2
    both.process([at(3, 26 * 3_600)])
    both.process([at(4, 26 * 3_600)])
    assert found(both) == {(86_400, 86_405): 2, (93_600, 93_600): 2}


def test_a_hole_stays_as_long_as_its_event_may_be_redriven(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(flow(GONE, Listing()))
    both.process([at(0, 0), at(1, 13)])
    [letter] = both.dead_letters
    both.process([at(2, 21, screw="u")])
    assert set(both.memory.states("screw")) == {b"s", b"u"}
    monkeypatch.setattr(Listing, "fold", lambda _self, state, element: [*state, element["at"] // 1_000])
    both.process([both.redriven(letter, 3)])
    assert found(both) == {(13, 13): 1, (21, 21): 1}
    assert both.memory.report.verdicts["screw"]["redriven"] == 1


def test_a_redriven_letter_of_a_session_that_has_left_follows_the_late_policy() -> None:
    both = Both(flow(session("10s", retention="0s", late="dead_letter"), Listing()))
    both.process([at(0, 13)])
    [letter] = both.dead_letters
    both.process([at(1, 60, screw="u")])
    assert set(both.memory.states("screw")) == {b"u"}
    both.process([both.redriven(letter, 2)])
    assert both.reasons()[1:] == [(2, Reason.WINDOW_CLOSED)]
    assert found(both) == {(60, 60): 1}


@pytest.mark.parametrize(("retention", "letters"), [("0s", 0), ("1h", 2)])
def test_sessions_that_a_log_has_passed_do_not_count_against_the_limit_whatever_the_batches(
    retention: str, letters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aggregations.per_message.sessions", "aggregations.columns.sessions"):
        monkeypatch.setattr(f"{module}.MOST_SESSIONS", 2)
    for size in (1, 2, 4):
        both = Both(flow(session("10s", retention=retention)))
        records = [at(offset, 30 * offset) for offset in range(4)]
        for begin in range(0, 4, size):
            both.process(records[begin : begin + size])
        assert len(both.reasons()) == letters


def test_an_element_of_an_idle_partition_is_too_late_if_its_session_may_have_left() -> None:
    seconds = [0.0]
    topic = Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m")
    made = Flow("fastening").source(topic).aggregate("screw", "screw", Fields(n=count()), window=GONE)
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), clock=lambda: seconds[0])
    runner.process([at(0, 0), at(0, 0, partition=1, screw="t")])
    seconds[0] = 300.0
    runner.process([at(1, 60)])
    assert set(runner.states("screw")) == {b"s"}
    runner.process([at(1, 39, partition=1, screw="t"), at(2, 40, partition=1, screw="t")])
    assert runner.report.verdicts["screw"]["window_closed"] == 1
    assert found(runner) == {(0, 0): 1, (60, 60): 1, (40, 40): 1}
