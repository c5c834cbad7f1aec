"""Runs a flow in this process, without Spark."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.clients import own_clients
from aggregations.engine.engine import Engine
from aggregations.engine.opening import Opening, open_run
from aggregations.engine.options import RunOptions
from aggregations.engine.retry import StoppedError
from aggregations.local.executor import LocalExecutor
from aggregations.report import Report
from aggregations.run.plan import Plan
from persistence.kafka import KafkaSettings


def run_local(
    flow: Flow[Any],
    options: RunOptions | None = None,
    *,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
    **fields: Any,
) -> Report:
    """Run a flow in this thread until it is stopped, or until it has caught up with the ends of the topic at its start.

    States, manifests and epochs are those of `run_flow`: either may continue what the other began, and the newer run
    fences the older one. Runs of several flows may share a process, each in its own thread.

    Args:
        flow: The flow.
        options: Its options.
        progress: Called after each batch with its report.
        planned: Called once for each source with its plan: where each partition starts.
        stop: Set it to end the run after the current batch, or while it waits for a server before its first batch. A
            batch that takes longer than 5 more seconds and has persisted nothing, or waits for a retry, is left to the
            next run.
        fields: Fields of `RunOptions`, instead of `options`.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, at the start for a minute, or refuses a request.
        StoreError: A store does not answer, at the start for a minute, or refuses a request; `Fenced` when a newer run
            has taken over.
        RunRefusedError: It would be unsafe to continue.
        FlowError: The flow or its options cannot work.
    """
    options = RunOptions.given("run_local", options, fields).checked(flow)
    kafka, stop = options.broker, stop or threading.Event()
    try:
        opening = open_run(flow, options, planned=planned, stop=stop)
    except StoppedError:  # while a server did not answer
        return Report()
    with closing(opening.run), local_execution(flow, opening, kafka) as executor:
        return Engine(flow, opening, executor, options, progress=progress, stop=stop).stream()


@contextmanager
def local_execution(flow: Flow[Any], opening: Opening, kafka: KafkaSettings) -> Iterator[LocalExecutor]:
    """The executor of a run in this process, with consumers and a producer of its own; they are closed after the block."""
    opened = {opening.run.urls[name]: store for name, store in opening.run.stores.items()}
    with own_clients(kafka, opening.broker, opened), closing(LocalExecutor(flow, kafka)) as executor:
        yield executor
