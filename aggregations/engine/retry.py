"""Which failures of a batch are retried, how often and after what pause, and which of several failures is raised."""

import random
from collections.abc import Sequence

from aggregations.errors import RunRefusedError, TasksLostError
from persistence.errors import Conflict, Corrupt, Fenced, StoreError, Terminal, Transient
from persistence.kafka import BrokerError, BrokerUnavailable

ATTEMPTS = 9
"""Attempts at one batch before the run ends. With the pauses between them they last longer than a leader election in
Kafka or a failover of Redis; conflicts of tasks that share a key are resolved within a few attempts."""
_FIRST_PAUSE_SECONDS = 0.2

# Most severe first: the error that the driver raises when several tasks failed.
_GRAVITY: tuple[type[Exception], ...] = (Fenced, Corrupt, Terminal, RunRefusedError, StoreError, BrokerError)


def pause_seconds(attempt: int) -> float:
    """Seconds to wait after a failed attempt: 0.2, doubled each time, 51 in total, varied by a quarter."""
    return _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1) * random.uniform(0.75, 1.25)


def worst(failures: Sequence[Exception]) -> Exception:
    """The error that the driver raises or retries when several tasks failed: an unexpected one, else the most severe."""
    return min(failures, key=lambda one: next((i for i, kind in enumerate(_GRAVITY) if isinstance(one, kind)), -1))


def may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    return isinstance(error, Conflict | Transient | BrokerUnavailable | TasksLostError)


class StoppedError(Exception):
    """The run was stopped while a batch waited for a retry."""
