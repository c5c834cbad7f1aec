"""The LMDB store: states in several environments, which are written at the same time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from persistence.cas import check_distinct, check_is_epoch
from persistence.errors import Conflict
from persistence.lmdb.environment import SYNC
from persistence.lmdb.layout import SHARDS
from persistence.lmdb.shard import Shard
from persistence.manifest import Manifest
from persistence.marks import NONE, Acknowledged, Bucket, Marks
from persistence.murmur2 import parts_of
from persistence.protocol import Capabilities, FlowRef, Removed, StageRef, Stored, Write
from persistence.urls import choice, options, path_of

T = TypeVar("T")


class LmdbStore:
    """Keeps states in LMDB environments, safe for several processes of one machine.

    With `sync=full` (the default), acknowledged writes survive a loss of power, at two waits for the disk per call and
    shard. With `nometasync`, a loss of power may lose the last call of each shard, also while another shard keeps later
    calls. With `nosync`, it may damage an environment. With any of them, a killed process loses nothing. The directory must be
    on a local disk, and all its processes in one PID namespace: LMDB works neither on network shares nor between
    containers that do not share their processes.

    LMDB lets one process write to an environment at a time, and a write copies each page that it touches. Keys are
    therefore divided among four environments, by the hash by which Kafka's producers choose partitions: the records of
    one of two, four or more partitions (a power of two) change states of their own environments only.

    Writers of a shard take turns: a writer that is frozen in the middle of a call blocks the others, which end with
    `Transient` after 30 s; one that is killed does not. The data files grow as far as states need it, are never shortened, and their
    free pages are used again. No program may truncate one or copy over it while a flow runs: LMDB's processes would end
    with SIGBUS.

    Args:
        path: The directory. The first write creates it if it is missing; reading creates nothing.
        sync: `full`, `nometasync` or `nosync`, LMDB's MDB_NOMETASYNC and MDB_NOSYNC.
    """

    def __init__(self, path: Path, *, sync: str = "full") -> None:
        self._shards = [Shard(path / str(number), sync, str(number)) for number in range(SHARDS)]
        self._capabilities = Capabilities(
            durable=sync == "full",
            ordered_durability=sync == "full",  # each environment keeps the order of its own writes only
            shared=True,
            ordered_scan=True,
            marked=True,
            counted=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        first, *others = self._shards
        epoch = first.acquire_epoch(flow, max(above, *(one.installed_epoch(flow) for one in others)))
        for one in others:
            one.install_epoch(flow, epoch, refuse=False)
        return epoch

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        check_is_epoch(flow, epoch)
        for one in self._shards:
            one.install_epoch(flow, epoch)

    def installed_epoch(self, flow: FlowRef) -> int:
        return self._shards[0].installed_epoch(flow)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        found: dict[bytes, Stored] = {}
        for number, part in _divided(keys, keys):
            found |= self._shards[number].load(stage, part)
        return found

    def save(
        self,
        stage: StageRef,
        writes: Sequence[Write],
        *,
        epoch: int,
        batch: int,
        known: Marks = NONE,
        downstream: Acknowledged = NONE,
    ) -> Marks:
        check_distinct(stage, writes)
        marks, changed = {}, set[bytes]()
        for number, part in _divided([write.key for write in writes], writes):
            shard = self._shards[number]
            try:
                mark = shard.save(stage, part, epoch=epoch, batch=batch, known=known, downstream=downstream)
            except Conflict as conflict:
                changed.update(conflict.keys)
            else:
                marks[str(number)] = mark
        if changed:
            raise Conflict(tuple(write.key for write in writes if write.key in changed), ref=stage)
        return marks

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        found = [one.remove(stage, until, epoch=epoch, known=known) for one in self._shards]
        return Removed(sum(gone for _, gone in found), {str(number): mark for number, (mark, _) in enumerate(found)})

    def due(self, stage: StageRef, until: int, *, after: int | None = None) -> Iterator[bytes]:
        for one in self._shards:
            yield from one.due(stage, until, after)

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        return {str(number): one.mark(stage) for number, one in enumerate(self._shards)}

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        return self._shards[0].load_manifest(flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        self._shards[0].save_manifest(flow, manifest, after=after)

    def drop(self, flow: FlowRef) -> None:
        if self.installed_epoch(flow):
            for one in self._shards:
                one.drop_states(flow)
            for one in reversed(self._shards):  # the first one shows whether there is something to drop
                one.drop_flow(flow)

    def scan(
        self, stage: StageRef, *, bucket: str | None = None, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, Stored]]:
        shards = self._shards if bucket is None else [self._shards[int(bucket)]]
        return merge(*(one.scan(stage, begin, end) for one in shards), key=itemgetter(0))

    def close(self) -> None:
        for one in self._shards:
            one.close()


def open_store(url: str) -> LmdbStore:
    """Open `lmdb:///absolute/directory` or `lmdb://relative/directory`.

    Option: `sync` (full, nometasync, nosync).

    Raises:
        Terminal: The URL has no path, or an unknown option.
    """
    path = path_of(url, "directory", "Write lmdb:///absolute/path or lmdb://relative/path")
    return LmdbStore(path, **options(url, {"sync": choice(*SYNC)}))


def _divided(keys: Sequence[bytes], what: Sequence[T]) -> list[tuple[int, list[T]]]:
    """What belongs to each shard. Processes begin with different shards: they would wait for each other."""
    numbers = parts_of(keys, SHARDS)
    mine = sorted(set(numbers), key=lambda number: (number - os.getpid()) % SHARDS)
    return [(number, list(compress(what, map(number.__eq__, numbers)))) for number in mine]
