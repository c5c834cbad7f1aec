"""Saves the states of a flow in a file, and restores them into other stores."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any, BinaryIO, Final

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.begin import look
from aggregations.run.border import check_border, check_unchanged, manifest_alone, removed_by_stage
from aggregations.run.restore import Restored, restore_states
from jobs.environment import UsageError
from persistence.commit.faults import SNAPSHOT, effect
from persistence.errors import Corrupt
from persistence.protocol import StageRef, StateStore
from persistence.seal import DamagedError, unseal
from persistence.snapshot_file import SnapshotReader, SnapshotWriter

__all__ = ["Restored", "Snapshot", "restore", "snapshot"]

_PART_BYTES: Final = 2 << 20
"""Keys and states in one part of the file, before compression; a part with one state may be larger."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of a flow in a file.

    Attributes:
        path: The file.
        flow: Name of the flow.
        generation: Generation of the states.
        states: Number of states by stage.
        epoch: Epoch of the manifest.
        batch: Batch that the states are of.
        positions: Next offset by topic and partition.
        checksum: SHA-256 of the file up to its end, as hexadecimal text.
        bytes: Length of the file.
    """

    path: Path
    flow: str
    generation: int
    states: dict[str, int]
    epoch: int
    batch: int
    positions: dict[str, dict[int, int]]
    checksum: str
    bytes: int

    def as_json(self) -> dict[str, Any]:
        """The snapshot as a JSON object."""
        return {
            "file": os.fspath(self.path),
            "flow": self.flow,
            "generation": self.generation,
            "states": self.states,
            "epoch": self.epoch,
            "batch": self.batch,
            "positions": self.positions,
            "checksum": self.checksum,
            "bytes": self.bytes,
        }


def snapshot(
    flow: Flow[Any],
    to: Path,
    *,
    stores: Mapping[str, str],
    generation: int | None = None,
    replace: bool = False,
    progress: Callable[[int, int | None], Any] = lambda _done, _total: None,
) -> Snapshot:
    """Save the states of all stages of a flow and its manifest in a file, as of the end of one batch.

    No run may be at work. The states are read one after the other, in bounded memory; if a run begins meanwhile, this
    is detected, and no file is left.

    Args:
        flow: The flow.
        to: The file.
        stores: URL of the store by stage name, from `bind`.
        generation: Generation of the states; None for the live one.
        replace: Replace the file if it exists.
        progress: Called with the number of states saved, and None.

    Raises:
        UsageError: The file exists, is not a regular one, or cannot be written.
        RunRefusedError: A run is at work, the last one did not end cleanly, or the stores do not fit each other or the flow.
        Corrupt: A state does not match its checksum.
        StoreError: A store does not answer, or refuses a request.
    """
    if to.exists():
        if not to.is_file():
            raise UsageError(f"{to} is not a regular file")
        if not replace:
            raise UsageError(f"{to} exists: give another file, or --replace")
    what = "save the states of one moment"
    with closing(look(flow, stores, generation=generation)) as run:
        manifest = check_border(run, what)
        stages = [stage.name for stage in flow.stages]
        with _written(to) as (file, part):
            writer = SnapshotWriter(
                file,
                run.ref,
                manifest_alone(manifest),
                stages=stages,
                removed=removed_by_stage(run),
                made_ms=time.time_ns() // 1_000_000,
            )
            for stage in stages:
                for found in _parts(run.stores[stage], run.ref.stage(stage)):
                    writer.write(stage, found)
                    progress(writer.counts.total(), None)
            check_unchanged(run, what)
            checksum = writer.end()
            file.flush()
            os.fsync(file.fileno())
            effect(SNAPSHOT, lambda: part.replace(to))
    positions = {topic: {n: one.next_offset for n, one in its.items()} for topic, its in manifest.positions.items()}
    counts = dict(writer.counts)
    return Snapshot(
        to,
        flow.name,
        run.ref.generation,
        counts,
        manifest.epoch,
        manifest.batch,
        positions,
        checksum,
        to.stat().st_size,
    )


def restore(
    flow: Flow[Any],
    source: Path,
    *,
    stores: Mapping[str, str],
    generation: int | None = None,
    accept: Sequence[str] = (),
    progress: Callable[[int, int | None], Any] = lambda _done, _total: None,
) -> Restored:
    """Write the states of a snapshot into stores that contain nothing of the flow; see `restore_states`.

    The stores may be of another kind than those that the snapshot was made from. The next run resumes where the snapshot
    ends. A restore that is interrupted leaves stores in which no run begins; repeat it with the same file.

    Args:
        flow: The flow, with the definition that made the states.
        source: The file.
        stores: URL of the store by stage name, from `bind`.
        generation: The generation that the snapshot must be of; None for any.
        accept: `snapshot-versions`: states are published although epochs count on from that of the snapshot.
        progress: Called with the number of states read, and their total.

    Raises:
        UsageError: The file cannot be read.
        RunRefusedError: It is not a whole snapshot, is of another flow, generation or definition, or a store is not empty.
        StoreError: A store does not answer, or refuses a request. Repeat the restore.
    """
    with opened_snapshot(source) as reader:
        if generation not in (None, reader.header.generation):
            raise RunRefusedError(f"{source} is of generation {reader.header.generation}, not {generation}")
        return restore_states(flow, stores, reader, accept=accept, progress=progress)


@contextmanager
def opened_snapshot(source: Path) -> Iterator[SnapshotReader]:
    """The file of a snapshot, which is whole.

    Raises:
        UsageError: It cannot be opened, or is not a regular file.
        RunRefusedError: It is not a whole snapshot, or was changed while it was read.
    """
    with _opened(source) as file:
        try:
            reader = SnapshotReader(file)
        except DamagedError as error:
            raise RunRefusedError(f"{source}: {error}. Use another copy of it; nothing was written") from error
        try:
            yield reader
        except DamagedError as error:
            raise RunRefusedError(
                f"{source} was changed while it was restored: {error}. Repeat the restore with a copy of the file as it was"
            ) from error


def _parts(store: StateStore, ref: StageRef) -> Iterator[list[tuple[bytes, bytes]]]:
    """The states of a stage, checked, in parts."""
    part, size = list[tuple[bytes, bytes]](), 0
    for key, stored in store.scan(ref):
        part.append((key, _checked(stored.value, ref, key)))
        size += len(key) + len(stored.value)
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _checked(value: bytes, ref: StageRef, key: bytes) -> bytes:
    try:
        return unseal(value)
    except DamagedError as error:
        raise Corrupt(f"the state cannot be read: {error}", ref=ref, key=key) from error


def _opened(path: Path) -> BinaryIO:
    """The file of a snapshot.

    Raises:
        UsageError: It cannot be opened, or is not a regular file.
    """
    try:
        if not path.is_file() and path.exists():
            raise UsageError(f"{path} is not a regular file")
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{path}: {error.strerror}") from error


@contextmanager
def _written(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file beside the wanted one, readable by its owner alone; it is deleted unless it was renamed."""
    try:
        # A name of its own: in containers that share a volume, two processes may have the same number.
        handle, name = mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, part
    finally:
        part.unlink(missing_ok=True)
