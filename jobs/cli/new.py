"""`headwater new`: creates a project."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import Json, path_of
from jobs.screen import emit, write


def new(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the project: empty or new.", parser=path_of)
    ],
    json: Json = False,
) -> None:
    """Create a project that is ready to run.

    It has a flow, a republisher, a producer of sample data, a Spark program, tests and a Makefile. `make test` runs it
    in memory, `make run` on a local Kafka that `headwater stack up` starts.
    """
    from jobs.new import create

    names = create(directory)
    move = [] if directory.absolute() == Path.cwd() else [f"cd {shlex.quote(os.fspath(directory))}"]
    commands = [*move, "pip install pytest", "make test", "make run"]
    if json:
        emit({"directory": os.fspath(directory.absolute()), "files": names, "next": commands})
        return
    write(f"Created {', '.join(names)} in {directory}. Next:\n")
    write("\n".join(f"  {command}" for command in commands))
