"""Folds a range of Kafka into stores of its own, in this process. Nothing is sent, and no group offsets are written."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.engine import Engine
from aggregations.engine.opening import open_run
from aggregations.engine.options import RunOptions
from aggregations.local.runner import local_execution
from aggregations.report import Report
from aggregations.run.risks import Risk
from envelope import TopicPartition


def fold_range(
    flow: Flow[Any],
    options: RunOptions,
    *,
    ends: Mapping[TopicPartition, int],
    turns: Sequence[Mapping[TopicPartition, int]] = (),
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Fold a range of the flow's topics as a run would, batch after batch, up to its end.

    Outputs and dead letters are counted instead of sent. The stores should be used for nothing else: they need not
    survive a loss of power.

    Args:
        flow: The flow.
        options: Cluster, stores by stage name, generation, accepted risks and size of batches. If the stores have states
            of the flow, these are continued, and `start` counts for other topics only. Redriven dead letters name the
            generation that rejected them.
        ends: Offset after the last record that is read, by topic and partition; others are not read.
        turns: Ends up to which it is read first, one after the other.
        progress: Called after each batch with its report.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request.
        RunRefusedError: A source is compacted and the risk is not accepted, or the range is not in the log and the archive.
    """
    accept = [*options.accept, Risk.NOT_DURABLE]
    options = replace(options, dead_letters=None, journal=None, group=None, sends=False, until_caught_up=True)
    options = replace(options, accept=accept)
    opening, report = open_run(flow, options, ends=ends), Report()
    with closing(opening.run), local_execution(flow, opening, options.broker) as executor:
        engine = Engine(flow, opening, executor, options, progress=progress, stop=threading.Event())
        for turn in (*turns, ends):
            report = engine.stream(turn)
        return report
