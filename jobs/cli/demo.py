"""`headwater demo`: a complete example that checks itself."""

from typing import Annotated

import typer

from jobs.cli.errors import Exit
from jobs.cli.options import Json
from jobs.cli.signals import exit_on_sigterm
from jobs.screen import emit, say


def demo(
    flights: Annotated[
        int, typer.Option(metavar="N", min=100, max=336_776, help="How many of the year's flights.")
    ] = 336_776,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL|redis|cassandra|mixed",
            help="Store of the states: a URL, or servers to start for the demo (mixed: aircraft in Redis, carriers in "
            "Cassandra). Without it: a SQLite file that is deleted at the end.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep states and logs at the end, and show where they are.")
    ] = False,
    json: Json = False,
) -> None:
    """Process real flights, kill processes, check every number.

    Flights pass a republisher and an aggregation, and both are killed while they work. The command starts and stops its
    own broker; nothing else needs to run. The exit code is 1 if a number is not exact.
    """
    from jobs.demo.home import directory, prepared
    from jobs.demo.play import play
    from jobs.demo.report import as_json, show

    with directory(keep=keep) as home, exit_on_sigterm():
        url, generation = prepared(store, home)
        result = play(flights, url, home, generation=generation)
        if json:
            emit(as_json(result))
        else:
            show(result)
        if keep and "://" in url:
            say(
                f"states: headwater inspect jobs.demo.flow:flow --stage carrier --generation {generation} --store {url}"
            )
    if not result.exact:
        raise typer.Exit(Exit.FAILED)
