"""`headwater inspect`: the stored states of a stage."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.cli.errors import Exit
from jobs.cli.options import FlowName, Generation, Json, Stores
from jobs.directory import FILE
from jobs.environment import STORE
from jobs.screen import counted, emit, say, table

if TYPE_CHECKING:
    from jobs.views import View


def inspect(
    flow: FlowName,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="The stage; optional if the flow has only one.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Show only this key, in all its windows; may be repeated.", show_default=False
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
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Show at most this many. Without it: 50, or all with --json.", show_default=False
        ),
    ] = None,
    store: Stores = None,
    generation: Generation = None,
    json: Json = False,
) -> None:
    """Show the states of a stage.

    A table shows result, version and number of lanes of each key, in a stage with windows of each window; with --json,
    a line per state also contains its histories and holes. Standard error shows which store was read; nothing is created there.

    The exit code is 1 if the store has no state of the stage, or no state of a requested key.
    """
    from jobs import settings
    from jobs.loading import load_flow
    from jobs.views import states

    found = load_flow(flow)
    name = settings.stage_of(found, stage)
    keys = None if key is None else [text.encode() for text in dict.fromkeys(key)]
    chosen = settings.of_flow(found, store, generation=generation)
    start = None if window is None else settings.time(window, "--window")
    met: set[bytes] = set()
    views = _noting(states(found, name, chosen.stores, generation=chosen.generation, keys=keys, start=start), met)
    some = _lines(islice(views, limit)) if json else _table(views, limit or 50)
    shown = some if keys is None else len(met)
    say(chosen.store_line(name))
    if keys is not None and shown < len(keys):
        say(f"stage {name} has no state for {len(keys) - shown} of {counted(len(keys), 'key')}")
    elif not shown:
        say(
            f"no states: if the flow ran with another store, give --store, set {STORE}, or write it into {FILE}; if it ran "
            "with another --generation, give that"
        )
    if shown < len(keys or [b""]):
        raise typer.Exit(Exit.FAILED)


def _noting(views: "Iterable[View]", met: set[bytes]) -> "Iterator[View]":
    """The views, while their keys are noted."""
    for view in views:
        met.add(view.key if view.window is None else view.window.key)
        yield view


def _lines(views: "Iterable[View]") -> int:
    """Write states as JSON lines and return how many."""
    shown = 0
    for shown, view in enumerate(views, start=1):  # noqa: B007 - the count is the result
        emit(view.as_json())
    return shown


def _table(views: "Iterable[View]", limit: int) -> int:
    """Show up to `limit` states and return how many."""
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
        ([_key(view), *_values(view.state, fields), view.version, len(view.histories.lanes)] for view in some),
        ["key", *fields, "version", "lanes"],
        left=["key"],
    )
    if next(views, None) is not None:
        say(f"... the first {limit:,}; --limit shows more, --json all")
    return len(some)


def _key(view: "View") -> str:
    from jobs.views import key_as_json

    return next(iter(key_as_json(view.key).values()))


def _values(state: Any, fields: list[str]) -> list[Any]:
    return [state.get(name) for name in fields] if isinstance(state, dict) else [state, *[None] * (len(fields) - 1)]
