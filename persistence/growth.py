"""Partitions that are added to a topic while it is read: rules shared by flows and republishers. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from persistence.manifest import Growth

GROWN_UNDRAINED: Final = "grown-undrained"
"""Risk of partitions that were added before everything was read: the order of each key is lost."""
METADATA_MAX_AGE_SECONDS: Final = 300.0
"""Seconds for which a producer may not know of new partitions: `metadata.max.age.ms` of Kafka's clients, 5 minutes."""

Ends = Callable[[], Mapping[int, int]]
"""Returns the end offset by partition: the offset that the next record will get."""


def age(growth: Growth, *, clock_ms: int, max_age_ms: int, ends: Ends | None) -> Growth:
    """Return a growth with the ends to reach, once all producers must have learned of the new partitions.

    Args:
        growth: The current growth.
        clock_ms: Current time in milliseconds since 1970.
        max_age_ms: Milliseconds for which producers may not know of new partitions.
        ends: Returns the ends; None when they are unavailable, in which case a growth never ends.
    """
    if clock_ms < growth.seen_at_ms:  # the clock was set back: restart the wait instead of extending it by as much
        growth = msgspec.structs.replace(growth, seen_at_ms=clock_ms)
    if growth.until is None and ends is not None and clock_ms - growth.seen_at_ms >= max_age_ms:
        growth = msgspec.structs.replace(growth, until=dict(ends()))
    return growth


def is_drained(growth: Growth, positions: Mapping[int, int], partitions: Iterable[int]) -> bool:
    """Whether these partitions are read up to the ends to reach."""
    until = growth.until
    return until is not None and all(positions.get(one, 0) >= until.get(one, 0) for one in partitions)


def undrained(topic: str, before: int, now: int) -> str:
    """Describe a growth in which the order of a key cannot be kept."""
    return (
        f"topic {topic} grew from {before} to {now} partitions before it was read to its end, so the order in which the "
        "records of a key were written is lost"
    )
