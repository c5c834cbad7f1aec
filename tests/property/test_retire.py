"""Removal: the vectorised path and the per-message path remove and judge the same, whatever the ends of batches."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count as numbers
from typing import TypeVar

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.windows import Window, hopping, tumbling
from envelope import TopicPartition
from tests.property.test_windows import MINUTE, NOW, ROUNDS, SCREWS, Attempt, flow_with, logs, wanted
from tests.support.both import TOPIC_ID, Both

T = TypeVar("T")
WINDOWS = st.sampled_from(
    [
        tumbling("5m", retention="0s"),
        tumbling("5m", lateness="2m", retention="4m"),
        hopping("10m", "5m", retention="0s"),
        hopping("15m", "5m", lateness="3m", retention="1m", late="dead_letter"),
    ]
)


def read_in_batches(
    both: Both, found: Sequence[Sequence[T]], data: st.DataObject, delivered: Callable[[T, int], Record]
) -> None:
    """Process the logs to their ends, in batches of any size and in any order of partitions.

    They are read from their beginnings: a partition that is not read yet holds all windows open.
    """
    for run in (both.memory.run, both.run):
        run.start_at("screws", TOPIC_ID, dict.fromkeys(range(len(found)), 0))
    for number in numbers():
        start = [both.memory.run.start.get(TopicPartition("screws", one), 0) for one in range(len(found))]
        left = [range(begin, len(log)) for begin, log in zip(start, found, strict=True)]
        if not any(left):
            return
        batch = []
        for partition in data.draw(st.permutations(range(len(found)))):
            size = len(left[partition]) if number >= ROUNDS else data.draw(st.integers(0, len(left[partition])))
            batch += [delivered(found[partition][offset], offset) for offset in left[partition][:size]]
        both.process(batch)


def held_after(
    both: Both, window: Window, found: list[list[Attempt]], data: st.DataObject
) -> tuple[dict[bytes, set[Attempt]], int | None]:
    """What windows hold by the rule, when the logs have been processed; and the closing watermark."""
    read_in_batches(both, found, data, Attempt.record)
    held: dict[bytes, set[Attempt]] = {}
    for log in found:
        held |= wanted(log, window)[0]
    manifest = both.memory.run.manifest
    return held, manifest.closing_us if manifest else None


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(window=WINDOWS, found=logs(), data=st.data())
def test_both_paths_remove_the_windows_that_all_partitions_have_passed(
    window: Window, found: list[list[Attempt]], data: st.DataObject
) -> None:
    both = Both(flow_with(window))
    runner = both.memory
    held, closing_us = held_after(both, window, found, data)
    stays = {
        key: events
        for key, events in held.items()
        if closing_us is None or leaves(window, key) * 1_000_000 > closing_us
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
        assert due == start + window.size
        left_us = leaves(window, key) * 1_000_000
        assert window.due_until(left_us - 1) < due <= window.due_until(left_us)
        assert window.is_removed(start, due)
        assert not window.is_removed(start, due - 1)
        assert not window.is_removed(start, None)


def leaves(window: Window, key: bytes) -> int:
    """The closing watermark at which a window leaves, in seconds since 1970."""
    return window.due(key) + window.lateness + window.retention


def _time(seconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize("until", [0, 299, 300, 301])
def test_the_time_until_which_states_are_due_rises_from_window_to_window(until: int) -> None:
    assert tumbling("5m", retention="0s").due_until(until * 1_000_000) == until // 300 * 300


def expired(log: list[Attempt], seconds: int) -> tuple[dict[bytes, tuple[set[Attempt], int]], Counter[str]]:
    """What the states of a partition's parts hold, with their latest event times, and the verdicts, by the rule."""
    held: dict[bytes, tuple[set[Attempt], int]] = {}
    seen: dict[bytes, set[Attempt]] = {}
    verdicts: Counter[str] = Counter()
    reached: int | None = None
    for one in log:
        time_us, key = (NOW + one.minutes * MINUTE) * 1_000, one.part.encode()
        events, latest = held.get(key, (set(), None))
        if reached is not None and time_us + seconds * 1_000_000 <= reached:
            verdicts["too late"] += 1  # or a duplicate: neither is folded
        elif one in seen.get(key, ()):
            verdicts["duplicate"] += 1
        else:
            now = time_us if reached is None else max(time_us, reached)
            if latest is not None and latest + seconds * 1_000_000 <= now:
                events, latest = set(), None
            held[key] = {*events, one}, time_us if latest is None else max(latest, time_us)
            seen.setdefault(key, set()).add(one)
            verdicts["folded"] += 1
        reached = time_us if reached is None else max(reached, time_us)
    return held, verdicts


@given(minutes=st.sampled_from([1, 3, 8, 20]), found=logs(), data=st.data())
def test_states_expire_by_the_logs_alone_on_both_paths(
    minutes: int, found: list[list[Attempt]], data: st.DataObject
) -> None:
    fields = Fields(n=count(), torque=total("torque"))
    flow = (
        Flow("fastening")
        .source(SCREWS)
        .aggregate("attempts", "part", fields, expire_after=f"{minutes}m")
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )
    both = Both(flow)
    runner = both.memory
    read_in_batches(both, found, data, Attempt.record)
    held: dict[bytes, tuple[set[Attempt], int]] = {}
    verdicts: Counter[str] = Counter()
    for log in found:
        mine, counted = expired(log, minutes * 60)
        held |= mine
        verdicts += counted
    closing_us = runner.run.manifest.closing_us if runner.run.manifest else None
    expiry = flow.stages[0].aggregate.expiry
    assert expiry is not None
    stays = {
        key: events
        for key, (events, latest) in held.items()
        if closing_us is None or expiry.due(latest) > expiry.due_until(closing_us)
    }
    assert runner.results("attempts") == {
        key: {"n": len(events), "torque": sum(one.root for one in events)} for key, events in stays.items()
    }
    folded = verdicts["folded"]
    assert runner.results("all") == ({b"all": {"n": folded}} if folded else {})
