"""Which partition a state is in, and how the writes of one partition become batches of bounded size."""

from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

from persistence.protocol import Write

_ROW_BYTES = 64
"""What a row needs besides key and value: three numbers, their cell headers and timestamps."""


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a state: CRC-32 (ISO 3309, as zlib, Java and Spark SQL's `crc32` have it) modulo `buckets`.

    Stored states depend on it, so it never changes. A writer that partitions by `crc32(key) % buckets`
    has its buckets for itself.
    """
    return crc32(key) % buckets


def keys_by_bucket(keys: Iterable[bytes], buckets: int) -> dict[int, list[bytes]]:
    """Divide keys by their bucket; a key that comes twice is in it once."""
    found: dict[int, list[bytes]] = {}
    for key in dict.fromkeys(keys):
        found.setdefault(bucket_of(key, buckets), []).append(key)
    return found


def writes_by_bucket(writes: Iterable[Write], buckets: int) -> dict[int, list[Write]]:
    """Divide writes by the bucket of their keys, in the order of the call."""
    found: dict[int, list[Write]] = {}
    for write in writes:
        found.setdefault(bucket_of(write.key, buckets), []).append(write)
    return found


def bounded(writes: Sequence[Write], limit: int) -> Iterator[list[Write]]:
    """Cut writes into batches of at most `limit` bytes each; a write that is larger alone is a batch of its own."""
    batch: list[Write] = []
    size = 0
    for write in writes:
        needed = len(write.key) + len(write.value) + _ROW_BYTES
        if batch and size + needed > limit:
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += needed
    if batch:
        yield batch
