"""A rebuild that is folded on Spark: its tasks send nothing, and hold dead letters and outputs until the swap."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path as File

import pytest

from aggregations.spark import run_flow
from jobs.replay import rebuild, swap
from tests.messages import Leg
from tests.support.flows import BROKEN, PATHS, Path, fleet, shared
from tests.support.options import called
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
