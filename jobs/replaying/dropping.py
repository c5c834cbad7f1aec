"""Drops a generation from the stores of a flow."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from aggregations.definition.flow import Flow
from aggregations.engine.options import RunOptions
from aggregations.errors import RunRefusedError
from aggregations.run.risks import check_accept, refuse
from jobs.replaying.author import Author
from jobs.replaying.generations import Generations, generations_of
from jobs.replaying.planning import live_of
from persistence.findings import Finding
from persistence.names import check_generation
from persistence.pointer import Pointer

NO_ROLLBACK: Final = "no-rollback"
"""Risk of dropping the generation that `headwater replay --rollback` returns to."""


def drop(
    flow: Flow[Any],
    number: int,
    options: RunOptions,
    *,
    why: str,
    take_over: bool = False,
) -> Pointer:
    """Remove a generation that is not live from every store of a flow: its states, manifests and epochs.

    Its number is not used again. After a crash, repeat the call.

    Args:
        flow: The flow. Stages that it does not have any more are dropped, too.
        number: The generation.
        options: Options of its runs: stores; generation, the live one if the stores have no pointer yet, None for 1; and
            accepted risks. With `no-rollback` the generation may be the one that `rollback` returns to.
        why: The reason, for the audit.
        take_over: A run may be at work on it, or did not end cleanly; it is fenced.

    Returns:
        The new pointer.

    Raises:
        ValueError: The number is below 1.
        RunRefusedError: It is live, is being rebuilt or replaced, or does not exist; a run may be at work on it; or a risk is
            not accepted.
        StoreError: A store does not answer, or another command has taken over.
    """
    check_generation(flow.name, number)
    options = options.bound(flow)
    check_accept(flow.name, options.urls, [risk for risk in options.accept if risk != NO_ROLLBACK])
    author = Author.here(why)
    with generations_of(flow, options.urls) as found:
        live = live_of(found, found.pointer(), options.generation)
        return drop_generation(found, author, number, live=live, accept=options.accept, take_over=take_over)


def drop_generation(
    found: Generations,
    author: Author,
    generation: int,
    *,
    live: int,
    accept: Sequence[str] = (),
    take_over: bool = False,
) -> Pointer:
    """Drop a generation; see `drop`.

    1. The pointer notes it. From here on no run begins on the generation, and no rollback returns to it.
    2. Its runs are fenced.
    3. Each store drops it.
    """
    before, ref = found.settled(), found.ref(generation)
    pointer = before if before.version else msgspec.structs.replace(before, live=live, newest=live)
    _check(found, pointer, generation, accept, take_over=take_over)
    if not any((one.what, one.generation) == ("drop", generation) for one in pointer.changes):
        pointer = found.change(
            before,
            live=pointer.live,
            previous=0 if pointer.previous == generation else pointer.previous,
            newest=max(pointer.newest, generation),
            changes=pointer.noting(author.change("drop", generation)).changes,
        )
    found.fence(generation)
    for store in reversed(found.stores):
        store.drop(ref)
    return pointer


def _check(found: Generations, pointer: Pointer, generation: int, accept: Sequence[str], *, take_over: bool) -> None:
    ref = found.ref(generation)
    manifests = [manifest for _, manifest in found.manifests(generation) if manifest is not None]
    restoring = any(manifest.restoring for manifest in manifests)
    if generation in (pointer.live, pointer.closing) and not restoring:
        raise RunRefusedError(f"{ref}: it is live. Drop a generation that is not")
    if found.manifest(pointer.live) is None:
        raise RunRefusedError(
            f"{found.ref(pointer.live)}: it is live, and the stores contain nothing of it: give --store"
        )
    if pointer.rebuild is not None and pointer.rebuild.generation == generation:
        raise RunRefusedError(f"{ref}: it is being rebuilt. Give it up with --abandon first")
    if not manifests and not any(store.installed_epoch(ref) for store in found.stores):
        raise RunRefusedError(f"{ref}: the stores contain nothing of it; if it ran with other stores, give --store")
    refuse(_rollback_of(found, pointer, generation), accept)
    # Swap, rollback and abandon fence the runs of a generation, and none begins on it any more.
    fenced = {pointer.previous, *(one.generation for one in pointer.changes)}
    if not (take_over or generation in fenced or restoring or all(one.clean for one in manifests)):
        raise RunRefusedError(
            f"{ref}: a run may be at work on it: the last one did not end cleanly. Stop it; if it has crashed, give "
            "--take-over, which also fences it"
        )


def _rollback_of(found: Generations, pointer: Pointer, generation: int) -> list[Finding]:
    """The risk of a generation that was live before the live one."""
    if generation != pointer.previous:
        return []
    what = f"{found.ref(generation)}: it was live before generation {pointer.live}, and --rollback returns to it"
    return [Finding(NO_ROLLBACK, what, "Keep it as long as it may be needed", unsafe=True)]
