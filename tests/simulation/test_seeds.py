"""Two thousand worlds; `python -m jobs.simulation --seed N` runs one of them again."""

import pytest

from jobs.republish import input as reading
from jobs.simulation import clients
from jobs.simulation.clients import SimulatedConsumer
from jobs.simulation.shrink import outcome
from jobs.simulation.steps import draw_world

CHUNK = 100


@pytest.mark.parametrize("start", range(0, 2000, CHUNK), ids=lambda start: f"from {start}")
def test_every_message_is_folded_once_in_any_world(start):
    failed = {seed: text for seed in range(start, start + CHUNK) if (text := outcome(seed))}
    assert not failed


def test_worlds_have_several_members_several_targets_and_records_without_a_key():
    worlds = [draw_world(seed)[0] for seed in range(100)]
    passages = [passage for world in worlds for passage in world.passages]
    assert {passage.members for passage in passages} == {1, 2, 3}
    assert any(len(passage.targets) > 1 for passage in passages)
    keyless = [world for world in worlds if world.keyless]
    assert any(world.window == 1 for world in keyless)
    assert any(passage.rekey == "change" for world in keyless for passage in world.passages)
    assert any(passage.rekey == "keep" for world in keyless for passage in world.passages)


def test_members_of_a_group_work_at_the_same_time_and_hand_partitions_on(monkeypatch):
    together, moved = 0, 0

    class Watched(SimulatedConsumer):
        def consume(self, count, timeout):
            nonlocal together, moved
            if not self._is_out:
                others = [one for place, one in self._readers.members.items() if place != self._life.place]
                together += any(one.has for one in others)
                moved += self._life.places > 1 and not {*self._positions} <= {*self._dealt()}
            return super().consume(count, timeout)

    monkeypatch.setattr(clients, "_PATCHES", [(reading, "Consumer", Watched), *clients._PATCHES[1:]])
    assert not any(outcome(seed) for seed in range(60))
    assert together > 10
    assert moved > 0
