"""Names of lanes: a group, and the partitions after the root's that distinguish the lanes of that group.

Each group has one more lane, for the positions that were folded late.
"""

import re
from functools import lru_cache
from typing import Final

_PARTITION: Final = re.compile(r"(>[^>:]*):(\d+)")
_KEPT: Final = 1 << 16  # cached names: the states of one stage share most of them


class HopsMissingError(ValueError):
    """A lane has more partitions than its group has hops."""


@lru_cache(_KEPT)
def group_of(lane: str) -> str:
    """Return the group of a lane: its name without the partitions after the root's."""
    return _PARTITION.sub(r"\1", lane) if ":" in lane.partition(">")[2] else lane


@lru_cache(_KEPT)
def parts_of(lane: str) -> tuple[str, tuple[int, ...]]:
    """Return the group of a lane and its partitions after the root's, for `lane_of`.

    A name that no lineage produces is its own group.
    """
    group = group_of(lane)
    partitions = tuple(int(number) for _, number in _PARTITION.findall(lane.partition(">")[2] and lane))
    return (group, partitions) if _named(group, partitions) == lane else (lane, ())


@lru_cache(_KEPT)
def lane_of(group: str, partitions: tuple[int, ...]) -> str:
    """Return the name of the lane of a group with these partitions.

    Raises:
        HopsMissingError: The group has fewer hops than there are partitions.
    """
    if (name := _named(group, partitions)) is None:
        raise HopsMissingError(f"a lane has {len(partitions)} partitions after the root's, and its group fewer hops")
    return name


def path_of(group: str) -> tuple[str, str]:
    """Return the name of a group without the root's partition, and this partition, for `group_at`.

    The partition is empty if no lineage produces the name.
    """
    root, mark, steps = group.partition("#")
    topic, colon, partition = root.rpartition(":")
    return (f"{topic}#{steps}", partition) if mark and colon and partition else (group, "")


def group_at(path: str, partition: str) -> str:
    """Return the name of the group of a path with this partition of the root."""
    topic, mark, steps = path.partition("#")
    return f"{topic}:{partition}{mark}{steps}" if partition else path


def healed_lane(group: str) -> str:
    """Lane that remembers the positions of a group that were folded late. No other lane begins with "!"."""
    return f"!{group}"


def is_healed(lane: str) -> bool:
    """Whether a lane remembers positions that were folded late, out of the order of their path."""
    return lane.startswith("!")


def names_partition(lane: str) -> bool:
    """Whether a lane's name contains the partition that its messages are consumed from."""
    _, behind, last = lane.rpartition(">")
    return not behind or ":" in last


def _named(group: str, partitions: tuple[int, ...]) -> str | None:
    root, *steps = group.split(">")
    if len(steps) < 2 * len(partitions):
        return None
    for hop, partition in enumerate(partitions):
        steps[2 * hop + 1] += f":{partition}"
    return ">".join((root, *steps))
