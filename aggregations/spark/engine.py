"""The engine: runs a flow as a Spark Structured Streaming query over Kafka, exact across crashes."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from aggregations.definition.flow import Flow
from aggregations.errors import FlowError, RunRefusedError, TasksLostError
from aggregations.report import Report
from aggregations.run.plan import Plan
from aggregations.run.run import Run
from aggregations.spark.action import first_line
from aggregations.spark.batches import Batches
from aggregations.spark.checkpoint import Checkpoint
from aggregations.spark.group_offsets import GroupOffsets
from aggregations.spark.kafka_source import read_topic
from aggregations.spark.opening import Opening, check_given, open_run
from aggregations.spark.partition_watch import PartitionWatch
from aggregations.spark.retry import StoppedError
from aggregations.spark.session import master_of, session, submitted
from envelope import TopicPartition
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.errors import StoreError
from persistence.growth import METADATA_MAX_AGE_SECONDS
from persistence.kafka import BrokerError, BrokerUnavailable, KafkaSettings

MAX_RECORDS = 1_000_000
"""Maximum number of records of one batch: without it the first batch of a flow would be the whole topic."""
_LOG = logging.getLogger("headwater.spark")

_LOOK_SECONDS = 1.0
"""Seconds between two checks of the number of partitions, when Spark does not read new partitions by itself."""
_STOP_SECONDS = 5.0
"""Seconds that a stop waits for the batch under way before it cancels the batch."""
_POLLING = "spark.sql.streaming.pollingDelay"  # how long Spark waits when there is nothing to read
_LEAST_POLLING_MS = 10


def run_flow(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None = None,
    group: str | None = None,
    generation: int = 1,
    accept: Sequence[str] = (),
    until_caught_up: bool = False,
    trigger_seconds: float = 1.0,
    max_records: int = MAX_RECORDS,
    jars: Sequence[Path] = (),
    modules: Sequence[Path] = (),
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
    metadata_max_age: float = METADATA_MAX_AGE_SECONDS,
) -> Report:
    """Run a flow on Spark until it is stopped, or until it has caught up with the ends of the topic at its start.

    Args:
        flow: The flow.
        kafka: Settings of the Kafka cluster with its source, outputs and dead letters.
        stores: URL of the store by stage name, from `aggregations.run.binding.bind`.
        dead_letters: Dead-letter topic. Without one the first record that cannot be used ends the run.
        group: Consumer group whose offsets show the flow's progress to lag tools; the flow's name when None.
        generation: Generation of the states.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time, in seconds.
        max_records: Maximum number of records of one batch; 0 for no limit.
        jars: Spark's Kafka connector and its dependencies; spark-submit provides its own.
        modules: Python files that workers on other machines import by name.
        master: Spark's master; None for the master of spark-submit, else `local[2]`.
        conf: Spark settings. They override the engine's; settings given to spark-submit override both.
        progress: Called after each batch with its report.
        planned: Called once with the plan: where each partition starts.
        stop: Set it to end the run after the current batch. A batch that takes longer than 5 more seconds, or waits for
            a retry, is left to the next run.
        metadata_max_age: Seconds for which producers of the source topic may not know of added partitions: the
            largest `metadata.max.age.ms` of all producers.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request; `Fenced` when a newer run has taken over.
        RunRefusedError: It would be unsafe to continue.
        FlowError: The flow or its stores cannot work on Spark.
        TasksLostError: Spark lost tasks repeatedly, or Spark itself ended.
    """
    if flow.topic is None:
        raise FlowError(f"flow {flow.name!r} has no source")
    settings = {**(conf or {}), **submitted()}
    check_given(flow, stores, accept, master_of(master, settings), conf=settings, dead_letters=dead_letters)
    group = group or flow.name
    stop = stop or threading.Event()
    opening = open_run(
        flow,
        kafka=kafka,
        stores=stores,
        dead_letters=dead_letters,
        group=group,
        generation=generation,
        accept=accept,
        planned=planned,
    )
    try:
        polling = {_POLLING: f"{max(int(trigger_seconds * 1000), _LEAST_POLLING_MS)}ms", **(conf or {})}
        with session(
            f"headwater {flow.name}", jars=jars, modules=modules, master=master, conf=polling, stop=stop
        ) as spark:
            engine = Engine(
                flow,
                opening,
                spark,
                kafka=kafka,
                dead_letters=dead_letters,
                group=group,
                progress=progress,
                stop=stop,
                metadata_max_age=metadata_max_age,
            )
            return engine.stream(
                until_caught_up=until_caught_up, trigger_seconds=trigger_seconds, max_records=max_records
            )
    except StoppedError:  # while Spark started
        _finish(opening.run)
        return Report()
    finally:
        opening.run.close()


def _finish(run: Run) -> None:
    """Note that the run ended cleanly. If that fails, the next run doubts what this run may have read."""
    try:
        run.finish()
    except StoreError as error:
        _LOG.warning("end of the run: %s", error)


class Engine:
    """One run of a flow: Spark's queries, whose batches it commits one after the other."""

    def __init__(
        self,
        flow: Flow[Any],
        opening: Opening,
        spark: SparkSession,
        *,
        kafka: KafkaSettings,
        dead_letters: str | None,
        group: str,
        progress: Callable[[Report], None] | None,
        stop: threading.Event,
        metadata_max_age: float,
    ) -> None:
        self.flow = flow
        self.opening = opening
        self.run = opening.run
        self.kafka = kafka
        self._spark = spark
        self._growing = PartitionWatch(opening, metadata_max_age)
        self._offsets = GroupOffsets(group, opening.topics, opening.run)
        self.batches = Batches(
            flow,
            opening,
            spark,
            self._growing,
            kafka=kafka,
            dead_letters=dead_letters,
            progress=progress,
            stop=stop,
        )
        self._stop = stop
        self._busy = threading.Lock()
        self._interval = 0.0
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._abandoned = False
        self._done: queue.SimpleQueue[Mapping[TopicPartition, int]] = queue.SimpleQueue()

    def stream(self, *, until_caught_up: bool, trigger_seconds: float, max_records: int) -> Report:
        """Run the query, and a new one over more partitions when waiting partitions become readable; see `run_flow`."""
        starts = self.opening.plan.starts
        while starts:
            self._query(
                starts, until_caught_up=until_caught_up, trigger_seconds=trigger_seconds, max_records=max_records
            )
            starts = {} if self._stop.is_set() else self._growing.widened()
        if not self._abandoned:
            _finish(self.run)
        return self.batches.total.counts

    def _query(
        self, starts: Mapping[int, int], *, until_caught_up: bool, trigger_seconds: float, max_records: int
    ) -> None:
        """Run a query and commit group offsets as its batches end."""
        stopping = self._stopping = threading.Event()
        rows = read_topic(self._spark, self.flow, starts, kafka=self.kafka, max_records=max_records)
        with Checkpoint() as checkpoint:
            writer = rows.writeStream.foreachBatch(
                lambda batch, number: self._batch(batch, lambda: checkpoint.ends(number), stopping)
            )
            # Spark's own interval ends at a wall-clock time: a clock that is set back would pause the run for as long.
            writer = (
                writer.trigger(availableNow=True) if until_caught_up else writer.trigger(processingTime="0 seconds")
            )
            self._interval = 0.0 if until_caught_up else trigger_seconds
            query = writer.option("checkpointLocation", f"file://{checkpoint.path}").start()
            try:
                self._follow(query)
            except (Py4JError, ConnectionError) as error:
                if isinstance(error, Py4JJavaError):
                    raise
                if self._stop.is_set():  # the signal that stopped the run ended its JVM as well
                    self._abandoned = True
                    return
                raise TasksLostError("Spark's JVM ended. Check its memory (--conf spark.driver.memory=...)") from None
            finally:
                with suppress(Py4JError, ConnectionError):  # the JVM may have ended already
                    query.stop()

    def _follow(self, query: StreamingQuery) -> None:
        """Commit group offsets as batches end, and periodically when none ends, until the query ends."""
        began = looked = time.monotonic()
        while query.isActive and not self._stop.is_set() and self._failure is None and not self._growing.widens:
            if self.flow.publishes and time.monotonic() - looked > _LOOK_SECONDS:
                self._look()
                looked = time.monotonic()
            try:
                self._offsets.write(self._done.get(timeout=0.1))
            except queue.Empty:
                self._offsets.repeat(began)
        while not self._busy.acquire(timeout=_STOP_SECONDS):  # a batch that has started is finished
            if self._stop.is_set():
                self._spark.sparkContext.cancelJobGroup(str(query.runId))
        self._stopping.set()
        self._busy.release()
        # Not under the lock: Spark waits for a batch that waits for it.
        query.stop()
        while not self._done.empty():
            self._offsets.write(self._done.get())
        if not self._offsets.written_at and self._failure is None:
            self._offsets.write_reached()
        if self._failure is not None:
            raise self._failure
        failed = query.exception()
        if failed is not None and not self._stop.is_set():
            self.batches.check_source()
            raise BrokerUnavailable(
                f"Spark's query on {self.run.source} ended: {first_line(str(failed))}",
                "If records were deleted meanwhile, start again to see which; otherwise check the broker",
            )

    def _look(self) -> None:
        """Look for new partitions even without a batch, when Spark does not read them by itself."""
        try:
            with self._busy, suppress(BrokerUnavailable, StoppedError):
                if self._growing.look(self.run.positions):
                    self.batches.advance(self.run.noting())
        except (BrokerError, RunRefusedError, StoreError) as error:
            self._failure = error

    def _batch(self, rows: DataFrame, ends: Callable[[], dict[TopicPartition, int]], stopping: threading.Event) -> None:
        """What foreachBatch calls."""
        next_one = time.monotonic() + self._interval
        try:
            with self._busy:
                if not stopping.is_set():
                    self._commit(rows, ends())
            self._stop.wait(max(next_one - time.monotonic(), 0.0))
        # Nothing is raised into Spark, whose checkpoint is not read again: py4j would log a stack trace.
        except StoppedError:
            self._abandoned = True  # it may have persisted a part, which the next run must not treat as proven
            stopping.set()
        except BaseException as error:
            self._failure = error
            stopping.set()

    def _commit(self, rows: DataFrame, ends: Mapping[TopicPartition, int]) -> None:
        """Commit a batch; its end offsets become the group's."""
        self.batches.commit_batch(rows, ends)
        self._done.put(ends)
        effect(CommitStep.RETURN, lambda: None)
