"""Windows on Spark: states, verdicts and dead letters are those of the in-memory runner, batch by batch and in a replay."""

import random
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import SessionWindow, session
from aggregations.definition.source import Topic
from aggregations.definition.windows import Window, hopping, tumbling
from aggregations.run.snapshots import read_snapshot
from envelope import Envelope, Hop, Verdict, encode
from tests.messages import Leg
from tests.support.world import Sent, World, legs, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]

BEGIN_US = 1_600_000_000_000_000
MINUTE_US = 60_000_000


def timed(sent: list[Any]) -> list[Sent]:
    """Legs that took off in turn, a minute apart, each up to ten minutes early; some are sent again, two have no time."""
    rng, messages = random.Random(5), []
    for i, leg in enumerate(sent):
        time = None if i in (40, 41) else BEGIN_US + (i - rng.randrange(10)) * MINUTE_US
        hop = Hop("raw", i % 3, i // 3, via="kit", index=0, count=1)
        value = encode(Envelope(leg.SerializeToString(), (hop,), key=leg.tail.encode(), event_time_us=time))
        messages.append(Sent(value, leg.tail.encode()))
        if rng.randrange(5) == 0:
            messages.append(rng.choice(messages))
    return messages


def windowed(topic: str, states: str, window: Window | SessionWindow) -> Flow[Any]:
    return (
        Flow("windows")
        .source(Topic(topic, Leg))
        .aggregate("tails", "tail", Fields(legs=count(), minutes=total("minutes")), window=window)
        .publish_states(states)
        .aggregate("hours", pl.col("carrier"), Fields(legs=count()), window=tumbling("1h", lateness="1d"))
    )


@pytest.mark.parametrize(
    "window",
    [
        tumbling("5m", lateness="2m", late="dead_letter"),
        hopping("20m", "10m"),
        hopping("20m", "10m", retention="0s"),
        session("3m", lateness="2m", late="dead_letter"),
    ],
    ids=["tumbling", "hopping", "removed", "session"],
)
def test_windows_on_spark_are_those_of_the_oracle_in_any_batches_and_in_a_replay(
    world: World, topic: Callable[..., str], window: Window | SessionWindow
) -> None:
    messages = timed(legs(200))
    world.send(messages)
    flow = windowed(world.topic, topic(name="windows"), window)
    manifests: list[bytes] = []
    report = world.run(flow, max_records=70, progress=lambda _: manifests.append(world.manifest(flow)))
    assert report.batches > 2
    oracle = world.check(flow)
    assert verdicts(report)["tails"][Verdict.WINDOW_CLOSED] > 5
    assert report.reasons["bad_event_time"] >= 2
    assert report.reasons["window_closed"] == (
        verdicts(report)["tails"][Verdict.WINDOW_CLOSED] if window.each == 1 else 0
    )
    closed = [verdicts(one)["tails"][Verdict.WINDOW_CLOSED] for one in (report, oracle.report)]
    leaves = isinstance(window, Window) and window.retention == 0
    assert closed[0] == closed[1] or leaves  # a copy of what has left is no longer a duplicate
    assert (report.removed["tails"] > 0) is leaves
    before = world.untimed(flow)
    world.restore(flow, manifests[0])
    world.run(flow, max_records=110)
    assert world.untimed(flow) == before
    world.check(flow)


def test_states_expire_on_spark_as_in_the_oracle_in_any_batches(world: World) -> None:
    world.send(timed(legs(200)))
    flow = (
        Flow("expiring")
        .source(Topic(world.topic, Leg))
        .aggregate("tails", "tail", Fields(legs=count(), minutes=total("minutes")), expire_after="5m")
        .aggregate("carriers", pl.col("carrier"), Fields(legs=count()))
    )
    report = world.run(flow, max_records=70)
    oracle = world.oracle(flow)
    assert report.removed["tails"] > 0
    assert verdicts(report)["tails"][Verdict.BELOW_FLOOR] > 5
    for stage in ("tails", "carriers"):
        assert world.results(flow, stage) == oracle.results(stage)


@pytest.mark.parametrize(
    "window",
    [
        tumbling("5m", lateness="2m", late="dead_letter"),
        hopping("20m", "10m", retention="0s"),
        session("3m", lateness="2m", late="dead_letter"),
        session("1m", retention="0s"),
    ],
    ids=["tumbling", "hopping", "session", "sessions that leave"],
)
def test_windows_that_close_are_published_once_on_spark_as_by_the_oracle(
    world: World, topic: Callable[..., str], window: Window | SessionWindow
) -> None:
    world.send(timed(legs(200)))
    final = topic(name="final")
    flow = (
        Flow("closing")
        .source(Topic(world.topic, Leg))
        .aggregate("tails", "tail", Fields(legs=count(), minutes=total("minutes")), window=window)
        .publish_states(final, on="close")
        .aggregate("carriers", pl.col("carrier"), Fields(legs=count()))
    )
    report = world.run(flow, max_records=70)
    assert report.batches > 2
    wanted = {output.key: read_snapshot(output.value).state for output in world.oracle(flow).outputs}
    found = [(record.key, read_snapshot(record.value).state) for record in world.records(final)]
    assert len(found) == len(wanted) == report.outputs
    assert len(found) > 50
    assert dict(found) == wanted
    world.run(flow)
    assert len(world.records(final)) == len(found)
