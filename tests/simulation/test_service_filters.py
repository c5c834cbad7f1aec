"""Filters in the simulated republishers: every single fault in a small world, and what the random worlds reach."""

from collections import Counter
from typing import Any

import pytest

from envelope.dedup.eviction import LANES
from jobs.republish.filtering import _COVERED, Overtaken, RecordFilter
from persistence.commit.faults import FILTER_CLAIM, FILTER_SAVE
from tests.simulation.faults import ENDS, Script
from tests.simulation.schedules import run
from tests.simulation.shrink import outcome
from tests.simulation.steps import draw_world
from tests.simulation.topology import BY_KEY, FILTERS, FINAL, ONE_TOPIC, SHORT, SPANNING, Processor, Spec, StageSpec

KINDS = [kind for kind in FILTERS if kind not in (*SPANNING, *BY_KEY, ONE_TOPIC, SHORT)]
WORLD = 2
"""Of its three events at least one is written twice."""


def world_of(kind: str) -> Spec:
    """A producer, a republisher with a filter that has a retry topic, and a flow of one stage."""
    passage = Processor("p0", "r0", FINAL, retries=1, refusing=True, deduplicates=kind)
    return Spec(("r0",), {"r0": 1, FINAL: 1}, (passage,), (StageSpec("s0", "k"),), None, LANES, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_folded_once_under_any_fault(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: Counter[str] = Counter()
    effect = Script.effect

    def noting(self: Script, point: str, action: Any) -> Any:
        reached[point] += 1
        return effect(self, point, action)

    monkeypatch.setattr(Script, "effect", noting)
    spec = world_of(kind)
    effects = run(spec, WORLD, {})
    assert {FILTER_CLAIM, FILTER_SAVE, "write:once"} <= reached.keys()
    for place in range(effects):
        for end in ENDS:
            run(spec, WORLD, {place: end})


def test_the_small_world_has_an_event_that_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: Counter[str] = Counter()
    judge = RecordFilter.judge

    def judged(self: RecordFilter, record: Any) -> Any:
        ruling = judge(self, record)
        verdicts[ruling.verdict] += 1
        return ruling

    monkeypatch.setattr(RecordFilter, "judge", judged)
    run(world_of("event id"), WORLD, {})
    assert verdicts["accepted"] == 3
    assert verdicts["duplicate"] >= 1


def test_random_worlds_claim_states_skip_what_they_cover_and_overtake_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: Counter[str] = Counter()
    judge, save = RecordFilter.judge, RecordFilter.save

    def judged(self: RecordFilter, record: Any) -> Any:
        ruling = judge(self, record)
        met["covered" if ruling is _COVERED else ruling.verdict] += 1
        return ruling

    def saved(self: RecordFilter, parts: Any) -> None:
        try:
            save(self, parts)
        except Overtaken:
            met["overtaken"] += 1
            raise

    monkeypatch.setattr(RecordFilter, "judge", judged)
    monkeypatch.setattr(RecordFilter, "save", saved)
    worlds = {seed: draw_world(seed, 0)[0] for seed in range(300)}
    filtering = [seed for seed, spec in worlds.items() if any(one.deduplicates for one in spec.processors)]
    kinds = {
        one.deduplicates for spec in worlds.values() for one in spec.processors if one.source in spec.filtered_roots
    }
    assert kinds == set(KINDS)
    assert not any(outcome(seed) for seed in filtering[:60])
    assert {"accepted", "duplicate", "covered", "redriven", "overtaken"} <= met.keys()
