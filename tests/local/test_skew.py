"""Bounded skew on a broker: a source that is ahead waits for the other one, and the states are the oracle's."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.local import run_local
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.world import Sent, World

pytestmark = [pytest.mark.integration]

RECORDS = 300
MOST = 40
BEGIN = 1_600_000_000
SPACING = {"slow": 1, "fast": 10}
"""Seconds of event time between two records of a topic."""


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
