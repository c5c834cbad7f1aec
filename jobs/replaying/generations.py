"""The generations of a flow in its stores, and the steps by which one replaces another.

Each step is one change of the pointer, so a process that dies leaves the flow before or after it:

1. `begin_rebuild` names the next generation and the process that is at work on it. It folds, while the live one goes on.
2. `close_live` notes that the live generation is being replaced, then fences it. From here on its manifest is final.
3. The rebuild is folded up to that manifest.
4. `end_swap` makes the rebuild the live generation.

`reopen` returns from 2 or 3, and `roll_back` from 4. A step that was interrupted is repeated.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.begin import opened
from aggregations.run.common import common
from aggregations.run.run import Run
from envelope import TopicPartition
from jobs.replaying.author import Author
from persistence.commit.faults import EPOCH
from persistence.epochs import take_epoch
from persistence.manifest import Manifest, Progress, Rebuilt
from persistence.names import FlowRef
from persistence.pointer import Origin, Pointer, Rebuild, change_pointer, copy_pointer, load_pointer
from persistence.protocol import StateStore


@dataclass(frozen=True, slots=True)
class Generations:
    """The generations of a flow.

    Attributes:
        flow: The flow, with the new definition.
        run: Its open stores.
    """

    flow: Flow[Any]
    run: Run

    @property
    def stores(self) -> list[StateStore]:
        """The stores, each once, that of the first stage first."""
        return [store for _, store in self.run.distinct_stores()]

    def pointer(self) -> Pointer:
        """The current pointer."""
        return load_pointer(self.stores, self.flow.name)

    def settled(self) -> Pointer:
        """The current pointer, after an interrupted change of it is completed in every store."""
        return copy_pointer(self.stores, self.flow.name)

    def change(self, before: Pointer, **changed: Any) -> Pointer:
        """Change the pointer, if it is still the one that was read.

        Raises:
            Fenced: Another command has changed it.
        """
        return change_pointer(self.stores, self.flow.name, before, msgspec.structs.replace(before, **changed))

    def ref(self, generation: int) -> FlowRef:
        """The identity of a generation."""
        return FlowRef(self.flow.name, generation)

    def manifests(self, generation: int) -> list[tuple[str, Manifest | None]]:
        """(first stage of the store, its manifest), upstream first."""
        ref = self.ref(generation)
        return [(name, store.load_manifest(ref)) for name, store in self.run.distinct_stores()]

    def manifest(self, generation: int) -> Manifest | None:
        """What all stores have of a generation; None if one of them has nothing."""
        found = [manifest for _, manifest in self.manifests(generation)]
        return None if None in found else common(found, self.ref(generation), finishes=self.flow.notes_batches)

    def positions(self, generation: int) -> dict[TopicPartition, int]:
        """Offset up to which every store has folded a generation, by topic and partition of the flow."""
        return {place: progress.next_offset for place, progress in self.progress(generation).items()}

    def progress(self, generation: int) -> dict[TopicPartition, Progress]:
        """Progress that every store has of a generation, by topic and partition of the flow."""
        manifest = self.manifest(generation)
        return {
            TopicPartition(topic, partition): progress
            for topic, partitions in (manifest.positions if manifest else {}).items()
            for partition, progress in partitions.items()
            if topic in self.flow.topics
        }

    def behind(self, generation: int, other: int) -> int:
        """Number of offsets that one generation has folded and another has not."""
        mine = self.positions(generation)
        return sum(max(end - mine.get(place, 0), 0) for place, end in self.positions(other).items())

    def has_all(self, generation: int, other: int) -> bool:
        """Whether a generation has folded exactly what another one has, of the topics that both read."""
        mine = self.positions(generation)
        return all(mine.get(place) == end for place, end in self.positions(other).items())

    def fence(self, generation: int) -> None:
        """Fence every run of a generation in every store."""
        take_epoch(self.ref(generation), self.stores, point=EPOCH)

    def next_unused(self, number: int) -> int:
        """The lowest generation above `number` which no store has anything of."""
        number += 1
        while any(
            store.installed_epoch(self.ref(number)) or store.load_manifest(self.ref(number)) for store in self.stores
        ):
            number += 1
        return number


@contextmanager
def generations_of(flow: Flow[Any], urls: Mapping[str, str]) -> Iterator[Generations]:
    """The generations of a flow, on open stores.

    Args:
        flow: The flow.
        urls: URL of the store by stage name, from `bind`.

    Raises:
        StoreError: A store cannot be opened.
    """
    with opened(flow, urls, 1) as run:
        pass
    with closing(run):
        yield Generations(flow, run)


def pointer_of(flow: Flow[Any], stores: Mapping[str, str]) -> Pointer:
    """The pointer of a flow: its live generation, the rebuild under way, and who changed them, when and why.

    Args:
        flow: The flow.
        stores: URL of the store by stage name, from `bind`.

    Raises:
        StoreError: A store does not answer.
    """
    with generations_of(flow, stores) as found:
        return found.pointer()


def check_worker(ref: FlowRef, rebuild: Rebuild, author: Author, *, take_over: bool) -> None:
    """Check that no other process is at work on a rebuild.

    Raises:
        RunRefusedError: One is, or may be.
    """
    if not rebuild.worker or take_over or author.may_follow(rebuild.worker):
        return
    raise RunRefusedError(
        f"{ref}: another `headwater replay` is at work on it: {rebuild.process}. Wait for its end; if it has "
        "crashed, give --take-over, which also fences it"
    )


def begin_rebuild(
    found: Generations,
    author: Author,
    *,
    live: int,
    redefined: bool,
    take_over: bool = False,
    origin: Origin | None = None,
    outputs: bool | None = None,
) -> tuple[Pointer, Rebuilt]:
    """Name the next generation and this process in the pointer, or continue the rebuild that it names.

    Args:
        found: The generations.
        author: Who begins it.
        live: The generation that is live, for stores without a pointer.
        redefined: The definition differs from that of the live generation.
        take_over: Continue the rebuild although another process may be at work on it.
        origin: The snapshot that the rebuild begins with; None for the flow's start, or to continue.
        outputs: Whether its outputs are held until the swap; None to continue, or not to hold them.

    Returns:
        The pointer, and the note for the manifests of the rebuild.

    Raises:
        RunRefusedError: Another process is at work on the rebuild, or it began with something else.
        Fenced: Another command has changed the pointer meanwhile.
    """
    pointer = found.settled()
    rebuild = pointer.rebuild
    if rebuild is not None:
        ref = found.ref(rebuild.generation)
        check_worker(ref, rebuild, author, take_over=take_over)
        check_origin(ref, rebuild, origin)
        if outputs is not None and outputs != rebuild.outputs:
            kept = "held" if rebuild.outputs else "dropped"
            raise RunRefusedError(
                f"{ref}: the outputs of its rebuild are {kept} since it began. Continue it without --outputs, or give it up "
                "with --abandon"
            )
        continued = msgspec.structs.replace(
            rebuild,
            worker=author.worker,
            origin=origin or rebuild.origin,
            redefined=rebuild.redefined or redefined,  # it may have died before it wrote anything
        )
        pointer = found.change(pointer, rebuild=continued)
    else:
        live = pointer.live if pointer.version else live
        number = found.next_unused(max(pointer.newest, live))
        began = author.change("rebuild", number)
        pointer = found.change(
            pointer,
            live=live,
            newest=number,
            rebuild=Rebuild(number, live, author.worker, redefined, origin, bool(outputs)),
            changes=pointer.noting(began).changes,
        )
    assert pointer.rebuild is not None
    number = pointer.rebuild.generation
    [*_, first] = (one for one in pointer.changes if (one.what, one.generation) == ("rebuild", number))
    continues = pointer.rebuild.origin.generations if pointer.rebuild.origin else ()
    return pointer, Rebuilt(pointer.rebuild.replaces, first.at_ms, first.by, first.why, continues)


def check_origin(ref: FlowRef, rebuild: Rebuild, origin: Origin | None) -> None:
    """Check that a rebuild began with a snapshot, if one is given.

    Raises:
        RunRefusedError: It began with another one, or where the flow began.
    """
    if origin is None or (rebuild.origin is not None and rebuild.origin.checksum == origin.checksum):
        return
    began = "where the flow began" if rebuild.origin is None else f"with another snapshot, {rebuild.origin.file}"
    raise RunRefusedError(
        f"{ref}: its rebuild began {began}. Continue it without --snapshot, or give it up with --abandon"
    )


def release(found: Generations, author: Author) -> None:
    """Note that this process is no longer at work on the rebuild.

    Raises:
        Fenced: Another command changes the pointer.
    """
    pointer = found.pointer()
    if pointer.rebuild is not None and pointer.rebuild.worker == author.worker:
        found.change(pointer, rebuild=msgspec.structs.replace(pointer.rebuild, worker=""))


def own_rebuild(found: Generations, author: Author) -> tuple[Pointer, Rebuild]:
    """The pointer and the rebuild, if this process is the one that is at work on it.

    Raises:
        RunRefusedError: Another command has taken over, or has ended the rebuild.
    """
    pointer = found.pointer()
    if pointer.rebuild is None or pointer.rebuild.worker != author.worker:
        raise RunRefusedError(f"flow {found.flow.name}: another command has taken over the rebuild, or has ended it")
    return pointer, pointer.rebuild


def close_live(found: Generations, pointer: Pointer) -> Pointer:
    """Note that the live generation is being replaced, and fence its runs. Its manifest is final afterwards.

    Args:
        found: The generations.
        pointer: The pointer.

    Raises:
        Fenced: Another command has changed the pointer, or a run began that had read it before.
    """
    if pointer.closing != pointer.live:
        pointer = found.change(pointer, closing=pointer.live)
    found.fence(pointer.live)
    return pointer


def end_swap(found: Generations, author: Author) -> Pointer:
    """Make the rebuild the live generation.

    Raises:
        RunRefusedError: It has not folded exactly what the live generation has, or this is not known for certain.
    """
    pointer, rebuild = own_rebuild(found, author)
    if pointer.closing != pointer.live:
        raise RunRefusedError(f"{found.ref(pointer.live)}: another command has kept it live")
    if not found.has_all(rebuild.generation, pointer.live):
        raise RunRefusedError(
            f"{found.ref(rebuild.generation)}: it has not folded what generation {pointer.live} has. Repeat the command"
        )
    swapped = author.change("swap", rebuild.generation)
    return found.change(
        pointer,
        live=rebuild.generation,
        previous=pointer.live,
        closing=0,
        rebuild=None,
        changes=pointer.noting(swapped).changes,
    )


def begin_to_send(found: Generations, author: Author) -> None:
    """Note that readers may see states of the rebuild from here on: a repeated swap goes ahead.

    Raises:
        RunRefusedError: Another command has taken over the rebuild.
        Fenced: Another command changes the pointer.
    """
    pointer, rebuild = own_rebuild(found, author)
    found.change(pointer, rebuild=msgspec.structs.replace(rebuild, sends=True))


def give_up_swap(found: Generations, author: Author) -> None:
    """Keep the live generation after a swap of this process, unless another one has taken over.

    Raises:
        Fenced: Another command changes the pointer.
    """
    with suppress(RunRefusedError):
        reopen(found, author, own_rebuild(found, author)[0])


def reopen(found: Generations, author: Author, pointer: Pointer) -> Pointer:
    """Keep the live generation, after a swap that was interrupted.

    Raises:
        Fenced: Another command changes the pointer, or has changed it since.
    """
    kept = author.change("rollback", pointer.live)
    rebuild = pointer.rebuild and msgspec.structs.replace(pointer.rebuild, worker="", sends=False)
    return found.change(pointer, closing=0, rebuild=rebuild, changes=pointer.noting(kept).changes)


def roll_back(found: Generations, author: Author) -> Pointer:
    """Make the generation that was live before the live one again.

    Raises:
        RunRefusedError: No generation was live before, or it was dropped.
        Fenced: Another command changes the pointer.
    """
    pointer = found.settled()
    if not pointer.previous or found.manifest(pointer.previous) is None:
        raise RunRefusedError(
            f"flow {found.flow.name}: no earlier generation is left that was live"
            + (f"; generation {pointer.previous} was dropped" if pointer.previous else "")
        )
    pointer = close_live(found, pointer)
    back = author.change("rollback", pointer.previous)
    return found.change(
        pointer,
        live=pointer.previous,
        previous=pointer.live,
        closing=0,
        changes=pointer.noting(back).changes,
    )


def abandon(found: Generations, author: Author, *, take_over: bool = False) -> Pointer:
    """Give up the rebuild. Its states stay in the stores.

    Raises:
        RunRefusedError: There is none, a swap is under way, or another process is at work on it.
        Fenced: Another command changes the pointer.
    """
    pointer = found.settled()
    rebuild = pointer.rebuild
    if rebuild is None:
        raise RunRefusedError(f"flow {found.flow.name}: no generation is being rebuilt")
    if pointer.closing:
        raise RunRefusedError(
            f"flow {found.flow.name}: a swap was interrupted. First keep generation {pointer.live} with --rollback"
        )
    check_worker(found.ref(rebuild.generation), rebuild, author, take_over=take_over)
    given_up = author.change("abandon", rebuild.generation)
    pointer = found.change(pointer, rebuild=None, changes=pointer.noting(given_up).changes)
    found.fence(rebuild.generation)
    return pointer
