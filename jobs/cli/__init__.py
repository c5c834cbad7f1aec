"""`headwater`, the command line.

Commands import what they need when they run, so that `headwater --help` is fast. Data goes to standard
output, messages about it to standard error.
"""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from jobs import documentation, environment
from jobs.cli import (
    copying,
    demo,
    discard,
    explaining,
    faults,
    new,
    plan,
    redrive,
    refolding,
    replay,
    republish,
    run,
    schema,
    snapshot,
    stack,
    submit,
    tracing,
    views,
)
from jobs.cli.errors import Exit, explain
from jobs.environment import DEBUG
from jobs.screen import Lasting, LogLines, OutputError, emit, keep_closed, keep_encodable, say

__all__ = ["app", "fail", "main"]

app = typer.Typer(
    name="headwater",
    help="Streaming aggregation on Kafka and Spark that stays exact when messages are replayed.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 refused as unsafe, 4 found differences.\n\n\b\n"
    f"Documentation: {documentation.directory() / 'index.md'}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(stack.app, name="stack")
app.add_typer(schema.app, name="schema")
for command in (
    new.new,
    demo.demo,
    run.run,
    plan.plan,
    run.describe,
    republish.republish,
    copying.copy,
    redrive.redrive,
    discard.discard,
    snapshot.snapshot,
    snapshot.restore,
    replay.replay,
    views.inspect,
    tracing.trace,
    explaining.explain,
    explaining.blame,
    refolding.rehearse,
    refolding.audit,
    faults.faults,
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(submit.submit_command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headwater {version('headwater')}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help=f"Show stack traces and more of the log ({DEBUG}=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Options of every command."""
    environment.check()
    if debug:
        os.environ[DEBUG] = "1"
    debugging = bool(os.environ.get(DEBUG))
    lines = LogLines()
    if not debugging:
        # Client libraries log errors that they recover from; other errors are reported as headwater's own.
        lines.addFilter(Lasting("headwater.kafka"))
        lines.addFilter(lambda record: record.name.partition(".")[0] not in ("cassandra", "stamina"))
        lines.addFilter(lambda record: "py4j" not in Path(record.pathname).parts)  # it uses the root logger
    level = logging.INFO if debugging else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An expected error is reported as one line and an exit code, without a stack trace.

    Args:
        arguments: Command and options; None for those of the process.
    """
    keep_closed()
    keep_encodable()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=given, prog_name="headwater", standalone_mode=False)
    except Exception as error:
        fail(error, given)
    sys.exit(code)


def fail(error: Exception, arguments: Sequence[str]) -> NoReturn:
    """Report the error, and end the process.

    A refused command also writes its reason to standard output if its arguments include `--json`.
    """
    parser = getattr(error, "format_message", None)  # every error of the parser has it, whichever library typer uses
    code, line = (Exit.USAGE, parser()) if parser else explain(error)
    if code in (Exit.USAGE, Exit.REFUSED) and "--json" in takewhile("--".__ne__, arguments):
        with suppress(OutputError):
            emit({"refused": line})
    if parser:
        error.show()  # type: ignore[attr-defined]  # with the usage of the command
        sys.exit(code)
    if os.environ.get(DEBUG):
        raise error
    say(f"headwater: {line}")
    sys.exit(code)
