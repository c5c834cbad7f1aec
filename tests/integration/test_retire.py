"""Windows leave real stores on a real broker, wherever the run is interrupted."""

import random
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.windows import hopping, tumbling
from aggregations.local import executor, run_local
from aggregations.run.snapshots import read_snapshot
from envelope import Envelope, Hop, encode
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.messages import Leg
from tests.support.world import Sent, World, legs

pytestmark = [pytest.mark.integration]

BEGIN_US = 1_600_000_000_000_000
MINUTE_US = 60_000_000
POINTS = [
    *("persist:tails", "manifest:hours", "manifest:tails", "close:tails", "ledger"),
    *("remove:tails", "remove:hours", "write:tails"),
]


class Crash(BaseException):
    """The process dies."""


def crash() -> Any:
    raise Crash


def flow(topic: str, final: str) -> Flow[Any]:
    return (
        Flow(f"retire-{uuid.uuid4().hex[:8]}")
        .source(Topic(topic, Leg))
        .aggregate(
            "tails", "tail", Fields(legs=count(), minutes=total("minutes")), window=tumbling("5m", retention="0s")
        )
        .publish_states(final, on="close")
        .aggregate("hours", pl.col("carrier"), Fields(legs=count()), window=hopping("1h", "30m", retention="1h"))
        .aggregate("all", pl.col("carrier"), Fields(legs=count()), history=512)
    )


def sent(sent: list[Any]) -> list[Sent]:
    """Legs that took off in turn, a minute apart, each up to three minutes early; some are sent again soon after."""
    rng, messages = random.Random(5), []
    for i, leg in enumerate(sent):
        hop = Hop("raw", i % 3, i // 3, via="kit", index=0, count=1)
        time = BEGIN_US + (i - rng.randrange(3)) * MINUTE_US
        value = encode(Envelope(leg.SerializeToString(), (hop,), key=leg.tail.encode(), event_time_us=time))
        messages.append(Sent(value, leg.tail.encode()))
        if rng.randrange(6) == 0:
            messages.append(messages[-1])
    return messages


@pytest.mark.parametrize("few", [0, executor.FEW_RECORDS], ids=["compiled", "by message"])
def test_windows_leave_lmdb_and_redis_although_the_run_is_interrupted_at_every_step(
    kafka: str, topic: Callable[..., str], tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(executor, "FEW_RECORDS", few)
    redis = f"{redis_url}?prefix=retire-{uuid.uuid4().hex[:8]}"
    urls = {"tails": f"lmdb://{tmp_path}/states", "hours": redis, "all": redis}
    source = topic(partitions=2, name="legs")
    with closing(World(kafka, source, topic(name="dead"), tmp_path, urls=urls, runner=run_local)) as world:
        world.send(sent(legs(300)))
        made = flow(source, final := topic(name="final"))
        died = 0
        for nth in (1, 2):
            for point in POINTS:
                for outcome in (FaultOutcome.BEFORE, FaultOutcome.AFTER):
                    try:
                        with faults.use(Injector([Fault(point, outcome, nth)], crash)):
                            world.run(made, max_records=12)
                    except (Crash, RuntimeError):  # what a task raises reaches the run as a failure of the batch
                        died += 1
        assert died > len(POINTS)
        world.run(made, max_records=40)
        oracle = world.check(made)
        published = {record.key: read_snapshot(record.value).state for record in world.records(final)}
        assert published == {output.key: read_snapshot(output.value).state for output in oracle.outputs}
        assert oracle.report.removed["tails"] > 20
        assert oracle.report.removed["hours"] > 5
