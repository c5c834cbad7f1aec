"""Sessions leave: neither the ends of batches, nor the order of partitions, nor a crash change which, or a verdict."""

from itertools import count as numbers
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aggregations.definition.sessions import SessionWindow, session
from aggregations.run import states
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Conflict, Transient
from tests.property import test_windows as windows
from tests.property.test_retire import read_in_batches
from tests.property.test_sessions import Attempt, Crash, crash, divided, flow_with, logs, wanted
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

WINDOWS = st.sampled_from(
    [
        session("1m", retention="0s"),
        session("3m", retention="0s"),
        session("3m", lateness="4m", retention="0s"),
        session("2m", retention="5m", late="dead_letter"),
    ]
)
POINTS = [*windows.POINTS, "remove:attempts"]
FAR = 9_000
"""Minutes after which every session of the logs has left."""


def closed_by(found: list[list[Attempt]]) -> list[list[Attempt]]:
    """The logs, and at the end of each six events, three of each part, far later: the first of them close all sessions."""
    longer = []
    for partition, log in enumerate(found):
        root = 2 * len(log) + 2
        longer.append([*log, *(Attempt(partition, root + n, FAR) for n in range(6))])
    return longer


def expected(found: list[list[Attempt]], window: SessionWindow) -> tuple[dict[bytes, Any], dict[bytes, Any], int]:
    """All sessions of the folded events; those that are left at the end; and the number of folded events."""
    held = set[Attempt]()
    for log in found:
        held |= wanted(log, window)[0]
    every = divided(held, window)
    left = divided({one for one in held if one.minutes == FAR}, window)
    return every, left, len(held)


def due(window: SessionWindow, key: bytes, closing_us: int | None) -> bool:
    end_us = round(window.split(key).end.timestamp() * 1_000_000)
    return closing_us is not None and window.due(end_us) <= window.due_until(closing_us)


def closing(runner: MemoryRunner) -> int | None:
    return runner.run.manifest.closing_us if runner.run.manifest else None


def check_left(runner: MemoryRunner, window: SessionWindow, every: dict[bytes, Any]) -> None:
    """No session that may still change is missing, and every state has one that is not due."""
    found = runner.results("attempts")
    keys = {key for key in every if not due(window, key, closing(runner))}
    assert {window.split(key).key for key in found} == {window.split(key).key for key in keys}
    assert keys <= found.keys() <= every.keys()
    assert found == {key: every[key] for key in found}


def check(window: SessionWindow, found: list[list[Attempt]], data: st.DataObject) -> None:
    """Process logs in random batches with random crashes, and compare with the rule."""
    closes = data.draw(st.booleans())
    if closes:
        found = closed_by(found)
    flow, store = flow_with(window), fresh_store()
    stores = bind(flow, {}, store)
    runner = MemoryRunner(flow, stores)
    runner.run.start_at("screws", TOPIC_ID, dict.fromkeys(range(len(found)), 0))
    every, left_at_end, folded = expected(found, window)
    for number in numbers():
        start = [runner.run.start.get(TopicPartition("screws", one), 0) for one in range(len(found))]
        left = [range(begin, len(log)) for begin, log in zip(start, found, strict=True)]
        if not any(left):
            break
        batch = []
        for partition in data.draw(st.permutations(range(len(found)))):
            # The last event of each part is read alone: its key is then written once more.
            size = len(left[partition]) if number >= windows.ROUNDS else data.draw(st.integers(0, len(left[partition])))
            size = size if len(left[partition]) <= 2 else min(size, len(left[partition]) - 2)
            batch += [found[partition][offset].delivered(offset) for offset in left[partition][:size]]
        if number < windows.ROUNDS and data.draw(st.integers(0, 3)) == 0:
            point, outcome = data.draw(st.sampled_from(POINTS)), data.draw(st.sampled_from(FaultOutcome))
            with faults.use(Injector([Fault(point, outcome)], crash)):
                try:
                    runner.process(batch)
                except (Crash, Transient):
                    runner = MemoryRunner(flow, stores)
            continue
        runner.process(batch)
    check_left(runner, window, every)
    if closes:
        assert runner.results("attempts") == left_at_end
    assert runner.results("all") == ({b"all": {"n": folded}} if folded else {})


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(window=WINDOWS, found=logs(), data=st.data())
def test_batches_read_orders_and_crashes_do_not_change_which_sessions_are_left(
    window: SessionWindow, found: list[list[Attempt]], data: st.DataObject
) -> None:
    check(window, found, data)


@given(window=WINDOWS, found=logs(), data=st.data())
def test_both_paths_let_the_same_sessions_leave(
    window: SessionWindow, found: list[list[Attempt]], data: st.DataObject
) -> None:
    both = Both(flow_with(window))
    runner = both.memory
    read_in_batches(both, found, data, Attempt.delivered)
    every, _, folded = expected(found, window)
    check_left(runner, window, every)
    assert runner.results("all") == ({b"all": {"n": folded}} if folded else {})


PLANTED = {
    "sessions leave although an element may still join them": (
        SessionWindow,
        "stays",
        property(lambda self: self.gap + self.lateness + self.retention),
    ),
    "a state is due ten minutes before its last session ends": (
        states,
        "latest",
        lambda time_us, hole_us: time_us and time_us - 600_000_000,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    planted = given(window=WINDOWS, found=logs(), data=st.data())(check)
    few = settings(
        max_examples=150, derandomize=True, phases=[Phase.generate], deadline=None, report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, Conflict)):
        few(planted)()
