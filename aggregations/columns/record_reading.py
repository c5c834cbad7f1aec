"""Reads many state records (`aggregations.columns.record_text`) into arrays."""

from typing import Final

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints
from aggregations.columns.checksum import crc32c
from aggregations.columns.histories import LaneArrays
from aggregations.columns.json_reading import LONG, follows, integer, integers, value_end, word
from aggregations.columns.lane_names import LaneTable, hash_of
from aggregations.columns.record_text import (
    AT,
    BEGIN,
    CLOSE,
    COLON,
    COMMA,
    END,
    FLOOR,
    HELD,
    HEX,
    INDEX,
    LANES,
    NULL,
    OPEN,
    QUOTE,
    STEPS,
    TAIL,
    TEXT,
    TIME,
    USED,
    WHOLE,
    WORD_FIRST,
    WORDS,
    Bytes,
    Form,
    Values,
)
from persistence.compiled import compiled

READ, OTHER, UNKNOWN = 0, 1, 2
"""What became of a record: it was read, is not of the usual form, or names a lane that the table lacks."""

_FULL: Final = -2  # there is not enough room in the histories
_LONGEST_RUN: Final = 1 << 20
_NO_INDEX: Final = -1
_MEMBERS: Final = np.frombuffer(b"ahsifuw", np.uint8)  # the first letters of the members of a lane, in their order


def read_records(
    data: Bytes, bounds: Ints, form: Form, table: LaneTable, values: Values
) -> tuple[npt.NDArray[np.uint8], LaneArrays]:
    """Read records.

    Args:
        data: The records, one after the other.
        bounds: Where each begins in `data`, and where the last ends.
        form: Their form.
        table: The known lanes.
        values: Receives the values in the states, by record; texts as places in `data`.

    Returns:
        What became of each record, and the histories of all of them; a record that was not read has no lanes.
    """
    records = len(bounds) - 1
    found = np.full(records, OTHER, np.uint8)
    lanes, positions, longest, done = records + 64, len(data) // 16 + 64, 64, 0
    space = LaneArrays.space(records, lanes, positions, positions)
    while True:
        lists = (np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64))
        done = _read(data, bounds, form, table, values, space, lists, found, done)
        if done == records:
            return found, space.filled(records)
        if done < 0:  # one long list must not multiply the room of all records
            done, longest = ~done, 2 * longest
            continue
        lanes, positions = 2 * lanes, 2 * positions
        space = space.moved(LaneArrays.space(records, lanes, positions, positions))


@compiled(allocates=False)
def _offsets(steps: Ints, count: int, into: Ints) -> int:
    """Write the ascending numbers that are given as steps, and return how many these are; -1 if they are not valid."""
    if steps[0] < 0:
        return -1
    size, value = 0, 0
    for i in range(count):
        times = 1 if steps[i] >= 0 else -steps[i]
        if times > _LONGEST_RUN:
            return -1
        if size + times > len(into):
            return LONG
        for _ in range(times):
            value += 1 if steps[i] < 0 else steps[i]
            into[size] = value
            size += 1
    return size


@compiled(allocates=False)
def _state_end(data: Bytes, at: int, end: int, form: Form, values: Values, record: int) -> int:
    """Read the values of a state, and return where the lanes begin; -1 if the text is not of the form."""
    head, kinds, piece_first, pieces = form
    at = follows(data, at, end, head, 0, len(head))
    for i in range(len(kinds)):
        at = follows(data, at, end, pieces, piece_first[i], piece_first[i + 1])
        if at < 0:
            return -1
        null = word(data, at, end, NULL) if kinds[i] == WHOLE else -1
        if kinds[i] == TEXT:
            values.first[i, record] = at
            at = value_end(data, at, end)
            values.last[i, record] = at
        elif null >= 0:
            values.known[i, record] = 0
            at = null
        else:
            values.whole[i, record], at = integer(data, at, end)
            values.known[i, record] = 1
    at = follows(data, at, end, pieces, piece_first[len(kinds)], piece_first[len(kinds) + 1])
    return word(data, at, end, LANES)


@compiled(allocates=False)
def _is_sealed(data: Bytes, at: int, end: int, behind: int) -> bool:
    """Whether a record ends with its checksum: 11 bytes before it, 8 digits, and 2 bytes after them."""
    if end <= at or word(data, end, behind, TAIL) < 0 or data[end + 19] != QUOTE or data[end + 20] != END:
        return False
    checksum = crc32c(data, at, end)
    for digit in range(8):
        if data[end + 11 + digit] != WORDS[WORD_FIRST[HEX] + ((checksum >> (28 - 4 * digit)) & 15)]:
            return False
    return True


@compiled(allocates=False)
def _indices(data: Bytes, at: int, end: int, positions: int, held: Ints, to: int, steps: Ints) -> tuple[int, int]:
    """Read the columns of indices into positions from `to` on: the number of columns, and where the list ends."""
    begin, depth, columns = at, 0, 1
    while at < end and (depth > 0 or data[at] != CLOSE):
        depth += 1 if data[at] == OPEN else -1 if data[at] == CLOSE else 0
        columns += data[at] == COMMA and depth == 0
        at += 1
    if to + positions * (1 + columns) > len(held):
        return columns, _FULL
    at = begin
    for column in range(columns):
        count, step = positions, 0
        if at < end and data[at] == OPEN:
            step = 1
            count, at = integers(data, at + 1, end, steps)
        else:
            steps[0], at = integer(data, at, end)
        if at < 0:
            return columns, at
        if count != positions or at >= end or data[at] != (COMMA if column < columns - 1 else CLOSE):
            return columns, -1
        for i in range(positions):
            index = steps[i * step]
            if index <= _NO_INDEX:
                return columns, -1
            held[to + i * (1 + columns) + 1 + column] = index
        at += 1
    return columns, at


@compiled(allocates=False)
def _lane_end(
    data: Bytes, at: int, end: int, space: LaneArrays, lane: int, lists: tuple[Ints, Ints, Ints]
) -> tuple[int, int]:
    """Read a lane except its name; return the number of partitions in its name, and where the lane ends."""
    partition_of, numbers, steps = lists
    holding, flooring = space.first[lane], space.floor_first[lane]
    partitions, positions, columns, rank = 0, 0, 0, -1
    if lane == len(space.lane):
        return 0, _FULL
    space.used[lane], space.wide[lane] = 0, 0
    if at >= end or data[at] != BEGIN:
        return 0, -1
    at += 1
    while True:
        member = -1
        if at + 1 < end:
            for one in range(len(_MEMBERS)):
                if data[at + 1] == _MEMBERS[one]:
                    member = one
        at = word(data, at, end, AT + member) if member > rank else -1
        if at < 0:
            return 0, -1
        rank = member
        if member == AT - AT:
            partitions, at = integers(data, at, end, partition_of)
        elif member == HELD - AT:
            rank = STEPS - AT  # one or the other
            positions, at = integers(data, at, end, numbers)
        elif member == STEPS - AT:
            count, at = integers(data, at, end, steps)
            if at >= 0:
                positions = _offsets(steps, count, numbers)
                at = positions if positions < 0 else at
        elif member == INDEX - AT:
            columns, at = _indices(data, at, end, positions, space.held, holding, steps)
        elif member == FLOOR - AT:
            count, at = integers(data, at, end, steps)
            if flooring + count > len(space.floors):
                return 0, _FULL
            for i in range(count):
                space.floors[flooring + i] = steps[i]
            flooring += count
        elif member == USED - AT:
            space.used[lane], at = integer(data, at, end)
        else:
            space.wide[lane] = 1
        if at < 0:
            return 0, at
        if at >= end or data[at] not in (END, COMMA):
            return 0, -1
        at += 1
        if data[at - 1] == END:
            break
    width = 1 + columns
    if holding + positions * width > len(space.held):
        return 0, _FULL
    if columns and not positions:
        return 0, -1
    for i in range(positions):
        if numbers[i] < 0 or (i and numbers[i] < numbers[i - 1]):
            return 0, -1
        space.held[holding + i * width] = numbers[i]
    space.width[lane] = width
    space.first[lane + 1], space.floor_first[lane + 1] = holding + positions * width, flooring
    return partitions, at


@compiled(allocates=False)
def _lane_number(slots: Ints, groups: Ints, at_first: Ints, every_at: Ints, group: int, at: Ints, count: int) -> int:
    """The number of the lane of a group with the first `count` partitions of `at`; -1 if it is not known.

    Args:
        slots: As in `LaneTable`; so are `groups` (there `group`), `at_first` and `every_at` (there `at`).
        groups: See `slots`.
        at_first: See `slots`.
        every_at: See `slots`.
        group: Number of the group.
        at: Partitions.
        count: Number of partitions.
    """
    slot = hash_of(group, at, 0, count) & (len(slots) - 1)
    while slots[slot] >= 0:
        lane = slots[slot]
        first = at_first[lane]
        if groups[lane] == group and at_first[lane + 1] - first == count:
            same = True
            for i in range(count):
                if every_at[first + i] != at[i]:
                    same = False
                    break
            if same:
                return int(lane)
        slot = (slot + 1) & (len(slots) - 1)
    return -1


@compiled(allocates=False)
def _read(
    data: Bytes,
    bounds: Ints,
    form: Form,
    table: LaneTable,
    values: Values,
    space: LaneArrays,
    lists: tuple[Ints, Ints, Ints],
    found: npt.NDArray[np.uint8],
    begin: int,
) -> int:
    """Read the records from `begin` on, and return the number of the one for which there is not enough room.

    If it is a list that has too many numbers, the number is inverted.
    """
    groups, at_first, every_at, _, late, slots, text_first, texts = table
    timed = len(form.kinds) if len(values.whole) > len(form.kinds) else -1
    lane = space.starts[begin]
    for record in range(begin, len(bounds) - 1):
        first_lane = lane
        at, end = bounds[record], bounds[record + 1] - 21
        at = _state_end(data, at, end, form, values, record) if _is_sealed(data, at, end, bounds[record + 1]) else -1
        result = OTHER
        while at >= 0:  # groups
            group, past = -1, -1
            for one in range(len(text_first) - 1):
                past = follows(data, at, end, texts, text_first[one], text_first[one + 1])
                if past >= 0:
                    group = one
                    break
            if group < 0:
                result = UNKNOWN
                break
            at = past + 2
            if at > end or data[at - 2] != COLON or data[at - 1] != OPEN:
                break
            number = 0
            while at >= 0:  # lanes
                partitions, at = _lane_end(data, at, end, space, lane, lists)
                if at < 0:
                    break
                number = _lane_number(slots, groups, at_first, every_at, group, lists[0], partitions)
                if number < 0:
                    result, at = UNKNOWN, -1
                    break
                space.lane[lane] = number
                lane += 1
                if late[number] or at >= end or data[at] not in (COMMA, CLOSE):
                    at = -1
                    break
                at += 1
                if data[at - 1] == CLOSE:
                    break
            if at < 0 or at >= end:
                break
            if data[at] == END:
                # Any other member after this one would be holes or retired lanes.
                past = at + 1
                if timed >= 0:
                    values.known[timed, record] = 0
                    after = word(data, past, end, TIME)
                    if after >= 0:
                        values.whole[timed, record], past = integer(data, after, end)
                        values.known[timed, record] = 1
                if past == end:
                    result = READ
                break
            at = at + 1 if data[at] == COMMA else -1
        if at == _FULL:
            return record
        if at == LONG:
            return ~record
        found[record] = result
        if result != READ:
            lane = first_lane
        space.starts[record + 1] = lane
    return len(bounds) - 1
