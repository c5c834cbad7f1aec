"""The entries of LMDB environments that find the states which are due.

For each state with a due time there are two entries: one by the time, in whose order `due_places` reads, and one by the
state, which finds the other one when the time changes.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
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
    gone = list(_due_entries(transaction, prefix, _TIME.pack(until + _ZERO), most))
    for entry, place in gone:
        transaction.delete(place)
        transaction.delete(_flagged(place, _BY_STATE))
        transaction.delete(entry)
    return len(gone)


def _due_entries(transaction: Transaction, prefix: bytes, last: bytes, most: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries by time of the states that are due, and their places."""
    begin = _flagged(prefix, _BY_TIME)
    cursor = transaction.cursor()
    if not cursor.set_range(begin):
        return
    for number, (entry, place) in enumerate(cursor):
        if number == most or not entry.startswith(begin) or entry[_HEAD : _HEAD + _TIME.size] > last:
            return
        yield entry, place


def _by_time(place: bytes, time: bytes) -> bytes:
    rest = place[_HEAD:]
    return _flagged(place[:_HEAD], _BY_TIME) + time + (rest if len(rest) <= _LONGEST else sha256(rest).digest())


def _flagged(place: bytes, flag: int) -> bytes:
    """The place with a flag in its first byte: numbers of stages have none."""
    return bytes([place[0] | flag]) + place[1:]
