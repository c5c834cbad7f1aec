"""Writes many states as records (`aggregations.columns.record_text`)."""

from typing import Final

import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.checksum import crc32c
from aggregations.columns.histories import LaneArrays
from aggregations.columns.json_writing import put, put_number, put_numbers, put_word
from aggregations.columns.lane_names import LaneTable
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
    WIDE,
    WORD_FIRST,
    WORDS,
    Bytes,
    Form,
    Values,
)
from persistence.compiled import compiled

_MANY: Final = 64  # as in `persistence.lanes`
_LANE: Final = 128  # more than the bytes of a lane's text without its group and numbers


def write_records(
    form: Form, table: LaneTable, lanes: LaneArrays, states: Ints, values: Values, texts: Bytes
) -> tuple[Bytes, Ints]:
    """Write records.

    Args:
        form: Their form.
        table: Names of the lanes.
        lanes: Histories, all of which have a lane.
        states: The states to write: numbers of histories and columns of `values`.
        values: Values in the states; texts as places in `texts`.
        texts: Texts of the values that have one.

    Returns:
        The records, one after the other, and where each begins and the last ends.
    """
    fixed = len(form.head) + len(form.pieces) + 20 * len(form.kinds) + 96
    longest = int(np.diff(table.text_first).max(initial=0)) + 21 * int(np.diff(table.at_first).max(initial=0))
    numbers = len(lanes.held) + len(lanes.floors)
    size = len(states) * fixed + len(lanes.lane) * (longest + _LANE) + 21 * numbers + len(texts)
    out, bounds = np.empty(size, np.uint8), np.zeros(len(states) + 1, np.int64)
    _write(form, table, lanes, states, values, texts, out, bounds)
    return out[: bounds[-1]], bounds


@compiled(allocates=False)
def _put_steps(out: Bytes, at: int, lanes: LaneArrays, lane: int) -> int:
    """Write root offsets as steps, without the opening bracket."""
    size, first, last = lanes.width[lane], lanes.first[lane], lanes.first[lane + 1]
    ones = 0
    for i in range(first + size, last, size):
        ones += lanes.held[i] - lanes.held[i - size] == 1
    ones += lanes.held[first] == 1
    runs = ones * 2 > (last - first) // size
    at = put_number(out, at, lanes.held[first])
    i = first + size
    while i < last:
        out[at] = COMMA
        step, times = lanes.held[i] - lanes.held[i - size], 1
        i += size
        if runs and step == 1:
            while i < last and lanes.held[i] - lanes.held[i - size] == 1:
                times += 1
                i += size
        at = put_number(out, at + 1, -times if times > 1 else step)
    out[at] = CLOSE
    return at + 1


@compiled(allocates=False)
def _put_lane(out: Bytes, at: int, lanes: LaneArrays, lane: int, table: LaneTable) -> int:
    out[at] = BEGIN
    at += 1
    name = lanes.lane[lane]
    if table.at_first[name] < table.at_first[name + 1]:
        at = put_word(out, at, AT)
        at = put_numbers(out, at, table.at, table.at_first[name], table.at_first[name + 1], 1)
        out[at] = COMMA
        at += 1
    size, first, last = lanes.width[lane], lanes.first[lane], lanes.first[lane + 1]
    if first < last:
        if (last - first) // size > _MANY:
            at = _put_steps(out, put_word(out, at, STEPS), lanes, lane)
        else:
            at = put_numbers(out, put_word(out, at, HELD), lanes.held, first, last, size)
        out[at] = COMMA
        at += 1
        if size > 1:
            at = put_word(out, at, INDEX)
            for component in range(1, size):
                same = True
                for i in range(first + component, last, size):
                    if lanes.held[i] != lanes.held[first + component]:
                        same = False
                        break
                if same:
                    at = put_number(out, at, lanes.held[first + component])
                else:
                    out[at] = OPEN
                    at = put_numbers(out, at + 1, lanes.held, first + component, last, size)
                out[at] = COMMA
                at += 1
            out[at - 1] = CLOSE
            out[at] = COMMA
            at += 1
    if lanes.floor_first[lane] < lanes.floor_first[lane + 1]:
        at = put_word(out, at, FLOOR)
        at = put_numbers(out, at, lanes.floors, lanes.floor_first[lane], lanes.floor_first[lane + 1], 1)
        out[at] = COMMA
        at += 1
    if lanes.used[lane]:
        at = put_number(out, put_word(out, at, USED), lanes.used[lane])
        out[at] = COMMA
        at += 1
    if lanes.wide[lane]:
        at = put_word(out, at, WIDE)
        out[at] = COMMA
        at += 1
    if out[at - 1] == COMMA:
        at -= 1
    out[at] = END
    return at + 1


@compiled(allocates=False)
def _write(
    form: Form,
    table: LaneTable,
    lanes: LaneArrays,
    states: Ints,
    values: Values,
    texts: Bytes,
    out: Bytes,
    bounds: Ints,
) -> None:
    """`write_records` into arrays that are large enough."""
    head, kinds, piece_first, pieces = form
    at = 0
    for place in range(len(states)):
        state = states[place]
        begin = at
        at = put(out, at, head, 0, len(head))
        for i in range(len(kinds)):
            at = put(out, at, pieces, piece_first[i], piece_first[i + 1])
            if kinds[i] == TEXT:
                at = put(out, at, texts, values.first[i, state], values.last[i, state])
            elif values.known[i, state]:
                at = put_number(out, at, values.whole[i, state])
            else:
                at = put_word(out, at, NULL)
        at = put(out, at, pieces, piece_first[len(kinds)], piece_first[len(kinds) + 1])
        at = put_word(out, at, LANES)
        for lane in range(lanes.starts[state], lanes.starts[state + 1]):
            group = table.group[lanes.lane[lane]]
            written = False
            for before in range(lanes.starts[state], lane):
                if table.group[lanes.lane[before]] == group:
                    written = True
                    break
            if written:
                continue
            at = put(out, at, table.texts, table.text_first[group], table.text_first[group + 1])
            out[at], out[at + 1] = COLON, OPEN
            at += 2
            for same in range(lane, lanes.starts[state + 1]):
                if table.group[lanes.lane[same]] == group:
                    at = _put_lane(out, at, lanes, same, table)
                    out[at] = COMMA
                    at += 1
            out[at - 1] = CLOSE
            out[at] = COMMA
            at += 1
        out[at - 1] = END
        if len(values.whole) > len(kinds) and values.known[len(kinds), state]:
            at = put_number(out, put_word(out, at, TIME), values.whole[len(kinds), state])
        checksum = crc32c(out, begin, at)
        at = put_word(out, at, TAIL)
        for digit in range(8):
            out[at + digit] = WORDS[WORD_FIRST[HEX] + ((checksum >> (28 - 4 * digit)) & 15)]
        out[at + 8], out[at + 9] = QUOTE, END
        at += 10
        bounds[place + 1] = at
