"""Runs a batch as Spark actions: the chain of tasks of `aggregations.spark.tasks`, and their results."""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import RDD, SparkContext, StorageLevel
from pyspark.errors import PySparkException

from aggregations.definition.flow import Flow, Stage
from aggregations.errors import SparkEndedError, TasksLostError
from aggregations.spark.blocks import Kind, Row, unpack
from aggregations.spark.job import Job, TaskReport
from aggregations.spark.tasks import folding, outcome_of, persisting, publishing, reading


class Action:
    """Executes batches of one flow.

    Args:
        spark: The context.
        flow: The flow.

    Attributes:
        routes: Number of tasks that a shuffle goes to.
        is_local: All tasks run on this machine, in one executor.
    """

    def __init__(self, spark: SparkContext, flow: Flow[Any]) -> None:
        self._flow = flow
        self._spark = spark
        self.is_local = str(spark.master).split("[")[0] == "local"
        self._group = str(uuid.uuid4())
        self.routes = spark.defaultParallelism

    def execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        """Fold and persist a batch in one action; in two where items of one record scatter.

        Returns:
            What the tasks did, and what failed: if anything did, the report is of no use.

        Raises:
            SparkEndedError: Spark's JVM or its context ended.
        """
        if self._spark._jsc is None:
            raise SparkEndedError("Spark's context was stopped by another part of this program")
        try:
            return self._execute(job)
        except (Py4JNetworkError, ConnectionError):
            raise SparkEndedError("Spark's JVM ended. Check its memory (--conf spark.driver.memory=...)") from None

    def _execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        stages = self._flow.stages
        self._spark.setJobGroup(self._group, f"{self._flow.name}, batch {job.batch}")
        tasks = len(job.tasks)
        rows = self._spark.parallelize(range(tasks), tasks).mapPartitions(reading(job))
        for stage in stages[1:] if job.folds_while_reading else stages:
            rows = self._shuffled(rows).mapPartitions(folding(job, stage))
        if not self._flow.scatters:
            if job.holds_outputs:
                rows = self._shuffled(rows).mapPartitions(publishing(job))
            at_once = not job.holds_outputs and not (len(stages) == 1 and job.may_share_keys)
            return _collect(self._persisted(rows, job, stages[:-1] if at_once else stages))
        rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            report, failures = _collect(rows.filter(_is_result))
            if failures or not report.failed.keys() <= job.excluded.keys():
                return report, failures
            return _collect(self._persisted(self._shuffled(rows).mapPartitions(publishing(job)), job, stages))
        finally:
            with suppress(Py4JError, ConnectionError):  # the JVM may have ended
                rows.unpersist()

    def cancel(self) -> None:
        """Cancel what is being executed, from another thread; its tasks are lost."""
        with suppress(Py4JError, ConnectionError):  # the JVM may have ended already
            if self._spark._jsc is not None:
                self._spark.cancelJobGroup(self._group)

    def _persisted(self, rows: RDD[Row], job: Job, stages: Sequence[Stage]) -> RDD[Row]:
        """The rows, after which these stages are persisted, the last one first."""
        for stage in reversed(stages):
            rows = self._shuffled(rows).mapPartitions(persisting(job, stage))
        return rows

    def _shuffled(self, rows: RDD[Row]) -> RDD[Row]:
        """Every block to the task of its route."""
        return rows.partitionBy(self.routes, _own_number)


def _own_number(route: int) -> int:
    return route


def _is_result(row: Row) -> bool:
    """Whether the driver needs this block."""
    return row[1][0] >= Kind.REPORT


def _collect(rows: RDD[Row]) -> tuple[TaskReport, list[Exception]]:
    """Run the action. Errors of tasks arrive as blocks; errors that Spark raises concern workers or the source."""
    try:
        found = rows.collect()
    except Py4JNetworkError:
        raise
    except (Py4JError, PySparkException) as error:
        text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
        return TaskReport(), [
            TasksLostError(
                f"{first_line(text or '')}. Check the workers' memory (a smaller --max-records needs less), "
                "then the broker"
            )
        ]
    return outcome_of(unpack(found))


def first_line(text: str) -> str:
    """The first line of Spark's error text; stack traces follow it."""
    return text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
