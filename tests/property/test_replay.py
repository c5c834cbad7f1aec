"""Rebuilds, swaps and rollbacks between runs that go on, freeze, wake up and die: every event counts once, and leaves."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.errors import RunRefusedError
from aggregations.run import begin as beginning
from jobs.comparing import Comparison
from jobs.replaying.generations import Generations
from jobs.replaying.results import Differences
from persistence.errors import Fenced
from tests.support import replays
from tests.support.replays import NEW, OLD, Land, dies

Step = tuple[str, int, bool]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "go_on", "freeze", "wake", "die", "save", "rebuild", "swap", "roll_back", "drop"]),
        st.integers(0, 12),
        st.booleans(),
    ),
    min_size=4,
    max_size=14,
)


def play(land: Land, steps: Sequence[Step]) -> None:
    """Take steps; a command dies at an effect if its number is not 0. Then let everything come to an end, and check."""
    with TemporaryDirectory() as directory:
        take(land, steps, Path(directory) / "snapshot")
        finish(land)


def take(land: Land, steps: Sequence[Step], file: Path) -> None:
    code = [OLD, NEW]
    for what, number, flag in steps:
        if what == "grow":
            land.length += number
        elif what == "go_on":
            land.go_on(number)
        elif what == "freeze" and land.run is not None:
            land.stale.append(land.run)
            land.run = None
        elif what == "wake" and land.stale:
            wake(land, number)
        elif what == "die":
            dies(lambda number=number: land.go_on(3), number, applied=flag)
            land.run = None
        elif what == "save":
            attempt(land, lambda: land.save(file), number)
        elif what == "rebuild":
            now = code[flag if land.pointer().rebuild is None else _redefined(land)]
            begins = file if number % 3 and file.exists() else None
            attempt(land, partial(land.rebuild, now, file=begins), number)
        elif what == "swap":
            meanwhile = partial(land.go_on, 1) if flag else lambda: None
            attempt(land, partial(land.swap, agreed=number != 1, meanwhile=meanwhile), number)
        elif what == "roll_back":
            attempt(land, land.roll_back, number)
        elif what == "drop":
            attempt(land, partial(land.drop, 1 + number % 4), 0 if flag else number)
        check(land)


def _redefined(land: Land) -> bool:
    rebuild = land.pointer().rebuild
    assert rebuild is not None
    return rebuild.redefined


def attempt(land: Land, command: Callable[[], Any], number: int) -> None:
    try:
        dies(command, number * 3, applied=bool(number % 2))
    except (RunRefusedError, Fenced):
        pass  # there is nothing to do, or nothing to return to
    land.know()


def wake(land: Land, number: int) -> None:
    """A frozen run that wakes up writes nothing if its generation is not live.

    Of the live one it may write a part of a batch, if whatever fences it died between two stores, as in any crash.
    """
    run = land.stale[number % len(land.stale)]
    generation = run.run.ref.generation
    before = land.results(generation), land.position(generation)
    live = land.pointer().live
    land.wake(number, 2)
    if generation != live:
        assert (land.results(generation), land.position(generation)) == before


def check(land: Land) -> None:
    """At any moment, no position is ahead of what was published: what the live generation has committed has left."""
    pointer = land.pointer()
    assert {*range(1, land.position(pointer.live))} <= {*land.published}


def finish(land: Land) -> None:
    """Repeat what was interrupted, and let the live generation read everything."""
    pointer = land.pointer()
    if pointer.closing:
        (land.swap if pointer.rebuild is not None else land.roll_back)()
    land.run = None
    for _ in range(land.length + 1):
        land.go_on(5)
    live = land.pointer().live
    assert land.position(live) == land.length
    assert land.results(live) == land.expected(live, land.length)
    assert {*land.published} >= {*range(1, land.length)}


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(steps=STEPS, apart=st.booleans(), holds=st.booleans())
def test_whatever_happens_the_live_generation_has_every_event_once(steps: list[Step], apart: bool, holds: bool) -> None:
    land = Land.on(apart=apart, length=6)
    land.holds = holds
    play(land, steps)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """The swap does not fence the run of the live generation."""
    patch.setattr(Generations, "fence", lambda *_: None)


def no_look(patch: pytest.MonkeyPatch) -> None:
    """A run does not look at the pointer before it begins on a generation."""
    patch.setattr(beginning, "check_live", lambda *_, **__: None)


def reads_on(patch: pytest.MonkeyPatch) -> None:
    """The rebuild reads to the end of the log, so what the live generation has not read yet never leaves."""
    patch.setattr(replays.MemoryFolding, "until", lambda folding, *_: folding.land.length)
    patch.setattr(Generations, "has_all", lambda *_: True)
    patch.setattr(Land, "compare", lambda *_: Differences(Comparison({})))


BEFORE: list[Step] = [("go_on", 12, False), ("freeze", 0, False), ("rebuild", 0, False)]
SWAP: list[Step] = [("swap", 0, True), ("grow", 5, False), ("go_on", 3, False), ("wake", 0, False)]
"""A swap while one run of the live generation is frozen and another one begins."""


@pytest.mark.parametrize(
    ("bug", "steps"),
    [
        (no_fence, [*BEFORE, *SWAP]),
        (no_look, [*BEFORE, *SWAP]),
        (reads_on, [*BEFORE, ("grow", 4, False), *SWAP]),
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(Land.on(apart=True, length=6), steps)
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        play(Land.on(apart=True, length=6), steps)
