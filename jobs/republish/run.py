"""Running a republisher as a process: the transform found by name, signals, one error line."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.republish.record import Transform
from jobs.republish.service import Republisher
from jobs.republish.statistics import Progress, Statistics


def load(name: str) -> Callable[..., Any]:
    """Return what `module:function` names. The working directory is searched too, as `python -m` does.

    Raises:
        ValueError: There is no such module or function; the text says which.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{name!r} names no function: write module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no module {error.name}: run it from the directory of {module_name}, or install it"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"{module_name} has no function {attribute}")  # noqa: TRY004 - a wrong argument
    return found  # type: ignore[no-any-return]


def republish(
    transform: str | Transform,
    *,
    until_caught_up: bool = False,
    progress: Progress | None = None,
    **arguments: Any,
) -> Statistics:
    """Run a republisher until SIGTERM or SIGINT; what is under way is finished and committed first.

    Args:
        transform: The transform, or `module:function`.
        until_caught_up: Stop when everything that is in the source topics now has been republished.
        progress: Called after each commit.
        arguments: Those of `Republisher`.

    Raises:
        BrokerError: What Kafka has against it, in one line with the remedy.
        ValueError: What is wrong with the arguments, in one line.
    """
    made = load(transform) if isinstance(transform, str) else transform
    republisher = Republisher(made, **arguments)
    with _stopped_by_signals(republisher):
        return republisher.run(until_caught_up=until_caught_up, progress=progress)


@contextmanager
def _stopped_by_signals(republisher: Republisher) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains; a second one ends the process as it would have without us."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def drain(number: int, frame: object) -> None:
        republisher.stop()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, drain)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
