"""The engine: a flow as a Spark structured streaming query over Kafka, exact across crashes."""

import json
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documents do
from pyspark.sql.streaming.query import StreamingQuery

from aggregations.errors import FlowError, RunRefusedError, SharedKeyError, TasksLostError
from aggregations.flow import Flow, Stage
from aggregations.operators import Publish, PublishStates
from aggregations.reconcile import Broker, Plan, check_durability, plan, refuse
from aggregations.report import Report
from aggregations.run import Run, begin
from aggregations.spark.job import Job, Place, TaskReport
from aggregations.spark.parcels import SCHEMA, Kind
from aggregations.spark.roots import ask_ends, check_source
from aggregations.spark.session import session
from aggregations.spark.tasks import folding, outcome_of, persisting, publishing, reading
from envelope import Reason
from persistence.errors import Conflict, Corrupt, Fenced, StoreError, Terminal, Transient
from persistence.faults import effect
from persistence.kafka import BrokerError, BrokerUnavailable, KafkaSettings, Topics
from persistence.manifest import Manifest
from persistence.protocol import StateStore
from persistence.registry import preflight
from persistence.steps import Step

ATTEMPTS = 6
"""Attempts at one batch before the run ends: conflicts of tasks that share a key settle in a few."""
_PAUSE_SECONDS = 0.2
_LOG = logging.getLogger("headwater.spark")

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
    max_records: int | None = None,
    jars: Sequence[Path] = (),
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Run a flow on Spark until it is stopped, or until it has read what was there when it began.

    Args:
        flow: The flow.
        kafka: Where its source, outputs and dead letters are.
        stores: URL of the store by stage name, from `aggregations.run.bind`.
        dead_letters: Dead-letter topic. Without one the first record that cannot be used ends the run.
        group: Consumer group whose offsets tell lag tools how far the flow is; the flow's name when None.
        generation: Generation of the states.
        accept: Risks taken on purpose; see `aggregations.reconcile.Risk`.
        until_caught_up: End at the ends of the partitions as they are now.
        trigger_seconds: Persist interval: at most one batch in this time.
        max_records: Most records of one batch; None for no limit.
        jars: Spark's Kafka connector with what it needs.
        master: Spark's master.
        conf: Spark settings that win over the engine's.
        progress: Called after each batch with what it did.
        planned: Called once with where each partition starts.
        stop: Set it to end the run after the current batch.

    Returns:
        What all batches did.

    Raises:
        BrokerError: Kafka does not answer, or refuses.
        StoreError: A store does; `Fenced` when a newer run has taken over.
        RunRefusedError: Going on would be unsafe.
        FlowError: The flow or its stores cannot work on Spark.
    """
    if flow.topic is None:
        raise FlowError(f"flow {flow.name!r} has no source")
    for name, url in stores.items():
        if url.startswith("memory:"):
            raise FlowError(
                f"stage {name!r}: {url} lives in one process and Spark's workers are several; use sqlite:///PATH"
            )
    engine = Engine(flow, kafka=kafka, dead_letters=dead_letters, group=group or flow.name, progress=progress)
    try:
        decided = engine.open(stores, generation=generation, accept=accept)
        if planned is not None:
            planned(decided)
        spark = session(f"headwater {flow.name}", jars=jars, master=master, conf=conf)
        return engine.stream(
            spark,
            until_caught_up=until_caught_up,
            trigger_seconds=trigger_seconds,
            max_records=max_records,
            stop=stop or threading.Event(),
        )
    finally:
        engine.close()


class Engine:
    """One run of a flow: folds batches of Kafka's rows and commits each in the protocol's order."""

    def __init__(
        self,
        flow: Flow[Any],
        *,
        kafka: KafkaSettings,
        dead_letters: str | None,
        group: str,
        progress: Callable[[Report], None] | None = None,
    ) -> None:
        assert flow.topic is not None
        self.flow = flow
        self.topic = flow.topic
        self.kafka = kafka
        self.dead_letters = dead_letters
        self.group = group
        self.total = TaskReport()
        self._progress = progress
        self._busy = threading.Lock()
        self._stopping = False
        self._spread = False
        self._failure: BaseException | None = None
        self._done: queue.SimpleQueue[dict[tuple[str, int], int]] = queue.SimpleQueue()

    def open(self, stores: Mapping[str, str], *, generation: int = 1, accept: Sequence[str] = ()) -> Plan:
        """Take the term, read the manifests, compare them with the broker and decide where to start.

        Raises:
            RunRefusedError: Going on would be unsafe and the risk is not accepted.
        """
        self.topics = Topics(self.kafka)
        facts = self.topics.describe([self.topic.name])[self.topic.name]
        written = [step.topic for step in self.flow.steps if isinstance(step, Publish | PublishStates)]
        written += [self.dead_letters] if self.dead_letters else []
        self.topics.check_rights(read=[self.topic.name], write=written)
        for url in dict.fromkeys(stores.values()):
            found = preflight(url)
            for finding in found:
                _LOG.warning("%s", finding)
            refuse(found, accept)
        self.run: Run = begin(self.flow, stores, generation=generation, accept=accept)
        refuse(check_durability([(name, one.capabilities) for name, one in self.run.distinct_stores()]), accept)
        known = self.run.manifest.topic_ids if self.run.manifest else {}
        self.topic_ids = {**known, self.topic.name: facts.topic_id}
        marks = self.topics.marks([self.topic.name])
        group = self.topics.group_offsets(self.group, [self.topic.name])
        self.plan = plan(
            self.flow.name,
            self.run.manifest,
            self.run.manifests,
            Broker(
                self.topic.name,
                facts.topic_id,
                {partition: (one.low, one.high) for (_, partition), one in marks.items()},
                {partition: offset for (topic, partition), offset in group.items() if topic == self.topic.name},
            ),
        )
        refuse(self.plan.findings, accept)
        self.run.starting_at(self.topic.name, {one.partition: one.start for one in self.plan.partitions})
        return self.plan

    def close(self) -> None:
        """Close the driver's stores."""
        if hasattr(self, "run"):
            self.run.close()

    def starting_offsets(self) -> str:
        """Spark's `startingOffsets`: from the plan; partitions without one from their beginning (-2)."""
        offsets = {str(one.partition): -2 if one.start is None else one.start for one in self.plan.partitions}
        return json.dumps({self.topic.name: offsets})

    def stream(
        self,
        spark: SparkSession,
        *,
        until_caught_up: bool,
        trigger_seconds: float,
        max_records: int | None,
        stop: threading.Event,
    ) -> Report:
        """Run the query and commit group offsets behind it; see `run_flow`."""
        self._routes = _routes(spark)
        checkpoint = tempfile.mkdtemp(prefix="headwater-checkpoint-")
        reader = spark.readStream.format("kafka").options(
            subscribe=self.topic.name,
            startingOffsets=self.starting_offsets(),
            failOnDataLoss="true",
            includeHeaders=str(not self.flow.is_columnar).lower(),
            **_CONSUMER,
            **self.kafka.spark(),
        )
        if max_records:
            reader = reader.option("maxOffsetsPerTrigger", max_records)
        writer = (
            reader.load().writeStream.foreachBatch(self._batch).option("checkpointLocation", f"file://{checkpoint}")
        )
        writer = (
            writer.trigger(availableNow=True)
            if until_caught_up
            else writer.trigger(processingTime=f"{max(int(trigger_seconds * 1000), 0)} milliseconds")
        )
        query = writer.start()
        try:
            self._follow(query, stop)
        finally:
            query.stop()
            shutil.rmtree(checkpoint, ignore_errors=True)
        return self.total.counts

    def _follow(self, query: StreamingQuery, stop: threading.Event) -> None:
        """Commit group offsets as batches end, until the query does."""
        while query.isActive and not stop.is_set() and self._failure is None:
            try:
                self._offsets(self._done.get(timeout=0.1))
            except queue.Empty:
                continue
        stopped = query.isActive
        with self._busy:  # a batch that has begun is finished
            self._stopping = True
            query.stop()
        while not self._done.empty():
            self._offsets(self._done.get())
        if self._failure is not None:
            raise self._failure
        failed = query.exception()
        if failed is not None and not stopped:
            self._check_source()
            raise BrokerUnavailable(
                f"Spark's query on {self.topic.name} ended: {_first_line(str(failed))}",
                "If records were deleted meanwhile, start again to see which; else look at the broker",
            )

    def _check_source(self) -> None:
        """Say so if what Spark's source could not read is another topic of that name."""
        with suppress(BrokerError):
            check_source(self.topics, self.flow, self.topic_ids)

    def _batch(self, rows: DataFrame, number: int) -> None:
        """What foreachBatch calls. Spark's number restarts with every run and means nothing here."""
        try:
            with self._busy:
                if not self._stopping:
                    self._commit(rows)
        except BaseException as error:
            # SystemExit would leave the query active for ever, and an error's text would end up in Spark's logs.
            self._failure = error
            raise RuntimeError("the batch was not committed; the driver has the reason") from None

    def _commit(self, rows: DataFrame) -> None:
        report = self._attempt(rows)
        run = self.run
        incarnations = run.incarnations()
        incarnations.seen = report.seen
        manifest = run.following(report.ends, {self.topic.name: self.plan.topic_id}, incarnations.merged())
        for name, store in reversed(run.distinct_stores()):
            self._save_manifest(name, store, manifest)
        run.advanced(manifest)
        report.counts.batches = 1
        self.total.add(report)
        if self._progress is not None:
            self._progress(report.counts)
        self._done.put(dict(report.ends))
        effect(Step.RETURN, lambda: None)

    def _save_manifest(self, name: str, store: StateStore, manifest: Manifest) -> None:
        """Write a manifest. The same one again is a success, so a failure of the moment needs no new fold."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                effect(Step.MANIFEST.of(name), lambda: store.save_manifest(self.run.ref, manifest))
                return
            except Transient as error:
                if attempt == ATTEMPTS:
                    raise
                _LOG.warning("manifest of batch %d, attempt %d: %s", manifest.batch, attempt, error)
                time.sleep(_PAUSE_SECONDS * attempt)

    def _attempt(self, rows: DataFrame) -> TaskReport:
        """Fold and persist a batch; what is half written is finished by the next attempt, never redone."""
        excluded: dict[Place, tuple[Reason, str]] = {}
        attempt = 1
        while True:
            report, failures = self._execute(rows, self._job(attempt, excluded))
            if not failures:
                scattered = {place: cause for place, cause in report.failed.items() if place not in excluded}
                if not (self.flow.scatters and scattered):
                    return report
                # Items of these records may have been folded by other tasks: once more without them.
                excluded |= scattered
                continue
            if any(isinstance(one, SharedKeyError) for one in failures) and not self._spread:
                _LOG.warning("batch %d: %s", self.run.batch, failures[0])
                self._spread = True
                continue
            if any(isinstance(one, TasksLostError) for one in failures):
                self._check_source()
            worst = min(failures, key=lambda one: next((i for i, k in enumerate(_GRAVITY) if isinstance(one, k)), -1))
            if not isinstance(worst, Conflict | Transient | BrokerUnavailable | TasksLostError) or attempt == ATTEMPTS:
                raise worst
            _LOG.warning("batch %d, attempt %d: %s", self.run.batch, attempt, worst)
            time.sleep(_PAUSE_SECONDS * attempt)
            attempt += 1

    def _job(self, attempt: int, excluded: Mapping[Place, tuple[Reason, str]]) -> Job:
        known = dict(self.run.manifest.incarnations) if self.run.manifest else {}
        return Job(
            flow=self.flow,
            ref=self.run.ref,
            urls=dict(self.run.urls),
            term=self.run.term,
            batch=self.run.batch,
            routes=len(self._routes),
            kafka=self.kafka,
            dead_letters=self.dead_letters,
            topic_ids=self.topic_ids,
            incarnations=known,
            accept_definition=self.run.accept_definition,
            driver=os.getpid(),
            excluded=excluded,
            attempt=attempt,
            ends=ask_ends(self.topics, known),
            asked=tuple(known),
            spread=self._spread,
        )

    def _execute(self, rows: DataFrame, job: Job) -> tuple[TaskReport, list[Exception]]:
        """The chain of tasks of `aggregations.spark.tasks`: one Spark action, two where records scatter."""
        stages = self.flow.stages
        frame = rows.mapInArrow(reading(job), SCHEMA)
        for stage in stages[1:] if job.folds_while_reading else stages:
            frame = self._shuffled(frame).mapInArrow(folding(job, stage), SCHEMA)
        if not self.flow.scatters:
            if job.holds_outputs:
                frame = self._shuffled(frame).mapInArrow(publishing(job), SCHEMA)
            at_once = not job.holds_outputs and not (len(stages) == 1 and job.folds_while_reading)
            return _collect(self._persisted(frame, job, stages[:-1] if at_once else stages))
        frame = frame.persist()
        try:
            report, failures = _collect(frame.where(F.col("kind") >= int(Kind.REPORT)))
            if failures or not report.failed.keys() <= job.excluded.keys():
                return report, failures
            return _collect(self._persisted(self._shuffled(frame).mapInArrow(publishing(job), SCHEMA), job, stages))
        finally:
            frame.unpersist()

    def _persisted(self, frame: DataFrame, job: Job, stages: Sequence[Stage]) -> DataFrame:
        """The frame with these stages persisted behind it, the last one first."""
        for stage in reversed(stages):
            frame = self._shuffled(frame).mapInArrow(persisting(job, stage), SCHEMA)
        return frame

    def _shuffled(self, frame: DataFrame) -> DataFrame:
        """Every parcel to the task of its route."""
        number = F.element_at(F.array(*(F.lit(one) for one in self._routes)), F.col("route") + 1)
        return frame.repartition(len(self._routes), number)

    def _offsets(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Tell lag tools. Advisory: what fails here costs nothing but a number on a dashboard."""
        try:
            effect(Step.OFFSETS, lambda: self.topics.alter_group_offsets(self.group, offsets))
        except (BrokerError, Transient) as error:
            _LOG.warning("consumer group offsets of %s: %s", self.group, error)


def _collect(frame: DataFrame) -> tuple[TaskReport, list[Exception]]:
    """Run the action. What a task raises itself comes as a parcel; what Spark raises is about workers or the source."""
    try:
        rows = frame.select("kind", "payload").collect()
    except Py4JJavaError as error:
        reason = _first_line(error.java_exception.getMessage() or "")
        return TaskReport(), [TasksLostError(f"{reason}. Look at the workers' memory, then at the broker")]
    return outcome_of((row.kind, bytes(row.payload)) for row in rows)


def _routes(spark: SparkSession) -> list[int]:
    """Numbers that Spark's hash partitioning sends to task 0, 1, 2, ...: one for each."""
    routes = spark.sparkContext.defaultParallelism
    numbers = spark.range(64 * routes).select(F.col("id").cast("int").alias("id"))
    placed = numbers.select("id", F.expr(f"pmod(hash(id), {routes})").alias("task")).collect()
    first: dict[int, int] = {}
    for row in placed:
        first.setdefault(row.task, row.id)
    return [first[task] for task in range(routes)]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
