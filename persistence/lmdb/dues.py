"""The entries of LMDB environments that find the states which are due.

For each state with a due time there are two entries: one by the time, in whose order `due_places` reads, and one by the
state, which finds the other one when the time changes.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from struct import Struct
from typing import Final

from persistence.lmdb.environment import Transaction

_TIME: Final = Struct(">Q")
_ZERO: Final = 1 << 63
"""Added to a time, so that times before 1970 come first."""
_HEAD: Final = 4
"""Bytes of the number of a stage."""
_LONGEST: Final = 511 - _HEAD - _TIME.size
"""Bytes that remain for a key in an entry by time."""
_BY_STATE: Final = 0x40
_BY_TIME: Final = 0x80


def set_dues(transaction: Transaction, dues: Iterable[tuple[bytes, int]]) -> None:
    """Note when states are due, unless a later time is noted.

    Args:
        transaction: A write transaction.
        dues: Place of each state (`persistence.lmdb.layout.place`), and its time.
    """
    for place, due in dues:
        noted = _flagged(place, _BY_STATE)
        before = transaction.get(noted)
        time = _TIME.pack(due + _ZERO)
        if before is not None:
            if before >= time:
                continue
            transaction.delete(_by_time(place, before))
        transaction.put(noted, time)
        transaction.put(_by_time(place, time), place)


def remove_due(transaction: Transaction, prefix: bytes, until: int, most: int) -> int:
    """Remove states that are due at or before a time, the earliest first.

    Args:
        transaction: A write transaction.
        prefix: Number of the stage.
        until: The time, in seconds since 1970.
        most: Maximum number of states.

    Returns:
        The number of removed states; below `most` if no further one is due.
    """
    gone = list(islice(_due_entries(transaction, prefix, _flagged(prefix, _BY_TIME), until), most))
    for entry, place in gone:
        transaction.delete(place)
        transaction.delete(_flagged(place, _BY_STATE))
        transaction.delete(entry)
    return len(gone)


def due_page(
    transaction: Transaction, prefix: bytes, after: int | bytes | None, until: int, most: int
) -> list[tuple[bytes, bytes]]:
    """The entries of some states that are due, the earliest first, and the places of these states.

    Args:
        transaction: A transaction.
        prefix: Number of the stage.
        after: The time, in seconds since 1970, or the entry, after which they come; None for the first ones.
        until: The time at or before which they are due.
        most: Maximum number of states.
    """
    begin = _flagged(prefix, _BY_TIME)
    if isinstance(after, int):
        begin += _TIME.pack(after + 1 + _ZERO)
    elif after is not None:
        begin = after
    found = _due_entries(transaction, prefix, begin, until)
    return list(islice((one for one in found if one[0] != after), most))


def due_prefixes(prefix: bytes) -> tuple[bytes, bytes]:
    """Beginnings of the keys of a stage's entries here.

    Args:
        prefix: Number of the stage.
    """
    return _flagged(prefix, _BY_STATE), _flagged(prefix, _BY_TIME)


def _due_entries(transaction: Transaction, prefix: bytes, begin: bytes, until: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries by time of the states that are due, from `begin`, and their places."""
    last = _TIME.pack(until + _ZERO)
    cursor = transaction.cursor()
    if not cursor.set_range(begin):
        return
    for entry, place in cursor:
        if not entry.startswith(_flagged(prefix, _BY_TIME)) or entry[_HEAD : _HEAD + _TIME.size] > last:
            return
        yield entry, place


def _by_time(place: bytes, time: bytes) -> bytes:
    rest = place[_HEAD:]
    return _flagged(place[:_HEAD], _BY_TIME) + time + (rest if len(rest) <= _LONGEST else sha256(rest).digest())


def _flagged(place: bytes, flag: int) -> bytes:
    """The place with a flag in its first byte: numbers of stages have none."""
    return bytes([place[0] | flag]) + place[1:]
