"""Windows that close and leave, in simulated worlds; and bugs planted in their removal, which the worlds find."""

import pytest

from persistence.errors import StoreError
from tests.simulation.oracle import Violation
from tests.simulation.patch import patched
from tests.simulation.windows import BUGS, EXPIRY_BUGS, ExpiryWorld, WindowWorld

WORLDS = 40
ENOUGH = 60
"""Worlds within which every planted bug is found."""


@pytest.mark.parametrize("kind", [WindowWorld, ExpiryWorld])
def test_states_leave_exactly_when_they_are_due_whatever_crashes_and_goes_back(kind: type[WindowWorld]) -> None:
    removed = 0
    for seed in range(WORLDS):
        world = kind(seed)
        world.run()
        removed += world.removed
    assert removed > WORLDS // 5


@pytest.mark.parametrize("bug", [*BUGS, *EXPIRY_BUGS])
def test_a_bug_that_is_planted_in_the_removal_is_found(bug: str) -> None:
    kind, patches = (WindowWorld, BUGS[bug]) if bug in BUGS else (ExpiryWorld, EXPIRY_BUGS[bug])
    with patched(patches):
        for seed in range(ENOUGH):
            try:
                kind(seed).run()
            except (Violation, StoreError):
                return
    pytest.fail(f"no world of {ENOUGH} found it")
