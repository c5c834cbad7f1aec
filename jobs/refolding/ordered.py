"""States in the order of their keys, whatever the order in which a store yields them, in bounded memory."""

import struct
from collections.abc import Iterable, Iterator
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final

from persistence.protocol import StageRef, StateStore

State = tuple[bytes, bytes]
"""Key and state record."""
_PART_BYTES: Final = 64 << 20
"""Bytes of keys and states that are sorted in memory."""
_HEAD: Final = struct.Struct(">II")
_ONE: Final = 64
"""Bytes that a state takes in memory besides key and value."""


class OrderedCopy(Iterable[State]):
    """A copy of states in files, which is read in the order of the keys.

    The states are sorted in parts, and the parts are merged when they are read.

    Args:
        directory: A new directory for the files; it is created, with those above it.
        states: The states, each key once.
        part_bytes: Bytes of keys and states that are sorted in memory.
    """

    def __init__(self, directory: Path, states: Iterable[State], *, part_bytes: int = _PART_BYTES) -> None:
        directory.mkdir(parents=True)
        self._files: list[Path] = []
        part: list[State] = []
        size = 0
        for key, value in states:
            part.append((key, value))
            size += len(key) + len(value) + _ONE
            if size >= part_bytes:
                self._write(directory, part)
                part, size = [], 0
        if part:
            self._write(directory, part)

    def _write(self, directory: Path, part: list[State]) -> None:
        part.sort(key=itemgetter(0))
        path = directory / str(len(self._files))
        with path.open("wb") as file:
            for key, value in part:
                file.write(_HEAD.pack(len(key), len(value)))
                file.write(key)
                file.write(value)
        self._files.append(path)

    def __iter__(self) -> Iterator[State]:
        """The states in the order of the bytes of their keys."""
        return merge(*map(_read, self._files), key=itemgetter(0))


def _read(path: Path) -> Iterator[State]:
    with path.open("rb") as file:
        while state := _next(file):
            yield state


def _next(file: BinaryIO) -> State | None:
    head = file.read(_HEAD.size)
    if not head:
        return None
    key, value = _HEAD.unpack(head)
    return file.read(key), file.read(value)


def ordered(store: StateStore, ref: StageRef, directory: Path) -> Iterable[State]:
    """The states of a stage in the order of their keys; a store that has another order is copied.

    Args:
        store: The store.
        ref: The stage.
        directory: Where to copy to, if needed; it must not exist.
    """
    states = ((key, stored.value) for key, stored in store.scan(ref))
    return states if store.capabilities.ordered_scan else OrderedCopy(directory, states)
