"""Exit codes, and the errors that they stand for."""

import traceback
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    DIFFERENCES = 4


def explain(error: Exception) -> tuple[Exit, str]:
    """Return the exit code of an error, and the line to show.

    headwater's own errors name the remedy. For other errors only type and place are shown, because their text may
    quote data of a stream.
    """
    for code, kinds in _expected().items():
        if isinstance(error, kinds):
            return code, " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:  # its text contains at most a path, no data of a stream
        place = f" ({error.filename})" if error.filename else ""
        return Exit.FAILED, f"{error.strerror}{place}; `headwater --debug ...` shows where it came from"
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    return (
        Exit.FAILED,
        f"unexpected {type(error).__name__} at {place}; `headwater --debug ...` shows where it came from",
    )


def _expected() -> dict[Exit, tuple[type[Exception], ...]]:
    from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError, TasksLostError
    from envelope.dedup.eviction import GrowthFullError
    from envelope.dedup.histories import HolesFullError
    from jobs.demo.children import DemoError
    from jobs.environment import UsageError
    from jobs.loading import LoadError
    from jobs.republish.absence import Unsafe
    from jobs.screen import OutputError
    from jobs.stack import StackError
    from jobs.stack.jars import JarsUnavailable
    from jobs.stack.java import JavaUnavailable
    from persistence.errors import InvalidUrl, StoreError
    from persistence.kafka import BrokerError, SettingsError

    return {
        Exit.USAGE: (FlowError, InvalidUrl, LoadError, SettingsError, UsageError),
        Exit.REFUSED: (RunRefusedError, DefinitionChangedError, GrowthFullError, Unsafe),
        Exit.FAILED: (
            BrokerError,
            StoreError,
            StackError,
            TasksLostError,
            JarsUnavailable,
            JavaUnavailable,
            DemoError,
            OutputError,
            HolesFullError,
        ),
    }
