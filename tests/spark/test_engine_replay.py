"""A rebuild that is folded on Spark: its tasks send nothing, and hold dead letters and outputs until the swap."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path as File

import pytest

from aggregations.spark import run_flow
from jobs.replay import rebuild, swap
from tests.messages import Leg
from tests.support.archives import rows_of, write
from tests.support.flows import BROKEN, PATHS, Path, fleet, shared
from tests.support.options import called
from tests.support.refolding import delete_before
from tests.support.world import World, alone, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scatters", [False, True])
def test_a_rebuild_on_spark_is_swapped_and_continues(
    world: World, topic: Callable[..., str], tmp_path: File, path: Path, *, scatters: bool
) -> None:
    sent, out = legs(200), topic(name="out")
    flow = (shared(world.topic, path=path) if scatters else fleet(world.topic, path)).publish(out)
    dead = [alone(Leg(tail="N1", carrier="AA", minutes=-1)), alone(Leg(tail="N2", carrier=f"AA+{BROKEN}", minutes=5))]
    world.send([*republished(sent[:150]), *dead])
    world.run(flow)
    values = [record.value for record in world.records(out)]
    outputs, letters = len(values), Counter(letter.generation for letter, _ in world.dead_letters())
    given = {"kafka": world.settings, "stores": world.stores(flow), "why": "a test", "runner": run_flow}
    done = called(rebuild, flow, dead_letters=world.dead, max_records=60, outputs=True, **given)
    assert (done.report.records, done.behind) == (152, 0)
    assert len(world.records(out)) == outputs
    assert Counter(letter.generation for letter, _ in world.dead_letters()) == letters
    swapped = called(swap, flow, dead_letters=world.dead, work=tmp_path / "work", **given)
    assert swapped.done
    assert swapped.differences.comparison.differences == 0
    assert swapped.dead_letters == letters[1] > 0
    assert swapped.outputs == done.report.outputs
    assert Counter(record.value for record in world.records(out)) == Counter(dict.fromkeys(values, 2))
    assert Counter(letter.generation for letter, _ in world.dead_letters()) == {1: letters[1], 2: letters[1]}
    world.send(republished(sent, range(120, 200)))
    world.run(flow)
    world.check(flow)


def test_a_rebuild_on_spark_reads_what_kafka_has_deleted_from_an_archive(world: World, tmp_path: File) -> None:
    flow = fleet(world.topic, "columns")
    world.send([*republished(legs(200)), alone(Leg(tail="N1", carrier="AA", minutes=-1))])
    world.run(flow)
    oracle, rows = world.oracle(flow), rows_of(world.records())
    location = write(tmp_path / "lake" / "a.parquet", rows[::-1], group=30)
    delete_before(world, (0, 40), (1, 50))
    given = {"kafka": world.settings, "stores": world.stores(flow), "why": "a test", "runner": run_flow}
    options = {"dead_letters": world.dead, "history": location, "max_records": 60, **given}
    assert called(rebuild, flow, **options).report.records == len(rows) == 201
    swapped = called(swap, flow, work=tmp_path / "work", **options)
    assert (swapped.done, swapped.dead_letters, swapped.differences.comparison.differences) == (True, 1, 0)
    for stage in flow.stages:
        assert world.results(flow, stage.name) == oracle.results(stage.name)
