"""The engine: a flow as a Spark structured streaming query over Kafka, exact across crashes."""

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
"""Most records of one batch: the first one of a flow would else be the whole topic."""
ATTEMPTS = 9
"""Attempts at one batch before the run ends. With the pauses between them they outlast the election of a leader in
Kafka and a failover of Redis; conflicts of tasks that share a key resolve in a few."""
OFFSETS_SECONDS = 30.0
"""How often the group's offsets are written when there is nothing to read. An older run that was frozen right in front
of its write may have set them back."""
_FIRST_PAUSE_SECONDS = 0.2
_LOG = logging.getLogger("headwater.spark")

_LOOK_SECONDS = 1.0
"""Between two questions for the number of partitions where new ones are not read by themselves."""
_POLLING = "spark.sql.streaming.pollingDelay"  # how long Spark waits when there is nothing to read
_LEAST_POLLING_MS = 10

# Worst first: what the driver raises when several tasks failed.
_GRAVITY: tuple[type[Exception], ...] = (Fenced, Corrupt, Terminal, RunRefusedError, StoreError, BrokerError)

# Measured: 540-690 thousand records a second instead of 150-190 with the connector's defaults.
_CONSUMER = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.receive.buffer.bytes": str(1 << 20),
    # At the end of the log a fetch waits this long for records that do not come.
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
    """Run a flow on Spark until it is stopped, or until it has read what was there when it began.

    Args:
        flow: The flow.
        kafka: Where its source, outputs and dead letters are.
        stores: URL of the store by stage name, from `aggregations.run.binding.bind`.
        dead_letters: Dead-letter topic. Without one the first record that cannot be used ends the run.
        group: Consumer group whose offsets tell lag tools how far the flow is; the flow's name when None.
        generation: Generation of the states.
        accept: Risks taken on purpose; see `aggregations.run.start.Risk`.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time.
        max_records: Most records of one batch; 0 for no limit.
        jars: Spark's Kafka connector with what it needs; spark-submit has its own.
        modules: Python files that workers import by name, for those of other machines.
        master: Spark's master; None for the submitted one, else `local[2]`.
        conf: Spark settings that win over the engine's, and those given to spark-submit over them.
        progress: Called after each batch with what it did.
        planned: Called once with where each partition starts.
        stop: Set it to end the run after the current batch; one that waits to be tried again is left to the next run.
        metadata_max_age: Seconds in which producers of the source topic may not know of added partitions: the
            largest `metadata.max.age.ms` of them all.

    Returns:
        What all batches did.

    Raises:
        BrokerError: Kafka does not answer, or refuses.
        StoreError: A store does; `Fenced` when a newer run has taken over.
        RunRefusedError: Going on would be unsafe.
        FlowError: The flow or its stores cannot work on Spark.
        TasksLostError: Spark lost tasks again and again, or itself.
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
    """Seconds behind a failed attempt: 0.2, then twice as many each time, 51 in all, varied by a quarter."""
    return _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1) * random.uniform(0.75, 1.25)


class _StoppedError(Exception):
    """The run was told to stop while a batch waited to be tried again."""


class Engine:
    """One run of a flow: folds batches of Kafka's rows and commits each in the protocol's order."""

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
        self._told = 0.0  # when the group's offsets were written last; 0 in a run that has not yet

    def stream(self, *, until_caught_up: bool, trigger_seconds: float, max_records: int) -> Report:
        """Run the query, a wider one when partitions that waited are to be read; see `run_flow`."""
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
        """Run a query and commit group offsets behind it."""
        stopping = self._stopping = threading.Event()
        # Without an order to keep, Spark reads new partitions by itself.
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
            # Spark's own interval ends at a time of day: a clock that is set back would stop the run for as long.
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
                with suppress(Py4JError, ConnectionError):  # of a JVM that ended there is nothing to stop
                    query.stop()

    def _finish(self) -> None:
        """Say that the run ended of its own accord. If that fails, the next run doubts what this one may have read."""
        if self._abandoned:
            return
        try:
            self.run.finish()
        except StoreError as error:
            _LOG.warning("end of the run: %s", error)

    def _follow(self, query: StreamingQuery) -> None:
        """Commit group offsets as batches end, and now and then when none does, until the query ends."""
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
        with self._busy:  # a batch that has begun is finished
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
        """Look for new partitions, though no batch comes: what is added is not read by itself."""
        try:
            with self._busy, suppress(BrokerUnavailable, _StoppedError):
                if self._growing.look(self.run.positions):
                    self._advance(self.run.noting())
        except (BrokerError, RunRefusedError, StoreError) as error:
            self._failure = error

    def _check_source(self) -> None:
        """Say so if what Spark's source could not read is another topic of that name."""
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
            self._abandoned = True  # what it persisted in part, the next run must not take for proven
            raise RuntimeError("the batch was not committed: the run was stopped") from None
        except BaseException as error:
            # SystemExit would leave the query active for ever, and an error's text would end up in Spark's logs.
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
        """Say once what comes without a key."""
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
        """Write a manifest into every store, downstream store first, and go on from it."""
        for name, _ in reversed(self.run.distinct_stores()):
            self._save_manifest(name, manifest)
        self.run.advanced(manifest)

    def _save_manifest(self, name: str, manifest: Manifest) -> None:
        """Write a manifest. The same one again is a success, so a failure of the moment needs no new fold."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                effect(CommitStep.MANIFEST.of(name), lambda: self.run.save_manifest(name, manifest))
                return
            except Transient as error:
                self._pause(f"manifest of batch {manifest.batch}", attempt, error)

    def _attempt(self, rows: DataFrame, ends: Mapping[tuple[str, int], int]) -> TaskReport:
        """Fold and persist a batch; what is half written is finished by the next attempt, never redone."""
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
                # Items of these records may have been folded by other tasks: once more without them.
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
        """List dead letters of inner stages; return the attempt that the batch is at."""
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
                # What the attempt before it had acknowledged is not known here.
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
            _StoppedError: The run was told to stop.
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
        """Next offsets of the source as the manifest has them."""
        return {place: offset for place, offset in self.run.start.items() if place[0] == self.topic.name}

    def _offsets(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Tell lag tools. Advisory: what fails here costs nothing but a number on a dashboard."""
        self._told = time.monotonic()
        try:
            effect(CommitStep.OFFSETS, lambda: self._tell(offsets))
        except (BrokerError, StoreError) as error:
            _LOG.warning("consumer group offsets of %s: %s", self.group, error)

    def _tell(self, offsets: Mapping[tuple[str, int], int]) -> None:
        # Asked right before: a run that was frozen since its batch would set a newer run's offsets back.
        if self.run.superseded():
            _LOG.warning("consumer group offsets of %s are left to the newer run", self.group)
            return
        self.opening.topics.alter_group_offsets(self.group, offsets)
