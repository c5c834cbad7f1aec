"""What the simulation is worth: every planted bug is found within a few hundred seeds."""

import inspect
from functools import cache, partial

import pytest

from aggregations.definition.source import Topic
from tests.simulation import audit, changes, topology
from tests.simulation.bugs import MATTERS, SHOWN_BY
from tests.simulation.patch import patched
from tests.simulation.planted import BUGS, planted
from tests.simulation.prove import SEEDS_PER_BUG, find
from tests.simulation.shrink import outcome
from tests.simulation.steps import draw_world


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    seed = find(name, SHOWN_BY.get(name))
    assert seed is not None, f"{BUGS[name][0]}: not found within {SEEDS_PER_BUG} worlds"
    assert without(seed) == "", "the seed fails without the bug as well"


@cache  # many bugs are found by the first few seeds
def without(seed):
    return outcome(seed)


def test_there_are_at_least_twenty_five_of_them_each_with_a_text():
    assert len(BUGS) >= 25
    assert all(text and patches for text, patches in BUGS.values())


def test_what_limits_the_worlds_of_a_bug_leaves_some():
    worlds = [draw_world(seed, 0)[0] for seed in range(SEEDS_PER_BUG)]
    assert MATTERS.keys() | SHOWN_BY.keys() <= BUGS.keys()
    assert all(any(matters(world) for world in worlds) for matters in MATTERS.values())


def test_a_bug_is_gone_when_its_block_ends():
    owners = {(id(owner), attribute): owner for _, patches in BUGS.values() for owner, attribute, _ in patches}
    before = {place: inspect.getattr_static(owner, place[1]) for place, owner in owners.items()}
    for name in BUGS:
        with planted(name):
            pass
    assert {place: inspect.getattr_static(owner, place[1]) for place, owner in owners.items()} == before


@pytest.mark.parametrize("seed", [40, 69, 86, 144, 285])
def test_retry_topics_whose_hops_are_not_marked_are_exact_if_they_are_named(seed):
    retries: dict[str, list[str]] = {}
    for processor in draw_world(seed, 0)[0].processors:
        if processor.retries:
            retries.setdefault(processor.source, []).extend(processor.retry_topics)
    named = partial(Topic, retries=retries)
    with planted("service-counts-retries"):
        assert outcome(seed)
        with patched([(module, "Topic", named) for module in (audit, changes, topology)]):
            assert outcome(seed) == ""
