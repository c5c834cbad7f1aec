"""What the simulation is worth: every planted bug is found within a few hundred seeds."""

import inspect

import pytest

from jobs.simulation.planted import BUGS, planted
from jobs.simulation.prove import SEEDS_PER_BUG, find
from jobs.simulation.shrink import outcome


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    seed = find(name)
    assert seed is not None, f"{BUGS[name][0]}: not found within {SEEDS_PER_BUG} seeds"
    assert outcome(seed) == "", "the seed fails without the bug as well"


def test_there_are_at_least_twenty_five_of_them_each_with_a_text():
    assert len(BUGS) >= 25
    assert all(text and patches for text, patches in BUGS.values())


def test_a_bug_is_gone_when_its_block_ends():
    owners = {(id(owner), attribute): owner for _, patches in BUGS.values() for owner, attribute, _ in patches}
    before = {place: inspect.getattr_static(owner, place[1]) for place, owner in owners.items()}
    for name in BUGS:
        with planted(name):
            pass
    assert {place: inspect.getattr_static(owner, place[1]) for place, owner in owners.items()} == before
