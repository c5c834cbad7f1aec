"""A program of one flow, with the options of `headwater run`."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow


def run(flow: "Flow[Any]", arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a flow as `headwater run` does, and end the process with its exit code.

    The file is imported a second time, under its own name, so that Spark's workers can import it, and its states have
    the same definition as with `headwater run`. So define the flow at module level, and put this call and all other
    actions under `if __name__ == "__main__":`.

    Args:
        flow: The flow, a variable of the calling file.
        arguments: Options of `headwater run`; None for those of the command line.
    """
    from jobs.cli import fail, main

    given = sys.argv[1:] if arguments is None else arguments
    try:
        reference = _reference(flow, sys._getframe(1).f_globals)
    except Exception as error:
        fail(error, given)
    main(["run", reference, *given])
    sys.exit(0)


def _reference(flow: "Flow[Any]", caller: dict[str, Any]) -> str:
    """`module:name` of a flow of the program.

    Raises:
        LoadError: It has none.
    """
    from aggregations.definition.flow import Flow
    from jobs.loading import LoadError

    program = sys.modules["__main__"]
    path = getattr(program, "__file__", None)
    if caller is not vars(program) or path is None:
        raise LoadError('call run(flow) in the file that is run, under `if __name__ == "__main__":`')
    file = Path(path).resolve()
    module = _imported(program.__spec__.name if program.__spec__ else file.stem, file)
    for name, value in vars(program).items():
        if value is flow and isinstance(getattr(module, name, None), Flow):
            return f"{module.__name__}:{name}"
    raise LoadError(
        f"run(flow): flow {flow.name!r} is not a variable of {file.name}; define it before "
        '`if __name__ == "__main__":`, so that Spark\'s workers can import it'
    )


def _imported(name: str, file: Path) -> ModuleType:
    """The module that the program's file is when it is imported.

    Raises:
        LoadError: Another one has that name.
    """
    from jobs.loading import LoadError

    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise LoadError(f"{file} cannot be imported as {name}: put its directory on PYTHONPATH") from error
    if Path(module.__file__ or "").resolve() != file:
        raise LoadError(f"{file} cannot be imported: {name} is the name of {module.__file__}; give it another name")
    return module
