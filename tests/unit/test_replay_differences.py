"""The differences between two generations whose flows do not have the same stages."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.replaying.differences import check_against, differences
from jobs.replaying.generations import generations_of
from tests.support.pure import bare, batch, fresh_store

AIRCRAFT = Flow("fleet").source(bare()).filter(pl.col("minutes") > 0).aggregate("aircraft", "tail", Fields(n=count()))
BOTH = AIRCRAFT.aggregate("carrier", "carrier", Fields(n=count(), m=total("minutes")))


@pytest.mark.parametrize(("old", "new"), [(BOTH, AIRCRAFT), (AIRCRAFT, BOTH)], ids=["removed", "added"])
@pytest.mark.parametrize("given", [False, True])
def test_a_stage_that_only_one_definition_has_is_not_compared(
    old: Flow[Any], new: Flow[Any], given: bool, tmp_path: Path
) -> None:
    url = fresh_store()
    for generation, flow, offsets in ((1, old, (1, 2, 3)), (2, new, (1, 2))):
        run = MemoryRunner(flow, bind(flow, {}, url), ends={}, generation=generation)
        run.process(batch(*offsets))
        run.close()
    against = old if given else None
    with generations_of(new, bind(new, {}, url)) as found:
        check_against(found, 1, against)
        differ = differences(found, 1, 2, sample=3, work=tmp_path / "work", against=against)
    assert differ.comparison.stages["aircraft"].only_old == 1
    assert differ.uncompared == (("carrier",) if given is (new is AIRCRAFT) else ())
