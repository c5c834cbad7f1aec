"""Retired lanes in a state record: those that have only a floor, one column of numbers per component.

`at` are the partitions after the root's, as in `persistence.lanes`. Its first column is written as steps, all others as
`persistence.columns` describes.

Up to 64 retired lanes stand under the name of their group, in plain columns. If a state has more, they stand under the
name of their path, which is that of the group without the root's partition, then under this partition:

    "retired":{"flights.raw#Qx1>wrap>flights.legs":{"0":[[[[0,-99]],["500:20:CcZd...",0]]],"1":...}}

A block is then a list of `at` and `floor`, in shortest columns. Lanes are made only of the groups that are needed; the
other groups are written again as they were read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from envelope import History, Position
from envelope.dedup.lanes import group_at, lane_of, path_of
from envelope.dedup.packed import Packed
from persistence.columns import (
    Column,
    ascending_of,
    check_column,
    numbers_of,
    plain_column,
    shortest_column,
    steps_of,
)
from persistence.seal import DamagedError

MANY_FLOORS = 64
"""Retired lanes of a state that are readable in the record. More are packed."""


class PlainFloors(msgspec.Struct, omit_defaults=True, gc=False):
    """Retired lanes of one group whose names have as many partitions, and whose floors have as many components."""

    at: list[Column] = []
    floor: list[Column] = []


class ShortFloors(msgspec.Struct, array_like=True, gc=False):
    """The same without names."""

    at: list[Column]
    floor: list[Column]


Floors: TypeAlias = PlainFloors | ShortFloors
Found: TypeAlias = Mapping[str, Sequence[tuple[tuple[int, ...], Position]]]
"""Partitions after the root's, and floor, of each retired lane of a group."""
Retired: TypeAlias = dict[str, list[PlainFloors] | dict[str, list[ShortFloors]]]
"""Retired lanes by group, or by path and partition of the root."""


class PackedFloors(Mapping[str, History]):
    """The retired lanes of one group by name; made when one of them is asked for.

    Args:
        group: Name of the group.
        blocks: Its retired lanes.

    Raises:
        DamagedError: They are inconsistent.
        HopsMissingError: The group has fewer hops than a lane has partitions.
    """

    __slots__ = ("_count", "_group", "_lanes", "blocks")

    def __init__(self, group: str, blocks: list[ShortFloors]) -> None:
        self.blocks = blocks
        self._group = group
        self._count = sum(_checked(group, block) for block in blocks)
        self._lanes: dict[str, History] | None = None

    def __getitem__(self, lane: str) -> History:
        return self._made()[lane]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return self._count

    def _made(self) -> dict[str, History]:
        if self._lanes is None:
            self._lanes = dict(_lanes(self._group, self.blocks))
        return self._lanes


def plain_floors(found: Found) -> Retired:
    """Few retired lanes, by group."""
    return {group: _blocks(found[group], PlainFloors, plain_column) for group in sorted(found)}


def packed_floors(found: Found, kept: Packed) -> Retired:
    """Many retired lanes, by path and partition of the root.

    Args:
        found: Those of some groups.
        kept: Those of other groups, as `read_floors` returned them.
    """
    paths: dict[str, dict[str, list[ShortFloors]]] = {}
    for group in sorted([*found, *kept]):
        path, root = path_of(group)
        lanes = kept.get(group)
        paths.setdefault(path, {})[root] = (
            lanes.blocks if isinstance(lanes, PackedFloors) else _blocks(found[group], ShortFloors, shortest_column)
        )
    return {**paths}


def read_floors(retired: Retired) -> tuple[dict[str, History], Packed]:
    """The retired lanes that are not packed, and those that are.

    Raises:
        DamagedError: They are inconsistent.
        HopsMissingError: A group has fewer hops than a lane has partitions.
    """
    histories: dict[str, History] = {}
    packed: dict[str, PackedFloors] = {}
    for name, found in retired.items():
        if isinstance(found, list):
            histories.update(_lanes(name, found))
        else:
            groups = {group_at(name, root): blocks for root, blocks in found.items()}
            packed |= {group: PackedFloors(group, blocks) for group, blocks in groups.items()}
    return histories, packed


def _blocks(found: Sequence[tuple[tuple[int, ...], Position]], kind: Any, column: Callable[[Any], Column]) -> list[Any]:
    """The retired lanes of one group."""
    shapes: dict[tuple[int, int], list[tuple[tuple[int, ...], Position]]] = {}
    for at, floor in sorted(found):
        shapes.setdefault((len(at), len(floor)), []).append((at, floor))
    blocks = []
    for _, lanes in sorted(shapes.items()):
        first, *others = zip(*(at for at, _ in lanes), strict=True) if lanes[0][0] else [()]
        columns = [steps_of(first), *map(column, others)] if first else []
        blocks.append(kind(columns, [column(one) for one in zip(*(floor for _, floor in lanes), strict=True)]))
    return blocks


def _lanes(group: str, blocks: Sequence[Floors]) -> Iterator[tuple[str, History]]:
    """Names and histories of the lanes of a group."""
    for block in blocks:
        count = _checked(group, block)
        partitions = zip(_first(block), *(numbers_of(one, count) for one in block.at[1:]), strict=True)
        floors = zip(*(numbers_of(one, count) for one in block.floor), strict=True)
        for at, floor in zip(partitions, floors, strict=True):
            yield lane_of(group, at) if block.at else group, History((), floor)


def _checked(group: str, block: Floors) -> int:
    """The number of lanes of a block, which is consistent."""
    count = len(_first(block))
    for column in (*block.at[1:], *block.floor):
        check_column(column, count)
    if not block.floor:
        raise DamagedError("retired lanes have no floors")
    lane_of(group, (0,) * len(block.at))
    return count


def _first(block: Floors) -> list[int]:
    """The first partition of each lane; any number if the names of lanes have no partitions, as there is one lane."""
    steps = block.at[0] if block.at else [0]
    if not isinstance(steps, list) or not steps:
        raise DamagedError("the partitions of retired lanes are invalid")
    return ascending_of(steps)
