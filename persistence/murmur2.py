"""The hash by which Kafka's producers choose partitions: the 32-bit MurmurHash2 of the key, as in Kafka's `Utils.murmur2`.

A store that divides states by this hash into two, four or more parts (a power of two) has parts of its own for each
partition of a topic with as many partitions, or a multiple of it.
"""

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SEED: Final = 0x9747B28C
_FACTOR: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_FEW: Final = 32
"""Number of keys up to which arrays cost more than a loop."""


def parts_of(keys: Sequence[bytes], parts: int) -> list[int]:
    """The part of each key: its hash modulo the number of parts."""
    if parts == 1:
        return [0] * len(keys)
    if len(keys) <= _FEW:
        return [murmur2(key) % parts for key in keys]
    import numpy as np  # a process that reads a few states does not need it

    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    found = np.empty(len(keys), np.int64)
    for length in np.unique(lengths).tolist():
        these = lengths == length
        found[these] = _murmur2_of(list(compress(keys, these.tolist())), length) % parts
    numbers: list[int] = found.tolist()
    return numbers


def murmur2(key: bytes) -> int:
    """The hash of a key, as an unsigned number."""
    whole = len(key) & ~3
    number = _SEED ^ len(key)
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        number = number * _FACTOR & _MASK ^ word
    if whole < len(key):
        number = (number ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _MASK
    number = (number ^ number >> 13) * _FACTOR & _MASK
    return number ^ number >> 15


def _murmur2_of(keys: Sequence[bytes], length: int) -> "npt.NDArray[np.uint32]":
    """The hashes of keys of one length."""
    import numpy as np

    whole = length & ~3
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), length)
    words = np.ascontiguousarray(rows[:, :whole]).view("<u4").reshape(len(keys), whole // 4).astype(np.uint32)
    factor, number = np.uint32(_FACTOR), np.full(len(keys), _SEED ^ length, np.uint32)
    for word in (words * factor).T:
        number = number * factor ^ (word ^ word >> np.uint32(24)) * factor
    for i in range(whole, length):
        number ^= rows[:, i].astype(np.uint32) << np.uint32(8 * (i - whole))
    if whole < length:
        number *= factor
    number = (number ^ number >> np.uint32(13)) * factor
    return number ^ number >> np.uint32(15)
