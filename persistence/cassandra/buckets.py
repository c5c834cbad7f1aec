"""Assigns states to buckets (partitions), and divides the writes of a bucket into batches of bounded size."""

from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

from persistence.protocol import Write

_ROW_BYTES = 64
"""Bytes of a row besides key and value: three numbers, their cell headers and timestamps."""


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a state: CRC-32 (ISO 3309, as in zlib, Java and Spark SQL's `crc32`) modulo `buckets`.

    Stored states depend on this function, so it never changes. If writers are partitioned by
    `crc32(key) % buckets`, each bucket has one writer.
    """
    return crc32(key) % buckets


def keys_by_bucket(keys: Iterable[bytes], buckets: int) -> dict[int, list[bytes]]:
    """Group keys by bucket, without repeated keys."""
    found: dict[int, list[bytes]] = {}
    for key in dict.fromkeys(keys):
        found.setdefault(bucket_of(key, buckets), []).append(key)
    return found


def writes_by_bucket(writes: Iterable[Write], buckets: int) -> dict[int, list[Write]]:
    """Group writes by bucket, in the order of the call."""
    found: dict[int, list[Write]] = {}
    for write in writes:
        found.setdefault(bucket_of(write.key, buckets), []).append(write)
    return found


def bounded(writes: Sequence[Write], limit: int) -> Iterator[list[Write]]:
    """Divide writes into batches of at most `limit` bytes; a larger write is a batch of its own."""
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
