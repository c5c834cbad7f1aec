"""Restores a snapshot into stores that contain nothing of the flow.

Every store first gets a manifest that notes the snapshot, with which no run begins; then the states; then the manifest
of the snapshot, with the marks that the new store acknowledged. A restore that was interrupted at any point is repeated
with the same snapshot.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from aggregations.run.begin import opened
from aggregations.run.border import manifest_alone
from aggregations.run.live import check_live, make_live, settle_pointer
from aggregations.run.run import Run
from aggregations.run.states import due_of
from persistence.commit.faults import EPOCH, RESTORE, effect
from persistence.epochs import take_epoch
from persistence.manifest import GivenUp, Manifest, Rebuilt
from persistence.protocol import Write
from persistence.snapshot_file import Header, SnapshotReader


@dataclass(slots=True)
class Restored:
    """Result of a restore.

    Attributes:
        states: Number of states in the stores, by stage.
        expired: Number of states in the snapshot whose time was over when it was made, and which were left out.
        epoch: Epoch under which they were written.
        batch: Batch that the states are of.
    """

    states: dict[str, int]
    expired: int
    epoch: int
    batch: int

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


def restore_states(
    flow: Flow[Any],
    urls: Mapping[str, str],
    snapshot: SnapshotReader,
    *,
    accept: Sequence[str] = (),
    progress: Callable[[int, int], Any] = lambda _done, _total: None,
) -> Restored:
    """Write the states and the manifest of a snapshot into empty stores, under a new epoch.

    Args:
        flow: The flow, with the definition that made the states.
        urls: URL of the store by stage name, from `bind`.
        snapshot: The snapshot.
        accept: `snapshot-versions`: states are published although epochs count on from that of the snapshot.
        progress: Called with the number of states read, and their total.

    Raises:
        FlowError: The risk does not exist.
        RunRefusedError: The snapshot is of another flow or definition, a store is not empty, or the flow publishes
            states and the risk is not accepted.
        Fenced: A run, or another restore, has begun meanwhile.
        StoreError: A store does not answer. Repeat the restore.
    """
    header, manifest = snapshot.header, snapshot.header.manifest
    _check_accepted(flow, header, accept)
    with opened(flow, urls, header.generation) as run:
        run.rebuilt = manifest.rebuilt
        try:
            return _restore(run, snapshot, manifest, progress)
        finally:
            run.close()


def begin_with_snapshot(
    flow: Flow[Any], urls: Mapping[str, str], snapshot: SnapshotReader, *, generation: int, note: Rebuilt
) -> None:
    """Write the states and the manifest of a snapshot into a generation that is being rebuilt; see `restore_states`.

    Windows that publish their state when they close are published again by this generation, as far as they are still in
    the snapshot.

    Args:
        flow: The flow, with the definition that made the states.
        urls: URL of the store by stage name, from `bind`.
        snapshot: The snapshot, of any generation.
        generation: The generation that is rebuilt, which contains nothing, or a part of this snapshot.
        note: The note for its manifests.

    Raises:
        RunRefusedError: The snapshot is of another flow or definition, or the generation contains other states.
        Fenced: Another command has begun meanwhile.
        StoreError: A store does not answer. Repeat it.
    """
    check_made_by(flow, snapshot.header)
    with opened(flow, urls, generation) as run:
        run.rebuilt = note
        manifest = msgspec.structs.replace(snapshot.header.manifest, rebuilt=note, published={})
        try:
            _restore(run, snapshot, manifest, lambda _done, _total: None, rebuilds=True)
        finally:
            run.close()


SNAPSHOT_VERSIONS = "snapshot-versions"
"""Risk of states that are published by runs of lower epochs than before: readers keep those of the higher epochs."""


def check_made_by(flow: Flow[Any], header: Header) -> None:
    """Check that a snapshot was made by a flow.

    Raises:
        RunRefusedError: It is of another flow.
        DefinitionChangedError: It was made by another definition.
    """
    if header.flow != flow.name:
        raise RunRefusedError(f"the snapshot is of flow {header.flow}, not of flow {flow.name}")
    made_by = header.manifest.definitions
    if dict(made_by) != flow.definitions or list(made_by) != list(flow.definitions):
        raise DefinitionChangedError(
            f"flow {flow.name}: the snapshot was made by another definition of its stages. Use it with the code that made it"
        )


def _check_accepted(flow: Flow[Any], header: Header, accept: Sequence[str]) -> None:
    if unknown := sorted({*accept} - {SNAPSHOT_VERSIONS}):
        raise FlowError(f"restore: unknown risk {', '.join(unknown)}; choose from {SNAPSHOT_VERSIONS}")
    check_made_by(flow, header)
    publishing = [stage for stage in flow.stages if stage.state_topics]
    if publishing and SNAPSHOT_VERSIONS not in accept:
        name, topic = publishing[0].name, publishing[0].state_topics[0]
        raise RunRefusedError(
            f"flow {flow.name}: stage {name} publishes its states to {topic}. The epochs of runs count on from that of the "
            "snapshot, so readers of this topic would ignore what they publish. Publish to another topic, or let readers "
            f"begin anew (--accept {SNAPSHOT_VERSIONS})"
        )


def _restore(
    run: Run,
    snapshot: SnapshotReader,
    manifest: Manifest,
    progress: Callable[[int, int], Any],
    *,
    rebuilds: bool = False,
) -> Restored:
    header = snapshot.header
    _check_empty(run, snapshot, manifest)
    if plain := [stage for stage in header.removed if not run.stores[stage].capabilities.marked]:
        raise RunRefusedError(
            f"{run.ref}: the store of stage {plain[0]} does not keep until when states left: use another one"
        )
    check_live(run, rebuilds=rebuilds)
    stores = [store for _, store in run.distinct_stores()]
    run.epoch = take_epoch(run.ref, stores, above=manifest.epoch, point=EPOCH)
    check_live(run, rebuilds=rebuilds)
    settle_pointer(run)
    _check_empty(run, snapshot, manifest)  # what a run wrote before this epoch
    if not rebuilds:
        make_live(run)  # the next run without a generation would begin a flow of its own
    run.acknowledged.learn(run.manifests, run.buckets())
    run.earlier, run.times = manifest.earlier, manifest.times
    run.given_up = (*manifest.given_up, GivenUp(manifest.epoch, manifest.batch, run.epoch))
    note = Manifest(run.epoch, manifest.batch, restoring=snapshot.checksum)
    run.save_everywhere(note, RESTORE)
    # The states in the snapshot are those of its manifest: from here on they are the next batch of this epoch.
    run.manifest = msgspec.structs.replace(note, batch=manifest.batch - 1)
    states, expired, done, total = dict.fromkeys(header.stages, 0), 0, 0, sum(snapshot.counts.values())
    for stage, found in snapshot.states():
        gone = header.removed.get(stage)
        writes = [
            Write(key, 0, value, due)
            for key, value in found
            if (due := due_of(run.flow.stage(stage), run.ref.stage(stage), key, value)) is None
            or gone is None
            or due > gone
        ]
        effect(RESTORE, lambda stage=stage, writes=writes: _save(run, stage, writes))  # type: ignore[misc]
        states[stage] += len(writes)
        expired += len(found) - len(writes)
        done += len(found)
        progress(done, total)
    for stage, until in header.removed.items():
        effect(RESTORE, lambda stage=stage, until=until: _remove(run, stage, until))  # type: ignore[misc]
    run.save_everywhere(msgspec.structs.replace(manifest, epoch=run.epoch, clean=True), RESTORE)
    return Restored(states, expired, run.epoch, manifest.batch)


def _check_empty(run: Run, snapshot: SnapshotReader, manifest: Manifest) -> None:
    """Check that each store contains nothing of the flow, or what an interrupted restore of this snapshot wrote."""
    run.manifests = [(name, store.load_manifest(run.ref)) for name, store in run.distinct_stores()]
    interrupted = any(found.restoring for _, found in run.manifests if found is not None)
    homes = run.homes()
    for name, found in run.manifests:
        if found is not None and found.restoring not in ("", snapshot.checksum):
            raise RunRefusedError(
                f"{run.ref}: a restore of another snapshot was interrupted. Repeat that one, or drop the generation "
                f"(`headwater replay --drop {run.ref.generation}`)"
            )
        if found is None:
            stages = [stage for stage in run.flow.stages if homes[stage.name] == name]
            written = any(_any(run.stores[stage.name].scan(run.stage_ref(stage))) for stage in stages)
        else:
            written = not found.restoring and not (interrupted and _is_restored(found, manifest))
        if written:
            raise RunRefusedError(
                f"{run.ref}: the store of stage {name} contains states of it. Restore into empty stores (--store), or drop "
                "the generation first"
            )


def _is_restored(found: Manifest, manifest: Manifest) -> bool:
    """Whether a store's manifest is the one that a restore ends with: whatever its epoch."""
    alone = msgspec.structs.replace(manifest_alone(found), epoch=manifest.epoch, times=manifest.times)
    return msgspec.structs.replace(alone, given_up=manifest.given_up) == manifest


def _any(found: Iterable[object]) -> bool:
    return any(True for _ in found)


def _save(run: Run, stage: str, writes: Sequence[Write]) -> None:
    """Write the states that are not there yet: a restore that was interrupted may have written some."""
    ref, store = run.ref.stage(stage), run.stores[stage]
    there = store.load(ref, [write.key for write in writes])
    left = [write for write in writes if write.key not in there or there[write.key].value != write.value]
    if any(write.key in there for write in left):
        raise RunRefusedError(
            f"{ref}: the store has other states than the snapshot. Drop the generation, then repeat it"
        )
    marks = store.save(
        ref,
        left,
        epoch=run.epoch,
        batch=run.batch,
        known=run.known.of(stage),
        downstream=run.known.downstream(stage),
    )
    run.known.note(stage, marks)


def _remove(run: Run, stage: str, until: int) -> None:
    """Let the store know up to which time states have left: a copy of their events finds no state that knows it."""
    store = run.stores[stage]
    found = store.remove(run.ref.stage(stage), until, epoch=run.epoch, batch=run.batch, known=run.known.of(stage))
    run.known.note(stage, found.marks)
