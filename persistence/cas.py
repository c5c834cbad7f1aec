"""The rules of a conditional write, decided in one place for every store that has the stored states at hand."""

from collections.abc import Mapping, Sequence

from persistence.errors import Conflict, Fenced, StoreWentBack, Terminal
from persistence.manifest import Manifest
from persistence.names import FlowRef, StageRef
from persistence.protocol import Stored, Write


def check_distinct(stage: StageRef, writes: Sequence[Write]) -> None:
    """Refuse the same key twice (contract 13).

    Raises:
        ValueError: A key comes twice.
    """
    if len({write.key for write in writes}) < len(writes):
        raise ValueError(f"{stage}: a key comes twice in one save; each state is written once a batch")


def check_is_term(at: FlowRef | StageRef, term: int) -> None:
    """Refuse a number below 1: `acquire_term` gives none, so it comes from a run that never acquired one.

    Raises:
        ValueError: It is below 1.
    """
    if term < 1:
        raise ValueError(f"{at}: term {term}; terms count from 1, acquire one first")


def check_term(at: FlowRef | StageRef, term: int, installed: int) -> None:
    """Compare a writer's term with the installed one (contract 5 and 6).

    Raises:
        ValueError: The term is none.
        Fenced: A higher one is installed.
        Terminal: The writer's term is not known here.
    """
    check_is_term(at, term)
    if installed > term:
        raise Fenced.by(at, term, installed)
    if installed < term:
        raise unknown_term(at, term, installed)


def unknown_term(at: FlowRef | StageRef, term: int, installed: int) -> Terminal:
    """The error of contract 6."""
    return Terminal(
        f"the store has term {installed}, this run has term {term}",
        "The store was emptied or replaced by an older copy while the flow ran: start the flow again, "
        "it compares the manifests and says what is missing",
        at=at,
    )


def check_manifest(
    flow: FlowRef, manifest: Manifest, newest: Manifest | None, installed: int, after: tuple[int, int] = (0, 0)
) -> None:
    """Decide whether `manifest` may replace `newest` (contract 18 and 26).

    Raises:
        Fenced: A higher term is installed, or a later batch has been saved.
        StoreWentBack: `newest` is older than the manifest of term and batch `after`.
        Terminal: The term is not known here.
    """
    check_term(flow, manifest.term, installed)
    found = (newest.term, newest.batch) if newest else (0, 0)
    if found < after:
        raise manifest_behind(flow, after, found)
    if newest is not None and (newest.term, newest.batch) > (manifest.term, manifest.batch):
        raise Fenced(
            f"the manifest of term {manifest.term}, batch {manifest.batch} comes after "
            f"the one of term {newest.term}, batch {newest.batch}",
            at=flow,
        )


def manifest_behind(flow: FlowRef, after: tuple[int, int], found: tuple[int, int]) -> StoreWentBack:
    """The error of contract 26."""
    return StoreWentBack(
        f"the manifest went back: term {after[0]}, batch {after[1]} was acknowledged, the store has term {found[0]}, "
        f"batch {found[1]}",
        at=flow,
    )


def settle(
    stage: StageRef, writes: Sequence[Write], stored: Mapping[bytes, Stored], *, term: int, batch: int
) -> list[Write]:
    """Return the writes that are still to be applied; those found applied already are left out.

    Args:
        stage: For the errors.
        writes: Writes of one call.
        stored: The states that exist under their keys, read in the same atomic step.
        term: The writer's term.
        batch: The writer's batch.

    Raises:
        Fenced: A state was written by a higher term (contract 11).
        Conflict: States have other versions (contract 12).
    """
    todo: list[Write] = []
    changed: list[bytes] = []
    for write in writes:
        state = stored.get(write.key)
        if state is not None and state.term > term:
            raise Fenced(
                f"the state was written by term {state.term}, this run has term {term}", at=stage, key=write.key
            )
        if write.expected == (state.version if state else 0):
            todo.append(write)
        elif state is None or not _is_retry(write, state, term, batch):
            changed.append(write.key)
    if changed:
        raise Conflict(tuple(changed), at=stage)
    return todo


def _is_retry(write: Write, state: Stored, term: int, batch: int) -> bool:
    """Whether `state` is what this very write has left (contract 10)."""
    return (state.version, state.term, state.batch) == (write.expected + 1, term, batch) and state.value == write.value
