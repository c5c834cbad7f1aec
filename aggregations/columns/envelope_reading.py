"""Reads envelopes into arrays, in compiled code. See `aggregations.columns.wire` for what it accepts."""

from typing import Any, Final

import numpy as np
from numba import int64, types

from aggregations.columns.checksum import crc32c
from aggregations.columns.wire import LOW, is_text, little, short, skipped, span, varint, word
from envelope.limits import MAX_EPOCH, OFFSET_BITS
from persistence.compiled import BYTES, NUMBERS, SPANS, borrowed, compiled, helper

_MAX_OFFSET: Final = 2**63 - 1
_MOST_PROBES: Final = 64
"""Places of a hash table that are tried. Names that were chosen to collide cost one record its fast path, not time."""
_DEPTHS: Final = 8
"""Hops of a chain that are first compared with an earlier one of the same depth. Further ones share the last depth."""
_EPOCH: Final = 8
"""Column of a hop's leader epoch in what is known of an earlier one."""
_SLOTS: Final = 16
"""Earlier hops of a depth, by the last byte of their partition: records of several partitions come in turn."""
_PLACE: Final = 9
"""Columns of a kind of hop: start and length of topic, via, topic id and cluster, then partition; then flags. Behind
those of a hop that was read are the start and the end of its offset, and its leader epoch."""
REKEYED: Final = 1
PASS_THROUGH: Final = 2
INDEXED: Final = 4
KEYLESS: Final = 8

# Numbers of the schema's fields up to the last one below the checksum, as bits: those that are numbers. The others are
# text or bytes.
_LAST: Final = 16
_NUMBERS: Final = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 11 | 1 << 14 | 1 << 15 | 1 << 16
_HOP_LAST: Final = 13
_HOP_NUMBERS: Final = 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 11 | 1 << 13
_CHECKSUM: Final = 2047


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
    while size >= 8:
        if word(first, at) != word(second, other):
            return False
        at, other, size = at + 8, other + 8, size - 8
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
def _is_kind(data: Any, hop: Any, kinds: Any, kind: int) -> bool:
    """Whether a hop is of a kind, compared byte by byte."""
    same = kinds[kind, _PLACE - 1] == hop[_PLACE - 1] and kinds[kind, _PLACE] == hop[_PLACE]
    for name in range(0, _PLACE - 1, 2):
        same = same and kinds[kind, name + 1] == hop[name + 1]
        same = same and _same(data, kinds[kind, name], data, hop[name], hop[name + 1])
    return same


@helper
def _kind(data: Any, hop: Any, kinds: Any, table: Any, counts: Any, topic_chars: int) -> int:
    """The number of a kind of hop; -1 if it is not valid or there are too many."""
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
                if not is_text(data, hop[name], hop[name] + hop[name + 1]):
                    return -1
            found = counts[0]
            table[slot] = found
            for i in range(_PLACE + 1):
                kinds[found, i] = hop[i]
            counts[0] += 1
            return found
        if _is_kind(data, hop, kinds, found):
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
def _is_offset(offset: int, epoch: int) -> bool:
    """See `envelope.limits.check_coordinates`."""
    if epoch == 0:
        return 0 <= offset < _MAX_OFFSET
    return epoch <= MAX_EPOCH and offset >> OFFSET_BITS == 0


@helper
def _read_hop(data: Any, at: int, end: int, hop: Any) -> tuple[bool, int, int, int]:
    """Read one hop into a row of `kinds`; whether it is valid, its offset, index and timestamp, or -1 for none."""
    for i in range(_PLACE + 1):
        hop[i] = 0
    texts = 0  # by bits: which were read. If one occurs twice, the first one would have to be text, too
    partition, offset, index, time, epoch = int64(-1), int64(-1), int64(-1), int64(-1), int64(0)
    while at < end:
        tag, at = short(data, at, end)
        if at < 0:
            return False, 0, 0, 0
        number, wire = tag >> 3, tag & 7
        if number > _HOP_LAST:
            at = skipped(data, at, end, wire)
            if at < 0:
                return False, 0, 0, 0
        elif wire == 2 and not _HOP_NUMBERS >> number & 1:
            name = 0 if number == 1 else 2 if number == 4 else 4 if number == 9 else 6
            start, at = span(data, at, end)
            if at < 0 or number == 0 or texts >> name & 1:
                return False, 0, 0, 0
            texts |= 1 << name
            hop[name], hop[name + 1] = start, at - start
        elif wire == 0 and _HOP_NUMBERS >> number & 1:
            before = at
            value, at = varint(data, at, end)
            if at < 0:
                return False, 0, 0, 0
            if number == 2:
                partition = (value << 32) >> 32
            elif number == 3:
                hop[_PLACE + 1], hop[_PLACE + 2] = before, at  # of two, the last one counts
                offset = value
            elif number == 5:
                index = value & LOW
            elif number == 10:
                epoch = max((value << 32) >> 32, 0)
            elif number == 11:
                time = value
            elif number == 7 or number == 8 or number == 13:  # noqa: PLR1714
                flag = REKEYED if number == 7 else PASS_THROUGH if number == 8 else KEYLESS
                hop[_PLACE] = (hop[_PLACE] & ~flag) | (flag if value != 0 else 0)
        else:
            return False, 0, 0, 0
    hop[_PLACE - 1], hop[_PLACE + 3] = partition, epoch
    if index >= 0:
        hop[_PLACE] |= INDEXED
    return partition >= 0 and _is_offset(offset, epoch), offset, index, time


@helper
def _slot_of(data: Any, at: int, end: int, depth: int, fronts: Any, known: Any) -> Any:
    """What is known of a hop that may be like this one: see `_offset_if_like`; index, kind, route, timestamp, epoch.

    Args:
        data: The buffer.
        at: Start of the hop.
        end: End of it.
        depth: Number of the hop in its chain.
        fronts: By depth: bytes of a hop before its offset, which usually follow the partition and a tag of one byte.
        known: By depth and slot.
    """
    front = fronts[depth]
    slot = int64(data[at + front - 2]) % _SLOTS if 2 <= front < end - at else 0
    return known[depth * _SLOTS + slot]


@helper
def _offset_if_like(data: Any, at: int, end: int, last: Any) -> int:
    """The offset of a hop that has all other bytes in common with an earlier one, which was valid; else -1.

    Args:
        data: The buffer.
        at: Start of the hop.
        end: End of it.
        last: Start of the earlier hop, start and end of its offset, its end, and last its epoch. A start of -1 for none.
    """
    if last[0] < 0:
        return int64(-1)
    front = last[1] - last[0]
    if end - at <= front or not _same(data, at, data, last[0], front):
        return int64(-1)
    offset, at = varint(data, at + front, end)
    if at < 0 or end - at != last[3] - last[2] or not _same(data, at, data, last[2], end - at):
        return int64(-1)
    return offset if _is_offset(offset, last[_EPOCH]) else int64(-1)


@compiled(
    types.Tuple((types.int64[::1], types.int64[::1], types.int64[::1], types.int64[:, ::1], types.int64[:, ::1]))(
        SPANS, SPANS, SPANS, NUMBERS, BYTES, NUMBERS, types.boolean[::1], types.int64[:, ::1]
    )
)
def read_envelopes(
    values: Any, keys: Any, topics: Any, own: Any, payload_type: Any, limits: Any, good: Any, found: Any
) -> tuple[Any, Any, Any, Any, Any]:
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
            there is one (2: it is the timestamp of the first hop, in milliseconds), first hop and number of hops,
            route. Or 17: also start and length of the producer's name, sequence number and whether there is one, last
            sequence number and whether there is one, epoch, and whether each partition is numbered.

    Returns:
        Offsets of all hops; their leader epochs, 0 for none; their indices, -1 for none; kinds of hops, as spans of
        `values`, partition and flags; and routes: the number of the route before the last hop, and its kind. The first
        routes have no hop: they are the numbers of `own`.
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
    tables, more = np.full(2 * size, -1, np.int32), np.zeros(6 + _PLACE, np.int64)
    slots = np.full((1 + _DEPTHS * _SLOTS, _EPOCH + 1), -1)
    kinds, nodes = borrowed(all_kinds), borrowed(all_nodes)
    kind_table, node_table = borrowed(tables[:size]), borrowed(tables[size:])
    counts, hop = borrowed(more[:2]), borrowed(more[2:])
    counts[1] = roots
    fronts, known = borrowed(slots[0]), borrowed(slots[1:])
    offsets, indices = np.empty(rows + most_hops + 1, np.int64), np.empty(rows + most_hops + 1, np.int64)
    epochs = np.zeros(rows + most_hops + 1, np.int64)
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
            stored = little(data, end - 4, 4)
            if crc32c(data, at, end - 6) != stored:
                continue
        if filled + most_hops >= len(offsets):
            wider, others = np.empty(2 * len(offsets), np.int64), np.empty(2 * len(offsets), np.int64)
            more_epochs = np.empty(2 * len(offsets), np.int64)
            wider[:filled], others[:filled], more_epochs[:filled] = offsets[:filled], indices[:filled], epochs[:filled]
            offsets, indices, epochs = wider, others, more_epochs
        fine, claims, has_key, has_time = True, False, False, False
        version, checksum, time = int64(0), int64(0), int64(0)
        id_start = id_end = type_start = type_end = payload_start = payload_end = at
        key_start = key_end = goal_start = goal_end = name_start = name_end = at
        sequence, last, epoch, contiguous = int64(0), int64(0), int64(0), int64(0)
        has_sequence, has_last = False, False
        hops, node, root_ms = 0, own[row], int64(-1)
        while at < end and fine:
            tag, at = short(data, at, end)
            number, wire = tag >> 3, tag & 7
            if at < 0 or number == 0:
                fine = False
            elif number > _LAST and number != _CHECKSUM:
                at = skipped(data, at, end, wire)
                fine = at >= 0
            elif wire == 0 and number <= _LAST and _NUMBERS >> number & 1:
                value, at = varint(data, at, end)
                fine = at >= 0
                if number == 1:
                    version = value & LOW
                elif number == 2:
                    claims = claims or value != 0  # a later false would not take it back here: that is rare
                elif number == 4:
                    time, has_time = value, True
                elif number == 11:
                    sequence, has_sequence = value, True
                elif number == 14:
                    epoch = value
                elif number == 15:
                    last, has_last = value, True
                elif number == 16:
                    contiguous = int64(value != 0)
            elif wire == 2 and number <= _LAST and not _NUMBERS >> number & 1:
                start, at = span(data, at, end)
                fine = at >= 0
                if not fine:
                    pass
                elif number == 7:
                    payload_start, payload_end = start, at
                elif number == 5:
                    key_start, key_end, has_key = start, at, True
                elif number == 9:
                    depth = min(hops, _DEPTHS - 1)
                    like = _slot_of(data, start, at, depth, fronts, known)
                    offset = _offset_if_like(data, start, at, like)
                    if offset < 0:
                        fine, offset, index, stamp = _read_hop(data, start, at, hop)
                        kind = _kind(data, hop, kinds, kind_table, counts, topic_chars) if fine else -1
                        fine = kind >= 0
                        if fine:
                            fronts[depth] = max(hop[_PLACE + 1] - start, 2)
                            like = _slot_of(data, start, at, depth, fronts, known)
                            like[0], like[1], like[2], like[3] = start, hop[_PLACE + 1], hop[_PLACE + 2], at
                            like[4], like[5], like[7], like[_EPOCH] = index, kind, stamp, hop[_PLACE + 3]
                    if fine and hops < most_hops:
                        index, kind, before, node = like[4], like[5], node, like[6]
                        if node < 0 or nodes[node, 0] != before or nodes[node, 1] != kind:
                            like[6] = node = _node(before, kind, nodes, node_table, counts)
                        if hops == 0:
                            root_ms = like[7]
                        offsets[filled + hops], indices[filled + hops] = offset, index
                        epochs[filled + hops] = like[_EPOCH]
                        hops += 1
                        fine = node >= 0
                    else:
                        fine = False
                else:
                    fine = is_text(data, start, at)
                    if number == 3:
                        id_start, id_end = start, at
                    elif number == 6:
                        type_start, type_end = start, at
                    elif number == 12:
                        goal_start, goal_end = start, at
                    elif number == 10:
                        name_start, name_end = start, at
            elif wire == 5 and number == _CHECKSUM and end - at >= 4:
                checksum, claims = little(data, at, 4), True
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
        if not has_time and root_ms >= 0:
            found[4, row], found[5, row] = root_ms, 2
        found[6, row], found[7, row], found[8, row] = filled, hops, node
        if len(found) > 9:
            found[9, row], found[10, row] = name_start, name_end - name_start
            found[11, row], found[12, row] = sequence, has_sequence
            found[13, row], found[14, row] = last, has_last
            found[15, row], found[16, row] = epoch, contiguous
        filled += hops
    tables[0] = slots[0, 0] = 0  # they exist until here, like `all_kinds`, `all_nodes` and `more`
    return (
        offsets[:filled].copy(),
        epochs[:filled].copy(),
        indices[:filled].copy(),
        all_kinds[: more[0]].copy(),
        all_nodes[: more[1]].copy(),
    )
