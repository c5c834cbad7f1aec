"""Names of the environment variables that the command line reads; Kafka's settings have their own, `HEADWATER_KAFKA_*`."""

import os
import shlex
from collections.abc import Mapping
from typing import Final

DEBUG: Final = "HEADWATER_DEBUG"
"""Anything in it shows stack traces and more of the log."""
STORE: Final = "HEADWATER_STORE"
"""URL of the store of all stages; `--store` wins over it."""
FAULT: Final = "HEADWATER_FAULT"
"""Faults on purpose, see `persistence.commit.faults`."""
SPARK_LOG_LEVEL: Final = "HEADWATER_SPARK_LOG_LEVEL"
"""Spark's log level: off (the default), error, warn, info."""
STACK_JAVA_OPTIONS: Final = "HEADWATER_STACK_JAVA_OPTIONS"
"""Java options of the local stack's servers."""

_SPARK_LOG_LEVELS: Final = ("off", "fatal", "error", "warn", "info", "debug", "trace", "all")


class UsageError(ValueError):
    """An invalid argument or environment variable; the text says what to write instead."""


class NotThereError(UsageError):
    """The arguments are valid, but what they name is not there: a stage, topic, partition, record, range or key."""


def check(env: Mapping[str, str] = os.environ) -> None:
    """Refuse variables that would be ignored, or would only fail later.

    Raises:
        UsageError: A variable has an invalid value.
    """
    level = env.get(SPARK_LOG_LEVEL, "")
    if level and level.lower() not in _SPARK_LOG_LEVELS:
        raise UsageError(f"{SPARK_LOG_LEVEL}={level}: write one of {', '.join(_SPARK_LOG_LEVELS)}")
    scratch = env.get("TMPDIR", "")
    if scratch and not (os.path.isdir(scratch) and os.access(scratch, os.W_OK | os.X_OK)):
        raise UsageError(f"TMPDIR={scratch} is not a directory that this user may write: create it, or unset TMPDIR")
    try:
        shlex.split(env.get(STACK_JAVA_OPTIONS, ""))
    except ValueError as error:
        raise UsageError(f"{STACK_JAVA_OPTIONS}: {str(error).lower()}; quote its words as in a shell") from error
    if env.get(FAULT):
        from persistence.commit.faults import from_environment

        try:
            from_environment(env)
        except ValueError as error:
            raise UsageError(f"{FAULT}: {error}; `headwater faults` lists points and outcomes") from error
