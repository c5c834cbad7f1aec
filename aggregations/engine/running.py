"""One run of a flow from its start to its end, on any executor."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.batches import Executor
from aggregations.engine.engine import Engine, finish
from aggregations.engine.opening import Opening, open_run
from aggregations.engine.options import RunOptions
from aggregations.engine.retry import StoppedError
from aggregations.report import Report
from aggregations.run.plan import Plan


def run_on(
    execution: Callable[[Opening, threading.Event], AbstractContextManager[Executor]],
    flow: Flow[Any],
    options: RunOptions,
    *,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Run a flow until it is stopped, or until it has caught up; see `run_flow` and `run_local`.

    Args:
        execution: Returns the executor of a run that passed its checks, with its clients, as a context. A start that
            takes time raises `StoppedError` when the event is set.
        flow: The flow.
        options: Checked options.
        progress: Called after each batch with its report.
        planned: Called once for each source with its plan.
        stop: Set it to end the run.

    Returns:
        The counts of all batches.
    """
    stop = stop or threading.Event()
    try:
        opening = open_run(flow, options, planned=planned, stop=stop)
    except StoppedError:  # while a server did not answer
        return Report()
    with closing(opening.run):
        try:
            with execution(opening, stop) as executor:
                return Engine(flow, opening, executor, options, progress=progress, stop=stop).stream(
                    until_caught_up=options.until_caught_up,
                    trigger_seconds=options.trigger_seconds,
                    max_records=options.max_records,
                    ends=None if options.rebuilding is None else options.rebuilding.until,
                )
        except StoppedError:  # while the executor started
            finish(opening.run)
            return Report()
