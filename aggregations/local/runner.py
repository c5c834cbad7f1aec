"""Runs a flow in this process, without Spark."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.engine.clients import own_clients
from aggregations.engine.engine import MAX_RECORDS, Engine
from aggregations.engine.held import Rebuilding
from aggregations.engine.opening import Opening, check_arguments, open_run
from aggregations.engine.retry import StoppedError
from aggregations.engine.sampling import ALL
from aggregations.local.executor import LocalExecutor
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.plan import Plan
from aggregations.run.start import EARLIEST, Starts, checked_starts
from persistence.growth import METADATA_MAX_AGE_SECONDS
from persistence.kafka import KafkaSettings


def run_local(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None = None,
    journal: str | None = None,
    journal_share: float = ALL,
    group: str | None = None,
    generation: int | None = None,
    accept: Sequence[str] = (),
    start: Starts = EARLIEST,
    until_caught_up: bool = False,
    trigger_seconds: float = 1.0,
    max_records: int = MAX_RECORDS,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
    metadata_max_age: float = METADATA_MAX_AGE_SECONDS,
    rebuilding: Rebuilding | None = None,
) -> Report:
    """Run a flow in this thread until it is stopped, or until it has caught up with the ends of the topic at its start.

    States, manifests and epochs are those of `run_flow`: either may continue what the other began, and the newer run
    fences the older one. Runs of several flows may share a process, each in its own thread.

    Args:
        flow: The flow.
        kafka: Settings of the Kafka cluster with its source, outputs and dead letters.
        stores: URL of the store by stage name, as for `aggregations.run.binding.bind`.
        dead_letters: Dead-letter topic. Without one the first record that cannot be used ends the run.
        journal: Topic that gets an entry for each batch, for `headwater explain`; None for none.
        journal_share: Share of the events whose dropped records it lists, above 0 and at most 1.
        group: Consumer group whose offsets show the flow's progress to lag tools; the flow's name when None.
        generation: Generation of the states; None for the live one.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        start: Where a flow begins to read a topic that it has never read, as for `run_flow`.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time, in seconds.
        max_records: Maximum number of records of one batch; 0 for no limit.
        progress: Called after each batch with its report.
        planned: Called once for each source with its plan: where each partition starts.
        stop: Set it to end the run after the current batch, or while it waits for a server before its first batch. A
            batch that takes longer than 5 more seconds and has persisted nothing, or waits for a retry, is left to the
            next run.
        metadata_max_age: Seconds for which producers of the source topic may not know of added partitions: the
            largest `metadata.max.age.ms` of all producers.
        rebuilding: The run rebuilds a generation for `jobs.replay`; None for any other run.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, at the start for a minute, or refuses a request.
        StoreError: A store does not answer, at the start for a minute, or refuses a request; `Fenced` when a newer run
            has taken over.
        RunRefusedError: It would be unsafe to continue.
        FlowError: The flow or its stores cannot work.
    """
    stores = bind(flow, stores)
    check_type("kafka=", kafka, KafkaSettings, 'KafkaSettings, such as KafkaSettings("localhost:9092")')
    start = checked_starts(start, flow.topics)
    check_arguments(flow, stores, accept, dead_letters=dead_letters, journal=journal, journal_share=journal_share)
    group = None if rebuilding is not None else group or flow.name
    stop = stop or threading.Event()
    try:
        opening = open_run(
            flow,
            kafka=kafka,
            stores=stores,
            dead_letters=dead_letters,
            journal=journal,
            group=group,
            generation=generation,
            accept=accept,
            start=start,
            planned=planned,
            sends=rebuilding is None,
            rebuilding=rebuilding,
            stop=stop,
        )
    except StoppedError:  # while a server did not answer
        return Report()
    with local_engine(
        flow,
        opening,
        kafka=kafka,
        dead_letters=dead_letters,
        group=group,
        progress=progress,
        stop=stop,
        metadata_max_age=metadata_max_age,
        journal=journal,
        journal_share=journal_share,
        sends=rebuilding is None,
        rebuilding=rebuilding,
    ) as engine:
        return engine.stream(
            until_caught_up=until_caught_up,
            trigger_seconds=trigger_seconds,
            max_records=max_records,
            ends=None if rebuilding is None else rebuilding.until,
        )


@contextmanager
def local_engine(flow: Flow[Any], opening: Opening, *, kafka: KafkaSettings, **given: Any) -> Iterator[Engine]:
    """The engine of a run in this process, with consumers and a producer of its own; the run is closed after the block.

    Args:
        flow: The flow.
        opening: The run.
        kafka: Settings of the Kafka cluster.
        given: Further arguments of `Engine`.
    """
    run = opening.run
    opened = {run.urls[name]: store for name, store in run.stores.items()}
    with closing(run), own_clients(kafka, opening.topics, opened), closing(LocalExecutor(flow, kafka)) as executor:
        yield Engine(flow, opening, executor, kafka=kafka, **given)
