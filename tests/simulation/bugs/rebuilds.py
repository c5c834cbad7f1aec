"""Bugs of rebuilds: a swap too early, one that does not stop the flow, outputs that are lost, a wrong way back."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from aggregations.engine import held
from aggregations.run import begin, memory
from jobs.replaying import generations, swapping
from jobs.replaying.generations import Generations
from persistence import pointer
from persistence.commit.faults import POINTER, effect
from persistence.epochs import take_epoch
from persistence.errors import Fenced
from persistence.names import FlowRef
from persistence.pointer import Pointer
from tests.simulation.patch import Patch, original

_roll_back = original(generations, "roll_back")
_save = original(pointer, "_save")


def _closed_but_running(found: Generations, before: Pointer) -> Pointer:
    return found.change(before, closing=before.live)


def _to_where_the_other_is(found: Generations, author: Any) -> Pointer:
    """Roll back, and let the earlier generation continue where the later one is."""
    now: Pointer = _roll_back(found, author)
    for store in found.stores:
        ahead, behind = (store.load_manifest(found.ref(one)) for one in (now.previous, now.live))
        if ahead and behind:
            epoch = store.installed_epoch(found.ref(now.live))
            with suppress(Fenced):
                store.save_manifest(
                    found.ref(now.live), msgspec.structs.replace(behind, positions=ahead.positions, epoch=epoch)
                )
    return now


def _to_the_first_store(stores: Sequence[Any], flow: str, before: Pointer, after: Pointer) -> Pointer:
    epoch = take_epoch(FlowRef(flow, 0), stores, point=POINTER)
    effect(POINTER, lambda: _save(stores[0], flow, after, epoch))
    return after


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "rebuild-swaps-too-early": (
        "a swap does not wait until the rebuild has folded what the live generation has",
        [(Generations, "has_all", lambda *_: True), (swapping, "close_live", _closed_but_running)],
    ),
    "rebuild-runs-begin-during-a-swap": (
        "a run begins on a generation that is being replaced",
        [(begin, "check_live", lambda *_, **__: None)],
    ),
    "rebuild-holds-no-outputs": ("outputs of a rebuild are not held", [(memory, "_hold", lambda *_: None)]),
    "rebuild-keeps-sent-outputs": (
        "outputs that a swap has sent stay held, and are sent again",
        [(held, "forget_held", lambda *_, **__: None)],
    ),
    "rebuild-rolls-back-without-catching-up": (
        "after a rollback the flow continues where the other generation was",
        [(generations, "roll_back", _to_where_the_other_is)],
    ),
    "rebuild-points-in-one-store": (
        "the pointer is written to one store only",
        [(pointer, "_write", _to_the_first_store)],
    ),
    "rebuild-rolls-back-beside-a-run": (
        "a rollback does not fence the runs of the generation that it replaces",
        [(generations, "close_live", _closed_but_running)],
    ),
}
