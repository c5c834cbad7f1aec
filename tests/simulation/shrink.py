"""Runs a seed again, and finds the fewest steps that still fail."""

from collections.abc import Callable, Sequence

from tests.simulation.steps import draw_world
from tests.simulation.world import World


def outcome(seed: int, chosen: Sequence[int] | None = None) -> str:
    """The error in a seed's world, with all or some of its steps; empty if there is none."""
    spec, steps = draw_world(seed)
    try:
        World(spec).run([steps[number] for number in (range(len(steps)) if chosen is None else chosen)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(count: int, fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Remove steps, in ever smaller runs, as long as it still fails.

    Args:
        count: Number of steps.
        fails: Whether it fails with these of them.

    Returns:
        Numbers of the steps that are needed.
    """
    kept = list(range(count))
    size = count // 2
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fails(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept
