"""Seeds run again: what goes wrong in one, and the shortest story that still does."""

from collections.abc import Callable, Sequence

from tests.simulation.steps import draw_world
from tests.simulation.world import World


def outcome(seed: int, chosen: Sequence[int] | None = None) -> str:
    """What goes wrong in a seed's world, with all or some of its steps; empty when nothing does."""
    spec, steps = draw_world(seed)
    try:
        World(spec).run([steps[number] for number in (range(len(steps)) if chosen is None else chosen)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(count: int, fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Leave out steps, in ever smaller runs, as long as it goes on failing.

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
