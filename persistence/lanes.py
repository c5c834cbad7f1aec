"""Lanes in a state record: grouped under the name of their group, each with its distinguishing partitions.

`at` are the partitions after the root's that are part of the lane's name. `held` are the root offsets of the
positions. If there are many, `steps` replaces `held`: the first offset, then the difference from each to the next;
-n stands for n differences of 1. `index` has one column for each component after the root offset: one value if all
are equal, otherwise one per position. If positions differ in length, because only some messages had an event id,
`ragged` has one list per position instead.

`persistence.floors` describes the format of retired lanes, which have only a floor.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias

import msgspec

from envelope import History, Position
from envelope.dedup.history import is_loose
from envelope.dedup.lanes import HopsMissingError, lane_of, parts_of
from envelope.dedup.lineage import NO_INDEX
from envelope.dedup.packed import PackedLanes, divided, opened
from persistence.columns import ascending_of, steps_of
from persistence.floors import MANY_FLOORS, Retired, packed_floors, plain_floors, read_floors
from persistence.seal import DamagedError

IndexColumn: TypeAlias = int | str | list[int | str]

_MANY = 64
"""Histories with more positions than this are written as steps. With fewer, the saved bytes are not worth the time."""


class LaneRecord(msgspec.Struct, omit_defaults=True, gc=False):
    """One lane with its history."""

    at: list[int] = []
    held: list[int] = []
    steps: list[int] = []
    index: list[IndexColumn] = []
    ragged: list[list[int | str]] = []
    floor: list[int | str] | None = None
    used: int = 0
    wide: bool = False


def packed(histories: Mapping[str, History]) -> tuple[dict[str, list[LaneRecord]], Retired]:
    """Lanes with their histories by group, and retired lanes."""
    unpacked, kept = divided(histories)
    floors = [name for name, history in unpacked.items() if _floor(history)]
    many = len(floors) + sum(map(len, kept.values())) > MANY_FLOORS
    unpacked, kept = opened(histories, floors if many else kept)
    active: dict[str, list[LaneRecord]] = {}
    retired: dict[str, list[tuple[tuple[int, ...], Position]]] = {}
    for name, history in unpacked.items():
        group, at = parts_of(name)
        if floor := _floor(history):
            retired.setdefault(group, []).append((at, floor))
        else:
            active.setdefault(group, []).append(_lane(history, at))
    return active, packed_floors(retired, kept) if many else plain_floors(retired)


def unpacked(active: Mapping[str, Sequence[LaneRecord]], retired: Retired) -> Mapping[str, History]:
    """Histories by the full names of their lanes.

    Raises:
        DamagedError: The parts are inconsistent.
    """
    histories: dict[str, History] = {}
    try:
        for group, lanes in active.items():
            for lane in lanes:
                histories[lane_of(group, tuple(lane.at)) if lane.at else group] = _history(lane)
        plain, kept = read_floors(retired)
    except HopsMissingError as error:
        raise DamagedError(str(error)) from None
    histories |= plain
    return PackedLanes(histories, kept) if kept else histories


def _floor(history: History) -> Position | None:
    """The floor of a retired lane; None if it has more than a floor, or one with an event id."""
    if history.held or history.used or history.wide or history.floor is None or isinstance(history.floor[-1], str):
        return None
    return history.floor


def _lane(history: History, at: tuple[int, ...]) -> LaneRecord:
    held, floor = history.held, None if history.floor is None else list(history.floor)
    if not held:
        return LaneRecord(list(at), floor=floor, used=history.used, wide=history.wide)
    try:
        columns: tuple[tuple[Any, ...], ...] = tuple(zip(*held, strict=True))
    except ValueError:
        ragged = [list(one) for one in held]
        return LaneRecord(list(at), ragged=ragged, floor=floor, used=history.used, wide=history.wide)
    index: list[IndexColumn] = []
    for column in columns[1:]:
        first = column[0]
        index.append(first if column.count(first) == len(column) else list(column))
    if len(held) > _MANY:
        return LaneRecord(list(at), [], steps_of(columns[0]), index, [], floor, history.used, history.wide)
    return LaneRecord(list(at), list(columns[0]), [], index, [], floor, history.used, history.wide)


def _history(lane: LaneRecord) -> History:
    offsets, index = lane.held, lane.index
    floor = None if lane.floor is None else tuple(lane.floor)
    if lane.steps:
        offsets = ascending_of(lane.steps)
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
