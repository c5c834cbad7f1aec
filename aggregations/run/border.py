"""States and manifest of one moment: the end of a batch, between two runs.

A run that ends cleanly notes this in its manifests, when it has read whatever an earlier run may have folded. The next
run removes the note before it changes a state. So states belong to a manifest with the note, if the manifest is
the same before and after they are read.
"""

from collections.abc import Iterable

import msgspec

from aggregations.errors import RunRefusedError
from aggregations.run.live import check_live
from aggregations.run.run import Run
from persistence.manifest import Manifest
from persistence.names import FlowRef


def check_border(run: Run, what: str, *, mends: bool = False) -> Manifest:
    """Check that no run is at work and the last one ended cleanly, and return the manifest of the last batch.

    Args:
        run: A run that was opened read-only.
        what: What is done with the states, for the errors.
        mends: A mend is repeated (`aggregations.run.mend`), which may have crashed when some stores had its manifest.

    Raises:
        RunRefusedError: The flow has no states, a run or a mend is at work, or the last one did not end cleanly.
    """
    found = [manifest for _, manifest in run.manifests if manifest is not None]
    if not found:
        raise RunRefusedError(
            f"{run.ref}: the stores contain nothing of it; if it ran with other stores or another generation, give --store "
            "or --generation"
        )
    if any(manifest.mending for manifest in found) and not mends:
        raise RunRefusedError(
            f"{run.ref}: states are being mended, or this was interrupted. To {what}, wait; after a crash, repeat "
            "`headwater replay --key`, or run the flow once with --until-caught-up"
        )
    if not all(manifest.clean and _same(manifest, found[0], mends=mends) for manifest in found):
        check_live(run)  # if no run may begin, another command helps
        raise RunRefusedError(
            f"{run.ref}: a run is at work, or the last one did not end cleanly. To {what}, stop it; after a crash, run it "
            "once with --until-caught-up"
        )
    return found[0]


def check_whole(ref: FlowRef, manifests: Iterable[tuple[str, Manifest | None]]) -> None:
    """Refuse stores that have a part of a snapshot.

    Args:
        ref: The flow and its generation.
        manifests: (name of a store, its manifest).

    Raises:
        RunRefusedError: A restore into one of them was interrupted, or is at work.
    """
    found = [manifest for _, manifest in manifests if manifest is not None and manifest.restoring]
    if found:
        remedy = "`headwater replay --apply`" if found[0].rebuilt else "`headwater restore` with the same file"
        raise RunRefusedError(f"{ref}: a snapshot is being restored, or this was interrupted. Repeat {remedy}")


def check_unchanged(run: Run, what: str) -> None:
    """Check, after the states were read, that the manifests are still those of `check_border`.

    Raises:
        RunRefusedError: A run or a mend has begun since.
    """
    if [(name, store.load_manifest(run.ref)) for name, store in run.distinct_stores()] != list(run.manifests):
        raise RunRefusedError(
            f"{run.ref}: a run began meanwhile, or a mend. To {what}, stop the run, or wait for the mend"
        )


def removed_by_stage(run: Run) -> dict[str, int]:
    """Due time up to which states have left the store, by stage, in seconds since 1970."""
    times = {
        stage: [one.removed for one in buckets.values() if one.removed is not None]
        for stage, buckets in run.buckets().items()
    }
    return {stage: max(found) for stage, found in times.items() if found}


def manifest_alone(manifest: Manifest) -> Manifest:
    """A manifest without what belongs to the store that has it."""
    return msgspec.structs.replace(manifest, kept=(), marks={}, since=0)


def _same(one: Manifest, other: Manifest, *, mends: bool) -> bool:
    """Whether the manifests of two stores are of one batch."""
    return one.positions == other.positions and (mends or (one.epoch, one.batch) == (other.epoch, other.batch))
