"""Partitions that are added to the consumed topic while a flow reads it. Pure.

A key's newer records then come by another partition than its older ones, and the flow may read the newer ones first.
From the first sight of a new number of partitions until everything is read that may still be in the wrong place, the
flow's states evict no position. Producers place records by the old number until their metadata is renewed: so the ends
to be reached are taken only when `METADATA_MAX_AGE_SECONDS` have passed since the first sight.
"""

from collections.abc import Mapping

from persistence.growth import Ends, age, is_drained
from persistence.manifest import Growth


def advance(
    growth: Growth | None,
    *,
    known: int,
    now: int,
    clock_ms: int,
    max_age_ms: int,
    positions: Mapping[int, int],
    ends: Ends | None,
    shared: bool = False,
) -> Growth | None:
    """Return the growth that is under way, as of the batch that is about to be folded; None when there is none.

    Args:
        growth: What was under way before.
        known: Partitions that the manifest knows; 0 when the topic was never read.
        now: Partitions that the topic has.
        clock_ms: Milliseconds since 1970.
        max_age_ms: How long producers may not know of new partitions.
        positions: Next offset by partition, before the batch.
        ends: Asks for the ends of the topic; None when nobody can say, then a growth never ends.
        shared: A key was met in two partitions, so partitions were added before the topic was first read.
    """
    if known and now > (growth.partitions_now if growth else known):
        growth = Growth(growth.partitions_before if growth else known, now, clock_ms)
    elif shared and growth is None:
        growth = Growth(now, now, clock_ms)
    if growth is None:
        return None
    growth = age(growth, clock_ms=clock_ms, max_age_ms=max_age_ms, ends=ends)
    every = positions.keys() >= set(range(growth.partitions_now))
    return None if every and is_drained(growth, positions, growth.until or {}) else growth


def merge(growths: list[Growth]) -> Growth | None:
    """What several stores together say of one topic's growth: it is over when it is over for all of them."""
    if not growths:
        return None
    until: dict[int, int] = {}
    for growth in growths:
        for partition, end in (growth.until or {}).items():
            until[partition] = max(end, until.get(partition, 0))
    return Growth(
        min(growth.partitions_before for growth in growths),
        max(growth.partitions_now for growth in growths),
        max(growth.seen_at_ms for growth in growths),
        None if any(growth.until is None for growth in growths) else until,
    )


def describe(topic: str, growth: Growth) -> str:
    """The growth for people."""
    grown = f"from {growth.partitions_before} to {growth.partitions_now} partitions"
    if growth.partitions_before == growth.partitions_now:
        grown = f"to {growth.partitions_now} partitions before it was first read"
    if growth.until is None:
        end = "the ends are not taken yet, as producers may not know of the new partitions"
    else:
        end = "until " + ", ".join(f"{partition} is at {end}" for partition, end in sorted(growth.until.items()))
    return f"growth of topic {topic} {grown}: states evict no position; {end}"
