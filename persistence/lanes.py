"""Lanes in a state record: grouped under the name of their group, each with its distinguishing partitions.

`at` are the partitions after the root's that are part of the lane's name. `held` are the root offsets of the
positions. If there are many, `steps` replaces `held`: the first offset, then the difference from each to the next;
-n stands for n differences of 1. `index` has one column for each component after the root offset: one value if all
are equal, otherwise one per position. If positions differ in length, because only some messages had an event id,
`ragged` has one list per position instead.

Retired lanes, which have only a floor, are stored together, one column per component. The first column of `at` is
encoded like `steps`. Every other column is one value if all are equal, otherwise the lowest value and the difference
of each from it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby, repeat
from operator import sub
from typing import Any, TypeAlias

import msgspec

from envelope import History, Position
from envelope.dedup.history import is_loose
from envelope.dedup.lanes import HopsMissingError, lane_of, parts_of
from envelope.dedup.lineage import NO_INDEX
from persistence.seal import DamagedError

Column: TypeAlias = int | str | list[int | str]

_MANY = 64
"""Histories with more positions than this are written as steps. With fewer, the saved bytes are not worth the time."""
_LONGEST_RUN = 1 << 20
"""Limit of steps of 1 in a row; no history holds this many positions."""


class LaneRecord(msgspec.Struct, omit_defaults=True, gc=False):
    """One lane with its history."""

    at: list[int] = []
    held: list[int] = []
    steps: list[int] = []
    index: list[Column] = []
    ragged: list[list[int | str]] = []
    floor: list[int | str] | None = None
    used: int = 0
    wide: bool = False


class RetiredLanes(msgspec.Struct, omit_defaults=True, gc=False):
    """Floors of the retired lanes of one group."""

    at: list[int | list[int]] = []
    floor: list[int | list[int]] = []


def packed(histories: Mapping[str, History]) -> tuple[dict[str, list[LaneRecord]], dict[str, list[RetiredLanes]]]:
    """Lanes with their histories, and retired lanes, both by group."""
    active: dict[str, list[LaneRecord]] = {}
    floors: dict[tuple[str, int, int], list[tuple[tuple[int, ...], Position]]] = {}
    for name, history in histories.items():
        group, at = parts_of(name)
        floor = history.floor
        if not (history.held or history.used or history.wide) and floor is not None and not isinstance(floor[-1], str):
            floors.setdefault((group, len(at), len(floor)), []).append((at, floor))
        else:
            active.setdefault(group, []).append(_lane(history, at))
    retired: dict[str, list[RetiredLanes]] = {}
    for (group, _, _), found in sorted(floors.items()):
        found.sort()
        partitions = list(zip(*(at for at, _ in found), strict=True))
        columns = [_relative(column) for column in zip(*(floor for _, floor in found), strict=True)]
        retired.setdefault(group, []).append(
            RetiredLanes([*map(_steps, partitions[:1]), *map(_relative, partitions[1:])], columns)
        )
    return active, retired


def unpacked(
    active: Mapping[str, Sequence[LaneRecord]], retired: Mapping[str, Sequence[RetiredLanes]]
) -> dict[str, History]:
    """Histories by the full names of their lanes.

    Raises:
        DamagedError: The parts are inconsistent.
    """
    histories: dict[str, History] = {}
    try:
        for group, lanes in active.items():
            for lane in lanes:
                histories[lane_of(group, tuple(lane.at)) if lane.at else group] = _history(lane)
        for group, blocks in retired.items():
            for block in blocks:
                for at, floor in _floors(block):
                    histories[lane_of(group, at) if at else group] = History((), floor)
    except HopsMissingError as error:
        raise DamagedError(str(error)) from None
    return histories


def _lane(history: History, at: tuple[int, ...]) -> LaneRecord:
    held, floor = history.held, None if history.floor is None else list(history.floor)
    if not held:
        return LaneRecord(list(at), floor=floor, used=history.used, wide=history.wide)
    try:
        columns: tuple[tuple[Any, ...], ...] = tuple(zip(*held, strict=True))
    except ValueError:
        ragged = [list(one) for one in held]
        return LaneRecord(list(at), ragged=ragged, floor=floor, used=history.used, wide=history.wide)
    index: list[Column] = []
    for column in columns[1:]:
        first = column[0]
        index.append(first if column.count(first) == len(column) else list(column))
    if len(held) > _MANY:
        return LaneRecord(list(at), [], _steps(columns[0]), index, [], floor, history.used, history.wide)
    return LaneRecord(list(at), list(columns[0]), [], index, [], floor, history.used, history.wide)


def _history(lane: LaneRecord) -> History:
    offsets, index = lane.held, lane.index
    floor = None if lane.floor is None else tuple(lane.floor)
    if lane.steps:
        offsets = _offsets(lane.steps)
    elif not offsets:
        ragged = tuple(map(tuple, lane.ragged))
        return History(ragged, floor, lane.used, lane.wide, any(map(is_loose, ragged)))
    if len(index) == 1 and isinstance(index[0], int):  # nearly every lane: one output of each input
        held: tuple[Position, ...] = tuple(zip(offsets, repeat(index[0]), strict=False))
        return History(held, floor, lane.used, lane.wide, index[0] == NO_INDEX)
    columns = [one if isinstance(one, list) else repeat(one, len(offsets)) for one in index]
    try:
        held = tuple(zip(offsets, *columns, strict=True))
    except ValueError:
        raise DamagedError("a lane's positions are inconsistent") from None
    return History(held, floor, lane.used, lane.wide, any(map(is_loose, held)))


def _steps(ascending: Sequence[Any]) -> list[int]:
    """The first number, then the steps; -n for n steps of 1 where most of them are."""
    steps = [ascending[0]]
    steps += map(sub, ascending[1:], ascending)
    ones = steps.count(1)
    if ones * 2 <= len(steps):
        return steps
    runs = [(step, len(list(same))) for step, same in groupby(steps[1:])]
    return [steps[0], *chain.from_iterable([-n] if step == 1 < n else [step] * n for step, n in runs)]


def _offsets(steps: list[int]) -> list[int]:
    """The inverse of `_steps`."""
    if min(steps) < 0:
        if steps[0] < 0 or min(steps) < -_LONGEST_RUN:
            raise DamagedError("a lane's positions are invalid")
        steps = list(chain.from_iterable([1] * -step if step < 0 else [step] for step in steps))
    return list(accumulate(steps))


def _relative(column: Sequence[Any]) -> int | list[int]:
    lowest: int = min(column)
    return lowest if max(column) == lowest else [lowest, *(one - lowest for one in column)]


def _absolute(column: int | list[int], count: int) -> Iterable[int]:
    if isinstance(column, int):
        return repeat(column, count)
    lowest, *above = column
    return [lowest + one for one in above]


def _floors(block: RetiredLanes) -> Iterator[tuple[tuple[int, ...], Position]]:
    """Partitions and floor of every lane."""
    first = _offsets(block.at[0]) if block.at and isinstance(block.at[0], list) and block.at[0] else []
    count = len(first) if block.at else 1
    try:
        partitions = list(zip(first, *(_absolute(one, count) for one in block.at[1:]), strict=True)) if first else [()]
        floors = list(zip(*(_absolute(one, count) for one in block.floor), strict=True))
        return iter(list(zip(partitions, floors, strict=True)))
    except ValueError:
        raise DamagedError("the floors of retired lanes are inconsistent") from None
