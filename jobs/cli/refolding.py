"""`headwater rehearse` and `headwater audit`: history is folded again, and the states are compared."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from jobs.cli.comparing import show_differences
from jobs.cli.errors import Exit
from jobs.cli.options import (
    FOLDS,
    SAMPLE,
    STACK_ROOT,
    Accept,
    Bootstrap,
    FlowName,
    FromArchive,
    FromSnapshot,
    Generation,
    JournalTopic,
    Json,
    KafkaFile,
    Ranges,
    Root,
    Sample,
    Stores,
    Work,
    filled,
)
from jobs.cli.signals import exit_on_sigterm
from jobs.screen import counted, emit, progress, say, table

if TYPE_CHECKING:
    from jobs.comparing import Comparison
    from jobs.refolding.fold import Told

Keys: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="Compare only this key of the stages, in all its windows; may be repeated.",
        show_default=False,
    ),
]
OfStages: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--stage", metavar="NAME", help="Compare only this stage; may be repeated.", show_default=False),
]


def rehearse(
    flow: FlowName,
    against: Annotated[
        str,
        typer.Option("--against", metavar="MODULE:FLOW", help="The flow with the old definition.", callback=filled),
    ],
    ranges: Ranges = None,
    history: FromArchive = None,
    stage: OfStages = None,
    key: Keys = None,
    sample: Sample = SAMPLE,
    generation: Generation = None,
    accept: Accept = None,
    work: Work = FOLDS,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Compare two definitions of a flow on recorded history.

    Both definitions fold the same records of Kafka, in this process. States, dead letters and the number of published
    messages are compared. Nothing is sent, no group offsets are written, and the stores of the flow are not opened.

    The exit code is 4 if anything differs, and 3 if the topics do not have a range.
    """
    from jobs import settings
    from jobs.directory import Directory
    from jobs.loading import load_flow
    from jobs.refolding.rehearse import rehearse as run
    from jobs.table.view import key_of

    new, old, here = load_flow(flow), load_flow(against), Directory.load()
    with told_of(f"rehearsing {new.name}") as told:
        kafka = settings.kafka(bootstrap, root, kafka_settings, directory=here)
        found = run(
            new,
            old,
            settings.of_flow(new, generation=generation, directory=here).options(
                kafka=kafka, accept=accept or (), history=history
            ),
            ranges=ranges or (),
            stages=stage or (),
            keys=[key_of(one) for one in key or ()],
            sample=sample,
            work=work,
            progress=told,
        )
    if json:
        emit(found.as_json())
    else:
        show_differences(found.comparison, "old", "new")
        table(
            [
                ("records", found.old.records, found.new.records),
                ("published", found.old.outputs, found.new.outputs),
                *_letters(found.old.dead_letters, found.new.dead_letters),
            ],
            ["", "old", "new"],
            left=[""],
        )
    _end(found.comparison, differs=found.differs, otherwise="dead letters or the number of published messages differ")


def audit(
    flow: FlowName,
    snapshot: FromSnapshot = None,
    history: FromArchive = None,
    journal: JournalTopic = None,
    stage: OfStages = None,
    key: Keys = None,
    sample: Sample = SAMPLE,
    store: Stores = None,
    generation: Generation = None,
    accept: Accept = None,
    work: Work = FOLDS,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Compare live states with a new fold of their history.

    The history begins where the flow began, or with a snapshot, and ends where the live states end. Stop the flow
    first; it may run again as soon as the live states are copied. Nothing is written into its stores, and nothing is
    sent.

    The exit code is 4 if a live state has drifted, and 3 if the states cannot be compared: a run is at work, the
    definition has changed, or the beginning of the history is unknown or deleted.
    """
    from jobs import settings
    from jobs.directory import Directory
    from jobs.loading import load_flow
    from jobs.refolding.audit import audit as run
    from jobs.snapshot_places import place_of
    from jobs.table.view import key_of

    found, here = load_flow(flow), Directory.load()
    kafka = settings.kafka(bootstrap, root, kafka_settings, directory=here)
    chosen = settings.of_flow(found, store, journal=journal, generation=generation, directory=here)
    for line in chosen.lines():
        say(line)
    with told_of(f"auditing {found.name}") as told:
        result = run(
            found,
            chosen.options(kafka=kafka, accept=accept or (), history=history),
            snapshot=None if snapshot is None else place_of(snapshot),
            stages=stage or (),
            keys=[key_of(one) for one in key or ()],
            sample=sample,
            work=work,
            progress=told,
        )
    if json:
        emit(result.as_json())
    else:
        show_differences(result.comparison, "live", "folded")
        holes = [(f"holes of dead letters: {name}", *both) for name, both in result.holes.items() if any(both)]
        if any(result.listed):
            holes.append(("dead letters in the ledger", *result.listed))
        if holes:
            table(holes, ["", "live", "folded"], left=[""])
    say(f"{counted(result.folded.records, 'record')} folded, up to batch {result.batch}")
    if result.skipped:
        say(f"not compared: {', '.join(result.skipped)}: {result.unknown}")
    if result.drifted and result.unproven:
        say(
            f"the differences may be no drift: the fold found {counted(result.unproven, 'redriven or retried message')} "
            "unproven, and the live states may have folded them in batches that ended elsewhere. Begin with a snapshot "
            "that was made since (--snapshot)"
        )
    _end(result.comparison, differs=result.drifted)


@contextmanager
def told_of(title: str) -> "Iterator[Told]":
    """Shows progress. Both Ctrl-C and SIGTERM end the block, so that its directory is deleted."""
    with progress(title) as bar, exit_on_sigterm():

        def told(what: str, done: int, total: int | None) -> None:
            bar(done, total, f"{done:,}{'' if total is None else f' of {total:,}'} {what}")

        yield told


def _letters(old: Mapping[str, int], new: Mapping[str, int]) -> list[tuple[Any, ...]]:
    return [(f"dead letters: {reason}", old.get(reason, 0), new.get(reason, 0)) for reason in sorted({*old, *new})]


def _end(comparison: "Comparison", *, differs: bool, otherwise: str = "") -> None:
    """Say what the result is, and exit with the code for differences if there are some."""
    keys = sum(one.same + one.rounded + one.differences for one in comparison.stages.values())
    if not differs:
        say(f"no differences: {counted(keys, 'key')}")
        return
    say(f"different: {comparison.differences:,} of {counted(keys, 'key')}" if comparison.differences else otherwise)
    raise typer.Exit(Exit.DIFFERENCES)
