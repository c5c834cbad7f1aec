"""The engine: runs a flow as a Spark Structured Streaming query over Kafka, exact across crashes."""

import json
import logging
import os
import queue
import random
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
from aggregations.errors import FlowError, RunRefusedError, SharedKeyError, TasksLostError
from aggregations.per_message.ledger import Doubt, Entry, UnlistedError
from aggregations.report import Report
from aggregations.run.incarnations import merge_incarnations
from aggregations.run.start import Plan
from aggregations.spark.action import Action, first_line
from aggregations.spark.checkpoint import Checkpoint
from aggregations.spark.growing import Growing
from aggregations.spark.job import Exclusion, Job, RecordAtStage, TaskReport
from aggregations.spark.opening import Opening, check_given, open_run
from aggregations.spark.roots import ask_ends, check_source, ids_of
from aggregations.spark.session import master_of, session, submitted
from envelope.dedup.history import width_of
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.errors import Conflict, Corrupt, Fenced, StoreError, Terminal, Transient
from persistence.growth import METADATA_MAX_AGE_SECONDS
from persistence.kafka import BrokerError, BrokerUnavailable, KafkaSettings
from persistence.manifest import Manifest

MAX_RECORDS = 1_000_000
"""Maximum number of records of one batch: without it the first batch of a flow would be the whole topic."""
ATTEMPTS = 9
"""Attempts at one batch before the run ends. With the pauses between them they last longer than a leader election in
Kafka or a failover of Redis; conflicts of tasks that share a key are resolved within a few attempts."""
OFFSETS_SECONDS = 30.0
"""Seconds between writes of the group's offsets when there is nothing to read. An older run that was frozen right
before its write may have set them back."""
_FIRST_PAUSE_SECONDS = 0.2
_LOG = logging.getLogger("headwater.spark")

_LOOK_SECONDS = 1.0
"""Seconds between two checks of the number of partitions, when Spark does not read new partitions by itself."""
_POLLING = "spark.sql.streaming.pollingDelay"  # how long Spark waits when there is nothing to read
_LEAST_POLLING_MS = 10

# Most severe first: the error that the driver raises when several tasks failed.
_GRAVITY: tuple[type[Exception], ...] = (Fenced, Corrupt, Terminal, RunRefusedError, StoreError, BrokerError)

# Measured: 540-690 thousand records a second instead of 150-190 with the connector's defaults.
_CONSUMER = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.receive.buffer.bytes": str(1 << 20),
    # At the end of the log a fetch waits this long for new records.
    "kafka.fetch.max.wait.ms": "50",
    "kafka.isolation.level": "read_committed",
}


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
        accept: Names of accepted risks; see `aggregations.run.start.Risk`.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time, in seconds.
        max_records: Maximum number of records of one batch; 0 for no limit.
        jars: Spark's Kafka connector and its dependencies; spark-submit provides its own.
        modules: Python files that workers on other machines import by name.
        master: Spark's master; None for the master of spark-submit, else `local[2]`.
        conf: Spark settings. They override the engine's; settings given to spark-submit override both.
        progress: Called after each batch with its report.
        planned: Called once with the plan: where each partition starts.
        stop: Set it to end the run after the current batch; a batch that waits for a retry is left to the next run.
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
        with session(f"headwater {flow.name}", jars=jars, modules=modules, master=master, conf=polling) as spark:
            engine = Engine(
                flow,
                opening,
                spark,
                kafka=kafka,
                dead_letters=dead_letters,
                group=group,
                progress=progress,
                stop=stop or threading.Event(),
                metadata_max_age=metadata_max_age,
            )
            return engine.stream(
                until_caught_up=until_caught_up, trigger_seconds=trigger_seconds, max_records=max_records
            )
    finally:
        opening.run.close()


def pause_seconds(attempt: int) -> float:
    """Seconds to wait after a failed attempt: 0.2, doubled each time, 51 in total, varied by a quarter."""
    return _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1) * random.uniform(0.75, 1.25)


class _StoppedError(Exception):
    """The run was stopped while a batch waited for a retry."""


class Engine:
    """One run of a flow: folds batches of Kafka records and commits each in the protocol's order."""

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
        assert flow.topic is not None
        self.flow = flow
        self.topic = flow.topic
        self.opening = opening
        self.run = opening.run
        self.kafka = kafka
        self.dead_letters = dead_letters
        self.group = group
        self.total = TaskReport()
        self._spark = spark
        self._action = Action(spark, flow)
        self._growing = Growing(opening, metadata_max_age)
        self._progress = progress
        self._stop = stop
        self._busy = threading.Lock()
        self._interval = 0.0
        self._stopping = threading.Event()
        self._spread = False
        self._warned = False
        self._failure: BaseException | None = None
        self._abandoned = False
        self._done: queue.SimpleQueue[dict[tuple[str, int], int]] = queue.SimpleQueue()
        self._told = 0.0  # when the group's offsets were last written; 0 when this run has not written them yet

    def stream(self, *, until_caught_up: bool, trigger_seconds: float, max_records: int) -> Report:
        """Run the query, and a new one over more partitions when waiting partitions become readable; see `run_flow`."""
        starts = self.opening.plan.starts
        while starts:
            self._query(
                starts, until_caught_up=until_caught_up, trigger_seconds=trigger_seconds, max_records=max_records
            )
            starts = {} if self._stop.is_set() else self._growing.widened()
        self._finish()
        return self.total.counts

    def _query(
        self, starts: Mapping[int, int], *, until_caught_up: bool, trigger_seconds: float, max_records: int
    ) -> None:
        """Run a query and commit group offsets as its batches end."""
        stopping = self._stopping = threading.Event()
        # If no order must be kept, Spark reads new partitions by itself.
        which = {"assign": json.dumps({self.topic.name: sorted(starts)})} if self.flow.publishes else {}
        reader = self._spark.readStream.format("kafka").options(
            **(which or {"subscribe": self.topic.name}),
            startingOffsets=json.dumps({self.topic.name: {str(one): offset for one, offset in starts.items()}}),
            failOnDataLoss="true",
            includeHeaders=str(not self.flow.is_columnar).lower(),
            **_CONSUMER,
            **self.kafka.spark(),
        )
        if max_records:
            reader = reader.option("maxOffsetsPerTrigger", max_records)
        with Checkpoint() as checkpoint:
            writer = reader.load().writeStream.foreachBatch(
                lambda rows, number: self._batch(rows, lambda: checkpoint.ends(number), stopping)
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
                raise TasksLostError("Spark's JVM ended. Look at its memory (--conf spark.driver.memory=...)") from None
            finally:
                with suppress(Py4JError, ConnectionError):  # the JVM may have ended already
                    query.stop()

    def _finish(self) -> None:
        """Note that the run ended cleanly. If that fails, the next run doubts what this run may have read."""
        if self._abandoned:
            return
        try:
            self.run.finish()
        except StoreError as error:
            _LOG.warning("end of the run: %s", error)

    def _follow(self, query: StreamingQuery) -> None:
        """Commit group offsets as batches end, and periodically when none ends, until the query ends."""
        began = looked = time.monotonic()
        while query.isActive and not self._stop.is_set() and self._failure is None and not self._growing.widens:
            if self.flow.publishes and time.monotonic() - looked > _LOOK_SECONDS:
                self._look()
                looked = time.monotonic()
            try:
                self._offsets(self._done.get(timeout=0.1))
            except queue.Empty:
                if time.monotonic() - max(self._told, began) >= OFFSETS_SECONDS:
                    self._offsets(self._reached())
        with self._busy:  # a batch that has started is finished
            self._stopping.set()
        # Not under the lock: Spark waits for a batch that waits for it.
        query.stop()
        while not self._done.empty():
            self._offsets(self._done.get())
        if not self._told and self._failure is None:
            self._offsets(self._reached())
        if self._failure is not None:
            raise self._failure
        failed = query.exception()
        if failed is not None and not self._stop.is_set():
            self._check_source()
            raise BrokerUnavailable(
                f"Spark's query on {self.topic.name} ended: {first_line(str(failed))}",
                "If records were deleted meanwhile, start again to see which; else look at the broker",
            )

    def _look(self) -> None:
        """Look for new partitions even without a batch, when Spark does not read them by itself."""
        try:
            with self._busy, suppress(BrokerUnavailable, _StoppedError):
                if self._growing.look(self.run.positions):
                    self._advance(self.run.noting())
        except (BrokerError, RunRefusedError, StoreError) as error:
            self._failure = error

    def _check_source(self) -> None:
        """Raise if the topic that Spark's source could not read was replaced by another topic of that name."""
        with suppress(BrokerError):
            check_source(self.opening.topics, self.flow, self.opening.plan.topic_id)

    def _batch(
        self, rows: DataFrame, ends: Callable[[], dict[tuple[str, int], int]], stopping: threading.Event
    ) -> None:
        """What foreachBatch calls."""
        next_one = time.monotonic() + self._interval
        try:
            with self._busy:
                if not stopping.is_set():
                    self._commit(rows, ends())
            self._stop.wait(max(next_one - time.monotonic(), 0.0))
        except _StoppedError:
            self._abandoned = True  # it may have persisted a part, which the next run must not treat as proven
            raise RuntimeError("the batch was not committed: the run was stopped") from None
        except BaseException as error:
            # SystemExit would leave the query active forever, and an error's text would appear in Spark's logs.
            self._failure = error
            raise RuntimeError("the batch was not committed; the driver has the reason") from None

    def _commit(self, rows: DataFrame, ends: dict[tuple[str, int], int]) -> None:
        report = self._attempt(rows, ends)
        run = self.run
        for stage, marks in report.marks:
            run.known.note(stage, marks)
        incarnations = merge_incarnations(run.manifest.incarnations if run.manifest else {}, report.seen)
        manifest = run.following(ends, {self.topic.name: self.opening.plan.topic_id}, incarnations, report.changes)
        self._advance(manifest)
        report.counts.batches = 1
        self.total.add(report)
        report.counts.log_raised(_LOG)
        self._warn()
        if self._progress is not None:
            self._progress(report.counts)
        self._done.put(ends)
        effect(CommitStep.RETURN, lambda: None)

    def _warn(self) -> None:
        """Log once that messages without a key arrive."""
        if self._warned or not (keyless := self.total.counts.keyless):
            return
        self._warned = True
        for stage, count in keyless.items():
            width = width_of(self.flow.stage(stage).aggregate.history, wide=True)
            _LOG.warning(
                "stage %s: %d of the first %d records were republished without a key. When they are sent again they come "
                "over other partitions, and are known as long as each lane's history of %d positions reaches "
                "(aggregate(history=...))",
                stage,
                count,
                self.total.counts.records,
                width,
            )

    def _advance(self, manifest: Manifest) -> None:
        """Write a manifest into every store, downstream store first, and continue from it."""
        for name, _ in reversed(self.run.distinct_stores()):
            self._save_manifest(name, manifest)
        self.run.advanced(manifest)

    def _save_manifest(self, name: str, manifest: Manifest) -> None:
        """Write a manifest. Writing the same manifest again succeeds, so a transient failure needs no new fold."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                effect(CommitStep.MANIFEST.of(name), lambda: self.run.save_manifest(name, manifest))
                return
            except Transient as error:
                self._pause(f"manifest of batch {manifest.batch}", attempt, error)

    def _attempt(self, rows: DataFrame, ends: Mapping[tuple[str, int], int]) -> TaskReport:
        """Fold and persist a batch; the next attempt completes a half-written batch and repeats no completed write."""
        excluded: dict[RecordAtStage, Exclusion] = {}
        start = self.run.start
        partitions = sum(end > start.get(place, 0) for place, end in ends.items())
        attempt, doubt, again = 1, dict(self.run.doubt), False
        while True:
            report, failures = self._try(rows, ends, partitions, attempt, excluded, doubt, again=again)
            again = bool(failures)
            if not failures:
                scattered = {
                    place: cause
                    for place, cause in report.failed.items()
                    if place not in excluded or (excluded[place].hole and not cause.hole)
                }
                if not (self.flow.scatters and scattered):
                    return report
                # Other tasks may have folded items of these records: fold again without these records.
                excluded |= scattered
                continue
            unlisted = [one for one in failures if isinstance(one, UnlistedError)]
            if len(unlisted) < len(failures) or any(one.beside for one in unlisted):
                doubt |= ends  # this attempt may have persisted some of it
            if unlisted:
                attempt = self._list_dead({entry for one in unlisted for entry in one.entries}, attempt)
                continue
            if any(isinstance(one, SharedKeyError) for one in failures) and not self._spread:
                _LOG.warning("batch %d: %s", self.run.batch, failures[0])
                self._spread = self._growing.shared = True
                continue
            if any(isinstance(one, TasksLostError) for one in failures):
                self._check_source()
            worst = min(failures, key=lambda one: next((i for i, k in enumerate(_GRAVITY) if isinstance(one, k)), -1))
            if not isinstance(worst, Conflict | Transient | BrokerUnavailable | TasksLostError):
                raise worst
            self._pause(f"batch {self.run.batch}", attempt, worst)
            attempt += 1

    def _list_dead(self, entries: set[Entry], attempt: int) -> int:
        """List dead letters of inner stages; return the number of the batch's current attempt."""
        while True:
            try:
                self.run.list_dead(entries)
            except Transient as error:
                self._pause(f"ledger of batch {self.run.batch}", attempt, error)
                attempt += 1
            else:
                return attempt

    def _try(
        self,
        rows: DataFrame,
        read: Mapping[tuple[str, int], int],
        partitions: int,
        attempt: int,
        excluded: Mapping[RecordAtStage, Exclusion],
        doubt: Doubt,
        *,
        again: bool,
    ) -> tuple[TaskReport, list[Exception]]:
        try:
            if again:
                # The marks that the previous attempt's saves returned are not known here.
                self.run.check_marks()
            self._growing.look(partition for _, partition in read)
            self.run.check_progress()
            self.run.note_growth()
            job = self._job(partitions, attempt, excluded, doubt)
        except (BrokerUnavailable, Transient) as error:
            return TaskReport(), [error]
        return self._action.execute(rows, job)

    def _pause(self, what: str, attempt: int, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            _StoppedError: The run was stopped.
            Exception: The error, when this was the last attempt.
        """
        if attempt == ATTEMPTS:
            raise error
        _LOG.warning("%s, attempt %d: %s", what, attempt, error)
        if self._stop.wait(pause_seconds(attempt)):
            _LOG.warning("stopped; the next run folds batch %d", self.run.batch)
            raise _StoppedError

    def _job(self, partitions: int, attempt: int, excluded: Mapping[RecordAtStage, Exclusion], doubt: Doubt) -> Job:
        known = dict(self.run.manifest.incarnations) if self.run.manifest else {}
        ends = ask_ends(self.opening.topics, known)
        return Job(
            flow=self.flow,
            ref=self.run.ref,
            urls=dict(self.run.urls),
            epoch=self.run.epoch,
            batch=self.run.batch,
            routes=self._action.routes,
            kafka=self.kafka,
            dead_letters=self.dead_letters,
            topic_ids={**self.run.topic_ids, **ids_of(ends), self.topic.name: self.opening.plan.topic_id},
            incarnations=known,
            earlier=None if self.run.accept_definition else self.run.earlier,
            driver=os.getpid(),
            excluded=excluded,
            attempt=attempt,
            ends=ends,
            asked=tuple(known),
            spread=self._spread,
            one_partition=partitions <= 1,
            ledger=self.run.ledger,
            doubt=doubt,
            known=self.run.known,
            evict=self.run.evicts,
            replays=self.run.replays,
        )

    def _reached(self) -> dict[tuple[str, int], int]:
        """Next offsets of the source in the manifest."""
        return {place: offset for place, offset in self.run.start.items() if place[0] == self.topic.name}

    def _offsets(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit the group's offsets for lag tools. Advisory: a failure here only affects what these tools show."""
        self._told = time.monotonic()
        try:
            effect(CommitStep.OFFSETS, lambda: self._tell(offsets))
        except (BrokerError, StoreError) as error:
            _LOG.warning("consumer group offsets of %s: %s", self.group, error)

    def _tell(self, offsets: Mapping[tuple[str, int], int]) -> None:
        # The epoch is checked right before the write: a run that was frozen since its batch would set a newer run's
        # offsets back.
        if self.run.superseded():
            _LOG.warning("consumer group offsets of %s are left to the newer run", self.group)
            return
        self.opening.topics.alter_group_offsets(self.group, offsets)
