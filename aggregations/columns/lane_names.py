"""Numbers of lanes: a batch of states repeats few names many times."""

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints
from envelope.dedup.lanes import is_healed, names_partition, parts_of
from persistence.compiled import compiled

_MOST_NAMES = 1 << 16
"""Names after which a table is begun anew: producers that keep writing new names must not fill the memory."""


class LaneTable(NamedTuple):
    """The known lanes as arrays.

    Attributes:
        group: Number of each lane's group.
        at_first: Where the partitions in each lane's name begin in `at`; the last entry is where the last lane ends.
        at: Partitions in the names, after the root's.
        whole: 1 if a lane's name lacks the partition that its messages are consumed from.
        late: 1 if a lane holds positions that were folded late.
        slots: Hash table of lanes by group and partitions; -1 for an empty slot. Its length is a power of two.
        text_first: Where the name of each group begins in `texts`; the last entry is where the last one ends.
        texts: Names of the groups as JSON strings.
    """

    group: Ints
    at_first: Ints
    at: Ints
    whole: npt.NDArray[np.uint8]
    late: npt.NDArray[np.uint8]
    slots: Ints
    text_first: Ints
    texts: npt.NDArray[np.uint8]


class LaneNames:
    """Gives numbers to the names of lanes and of their groups.

    Attributes:
        names: Name of each lane, by number.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._table: LaneTable | None = None

    def number(self, name: str) -> int:
        """The number of a lane."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
            self._groups.setdefault(parts_of(name)[0], len(self._groups))
            self._table = None
        return self._numbers[name]

    def table(self) -> LaneTable:
        """The known lanes as arrays."""
        if self._table is None:
            self._table = self._arrays()
        return self._table

    def _arrays(self) -> LaneTable:
        parts = [parts_of(name) for name in self.names]
        group = np.array([self._groups[one] for one, _ in parts], np.int64)
        at = np.array([partition for _, at in parts for partition in at], np.int64)
        at_first = np.cumsum([0, *(len(at) for _, at in parts)], dtype=np.int64)
        texts = [msgspec.json.encode(one) for one in self._groups]
        slots = np.full(1 << (4 * len(parts) + 3).bit_length(), -1, np.int64)
        _fill(slots, group, at_first, at)
        return LaneTable(
            group,
            at_first,
            at,
            np.array([not names_partition(name) for name in self.names], np.uint8),
            np.array([is_healed(name) for name in self.names], np.uint8),
            slots,
            np.cumsum([0, *map(len, texts)], dtype=np.int64),
            np.frombuffer(b"".join(texts), np.uint8),
        )


_known = LaneNames()


def known_names() -> LaneNames:
    """The names of this process, which stay from batch to batch."""
    global _known
    if len(_known.names) >= _MOST_NAMES:
        _known = LaneNames()
    return _known


@compiled(allocates=False)
def hash_of(group: int, at: Ints, first: int, count: int) -> int:
    """A hash of a lane, not negative."""
    found = np.uint64(group) * np.uint64(0x9E3779B97F4A7C15)
    for i in range(count):
        found = (found ^ np.uint64(at[first + i])) * np.uint64(0xFF51AFD7ED558CCD)
        found ^= found >> np.uint64(33)
    return int(found >> np.uint64(1))


@compiled(allocates=False)
def _fill(slots: Ints, group: Ints, at_first: Ints, at: Ints) -> None:
    for lane in range(len(group)):
        slot = hash_of(group[lane], at, at_first[lane], at_first[lane + 1] - at_first[lane]) & (len(slots) - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = lane
