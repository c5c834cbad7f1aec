"""When the batches of a flow were committed: a short list in the manifest, exact for new batches, coarser with their age.

A state has no time, but the epoch and the batch that wrote it. That batch was committed at the time of the first listed
batch that is not before it. The list keeps about as many times for the last minute as for the last day or month, so the
age that it gives is too low by a fifth or so, and never too high, as far as the clocks of the drivers agree.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, TypeAlias

Committed: TypeAlias = tuple[int, int, int]
"""Epoch, batch, and when its manifest was first written, in milliseconds since 1970."""

MOST_TIMES: Final = 64
"""Entries of the list, 1.5 KB. With a batch a second, neighbours are 20 % of their age apart after a day."""


def committed(times: Sequence[Committed], epoch: int, batch: int, now_ms: int) -> tuple[Committed, ...]:
    """The list after the manifest of a batch is written; unchanged if it has that batch, or a later one.

    Args:
        times: The list before, in ascending order.
        epoch: Epoch of the manifest.
        batch: Its batch.
        now_ms: The time, in milliseconds since 1970; a clock that went back does not count.
    """
    if times and times[-1][:2] >= (epoch, batch):
        return tuple(times)
    now_ms = max(now_ms, times[-1][2] if times else now_ms)
    longer = [*times, (epoch, batch, now_ms)]
    if len(longer) > MOST_TIMES:
        # The one whose neighbours are the closest in proportion to their age.
        ages = [now_ms - at + 1 for _, _, at in longer]
        del longer[min(range(1, len(longer) - 1), key=lambda i: ages[i - 1] / ages[i + 1])]
    return tuple(longer)


def committed_by(times: Sequence[Committed], epoch: int, batch: int) -> int | None:
    """When a batch was committed at the latest, in milliseconds since 1970; None if it is not known to be committed."""
    place = bisect_left(times, (epoch, batch, 0))
    return times[place][2] if place < len(times) else None
