"""A snapshot goes from SQLite into Redis and from there into LMDB, and the flow continues exactly in each."""

from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.backup import restore, snapshot
from tests.support.pure import FLEET, bare, batch

pytestmark = pytest.mark.integration


def test_a_snapshot_moves_between_kinds_of_stores(valkey, tmp_path: Path) -> None:
    flow = Flow(f"fleet-{uuid4()}").source(bare()).aggregate("aircraft", "tail", FLEET)
    flow = flow.aggregate("carrier", "carrier", FLEET)
    urls = [f"sqlite://{tmp_path}/a.db", valkey.url, f"lmdb://{tmp_path}/b"]
    places = [bind(flow, {}, url) for url in urls]
    for n, stores in enumerate(places):
        if n:
            restore(flow, tmp_path / str(n - 1), stores=stores)
        with closing(MemoryRunner(flow, stores, ends={})) as run:
            run.process(batch(*range(4 * n, 4 * n + 6)))  # the last two of them come again in the next store
            found = {stage: run.results(stage) for stage in flow.stage_names}
        snapshot(flow, tmp_path / str(n), stores=stores)
    with closing(MemoryRunner(flow, bind(flow, {}, f"sqlite://{tmp_path}/whole.db"), ends={})) as whole:
        whole.process(batch(*range(14)))
        assert found == {stage: whole.results(stage) for stage in flow.stage_names}
