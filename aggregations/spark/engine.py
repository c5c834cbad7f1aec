"""The engine: runs a flow on Spark, batch after batch of Kafka's records, exact across crashes."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.errors import SparkEndedError
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.plan import Plan
from aggregations.run.run import Run
from aggregations.run.start import EARLIEST, Start, checked
from aggregations.spark.batches import Batches
from aggregations.spark.group_offsets import GroupOffsets
from aggregations.spark.jvm import jvm_ahead
from aggregations.spark.opening import Opening, check_given, open_run
from aggregations.spark.partition_watch import PartitionWatch
from aggregations.spark.ranges import Range, Source, before, slots_of, within
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
"""Seconds between two checks of the number of partitions, when new partitions are not read at once."""
_STOP_SECONDS = 5.0
"""Seconds that a stop waits for the batch under way before it cancels the batch."""
_LEAST_SECONDS = 0.01
"""Shortest persist interval, in seconds."""


def run_flow(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None = None,
    group: str | None = None,
    generation: int = 1,
    accept: Sequence[str] = (),
    start: Start = EARLIEST,
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
) -> Report:
    """Run a flow on Spark until it is stopped, or until it has caught up with the ends of the topic at its start.

    Args:
        flow: The flow.
        kafka: Settings of the Kafka cluster with its source, outputs and dead letters.
        stores: URL of the store by stage name, as for `aggregations.run.binding.bind`.
        dead_letters: Dead-letter topic. Without one the first record that cannot be used ends the run.
        group: Consumer group whose offsets show the flow's progress to lag tools; the flow's name when None.
        generation: Generation of the states.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        start: Where a flow begins to read a topic that it has never read: `earliest`, `latest`, an aware `datetime`
            (the first records at or after it, by their timestamps), or the offset of every partition. The stores keep
            it. A flow that has begun continues from its stores.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time, in seconds.
        max_records: Maximum number of records of one batch; 0 for no limit.
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
    stores = bind(flow, stores)
    check_type("kafka=", kafka, KafkaSettings, 'KafkaSettings, such as KafkaSettings("localhost:9092")')
    start = checked(start)
    settings = {**(conf or {}), **submitted()}
    check_given(flow, stores, accept, master_of(master, settings), conf=settings, dead_letters=dead_letters)
    group = group or flow.name
    stop = stop or threading.Event()
    with jvm_ahead(master, conf or {}):
        opening = open_run(
            flow,
            kafka=kafka,
            stores=stores,
            dead_letters=dead_letters,
            group=group,
            generation=generation,
            accept=accept,
            start=start,
            planned=planned,
        )
        try:
            with session(f"headwater {flow.name}", modules=modules, master=master, conf=conf, stop=stop) as spark:
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
                    until_caught_up=until_caught_up,
                    trigger_seconds=0.0 if until_caught_up else max(trigger_seconds, _LEAST_SECONDS),
                    max_records=max_records,
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
    """One run of a flow: commits batches one after the other, each of which is one or two actions of Spark."""

    def __init__(
        self,
        flow: Flow[Any],
        opening: Opening,
        spark: SparkContext,
        *,
        kafka: KafkaSettings,
        dead_letters: str | None,
        group: str,
        progress: Callable[[Report], None] | None,
        stop: threading.Event,
        metadata_max_age: float,
    ) -> None:
        self.flow = flow
        self.run = opening.run
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
        self._source = Source(opening.topics, opening.run.source, widens=not flow.publishes)
        self._stop = stop
        self._looked = 0.0

    def stream(self, *, until_caught_up: bool, trigger_seconds: float, max_records: int) -> Report:
        """Commit batch after batch; see `run_flow`."""
        total = self.batches.total
        try:
            with self._cancelling():
                self._loop(trigger_seconds, max_records, until_caught_up=until_caught_up)
        except StoppedError:
            return total.counts  # it may have persisted a part, which the next run must not treat as proven
        except SparkEndedError:
            if self._stop.is_set():  # the signal that stopped the run ended its JVM as well
                return total.counts
            raise
        if not self._offsets.written_at:
            self._offsets.write_reached()
        _finish(self.run)
        return total.counts

    def _loop(self, trigger_seconds: float, max_records: int, *, until_caught_up: bool) -> None:
        goal: dict[int, int] | None = None
        began = time.monotonic()
        while not self._stop.is_set():
            begin = time.monotonic()
            backlog = self._backlog()
            if self._stop.is_set():
                return
            if until_caught_up:
                goal = goal if goal is not None else {one.partition: one.end for one in backlog}
                backlog = before(backlog, goal)
            if ranges := within(backlog, max_records):
                self._commit(ranges)
            elif until_caught_up:
                if not self._growing.widened():
                    return
                goal = None
            else:
                self._idle(began)
            if ranges == backlog:  # otherwise a whole batch is left
                self._stop.wait(max(begin + trigger_seconds - time.monotonic(), 0.0))

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """Cancel the batch under way if it takes too long after the run was stopped."""
        ended = threading.Event()

        def cancel() -> None:
            while not self._stop.wait(_LOOK_SECONDS):
                if ended.is_set():
                    return
            while not ended.wait(_STOP_SECONDS):
                self.batches.cancel()

        watch = threading.Thread(target=cancel, name="headwater-stop", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()

    def _backlog(self) -> list[Range]:
        """All that there is to read. A broker that does not answer is asked again."""
        for attempt in count(1):
            try:
                return self._source.look(self.run.positions)
            except BrokerError as error:
                self.batches.check_source()
                if not isinstance(error, BrokerUnavailable):
                    raise
                try:
                    self.batches.pause(f"ends of {self.run.source}", attempt, error)
                except StoppedError:  # between batches
                    break
        return []

    def _commit(self, ranges: Sequence[Range]) -> None:
        """Commit a batch; its end offsets become the group's."""
        topic = self.run.source
        ends = {**self._source.positions, **{one.partition: one.end for one in ranges}}
        named = {TopicPartition(topic, partition): end for partition, end in ends.items()}
        self.batches.commit_batch(slots_of(ranges, self.batches.slots), named)
        effect(CommitStep.RETURN, lambda: None)
        self._offsets.write(named)
        if self._growing.widens:
            self._growing.widened()

    def _idle(self, began: float) -> None:
        """What is done when there is nothing to read."""
        self._offsets.repeat(began)
        if self.flow.publishes and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(BrokerUnavailable, StoppedError):
                if self._growing.look(self.run.positions):
                    self.batches.advance(self.run.noting())
                if self._growing.widens:
                    self._growing.widened()
