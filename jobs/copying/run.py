"""Runs a copy as a process: handles signals."""

from typing import Any

from jobs.copying.counts import CopyStatistics, OnCopied
from jobs.copying.service import Copy
from jobs.copying.source import CopySource
from jobs.republish.run import stopped_by_signals
from persistence.kafka import KafkaSettings


def copy(
    name: str,
    source: CopySource,
    target: str,
    settings: KafkaSettings,
    *,
    until_caught_up: bool = False,
    progress: OnCopied | None = None,
    **arguments: Any,
) -> CopyStatistics:
    """Copy until SIGTERM or SIGINT; records in flight are committed first.

    Args:
        name: Name of the copy.
        source: `TopicRecords`, `FileLines`, `QueryRows`, or a source of your own.
        target: Topic to write.
        settings: Settings of the target's cluster.
        until_caught_up: Stop when everything that is in the source now has been copied.
        progress: Called after each commit.
        arguments: More arguments of `Copy`.

    Raises:
        BrokerError: As `Copy.run`.
    """
    made = Copy(name, source, target, settings, **arguments)
    with stopped_by_signals(made):
        return made.run(until_caught_up=until_caught_up, progress=progress)
