"""The lanes of a state of which most are retired: their floors stay packed until a message needs them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeAlias

from envelope.dedup.history import History
from envelope.dedup.lanes import parts_of

Packed: TypeAlias = Mapping[str, Mapping[str, History]]
"""Retired lanes by group. Those of a group are made when one of them is asked for; none holds a position."""


class PackedLanes(Mapping[str, History]):
    """Histories by the names of their lanes. Immutable.

    Args:
        unpacked: Histories by lane.
        packed: The other lanes.
    """

    __slots__ = ("_count", "packed", "unpacked")

    def __init__(self, unpacked: Mapping[str, History], packed: Packed) -> None:
        self.unpacked = unpacked
        self.packed = packed
        self._count = len(unpacked) + sum(map(len, packed.values()))

    def __getitem__(self, lane: str) -> History:
        if (history := self.unpacked.get(lane)) is not None:
            return history
        return self.packed[parts_of(lane)[0]][lane]

    def __iter__(self) -> Iterator[str]:
        return chain(self.unpacked, *self.packed.values())

    def __len__(self) -> int:
        return self._count


def divided(lanes: Mapping[str, History]) -> tuple[Mapping[str, History], Packed]:
    """The lanes that are not packed, and those that are."""
    return (lanes.unpacked, lanes.packed) if isinstance(lanes, PackedLanes) else (lanes, {})


def opened(lanes: Mapping[str, History], needed: Iterable[str]) -> tuple[dict[str, History], Packed]:
    """The lanes that are not packed, after the groups of the needed ones are unpacked, and those that still are."""
    unpacked, packed = divided(lanes)
    known, rest = dict(unpacked), dict(packed)
    if packed:
        for lane in needed:
            known.update(rest.pop(parts_of(lane)[0], {}))
    return known, rest
