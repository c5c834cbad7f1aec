"""Runs a republisher as a process: finds the transform by name, handles signals, reports errors in one line."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from jobs.environment import UsageError
from jobs.loading import load
from jobs.republish.counts import OnStatistics, Statistics
from jobs.republish.record import Transform
from jobs.republish.service import Republisher


def republish(
    transform: str | Transform,
    *,
    until_caught_up: bool = False,
    progress: OnStatistics | None = None,
    **arguments: Any,
) -> Statistics:
    """Run a republisher until SIGTERM or SIGINT; records in flight are finished and committed first.

    Args:
        transform: The transform, or `module:function`.
        until_caught_up: Stop when everything that is in the source topics now has been republished.
        progress: Called after each commit.
        arguments: Arguments of `Republisher`.

    Raises:
        BrokerError: Kafka does not answer or refuses; one line with the remedy.
        UsageError: The arguments are invalid; one line.
    """
    made: Transform = load(transform) if isinstance(transform, str) else transform
    if not callable(made):
        raise UsageError(f"{transform} is not a function but a {type(made).__name__}")
    republisher = Republisher(made, **arguments)
    with stopped_by_signals(republisher):
        return republisher.run(until_caught_up=until_caught_up, progress=progress)


class Stoppable(Protocol):
    """A service that can be asked to stop."""

    def stop(self) -> None:
        """Make it finish what is in flight and return."""


@contextmanager
def stopped_by_signals(service: Stoppable) -> Iterator[None]:
    """Drain on the first SIGTERM or SIGINT; a second one has its default effect and ends the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def drain(number: int, frame: object) -> None:
        service.stop()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, drain)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
