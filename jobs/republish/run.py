"""Running a republisher as a process: the transform found by name, signals, one error line."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    made: Transform = load(transform) if isinstance(transform, str) else transform
    if not callable(made):
        raise ValueError(f"{transform} is not a function but a {type(made).__name__}")  # noqa: TRY004 - an argument
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
