"""`headwater run` and `headwater describe`: flows on Spark, or in one process."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from jobs.cli.options import (
    MAX_RECORDS,
    METADATA_MAX_AGE,
    STACK_ROOT,
    Accept,
    Bootstrap,
    DeadLetters,
    FlowName,
    Generation,
    Group,
    JournalShare,
    JournalTopic,
    Json,
    KafkaFile,
    MaxRecords,
    MetadataMaxAge,
    Root,
    SparkMaster,
    StartAt,
    Stores,
    path_of,
)
from jobs.cli.signals import Stopped, on_signals
from jobs.environment import UsageError
from jobs.screen import Bar, counted, emit, progress, say, table, write

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow
    from aggregations.engine.options import RunOptions
    from aggregations.report import Report
    from aggregations.run.plan import Plan

SPARK: Final = "spark"
LOCAL: Final = "local"
"""Names of the runners."""


def run(
    flow: FlowName,
    store: Stores = None,
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="Stop at the current ends of the partitions.")
    ] = False,
    dead_letters: DeadLetters = None,
    journal: JournalTopic = None,
    journal_share: JournalShare = None,
    trigger: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Persist interval: at most one batch in this time, such as 500ms, 1s or 1m."
        ),
    ] = "1s",
    max_records: MaxRecords = MAX_RECORDS,
    group: Group = None,
    generation: Generation = None,
    start: StartAt = None,
    metadata_max_age: MetadataMaxAge = METADATA_MAX_AGE,
    accept: Accept = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    runner: Annotated[
        str,
        typer.Option(
            metavar="spark|local",
            help="What runs the flow: Spark, or this process alone. Either continues what the other began.",
        ),
    ] = SPARK,
    master: SparkMaster = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Spark setting; may be repeated. Settings of spark-submit win.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where Spark keeps its checkpoint; by default a temporary directory. Progress is in the stores.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fold topics into the states of a flow.

    Each event is folded once in effect, on Spark or with --runner local in this process alone. The run ends at Ctrl-C
    or SIGTERM, or with --until-caught-up.

    With --json it writes one line for the start of each source, one per batch, and one with `"done": true` for the whole run.
    """
    check_runner(runner, master=master, conf=conf, checkpoint=checkpoint)
    spark = spark_ahead(master, conf or ()) if runner == SPARK else {}

    from aggregations.report import Report
    from aggregations.run.start import EARLIEST, parse_all
    from jobs import settings
    from jobs.directory import Directory
    from jobs.loading import files_of, load_flow

    position = parse_all(start or [EARLIEST])
    found = load_flow(flow)
    here = Directory.load()
    kafka = settings.kafka(bootstrap, root, kafka_settings, directory=here)
    chosen = settings.of_flow(
        found,
        store,
        dead_letters=dead_letters,
        journal=journal,
        journal_share=journal_share,
        generation=generation,
        directory=here,
    )
    seconds = settings.seconds(trigger, "--trigger")
    max_age = settings.seconds(metadata_max_age, "--metadata-max-age")
    options = chosen.options(
        kafka=kafka,
        group=group,
        accept=accept or (),
        start=position,
        until_caught_up=until_caught_up,
        trigger_seconds=seconds,
        max_records=max_records,
        metadata_max_age=max_age,
    )
    execute: Callable[..., Report]
    if runner == SPARK:
        from aggregations.spark import run_flow

        check_spark(found, options, master, spark)
        execute = partial(run_flow, modules=files_of(flow), master=master, conf=spark, checkpoint=checkpoint)
    else:
        from aggregations.local import run_local

        execute = run_local
    stop = threading.Event()
    began = time.monotonic()
    with progress(f"flow {found.name}", unit="records") as bar, suppress(Stopped):
        reports, report = _Reports(bar, bounded=until_caught_up, json=json), Report()
        on_signals(
            stop.set, "stopping after this batch; a second signal stops immediately", idle=lambda: not reports.planned
        )
        report = execute(found, options, progress=reports.batch, planned=reports.plan, stop=stop)
    if json:
        emit({"done": True, **as_json(report), "seconds": round(time.monotonic() - began, 3)})
    else:
        _show(report, [stage.name for stage in found.stages])


def check_runner(runner: str, *, master: str | None, conf: Sequence[str] | None, checkpoint: str | None = None) -> None:
    """Refuse a runner that does not exist, and Spark's options without Spark."""
    if runner not in (SPARK, LOCAL):
        raise UsageError(f"--runner {runner}: write {SPARK} or {LOCAL}")
    for name, given in (("--master", master), ("--conf", conf), ("--checkpoint", checkpoint)):
        if given and runner == LOCAL:
            raise UsageError(f"{name} is an option of Spark; remove it, or --runner {LOCAL}")


def spark_ahead(master: str | None, conf: Sequence[str]) -> dict[str, str]:
    """Spark's settings; its JVM starts meanwhile."""
    from aggregations.spark.jvm import IS_SUBMITTED, start_ahead
    from jobs import settings
    from jobs.stack.java import JavaUnavailable, java

    if IS_SUBMITTED:  # spark-submit has started the JVM, with its own log
        return settings.pairs(conf, "--conf")
    spark = settings.spark(conf)
    with suppress(JavaUnavailable):  # reported later: errors in the options come first
        java()
        start_ahead(master, spark)
    return spark


def check_spark(flow: "Flow[Any]", options: "RunOptions", master: str | None, conf: Mapping[str, str]) -> None:
    """Refuse what cannot run on Spark, before anything is started."""
    from aggregations.spark.checks import check_given
    from aggregations.spark.jvm import IS_SUBMITTED
    from aggregations.spark.session import master_of
    from jobs.stack.java import java

    if not IS_SUBMITTED:  # `run_flow` also checks this
        check_given(flow, options, master_of(master, conf), conf=conf)
        java()


def describe(
    flow: FlowName,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Also write a picture of the flow, in SVG.",
            show_default=False,
            parser=path_of,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show a flow, one step per line.

    The steps of branches are indented. Each line ends with the path of its step: vectorised or per message. Standard error shows the stores, generation and
    dead-letter topic that the commands use here, with their origins.
    """
    from aggregations.definition.description import lines_of
    from jobs import settings
    from jobs.loading import load_flow
    from persistence.urls import redact

    found = load_flow(flow)
    chosen = settings.of_flow(found)
    if svg is not None:
        stores = {name: redact(url) for name, url in chosen.stores.items()}
        try:
            svg.write_text(found.describe_svg(stores), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg}: {error.strerror}") from error
        say(f"picture: {svg}")
    if json:
        steps = [line._asdict() for line in lines_of(found)]
        used = [{"name": name, "value": value, "origin": origin} for name, value, origin in chosen.shown()]
        emit({"flow": found.name, "steps": steps, "settings": used})
        return
    write(found.describe())
    for line in chosen.lines():
        say(line)


def as_json(report: "Report") -> dict[str, Any]:
    """Counts of a batch or of a run, as plain values."""
    return {
        "records": report.records,
        "batches": report.batches,
        "verdicts": {stage: dict(counts) for stage, counts in report.verdicts.items()},
        "dead_letters": dict(report.reasons),
        "filtered": report.filtered,
        "tombstones": report.tombstones,
        "outputs": report.outputs,
        "retired_lanes": report.retired,
        "removed": dict(report.removed),
        "keyless": dict(report.keyless),
        "unpublished": dict(report.unpublished),
    }


def show_plan(plan: "Plan", *, json: bool) -> None:
    """Show where a run starts; with `json`, write it as one line."""
    if json:
        growth = None if plan.growth is None else msgspec.structs.asdict(plan.growth)
        emit({"plan": {**asdict(plan), "growth": growth, "lag": [one.lag for one in plan.partitions]}})
    for line in plan.lines():
        say(line)


class _Reports:
    """Shows the progress of a flow: its start, then each batch."""

    def __init__(self, bar: Bar, *, bounded: bool, json: bool) -> None:
        self._bar = bar
        self._bounded = bounded
        self._json = json
        self._total: int | None = None
        self._number = self._records = 0
        self.planned = False

    def plan(self, plan: "Plan") -> None:
        self.planned = True
        if self._bounded:
            self._total = (self._total or 0) + sum(one.lag for one in plan.partitions)
        self._bar(0, self._total)
        show_plan(plan, json=self._json)

    def batch(self, report: "Report") -> None:
        self._number += 1
        self._records += report.records
        self._bar(self._records, self._total)
        if self._json:
            emit({"batch": self._number, **as_json(report)})


def _show(report: "Report", stages: Sequence[str]) -> None:
    from envelope import Verdict

    say(f"{counted(report.records, 'record')} in {counted(report.batches, 'batch', 'batches')}")
    rows = [
        (stage, verdict.value, counts[verdict.value])
        for stage, counts in sorted(report.verdicts.items(), key=lambda found: stages.index(found[0]))
        for verdict in Verdict
        if counts[verdict.value]
    ]
    rows += [(stage, "via a record without a key", count) for stage, count in report.keyless.items()]
    rows += [(stage, "states not published", count) for stage, count in report.unpublished.items()]
    rows += [(stage, "states removed", count) for stage, count in report.removed.items()]
    rows += [("tombstones", "skipped", report.tombstones)] if report.tombstones else []
    rows += [("dead letters", reason, count) for reason, count in report.reasons.items()]
    if rows:
        table(rows, ["stage", "verdict", "count"], left=["stage", "verdict"])
