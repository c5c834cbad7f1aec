"""Final snapshots: both paths publish each window once, as the logs make it, whatever the ends of batches."""

from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.windows import Window
from aggregations.run.snapshots import read_snapshot
from tests.property.test_retire import WINDOWS, held_after
from tests.property.test_windows import SCREWS, Attempt, logs
from tests.support.both import Both


def closing_flow(window: Window) -> Flow[Any]:
    return (
        Flow("fastening")
        .source(SCREWS)
        .aggregate("attempts", "part", Fields(n=count(), torque=total("torque")), window=window)
        .publish_states("final", on="close")
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )


@settings(max_examples=80, deadline=None)
@given(window=WINDOWS, found=logs(), data=st.data())
def test_each_window_is_published_once_when_all_partitions_have_closed_it(
    window: Window, found: list[list[Attempt]], data: st.DataObject
) -> None:
    both = Both(closing_flow(window))
    held, closing_us = held_after(both, window, found, data)
    closed = {
        key: {"n": len(events), "torque": sum(one.root for one in events)}
        for key, events in held.items()
        if closing_us is not None and (window.due(key) + window.lateness) * 1_000_000 <= closing_us
    }
    published = [(out.key, read_snapshot(out.value).state) for out in both.memory.outputs]
    assert len(published) == len(closed)
    assert dict(published) == closed


@given(minutes=st.integers(-10_000, 10_000), window=WINDOWS)
def test_a_window_counts_as_closed_exactly_when_its_end_and_its_lateness_are_reached(
    minutes: int, window: Window
) -> None:
    for start in window.starts(minutes * 60_000_000):
        end, closes_us = start + window.size, window.closes_us(start)
        assert window.closed_until(closes_us - 1) < end <= window.closed_until(closes_us)
        assert window.due_until(closes_us) <= window.closed_until(closes_us)
