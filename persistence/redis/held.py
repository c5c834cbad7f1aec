"""States that this process has read or written, for as long as nobody else writes to their bucket.

The script that writes states gives their bucket a new count and the random id of the save in the same step: its point.
While a bucket is at the point at which states were read or written here, they are what is stored: they need no second
read, and a save need not compare their versions. A bucket that lost writes does not return to a point by other writes.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter, eq
from typing import Final

from persistence.names import StageRef
from persistence.protocol import Stored, Write

_OVERHEAD: Final = 230
"""Bytes of memory that a state needs beside its key and its value. Measured with `tracemalloc`, 64-bit CPython 3.11."""
ABSENT: Final = Stored(0, 0, 0, b"")
"""Stands for a state that does not exist."""
_UNKNOWN: Final = Stored(-1, 0, 0, b"")
_VERSION: Final = attrgetter("version")
_EXPECTED: Final = attrgetter("expected")
_KEY: Final = attrgetter("key")
_MADE_FROM: Final = attrgetter("expected", "value")


@dataclass(slots=True)
class _Bucket:
    """What is known of one bucket.

    Attributes:
        point: The point at which all of it was stored; empty when nothing is known.
        new: States, and `ABSENT` ones, that were used since the others became old.
        old: States that were not used since.
        state_bytes: Bytes of a state and its key, on average, of those that were noted last.
    """

    point: bytes = b""
    new: dict[bytes, Stored] = field(default_factory=dict)
    old: dict[bytes, Stored] = field(default_factory=dict)
    state_bytes: int = 0

    @property
    def size(self) -> int:
        """Approximate bytes of `new`."""
        return len(self.new) * (_OVERHEAD + self.state_bytes)

    def get(self, keys: Sequence[bytes]) -> list[Stored]:
        """States, `ABSENT` and `_UNKNOWN` ones included."""
        found = list(map(self.new.get, keys, repeat(_UNKNOWN)))
        if self.old:
            missing = list(compress(keys, map(_UNKNOWN.__eq__, found)))
            used = {key: state for key in missing if (state := self.old.get(key)) is not None}
            self.new |= used
            found = list(map(self.new.get, keys, repeat(_UNKNOWN)))
        return found

    def put(self, keys: Sequence[bytes], states: Sequence[Stored]) -> None:
        """Note states."""
        self.new.update(zip(keys, states, strict=True))
        some = range(0, len(keys), 1 + len(keys) // 100)
        if some:
            self.state_bytes = sum(len(keys[i]) + len(states[i].value) for i in some) // len(some)


class HeldStates:
    """The states that a store has read or written, limited by their memory. Safe for threads.

    Args:
        most_bytes: Approximate memory that they may need when a load begins. What a load and the save after it add comes
            on top of it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._buckets: dict[tuple[StageRef, int], _Bucket] = {}
        self._lock = threading.Lock()

    def make_room(self) -> None:
        """Forget the states that were not used for the longest time if the others need half of the memory."""
        with self._lock:
            if 2 * sum(one.size for one in self._buckets.values()) <= self._most:
                return
            for one in self._buckets.values():
                one.old, one.new = one.new if self._most else {}, {}

    def at(self, stage: StageRef, bucket: int, point: bytes, keys: Sequence[bytes]) -> list[Stored | None]:
        """What is known of some keys, if the bucket is at this point; else forget what is known of it.

        Args:
            stage: The stage.
            bucket: The bucket.
            point: Its present point.
            keys: The keys.

        Returns:
            For each key its state, `ABSENT` if it has none, and None if that is not known.
        """
        with self._lock:
            known = self._buckets.get((stage, bucket))
            if known is None or known.point != point:
                self._buckets[stage, bucket] = _Bucket(point)
                return [None] * len(keys)
            return [None if state is _UNKNOWN else state for state in known.get(keys)]

    def read(self, stage: StageRef, bucket: int, point: bytes, keys: Sequence[bytes], states: Sequence[Stored]) -> None:
        """Note states that were read after the bucket was at this point, unless it is known to be at another one by now."""
        with self._lock:
            known = self._buckets.get((stage, bucket))
            if known is not None and known.point == point:
                known.put(keys, states)

    def point(self, stage: StageRef, bucket: int) -> bytes:
        """The point at which the states of a bucket are known; empty when nothing is known of it."""
        with self._lock:
            known = self._buckets.get((stage, bucket))
            return known.point if known else b""

    def expects(self, stage: StageRef, bucket: int, point: bytes, writes: Sequence[Write]) -> bool:
        """Whether all writes expect the versions that their states have at this point of the bucket."""
        with self._lock:
            known = self._buckets.get((stage, bucket))
            if known is None or known.point != point:
                return False
            versions = map(_VERSION, map(known.new.get, map(_KEY, writes), repeat(_UNKNOWN)))
            return all(map(eq, versions, map(_EXPECTED, writes)))

    def written(
        self,
        stage: StageRef,
        bucket: int,
        before: bytes,
        point: bytes,
        parts: Iterable[Sequence[Write]],
        epoch: int,
        batch: int,
    ) -> None:
        """Note states that were written between two points, between which nothing else was written to the bucket.

        Args:
            stage: The stage.
            bucket: The bucket.
            before: The point before they were written.
            point: The point after it.
            parts: The writes.
            epoch: Epoch of the run that wrote them.
            batch: Its batch.
        """
        with self._lock:
            known = self._buckets.get((stage, bucket))
            if known is not None and known.point == before:
                known.point = point
                for writes in parts:
                    states = [Stored(expected + 1, epoch, batch, value) for expected, value in map(_MADE_FROM, writes)]
                    known.put(list(map(_KEY, writes)), states)


def point_of(mark: bytes, save: bytes) -> bytes:
    """The point of a bucket, from the fields of its hash."""
    return b"%b %b" % (mark, save)
