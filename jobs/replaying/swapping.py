"""The swap: the rebuild becomes the live generation, or the flow stays as it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from aggregations.errors import RunRefusedError
from aggregations.report import Report
from jobs.replaying.author import Author
from jobs.replaying.folding import Outside
from jobs.replaying.generations import (
    Generations,
    begin_to_send,
    close_live,
    end_swap,
    give_up_swap,
    own_rebuild,
    release,
)
from jobs.replaying.results import Differences, Swapped
from persistence.errors import StoreError
from persistence.manifest import Rebuilt
from persistence.pointer import Pointer


def swap_rebuild(
    found: Generations,
    author: Author,
    pointer: Pointer,
    note: Rebuilt,
    outside: Outside,
    *,
    compare: Callable[[int, int], Differences],
    agreed: Callable[[Differences], bool],
    drop_letters: bool = False,
) -> Swapped:
    """Swap the rebuild that this process is at work on.

    1. The rebuild catches up, while the live generation goes on.
    2. The live generation is fenced: its manifest is final.
    3. The rebuild is folded up to this manifest, so that both have folded the same records.
    4. The differences are shown. Dead letters, outputs that were held, and published states are sent; or dead letters are
       dropped.
    5. The rebuild becomes the live generation.

    If an earlier attempt has begun to publish states, only they and step 5 are left.

    Args:
        found: The generations.
        author: This process.
        pointer: The pointer, as `begin_rebuild` returned it.
        note: The note for the manifests of the rebuild.
        outside: Folds and sends.
        compare: Returns the differences between two generations.
        agreed: Whether to swap, in view of the differences.
        drop_letters: Give up the dead letters that were held, instead of sending them.

    Raises:
        RunRefusedError: The rebuild was stopped, did not fold all that the live generation has, or has a dead letter that
            cannot be dropped.
        StoreError: A store does not answer, or another command has taken over.
    """
    assert pointer.rebuild is not None
    new, old, report = pointer.rebuild.generation, pointer.live, Report()
    if pointer.rebuild.sends:
        return _ended(found, author, outside, Swapped(found.flow.name, new, old, True, report, compare(old, new)))
    if not pointer.closing:
        report.add(outside.fold(found, pointer, note))  # so that the flow stands still for a moment only
        if outside.stopped():
            raise RunRefusedError(f"{found.ref(new)}: stopped before the swap; generation {old} is live and goes on")
        _check_grown(found, old, outside)
    with _reopened(found, author):
        close_live(found, own_rebuild(found, author)[0])
        _check_grown(found, old, outside)
        _check_whole(found, old)
        report.add(outside.fold(found, pointer, note))
        if not found.has_all(new, old):
            raise RunRefusedError(
                f"{found.ref(new)}: it has not folded all that generation {old} has, which stays live: start its run again, "
                "and repeat the command"
            )
        differ = compare(old, new)
        if not agreed(differ):
            give_up_swap(found, author)
            return Swapped(found.flow.name, old, new, False, report, differ)
        own_rebuild(found, author)  # what is sent cannot be fenced
        dropped = outside.drop_letters(found, new, note) if drop_letters else 0
        letters, outputs = outside.send_letters(found, new), outside.send_outputs(found, new)
        # Readers that have seen these states ignore those of a lower generation: from here on there is only the way ahead.
        begin_to_send(found, author)
    swapped = Swapped(found.flow.name, new, old, True, report, differ, letters, outputs=outputs, dropped=dropped)
    return _ended(found, author, outside, swapped)


def _ended(found: Generations, author: Author, outside: Outside, swapped: Swapped) -> Swapped:
    """Publish the states, and make the rebuild the live generation."""
    states = outside.send_states(found, swapped.live, swapped.previous)
    end_swap(found, author)
    return replace(swapped, states=states)


def _check_whole(found: Generations, live: int) -> None:
    """Check that the live generation is not within a batch that has to be repeated as it was.

    It may have published what no other batch gives: other rows are looked up in another one, and a filter over all
    partitions passes on other copies.

    Raises:
        RunRefusedError: It is.
    """
    manifest = found.manifest(live)
    if manifest is not None and manifest.unfinished:
        raise RunRefusedError(
            f"{found.ref(live)}: its run ended within a batch, which only this generation can repeat as it was. It stays live: "
            "start its run, stop it when it has caught up (--until-caught-up), and repeat the command"
        )


def _check_grown(found: Generations, live: int, outside: Outside) -> None:
    """Check that no records wait in a partition that their keys have left since partitions were added.

    Until they are read, states of the live generation evict no position. The rebuild may have seen no growth: for it, the
    partitions may always have been there.

    Raises:
        RunRefusedError: Some may wait.
    """
    if grown := outside.unread_growths(found, live):
        raise RunRefusedError(
            f"{found.ref(live)}: partitions were added to {grown[0]}, and not all records that may be in the wrong one are read. "
            "It stays live: run it until it has read them, and repeat the command"
        )


@contextmanager
def at_work(found: Generations, author: Author) -> Iterator[None]:
    """Note at the end that this process is no longer at work. A process that dies leaves its name behind."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        with suppress(StoreError):
            release(found, author)
        raise
    with suppress(StoreError):
        release(found, author)


@contextmanager
def _reopened(found: Generations, author: Author) -> Iterator[None]:
    """Keep the live generation if the block fails, unless another command has taken over."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        with suppress(StoreError):
            give_up_swap(found, author)
        raise
