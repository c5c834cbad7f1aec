"""Which generation of a flow is meant, and on which ones a run may begin."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.run import Run
from persistence.errors import Fenced
from persistence.names import FlowRef, check_generation
from persistence.pointer import Pointer, change_pointer, copy_pointer, load_pointer
from persistence.protocol import StateStore
from persistence.registry import open_stores


def live_generation(flow: Flow[Any], urls: Mapping[str, str]) -> int:
    """The generation of a flow that is live: 1, unless `headwater replay` has swapped in another one.

    Args:
        flow: The flow.
        urls: URL of the store by stage name, from `bind`.

    Raises:
        StoreError: A store does not answer.
    """
    with ExitStack() as stack:
        return load_pointer([*open_stores(urls.values(), stack).values()], flow.name).live


def ref_of(flow: Flow[Any], stores: Mapping[str, StateStore], generation: int | None) -> FlowRef:
    """The generation that is meant.

    Args:
        flow: The flow.
        stores: Open store by stage name.
        generation: Its number; None for the live one.

    Raises:
        ValueError: The number is below 1.
        StoreError: A store does not answer.
    """
    if generation is None:
        generation = load_pointer(list({id(one): one for one in stores.values()}.values()), flow.name).live
    return FlowRef(flow.name, check_generation(flow.name, generation))


def check_live(run: Run, *, rebuilds: bool = False) -> None:
    """Check that a run may begin on its generation.

    Before a run acquires its epoch, this protects a run at work from being fenced. Afterwards it protects the
    generation: a swap that came in between has fenced a lower epoch, or none.

    Args:
        run: The run.
        rebuilds: It is that of a rebuild.

    Raises:
        RunRefusedError: The generation is not live, is being replaced, or is being rebuilt.
    """
    pointer, generation = load_pointer([store for _, store in run.distinct_stores()], run.flow.name), run.ref.generation
    if rebuilds:
        if pointer.rebuild is None or pointer.rebuild.generation != generation:
            raise RunRefusedError(f"{run.ref}: it is not being rebuilt any more: another command has ended the rebuild")
        return
    if why := _refusal(pointer, generation):
        raise RunRefusedError(f"{run.ref}: {why}")


def check_newest(run: Run) -> None:
    """Check that no newer run, and no command, has fenced a run, before it sends what would be of no use.

    Raises:
        Fenced: One has.
        StoreError: The store does not answer.
    """
    newest = run.stores[run.flow.stage_names[0]].installed_epoch(run.ref)
    if newest > run.epoch:
        raise Fenced.by(run.ref, run.epoch, newest)


def settle_pointer(run: Run) -> None:
    """Complete a change of the pointer that crashed between two stores.

    Raises:
        StoreError: A store does not answer, or a command is about to change the pointer.
    """
    copy_pointer([store for _, store in run.distinct_stores()], run.flow.name)


def make_live(run: Run) -> None:
    """Let the runs and readers of stores without a pointer use this run's generation, if there is no other to use.

    Generations that were run by hand before may go on: the pointer does not count them as replaced.

    Raises:
        StoreError: A store does not answer, or a command is about to change the pointer.
    """
    stores, generation = [store for _, store in run.distinct_stores()], run.ref.generation
    pointer = load_pointer(stores, run.flow.name)
    used = FlowRef(run.flow.name, pointer.live)
    if not pointer.version and generation != pointer.live and not any(store.load_manifest(used) for store in stores):
        change_pointer(stores, run.flow.name, pointer, Pointer(live=generation))


def _refusal(pointer: Pointer, generation: int) -> str:
    """Why no run may begin on a generation; empty if it may."""
    if generation == pointer.closing:
        command = "headwater replay --rollback" if pointer.rebuild is None else "headwater replay --swap"
        return (
            f"`{command}` is replacing it, or was interrupted. Wait for its end; after a crash, repeat `{command}`"
            + ("" if pointer.rebuild is None else ", or keep the generation live with `headwater replay --rollback`")
        )
    if pointer.rebuild is not None and generation == pointer.rebuild.generation:
        return "`headwater replay` rebuilds it. Continue it with `headwater replay --apply`, not with a run"
    if generation != pointer.live and generation <= pointer.newest:
        return (
            f"generation {pointer.live} is live. Remove --generation, and `generation` from headwater.toml; to return to the "
            "generation before, use `headwater replay --rollback`"
        )
    return ""
