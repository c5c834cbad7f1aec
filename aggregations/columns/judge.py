"""Verdicts for a whole batch: the rule of `envelope.Histories`, mostly in numpy.

If a batch is in the order of (key, position, lane), each message can be judged by the histories from before
the batch and by the messages accepted earlier in the batch (see `Histories.judge`). So a message above everything
that its key's state holds in its group of lanes is new, unless it is a copy of its neighbour. Only the other messages
need a lookup in a history. Keys that arrays cannot fully describe are left to the pure code: keys with holes or
late folds, with exotic messages, or with one position in two lanes of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.order import distinct_lanes, fold_order, numbered, positions_of
from aggregations.columns.signature import Lane
from envelope import Histories, History, Position, Verdict
from envelope.dedup.histories import Group
from envelope.dedup.lanes import healed_lane, is_healed
from envelope.dedup.room import KNOWN_LANES

VERDICTS: Final = tuple(Verdict)
"""The verdicts; `Judged.verdicts` contains their indices."""

_NUMBER: Final = {verdict: np.uint8(number) for number, verdict in enumerate(VERDICTS)}
_NOWHERE: Final = -3
"""Below the first component of every position."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts of a batch at one stage.

    Attributes:
        order: Rows in the order in which they are folded, key by key.
        verdicts: Index of each row's verdict in `VERDICTS`.
        fold: Whether each row is folded.
        pure: Rows whose key the pure code must judge as a whole; the other attributes are meaningless for them.
    """

    order: Ints
    verdicts: npt.NDArray[np.uint8]
    fold: Mask
    pure: Mask


def judge(
    keys: Ints,
    lanes: Ints,
    positions: Sequence[Ints],
    places: Sequence[Lane],
    histories: Sequence[Histories],
    exotic: Mask,
) -> Judged:
    """Judge every message of a batch, in order of arrival.

    Args:
        keys: Number of each message's key, from 0.
        lanes: Number of its lane.
        positions: Components of its position; `schema.MISSING` where it is shorter.
        places: Lanes and their groups, by number.
        histories: Histories of the state of each key, by number.
        exotic: Messages whose standing these arrays cannot express, or that need the pure code for another reason.
    """
    lanes, places = distinct_lanes(lanes, places)
    order = fold_order(keys, positions, lanes, places)
    batch = _Sorted(keys[order], lanes[order], [component[order] for component in positions], places, histories)
    same, repeats = batch.repeats()
    held = _held(batch)
    verdicts = np.full(len(order), _NUMBER[Verdict.ACCEPTED], np.uint8)
    fold = ~repeats
    _look_up(batch, held, verdicts, fold, exotic[order])
    _repeat(repeats, verdicts, fold)
    _new_lanes(batch, held, verdicts, fold)
    late = [healed_lane(group) for group in {place.group for place in places}]
    pure_keys = np.fromiter((bool(one.holes) or _holds_one(one, late) for one in histories), np.bool_, len(histories))
    pure_keys[keys[exotic]] = True
    pure_keys[held.loose] = True
    pure_keys[_crowded(batch, held)] = True
    pure_keys[_across_lanes(batch, same, repeats)] = True
    verdicts_by_row, fold_by_row = np.empty_like(verdicts), np.empty_like(fold)
    verdicts_by_row[order], fold_by_row[order] = verdicts, fold
    return Judged(order, verdicts_by_row, fold_by_row, pure_keys[keys])


def _holds_one(histories: Histories, late: list[str]) -> bool:
    """Whether a state may hold late folds of the batch's groups. May test for any group instead, if that is cheaper."""
    lanes = histories.lanes
    if len(lanes) < 2:
        return False
    return any(map(lanes.__contains__, late)) if len(late) < len(lanes) else any(map(is_healed, lanes))


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A batch in the order in which it is folded."""

    keys: Ints
    lanes: Ints
    positions: list[Ints]
    places: Sequence[Lane]
    histories: Sequence[Histories]

    def repeats(self) -> tuple[Mask, Mask]:
        """Whether each row has the key and position of the row before it, and whether it also has its lane."""
        same = np.zeros(len(self.keys), np.bool_)
        same[1:] = self.keys[1:] == self.keys[:-1]
        for component in self.positions:
            same[1:] &= component[1:] == component[:-1]
        repeats = same.copy()
        repeats[1:] &= self.lanes[1:] == self.lanes[:-1]
        return same, repeats


@dataclass(frozen=True, slots=True)
class _Held:
    """What the states hold for the keys and lanes of the batch. A pair is a key and a lane.

    Attributes:
        pair_of: Pair of every row.
        keys: Key of every pair.
        own: History of each pair's lane.
        absent: Whether its key's state lacks that lane.
        groups: What its key's state holds in the lane's group, if other lanes may hold something.
        highest: Root offset of the highest position that the lane has or another lane of the group holds.
        floor: Root offset such that the lane's floor is below it and no lane of the group holds anything below it.
        loose: Keys with a lane that holds positions without an index.
    """

    pair_of: Ints
    keys: Ints
    own: list[History | None]
    absent: Mask
    groups: list[Group | None]
    highest: Ints
    floor: Ints
    loose: list[int]


def _held(batch: _Sorted) -> _Held:
    count = max(len(batch.places), 1)
    pairs, pair_of = numbered(batch.keys * count + batch.lanes, len(batch.histories) * count)
    keys = pairs // count
    places = [batch.places[lane] for lane in (pairs % count).tolist()]
    owns, groups, highest, floors, loose = [], [], [], [], []
    before = -1
    for key, (name, group_name, _) in zip(keys.tolist(), places, strict=True):
        if key != before:
            before, histories = key, batch.histories[key]
            lanes = histories.lanes
            others = histories.groups() if len(lanes) > 1 else None
        own = lanes.get(name)
        if own is None:
            group = histories.group(group_name) if lanes else None
            top = floor = _NOWHERE
        else:
            group = None if others is None else others.get(group_name)
            at, held = own.floor, own.held
            floor = _NOWHERE if at is None else at[0]
            top = held[-1][0] if held else floor
            if own.loose:
                loose.append(key)
        if group is not None:
            top, floor = max(top, group.highest[0]), min(floor, group.lowest[0])
        owns.append(own)
        groups.append(group)
        highest.append(top)
        floors.append(floor)
    absent = np.array([own is None for own in owns], np.bool_)
    return _Held(pair_of, keys, owns, absent, groups, np.array(highest, np.int64), np.array(floors, np.int64), loose)


def _crowded(batch: _Sorted, held: _Held) -> Ints:
    """Keys whose state may not have room for all their new lanes."""
    lanes = np.fromiter((len(one.lanes) for one in batch.histories), np.int64, len(batch.histories))
    if int(lanes.max(initial=0)) + len(batch.places) <= KNOWN_LANES:
        return np.zeros(0, np.int64)
    opened = np.bincount(held.keys[held.absent], minlength=len(lanes))
    return np.flatnonzero(lanes + opened > KNOWN_LANES)


def _offset(position: Position | None) -> int:
    return _NOWHERE if position is None else position[0]  # type: ignore[return-value]  # an offset


def _look_up(batch: _Sorted, held: _Held, verdicts: npt.NDArray[np.uint8], fold: Mask, exotic: Mask) -> None:
    """Judge the rows that are not above everything held, except repeats and exotic messages.

    The position of an exotic message may contain a number where a held position has an event id.
    """
    offsets = batch.positions[0]
    rows = np.flatnonzero(fold & ~exotic & (offsets <= held.highest[held.pair_of]))
    if not len(rows):
        return
    below = offsets[rows] < held.floor[held.pair_of[rows]]
    verdicts[rows[below]] = _NUMBER[Verdict.BELOW_FLOOR]
    fold[rows[below]] = False
    rows = rows[~below]
    positions = positions_of(batch.positions, rows)
    pairs = held.pair_of[rows].tolist()
    found = [_decide(held.own[pair], held.groups[pair], at) for pair, at in zip(pairs, positions, strict=True)]
    verdicts[rows] = [_NUMBER[verdict] for verdict in found]
    fold[rows] = [verdict in (Verdict.ACCEPTED, Verdict.LATE) for verdict in found]


def _decide(own: History | None, group: Group | None, position: Position) -> Verdict:
    """The rule of `Histories.judge` for one message that is neither exotic nor repeated, in a state without holes."""
    if own is not None and own.holds(position):
        return Verdict.DUPLICATE
    if group is not None and group.holds(position):
        return Verdict.DUPLICATE
    if own is None:
        return Verdict.ACCEPTED
    if own.reaches(position):
        return Verdict.BELOW_FLOOR
    return Verdict.LATE if own.highest is not None and position < own.highest else Verdict.ACCEPTED


def _repeat(repeats: Mask, verdicts: npt.NDArray[np.uint8], fold: Mask) -> None:
    """The repeat of a folded row is a duplicate in the batch; any other repeat gets the verdict of the repeated row."""
    if not repeats.any():
        return
    rows = np.arange(len(repeats))
    first = np.maximum.accumulate(np.where(repeats, 0, rows))[repeats]
    verdicts[repeats] = np.where(fold[first], _NUMBER[Verdict.DUPLICATE_IN_BATCH], verdicts[first])


def _new_lanes(batch: _Sorted, held: _Held, verdicts: npt.NDArray[np.uint8], fold: Mask) -> None:
    """Mark the first folded message of each lane that is new to a state with other lanes."""
    if not held.absent.any():
        return
    folded = np.flatnonzero(fold)
    first_of_key = _first(batch.keys[folded], folded, len(batch.histories))
    candidates = folded[held.absent[held.pair_of[folded]]]
    first = _first(held.pair_of[candidates], candidates, len(held.own))
    first = first[first >= 0]
    keys = batch.keys[first]
    has_lanes = np.fromiter((bool(one.lanes) for one in batch.histories), np.bool_, len(batch.histories))
    verdicts[first[has_lanes[keys] | (first_of_key[keys] < first)]] = _NUMBER[Verdict.NEW_LANE]


def _first(numbers: Ints, rows: Ints, size: int) -> Ints:
    """For each number, the first row with it; -1 if there is none."""
    found = np.full(size, -1, np.int64)
    found[numbers[::-1]] = rows[::-1]
    return found


def _across_lanes(batch: _Sorted, same: Mask, repeats: Mask) -> Ints:
    """Keys with the same position in several lanes of one group."""
    crossing = same & ~repeats
    if not crossing.any():
        return np.zeros(0, np.int64)
    names = [place.group for place in batch.places]
    numbers = {name: number for number, name in enumerate(set(names))}
    if len(numbers) == len(names):
        return np.zeros(0, np.int64)
    groups = np.array([numbers[name] for name in names], np.int64)
    runs = np.cumsum(~same) - 1
    crossed = np.zeros(int(runs[-1]) + 1, np.bool_)
    crossed[runs[crossing]] = True
    rows = np.flatnonzero(crossed[runs])
    # Sort by run and group; the order by lane within them stays.
    group = groups[batch.lanes]
    rows = rows[np.lexsort((group[rows], runs[rows]))]
    here, before = rows[1:], rows[:-1]
    twice = (runs[here] == runs[before]) & (group[here] == group[before])
    return np.unique(batch.keys[here[twice & (batch.lanes[here] != batch.lanes[before])]])
