"""Windows that close, are published and leave, in simulated worlds; and planted bugs, which the worlds find."""

import pytest

from persistence.errors import StoreError
from tests.simulation.final import BUGS as FINAL_BUGS
from tests.simulation.final import FinalWorld
from tests.simulation.final_sessions import BUGS as SESSION_BUGS
from tests.simulation.final_sessions import FinalSessionWorld
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


@pytest.mark.parametrize("kind", [FinalWorld, FinalSessionWorld])
def test_what_closes_is_published_once_and_never_changes_whatever_crashes_and_goes_back(kind: type[FinalWorld]) -> None:
    published = late = 0
    for seed in range(WORLDS):
        world = kind(seed)
        world.run()
        published, late = published + world.published, late + world.late
    assert published > WORLDS
    assert late > WORLDS // 5, "partitions that were silent came back too late"


PLANTED = {
    **{bug: (WindowWorld, patches) for bug, patches in BUGS.items()},
    **{bug: (ExpiryWorld, patches) for bug, patches in EXPIRY_BUGS.items()},
    **{bug: (FinalWorld, patches) for bug, patches in FINAL_BUGS.items()},
    **{bug: (FinalSessionWorld, patches) for bug, patches in SESSION_BUGS.items()},
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    kind, patches = PLANTED[bug]
    with patched(patches):
        for seed in range(ENOUGH):
            try:
                kind(seed).run()
            except (Violation, StoreError):
                return
    pytest.fail(f"no world of {ENOUGH} found it")
