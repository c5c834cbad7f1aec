"""Versions that this process has loaded, and the point of their bucket at which they were stored.

Whatever writes states gives their bucket a new count and a new random id in the same step: mark and id together are its
point. A bucket that lost writes does not return to a point by other writes. While a bucket is at the point at which
versions were loaded, they are the stored ones.
"""

import threading
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, eq
from typing import Final

from persistence.names import StageRef
from persistence.protocol import Write

_MOST: Final = 1_000_000
"""Versions of one bucket beyond which earlier loads are forgotten: about 100 MB."""
_KEY: Final = attrgetter("key")
_EXPECTED: Final = attrgetter("expected")


class LoadedVersions:
    """Versions by bucket, from loads to the next save. Safe for threads."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[StageRef, int], tuple[bytes, dict[bytes, int]]] = {}
        self._lock = threading.Lock()

    def note(self, stage: StageRef, bucket: int, point: bytes, versions: dict[bytes, int]) -> None:
        """Note versions that were loaded after the bucket was at this point; 0 for a key without a state."""
        with self._lock:
            at, known = self._buckets.get((stage, bucket), (b"", {}))
            if at == point and len(known) < _MOST:
                versions = known | versions
            self._buckets[stage, bucket] = point, versions

    def take(self, stage: StageRef, bucket: int, writes: Sequence[Write]) -> bytes:
        """The point at which all writes expect the stored versions; empty if that is not known. Forget the versions."""
        with self._lock:
            point, known = self._buckets.pop((stage, bucket), (b"", {}))
        found = map(known.get, map(_KEY, writes), repeat(-1))
        return point if all(map(eq, found, map(_EXPECTED, writes))) else b""


def point_of(mark: bytes | None, save: bytes | None) -> bytes:
    """The point of a bucket, from the fields of its hash."""
    return b"%b %b" % (mark or b"0", save or b"")
