"""Runs a batch as Spark actions: the chain of tasks of `aggregations.spark.tasks`, and their results."""

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD, SparkContext, StorageLevel
from pyspark.errors import PySparkException

from aggregations.definition.flow import Flow
from aggregations.engine.job import Job, TaskReport
from aggregations.errors import FlowError, SparkEndedError, TasksLostError
from aggregations.spark import residents
from aggregations.spark.blocks import Kind, Row, unpack
from aggregations.spark.gather import Gathered
from aggregations.spark.placement import Placement
from aggregations.spark.tasks import (
    Task,
    folding,
    outcome_of,
    persisting,
    publishing,
    reading,
    reading_gathered,
)
from persistence.commit.order import Step, steps_of_tasks
from persistence.commit.steps import CommitStep

_GROUP: Final = "spark.jobGroup.id"


class Action:
    """Executes batches of one flow.

    Args:
        spark: The context.
        flow: The flow.

    Attributes:
        spark: The context.
        routes: Number of tasks that a shuffle goes to.
        is_local: All tasks run on this machine, in one executor.
        gathered: The records of the batch; None if tasks read them from Kafka.
    """

    def __init__(self, spark: SparkContext, flow: Flow[Any]) -> None:
        self._flow = flow
        self.spark = spark
        self.is_local = str(spark.master).split("[")[0] == "local"
        self._placement = Placement(spark, is_local=self.is_local)
        self._group = str(uuid.uuid4())
        self.routes = spark.defaultParallelism
        self.gathered: Gathered | None = None

    def execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        """Fold and persist a batch in one action; in two where items of one record scatter.

        Returns:
            What the tasks did, and what failed: if anything did, the report is of no use.

        Raises:
            SparkEndedError: Spark's JVM or its context ended.
        """
        if self.spark._jsc is None:
            raise SparkEndedError("Spark's context was stopped by another part of this program")
        try:
            with self._directory() as directory, self._grouped(job):
                return self._execute(replace(job, attempt=replace(job.attempt, directory=directory)))
        except (Py4JError, PySparkException, ConnectionError, AttributeError) as error:
            # Errors of tasks arrive as blocks; errors that Spark raises concern workers, or Spark itself. PySpark has
            # attributes that are None once its context is stopped.
            if ended := self._ended():
                raise SparkEndedError(ended) from None
            if isinstance(error, AttributeError):
                raise
            text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
            return TaskReport(), [lost(text or "")]

    def _execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        stages = job.flow.stages
        tasks = len(job.attempt.tasks)
        if self.gathered is None:
            placed = self._placement.tasks([slot.number for slot in job.attempt.tasks])
            rows = placed.mapPartitions(reading(job))
        else:
            rows = self.gathered.rows.mapPartitionsWithIndex(reading_gathered(job, self.gathered.delivered))
        chain = Chain(rows, tasks, self.routes)
        for stage in stages[1:] if job.folds_while_reading else stages:
            chain = chain.then(folding(job, stage))
        steps = steps_of_tasks([stage.name for stage in stages])
        if not job.flow.scatters:
            at_once = not (len(stages) == 1 and job.may_share_keys)  # the last stage is persisted by those that fold it
            done = 0 if job.holds_outputs else 1 + at_once
            return chain.committed(job, steps[done:]).collect()
        rows = chain.rows.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            report, failures = chain._replace(rows=rows.filter(_is_result)).collect()
            if failures or not report.failed.keys() <= job.attempt.excluded.keys():
                return report, failures
            return chain.committed(job, steps).collect()
        finally:
            with suppress(Py4JError, ConnectionError):  # the JVM may have ended
                rows.unpersist()

    @contextmanager
    def _grouped(self, job: Job) -> Iterator[None]:
        """Run Spark's jobs in the group of the query that this thread runs, so that its end cancels them; else in one."""
        query = self.spark.getLocalProperty(_GROUP)
        if query is not None:
            self._group = query
            yield
            return
        self.spark.setJobGroup(self._group, f"{self._flow.name}, batch {job.progress.batch}")
        try:
            yield
        finally:
            with suppress(Py4JError, ConnectionError, AttributeError):
                for name in (_GROUP, "spark.job.description"):
                    self.spark.setLocalProperty(name, None)  # type: ignore[arg-type]

    def _directory(self) -> AbstractContextManager[str]:
        """A directory for the rows of a batch; empty if tasks run elsewhere, or it cannot be made.

        The JVM removes it if this process is killed.
        """
        with suppress(OSError):
            if self.is_local:
                return TemporaryDirectory(prefix="batch-", dir=self.spark._temp_dir, ignore_cleanup_errors=True)
        return nullcontext("")

    def _ended(self) -> str:
        """How Spark ended; empty if it has not."""
        try:
            stopped = self.spark._jsc.sc().isStopped()
        except (Py4JError, ConnectionError, AttributeError):  # without a JVM; stopped here meanwhile
            return "Spark's JVM ended. Check its memory (--conf spark.driver.memory=...)"
        return "Spark ended: its context was stopped. Spark's log says why" if stopped else ""

    def cancel(self) -> None:
        """Cancel what is being executed, from another thread; its tasks are lost."""
        with suppress(Py4JError, ConnectionError):  # the JVM may have ended already
            if self.spark._jsc is not None:
                self.spark.cancelJobGroup(self._group)


class Chain(NamedTuple):
    """Tasks that follow one another, and the results that they will send if none of them fails.

    Attributes:
        rows: Their blocks.
        reports: Number of reports in these blocks.
        routes: Number of tasks after a shuffle.
    """

    rows: RDD[Row]
    reports: int
    routes: int

    def then(self, task: Task) -> "Chain":
        """The chain with a task after a shuffle, which brings every block to the task of its route."""
        rows = self.rows.partitionBy(self.routes, int).mapPartitions(task)
        return Chain(rows, self.reports + self.routes, self.routes)

    def committed(self, job: Job, steps: Sequence[Step]) -> "Chain":
        """The chain with a task for each of these steps of the commit."""
        chain = self
        for step in steps:
            is_publish = step.kind is CommitStep.PUBLISH
            chain = chain.then(publishing(job) if is_publish else persisting(job, job.flow.stage(step.name)))
        return chain

    def collect(self) -> tuple[TaskReport, list[Exception]]:
        """Run the action.

        PySpark takes a stream of results that breaks off for a complete one. Every task reports, so a missing report
        shows it.
        """
        blocks = unpack(self.rows.collect())
        report, failures = outcome_of(blocks)
        found = sum(block.kind is Kind.REPORT for block in blocks)
        if not failures and found != self.reports:
            failures = [lost(f"Spark delivered {found} results of {self.reports}")]
        return report, failures


def warm_up(spark: SparkContext) -> threading.Thread:
    """Start workers and residents while the query starts: the first batch would wait for them. On this machine only.

    Returns:
        The thread that does it. What it cannot start, the first batch starts.
    """
    slots = spark.defaultParallelism

    def start(slot: int) -> tuple[int, bool]:
        return slot, residents.call(slot, residents.is_resident)

    def run() -> None:
        with suppress(
            Py4JError, PySparkException, ConnectionError, AttributeError
        ):  # Spark ended meanwhile, for example
            rows = spark.parallelize(range(slots), slots).map(start)
            rows.partitionBy(slots, int).mapPartitions(list).collect()

    thread = threading.Thread(target=run, name="headwater-warm-up", daemon=True)
    thread.start()
    return thread


def _is_result(row: Row) -> bool:
    """Whether the driver needs this block."""
    return row[1][0] >= Kind.REPORT


def lost(text: str) -> Exception:
    """The error for what Spark says about tasks that it lost: not worth another attempt if a module is missing."""
    reason = reason_of(text)
    if reason.startswith(("ModuleNotFoundError", "ImportError")):
        return FlowError(
            f"a worker cannot load the flow: {reason}. Workers run the Python that PYSPARK_PYTHON names, and need "
            "headwater, and the flow's modules (--py-files)"
        )
    return TasksLostError(
        f"{reason.rstrip('.')}. Check the workers' memory (a smaller --max-records needs less), then the broker"
    )


def reason_of(text: str) -> str:
    """The first line of Spark's error text, or the last line of a Python traceback in it; stack traces follow."""
    before = text.strip().partition("\n\tat ")[0]
    first, _, python = before.partition("Traceback (most recent call last):")
    lines = [one for one in (python or first).strip().splitlines() if not one.strip().startswith("SQLSTATE:")]
    return (lines or ["no reason given"])[-1 if python else 0].strip()[:300]
