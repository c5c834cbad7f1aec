"""Folds a range of Kafka into stores of its own, in this process. Nothing is sent, and no group offsets are written."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.engine import MAX_RECORDS
from aggregations.engine.opening import open_run
from aggregations.local.runner import local_engine
from aggregations.report import Report
from aggregations.run.risks import Risk
from aggregations.run.start import EARLIEST, Starts
from envelope import TopicPartition
from persistence.growth import METADATA_MAX_AGE_SECONDS
from persistence.kafka import KafkaSettings


def fold_range(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    ends: Mapping[TopicPartition, int],
    turns: Sequence[Mapping[TopicPartition, int]] = (),
    start: Starts = EARLIEST,
    generation: int = 1,
    accept: Sequence[str] = (),
    max_records: int = MAX_RECORDS,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Fold a range of the flow's topics as a run would, batch after batch, up to its end.

    Outputs and dead letters are counted instead of sent. The stores should be used for nothing else: they need not
    survive a loss of power.

    Args:
        flow: The flow.
        kafka: Settings of the Kafka cluster with its sources.
        stores: URL of the store by stage name, from `bind`. If they have states of the flow, these are continued.
        ends: Offset after the last record that is read, by topic and partition; others are not read.
        turns: Ends up to which it is read first, one after the other.
        start: Where to begin, as for `run_local`; unused for topics that the stores have positions of.
        generation: Generation of the states. Redriven dead letters name the generation that rejected them.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        max_records: Maximum number of records of one batch; 0 for no limit.
        progress: Called after each batch with its report.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request.
        RunRefusedError: A source is compacted and the risk is not accepted, or the range is not in the log.
    """
    opening = open_run(
        flow,
        kafka=kafka,
        stores=stores,
        dead_letters=None,
        group=None,
        generation=generation,
        accept=[*accept, Risk.NOT_DURABLE],
        start=start,
        sends=False,
    )
    with local_engine(
        flow,
        opening,
        kafka=kafka,
        dead_letters=None,
        group=None,
        progress=progress,
        stop=threading.Event(),
        metadata_max_age=METADATA_MAX_AGE_SECONDS,
        sends=False,
    ) as engine:
        for turn in turns:
            engine.stream(until_caught_up=True, trigger_seconds=0, max_records=max_records, ends=turn)
        return engine.stream(until_caught_up=True, trigger_seconds=0, max_records=max_records, ends=ends)
