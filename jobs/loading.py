"""Loads flows and functions by the name that the command line takes, `module:name`."""

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow


class LoadError(ValueError):
    """`module:name` could not be imported; the text says why."""


def load(reference: str) -> Any:
    """Import the object `module:name`, searching the current directory first, as `python -m` does.

    Raises:
        LoadError: The reference is invalid, or the import failed.
    """
    module, separator, name = reference.partition(":")
    if not separator or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise LoadError(
            f"{reference!r} is not a reference: write MODULE:NAME, for example fleet:flow for `flow` in fleet.py"
        )
    if module.endswith(".py"):
        raise LoadError(f"{module} is a file: write {module.removesuffix('.py')}:{name}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    found = _import(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise LoadError(f"module {module} has no {name!r}") from error
    return found


def load_function(reference: str) -> Callable[..., Any]:
    """Import the function `module:name`.

    Raises:
        LoadError: It cannot be imported, or cannot be called.
    """
    found = load(reference)
    if not callable(found):
        raise LoadError(f"{reference} is not a function but a {type(found).__name__}")
    return cast("Callable[..., Any]", found)


def load_flow(reference: str) -> "Flow[Any]":
    """Import the flow `module:name`.

    Raises:
        LoadError: It cannot be imported, or is not a flow.
        FlowError: Its definition cannot work.
    """
    from aggregations.definition.flow import Flow  # here, because a republisher loads functions and needs no flows

    found = load(reference)
    if not isinstance(found, Flow):
        raise LoadError(f"{reference} is not a Flow but a {type(found).__name__}")
    if not found.inputs:
        raise LoadError(f"flow {found.name!r} has no source()")
    _ = found.stages  # refuses a flow that neither folds nor publishes
    return found


def files_of(reference: str) -> list[Path]:
    """Files that workers on other machines need for `module:name`: its module, if that is a single file.

    Packages and installed modules must be installed on the other machines, like headwater.
    """
    module = importlib.import_module(reference.partition(":")[0])
    if "." in module.__name__ or hasattr(module, "__path__") or not module.__file__:
        return []
    file = Path(module.__file__)
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    return [] if installed & {*file.parents} else [file]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise LoadError(f"there is no module {error.name} in {os.getcwd()} or on PYTHONPATH") from error
        raise LoadError(f"importing {module} failed: {error}") from error
    except (Exception, SystemExit) as error:
        where = _place(error, module)
        raise LoadError(f"importing {module} failed at {where}: {type(error).__name__}: {error}") from error


def _place(error: BaseException, module: str) -> str:
    """The line of the module that failed, or else the innermost line of the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = f"{module.rpartition('.')[2]}.py"
    name, line = next((frame for frame in reversed(frames) if frame[0] == own), frames[-1])
    return f"{name}:{line}"
