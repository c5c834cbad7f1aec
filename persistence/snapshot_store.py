"""Snapshots in a store: the bytes of a snapshot's file, in parts.

They are no generation of the flow. A snapshot is a stage of generation 0, which no run has, of the name `FLOW.snapshots`:
no run, reader or drop of the flow sees it, also if the store is the one that has the live states.

Its parts are numbered and begin with the epoch of the command that writes them. The last write is the entry that names
this epoch: from then on the snapshot exists, and it replaces an earlier one at this moment. The parts of that one, and
those of commands that were killed, are removed afterwards. A newer command fences an older one of the flow, also if it
writes or removes another snapshot.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any, Final

import msgspec

from persistence.commit.faults import SNAPSHOT, effect
from persistence.errors import Corrupt, Fenced
from persistence.names import FlowRef, StageRef, check_name
from persistence.protocol import StateStore, Stored, Write
from persistence.seal import DamagedError, seal, unseal

_END: Final = b"snapshot"
_PART: Final = Struct(">QQ")
_BYTES: Final = 256 << 10
"""Bytes of one part."""
_LONGEST: Final = 90
"""Characters in the name of a flow: with those of `.snapshots`, it has at most 100."""


class _End(msgspec.Struct, frozen=True):
    """What the last write says.

    Attributes:
        epoch: Epoch of the command that wrote it.
        size: Length in bytes.
        part: Bytes of each part; the last one may have fewer.
    """

    epoch: int
    size: int
    part: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_End)


def snapshot_ref(flow: str, name: str) -> StageRef:
    """Where a snapshot of a flow is in a store.

    Raises:
        ValueError: The name is invalid, or that of the flow is too long.
    """
    if len(flow) > _LONGEST:
        raise ValueError(f"the name of flow {flow} has more than {_LONGEST} characters: save its snapshots in files")
    return FlowRef(f"{flow}.snapshots", 0).stage(check_name("snapshot", name))


def has_snapshot(store: StateStore, ref: StageRef) -> bool:
    """Whether a store has a whole snapshot.

    Raises:
        Corrupt: Its entry cannot be read.
        StoreError: The store does not answer.
    """
    return _end_of(store, ref) is not None


def remove_snapshot(store: StateStore, ref: StageRef) -> bool:
    """Remove a snapshot, and whatever a command left that was killed.

    Returns:
        Whether there was something to remove.

    Raises:
        StoreError: The store does not answer, or a newer command has begun. Repeat it.
    """
    if next(iter(store.scan(ref)), None) is None:
        return False
    epoch = store.acquire_epoch(ref.flow_ref)
    with _newest():
        effect(SNAPSHOT, lambda: store.remove(ref, epoch, epoch=epoch, batch=0))
    return True


@contextmanager
def _newest() -> Iterator[None]:
    """Explain that a newer command has taken over."""
    try:
        yield
    except Fenced as error:
        raise Fenced(
            "another command has begun to write or remove a snapshot of this flow in this store",
            "Repeat this one when the other has ended",
        ) from error


class SnapshotStoreWriter:
    """Writes a snapshot into a store.

    Args:
        store: The store.
        ref: Where it gets; see `snapshot_ref`.

    Attributes:
        size: Number of bytes so far.
        replaces: Whether there is an earlier snapshot.

    Raises:
        StoreError: The store does not answer, or refuses a request.
    """

    def __init__(self, store: StateStore, ref: StageRef) -> None:
        self._store = store
        self._ref = ref
        self._part = min(_BYTES, store.capabilities.max_value_bytes or _BYTES)
        self._left = bytearray()
        self._parts = 0
        self._epoch: int = effect(SNAPSHOT, lambda: store.acquire_epoch(ref.flow_ref))
        self._before = store.load(ref, [_END]).get(_END)
        self.size = 0
        self.replaces = self._before is not None

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""
        self._left += data
        self.size += len(data)
        while len(self._left) >= self._part:
            self._put(bytes(self._left[: self._part]))
            del self._left[: self._part]
        return len(data)

    def complete(self) -> None:
        """Make what was written the snapshot, and remove the parts of an earlier one.

        Raises:
            Conflict: Another command has written it meanwhile.
            StoreError: The store does not answer, or a newer command has begun.
        """
        if self._left:
            self._put(bytes(self._left))
        version = self._before.version if self._before else 0
        end = seal(_encoder.encode(_End(self._epoch, self.size, self._part)))
        effect(SNAPSHOT, lambda: self._save(Write(_END, version, end, due=self._epoch)))
        with _newest():
            effect(SNAPSHOT, lambda: self._store.remove(self._ref, self._epoch - 1, epoch=self._epoch, batch=0))

    def _put(self, part: bytes) -> None:
        write = Write(_PART.pack(self._epoch, self._parts), 0, part, due=self._epoch)
        effect(SNAPSHOT, lambda: self._save(write))
        self._parts += 1

    def _save(self, write: Write) -> None:
        with _newest():
            self._store.save(self._ref, [write], epoch=self._epoch, batch=0)


class _Parts(io.RawIOBase):
    """The parts of a snapshot, as a file."""

    def __init__(self, store: StateStore, ref: StageRef, end: _End) -> None:
        self._store = store
        self._ref = ref
        self._end = end
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end.size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        number, begin = divmod(self._at, self._end.part)
        if self._at >= self._end.size:
            return 0
        key = _PART.pack(self._end.epoch, number)
        part = self._store.load(self._ref, [key]).get(key)
        if part is None:
            raise DamagedError("a part of the snapshot is missing")
        found = part.value[begin : begin + len(view)]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)


def read_snapshot(store: StateStore, ref: StageRef) -> io.BufferedReader | None:
    """A snapshot in a store, as a file for `SnapshotReader`; None if the store has none.

    Reading it raises `DamagedError` if a part is missing, for example because the snapshot is replaced meanwhile.

    Raises:
        Corrupt: Its entry cannot be read.
        StoreError: The store does not answer.
    """
    end = _end_of(store, ref)
    return None if end is None else io.BufferedReader(_Parts(store, ref, end), end.part)


def _end_of(store: StateStore, ref: StageRef) -> _End | None:
    stored: Stored | None = store.load(ref, [_END]).get(_END)
    if stored is None:
        return None
    try:
        return _decoder.decode(unseal(stored.value))
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"the entry of the snapshot cannot be read: {error}",
            "Use another snapshot; remove this one with `headwater snapshot --remove`",
            ref=ref,
            key=_END,
        ) from error
