"""The rules of a conditional write, shared by every store that can read the stored states in the same step."""

from collections.abc import Mapping, Sequence

from persistence.errors import Conflict, Fenced, StoreWentBack, Terminal
from persistence.manifest import Manifest
from persistence.names import FlowRef, StageRef
from persistence.protocol import Stored, Write


def check_distinct(stage: StageRef, writes: Sequence[Write]) -> None:
    """Refuse the same key twice (contract 13).

    Raises:
        ValueError: A key occurs twice.
    """
    if len({write.key for write in writes}) < len(writes):
        raise ValueError(f"{stage}: a key occurs twice in one save; each state is written once per batch")


def check_is_epoch(ref: FlowRef | StageRef, epoch: int) -> None:
    """Refuse an epoch below 1: `acquire_epoch` never returns one, so the run has not acquired an epoch.

    Raises:
        ValueError: The epoch is below 1.
    """
    if epoch < 1:
        raise ValueError(f"{ref}: epoch {epoch} is invalid: epochs count from 1; acquire one first")


def check_epoch(ref: FlowRef | StageRef, epoch: int, installed: int) -> None:
    """Compare a writer's epoch with the installed one (contract 5 and 6).

    Raises:
        ValueError: The epoch is below 1.
        Fenced: A higher epoch is installed.
        Terminal: The store does not know the writer's epoch.
    """
    check_is_epoch(ref, epoch)
    if installed > epoch:
        raise Fenced.by(ref, epoch, installed)
    if installed < epoch:
        raise unknown_epoch(ref, epoch, installed)


def unknown_epoch(ref: FlowRef | StageRef, epoch: int, installed: int) -> Terminal:
    """The error of contract 6."""
    return Terminal(
        f"the store has epoch {installed}; this run has epoch {epoch}",
        "The store was emptied or replaced by an older copy while the flow ran. Start the flow again: "
        "the run compares the manifests and reports what is missing",
        ref=ref,
    )


def check_manifest(
    flow: FlowRef, manifest: Manifest, newest: Manifest | None, installed: int, after: tuple[int, int] = (0, 0)
) -> None:
    """Decide whether `manifest` may replace `newest` (contract 18 and 26).

    Raises:
        Fenced: A higher epoch is installed, or a later batch has been saved.
        StoreWentBack: `newest` is older than the manifest of epoch and batch `after`.
        Terminal: The epoch is not known here.
    """
    check_epoch(flow, manifest.epoch, installed)
    found = (newest.epoch, newest.batch) if newest else (0, 0)
    if found < after:
        raise manifest_behind(flow, after, found)
    if newest is not None and (newest.epoch, newest.batch) > (manifest.epoch, manifest.batch):
        raise Fenced(
            f"the manifest of epoch {manifest.epoch}, batch {manifest.batch} comes after "
            f"the one of epoch {newest.epoch}, batch {newest.batch}",
            ref=flow,
        )


def manifest_behind(flow: FlowRef, after: tuple[int, int], found: tuple[int, int]) -> StoreWentBack:
    """The error of contract 26."""
    return StoreWentBack(
        f"the manifest went back: epoch {after[0]}, batch {after[1]} was acknowledged; the store has epoch {found[0]}, "
        f"batch {found[1]}",
        ref=flow,
    )


def check_not_removed(stage: StageRef, writes: Sequence[Write], removed: int | None) -> None:
    """Refuse states that were removed already (contract 30).

    Args:
        stage: For the errors.
        writes: Writes to one bucket.
        removed: Time up to which its states were removed; None if none was.

    Raises:
        Conflict: With the keys of these writes.
    """
    if removed is None:
        return
    if gone := tuple(write.key for write in writes if write.due is not None and write.due <= removed):
        raise Conflict(gone, ref=stage)


def later(first: int | None, second: int | None) -> int | None:
    """The higher of two times; None counts as lower than any."""
    return second if first is None else first if second is None else max(first, second)


def resolve(
    stage: StageRef, writes: Sequence[Write], stored: Mapping[bytes, Stored], *, epoch: int, batch: int
) -> list[Write]:
    """Return the writes that must still be applied, without those that were applied before.

    Args:
        stage: For the errors.
        writes: Writes of one call.
        stored: The existing states of their keys, read in the same atomic step.
        epoch: The writer's epoch.
        batch: The writer's batch.

    Raises:
        Fenced: A state was written by a higher epoch (contract 11).
        Conflict: States have other versions (contract 12).
    """
    todo: list[Write] = []
    changed: list[bytes] = []
    for write in writes:
        state = stored.get(write.key)
        if state is not None and state.epoch > epoch:
            raise Fenced(
                f"the state was written by epoch {state.epoch}; this run has epoch {epoch}", ref=stage, key=write.key
            )
        if write.expected == (state.version if state else 0):
            todo.append(write)
        elif state is None or not _is_retry(write, state, epoch, batch):
            changed.append(write.key)
    if changed:
        raise Conflict(tuple(changed), ref=stage)
    return todo


def _is_retry(write: Write, state: Stored, epoch: int, batch: int) -> bool:
    """Whether `state` is the result of this same write (contract 10)."""
    return (state.version, state.epoch, state.batch) == (
        write.expected + 1,
        epoch,
        batch,
    ) and state.value == write.value
