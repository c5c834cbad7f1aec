"""`DistinctSession` over columns, in compiled code.

The keys of a state are in a hash table of their JSON text. The sessions of a key are a linked list, ascending; those that
are closed are removed when the key has another record, or at the latest when the state is written.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.checksum import crc32c
from aggregations.columns.id_states import MOST_MS, STREAM, number_or_null
from aggregations.columns.id_table import Entries, slot_of
from aggregations.columns.id_texts import QUOTED, Identities
from aggregations.columns.json_reading import follows, integer
from aggregations.columns.json_writing import put, put_number, put_word
from aggregations.columns.record_text import BEGIN, CLOSE, COLON, COMMA, END, NULL, OPEN, QUOTE, Bytes
from aggregations.columns.records import StoredStates
from aggregations.columns.rulings import BEYOND_HORIZON, DUPLICATE, LATE, UNIDENTIFIED, Rulings, begins_of
from envelope.filters.distinct import DistinctSession
from persistence.compiled import compiled

_SESSIONS: Final = np.frombuffer(b',"sessions":', np.uint8)
_SHORTEST: Final = len(b"[0,0],")
"""Bytes of a session in a state, at least."""
_LONGEST: Final = 48
"""Bytes of a session, or of a key beside its text, at most."""
_HEAD: Final = 64
"""Bytes of a state beside its keys, at most."""
_BACKSLASH: Final = ord("\\")
_NONE: Final = -1
TIME, KNOWN, CLOSED, KEYS, SIZE = range(5)


class _Rows(NamedTuple):
    """The rows.

    Attributes:
        begins: Where the rows of each state begin; the last entry is where the last ones end.
        scoped: Whether a row has a state.
        time: Times.
        first: Where the text of the key begins.
        last: Where it ends: at its beginning if there is no key.
    """

    begins: Ints
    scoped: Mask
    time: Ints
    first: Ints
    last: Ints


class _State(NamedTuple):
    """The state that is judged.

    Attributes:
        at: Stream time, whether there is one, the time before which sessions are closed, and the numbers of keys and of
            sessions so far.
        keys: The keys. One whose sessions were all closed is there again after its next record.
        head: First session of each key; `_NONE` if all were closed.
        start: Start of each session.
        end: End of each session.
        following: The next session of the same key; `_NONE` after the last one.
        slots: The hash table of keys.
    """

    at: Ints
    keys: Entries
    head: Ints
    start: Ints
    end: Ints
    following: Ints
    slots: Ints


def judge_sessions(
    rule: DistinctSession, keys: pl.Series, times: Ints, scoped: Mask, codes: Ints, stored: StoredStates
) -> Rulings:
    """Judge rows as `DistinctSession.judge` does.

    Args:
        rule: The filter.
        keys: The records' keys.
        times: Times in milliseconds, up to `id_states.MOST_MS`.
        scoped: Which rows have a state.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
    """
    found = Rulings.of(len(codes), stored)
    text, first, last = Identities.of(stored.data, [keys])
    found.left[codes[last < first]] = True
    keyed = last > first
    first, last = np.where(keyed, first + QUOTED.start, first), np.where(keyed, last + QUOTED.stop, first)
    begins = begins_of(codes)
    own = codes[begins]
    rows = _Rows(np.append(begins, len(codes)), scoped, times, first, last)
    ends = found.values.first[0], found.values.last[0]
    bounds = stored.values.first[0], stored.values.last[0]
    sizes = np.where(stored.exists[own], bounds[1][own] - bounds[0][own], 0)
    rooms = sizes // _SHORTEST + np.diff(rows.begins) + 1
    room = int(rooms.max())
    numbers = np.empty((7, room), np.int64)
    state = _State(
        np.empty(5, np.int64),
        Entries(numbers[0], numbers[1], numbers[2]),
        numbers[3],
        numbers[4],
        numbers[5],
        numbers[6],
        np.empty(1 << (2 * room).bit_length(), np.int64),
    )
    out = np.empty(len(text) + int(sizes.sum()) + 2 * _LONGEST * int(rooms.sum()) + _HEAD * len(own), np.uint8)
    size = _judge(
        rule.gap_ms, rule.grace_ms, text, own, rows, stored.exists, bounds, state, found.left, found.verdicts, out, ends
    )
    found.texts = out[:size].tobytes()
    found.forward[:] = (found.verdicts != DUPLICATE) & (found.verdicts != BEYOND_HORIZON)
    return found


@compiled(allocates=False)
def _add_key(data: Bytes, state: _State, mask: int, first: int, last: int, code: int) -> int:
    """Add a key without sessions; return its number, or `_NONE` if that is impossible or it has sessions."""
    slot = slot_of(data, state.keys, state.slots, mask, code, first, last)
    if slot < 0 or (state.slots[slot] >= 0 and state.head[state.slots[slot]] != _NONE):
        return _NONE
    key: int = state.at[KEYS]
    state.at[KEYS] += 1
    state.keys.first[key], state.keys.last[key], state.keys.code[key] = first, last, code
    state.head[key], state.slots[slot] = _NONE, key
    return key


@compiled(allocates=False)
def _add_session(state: _State, key: int, before: int, time: int, end: int) -> int:
    """Add a session after another one of its key, or as the first one; return its number."""
    one: int = state.at[SIZE]
    state.at[SIZE] += 1
    state.start[one], state.end[one] = time, end
    if before == _NONE:
        state.following[one], state.head[key] = state.head[key], one
    else:
        state.following[one], state.following[before] = state.following[before], one
    return one


@compiled(allocates=False)
def _read_sessions(data: Bytes, at: int, end: int, state: _State, key: int) -> int:
    """Read the sessions of a key; return where their list ends, or -1 if it is not of the usual form."""
    before, latest = _NONE, -MOST_MS
    while 0 <= at < end and data[at] == OPEN:
        start, at = integer(data, at + 1, end)
        if not 0 <= at < end or data[at] != COMMA or start < latest:
            return -1
        stop, at = integer(data, at + 1, end)
        if not 0 <= at < end - 1 or data[at] != CLOSE or stop < start or stop > MOST_MS:
            return -1
        before, latest = _add_session(state, key, before, start, stop), stop + 1
        at += 2
        if data[at - 1] == CLOSE:
            return at
        if data[at - 1] != COMMA:
            return -1
    return -1


@compiled(allocates=False)
def _read(data: Bytes, at: int, end: int, state: _State, mask: int) -> bool:
    """Read a state; whether it is of the usual form, as `DistinctSession.dump` makes it."""
    state.at[TIME], known, at = number_or_null(data, at, end, STREAM)
    state.at[KNOWN] = known
    at = follows(data, at, end, _SESSIONS, 0, len(_SESSIONS))
    if not 0 <= at < end - 2 or data[at] != BEGIN or abs(state.at[TIME]) > MOST_MS:
        return False
    at += 1
    if data[at] == END:
        return at == end - 2 and data[at + 1] == END
    while 0 <= at < end and data[at] == QUOTE:
        first = at
        at += 1
        while at < end and data[at] != QUOTE and data[at] != _BACKSLASH:
            at += 1
        if at >= end - 3 or data[at] != QUOTE or data[at + 1] != COLON or data[at + 2] != OPEN:
            return False
        key = _add_key(data, state, mask, first, at + 1, crc32c(data, first, at + 1))
        at = -1 if key == _NONE else _read_sessions(data, at + 3, end, state, key)
        if not 0 <= at < end - 1:
            return False
        at += 1
        if data[at - 1] == END:
            return at == end - 1 and data[at] == END
        if data[at - 1] != COMMA:
            return False
    return False


@compiled(allocates=False)
def _ruling(
    gap: int, grace: int, data: Bytes, rows: _Rows, row: int, state: _State, mask: int, verdicts: npt.NDArray[np.uint8]
) -> bool:
    """Judge a row; whether that was possible."""
    if not rows.scoped[row]:
        verdicts[row] = UNIDENTIFIED
        return True
    at, time = state.at, rows.time[row]
    is_late = at[KNOWN] == 1 and time < at[TIME]
    at[TIME], at[KNOWN] = at[TIME] if is_late else time, 1
    closed = at[TIME] - gap - grace
    at[CLOSED] = closed
    first, last = rows.first[row], rows.last[row]
    if first == last:
        verdicts[row] = UNIDENTIFIED
        return True
    code = crc32c(data, first, last)
    slot = slot_of(data, state.keys, state.slots, mask, code, first, last)
    if slot < 0:
        return False
    key, before = state.slots[slot], _NONE
    if key >= 0:
        one = state.head[key]
        while one != _NONE and state.end[one] < closed:
            one = state.following[one]
        state.head[key] = one
        while one != _NONE and state.end[one] + gap < time:
            before, one = one, state.following[one]
        if one != _NONE and state.start[one] - gap <= time:
            verdicts[row] = DUPLICATE
            state.start[one] = min(state.start[one], time)
            while True:
                state.end[one] = max(state.end[one], time)
                other = state.following[one]
                if other == _NONE or state.start[other] - gap > time:
                    return True
                state.end[one], state.following[one] = state.end[other], state.following[other]
    if time < closed:
        verdicts[row] = BEYOND_HORIZON
        return True
    if key < 0 or state.head[key] == _NONE:
        key = _add_key(data, state, mask, first, last, code)
    _add_session(state, key, before, time, time)
    if is_late:
        verdicts[row] = LATE
    return True


@compiled(allocates=False)
def _write(out: Bytes, at: int, data: Bytes, state: _State) -> int:
    """Write the text of a state, and return where it ends."""
    at = put(out, at, STREAM, 0, len(STREAM))
    at = put_number(out, at, state.at[TIME]) if state.at[KNOWN] else put_word(out, at, NULL)
    at = put(out, at, _SESSIONS, 0, len(_SESSIONS))
    out[at] = BEGIN
    at += 1
    begin = at
    for key in range(state.at[KEYS]):
        one = state.head[key]
        while one != _NONE and state.end[one] < state.at[CLOSED]:
            one = state.following[one]
        if one == _NONE:
            continue
        at = put(out, at, data, state.keys.first[key], state.keys.last[key])
        out[at], out[at + 1] = COLON, OPEN
        at += 2
        while one != _NONE:
            out[at] = OPEN
            at = put_number(out, at + 1, state.start[one])
            out[at] = COMMA
            at = put_number(out, at + 1, state.end[one])
            out[at], out[at + 1] = CLOSE, COMMA
            at += 2
            one = state.following[one]
        out[at - 1], out[at] = CLOSE, COMMA
        at += 1
    at -= 1 if at > begin else 0  # the last comma
    out[at], out[at + 1] = END, END
    return at + 2


@compiled(allocates=False)
def _judge(
    gap: int,
    grace: int,
    data: Bytes,
    own: Ints,
    rows: _Rows,
    exists: Mask,
    bounds: tuple[Ints, Ints],
    state: _State,
    left: Mask,
    verdicts: npt.NDArray[np.uint8],
    out: Bytes,
    ends: tuple[Ints, Ints],
) -> int:
    """Judge rows and write the states after them; return where the text ends."""
    end = 0
    for i in range(len(own)):
        mine = own[i]
        if left[mine]:
            continue
        begin, last = rows.begins[i], rows.begins[i + 1]
        size = bounds[1][mine] - bounds[0][mine] if exists[mine] else 0
        mask = 1
        while mask < 2 * (size // _SHORTEST + last - begin + 1):
            mask *= 2
        state.slots[:mask] = _NONE
        mask -= 1
        state.at[:] = 0
        state.at[CLOSED] = -2 * MOST_MS
        fine = not exists[mine] or _read(data, bounds[0][mine], bounds[1][mine], state, mask)
        for row in range(begin, last):
            fine = fine and _ruling(gap, grace, data, rows, row, state, mask, verdicts)
        if not fine:
            left[mine] = True
            continue
        ends[0][mine] = end
        end = _write(out, end, data, state)
        ends[1][mine] = end
    return end
