"""The generation that is live is audited, on a real broker."""

from pathlib import Path
from typing import Any

import pytest

from jobs.backup import snapshot
from jobs.replay import rebuild, swap
from tests.support.flows import fleet
from tests.support.options import called
from tests.support.refolding import audited, history
from tests.support.world import World, legs, republished

pytestmark = [pytest.mark.integration]


def test_the_live_generation_is_audited_after_a_swap_and_the_former_one_by_its_number(
    world: World, tmp_path: Path
) -> None:
    history(world)
    flow, file = fleet(world.topic), tmp_path / "fleet.snapshot"
    world.run(flow)
    options: dict[str, Any] = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    called(rebuild, flow, why="audit", **options)
    called(swap, flow, why="audit", work=tmp_path / "swap", **options)
    world.send(republished(legs(230), range(190, 230)))
    world.run(flow)
    found = audited(world, flow)
    assert (found.generation, found.drifted) == (2, False)
    former = audited(world, flow, generation=1)
    assert (former.generation, former.drifted, former.folded.records) == (1, False, found.folded.records - 40)
    snapshot(flow, file, stores=world.stores(flow))
    world.send(republished(legs(240), range(220, 240)))
    world.run(flow)
    since = audited(world, flow, snapshot=file)
    assert (since.generation, since.drifted, since.folded.records) == (2, False, 20)
