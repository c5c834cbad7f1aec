"""Runs a flow on Spark."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.clients import own_clients
from aggregations.engine.opening import Opening
from aggregations.engine.options import RunOptions
from aggregations.engine.running import run_on
from aggregations.report import Report
from aggregations.run.plan import Plan
from aggregations.spark.action import Action
from aggregations.spark.checks import check_given
from aggregations.spark.jvm import jvm_ahead
from aggregations.spark.session import master_of, session, submitted


def run_flow(
    flow: Flow[Any],
    options: RunOptions,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    modules: Sequence[Path] = (),
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Run a flow on Spark until it is stopped, or until it has caught up with the ends of the topic at its start.

    Args:
        flow: The flow.
        options: Its options.
        master: Spark's master; None for the master of spark-submit, else `local[2]`.
        conf: Spark settings. They override the engine's; settings given to spark-submit override both.
        modules: Python files that workers on other machines import by name.
        progress: Called after each batch with its report.
        planned: Called once for each source with its plan: where each partition starts.
        stop: Set it to end the run after the current batch, or while it waits for a server before its first batch. A
            batch that takes longer than 5 more seconds, or waits for a retry, is left to the next run.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, at the start for a minute, or refuses a request.
        StoreError: A store does not answer, at the start for a minute, or refuses a request; `Fenced` when a newer run
            has taken over.
        RunRefusedError: It would be unsafe to continue.
        FlowError: The flow or its options cannot work on Spark.
        TasksLostError: Spark lost tasks repeatedly, or Spark itself ended.
    """
    settings = {**(conf or {}), **submitted()}
    options = check_given(flow, options, master_of(master, settings), conf=settings)
    kafka = options.broker

    @contextmanager
    def execution(opening: Opening, stop: threading.Event) -> Iterator[Action]:
        with (
            session(f"headwater {flow.name}", modules=modules, master=master, conf=conf, stop=stop) as spark,
            own_clients(kafka, opening.topics, {}),
        ):
            yield Action(spark, flow)

    with jvm_ahead(master, conf or {}):
        return run_on(execution, flow, options, progress=progress, planned=planned, stop=stop)
