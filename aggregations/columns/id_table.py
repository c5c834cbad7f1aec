"""A hash table of texts, in compiled code. Its slots contain the numbers of entries, which are arrays of the caller."""

from typing import Final, NamedTuple

from aggregations.columns.arrays import Ints
from aggregations.columns.record_text import Bytes
from persistence.compiled import compiled

_PROBES: Final = 1_000
"""Slots that are tried. If texts were chosen to collide, their state is left to the pure code."""


class Entries(NamedTuple):
    """The texts of a table.

    Attributes:
        first: Where the text of each entry begins.
        last: Where it ends.
        code: CRC32C of it.
    """

    first: Ints
    last: Ints
    code: Ints


@compiled(allocates=False)
def is_same(data: Bytes, one: int, other: int, size: int) -> bool:
    """Whether the same bytes are in two places."""
    same = True
    for i in range(size):
        same = same and data[one + i] == data[other + i]
    return same


@compiled(allocates=False)
def slot_of(data: Bytes, entries: Entries, slots: Ints, mask: int, code: int, first: int, last: int) -> int:
    """The slot of a text, or an empty one; -1 if none is near.

    Args:
        data: Contains the texts.
        entries: The texts of the table.
        slots: The slots, as many as a power of two; -1 for an empty one.
        mask: Number of slots less 1.
        code: CRC32C of the text.
        first: Where the text begins.
        last: Where it ends.
    """
    for probe in range(_PROBES):
        slot = (code + probe) & mask
        number = slots[slot]
        if number < 0:
            return slot
        if entries.code[number] != code or entries.last[number] - entries.first[number] != last - first:
            continue
        if is_same(data, entries.first[number], first, last - first):
            return slot
    return -1
