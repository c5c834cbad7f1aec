"""Exit codes, and the errors that they stand for."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of every command.

    Attributes:
        DONE: Done.
        FAILED: A server does not answer or refuses the user, a store is damaged: a later attempt may succeed.
        USAGE: The command line or the settings cannot be used, whatever the servers have.
        REFUSED: They can, but what they name is not there, or it would be unsafe.
        DIFFERENCES: Done, and found differences.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    DIFFERENCES = 4


@contextmanager
def naming_topics() -> Iterator[None]:
    """The command names topics, and only reads them or ends soon: one that does not exist is refused.

    A service fails instead, and is started again: the topic may be created meanwhile.

    Raises:
        NotThereError: A topic does not exist.
    """
    from jobs.environment import NotThereError
    from persistence.kafka import TopicMissing

    try:
        yield
    except TopicMissing as error:
        raise NotThereError(str(error)) from error


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
    from jobs.environment import NotThereError, UsageError
    from jobs.loading import LoadError
    from jobs.republish.absence import Unsafe
    from jobs.screen import OutputError
    from jobs.stack import StackError
    from jobs.stack.jars import JarsUnavailable
    from jobs.stack.java import JavaUnavailable
    from persistence.errors import InvalidUrl, StoreError
    from persistence.kafka import BrokerError, SettingsError

    return {
        Exit.REFUSED: (NotThereError, RunRefusedError, DefinitionChangedError, GrowthFullError, Unsafe),
        Exit.USAGE: (FlowError, InvalidUrl, LoadError, SettingsError, UsageError),
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
