"""Runs a flow on Spark."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.engine.clients import own_clients
from aggregations.engine.engine import MAX_RECORDS, Engine, finish
from aggregations.engine.held import Rebuilding
from aggregations.engine.opening import open_run
from aggregations.engine.retry import StoppedError
from aggregations.engine.sampling import ALL
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.plan import Plan
from aggregations.run.start import EARLIEST, Starts, checked_starts
from aggregations.spark.action import Action
from aggregations.spark.checks import check_given
from aggregations.spark.jvm import jvm_ahead
from aggregations.spark.session import master_of, session, submitted
from persistence.growth import METADATA_MAX_AGE_SECONDS
from persistence.kafka import KafkaSettings


def run_flow(
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
    modules: Sequence[Path] = (),
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
    metadata_max_age: float = METADATA_MAX_AGE_SECONDS,
    rebuilding: Rebuilding | None = None,
) -> Report:
    """Run a flow on Spark until it is stopped, or until it has caught up with the ends of the topic at its start.

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
        start: Where a flow begins to read a topic that it has never read: `earliest`, `latest`, an aware `datetime`
            (the first records at or after it, by their timestamps), or the offset of every partition; with several
            sources also a mapping of topics to these. The stores keep it. A flow that has begun continues from its
            stores.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time, in seconds.
        max_records: Maximum number of records of one batch; 0 for no limit.
        modules: Python files that workers on other machines import by name.
        master: Spark's master; None for the master of spark-submit, else `local[2]`.
        conf: Spark settings. They override the engine's; settings given to spark-submit override both.
        progress: Called after each batch with its report.
        planned: Called once for each source with its plan: where each partition starts.
        stop: Set it to end the run after the current batch, or while it waits for a server before its first batch. A
            batch that takes longer than 5 more seconds, or waits for a retry, is left to the next run.
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
        FlowError: The flow or its stores cannot work on Spark.
        TasksLostError: Spark lost tasks repeatedly, or Spark itself ended.
    """
    stores = bind(flow, stores)
    check_type("kafka=", kafka, KafkaSettings, 'KafkaSettings, such as KafkaSettings("localhost:9092")')
    start = checked_starts(start, flow.topics)
    settings = {**(conf or {}), **submitted()}
    check_given(
        flow,
        stores,
        accept,
        master_of(master, settings),
        conf=settings,
        dead_letters=dead_letters,
        journal=journal,
        journal_share=journal_share,
    )
    group = None if rebuilding is not None else group or flow.name
    stop = stop or threading.Event()
    with jvm_ahead(master, conf or {}):
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
        try:
            with (
                session(f"headwater {flow.name}", modules=modules, master=master, conf=conf, stop=stop) as spark,
                own_clients(kafka, opening.topics, {}),
            ):
                engine = Engine(
                    flow,
                    opening,
                    Action(spark, flow),
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
                )
                return engine.stream(
                    until_caught_up=until_caught_up,
                    trigger_seconds=trigger_seconds,
                    max_records=max_records,
                    ends=None if rebuilding is None else rebuilding.until,
                )
        except StoppedError:  # while Spark started
            finish(opening.run)
            return Report()
        finally:
            opening.run.close()
