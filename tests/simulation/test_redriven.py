"""Code that was broken for a while, in simulated worlds with crashes; and planted bugs, which the worlds find."""

import pytest

from aggregations.errors import RunRefusedError
from tests.simulation.oracle import Violation
from tests.simulation.patch import patched
from tests.simulation.redriven import BUGS, CRASH_BUGS, RedrivenWorld

WORLDS = 150
ENOUGH = 250
"""Worlds within which every planted bug is found."""


def test_what_was_fixed_and_redriven_has_what_it_would_have_whatever_crashes() -> None:
    redriven = 0
    for seed in range(WORLDS):
        world = RedrivenWorld(seed)
        world.run()
        redriven += world.redriven
    assert redriven > 2 * WORLDS


PLANTED = {**BUGS, **CRASH_BUGS}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    with patched([PLANTED[bug]]):
        for seed in range(ENOUGH):
            try:
                RedrivenWorld(seed).run()
            except (Violation, RunRefusedError):
                return
    pytest.fail(f"no world of {ENOUGH} found it")
