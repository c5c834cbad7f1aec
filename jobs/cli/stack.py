"""`headwater stack`: a local Kafka, Redis and Cassandra, without Docker."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.errors import Exit
from jobs.cli.options import STACK_ROOT, Json, Root
from jobs.environment import UsageError
from jobs.screen import emit, say, steps, write

if TYPE_CHECKING:
    from jobs.stack import StackState

app = typer.Typer(
    help="Start and stop a local Kafka, Redis and Cassandra. They run on loopback as ordinary processes, without Docker.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def up(
    kafka: Annotated[bool, typer.Option(help="Start Kafka.")] = True,
    redis: Annotated[bool, typer.Option("--redis", help="Start Redis, or Valkey if Redis is not installed.")] = False,
    cassandra: Annotated[bool, typer.Option("--cassandra", help="Start Cassandra.")] = False,
    heap: Annotated[int, typer.Option(metavar="MIB", min=128, help="Java heap of each Java server.")] = 512,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Start missing servers, and wait until they are ready."""
    from jobs import stack

    if not (kafka or redis or cassandra):
        raise UsageError("--no-kafka: give --redis or --cassandra; nothing is left to start")
    with steps("stack") as step:
        state = stack.up(root, kafka=kafka, redis=redis, cassandra=cassandra, heap_mb=heap, progress=step)
    _show(state, json=json)


@app.command()
def down(root: Root = STACK_ROOT, json: Json = False) -> None:
    """Stop every server of the stack. The next `up` uses the same data and ports."""
    from jobs import stack

    stopped = stack.down(root)
    if json:
        emit({"stopped": stopped})
    else:
        say(f"stopped {', '.join(stopped)}" if stopped else f"nothing runs in {root}")


@app.command()
def status(root: Root = STACK_ROOT, json: Json = False) -> None:
    """Show the running servers. The exit code is 1 if there are none."""
    from jobs import stack

    state = stack.status(root)
    if state is None:
        if json:
            emit({"servers": []})
        else:
            say(f"nothing runs in {root}: start it with `headwater stack up`")
        raise typer.Exit(Exit.FAILED)
    _show(state, json=json)


def _show(state: "StackState", *, json: bool) -> None:
    if json:
        emit({"root": str(state.root), "servers": [asdict(server) for server in state.servers]})
        return
    for server in state.servers:
        write(f"{server.name:10} {server.address}  (pid {server.pid}, log {server.log})")
