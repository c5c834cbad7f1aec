"""Bounded skew of sources, and idle partitions: the options of a topic, and what the driver makes of them."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.engine import engine
from aggregations.engine.job import Job
from aggregations.errors import FlowError
from aggregations.per_message.ledger import Changes
from aggregations.report import Report
from envelope import TopicPartition
from tests.support.driver import ENDS, Driver, Outcome, report

SECOND = 1_000_000


def flow(**options: Any) -> Flow[Any]:
    topic = Topic("legs", Json({"tail": str}), **options)
    return Flow("fleet").source(topic).aggregate("aircraft", "tail", Fields(n=count()))


@pytest.mark.parametrize("skew", ["0s", "soon", 5])
def test_a_skew_that_is_no_length_is_refused(skew: Any) -> None:
    with pytest.raises(FlowError, match="skew="):
        Topic("legs", skew=skew)


def test_the_skew_is_no_part_of_the_definition_and_makes_the_flow_note_event_times() -> None:
    assert flow(skew="10m").definitions == flow().definitions
    assert (flow(skew="10m").is_timed, flow().is_timed) == (True, False)
    assert replace(Topic("legs", skew="10m"), cluster="two").skew_seconds == 600


def times(*seconds: int | None) -> Changes:
    places = zip(ENDS, seconds, strict=True)
    return Changes(times={place: at * SECOND for place, at in places if at is not None})


def lengths(job: Job) -> Mapping[TopicPartition, int]:
    return {one.place: one.end - one.start for slot in job.attempt.tasks for one in slot.ranges}


@pytest.mark.parametrize(
    ("seconds", "then"),
    [
        ((100, 1_000), [{"legs:0": 4}, {"legs:1": 4}, {"legs:1": 1}]),
        ((1_000, 100), [{"legs:1": 4}, {"legs:0": 3, "legs:1": 1}, {"legs:0": 1}]),
        ((100, 160), [{"legs:0": 1, "legs:1": 2}, {"legs:0": 2, "legs:1": 2}, {"legs:0": 1, "legs:1": 1}]),
        ((None, 1_000), [{"legs:0": 1, "legs:1": 2}, {"legs:0": 2, "legs:1": 2}, {"legs:0": 1, "legs:1": 1}]),
    ],
    ids=["first behind", "second behind", "near", "no time"],
)
def test_the_driver_reads_the_partition_that_is_behind_first(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[int | None, ...], then: list[Mapping[str, int]]
) -> None:
    later: list[Outcome] = [(report(1), []) for _ in then]
    driver = Driver(monkeypatch, flow(skew="1m"), (report(3, changes=times(*seconds)), []), *later)
    driver.stream(most=4)
    assert driver.run.start == ENDS
    found = [{f"{at.topic}:{at.partition}": number for at, number in lengths(job).items()} for job in driver.jobs]
    assert found == [{"legs:0": 1, "legs:1": 2}, *then]


@pytest.mark.parametrize(("idle", "closing"), [("5m", [50, 50, 300]), (None, [50, 50, 50])])
def test_windows_close_without_a_partition_that_is_idle_for_as_long_as_its_topic_says(
    monkeypatch: pytest.MonkeyPatch, idle: str | None, closing: list[int]
) -> None:
    clock, found = [0.0], list[int]()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    topic = Topic("legs", Json({"tail": str}), idle=idle)
    windows = Flow("fleet").source(topic).aggregate("aircraft", "tail", Fields(n=count()), window=tumbling("1m"))
    reached = [times(100, 50), times(200, None), times(300, None)]
    driver = Driver(monkeypatch, windows, *((report(1, changes=one), []) for one in reached))
    driver.broker.highs = dict(zip(ENDS, (11, 1), strict=True))

    def batch(_: Report) -> None:
        manifest = driver.run.manifest
        assert manifest is not None
        assert manifest.closing_us is not None
        found.append(manifest.closing_us // SECOND)
        clock[0] += 200

    monkeypatch.setattr(driver.engine.batches, "_progress", batch)
    driver.stream(most=4)
    assert [len(lengths(job)) for job in driver.jobs] == [2, 1, 1], "the second partition is read to its end"
    assert found == closing
