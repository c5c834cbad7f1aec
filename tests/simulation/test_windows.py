"""Windows that close and leave, in simulated worlds; and bugs planted in their removal, which the worlds find."""

import pytest

from persistence.errors import StoreError
from tests.simulation.oracle import Violation
from tests.simulation.patch import patched
from tests.simulation.windows import BUGS, WindowWorld

WORLDS = 40
ENOUGH = 60
"""Worlds within which every planted bug is found."""


def test_windows_leave_exactly_when_they_are_due_whatever_crashes_and_goes_back() -> None:
    removed = 0
    for seed in range(WORLDS):
        world = WindowWorld(seed)
        world.run()
        removed += world.removed
    assert removed > WORLDS


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_planted_in_the_removal_is_found(bug: str) -> None:
    with patched(BUGS[bug]):
        for seed in range(ENOUGH):
            try:
                WindowWorld(seed).run()
            except (Violation, StoreError):
                return
    pytest.fail(f"no world of {ENOUGH} found it")
