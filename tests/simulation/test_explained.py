"""What `explain` says about every record of simulated worlds is what happened; and planted bugs, which the worlds find."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from envelope import Siblings
from jobs.explaining import elements, explain
from jobs.explaining.elements import Elements
from jobs.explaining.evidence import Evidence
from jobs.explaining.outcome import Fate, Outcome
from jobs.explaining.stages import Late
from tests.simulation.explained import SiblingWorld, Truth, explaining, of_world
from tests.simulation.final import FinalWorld
from tests.simulation.final_sessions import FinalSessionWorld
from tests.simulation.patch import Patch, original, patched
from tests.simulation.steps import draw_world
from tests.simulation.windows import ExpiryWorld, WindowWorld
from tests.simulation.world import World
from tests.support.reports import UntrueError

SEEDS = (2, 13, 14, 20, 22, 27, 29, 43, 46, 51, 54, 58)
MENDED = (3, 7, 12, 15, 25)
"""Worlds with few records, as each is compared with all others, the last ones with repairs and rebuilds; `python -m tests.simulation --seed N` shows one."""
WORLDS = 8
"""Worlds of windows, of expiry and of siblings, for each kind."""
ENOUGH = 20
"""Worlds within which every planted bug is found."""
KINDS = (WindowWorld, ExpiryWorld, FinalWorld, FinalSessionWorld, SiblingWorld)


def reported(seed: int) -> Counter[str]:
    """What is said in a seed's world: in its middle, at its end, and once everything has recovered."""
    spec, steps = draw_world(seed)
    world, said = World(spec), Counter[str]()
    with Truth().watching() as truth:

        def check(_: World) -> None:
            reports = of_world(world, truth)
            reports.check()
            said.update(reports.said)

        half = len(steps) // 2
        world.run([*steps[:half], check, *steps[half:], check])
    return said


def told(kind: type[WindowWorld], seeds: Iterable[int]) -> Counter[str]:
    """What is said in worlds of a kind, after each of their steps."""
    said = Counter[str]()
    for seed in seeds:
        with Truth().watching() as truth:
            explaining(kind, said, truth)(seed).run()
    return said


@pytest.mark.parametrize("seed", [*SEEDS, *MENDED])
def test_what_is_said_of_every_record_is_what_happened_whatever_crashes_and_is_sent_again(seed: int) -> None:
    assert reported(seed)[Outcome.FOLDED] > 0, f"seed {seed}"


def test_what_is_said_is_not_that_nothing_is_known() -> None:
    said = reported(SEEDS[0]) + reported(SEEDS[1])
    assert {*said} >= {Outcome.DROPPED, Outcome.DEAD_LETTER, Outcome.NOT_READ, Fate.WAITING}
    assert said[Outcome.UNDECIDED] * 4 < said.total()


@pytest.mark.parametrize("kind", KINDS)
def test_late_events_and_siblings_are_reported_as_they_were(kind: type[WindowWorld]) -> None:
    said = told(kind, range(WORLDS))
    assert said[Outcome.FOLDED] > said[Outcome.UNDECIDED] / 2
    assert said[Outcome.DROPPED] > WORLDS


_late, _at = original(Elements, "_late"), original(Elements, "_at")


def _forgets_emits(self: Elements, *given: Any) -> Any:
    applied = _at(self, *given)
    self._emits = ""
    return applied


SEEDED: Mapping[str, tuple[int, Patch]] = {
    "letters-take-no-place-anywhere": (
        13,
        (Evidence, "_stopped", lambda self, copy, *_: bool(self.dead.by_place.get(copy.place))),
    ),
    "lanes-in-order-of-offsets": (13, (Evidence, "is_apart", lambda *_: False)),
}
"""Bugs that are planted on purpose in what `explain` says: a seed whose world shows it, and the patch that makes it."""

IN_WINDOWS: Mapping[str, tuple[type[WindowWorld], Sequence[Patch]]] = {
    "late-events-are-missing": (
        WindowWorld,
        [(explain, "times_of", lambda *_: {}), (Elements, "_late", lambda *_: Late())],
    ),
    "expired-events-are-missing": (
        ExpiryWorld,
        [(explain, "times_of", lambda *_: {}), (Elements, "_late", lambda *_: Late())],
    ),
    "what-has-left-was-dropped": (
        FinalSessionWorld,
        [(Elements, "_late", lambda *given: _late(*given)._replace(left=False))],
    ),
    "siblings-are-copies": (SiblingWorld, [(elements, "siblings_of", lambda *_: Siblings.EVENT_ID)]),
    "emitted-is-missing": (SiblingWorld, [(Elements, "_at", _forgets_emits)]),
}
"""The same in worlds of windows, of expiry and of siblings."""


@pytest.mark.parametrize("bug", SEEDED)
def test_a_planted_bug_is_found(bug: str) -> None:
    seed, patch = SEEDED[bug]
    with patched([patch]), pytest.raises(UntrueError):
        reported(seed)


@pytest.mark.parametrize("bug", IN_WINDOWS)
def test_a_bug_that_is_planted_about_late_events_or_siblings_is_found(bug: str) -> None:
    kind, patches = IN_WINDOWS[bug]
    with patched(patches), pytest.raises(UntrueError):
        told(kind, range(ENOUGH))
