"""`headwater inspect`: the stored states of a stage."""

import shlex
import time
from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from jobs.cli.options import FlowName, Generation, Json, Stores, filled, path_of
from jobs.directory import FILE
from jobs.environment import STORE, NotThereError, UsageError
from jobs.screen import counted, emit, progress, say, table

if TYPE_CHECKING:
    from jobs.views import States, View

_ROWS: Final = 50
"""Rows of a table without --limit."""


class Format(StrEnum):
    """How states are shown."""

    TABLE = "table"
    JSON = "json"
    PARQUET = "parquet"


def inspect(
    flow: FlowName,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="The stage; optional if the flow has only one.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Show only this key, in all its windows; may be repeated.", show_default=False
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Show only the window that starts at this time, such as 2026-11-24T06:00:00Z.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Show only keys that begin with this.", show_default=False, callback=filled),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Show only keys above this one, in the order of their bytes: the last key of the page before.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Show only states for which this is true: SQL over the fields and _key, _version, _epoch, _batch, "
            "_written_by, _definition, _lanes, _holes, as in 'legs > 100 AND _version = 1'.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Show only states that were last written longer ago than this, such as 90s, 15m or 24h.",
            show_default=False,
        ),
    ] = None,
    newer_than: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Show only states that may have been written since then.", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000_000,
            metavar="N",
            help="Show at most this many, those with the lowest keys. Without it: 50 in a table, otherwise all.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[  # noqa: A002 - the name of the option
        Format | None,
        typer.Option(help="Table, JSON lines (as --json), or Parquet (with --output).", show_default="table"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write JSON lines or Parquet to this file.", show_default=False, parser=path_of
        ),
    ] = None,
    store: Stores = None,
    generation: Generation = None,
    json: Json = False,
) -> None:
    """Show the states of a stage.

    A table shows result, version and number of lanes of each key, in a stage with windows of each window; JSON lines and Parquet also contain its histories
    and holes. Standard error shows which store was read; nothing is created there. A key that is not text is written
    as base64:, followed by its base64.

    A run is not disturbed. Each state is shown whole, as it was at some moment of the read; states of different keys
    may be of different batches.

    The exit code is 3 if the store has no state of the stage, or no state of a requested key.
    """
    from jobs import settings
    from jobs.loading import load_flow
    from jobs.replaying.generations import pointer_of
    from jobs.table.view import key_of
    from jobs.views import states

    shape = _format(format, output, json=json)
    selected = {
        "--prefix": prefix,
        "--after": after,
        "--where": where,
        "--older-than": older_than,
        "--newer-than": newer_than,
    }
    given = [name for name, value in selected.items() if value is not None]
    if key is not None and given:
        raise UsageError(f"--key and {given[0]}: give one of them")
    found = load_flow(flow)
    name = settings.stage_of(found, stage)
    given += [] if window is None else ["--window"]
    keys = None if key is None else [key_of(text) for text in dict.fromkeys(key)]
    chosen = settings.of_flow(found, store, generation=generation)
    start = None if window is None else settings.time(window, "--window")
    pointer = pointer_of(found, chosen.stores)
    generation = chosen.generation or pointer.live
    read = partial(states, found, name, chosen.stores, generation=generation)
    views = read(
        keys=keys,
        start=start,
        prefix=b"" if prefix is None else key_of(prefix),
        after=None if after is None else key_of(after),
        where=where,
        older_than_ms=_before(older_than, "--older-than"),
        newer_than_ms=_before(newer_than, "--newer-than"),
        limit=limit + 1 if limit and shape is Format.TABLE else limit,  # one more shows that there are more
        histories=shape is Format.PARQUET,
    )
    shown = _show(views, shape, output, limit)
    if keys is not None and found.stage(name).aggregate.window is not None:
        shown, limit = sum(any(True for _ in read(keys=[one], start=start)) for one in keys), None  # keys, not windows
    say(chosen.store_line(name, generation))
    if pointer.changes:
        say(str(pointer.changes[-1]))
    if keys is not None and shown < min(len(keys), limit or len(keys)):
        raise NotThereError(f"stage {name} has no state for {len(keys) - shown} of {counted(len(keys), 'key')}")
    if not shown and given and any(True for _ in read()):
        say(f"no state matches {' and '.join(given)}")
    elif not shown:
        raise NotThereError(
            f"no states: if the flow ran with another store, give --store, set {STORE}, or write it into {FILE}; if it ran "
            "with another --generation, give that"
        )


def _before(duration: str | None, option: str) -> int | None:
    """The time so long ago, in milliseconds since 1970."""
    from jobs import settings

    return None if duration is None else round((time.time() - settings.seconds(duration, option)) * 1000)


def _format(given: Format | None, output: Path | None, *, json: bool) -> Format:
    if json and given not in (None, Format.JSON):
        raise UsageError(f"--json and --format {given}: give one of them")
    shape = Format.JSON if json else given or Format.TABLE
    if shape is Format.PARQUET and output is None:
        raise UsageError("--format parquet: give --output FILE")
    if shape is Format.TABLE and output is not None:
        raise UsageError("--output: give --format json or --format parquet")
    return shape


def _show(views: "States", shape: Format, output: Path | None, limit: int | None) -> int:
    """Show or write states and return how many."""
    if output is not None:
        from jobs.table.files import write_json, write_parquet

        write = write_parquet if shape is Format.PARQUET else write_json
        with progress(f"writing {output}", unit="states") as bar:
            return write(views, output, bar)
    if shape is Format.JSON:
        return _lines(views)
    more = "--limit N shows pages in the order of keys, --json all"
    return _table(views, limit, "") if limit else _table(views, _ROWS, more)


def _lines(views: "Iterable[View]") -> int:
    """Write states as JSON lines and return how many."""
    shown = 0
    for shown, view in enumerate(views, start=1):  # noqa: B007 - the count is the result
        emit(view.as_json())
    return shown


def _table(views: "Iterable[View]", limit: int, more: str) -> int:
    """Show up to `limit` states and return how many; `more` says how to see the others, if not by `--after`."""
    from jobs.table.view import key_as_text

    views = iter(views)
    some = list(islice(views, limit))
    if not some:
        return 0
    fields: list[str] = []
    for view in some:
        if isinstance(view.state, dict):
            fields += [name for name in view.state if name not in fields]
    if not fields:
        fields = ["state"]
    table(
        (
            [key_as_text(view.key), *_values(view.state, fields), view.version, len(view.histories.lanes)]
            for view in some
        ),
        ["key", *fields, "version", "lanes"],
        left=["key"],
    )
    if next(views, None) is not None:
        say(f"... the first {limit:,}; {more or f'the next page: --after {shlex.quote(key_as_text(some[-1].key))}'}")
    return len(some)


def _values(state: Any, fields: list[str]) -> list[Any]:
    return [state.get(name) for name in fields] if isinstance(state, dict) else [state, *[None] * (len(fields) - 1)]
