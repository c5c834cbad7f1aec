"""`EventIdFilter`, `IntervalFilter` and `DistinctTumbling` over columns, in compiled code.

An id of the last one is a key with the start of a window, and is forgotten with the window. The remembered ids of a
state are in a hash table of their JSON text, and in two parts in the order in which they are forgotten: a list of those
whose times ascended when they were added, and a heap of the others.
"""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.checksum import crc32c
from aggregations.columns.id_states import EVENT_IDS, INTERVAL, SPREAD, WINDOWS, IdStates, put_head, put_id
from aggregations.columns.id_table import Entries, is_same, slot_of
from aggregations.columns.id_texts import Identities
from aggregations.columns.record_text import CLOSE, END, Bytes
from aggregations.columns.records import StoredStates
from aggregations.columns.rulings import (
    BEYOND_HORIZON,
    DUPLICATE,
    LATE,
    UNIDENTIFIED,
    Rulings,
    begins_of,
)
from envelope.filters.arrival import MILLISECOND
from envelope.filters.distinct import DistinctTumbling
from envelope.filters.event_ids import BEYOND, EventIdFilter
from envelope.filters.interval import IntervalFilter
from persistence.compiled import compiled

_ALL: Final = 1 << 62
"""A limit that is never reached."""
_MORE: Final = 48
"""Bytes of an id in a state beside its text, at most."""
_HEAD: Final = 128
"""Bytes of a state beside its ids, at most."""
HEAD, TAIL, SIZE = range(3)

Ids: TypeAlias = EventIdFilter | IntervalFilter | DistinctTumbling
"""Filters that remember ids."""


class _Rule(NamedTuple):
    """A filter.

    Attributes:
        kind: Kind of its states.
        span: Its interval, horizon or grace, in milliseconds.
        most: Ids that a state remembers.
    """

    kind: int
    span: int
    most: int


class _Rows(NamedTuple):
    """The rows.

    Attributes:
        begins: Where the rows of each state begin; the last entry is where the last ones end.
        scoped: Whether a row has a state.
        time: Times.
        until: Times from which the ids are remembered: the same, or the ends of windows.
        offset: Offsets.
        first: Where the text of the id begins.
        last: Where it ends.
        place_first: Where the text of the partition begins; only for states of kind `SPREAD`.
        place_last: Where it ends.
    """

    begins: Ints
    scoped: Mask
    time: Ints
    until: Ints
    offset: Ints
    first: Ints
    last: Ints
    place_first: Ints
    place_last: Ints


class _Order(NamedTuple):
    """The ids of a state in the order in which they are forgotten: each is in one of two arrays.

    Attributes:
        run: Ids whose time was not below the last one's.
        heap: The others, as a heap.
        at: Where the run begins and ends, and how many are in the heap.
    """

    run: Ints
    heap: Ints
    at: Ints


def judge_ids(
    rule: Ids,
    identity: list[pl.Series],
    times: Ints,
    offsets: Ints,
    scoped: Mask,
    codes: Ints,
    stored: StoredStates,
    places: pl.Series,
    place: Ints,
) -> Rulings:
    """Judge rows as `judge` of the filters does.

    Args:
        rule: The filter. Its states are those of partitions or keys.
        identity: The columns that are the identity, each of a type in `id_texts.KINDS`.
        times: Times in milliseconds, up to `id_states.MOST_MS`.
        offsets: Offsets.
        scoped: Which rows have a state.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
        places: Topics with partitions, as text.
        place: Number of each row's place; of no rows unless the states have places.
    """
    found = Rulings.of(len(codes), stored)
    limits, until = _limits(rule), times
    if isinstance(rule, DistinctTumbling):
        starts = times - times % rule.size_ms
        identity, until = [*identity, pl.Series(starts)], starts + rule.size_ms
    before, places_first, places_last = Identities.of(stored.data, [places])
    place_first, place_last = places_first[place], places_last[place]
    text, first, last = Identities.of(before, identity)
    begins = begins_of(codes)
    own = codes[begins]
    found.left[codes[last < first]] = True
    rows = _Rows(np.append(begins, len(codes)), scoped, times, until, offsets, first, last, place_first, place_last)
    states = IdStates.read(stored, own, np.diff(rows.begins), text, found.left, limits.kind)
    room = int(np.diff(states.begins).max())
    order = _Order(np.empty(room, np.int64), np.empty(room, np.int64), np.empty(3, np.int64))
    slots = np.empty(1 << (2 * room).bit_length(), np.int64)
    out = np.empty(len(text) + _MORE * int(states.begins[-1]) + _HEAD * len(own), np.uint8)
    ends = found.values.first[0], found.values.last[0]
    size = _judge(limits, text, own, rows, states, order, slots, found.left, found.verdicts, out, ends)
    found.texts = out[:size].tobytes()
    found.forward[:] = found.verdicts != DUPLICATE
    beyond = found.verdicts == BEYOND_HORIZON
    if isinstance(rule, DistinctTumbling):
        found.forward[beyond] = False
    elif isinstance(rule, EventIdFilter):
        ruling = BEYOND[rule.beyond]
        found.forward[beyond] = ruling.forward
        if ruling.reason is not None:
            for row in np.flatnonzero(beyond).tolist():
                found.reject(row, ruling.reason, ruling.detail)
    return found


def _limits(rule: Ids) -> _Rule:
    if isinstance(rule, EventIdFilter):
        return _Rule(EVENT_IDS, rule.horizon // MILLISECOND, rule.limit)
    if isinstance(rule, IntervalFilter):
        return _Rule(SPREAD if rule.partitions else INTERVAL, rule.interval_ms, _ALL)
    return _Rule(WINDOWS, rule.grace_ms - 1, _ALL)  # a window whose grace is over is not remembered


@compiled(allocates=False)
def _older(time: Ints, one: int, other: int) -> bool:
    return time[one] < time[other] or (time[one] == time[other] and one < other)


@compiled(allocates=False)
def _add(order: _Order, time: Ints, number: int) -> None:
    """Add an id; its number is higher than those of the others."""
    run, heap, at = order
    if at[HEAD] == at[TAIL] or time[number] >= time[run[at[TAIL] - 1]]:
        run[at[TAIL]] = number
        at[TAIL] += 1
        return
    place = at[SIZE]
    at[SIZE] += 1
    while place > 0 and _older(time, number, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = number


@compiled(allocates=False)
def _oldest(order: _Order, time: Ints) -> int:
    """The id that is forgotten next; -1 if there is none."""
    run, heap, at = order
    if at[HEAD] == at[TAIL]:
        return int(heap[0]) if at[SIZE] else -1
    if at[SIZE] == 0 or _older(time, run[at[HEAD]], heap[0]):
        return int(run[at[HEAD]])
    return int(heap[0])


@compiled(allocates=False)
def _remove(order: _Order, time: Ints, oldest: int) -> None:
    """Remove what `_oldest` returned."""
    run, heap, at = order
    if at[HEAD] < at[TAIL] and run[at[HEAD]] == oldest:
        at[HEAD] += 1
        return
    at[SIZE] -= 1
    size = at[SIZE]
    last, place, below = heap[size], 0, 1
    while below < size:
        if below + 1 < size and _older(time, heap[below + 1], heap[below]):
            below += 1
        if not _older(time, heap[below], last):
            break
        heap[place] = heap[below]
        place, below = below, 2 * below + 1
    heap[place] = last


@compiled(allocates=False)
def _forget(states: IdStates, i: int, order: _Order, before_ms: int, most: int) -> None:
    """`TimeIndex.purge`; the floor becomes the highest time that is removed."""
    at, oldest = order.at, _oldest(order, states.time)
    while oldest >= 0 and (states.time[oldest] < before_ms or at[TAIL] - at[HEAD] + at[SIZE] > most):
        states.alive[oldest] = False
        states.floor[i], states.floored[i] = states.time[oldest], True
        _remove(order, states.time, oldest)
        oldest = _oldest(order, states.time)


@compiled(allocates=False)
def _begin(data: Bytes, states: IdStates, i: int, order: _Order, slots: Ints, mask: int) -> bool:
    """Fill the hash table with the stored ids; whether that was possible."""
    slots[: mask + 1] = -1
    base, filled, entries = states.begins[i], states.filled[i], Entries(states.first, states.last, states.code)
    order.at[HEAD], order.at[TAIL], order.at[SIZE] = 0, filled - base, 0
    for number in range(base, filled):
        order.run[number - base] = number
        code = crc32c(data, states.first[number], states.last[number])
        slot = slot_of(data, entries, slots, mask, code, states.first[number], states.last[number])
        if slot < 0 or slots[slot] >= 0:
            return False
        states.code[number], slots[slot] = code, number
    return True


@compiled(allocates=False)
def _judge_state(
    rule: _Rule,
    data: Bytes,
    i: int,
    rows: _Rows,
    states: IdStates,
    order: _Order,
    slots: Ints,
    mask: int,
    verdicts: npt.NDArray[np.uint8],
) -> bool:
    """Judge the rows of a state; whether that was possible."""
    number, entries = states.filled[i], Entries(states.first, states.last, states.code)
    for row in range(rows.begins[i], rows.begins[i + 1]):
        if not rows.scoped[row]:
            verdicts[row] = UNIDENTIFIED
            continue
        time, before, is_first = rows.time[row], states.stream[i], not states.streamed[i]
        now = time if is_first else max(before, time)
        states.stream[i], states.streamed[i] = now, True
        first, last = rows.first[row], rows.last[row]
        if rule.kind != EVENT_IDS:
            _forget(states, i, order, now - rule.span, rule.most)
        if first == last:
            verdicts[row] = UNIDENTIFIED
            continue
        code = crc32c(data, first, last)
        slot = slot_of(data, entries, slots, mask, code, first, last)
        if slot < 0:
            return False
        known = slots[slot]
        if known >= 0 and states.alive[known]:
            verdicts[row] = DUPLICATE
            if rule.kind in (INTERVAL, SPREAD):
                again = states.fact[known] == rows.offset[row]
                if again and rule.kind == SPREAD:
                    begin, other, size = states.place_first[known], rows.place_first[row], rows.place_last[row]
                    size -= other
                    again = states.place_last[known] - begin == size and is_same(data, begin, other, size)
                if not again and abs(time - states.time[known]) > rule.span:
                    verdicts[row] = BEYOND_HORIZON
            continue
        until = rows.until[row]
        if until < now - rule.span if rule.kind != EVENT_IDS else states.floored[i] and time <= states.floor[i]:
            verdicts[row] = BEYOND_HORIZON
            continue
        states.time[number], states.fact[number], states.code[number] = until, rows.offset[row], code
        states.first[number], states.last[number] = first, last
        if rule.kind == SPREAD:
            states.place_first[number], states.place_last[number] = rows.place_first[row], rows.place_last[row]
        slots[slot] = number
        _add(order, states.time, number)
        number += 1
        if rule.kind == EVENT_IDS:
            _forget(states, i, order, now - rule.span, rule.most)
        if not is_first and time < before:
            verdicts[row] = LATE
    return True


@compiled(allocates=False)
def _judge(
    rule: _Rule,
    data: Bytes,
    own: Ints,
    rows: _Rows,
    states: IdStates,
    order: _Order,
    slots: Ints,
    left: Mask,
    verdicts: npt.NDArray[np.uint8],
    out: Bytes,
    ends: tuple[Ints, Ints],
) -> int:
    """Judge rows and write the states after them; return where the text ends."""
    end = 0
    for i in range(len(own)):
        state, room = own[i], states.begins[i + 1] - states.begins[i]
        if left[state]:
            continue
        size = 1
        while size < 2 * room:
            size *= 2
        if not _begin(data, states, i, order, slots, size - 1) or not _judge_state(
            rule, data, i, rows, states, order, slots, size - 1, verdicts
        ):
            left[state] = True
            continue
        ends[0][state] = end
        end = put_head(out, end, states, i, rule.kind)
        oldest = _oldest(order, states.time)
        empty = oldest < 0
        while oldest >= 0:
            end = put_id(out, end, states, oldest, data, rule.kind)
            _remove(order, states.time, oldest)
            oldest = _oldest(order, states.time)
        end -= 0 if empty else 1  # the last comma
        out[end], out[end + 1] = CLOSE, END
        end += 2
        ends[1][state] = end
    return end
