"""Which lanes of a state lose their history, and when a lane may evict no position."""

from collections.abc import Mapping, Sequence

from envelope.dedup.history import History
from envelope.dedup.lanes import is_healed, names_partition

LANES = 256
"""Lanes with a history per state; beyond that the least recently used lane is retired to its floor."""
GROWTH = 65_536
"""Positions remembered per lane while the consumed topic grows and none may be evicted: about 1 MB of state."""


class GrowthFullError(Exception):
    """A lane has reached its limit of positions while its topic grows: the job stops rather than evict one."""


def retire(
    known: dict[str, History], limit: int, batch: int, *, evict: bool = True, replays: bool = False
) -> tuple[str, ...]:
    """Retire the lanes beyond the limit, least recently used first, and return their names."""
    active = [lane for lane, history in known.items() if history.retires]
    late = [lane for lane in active if is_healed(lane)]
    paths = [lane for lane in active if not is_healed(lane) and (evict or names_partition(lane))]
    # Other lanes never displace them, and what this batch adds is needed until it is committed.
    late = [] if replays else [lane for lane in late if known[lane].used < batch]
    gone = (*_longest_unused(paths, known, limit), *_longest_unused(late, known, max(limit, LANES)))
    for lane in gone:
        known[lane] = known[lane].retired()
    return gone


def _longest_unused(active: Sequence[str], known: Mapping[str, History], limit: int) -> list[str]:
    """The lanes beyond the limit, least recently used first."""
    if len(active) <= limit:
        return []
    return sorted(active, key=lambda lane: (known[lane].used, lane))[: len(active) - limit]


def check_full(before: History, after: History, limit: int) -> None:
    """Check that a lane that must not evict has evicted nothing.

    Raises:
        GrowthFullError: It has evicted a position: it has reached its limit.
    """
    if after.floor != before.floor:
        raise GrowthFullError(
            f"partitions were added to the topic before it was read to its end, and a key has had more than {limit} "
            "records since. Set history= of the stage to the largest number of unread records of a key, or accept that "
            "records below the floor of the history are dropped as below_floor"
        )
