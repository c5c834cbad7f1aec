"""Saves the states of a flow in a file or a store, and restores them into other stores."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.begin import look
from aggregations.run.border import check_border, check_unchanged, manifest_alone, removed_by_stage
from aggregations.run.restore import Restored, restore_states
from jobs.snapshot_places import Place, opened, shown, written
from persistence.errors import Corrupt
from persistence.protocol import StageRef, StateStore
from persistence.seal import DamagedError, unseal
from persistence.snapshot_file import SnapshotReader, SnapshotWriter

__all__ = ["Restored", "Snapshot", "restore", "snapshot"]

_PART_BYTES: Final = 2 << 20
"""Keys and states in one part of the file, before compression; a part with one state may be larger."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of a flow in a file or a store.

    Attributes:
        path: The file, or the place in a store.
        flow: Name of the flow.
        generation: Generation of the states.
        states: Number of states by stage.
        epoch: Epoch of the manifest.
        batch: Batch that the states are of.
        positions: Next offset by topic and partition.
        checksum: SHA-256 of the snapshot up to its end, as hexadecimal text.
        bytes: Length of the snapshot.
    """

    path: Place
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
            "file": shown(self.path),
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
    to: Place,
    *,
    stores: Mapping[str, str],
    generation: int | None = None,
    replace: bool = False,
    progress: Callable[[int, int | None], Any] = lambda _done, _total: None,
) -> Snapshot:
    """Save the states of all stages of a flow and its manifest, as of the end of one batch.

    No run may be at work. The states are read one after the other, in bounded memory; if a run begins meanwhile, this
    is detected, and there is no snapshot. A snapshot in a store is apart from all states, also if it is a store of the
    flow.

    Args:
        flow: The flow.
        to: The file, or STORE-URL#NAME for a store.
        stores: URL of the store by stage name, from `bind`.
        generation: Generation of the states; None for the live one.
        replace: Replace the snapshot if it exists.
        progress: Called with the number of states saved, and None.

    Raises:
        UsageError: The snapshot exists; or the file is not a regular one, or cannot be written.
        RunRefusedError: A run is at work, the last one did not end cleanly, or the stores do not fit each other or the flow.
        Corrupt: A state does not match its checksum.
        StoreError: A store does not answer, or refuses a request.
    """
    what = "save the states of one moment"
    with closing(look(flow, stores, generation=generation)) as run:
        manifest = check_border(run, what)
        stages = [stage.name for stage in flow.stages]
        with written(to, flow.name, replace=replace) as place:
            writer = SnapshotWriter(
                place,
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
            size = place.complete()
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
        size,
    )


def restore(
    flow: Flow[Any],
    source: Place,
    *,
    stores: Mapping[str, str],
    generation: int | None = None,
    accept: Sequence[str] = (),
    progress: Callable[[int, int | None], Any] = lambda _done, _total: None,
) -> Restored:
    """Write the states of a snapshot into stores that contain nothing of the flow; see `restore_states`.

    The stores may be of another kind than those that the snapshot was made from. The next run resumes where the snapshot
    ends. A restore that is interrupted leaves stores in which no run begins; repeat it with the same snapshot.

    Args:
        flow: The flow, with the definition that made the states.
        source: The file, or STORE-URL#NAME for a store.
        stores: URL of the store by stage name, from `bind`.
        generation: The generation that the snapshot must be of; None for any.
        accept: `snapshot-versions`: states are published although epochs count on from that of the snapshot.
        progress: Called with the number of states read, and their total.

    Raises:
        UsageError: There is none, or it cannot be read.
        RunRefusedError: It is not a whole snapshot, is of another flow, generation or definition, or a store is not empty.
        StoreError: A store does not answer, or refuses a request. Repeat the restore.
    """
    with opened_snapshot(source, flow.name) as reader:
        if generation not in (None, reader.header.generation):
            raise RunRefusedError(f"{shown(source)} is of generation {reader.header.generation}, not {generation}")
        return restore_states(flow, stores, reader, accept=accept, progress=progress)


@contextmanager
def opened_snapshot(source: Place, flow: str) -> Iterator[SnapshotReader]:
    """A snapshot of a flow, which is whole.

    Raises:
        UsageError: There is none, it cannot be opened, or it is not a regular file.
        RunRefusedError: It is not a whole snapshot, or was changed while it was read.
        StoreError: The store that has it does not answer.
    """
    with opened(source, flow) as file:
        try:
            reader = SnapshotReader(file)
        except DamagedError as error:
            raise RunRefusedError(f"{shown(source)}: {error}. Use another copy of it; nothing was written") from error
        try:
            yield reader
        except DamagedError as error:
            raise RunRefusedError(
                f"{shown(source)} was changed while it was restored: {error}. Repeat the restore with a copy of the snapshot as "
                "it was; or drop the generation (`headwater replay --drop`), and restore another snapshot"
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
