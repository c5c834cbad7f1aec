"""Reads and writes the states of filters that remember ids, in compiled code.

The texts are those of `dump` of `EventIdFilter`, `IntervalFilter` and `DistinctTumbling`, whose ids are keys with starts
of windows. Ids stay text.
"""

from typing import Final, NamedTuple

import numpy as np

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.json_reading import follows, integer, value_end, word
from aggregations.columns.json_writing import put, put_number, put_word
from aggregations.columns.record_text import CLOSE, COMMA, END, NULL, OPEN, Bytes
from aggregations.columns.records import StoredStates
from persistence.compiled import compiled

EVENT_IDS, INTERVAL, SPREAD, WINDOWS = range(4)
"""Kinds of states, by their filter; `SPREAD` is that of an interval filter over all partitions."""
MOST_MS: Final = 1 << 61
"""Times beyond it are left to the pure code: their differences may have more than 64 bits."""
_SHORTEST: Final = len(b'[0,""],')
"""Bytes of an id in a state, at least."""
STREAM: Final = np.frombuffer(b'{"stream_time_ms":', np.uint8)
_FLOOR: Final = np.frombuffer(b',"floor_ms":', np.uint8)
_IDS: Final = np.frombuffer(b',"ids":[', np.uint8)
_PASSED: Final = np.frombuffer(b',"passed":[', np.uint8)
_OPENED: Final = np.frombuffer(b',"opened":[', np.uint8)


class IdStates(NamedTuple):
    """States, and room for the ids that are added.

    Attributes:
        stream: Stream time of each state.
        streamed: Whether it has one.
        floor: Its floor.
        floored: Whether it has one.
        begins: Where the ids of each state begin in the following arrays, those first that are remembered longest; the
            last entry is where the room of the last state ends.
        filled: Where those ids end that were stored.
        time: Times of ids; ends of windows.
        fact: Offsets of ids, in states of an interval filter.
        place_first: Where the texts of their partitions begin, in states of kind `SPREAD`.
        place_last: Where they end.
        first: Where their text begins.
        last: Where it ends.
        code: CRC32C of the text.
        alive: Whether an id is remembered.
    """

    stream: Ints
    streamed: Mask
    floor: Ints
    floored: Mask
    begins: Ints
    filled: Ints
    time: Ints
    fact: Ints
    place_first: Ints
    place_last: Ints
    first: Ints
    last: Ints
    code: Ints
    alive: Mask

    @classmethod
    def read(cls, stored: StoredStates, own: Ints, rows: Ints, text: Bytes, left: Mask, kind: int) -> "IdStates":
        """Read states.

        Args:
            stored: The states.
            own: Which of them.
            rows: Ids that may be added to each of these.
            text: Begins with `stored.data`.
            left: Is set for those that are not of the usual form.
            kind: Kind of the states.
        """
        first, last = stored.values.first[0], stored.values.last[0]
        room = int((last[own] - first[own]).sum()) // _SHORTEST + int(rows.sum())
        (stream, floor, begins, filled), masks = (
            np.zeros((4, len(own) + 1), np.int64),
            np.zeros((2, len(own)), np.bool_),
        )
        time, fact, place, place_end, begin, end, code = np.empty((7, room), np.int64)
        ids = (time, fact, place, place_end, begin, end, code, np.ones(room, np.bool_))
        found = cls(stream, masks[0], floor, masks[1], begins, filled, *ids)
        _read(text, first, last, stored.exists, own, rows, found, left, kind)
        return found


@compiled(allocates=False)
def number_or_null(data: Bytes, at: int, end: int, text: Bytes) -> tuple[int, bool, int]:
    """A number or null behind a text: the number, whether there is one, and where it ends."""
    at = follows(data, at, end, text, 0, len(text))
    null = word(data, at, end, NULL)
    if null >= 0:
        return 0, False, null
    if at < 0:
        return 0, False, -1
    value, at = integer(data, at, end)
    return value, True, at


@compiled(allocates=False)
def _read(
    data: Bytes,
    first: Ints,
    last: Ints,
    exists: Mask,
    own: Ints,
    rows: Ints,
    into: IdStates,
    left: Mask,
    kind: int,
) -> None:
    number = 0
    names = _OPENED if kind == WINDOWS else _IDS if kind == EVENT_IDS else _PASSED
    for i in range(len(own)):
        state = own[i]
        into.begins[i] = into.filled[i] = number
        if exists[state] and not left[state]:
            end = last[state]
            into.stream[i], into.streamed[i], at = number_or_null(data, first[state], end, STREAM)
            if kind == EVENT_IDS:
                into.floor[i], into.floored[i], at = number_or_null(data, at, end, _FLOOR)
            at = follows(data, at, end, names, 0, len(names))
            latest = -MOST_MS
            fine = at >= 0 and abs(into.stream[i]) <= MOST_MS
            if fine and at < end and data[at] == CLOSE:
                at += 1
            else:
                while fine:
                    fine = at < end and data[at] == OPEN
                    if not fine:
                        break
                    into.time[number], at = integer(data, at + 1, end)
                    if kind in (INTERVAL, SPREAD) and at >= 0:
                        if at >= end or data[at] != COMMA:
                            at = -1
                        else:
                            into.fact[number], at = integer(data, at + 1, end)
                    if kind == SPREAD and at >= 0:
                        if at >= end or data[at] != COMMA:
                            at = -1
                        else:
                            into.place_first[number] = at + 1
                            at = value_end(data, at + 1, end)
                            into.place_last[number] = at
                    fine = 0 <= at < end and data[at] == COMMA and latest <= into.time[number] <= MOST_MS
                    if not fine:
                        break
                    latest = into.time[number]
                    into.first[number] = at + 1
                    at = value_end(data, at + 1, end)
                    into.last[number] = at
                    fine = 0 <= at < end - 1 and data[at] == CLOSE
                    if not fine:
                        break
                    number += 1
                    at += 2
                    if data[at - 1] == CLOSE:
                        break
                    fine = data[at - 1] == COMMA
            left[state] = not fine or at != end - 1 or data[at] != END
            into.filled[i] = number
        number += rows[i]
    into.begins[len(own)] = number


@compiled(allocates=False)
def put_head(out: Bytes, at: int, states: IdStates, i: int, kind: int) -> int:
    """Write the text of a state up to its ids."""
    at = put(out, at, STREAM, 0, len(STREAM))
    at = put_number(out, at, states.stream[i]) if states.streamed[i] else put_word(out, at, NULL)
    if kind in (INTERVAL, SPREAD):
        return put(out, at, _PASSED, 0, len(_PASSED))
    if kind == WINDOWS:
        return put(out, at, _OPENED, 0, len(_OPENED))
    at = put(out, at, _FLOOR, 0, len(_FLOOR))
    at = put_number(out, at, states.floor[i]) if states.floored[i] else put_word(out, at, NULL)
    return put(out, at, _IDS, 0, len(_IDS))


@compiled(allocates=False)
def put_id(out: Bytes, at: int, states: IdStates, number: int, data: Bytes, kind: int) -> int:
    """Write an id and a comma."""
    out[at] = OPEN
    at = put_number(out, at + 1, states.time[number])
    out[at] = COMMA
    at += 1
    if kind in (INTERVAL, SPREAD):
        at = put_number(out, at, states.fact[number])
        out[at] = COMMA
        at += 1
    if kind == SPREAD:
        at = put(out, at, data, states.place_first[number], states.place_last[number])
        out[at] = COMMA
        at += 1
    at = put(out, at, data, states.first[number], states.last[number])
    out[at], out[at + 1] = CLOSE, COMMA
    return at + 2
