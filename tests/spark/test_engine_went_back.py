"""What tasks tell each other of what stores acknowledged, and what a run makes of it."""

import sqlite3
from contextlib import closing
from pathlib import Path as File

import pytest

from aggregations.errors import RunRefusedError
from aggregations.spark import run_flow
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import World, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.parametrize("path", PATHS)
def test_upstream_states_are_kept_with_all_that_was_acknowledged_downstream(
    world: World, path: Path, tmp_path: File
) -> None:
    world.apart = True
    flow, sent = fleet(world.topic, path), legs(120)
    world.send(republished(sent, range(60)))
    world.run(flow)
    urls, ref = world.stores(flow), FlowRef(flow.name)
    with closing(open_store(urls["carrier"])) as down, closing(open_store(urls["aircraft"])) as up:
        reached = down.marks(ref.stage("carrier"))["0"].mark
        assert reached.count > (1 if world.runner is run_flow else 0)  # on Spark several tasks saved
        kept = up.marks(ref.stage("aircraft"))["0"]
        assert kept.downstream == {"carrier": {"0": reached.short}}
        manifests = up.load_manifest(ref), down.load_manifest(ref)
    assert [one and one.marks for one in manifests] == [
        {"aircraft": {"0": kept.mark.short}, "carrier": {"0": reached.short}},
        {"carrier": {"0": reached.short}},
    ]
    before = world.manifest(flow, "aircraft")
    with closing(sqlite3.connect(tmp_path / "carrier.db")) as live, closing(sqlite3.connect(":memory:")) as copy:
        live.backup(copy)
        world.send(republished(sent, range(60, 120)))
        world.run(flow)
        assert world.results(flow, "carrier") == totals(sent, "carrier")
        # As after a crash before the manifests: both stages are written, then the downstream store loses its part.
        world.restore(flow, before, "aircraft")
        copy.backup(live)
    with pytest.raises(RunRefusedError, match=r"stage carrier, bucket 0: save.*--accept store-went-back"):
        world.run(flow)
