"""Bounded skew and idle partitions on a broker.

A source that is ahead waits for the other one, and the states are the oracle's. Windows close without a partition that is
idle.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.engine import engine
from aggregations.local import run_local
from aggregations.report import Report
from aggregations.run.snapshots import read_snapshot
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.world import Sent, World

pytestmark = [pytest.mark.integration]

RECORDS = 300
MOST = 40
BEGIN = 1_600_000_000
SPACING = {"slow": 1, "fast": 10}
"""Seconds of event time between two records of a topic."""
OWN, SILENT = b"N1@2020-09-13T12:26:00Z", b"N2@2020-09-13T12:26:00Z"
"""The first windows of the keys in two partitions, the second of which falls silent."""


@pytest.mark.parametrize(("skew", "spread"), [("1m", range(60 + MOST * 10 + 1)), (None, range(2_000, 3_000))])
def test_a_source_is_not_read_further_ahead_of_the_other_than_one_batch_and_its_skew(
    kafka: str, topic: Callable[..., str], tmp_path: Path, skew: str | None, spread: range
) -> None:
    names = {name: topic(partitions=1, name=name) for name in SPACING}
    sources = [Topic(one, Json({"k": str, "at": int}), envelope=False, time="at", skew=skew) for one in names.values()]
    flow = Flow("skew").source(*sources).aggregate("keys", "k", Fields(n=count()))
    with closing(World(kafka, names["slow"], topic(name="dead"), tmp_path, runner=run_local)) as world:
        for name, seconds in SPACING.items():
            values = [{"k": f"k{n % 5}", "at": (BEGIN + n * seconds) * 1000} for n in range(RECORDS)]
            world.send((Sent(json.dumps(value).encode(), b"k") for value in values), names[name])
        ahead = [0]

        def measure(_: object) -> None:
            with closing(open_store(world.stores(flow)["keys"])) as store:
                manifest = store.load_manifest(FlowRef(flow.name, 1))
            assert manifest is not None
            slow, fast = (manifest.positions[names[name]][0] for name in SPACING)
            if slow.next_offset < RECORDS and slow.time_us and fast.time_us:
                ahead.append((fast.time_us - slow.time_us) // 1_000_000)

        world.run(flow, max_records=MOST, progress=measure)
        assert max(ahead) in spread
        assert world.results(flow, "keys") == {b"k%d" % n: {"n": 2 * RECORDS // 5} for n in range(5)}
        world.check(flow)


@pytest.mark.parametrize(("idle", "closed"), [("5m", {OWN: 2, SILENT: 1}), (None, {})])
def test_windows_close_without_a_partition_that_is_silent_only_if_its_topic_says_so(
    kafka: str,
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    idle: str | None,
    closed: dict[bytes, int],
) -> None:
    passed, stop = [0.0], threading.Event()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    source, final = topic(partitions=2, name="legs"), topic(name="final")
    flow = (
        Flow("idle")
        .source(Topic(source, Json({"k": str, "at": int}), envelope=False, time="at", idle=idle))
        .aggregate("keys", "k", Fields(n=count()), window=tumbling("1m"))
        .publish_states(final, on="close")
    )

    def leg(seconds: int, partition: int = 0) -> Sent:
        value = {"k": f"N{1 + partition}", "at": (BEGIN + seconds) * 1000}
        return Sent(json.dumps(value).encode(), partition=partition)

    with closing(World(kafka, source, topic(name="dead"), tmp_path, runner=run_local)) as world:
        world.send([leg(0), leg(1), leg(0, partition=1)])

        def batch(report: Report) -> None:
            passed[0] += 600
            if passed[0] > 600:
                stop.set()
            else:
                world.send([leg(300)])

        world.run(flow, until_caught_up=False, trigger_seconds=0, progress=batch, stop=stop)
        assert {one.key: read_snapshot(one.value).state["n"] for one in world.records(final)} == closed
        assert world.results(flow, "keys").keys() > {OWN, SILENT}
