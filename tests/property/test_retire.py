"""Removal: the vectorised path and the per-message path remove and judge the same, whatever the ends of batches."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.windows import Window, hopping, tumbling
from envelope import TopicPartition
from tests.property.test_windows import Attempt, flow_with, logs, wanted
from tests.support.both import TOPIC_ID, Both

WINDOWS = st.sampled_from(
    [
        tumbling("5m", retention="0s"),
        tumbling("5m", lateness="2m", retention="4m"),
        hopping("10m", "5m", retention="0s"),
        hopping("15m", "5m", lateness="3m", retention="1m", late="dead_letter"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(window=WINDOWS, found=logs(), data=st.data())
def test_both_paths_remove_the_windows_that_all_partitions_have_passed(
    window: Window, found: list[list[Attempt]], data: st.DataObject
) -> None:
    both = Both(flow_with(window))
    runner = both.memory
    for run in (runner.run, both.run):  # a partition that is not read yet holds all windows open
        run.start_at("screws", TOPIC_ID, dict.fromkeys(range(len(found)), 0))
    while True:
        start = {partition: runner.run.start.get(TopicPartition("screws", partition), 0) for partition in range(3)}
        left = [range(start[partition], len(log)) for partition, log in enumerate(found)]
        if not any(left):
            break
        batch = []
        for partition in data.draw(st.permutations(range(len(found)))):
            size = data.draw(st.integers(0, len(left[partition])))
            batch += [found[partition][offset].record(offset) for offset in left[partition][:size]]
        both.process(batch)
    held: dict[bytes, set[Attempt]] = {}
    for log in found:
        held |= wanted(log, window)[0]
    closing_us = runner.run.manifest.closing_us if runner.run.manifest else None
    stays = {
        key: events for key, events in held.items() if closing_us is None or window.due(key) * 1_000_000 > closing_us
    }
    assert runner.results("attempts") == {
        key: {"n": len(events), "torque": sum(one.root for one in events)} for key, events in stays.items()
    }
    assert runner.report.removed["attempts"] == len(held) - len(stays)
    folded = sum(map(len, held.values()))
    assert runner.results("all") == ({b"all": {"n": folded}} if folded else {})


@given(minutes=st.integers(-10_000, 10_000), window=WINDOWS)
def test_the_due_time_of_a_window_is_reached_exactly_when_it_is_removed(minutes: int, window: Window) -> None:
    for start in window.starts(minutes * 60_000_000):
        key = window.key_at(b"k", _time(start))
        due = window.due(key)
        assert due == start + window.size + window.lateness + window.retention
        assert window.due_until(due * 1_000_000 - 1) < due <= window.due_until(due * 1_000_000)
        assert window.is_removed(start, due)
        assert not window.is_removed(start, due - 1)
        assert not window.is_removed(start, None)


def _time(seconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize("until", [0, 299, 300, 301])
def test_the_time_until_which_states_are_due_rises_from_window_to_window(until: int) -> None:
    assert tumbling("5m", retention="0s").due_until(until * 1_000_000) == until // 300 * 300
