"""Rebuilds the states of a flow into a new generation while the live one goes on, and swaps the two."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.archived import topics_with_archive
from aggregations.engine.options import RunOptions, outputs_of
from aggregations.errors import RunRefusedError
from aggregations.local.runner import run_local
from aggregations.report import Report
from aggregations.run.plan import Plan
from aggregations.run.restore import SNAPSHOT_VERSIONS
from aggregations.run.risks import Risk, check_accept, refuse, unsafe
from jobs.comparing import SAMPLE
from jobs.environment import UsageError
from jobs.refolding.fold import WORK
from jobs.replaying import generations as steps
from jobs.replaying.author import Author
from jobs.replaying.beginning import beginning_of
from jobs.replaying.differences import check_against, differences
from jobs.replaying.dropping import drop
from jobs.replaying.folding import Folding, Runner
from jobs.replaying.generations import Generations, generations_of, pointer_of
from jobs.replaying.planning import (
    ReplayPlan,
    check_definition,
    check_generations,
    check_open,
    deleted_records,
    keys_of,
    live_of,
    newest_rows,
    ranges_of,
    reading_rate,
    replaced_topics,
    topics_since,
)
from jobs.replaying.results import Differences, Replayed, Swapped
from jobs.replaying.swapping import at_work, swap_rebuild
from jobs.snapshot_places import Place
from persistence.findings import Finding
from persistence.kafka import Topics
from persistence.pointer import Pointer

__all__ = [
    "Differences",
    "ReplayPlan",
    "Replayed",
    "Swapped",
    "abandon",
    "drop",
    "plan_replay",
    "pointer_of",
    "rebuild",
    "rollback",
    "swap",
]

Progress = Callable[[int, int | None], Any]


def _no_progress(_done: int, _total: int | None) -> None:
    """Show nothing."""


def plan_replay(
    flow: Flow[Any],
    options: RunOptions,
    *,
    redefine: bool = False,
    snapshot: Place | None = None,
    sample: int = SAMPLE,
    against: Flow[Any] | None = None,
    work: Path = WORK,
    progress: Progress = _no_progress,
) -> ReplayPlan:
    """Show what a rebuild would read, or what is left of it, and why it would be refused. Nothing is written.

    Args:
        flow: The flow, with the definition of the new states.
        options: As for `rebuild`.
        redefine: The new states have another definition.
        snapshot: As for `rebuild`.
        sample: Differences of each stage that are kept, if the rebuild has begun.
        against: As for `swap`.
        work: As for `swap`.
        progress: Called with the number of states counted or compared, and None.

    Raises:
        RunRefusedError: A rebuild would be unsafe.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer.
    """
    options = options.bound(flow)
    check_accept(flow.name, options.urls, options.accept)
    kafka = options.broker
    with generations_of(flow, options.urls) as found:
        pointer = found.pointer()
        live = live_of(found, pointer, options.generation)
        redefined = _check(found, pointer, live, redefine=redefine)
        check_against(found, live, against)
        if pointer.rebuild is not None:
            number = pointer.rebuild.generation
        else:
            number = found.next_unused(max(pointer.newest, live))
        begins = beginning_of(found, pointer, live, snapshot)
        topics = topics_with_archive(options, flow)
        ranges = ranges_of(found, live, number, topics, begins.manifest if begins else None)
        topics.check_rights(read={one.topic for one in ranges})
        risks = [
            *_begins(found, pointer, live, snapshot),
            *topics_since(found, live, number),
            *deleted_records(found, ranges, topics),
        ]
        keys = keys_of(found, live, progress)
        rate = reading_rate(kafka, ranges)
        differ = None
        if found.manifest(number) is not None and begins is None:
            differ = differences(found, live, number, sample=sample, work=work, against=against, progress=progress)
        origin = begins.origin if begins else pointer.rebuild.origin if pointer.rebuild else None
        return ReplayPlan(
            *(flow.name, live, number, pointer.rebuild is not None, redefined, ranges, keys, rate, pointer, differ),
            snapshot=None if origin is None else origin.file,
            refused=[one for one in risks if one.risk not in options.accept],
        )


def rebuild(
    flow: Flow[Any],
    options: RunOptions,
    *,
    why: str,
    redefine: bool = False,
    snapshot: Place | None = None,
    outputs: bool | None = None,
    take_over: bool = False,
    runner: Runner = run_local,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
) -> Replayed:
    """Rebuild the flow into its next generation, up to what the live one has read; or continue this rebuild.

    The run of the live generation goes on. Nothing is sent, dead letters are held until the swap, and no group offsets are
    committed. After a crash at any point, repeat the call.

    Args:
        flow: The flow, with the definition of the new states.
        options: Options of its runs: cluster, stores of the live generation, dead letters, accepted risks, `max_records` and
            `metadata_max_age`; other fields are not used. The generation is the live one of a flow whose stores have no
            pointer yet, None for 1. Further risks are `lost-records`: records that Kafka has deleted may be missing in the
            new states; and `newest-rows`: lookups may find the newest rows of their tables.
        why: The reason, for the audit.
        redefine: The new states have another definition.
        snapshot: File of `headwater snapshot`, made by this definition: the rebuild begins with its states and reads what
            comes after them. It is needed by the call that begins the rebuild. None for where the flow began.
        outputs: True: what the flow publishes of each element is held in the store of its first stage, and sent by the
            swap. False: it is dropped. None: as when the rebuild began, and False for a new one.
        take_over: Continue the rebuild of another process, which is fenced.
        runner: What folds the records.
        progress: Called after each batch with its report.
        planned: Called for each source with its plan: where each partition starts.
        stop: Set it to end after the current batch.

    Raises:
        UsageError: The snapshot cannot be read.
        RunRefusedError: It would be unsafe, or another process is at work on the rebuild. Or the snapshot is of another flow
            or definition, is ahead of the live generation, or is not the one that the rebuild began with.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or another command has taken over.
    """
    how = _folding(flow, options, runner, progress, planned, stop, snapshot)
    accept = how.options.accept
    author = Author.here(why)
    with generations_of(flow, how.options.urls) as found:
        pointer = found.pointer()
        live = live_of(found, pointer, options.generation)
        redefined = _check(found, pointer, live, redefine=redefine)
        refuse(_begins(found, pointer, live, snapshot), accept)
        begins = beginning_of(found, pointer, live, snapshot)
        if pointer.rebuild is None:  # before anything is written
            topics = topics_with_archive(how.options, flow)
            ranges = ranges_of(found, live, None, topics, begins.manifest if begins else None)
            refuse(deleted_records(found, ranges, topics), accept)
            topics.check_rights(read={one.topic for one in ranges})
        how.check()
        pointer, note = steps.begin_rebuild(
            *(found, author),
            live=live,
            redefined=bool(redefined),
            take_over=take_over,
            origin=begins.origin if begins else None,
            outputs=outputs,
        )
        assert pointer.rebuild is not None
        number = pointer.rebuild.generation
        with at_work(found, author):
            report = how.fold(found, pointer, note)
        return Replayed(flow.name, number, live, report, found.behind(number, live))


def swap(
    flow: Flow[Any],
    options: RunOptions,
    *,
    why: str,
    take_over: bool = False,
    agreed: Callable[[Differences], bool] = lambda _: True,
    sample: int = SAMPLE,
    against: Flow[Any] | None = None,
    work: Path = WORK,
    drop_letters: bool = False,
    compared: Progress = _no_progress,
    runner: Runner = run_local,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
) -> Swapped:
    """Fold what is left, stop the run of the live generation, compare the two, and make the rebuild the live generation.

    The live generation is fenced when the rebuild has caught up with it; what it has read in the meantime is folded then.
    So both have folded the same records, and the next run continues with the records after them. If the call fails before
    the swap, the live generation stays live: start its run again. After a crash, repeat the call, or call `rollback`.

    Args:
        flow: The flow, with the definition of the rebuild.
        options: As for `rebuild`; without a generation, which would win over the pointer.
        why: The reason, for the audit.
        take_over: Take over from another process, which is fenced.
        agreed: Called with the differences before the swap; if it returns False, the live generation stays live.
        sample: Differences of each stage that are kept.
        against: The flow with the definition of the live generation, if the rebuild has another one: for the differences
            of stages whose definition has changed.
        work: Directory for copies of states while they are compared.
        drop_letters: Give up the dead letters that the rebuild held, as `discard` does, instead of sending them.
        compared: Called with the number of states compared, and None.
        runner: What folds the records.
        progress: Called after each batch with its report.
        planned: Called for each source with its plan: where each partition starts.
        stop: Set it to end after the current batch.

    Raises:
        RunRefusedError: There is no rebuild, or it would be unsafe.
        UsageError: `generation` is given: the pointer cannot override it.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or another command has taken over.
    """
    how = _folding(flow, options, runner, progress, planned, stop)
    if options.generation is not None:
        raise UsageError(
            f"flow {flow.name}: remove `generation` from headwater.toml before the swap: runs and readers would not follow it"
        )
    author = Author.here(why)
    with generations_of(flow, how.options.urls) as found:
        pointer = found.pointer()
        if pointer.rebuild is None:
            raise RunRefusedError(
                f"flow {flow.name}: no generation is being rebuilt; generation {pointer.live} is live. Rebuild one with --apply"
            )
        check_generations(found, pointer.live)
        check_definition(found, pointer, pointer.live, redefine=False)
        check_against(found, pointer.live, against)
        how.check()
        pointer, note = steps.begin_rebuild(found, author, live=pointer.live, redefined=False, take_over=take_over)
        with at_work(found, author):
            return swap_rebuild(
                found,
                author,
                pointer,
                note,
                how,
                compare=lambda old, new: differences(
                    found, old, new, sample=sample, work=work, against=against, progress=compared
                ),
                agreed=agreed,
                drop_letters=drop_letters,
            )


def rollback(
    flow: Flow[Any],
    options: RunOptions,
    *,
    why: str,
    take_over: bool = False,
) -> Pointer:
    """Make the generation that was live before the live one again, or keep it after a swap that was interrupted.

    Its next run, with the code that made it, continues where it was fenced. What the other generation has published since
    is published again, under the same lineage, and readers drop it.

    Args:
        flow: The flow.
        options: Cluster, stores and accepted risks. With `lost-records`, records that Kafka has deleted since may stay
            missing; with `snapshot-versions`, readers of published states ignore those of a lower generation; with
            `other-batches`, readers of outputs behind lookups and filters over all partitions may count them twice.
        why: The reason, for the audit.
        take_over: Another process may be at work on the swap.

    Returns:
        The new pointer.

    Raises:
        RunRefusedError: There is nothing to return to, a rebuild is under way, or a risk is not accepted.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or another command has taken over.
    """
    options, accept = options.bound(flow), options.accept
    check_accept(flow.name, options.urls, [risk for risk in accept if risk != SNAPSHOT_VERSIONS])
    author, kafka = Author.here(why), options.broker
    with generations_of(flow, options.urls) as found:
        pointer = found.settled()
        if pointer.rebuild is not None:
            steps.check_worker(found.ref(pointer.rebuild.generation), pointer.rebuild, author, take_over=take_over)
            if not pointer.closing:
                raise RunRefusedError(
                    f"{found.ref(pointer.rebuild.generation)}: it is being rebuilt, and not live. To give it up, use --abandon"
                )
            refuse(_published(flow), accept)
            return steps.reopen(found, author, pointer)
        if pointer.previous and found.manifest(pointer.previous) is not None:
            refuse(
                [*_published(flow), *_in_other_batches(flow), *topics_since(found, pointer.live, pointer.previous)],
                accept,
            )
            topics = Topics(kafka)
            refuse(deleted_records(found, ranges_of(found, pointer.live, pointer.previous, topics), topics), accept)
        return steps.roll_back(found, author)


def abandon(flow: Flow[Any], options: RunOptions, *, why: str, take_over: bool = False) -> Pointer:
    """Give up the rebuild. Its states stay in the stores until they are dropped; the next rebuild has another number.

    Args:
        flow: The flow.
        options: Options of its runs; only the stores are used.
        why: The reason, for the audit.
        take_over: Another process may be at work on it; it is fenced.

    Returns:
        The new pointer.

    Raises:
        RunRefusedError: There is none, a swap was interrupted, or another process is at work on it.
        StoreError: A store does not answer, or another command has taken over.
    """
    with generations_of(flow, options.bound(flow).urls) as found:
        return steps.abandon(found, Author.here(why), take_over=take_over)


def _folding(
    flow: Flow[Any],
    options: RunOptions,
    runner: Runner,
    progress: Callable[[Report], None] | None,
    planned: Callable[[Plan], None] | None,
    stop: threading.Event | None,
    snapshot: Place | None = None,
) -> Folding:
    """How a rebuild is folded; it writes no journal."""
    options = replace(options, journal=None).bound(flow)
    check_accept(flow.name, options.urls, options.accept)
    return Folding(flow, options, runner, progress, planned, stop or threading.Event(), snapshot)


def _check(found: Generations, pointer: Pointer, live: int, *, redefine: bool) -> Sequence[str]:
    check_generations(found, live)
    check_open(found, pointer)
    return check_definition(found, pointer, live, redefine=redefine)


def _begins(found: Generations, pointer: Pointer, live: int, snapshot: Place | None) -> list[Finding]:
    """Risks of a rebuild that begins now, besides those of what it reads."""
    if pointer.rebuild is not None:
        return []
    return [*newest_rows(found), *(replaced_topics(found, live) if snapshot is None else ())]


def _in_other_batches(flow: Flow[Any]) -> list[Finding]:
    """The risk of outputs that depend on where batches end."""
    if not (flow.notes_batches and outputs_of(flow)):
        return []
    return [
        unsafe(
            Risk.OTHER_BATCHES,
            f"flow {flow.name}: what it publishes behind a lookup, or a filter over all partitions, depends on where batches "
            "end, and readers may count twice what was published since",
            "Keep the live generation, or let readers begin anew",
        )
    ]


def _published(flow: Flow[Any]) -> list[Finding]:
    """The risk of states that are published for a lower generation."""
    publishing = [stage for stage in flow.stages if stage.state_topics]
    return [
        Finding(
            SNAPSHOT_VERSIONS,
            f"flow {flow.name}: stage {stage.name} publishes its states to {stage.state_topics[0]}, and readers of this topic "
            "ignore states of a lower generation than those that they have seen",
            "Publish them to another topic, or let readers begin anew",
            unsafe=True,
        )
        for stage in publishing[:1]
    ]
