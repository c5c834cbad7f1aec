"""Every schedule of up to two faults, as far as a test may take; `prove` runs them all."""

import pytest

from tests.simulation.faults import ENDS
from tests.simulation.schedules import WORLDS, explore, run, small_world, units

SCHEDULES = 400
PARTS = 4


@pytest.fixture(scope="module")
def every_unit():
    return units()


@pytest.mark.parametrize("part", range(PARTS))
def test_every_message_is_folded_once_under_any_two_faults(every_unit, part):
    done = 0
    violations: list[str] = []
    for first in every_unit[part::PARTS]:
        unit = explore(first)
        done += unit.schedules
        violations += unit.violations
        if done >= SCHEDULES / PARTS:
            break
    assert not violations
    assert done >= SCHEDULES / PARTS


def test_the_worlds_are_small_and_have_everything_in_them():
    worlds = [small_world(number) for number in range(WORLDS)]
    assert max(len(world.processors) for world in worlds) == 2
    assert {len(world.stages) for world in worlds} == {1, 2, 3}
    assert any(world.split < len(world.stages) for world in worlds)
    assert any(processor.fan > 1 for world in worlds for processor in world.processors)
    assert any(stage.flat for world in worlds for stage in world.stages)
    assert any(stage.emits for world in worlds for stage in world.stages)


def test_there_are_more_than_a_million_schedules(every_unit):
    reached = {number: run(small_world(number), number, {}) for number in range(WORLDS)}
    # After a first fault there are about as many effects left as without it.
    behind = sum((reached[first.world] - first.place - 1) * len(ENDS) for first in every_unit)
    assert len(every_unit) + behind > 1_000_000


def test_the_order_of_units_is_the_same_in_every_run(every_unit):
    assert units() == every_unit
    assert {first.world for first in every_unit[:1500]} == set(range(WORLDS))
