"""Partitions that are added to the consumed topic while a flow reads it. Pure.

A key's newer records then arrive in another partition than its older ones, and the flow may read the newer ones first.
The flow's states evict no position from the detection of a new number of partitions until every record that may be in
its old partition is read. Producers partition by the old number until they refresh their metadata: so the ends
to reach are taken only `METADATA_MAX_AGE_SECONDS` after the detection.
"""

from collections.abc import Callable, Mapping
from functools import partial

from persistence.growth import METADATA_MAX_AGE_SECONDS, Ends, age, is_drained
from persistence.manifest import Growth, Manifest


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
    """Return the current growth, as of the batch that is about to be folded; None when there is none.

    Args:
        growth: The previous growth.
        known: Number of partitions in the manifest; 0 when the topic was never read.
        now: Number of partitions of the topic.
        clock_ms: Current time in milliseconds since 1970.
        max_age_ms: Milliseconds for which producers may not know of new partitions.
        positions: Next offset by partition, before the batch.
        ends: Returns the ends of the topic; None when they are unavailable, in which case a growth never ends.
        shared: A key arrived in two partitions, so partitions were added before the topic was first read.
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


def unread_growths(manifest: Manifest, clock_ms: int, ends: Callable[[str], Mapping[int, int]]) -> list[str]:
    """The topics whose growth is not over at the end of a run; the run itself notes this with its next batch only.

    Args:
        manifest: Its manifest.
        clock_ms: Current time in milliseconds since 1970.
        ends: Returns the ends of a topic.
    """
    found = []
    for topic, growth in manifest.growth.items():
        positions = {partition: one.next_offset for partition, one in manifest.positions.get(topic, {}).items()}
        after = advance(
            growth,
            known=growth.partitions_now,
            now=growth.partitions_now,
            clock_ms=clock_ms,
            max_age_ms=round(METADATA_MAX_AGE_SECONDS * 1000),
            positions=positions,
            ends=partial(ends, topic),
        )
        if after is not None:
            found.append(topic)
    return found


def merge(growths: list[Growth]) -> Growth | None:
    """Combine the growths of one topic in several stores: it is over when it is over for all of them."""
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
    """Describe the growth as text."""
    grown = f"from {growth.partitions_before} to {growth.partitions_now} partitions"
    if growth.partitions_before == growth.partitions_now:
        grown = f"to {growth.partitions_now} partitions before it was first read"
    if growth.until is None:
        end = "the ends to reach are not known yet, because producers may not know the new partitions"
    else:
        ends = ", ".join(f"{partition}:{end}" for partition, end in sorted(growth.until.items()))
        end = f"it ends when these offsets are reached, as partition:offset: {ends}"
    return f"growth of topic {topic} {grown}: states evict no position; {end}"
