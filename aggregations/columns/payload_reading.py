"""Reads protobuf payloads into arrays, in compiled code. See `aggregations.columns.wire` for what it accepts."""

from typing import Any, Final

import numpy as np
from numba import int64, types

from aggregations.columns.wire import LOW, is_text, little, short, skipped, span, varint
from persistence.compiled import NUMBERS, SPANS, borrowed, compiled, helper

_DEEPEST: Final = 30
_POSITIVE: Final = 2**63 - 1

# How fields of payloads are written; the values of `kinds` in `read_payloads`.
INT64, INT32, UINT32, SINT32, SINT64, BOOL, FIXED32, FIXED64, STRING, BYTES, MESSAGE = range(11)
REPEATED: Final = 16


@helper
def _number(value: int, kind: int) -> int:
    """What a varint stands for in a field of a kind."""
    if kind == INT32:
        return (value << 32) >> 32
    if kind == UINT32:
        return value & LOW
    if kind == SINT32:
        low = value & LOW
        return (low >> 1) ^ -(low & 1)
    if kind == SINT64:
        return ((value >> 1) & _POSITIVE) ^ -(value & 1)
    if kind == BOOL:
        return int64(value != 0)
    return value


@helper
def _packed(data: Any, at: int, end: int, kind: int) -> bool:
    """Whether packed numbers are complete."""
    if kind >= FIXED32:
        return (end - at) % (4 if kind == FIXED32 else 8) == 0
    while 0 <= at < end:
        at = varint(data, at, end)[1]
    return at == end


_TABLE = types.int64[:, ::1]


@compiled(types.void(SPANS, NUMBERS, _TABLE, _TABLE, types.boolean[::1], _TABLE, _TABLE))
def read_payloads(values: Any, bounds: Any, fields: Any, oneofs: Any, good: Any, numbers: Any, sizes: Any) -> None:
    """Check protobuf messages, and read their singular fields that are not messages.

    A message with two members of a oneof is not accepted: the later one unsets the earlier.

    Args:
        values: Bytes, starts and lengths of the messages.
        bounds: The first field of each message type, and the number of fields. The first type is that of the values.
        fields: Number, kind, target and oneof of each field. The target is the row of its column, -1 for none; for a message
            its type. Oneofs are numbered over all types; -1 for none.
        oneofs: By message type: the first oneof, and the end of those of the type and of all messages in it.
        good: Set to whether a value was accepted.
        numbers: By column and value: a number, 64 bits of one, or where text and bytes start.
        sizes: By column and value: 0 if the field is absent, otherwise 1 and, of text and bytes, the length.
    """
    data, starts, lengths = borrowed(values[0]), values[1], values[2]
    ends, within = np.empty(_DEEPEST, np.int64), np.empty(_DEEPEST, np.int64)
    members = np.full(oneofs[0, 1], -1, np.int64)  # of each oneof, the one that was read
    for row in range(len(starts)):
        members[:] = -1
        at, end = starts[row], starts[row] + lengths[row]
        numbers[:, row] = 0
        sizes[:, row] = 0
        depth, message, guess, fine = 0, int64(0), int64(0), True
        while fine:
            if at == end:
                if depth == 0:
                    break
                depth -= 1
                end, message = ends[depth], within[depth]
                continue
            tag, at = short(data, at, end)
            if at < 0:
                fine = False
                break
            number, wire = tag >> 3, tag & 7
            first, last = bounds[message], bounds[message + 1]
            if not (first <= guess < last and fields[guess, 0] == number):
                guess = first
                while guess < last and fields[guess, 0] != number:
                    guess += 1
            if guess == last:
                at = -1 if number == 0 else skipped(data, at, end, wire)
                fine = at >= 0
                continue
            kind, target = fields[guess, 1] & 15, fields[guess, 2]
            repeated = fields[guess, 1] >= REPEATED
            oneof = fields[guess, 3]
            if oneof >= 0:
                if members[oneof] >= 0 and members[oneof] != number:
                    fine = False
                    break
                members[oneof] = number
            guess += 1
            if kind >= STRING:
                start, at = span(data, at, end) if wire == 2 else (int64(0), int64(-1))
                fine = at >= 0
                if not fine:
                    break
                if kind == MESSAGE:
                    fine = depth < _DEEPEST
                    if fine:
                        if repeated:
                            members[oneofs[target, 0] : oneofs[target, 1]] = -1
                        ends[depth], within[depth] = end, message
                        depth += 1
                        at, end, message = start, at, target
                    continue
                fine = kind == BYTES or is_text(data, start, at)
                if target >= 0 and not repeated:
                    numbers[target, row], sizes[target, row] = start, 1 + at - start
                continue
            if repeated and wire == 2:
                start, at = span(data, at, end)
                fine = at >= 0 and _packed(data, start, at, kind)
                continue
            value = int64(0)
            if kind < FIXED32:
                if wire == 0:
                    value, at = varint(data, at, end)
                    value = _number(value, kind)
                else:
                    at = -1
            else:
                size = 4 if kind == FIXED32 else 8
                if wire == (5 if kind == FIXED32 else 1) and end - at >= size:
                    value = little(data, at, size)
                    at += size
                else:
                    at = -1
            fine = at >= 0
            if fine and target >= 0 and not repeated:
                numbers[target, row], sizes[target, row] = value, 1
        good[row] = fine
