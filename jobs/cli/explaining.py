"""`headwater explain` and `headwater blame`: what became of a record, and which hop sent records again."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.errors import Exit, naming_topics
from jobs.cli.options import (
    STACK_ROOT,
    Bootstrap,
    FlowName,
    Generation,
    JournalTopic,
    Json,
    KafkaFile,
    Ranges,
    Root,
    Stores,
    filled,
    path_of,
)
from jobs.environment import NotThereError, UsageError
from jobs.screen import counted, emit, progress, say, table, write

if TYPE_CHECKING:
    from jobs.explaining.outcome import Explanation

_SEARCH = 10_000


def explain(
    flow: FlowName,
    record: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC:PARTITION:OFFSET]",
            help="The record: of a topic that the flow reads, or of one that its records were made of.",
            show_default=False,
        ),
    ] = None,
    event_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Explain the records with this event id instead; they are searched in the --range.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    ranges: Ranges = None,
    search: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Search other records of the same event among this many offsets before and after it.",
        ),
    ] = _SEARCH,
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="The flow's dead-letter topic, to show what became of a dead letter. Without it: headwater.toml.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    journal: JournalTopic = None,
    store: Stores = None,
    generation: Generation = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Show what a flow made of a record.

    It is folded into the state of a key, dropped because another record of the same event came first, in the dead-letter
    topic, removed by a step, not read yet, or deleted by retention. The record is read again, the flow's steps are run
    on it, and the histories of its states are asked for its position. Nothing is written, and a run is not disturbed. No
    value is shown. With --json, a line per record.

    The exit code is 4 if the record was read and the state that should hold it does not, and 3 if no record was found.
    """
    from jobs import settings
    from jobs.directory import Directory
    from jobs.explaining.explain import MOST
    from jobs.explaining.explain import explain as run
    from jobs.explaining.outcome import Outcome
    from jobs.loading import load_flow
    from jobs.tracing import place_of

    if (record is None) is (event_id is None):
        raise UsageError("give TOPIC:PARTITION:OFFSET or --event-id ID, and not both")
    place = None if record is None else place_of(record)
    found, here = load_flow(flow), Directory.load()
    chosen = settings.of_flow(
        found, store, dead_letters=dead_letters, journal=journal, generation=generation, directory=here
    )
    kafka = settings.kafka(bootstrap, root, kafka_settings, directory=here)
    if ranges and place is not None and place.topic in found.topics:
        raise UsageError(f"--range: {place} is one record; give --event-id, or a record of an earlier topic")
    with progress(f"explaining {record or event_id}", unit="records") as bar, naming_topics():
        explained = run(
            found,
            place or event_id or "",
            kafka=kafka,
            stores=chosen.stores,
            dead_letters=chosen.dead_letters,
            journal=chosen.journal,
            generation=chosen.generation,
            search=search,
            ranges=ranges or (),
            progress=bar,
        )
    for explanation in explained:
        if json:
            emit(explanation.as_json())
        else:
            _show(explanation)
    if len(explained) == MOST:
        say(f"only the first {MOST} records; --range selects others")
    if not explained:
        what = f"event id {event_id}" if place is None else f"{place} in its chain"
        raise NotThereError(f"no record with {what} in {', '.join(ranges or found.topics)}")
    if any(one.outcome is Outcome.MISSING for one in explained):
        raise typer.Exit(Exit.DIFFERENCES)


def blame(
    flow: FlowName,
    ranges: Ranges = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Also draw the re-sends over time, as SVG.",
            show_default=False,
            parser=path_of,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Show which republishers sent records again.

    The range of the flow's topics is read. A record was sent again if an earlier record of the range is the same event.
    It is counted for the hop from which on the two have other coordinates: this hop read one record and sent two.
    With --json, a line per hop.
    """
    from jobs import settings
    from jobs.explaining.blame import blame as run
    from jobs.loading import load_flow

    found = load_flow(flow)
    kafka = settings.kafka(bootstrap, root, kafka_settings)
    with progress(f"reading {', '.join(found.topics)}", unit="offsets") as bar, naming_topics():
        result = run(found, kafka=kafka, ranges=ranges or (), progress=bar)
    if svg is not None:
        from jobs.explaining.plot import svg as drawn

        try:
            svg.write_text(drawn(result), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg}: {error.strerror}") from error
        say(f"picture: {svg}")
    if json:
        for hop in result.hops:
            emit(hop.as_json())
    elif result.hops:
        rows = (
            [
                hop.passage.via or "(no name)",
                hop.passage.kind,
                f"{hop.passage.source} to {hop.passage.target}",
                hop.records,
                hop.resent,
                hop.events,
                "" if hop.first_ms is None else f"{_time(hop.first_ms)}, {hop.first}",
                "" if hop.last_ms is None else f"{_time(hop.last_ms)}, {hop.last}",
            ]
            for hop in result.hops
        )
        text = ["hop", "kind", "topics", "first", "last"]
        table(rows, ["hop", "kind", "topics", "records", "sent again", "events", "first", "last"], left=text)
    say(f"{counted(result.records, 'record')}, {result.resent:,} of them sent again")
    if result.unread:
        say(f"not compared, because they have no envelope or cannot be read: {counted(result.unread, 'record')}")
    if result.grouped:
        say(
            f'siblings or sent again, which no index tells apart (siblings="group"): {counted(result.grouped, "record")}'
        )
    if result.expired:
        say(f"deleted by retention: {counted(result.expired, 'offset')} of the range")


def _show(explained: "Explanation") -> None:
    from jobs.table.view import key_as_text

    outcome = explained.outcome.value.replace("_", " ")
    write(f"{explained.place}: {outcome}: {explained.why}")
    if explained.lineage:
        event = f", event id {explained.event_id}" if explained.event_id else ""
        write(f"  lineage: {explained.lineage}{event}")
    if explained.stages:
        rows = (
            [
                one.stage,
                "" if one.key is None else key_as_text(one.key),
                ".".join(map(str, one.indices)),
                one.outcome.value.replace("_", " "),
                one.verdict.value if one.verdict else one.reason.value if one.reason else "",
                "" if one.batch is None else f"{'' if one.batch.exact else 'by '}{one.batch.batch}",
                "" if one.batch is None or one.batch.time_ms is None else _time(one.batch.time_ms),
                one.why,
            ]
            for one in explained.stages
        )
        names = ["stage", "key", "item", "outcome", "verdict or reason", "batch", "committed by", "why"]
        table(rows, names, left=names)
    if explained.letters:
        letters = (
            [
                str(one.place),
                one.stage,
                one.reason.value if one.reason else "",
                "" if one.time_ms is None else _time(one.time_ms),
                one.fate.value,
                "" if one.redriven is None else str(one.redriven),
            ]
            for one in explained.letters
        )
        names = ["dead letter", "stage", "reason", "rejected", "what became of it", "redriven as"]
        table(letters, names, left=names)
    if explained.copies:
        copies = (
            [
                str(copy.place),
                _time(copy.timestamp_ms),
                "" if copy.resend is None else copy.resend.via,
                "" if copy.resend is None else str(copy.resend.read),
            ]
            for copy in explained.copies
        )
        names = ["same event", "written", "sent again by", "which had read"]
        table(copies, names, left=names)
    if explained.outputs:
        write(f"  published to: {', '.join(explained.outputs)}")


def _time(time_ms: int) -> str:
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
