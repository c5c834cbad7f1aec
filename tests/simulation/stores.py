"""Stores of one simulated world: the memory store with copies, and with saves that may be applied in part.

A store has several buckets, and one more part for epochs and manifests. Each part can go back independently, like the
shards of a cluster.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

from envelope import Position
from persistence.cas import check_distinct
from persistence.commit.faults import effect
from persistence.marks import NONE, Acknowledged, Bucket, Mark, Marks, note_mark
from persistence.memory import MemoryStore
from persistence.protocol import Capabilities, FlowRef, Manifest, Removed, StageRef, Stored, Write
from persistence.record import decode_record
from persistence.registry import register
from tests.simulation.oracle import Violation

SCHEME = "simulated"


@dataclass(frozen=True, slots=True)
class Copy:
    """The content of a store at one moment."""

    epochs: dict[Any, int]
    manifests: dict[Any, Manifest]
    stages: dict[Any, dict[bytes, Stored]]
    buckets: dict[Any, dict[str, Bucket]]
    dues: dict[Any, dict[bytes, int]]
    removed: dict[Any, dict[str, int]]

    @property
    def holes(self) -> set[tuple[StageRef, bytes, str, Position]]:
        """Every hole, by stage, key and group."""
        return {
            (ref, key, group, position)
            for ref, states in self.stages.items()
            for key, one in states.items()
            for group, positions in decode_record(one.value, ref, key).histories.holes.items()
            for position in positions
        }


BUCKETS = ("0", "1", "2")
"""Parts of a store that hold states."""
FLOW_PART = "flow"
"""The part that holds epochs and manifests."""


class SimulatedStore(MemoryStore):
    """A memory store whose saves are not atomic: every write of a save is a separate effect, `write:STAGE`.

    Attributes:
        lives: Number of times it went back; each time it begins another life.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lives = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, atomic_save=False)

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
        marks: dict[str, Mark] = {}
        for write in writes:
            saved = effect(
                f"write:{stage.stage}",
                lambda write=write: self._write(stage, write, epoch, batch, known, downstream),  # type: ignore[misc]
            )
            for bucket, mark in saved.items():
                note_mark(stage, marks, bucket, mark)
        return marks

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        states = 0
        for name in BUCKETS:
            states += effect(
                f"write:{stage.stage}",
                lambda name=name: self._remove_from(stage, name, until, epoch, known),  # type: ignore[misc]
            )
            self._check_written(stage.flow_ref, epoch)
        return Removed(states, {name: one.mark for name, one in self._buckets.get(stage, {}).items()})

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        super().save_manifest(flow, manifest, after=after)
        self._check_written(flow, manifest.epoch)

    def _write(
        self, stage: StageRef, write: Write, epoch: int, batch: int, known: Marks, downstream: Acknowledged
    ) -> Marks:
        marks = super().save(stage, [write], epoch=epoch, batch=batch, known=known, downstream=downstream)
        self._check_written(stage.flow_ref, epoch)
        return marks

    def _bucket_names(self) -> Sequence[str]:
        return BUCKETS

    def _bucket_of(self, key: bytes) -> str:
        return BUCKETS[crc32(key) % len(BUCKETS)]

    def _saved(self, mark: Mark, epoch: int, downstream: Acknowledged) -> Bucket:
        return Bucket(mark.next(f"life{self.lives}"), epoch, downstream)

    def _check_written(self, flow: FlowRef, epoch: int) -> None:
        installed = self.installed_epoch(flow)
        if epoch < installed:
            raise Violation(f"a run of epoch {epoch} wrote though {installed} is installed")

    def copy(self) -> Copy:
        """A copy of everything."""
        return Copy(
            dict(self._epochs),
            dict(self._manifests),
            {ref: dict(of) for ref, of in self._stages.items()},
            {ref: dict(of) for ref, of in self._buckets.items()},
            {ref: dict(of) for ref, of in self._dues.items()},
            {ref: dict(of) for ref, of in self._removed.items()},
        )

    def restore(self, copy: Copy, parts: Iterable[str] = (*BUCKETS, FLOW_PART)) -> None:
        """Restore the whole store, or some parts, to a copy, or empty them. This begins a new life of the server."""
        self.lives += 1
        for part in parts:
            if part == FLOW_PART:
                self._epochs = dict(copy.epochs)
                self._manifests = dict(copy.manifests)
                continue
            self._restore_keys(self._stages, copy.stages, part)
            self._restore_keys(self._dues, copy.dues, part)
            for ref, removed in self._removed.items():
                removed.pop(part, None)
                if part in copy.removed.get(ref, {}):
                    removed[part] = copy.removed[ref][part]
            for ref in {*self._buckets, *copy.buckets}:
                self._buckets.setdefault(ref, {})[part] = copy.buckets.get(ref, {}).get(part, Bucket())

    def _restore_keys(self, now: dict[Any, dict[bytes, Any]], then: dict[Any, dict[bytes, Any]], part: str) -> None:
        for ref in {*now, *then}:
            older = {key: one for key, one in then.get(ref, {}).items() if self._bucket_of(key) == part}
            newer = {key: one for key, one in now.get(ref, {}).items() if self._bucket_of(key) != part}
            now[ref] = newer | older

    def stage(self, ref: StageRef) -> dict[bytes, Stored]:
        """The current states of a stage."""
        return self._stages.get(ref, {})


_open: dict[str, SimulatedStore] = {}


def open_store(url: str) -> SimulatedStore:
    """Open `simulated://NAME`."""
    return _open.setdefault(urlsplit(url).netloc, SimulatedStore())


def forget(url: str) -> None:
    """Release a store."""
    _open.pop(urlsplit(url).netloc, None)


register(SCHEME, "tests.simulation.stores:open_store")
