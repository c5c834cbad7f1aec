"""Which events a journal lists: all of them, or a fixed share.

The coordinates of an event's root decide. So all records of an event are listed or none is, at every stage, and a batch
that is folded again lists the same ones. A larger share lists every event that a smaller one lists.
"""

from collections.abc import Sequence
from typing import Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints, Mask
from aggregations.errors import FlowError
from envelope import Node
from envelope.limits import OFFSET_MASK

ALL: Final = 1.0
"""The share of a journal that lists every event."""


def check_share(option: str, share: float) -> None:
    """Check a share of events.

    Args:
        option: Name of the option, for the error.
        share: The share.

    Raises:
        FlowError: It is not above 0 and at most 1.
    """
    if not 0 < share <= ALL:
        raise FlowError(f"{option} {share:g}: give a share of the events, above 0 and at most 1")


def partition_number(topic: str, partition: int) -> int:
    """The number of a root's partition, for `sampled`."""
    return int(google_crc32c.value(f"{topic}:{partition}".encode()))


def sampled(share: float, partitions: Ints | Sequence[int], offsets: Ints | Sequence[int]) -> Mask:
    """Whether a journal with this share lists events.

    Args:
        share: The share.
        partitions: Number of each root's partition.
        offsets: Offset of each root, with or without its leader epoch (`envelope.limits.root_number`).
    """
    if share >= ALL:
        return np.ones(len(offsets), np.bool_)
    mixed = (np.asarray(offsets, np.int64) & OFFSET_MASK).astype(np.uint64)
    mixed = _mixed(mixed + _mixed(np.asarray(partitions, np.int64).astype(np.uint64)))
    return mixed < np.uint64(int(share * 2.0**64))


def is_sampled(share: float, root: Node) -> bool:
    """Whether a journal with this share lists the event of a root."""
    return bool(sampled(share, [partition_number(root.topic, root.partition)], [root.offset])[0])


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread numbers evenly over 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
