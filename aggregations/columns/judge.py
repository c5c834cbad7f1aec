"""Verdicts and histories of a whole batch: `envelope.Histories.judge` and `.folding` over arrays.

If a batch is in the order of (key, position, lane), each message can be judged by the histories from before
the batch and by the messages accepted earlier in the batch (see `Histories.judge`). States that the arrays do not
express are left to the pure code, key by key: those with holes or late folds, with exotic messages, or with more lanes
than have a history.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.histories import LaneArrays
from aggregations.columns.lane_names import LaneNames, LaneTable
from aggregations.columns.order import distinct_lanes, fold_order, sorted_rows
from aggregations.columns.schema import MISSING
from aggregations.columns.signature import Lane
from envelope import Verdict
from envelope.dedup.eviction import GROWTH, LANES
from envelope.dedup.history import width_of
from envelope.dedup.room import KNOWN_LANES
from persistence.compiled import compiled

VERDICTS: Final = tuple(Verdict)
"""The verdicts; `Judged.verdicts` contains their indices."""

_ACCEPTED: Final = VERDICTS.index(Verdict.ACCEPTED)
_LATE: Final = VERDICTS.index(Verdict.LATE)
_NEW_LANE: Final = VERDICTS.index(Verdict.NEW_LANE)
_DUPLICATE: Final = VERDICTS.index(Verdict.DUPLICATE)
_DUPLICATE_IN_BATCH: Final = VERDICTS.index(Verdict.DUPLICATE_IN_BATCH)
_BELOW_FLOOR: Final = VERDICTS.index(Verdict.BELOW_FLOOR)


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts of a batch at one stage, and the histories after it.

    Attributes:
        order: Rows in the order in which they are folded, key by key.
        verdicts: Index of each row's verdict in `VERDICTS`.
        fold: Whether each row is folded.
        pure: Rows whose key the pure code must judge and fold as a whole; verdict and fold are meaningless for them.
        changed: Numbers of the keys with a folded row, ascending, without those left to the pure code.
        lanes: The histories of the changed keys.
    """

    order: Ints
    verdicts: npt.NDArray[np.uint8]
    fold: Mask
    pure: Mask
    changed: Ints
    lanes: LaneArrays


class HistoryLimits(NamedTuple):
    """Limits of histories.

    Attributes:
        narrow: Positions remembered per lane.
        broad: Positions remembered per lane with records without a key.
        growth: Positions remembered per lane that must not evict; 0 while all may.
        lanes: Lanes with a history.
        batch: Number of the batch.
    """

    narrow: int
    broad: int
    growth: int
    lanes: int
    batch: int

    @classmethod
    def of(cls, size: int | None = None, lanes: int = LANES, batch: int = 0, *, evict: bool = True) -> "HistoryLimits":
        """The limits of a stage.

        Args:
            size: Positions remembered per lane, if the stage sets it.
            lanes: Lanes with a history per state.
            batch: Number of the batch.
            evict: See `Histories.folding`.
        """
        narrow, broad = width_of(size, wide=False), width_of(size, wide=True)
        return cls(narrow, broad, 0 if evict else GROWTH, min(lanes, KNOWN_LANES), batch)


class _Rows(NamedTuple):
    """A batch in the order in which it is folded; a position has `width` of the `most` components that it may have."""

    key: Ints
    lane: Ints
    wide: Mask
    refused: Mask
    width: Ints
    positions: Ints
    most: int


def judge(
    keys: Ints,
    lanes: Ints,
    positions: Sequence[Ints],
    places: Sequence[Lane],
    before: LaneArrays,
    names: LaneNames,
    limits: HistoryLimits,
    *,
    pure: Mask,
    exotic: Mask,
    refused: Mask,
    ties: Ints | None = None,
) -> Judged:
    """Judge every message of a batch, in order of arrival, and add what is folded to the histories.

    Args:
        keys: Number of each message's key, from 0.
        lanes: Number of its lane.
        positions: Components of its position; `schema.MISSING` where it is shorter.
        places: Lanes and their groups, by number.
        before: Histories of the keys, by number.
        names: Numbers of lanes in histories.
        limits: Limits of histories.
        pure: Keys whose histories `before` does not contain.
        exotic: Messages whose standing these arrays cannot express, or that need the pure code for another reason.
        refused: Messages that the fold will reject: if one of them is to be folded, its key is left to the pure code.
        ties: Order of messages of one position, instead of that of their lanes.
    """
    numbers = np.array([names.number(place.lane) for place in places], np.int64)
    if ties is None:
        order = fold_order(keys, positions, *distinct_lanes(lanes, places))
    else:
        order = sorted_rows([keys, *positions, ties])
    components = [component[order] for component in positions]
    left = pure.copy()
    left[keys[exotic]] = True
    rows = _Rows(
        keys[order],
        numbers[lanes[order]],
        np.array([place.wide for place in places], np.bool_)[lanes[order]],
        refused[order],
        np.sum([component != MISSING for component in components], axis=0, dtype=np.int64),
        np.column_stack(components).ravel() if len(components) > 1 else components[0],
        len(components),
    )
    table = names.table()
    verdicts, fold = np.full(len(order), _ACCEPTED, np.uint8), np.zeros(len(order), np.bool_)
    one, other = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    _judge(rows, before, table, left, verdicts, fold, one, other)
    lane_room = len(before.lane) + len(order)
    positions_room, floors_room = rows.most * len(order), rows.most * lane_room
    after = LaneArrays.space(len(pure), lane_room, len(before.held) + positions_room, len(before.floors) + floors_room)
    changed = np.empty(len(pure), np.int64)
    count = _hold(rows, before, table, limits, left, fold, changed, after, one, other)
    verdicts_by_row, fold_by_row = np.empty_like(verdicts), np.empty_like(fold)
    verdicts_by_row[order], fold_by_row[order] = verdicts, fold
    return Judged(order, verdicts_by_row, fold_by_row, left[keys], changed[:count], after.filled(count))


@compiled(allocates=False)
def _compare(a: Ints, i: int, a_width: int, b: Ints, j: int, b_width: int) -> int:
    """Compare two positions as tuples: negative if the first is lower, 0 if they are equal, else positive."""
    for component in range(min(a_width, b_width)):
        if a[i + component] != b[j + component]:
            return -1 if a[i + component] < b[j + component] else 1
    return a_width - b_width


@compiled(allocates=False)
def _holds(lanes: LaneArrays, lane: int, positions: Ints, at: int, width: int) -> bool:
    """Whether a lane holds the position of `width` components at `at`. Most positions are above all that it holds."""
    own, end = lanes.width[lane], lanes.first[lane + 1]
    low, high = 0, (end - lanes.first[lane]) // own
    if high and _compare(lanes.held, end - own, own, positions, at, width) < 0:
        return False
    while low < high:
        middle = (low + high) // 2
        order = _compare(lanes.held, lanes.first[lane] + middle * own, own, positions, at, width)
        if order == 0:
            return True
        if order < 0:
            low = middle + 1
        else:
            high = middle
    return False


@compiled(allocates=False)
def _end_of_key(rows: _Rows, first: int) -> int:
    last = first + 1
    while last < len(rows.key) and rows.key[last] == rows.key[first]:
        last += 1
    return last


@compiled(allocates=False)
def _judge(
    rows: _Rows,
    before: LaneArrays,
    table: LaneTable,
    pure: Mask,
    verdicts: npt.NDArray[np.uint8],
    fold: Mask,
    opened: Ints,
    copies: Ints,
) -> None:
    """`Histories.judge` for every key that is not left to the pure code.

    `opened` and `copies` have room for an entry per row: the lanes that a key opens, and the folded rows of a position.
    """
    first = 0
    while first < len(rows.key):
        last, key = _end_of_key(rows, first), rows.key[first]
        lanes, lanes_end = before.starts[key], before.starts[key + 1]
        new, run_folds = 0, 0
        for row in range(first, last):
            if pure[key]:
                break
            at, width, lane = row * rows.most, rows.width[row], rows.lane[row]
            if row > first and _compare(rows.positions, at - rows.most, rows.width[row - 1], rows.positions, at, width):
                run_folds = 0
            own, held = -1, False
            for one in range(lanes, lanes_end):
                if before.lane[one] == lane:
                    own = one
                if table.group[before.lane[one]] == table.group[lane]:
                    held = held or _holds(before, one, rows.positions, at, width)
            if held:
                verdicts[row] = _DUPLICATE
                continue
            taken = False
            for i in range(run_folds):
                if table.group[rows.lane[copies[i]]] == table.group[lane]:
                    taken = True
                    break
            if taken:
                verdicts[row] = _DUPLICATE_IN_BATCH
                continue
            if own < 0:
                known = False
                for i in range(new):
                    known = known or opened[i] == lane
                if not known:
                    if lanes < lanes_end or new:
                        verdicts[row] = _NEW_LANE
                    opened[new] = lane
                    new += 1
            else:
                floor, floor_end = before.floor_first[own], before.floor_first[own + 1]
                floored = floor < floor_end
                if floored and _compare(rows.positions, at, width, before.floors, floor, floor_end - floor) <= 0:
                    verdicts[row] = _BELOW_FLOOR
                    continue
                own_width, end = before.width[own], before.first[own + 1]
                holds_any = before.first[own] < end
                if holds_any and _compare(rows.positions, at, width, before.held, end - own_width, own_width) < 0:
                    verdicts[row] = _LATE
            fold[row] = True
            copies[run_folds] = row
            run_folds += 1
            if rows.refused[row]:
                pure[key] = True
        if pure[key]:
            fold[first:last] = False
        first = last


@compiled(allocates=False)
def _hold(
    rows: _Rows,
    before: LaneArrays,
    table: LaneTable,
    limits: HistoryLimits,
    pure: Mask,
    fold: Mask,
    changed: Ints,
    after: LaneArrays,
    opened: Ints,
    mine: Ints,
) -> int:
    """`Histories.folding` for every key with a folded row; leaves keys with too many lanes or positions to the pure code.

    Writes the numbers of the other keys to `changed` and their histories to `after`, and returns how many they are.
    """
    starts, lane, used, wide, width, first, held, floor_first, floors = after
    count, lanes, holding, flooring = 0, 0, 0, 0
    begin = 0
    while begin < len(rows.key):
        last, key = _end_of_key(rows, begin), rows.key[begin]
        old, old_end = before.starts[key], before.starts[key + 1]
        new, folded = 0, 0
        for row in range(begin, last):
            if not fold[row]:
                continue
            folded += 1
            known = False
            for one in range(old, old_end):
                known = known or before.lane[one] == rows.lane[row]
            for i in range(new):
                known = known or opened[i] == rows.lane[row]
            if not known:
                opened[new] = rows.lane[row]
                new += 1
        if not folded:
            begin = last
            continue
        all_lanes = old_end - old + new
        if all_lanes > limits.lanes:
            pure[key] = True
        lanes_before, holding_before, flooring_before = lanes, holding, flooring
        for number in range(all_lanes):
            if pure[key]:
                break
            source = old + number if number < old_end - old else -1
            name = before.lane[source] if source >= 0 else opened[number - (old_end - old)]
            fresh, came_wide = 0, 0
            for row in range(begin, last):
                if fold[row] and rows.lane[row] == name:
                    mine[fresh] = row
                    fresh += 1
                    came_wide |= int(rows.wide[row])
            size = rows.width[mine[0]] if fresh else before.width[source]
            from_held, held_end, floor, floor_end = 0, 0, 0, 0
            last_used = limits.batch if fresh else 0
            if source >= 0:
                from_held, held_end = before.first[source], before.first[source + 1]
                floor, floor_end = before.floor_first[source], before.floor_first[source + 1]
                last_used = max(last_used, before.used[source])
                came_wide |= int(before.wide[source])
                if from_held < held_end and before.width[source] != size:
                    pure[key] = True
                    break
            most = limits.broad if came_wide else limits.narrow
            kept_whole = limits.growth > 0 and table.whole[name] > 0
            if kept_whole:
                most = max(most, limits.growth)
            total = fresh + (held_end - from_held) // size
            cut = max(total - most, 0) if fresh else 0
            if cut and kept_whole:
                pure[key] = True
                break
            floor_at = flooring
            i, begins = 0, 0
            older = (held_end - from_held) // size
            if cut > 1 and (
                not older or _compare(before.held, held_end - size, size, rows.positions, mine[0] * rows.most, size) < 0
            ):
                begins = cut - 1  # in order: what is cut needs no merge
                from_held, i = from_held + min(begins, older) * size, max(begins - older, 0)
            for place in range(begins, total):  # merge
                row_at = mine[i] * rows.most if i < fresh else -1
                take_old = from_held < held_end and (
                    i >= fresh or _compare(before.held, from_held, size, rows.positions, row_at, size) < 0
                )
                for component in range(size):
                    value = before.held[from_held + component] if take_old else rows.positions[row_at + component]
                    if place >= cut:
                        held[holding + component] = value
                    elif place == cut - 1:
                        floors[floor_at + component] = value
                if place >= cut:
                    holding += size
                if take_old:
                    from_held += size
                else:
                    i += 1
            if cut:
                flooring = floor_at + size
            else:
                for component in range(floor, floor_end):
                    floors[flooring] = before.floors[component]
                    flooring += 1
            lane[lanes], used[lanes], wide[lanes], width[lanes] = name, last_used, came_wide, size
            lanes += 1
            first[lanes], floor_first[lanes] = holding, flooring
        if pure[key]:
            lanes, holding, flooring = lanes_before, holding_before, flooring_before
            fold[begin:last] = False
            first[lanes], floor_first[lanes] = holding, flooring
        else:
            changed[count] = key
            count += 1
            starts[count] = lanes
        begin = last
    return count
