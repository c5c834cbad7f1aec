"""`headwater copy`: a topic, a query or a file into a topic, exactly once."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import STACK_ROOT, Bootstrap, EventId, FromCluster, Json, KafkaFile, Root, filled, path_of
from jobs.environment import UsageError
from jobs.screen import counted, emit, progress, say

if TYPE_CHECKING:
    from jobs.copying.counts import CopyStatistics
    from jobs.copying.source import CopySource
    from persistence.kafka import KafkaSettings

_SQLITE = "sqlite:"
_SKIP = "skip"


def copy(
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the copy: its transactional.id, and part of every message. Do not change it.",
            callback=filled,
        ),
    ],
    target: Annotated[str, typer.Option("--to", metavar="TOPIC", help="Topic to write.", callback=filled)],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="TOPIC", help="Topic to copy; may be repeated.", show_default=False, callback=filled
        ),
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(
            "--from-lines", metavar="FILE", help="File whose lines to copy.", show_default=False, parser=path_of
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            "--from-database",
            metavar="DATABASE",
            help="Database whose rows to copy: sqlite:FILE, or MODULE:FUNCTION that returns a DB-API connection.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="SELECT of the rows, without ORDER BY.", show_default=False, callback=filled),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column whose unique values ascend in the order in which rows become visible.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="KIND",
            help="Format of the topics: envelope (the default), raw, json or cloudevents. Of the lines: raw (the default) or "
            "json.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Field of a JSON line, or column of a row, that becomes the record's key.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    event_id: EventId = None,
    from_cluster: FromCluster = None,
    tombstones: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Records without a value: skip, or dead_letter to reject them as empty."),
    ] = _SKIP,
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Topic for records of topics that cannot be copied. Without it, the first one ends the copy.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    positions: Annotated[
        str,
        typer.Option(metavar="TOPIC", help="Compacted topic in which copies save their positions.", callback=filled),
    ] = "headwater.positions",
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="Stop at the current end of the source.")
    ] = False,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of records in a transaction.")
    ] = 10_000,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RISK",
            help="Accept a risk for which the run is refused; the refusal names it. May be repeated.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Copy a topic, a query or a file, each record exactly once.

    Messages and the position in the source are committed in one transaction, so that a crash neither loses nor repeats
    anything. A second process of the same name replaces the first, which ends with exit code 1. Ctrl-C or SIGTERM ends
    it after it has committed the records in flight.

    With --json it writes one line per commit, and one, with `"done": true`, at the end.
    """
    from jobs import settings
    from jobs.copying import run

    cluster, elsewhere = settings.other_cluster(from_cluster)
    kafka = settings.kafka(bootstrap, root, kafka_settings)
    given = [one for one in (source, lines, database) if one]
    if len(given) != 1:
        raise UsageError("give one source: --from, --from-lines, or --from-database with --query and --column")
    for option, value, fits, whose in (
        ("--from-cluster", from_cluster, source, "topics"),
        ("--tombstones", tombstones != _SKIP, source, "topics"),
        ("--accept", accept, source, "topics"),
        ("--dead-letters", dead_letters, source, "topics: correct lines and rows in their source"),
        ("--input", kind, source or lines, "topics and lines"),
        ("--key", key, lines or database, "lines and rows: records of topics keep their keys"),
        ("--query", query, database, "rows of a database"),
        ("--column", column, database, "rows of a database"),
    ):
        if value and not fits:
            raise UsageError(f"{option} is for {whose}")
    try:
        if source:
            made = _topics(tuple(source), kind, tombstones, event_id, accept or (), cluster, elsewhere)
        elif lines:
            made = _lines(lines, kind, key, event_id)
        else:
            made = _rows(database or "", query, column, key, event_id)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with progress(f"copy {name}", unit="records") as bar:

        def committed(done: "CopyStatistics") -> None:
            bar(done.read)
            if json:
                emit(done.as_dict())

        done = run.copy(
            name,
            made,
            target,
            kafka,
            until_caught_up=until_caught_up,
            progress=committed,
            positions=positions,
            dead_letter=dead_letters,
            batch_size=batch,
        )
    if json:
        emit({"done": True, **done.as_dict()})
        return
    dead = f", {sum(done.dead_lettered.values()):,} to {dead_letters}" if done.dead_lettered else ""
    say(f"{counted(done.read, 'record')} read, {done.written:,} written{dead}")
    if getattr(made, "unfinished", False):
        say(f"the last line of {lines} has no line end, and was not copied")


def _topics(
    names: tuple[str, ...],
    kind: str | None,
    tombstones: str,
    event_id: str | None,
    accept: Sequence[str],
    cluster: str,
    elsewhere: "KafkaSettings | None",
) -> "CopySource":
    from jobs.copying import TopicRecords
    from jobs.republish.source import InputTopics

    topics = InputTopics.of(names, kind or "envelope", tombstones, event_id)
    return TopicRecords(topics, elsewhere, cluster=cluster, accept=accept)


def _lines(file: Path, kind: str | None, key: str | None, event_id: str | None) -> "CopySource":
    from jobs.copying import FileLines

    if kind not in (None, "raw", "json"):
        raise UsageError(f"unknown format of lines {kind!r}: write raw or json")
    return FileLines(file, json=kind == "json", key=key, event_id=event_id)


def _rows(database: str, query: str | None, column: str | None, key: str | None, event_id: str | None) -> "CopySource":
    from jobs.copying import QueryRows
    from jobs.loading import load_function

    if not query or not column:
        raise UsageError("--from-database needs --query and --column")
    if database.startswith(_SQLITE):
        return QueryRows(database.removeprefix(_SQLITE), query, column, key=key, event_id=event_id)
    return QueryRows(load_function(database), query, column, key=key, event_id=event_id)
