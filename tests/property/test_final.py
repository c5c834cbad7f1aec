"""Final snapshots: both paths publish each window once, as the logs make it, whatever the ends of batches."""

from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.windows import Window, start_bytes, tumbling
from aggregations.run.snapshots import read_snapshot
from tests.property.test_retire import WINDOWS, held_after
from tests.property.test_windows import MINUTE, NOW, SCREWS, Attempt, logs
from tests.support.both import Both


def closing_flow(window: Window) -> Flow[Any]:
    return (
        Flow("fastening")
        .source(SCREWS)
        .aggregate("attempts", "part", Fields(n=count(), torque=total("torque")), window=window)
        .publish_states("final", on="close")
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )


@settings(max_examples=3 * settings.default.max_examples // 2)
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


def passed_on(log: list[Attempt], window: Window, behind: Window) -> dict[bytes, list[Attempt]]:
    """What a stage behind one with windows folds of a partition's log, by the key of its window."""
    found: dict[bytes, list[Attempt]] = {}
    seen: set[tuple[Attempt, int]] = set()
    latest: int | None = None
    for one in log:
        time_us = (NOW + one.minutes * MINUTE) * 1_000
        for start in window.starts(time_us):
            if (one, start) in seen or (latest is not None and window.closes_us(start) <= latest):
                continue
            seen.add((one, start))
            [place] = behind.starts(time_us)
            if latest is None or behind.closes_us(place) > latest:
                found.setdefault(b"all" + start_bytes(place), []).append(one)
        latest = time_us if latest is None else max(latest, time_us)
    return found


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(window=WINDOWS, lateness=st.sampled_from(["0s", "4m"]), found=logs(), data=st.data())
def test_a_stage_behind_publishes_its_windows_too_of_what_the_first_one_passed_on(
    window: Window, lateness: str, found: list[list[Attempt]], data: st.DataObject
) -> None:
    behind = tumbling("10m", lateness=lateness, retention="0s")
    first = Flow("fastening").source(SCREWS).aggregate("attempts", "part", Fields(n=count()), window=window)
    flow = first.publish_states("final", on="close").aggregate("all", pl.lit("all"), Fields(n=count()), window=behind)
    both = Both(flow.publish_states("behind", on="close"))
    _, closing_us = held_after(both, window, found, data)
    wanted: dict[bytes, int] = {}
    for log in found:
        for key, events in passed_on(log, window, behind).items():
            if closing_us is not None and (behind.due(key) + behind.lateness) * 1_000_000 <= closing_us:
                wanted[key] = wanted.get(key, 0) + len(events)
    published = [out for out in both.memory.outputs if out.topic == "behind"]
    assert len(published) == len(wanted)
    assert {out.key: read_snapshot(out.value).state["n"] for out in published} == wanted


@given(minutes=st.integers(-10_000, 10_000), window=WINDOWS)
def test_a_window_counts_as_closed_exactly_when_its_end_and_its_lateness_are_reached(
    minutes: int, window: Window
) -> None:
    for start in window.starts(minutes * 60_000_000):
        end, closes_us = start + window.size, window.closes_us(start)
        assert window.closed_until(closes_us - 1) < end <= window.closed_until(closes_us)
        assert window.due_until(closes_us) <= window.closed_until(closes_us)
