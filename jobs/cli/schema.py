"""`headwater schema`: the tables of a store that does not create them automatically."""

from typing import Annotated

import typer

from jobs.cli.options import Json
from jobs.screen import emit, say, steps, write

app = typer.Typer(
    help="Show or create the tables of a store. Only Cassandra needs it; other stores create what they need.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
StoreUrl = Annotated[
    str, typer.Argument(metavar="STORE_URL", help="The store: cassandra://host:9042/keyspace?replication=3")
]


@app.command("print")
def print_(url: StoreUrl, json: Json = False) -> None:
    """Print the statements that create a store's tables.

    Run them in this order. The store is not contacted.
    """
    from persistence.registry import schema

    statements = schema(url)
    if json:
        emit({"statements": statements})
    elif statements:
        write("\n\n".join(f"{statement};" for statement in statements))
    else:
        say(_NOTHING)


@app.command()
def apply(url: StoreUrl, json: Json = False) -> None:
    """Create missing tables; existing ones are not changed. Only one operator may run it at a time, before any flow.

    The URL's `replication` sets the number of copies of a new keyspace.
    """
    from persistence.registry import apply_schema, schema

    needed = schema(url)
    with steps("schema") as step:
        created = apply_schema(url, step)
    if json:
        emit({"created": created})
    elif created:
        say(f"created {', '.join(created)}")
    else:
        say("all tables exist already" if needed else _NOTHING)


_NOTHING = "nothing to apply: this store creates what it needs"
