"""The first worlds; `python -m tests.simulation --seed N` runs one of them again."""

from collections import Counter

import pytest

from aggregations.run.memory import MemoryRunner
from envelope import Verdict
from jobs import mending
from jobs.republish import input as reading
from jobs.republish.worker import Worker
from persistence.errors import StoreError
from tests.simulation import clients, rebuilds
from tests.simulation.audit import AUDIT
from tests.simulation.consumer import SimulatedConsumer
from tests.simulation.faults import Crash
from tests.simulation.functions import OUT
from tests.simulation.shrink import outcome
from tests.simulation.steps import draw_world
from tests.simulation.topology import FINAL, FLOW

CHUNK = 30


@pytest.mark.parametrize("start", range(0, 60, CHUNK), ids=lambda start: f"from {start}")
def test_every_message_is_folded_once_in_any_world(start):
    failed = {seed: text for seed in range(start, start + CHUNK) if (text := outcome(seed))}
    assert not failed


def test_a_mend_that_would_take_a_folded_letter_out_of_a_right_state_is_refused(monkeypatch):
    seed = 1667  # the fold of the mend finds unproven what the engine folded in a larger batch
    assert not outcome(seed)
    monkeypatch.setattr(mending, "check_proven", lambda *_: None)
    assert "mended to" in outcome(seed)


def test_worlds_have_several_members_several_targets_and_records_without_a_key():
    worlds = [draw_world(seed)[0] for seed in range(100)]
    processors = [processor for world in worlds for processor in world.processors]
    assert {processor.members for processor in processors} == {1, 2, 3}
    assert any(len(processor.targets) > 1 for processor in processors)
    keyless = [world for world in worlds if world.keyless]
    assert any(world.history == 1 for world in keyless)
    assert any(processor.rekey == "change" for world in keyless for processor in world.processors)
    assert any(processor.rekey == "keep" for world in keyless for processor in world.processors)


def test_worlds_have_second_flows_and_steps_that_fail_in_every_way():
    worlds = [draw_world(seed, 0)[0] for seed in range(200)]
    assert {"", FINAL, OUT} < {world.audit for world in worlds}
    assert any(world.audit in world.roots for world in worlds if world.processors)
    stages = [stage for world in worlds for stage in world.stages]
    assert {stage.fails for stage in stages} == {"", "map", "filter", "flat_map", "key", "divert"}
    assert any(stage.emit_fails for stage in stages if stage.emits)
    assert any(world.mends for world in worlds if world.history == 1)
    assert {"", "s0", "s1"} <= {world.publishes_before for world in worlds if world.audit == OUT}
    relays = [draw_world(seed, 0)[0] for seed in range(1000)]
    relays = [world for world in relays if not world.folds]
    assert {world.publishes_before for world in relays} == {"end", ""}
    assert {world.stages[0].fails for world in relays} == {"", "map", "filter", "flat_map", "divert"}
    assert any(world.stages[0].flat for world in relays)
    assert any(world.second for world in relays)


def test_letters_are_read_by_other_flows_and_by_republishers_and_are_copies_to_them(monkeypatch):
    copies: Counter[str] = Counter()
    process, take_counts = MemoryRunner.process, Worker.take_counts

    def processed(self, records):
        report = process(self, records)
        copies[self.flow.name] += sum(verdicts[Verdict.COPY.value] for verdicts in report.verdicts.values())
        return report

    def taken(self):
        counts = take_counts(self)
        copies[self._name] += counts.copies
        return counts

    monkeypatch.setattr(MemoryRunner, "process", processed)
    monkeypatch.setattr(Worker, "take_counts", taken)
    worlds = {seed: draw_world(seed, 0)[0] for seed in range(100)}
    final = [seed for seed, world in worlds.items() if world.audit == FINAL]
    inner = [seed for seed, world in worlds.items() if world.audit in {one.source for one in world.processors}]
    assert not any(outcome(seed) for seed in (*final[:6], *inner[:6]))
    assert copies[FLOW] > 0
    assert copies[AUDIT] > 0
    assert copies["p0"] > 0


def test_rebuilds_are_swapped_in_taken_back_killed_and_continued(monkeypatch):
    done: Counter[str] = Counter()

    def counting(name):
        command = getattr(rebuilds.Operator, name)

        def counted(self):
            try:
                command(self)
            except (Crash, StoreError) as error:
                done[f"{name} {type(error).__name__}"] += 1
                raise
            done[name] += 1

        monkeypatch.setattr(rebuilds.Operator, name, counted)

    for name in ("rebuild", "swap", "roll_back"):
        counting(name)
    worlds = [seed for seed in range(100) if draw_world(seed, 0)[0].rebuilds]
    assert not any(outcome(seed) for seed in worlds)
    assert {"rebuild", "rebuild Crash", "swap", "swap Crash", "roll_back", "roll_back Crash"} <= done.keys()


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
    assert not any(outcome(seed) for seed in range(40))
    assert together > 10
    assert moved > 0
