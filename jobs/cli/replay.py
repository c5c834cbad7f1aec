"""`headwater replay`: a flow's states are rebuilt beside the live ones, and swapped."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from jobs.cli.mending import KeysToMend, StageToMend, mend_keys
from jobs.cli.options import (
    FOLDS,
    MAX_RECORDS,
    SAMPLE,
    STACK_ROOT,
    Accept,
    Bootstrap,
    DeadLetters,
    FlowName,
    FromArchive,
    FromSnapshot,
    JournalTopic,
    Json,
    KafkaFile,
    MaxRecords,
    Root,
    Sample,
    SparkMaster,
    Stores,
    Work,
    filled,
)
from jobs.cli.replay_results import show_plan, show_pointer, show_rebuilt, show_swapped, shown
from jobs.cli.run import SPARK, check_runner, check_spark, spark_ahead
from jobs.cli.signals import Stopped, on_signals
from jobs.environment import UsageError
from jobs.screen import Bar, progress, say
from persistence.names import MAX_GENERATION

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow
    from aggregations.engine.options import RunOptions
    from aggregations.report import Report

_PLAN: Final = "a plan"
_KEYS: Final = "--key"
_SENDS: Final = {"send": True, "drop": False}


def replay(
    flow: FlowName,
    apply: Annotated[
        bool, typer.Option("--apply", help="Rebuild, or continue the rebuild. Without it: show what it would read.")
    ] = False,
    swap: Annotated[bool, typer.Option("--swap", help="Make the rebuild the live generation.")] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Make the generation live that was live before.")
    ] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="Give up the rebuild.")] = False,
    drop: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_GENERATION,
            metavar="N",
            help="Remove generation N, which is not live, from the stores.",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Why, for the audit: needed by whatever changes something.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    redefine: Annotated[
        bool, typer.Option("--redefine", help="The rebuild has another definition than the live generation.")
    ] = False,
    snapshot: FromSnapshot = None,
    history: FromArchive = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FLOW",
            help="The flow with the definition of the live generation, to compare redefined stages.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    key: KeysToMend = None,
    stage: StageToMend = None,
    journal: JournalTopic = None,
    work: Work = FOLDS,
    outputs: Annotated[
        str | None,
        typer.Option(
            metavar="send|drop",
            help="What the swap does with the outputs of a rebuild that begins: drop them unless this says send.",
            show_default=False,
        ),
    ] = None,
    letters: Annotated[
        str | None,
        typer.Option(
            metavar="send|drop",
            help="What the swap does with the rebuild's dead letters: send them, unless this says drop.",
            show_default=False,
        ),
    ] = None,
    sample: Sample = SAMPLE,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over from a process on another machine that has crashed.")
    ] = False,
    store: Stores = None,
    dead_letters: DeadLetters = None,
    max_records: MaxRecords = MAX_RECORDS,
    accept: Accept = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    runner: Annotated[
        str, typer.Option(metavar="spark|local", help="What folds the records: Spark, or this process alone.")
    ] = SPARK,
    master: SparkMaster = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Spark setting; may be repeated.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Rebuild the states of a flow, compare and swap them.

    Without --apply, --swap, --rollback, --abandon or --drop it shows what a rebuild reads, how many states there are, what
    Kafka no longer has, and earlier changes. If a rebuild has begun, it also shows how its states differ as of now.

    --apply folds the topic into a new generation, up to where the live one is. The live run goes on. Repeat it after a
    crash, or to catch up. --swap folds the rest, stops the live run, shows the differences, and makes the rebuild live:
    start the flow again. --rollback returns to the generation before.

    The exit code is 3 if it would be unsafe: Kafka no longer has the records, the definition has changed, or another
    replay is at work.

    With --key it folds the history of the flow, which has to be stopped, and shows how the states of these keys differ
    from the live ones. With --apply it mends these in the live generation.
    """
    mode = _mode(
        keys=key is not None, apply=apply, swap=swap, rollback=rollback, abandon=abandon, drop=drop is not None
    )
    _check_options(
        mode,
        {
            "--reason": (reason, ("--apply", "--swap", "--rollback", "--abandon", "--drop", _KEYS)),
            "--redefine": (redefine, (_PLAN, "--apply")),
            "--snapshot": (snapshot, (_PLAN, "--apply", _KEYS)),
            "--history": (history, (_PLAN, "--apply", "--swap", _KEYS)),
            "--outputs": (outputs, ("--apply",)),
            "--letters": (letters, ("--swap",)),
            "--against": (against, (_PLAN, "--swap")),
            "--sample": (sample != SAMPLE, (_PLAN, "--swap", _KEYS)),
            "--stage": (stage, (_KEYS,)),
            "--journal": (journal, (_KEYS,)),
            "--work": (work != FOLDS, (_KEYS,)),
            "--take-over": (take_over, ("--apply", "--swap", "--rollback", "--abandon", "--drop")),
            "--dead-letters": (dead_letters, ("--apply", "--swap")),
            "--max-records": (max_records != MAX_RECORDS, ("--apply", "--swap")),
            "--accept": (accept, (_PLAN, "--apply", "--swap", "--rollback", "--drop", _KEYS)),
            "--runner": (runner != SPARK, ("--apply", "--swap")),
            "--master": (master, ("--apply", "--swap")),
            "--conf": (conf, ("--apply", "--swap")),
        },
    )
    if mode not in (_PLAN, _KEYS) and reason is None:
        raise UsageError(f"{mode}: give --reason, which is kept with the change")
    for option, given in (("--outputs", outputs), ("--letters", letters)):
        if given not in (None, *_SENDS):
            raise UsageError(f"{option} {given}: give send or drop")
    check_runner(runner, master=master, conf=conf)
    spark = spark_ahead(master, conf or ()) if mode in ("--apply", "--swap") and runner == SPARK else {}

    from jobs import replay as verbs
    from jobs import settings
    from jobs.directory import Directory
    from jobs.loading import files_of, load_flow
    from jobs.snapshot_places import place_of

    found, here = load_flow(flow), Directory.load()
    other = None if against is None else load_flow(against)
    chosen = settings.of_flow(found, store, dead_letters=dead_letters, journal=journal, directory=here)
    for line in chosen.lines():
        say(line)
    options, why = chosen.options(accept=accept or (), max_records=max_records), reason or ""
    begins = None if snapshot is None else place_of(snapshot)
    if mode == "--abandon":
        show_pointer(verbs.abandon(found, options, why=why, take_over=take_over), json=json)
        return
    if drop is not None:
        show_pointer(verbs.drop(found, drop, options, why=why, take_over=take_over), json=json)
        return
    kafka = settings.kafka(bootstrap, root, kafka_settings, directory=here)
    options = replace(options, kafka=kafka, history=history)
    if mode == _KEYS:
        mend_keys(
            *(found, options),
            stage=stage,
            keys=key or (),
            apply=apply,
            reason=reason,
            snapshot=begins,
            sample=sample,
            work=work,
            json=json,
        )
        return
    if mode == "--rollback":
        show_pointer(verbs.rollback(found, options, why=why, take_over=take_over), json=json)
        return
    if mode == _PLAN:
        with progress(f"reading the states of {found.name}", unit="states") as bar:
            plan = verbs.plan_replay(
                *(found, options), redefine=redefine, snapshot=begins, sample=sample, against=other, progress=bar
            )
        show_plan(plan, json=json)
        return
    execute = _runner(found, options, runner, master, spark, files_of(flow))
    stop = threading.Event()
    with progress(f"rebuilding {found.name}", unit="records") as bar, _stopped(found.name, mode):
        reports = _Reports(bar)
        on_signals(
            stop.set, "stopping after this batch; a second signal stops immediately", idle=lambda: not reports.begun
        )
        arguments: dict[str, Any] = {"why": why, "take_over": take_over, "runner": execute}
        arguments |= {"progress": reports.batch, "planned": reports.plan, "stop": stop}
        if mode == "--apply":
            arguments |= {"redefine": redefine, "snapshot": begins, "outputs": _SENDS.get(outputs or "")}
            show_rebuilt(verbs.rebuild(found, options, **arguments), json=json)
        else:
            arguments |= {"agreed": partial(shown, json=json), "sample": sample, "against": other}
            show_swapped(verbs.swap(found, options, drop_letters=letters == "drop", **arguments), json=json)


def _mode(*, keys: bool, **chosen: bool) -> str:
    given = [f"--{name}" for name, is_given in chosen.items() if is_given]
    if keys and given in ([], ["--apply"]):
        return _KEYS
    given = [*given, *([_KEYS] if keys else [])]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]}: give one of them")
    return given[0] if given else _PLAN


def _check_options(mode: str, options: Mapping[str, tuple[object, Sequence[str]]]) -> None:
    """Refuse options that would be ignored."""
    for name, (given, modes) in options.items():
        if given and mode not in modes:
            fits = " and ".join(filter(None, [", ".join(modes[:-1]), modes[-1]]))
            place = "not for --key" if mode == _KEYS else f"for {fits}"
            raise UsageError(f"{name} is {place}; remove it")


def _runner(
    flow: "Flow[Any]",
    options: "RunOptions",
    runner: str,
    master: str | None,
    spark: Mapping[str, str],
    files: Sequence[Path],
) -> "Callable[..., Report]":
    if runner == SPARK:
        from aggregations.spark import run_flow

        check_spark(flow, options, master, spark)
        return partial(run_flow, modules=files, master=master, conf=spark)
    from aggregations.local import run_local

    return run_local


@contextmanager
def _stopped(name: str, mode: str) -> Iterator[None]:
    """What a signal means that came before anything was folded: a rebuild can be continued, but a swap was not made."""
    try:
        yield
    except Stopped:
        if mode == "--swap":
            from aggregations.errors import RunRefusedError

            raise RunRefusedError(f"flow {name}: stopped, and not swapped. Repeat the command") from None


class _Reports:
    """Shows the progress of a rebuild."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._records = 0
        self.begun = False

    def plan(self, _plan: object) -> None:
        self.begun = True

    def batch(self, report: "Report") -> None:
        self._records += report.records
        self._bar(self._records, None)
