"""Reads envelopes and protobuf payloads in compiled code: it accepts what is plainly valid, and leaves the rest alone.

What is not accepted need not be invalid: groups, overlong tags, a field with another wire type. `RecordDecoder`, which
uses the reference parser, decides about each of these. So it is enough here never to accept what it would reject, and
to read the same from what is accepted (protobuf's "Encoding"). No position outside a value is ever read: each is
compared with the end of the value, or of the field, first.
"""

from typing import Any, Final

import numpy as np
from numba import int64, types

from aggregations.columns.checksum import crc32c
from aggregations.columns.compiled import BYTES, NUMBERS, borrowed, compiled, helper

_MAX_OFFSET: Final = 2**63 - 1
_LOW: Final = 0xFFFFFFFF
_MOST_PROBES: Final = 64
"""Places of a hash table that are tried. Names that were chosen to collide cost one record its fast path, not time."""
_DEEPEST: Final = 30
_PLACE: Final = 9
"""Columns of a kind of hop: start and length of topic, via, topic id and cluster, then partition; then flags."""
KIND_COLUMNS: Final = _PLACE + 1
REKEYED: Final = 1
PASS_THROUGH: Final = 2
INDEXED: Final = 4
KEYLESS: Final = 8

# Numbers of the schema's fields up to 13, as bits: those that are numbers, and those that are text or bytes.
_LAST: Final = 13
_NUMBERS: Final = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 11
_HOP_NUMBERS: Final = 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 11 | 1 << 13
_CHECKSUM: Final = 2047

# How fields of payloads are written; the values of `kinds` in `read_payloads`.
INT64, INT32, UINT32, SINT32, SINT64, BOOL, FIXED32, FIXED64, STRING, BYTES_, MESSAGE = range(11)
REPEATED: Final = 16


@helper
def _varint(data: Any, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, as 64 bits, and the position after it; -1 if it is not complete or has more bits."""
    if at >= end:
        return 0, -1
    byte = int64(data[at])
    at += 1
    if byte < 128:
        return byte, at
    value, shift = byte & 127, 7
    while at < end and shift < 64:
        byte = int64(data[at])
        at += 1
        if shift == 63 and byte > 1:
            return 0, -1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1


@helper
def _short(data: Any, at: int, end: int) -> tuple[int, int]:
    """A number of at most 32 bits in its shortest form: a tag, or a length."""
    value, after = _varint(data, at, end)
    if after < 0 or after - at > 5 or value > _LOW or (after - at > 1 and data[after - 1] == 0):
        return 0, -1
    return value, after


@helper
def _span(data: Any, at: int, end: int) -> tuple[int, int]:
    """Start and end of the bytes whose length is at `at`; an end of -1 if they are not complete."""
    size, start = _short(data, at, end)
    if start < 0 or size > end - start:
        return 0, -1
    return start, start + size


@helper
def _skipped(data: Any, at: int, end: int, wire: int) -> int:
    """The position after a field of a wire type; -1 if it is not complete, or a group."""
    if wire == 0:
        return _varint(data, at, end)[1]
    if wire == 2:
        return _span(data, at, end)[1]
    size = 8 if wire == 1 else 4 if wire == 5 else -1
    return at + size if 0 < size <= end - at else -1


@helper
def _little(data: Any, at: int, size: int) -> int:
    value = int64(0)
    for i in range(size):
        value |= int64(data[at + i]) << (8 * i)
    return value


@helper
def _is_text(data: Any, at: int, end: int) -> bool:
    """Whether bytes are UTF-8 (RFC 3629)."""
    while at < end:
        first = data[at]
        if first < 0x80:
            at += 1
            continue
        more = 1 if 0xC2 <= first <= 0xDF else 2 if 0xE0 <= first <= 0xEF else 3 if 0xF0 <= first <= 0xF4 else 0
        if more == 0 or more >= end - at:
            return False
        second = data[at + 1]
        low = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        high = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        if second < low or second > high:
            return False
        for i in range(2, more + 1):
            if data[at + i] & 0xC0 != 0x80:
                return False
        at += 1 + more
    return True


@helper
def _is_topic(data: Any, at: int, end: int, most: int) -> bool:
    """See `envelope.limits.check_topic`."""
    size = end - at
    if size < 1 or size > most:
        return False
    for i in range(at, end):
        one = data[i]
        letter = 97 <= one <= 122 or 65 <= one <= 90
        if not (letter or 48 <= one <= 57 or one == 45 or one == 46 or one == 95):  # noqa: PLR1714 - compiled better
            return False
    return not (data[at] == 46 and (size == 1 or (size == 2 and data[at + 1] == 46)))


@helper
def _same(first: Any, at: int, second: Any, other: int, size: int) -> bool:
    for i in range(size):  # noqa: SIM110 - numba knows no all()
        if first[at + i] != second[other + i]:
            return False
    return True


@helper
def _mixed(code: int, value: int) -> int:
    return (code ^ value) * int64(1099511628211)


@helper
def _slot(code: int, probe: int, table: Any) -> int:
    return ((code ^ (code >> 29)) + probe) & (len(table) - 1)


@helper
def _kind(data: Any, hop: Any, kinds: Any, table: Any, counts: Any, topic_chars: int) -> int:
    """The number of a kind of hop, which is compared byte by byte; -1 if it is not valid or there are too many."""
    code = _mixed(_mixed(int64(-3750763034362895579), hop[_PLACE - 1]), hop[_PLACE])
    for name in range(0, _PLACE - 1, 2):
        code = _mixed(code, hop[name + 1])
        for i in range(hop[name], hop[name] + hop[name + 1]):
            code = _mixed(code, int64(data[i]))
    for probe in range(_MOST_PROBES):
        slot = _slot(code, probe, table)
        found = table[slot]
        if found < 0:
            if counts[0] == len(kinds) or not _is_topic(data, hop[0], hop[0] + hop[1], topic_chars):
                return -1
            for name in range(2, _PLACE - 1, 2):
                if not _is_text(data, hop[name], hop[name] + hop[name + 1]):
                    return -1
            found = counts[0]
            table[slot] = found
            for i in range(_PLACE + 1):
                kinds[found, i] = hop[i]
            counts[0] += 1
            return found
        same = kinds[found, _PLACE - 1] == hop[_PLACE - 1] and kinds[found, _PLACE] == hop[_PLACE]
        for name in range(0, _PLACE - 1, 2):
            same = same and kinds[found, name + 1] == hop[name + 1]
            same = same and _same(data, kinds[found, name], data, hop[name], hop[name + 1])
        if same:
            return found
    return -1


@helper
def _node(before: int, kind: int, nodes: Any, table: Any, counts: Any) -> int:
    """The number of the route that continues route `before` with a hop; -1 if there are too many."""
    code = _mixed(_mixed(int64(-3750763034362895579), before), kind) * int64(-7046029254386353131)
    for probe in range(_MOST_PROBES):
        slot = _slot(code, probe, table)
        found = table[slot]
        if found < 0:
            if counts[1] == len(nodes):
                return -1
            found = counts[1]
            table[slot] = found
            nodes[found, 0] = before
            nodes[found, 1] = kind
            counts[1] += 1
            return found
        if nodes[found, 0] == before and nodes[found, 1] == kind:
            return found
    return -1


@helper
def _read_hop(data: Any, at: int, end: int, hop: Any) -> tuple[bool, int, int]:
    """Read one hop into a row of `kinds`; whether it is valid, its offset, and its index."""
    for i in range(_PLACE + 1):
        hop[i] = 0
    texts = 0  # by bits: which were read. If one occurs twice, the first one would have to be text, too
    partition, offset, index = int64(-1), int64(-1), int64(-1)
    while at < end:
        tag, at = _short(data, at, end)
        if at < 0:
            return False, 0, 0
        number, wire = tag >> 3, tag & 7
        if number > _LAST:
            at = _skipped(data, at, end, wire)
            if at < 0:
                return False, 0, 0
        elif wire == 2 and not _HOP_NUMBERS >> number & 1:
            name = 0 if number == 1 else 2 if number == 4 else 4 if number == 9 else 6
            start, at = _span(data, at, end)
            if at < 0 or number == 0 or texts >> name & 1:
                return False, 0, 0
            texts |= 1 << name
            hop[name], hop[name + 1] = start, at - start
        elif wire == 0 and _HOP_NUMBERS >> number & 1:
            value, at = _varint(data, at, end)
            if at < 0:
                return False, 0, 0
            if number == 2:
                partition = (value << 32) >> 32
            elif number == 3:
                offset = value
            elif number == 5:
                index = value & _LOW
            elif number == 7 or number == 8 or number == 13:  # noqa: PLR1714
                flag = REKEYED if number == 7 else PASS_THROUGH if number == 8 else KEYLESS
                hop[_PLACE] = (hop[_PLACE] & ~flag) | (flag if value != 0 else 0)
        else:
            return False, 0, 0
    hop[_PLACE - 1] = partition
    if index >= 0:
        hop[_PLACE] |= INDEXED
    return partition >= 0 and 0 <= offset < _MAX_OFFSET, offset, index


_SPANS: Final = types.Tuple((BYTES, NUMBERS, NUMBERS))


@compiled(
    types.Tuple((types.int64[::1], types.int64[::1], types.int64[:, ::1], types.int64[:, ::1]))(
        _SPANS, _SPANS, _SPANS, NUMBERS, BYTES, NUMBERS, types.boolean[::1], types.int64[:, ::1]
    )
)
def read_envelopes(
    values: Any, keys: Any, topics: Any, own: Any, payload_type: Any, limits: Any, good: Any, found: Any
) -> tuple[Any, Any, Any, Any]:
    """Read envelopes.

    Args:
        values: Their bytes, starts and lengths.
        keys: The same of the records' keys; a length of -1 for none.
        topics: The same of the records' own topics, one for each number in `own`.
        own: Number of each record's own topic and partition.
        payload_type: The type that payloads must have, if they name one; empty for any.
        limits: Bytes of a message, bytes of a payload, hops, characters of a topic.
        good: Set to whether a record was accepted.
        found: Nine rows, each by record: start and length of the payload and of the event id, event time and whether
            there is one, first hop and number of hops, route.

    Returns:
        Offsets of all hops; their indices, -1 for none; kinds of hops, as spans of `values`, partition and flags; and
        routes: the number of the route before the last hop, and its kind. The first routes have no hop: they are
        the numbers of `own`.
    """
    data, starts, lengths = borrowed(values[0]), values[1], values[2]
    key_data, key_starts, key_lengths = borrowed(keys[0]), keys[1], keys[2]
    topic_data, topic_starts, topic_lengths = borrowed(topics[0]), topics[1], topics[2]
    type_data = borrowed(payload_type)
    most_bytes, payload_bytes, most_hops, topic_chars = limits[0], limits[1], limits[2], limits[3]
    rows, roots = len(starts), len(topic_starts)
    size = 1024
    while size < 4 * (rows + roots):
        size *= 2
    all_kinds, all_nodes = np.empty((size // 2, _PLACE + 1), np.int64), np.empty((roots + size // 2, 2), np.int64)
    tables, more = np.full(2 * size, -1, np.int32), np.zeros(2 + _PLACE + 1, np.int64)
    kinds, nodes = borrowed(all_kinds), borrowed(all_nodes)
    kind_table, node_table = borrowed(tables[:size]), borrowed(tables[size:])
    counts, hop = borrowed(more[:2]), borrowed(more[2:])
    counts[1] = roots
    offsets, indices = np.empty(rows + most_hops + 1, np.int64), np.empty(rows + most_hops + 1, np.int64)
    filled = 0
    for row in range(rows):
        good[row] = False
        at, end = starts[row], starts[row] + lengths[row]
        if lengths[row] < 3 or lengths[row] > most_bytes or data[at] != 8 or data[at + 1] != 1:
            continue
        sealed = end - at > 3 and data[at + 2] == 0x10 and data[at + 3] == 1
        tail = end - at >= 6 and data[end - 6] == 0xFD and data[end - 5] == 0x7F
        if sealed and (not tail or end - at < 10):
            continue
        stored = int64(0)
        if tail:
            stored = _little(data, end - 4, 4)
            if crc32c(data, at, end - 6) != stored:
                continue
        if filled + most_hops >= len(offsets):
            wider, others = np.empty(2 * len(offsets), np.int64), np.empty(2 * len(offsets), np.int64)
            wider[:filled], others[:filled] = offsets[:filled], indices[:filled]
            offsets, indices = wider, others
        fine, claims, has_key, has_time = True, False, False, False
        version, checksum, time = int64(0), int64(0), int64(0)
        id_start = id_end = type_start = type_end = payload_start = payload_end = at
        key_start = key_end = goal_start = goal_end = at
        hops, node = 0, own[row]
        while at < end and fine:
            tag, at = _short(data, at, end)
            number, wire = tag >> 3, tag & 7
            if at < 0 or number == 0:
                fine = False
            elif number > _LAST and number != _CHECKSUM:
                at = _skipped(data, at, end, wire)
                fine = at >= 0
            elif wire == 0 and number <= _LAST and _NUMBERS >> number & 1:
                value, at = _varint(data, at, end)
                fine = at >= 0
                if number == 1:
                    version = value & _LOW
                elif number == 2:
                    claims = claims or value != 0  # a later false would not take it back here: that is rare
                elif number == 4:
                    time, has_time = value, True
            elif wire == 2 and number <= _LAST and not _NUMBERS >> number & 1:
                start, at = _span(data, at, end)
                fine = at >= 0
                if not fine:
                    pass
                elif number == 7:
                    payload_start, payload_end = start, at
                elif number == 5:
                    key_start, key_end, has_key = start, at, True
                elif number == 9:
                    fine, offset, index = _read_hop(data, start, at, hop)
                    if fine and hops < most_hops:
                        kind = _kind(data, hop, kinds, kind_table, counts, topic_chars)
                        node = -1 if kind < 0 else _node(node, kind, nodes, node_table, counts)
                        offsets[filled + hops], indices[filled + hops] = offset, index
                        hops += 1
                        fine = node >= 0
                    else:
                        fine = False
                else:
                    fine = _is_text(data, start, at)
                    if number == 3:
                        id_start, id_end = start, at
                    elif number == 6:
                        type_start, type_end = start, at
                    elif number == 12:
                        goal_start, goal_end = start, at
            elif wire == 5 and number == _CHECKSUM and end - at >= 4:
                checksum, claims = _little(data, at, 4), True
                at += 4
            else:
                fine = False
        if not fine or version != 1 or ((sealed or claims) and not (tail and checksum == stored)):
            continue
        if payload_end - payload_start > payload_bytes:
            continue
        if has_key and (
            key_end - key_start != key_lengths[row]
            or not _same(data, key_start, key_data, key_starts[row], key_end - key_start)
        ):
            continue
        if goal_end > goal_start and (
            goal_end - goal_start != topic_lengths[own[row]]
            or not _same(data, goal_start, topic_data, topic_starts[own[row]], goal_end - goal_start)
        ):
            continue
        if (
            type_end > type_start
            and len(payload_type)
            and (
                type_end - type_start != len(payload_type)
                or not _same(data, type_start, type_data, 0, type_end - type_start)
            )
        ):
            continue
        good[row] = True
        found[0, row], found[1, row] = payload_start, payload_end - payload_start
        found[2, row], found[3, row] = id_start, id_end - id_start
        found[4, row], found[5, row] = time, has_time
        found[6, row], found[7, row], found[8, row] = filled, hops, node
        filled += hops
    tables[0] = 0  # it exists until here, like `all_kinds`, `all_nodes` and `more`
    return offsets[:filled].copy(), indices[:filled].copy(), all_kinds[: more[0]].copy(), all_nodes[: more[1]].copy()


@helper
def _number(value: int, kind: int) -> int:
    """What a varint stands for in a field of a kind."""
    if kind == INT32:
        return (value << 32) >> 32
    if kind == UINT32:
        return value & _LOW
    if kind == SINT32:
        low = value & _LOW
        return (low >> 1) ^ -(low & 1)
    if kind == SINT64:
        return ((value >> 1) & _MAX_OFFSET) ^ -(value & 1)
    if kind == BOOL:
        return int64(value != 0)
    return value


@helper
def _packed(data: Any, at: int, end: int, kind: int) -> bool:
    """Whether packed numbers are complete."""
    if kind >= FIXED32:
        return (end - at) % (4 if kind == FIXED32 else 8) == 0
    while 0 <= at < end:
        at = _varint(data, at, end)[1]
    return at == end


@compiled(
    types.void(_SPANS, NUMBERS, types.int64[:, ::1], types.boolean[::1], types.int64[:, ::1], types.int64[:, ::1])
)
def read_payloads(values: Any, bounds: Any, fields: Any, good: Any, numbers: Any, sizes: Any) -> None:
    """Check protobuf messages, and read their singular fields that are not messages.

    Args:
        values: Bytes, starts and lengths of the messages.
        bounds: The first field of each message type, and the number of fields. The first type is that of the values.
        fields: Number, kind, and target of each field: the row of its column, -1 for none; for a message its type.
        good: Set to whether a value was accepted.
        numbers: By column and value: a number, 64 bits of one, or where text and bytes start.
        sizes: By column and value: 0 if the field is absent, otherwise 1 and, of text and bytes, the length.
    """
    data, starts, lengths = borrowed(values[0]), values[1], values[2]
    ends, within = np.empty(_DEEPEST, np.int64), np.empty(_DEEPEST, np.int64)
    for row in range(len(starts)):
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
            tag, at = _short(data, at, end)
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
                at = -1 if number == 0 else _skipped(data, at, end, wire)
                fine = at >= 0
                continue
            kind, target = fields[guess, 1] & 15, fields[guess, 2]
            repeated = fields[guess, 1] >= REPEATED
            guess += 1
            if kind >= STRING:
                start, at = _span(data, at, end) if wire == 2 else (int64(0), int64(-1))
                fine = at >= 0
                if not fine:
                    break
                if kind == MESSAGE:
                    fine = depth < _DEEPEST
                    if fine:
                        ends[depth], within[depth] = end, message
                        depth += 1
                        at, end, message = start, at, target
                    continue
                fine = kind == BYTES_ or _is_text(data, start, at)
                if target >= 0 and not repeated:
                    numbers[target, row], sizes[target, row] = start, 1 + at - start
                continue
            if repeated and wire == 2:
                start, at = _span(data, at, end)
                fine = at >= 0 and _packed(data, start, at, kind)
                continue
            value = int64(0)
            if kind < FIXED32:
                if wire == 0:
                    value, at = _varint(data, at, end)
                    value = _number(value, kind)
                else:
                    at = -1
            else:
                size = 4 if kind == FIXED32 else 8
                if wire == (5 if kind == FIXED32 else 1) and end - at >= size:
                    value = _little(data, at, size)
                    at += size
                else:
                    at = -1
            fine = at >= 0
            if fine and target >= 0 and not repeated:
                numbers[target, row], sizes[target, row] = value, 1
        good[row] = fine


@compiled(types.void(BYTES, types.Array(types.int64, 1, "A", readonly=True), NUMBERS, types.uint8[::1]))
def gather(data: Any, starts: Any, bounds: Any, out: Any) -> None:
    """Copy spans of `data` to `out`, which has one after the other, between `bounds`."""
    for row in range(len(starts)):
        begin, start = bounds[row], starts[row]
        for i in range(bounds[row + 1] - begin):
            out[begin + i] = data[start + i]
