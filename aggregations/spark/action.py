"""Runs a batch as Spark actions: the chain of tasks of `aggregations.spark.tasks`, and their results."""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documents do

from aggregations.definition.flow import Flow, Stage
from aggregations.errors import SparkEndedError, TasksLostError
from aggregations.spark.blocks import SCHEMA, Kind
from aggregations.spark.job import Job, TaskReport
from aggregations.spark.tasks import folding, outcome_of, persisting, publishing, reading


class Action:
    """Executes batches of one flow.

    Args:
        spark: The session.
        flow: The flow.

    Attributes:
        routes: Number of tasks that a shuffle goes to.
        is_local: All tasks run on this machine, in one executor.
    """

    def __init__(self, spark: SparkSession, flow: Flow[Any]) -> None:
        self._flow = flow
        self._spark = spark
        self._numbers = _numbers(spark)
        self.is_local = str(spark.sparkContext.master).split("[")[0] == "local"
        self._group = str(uuid.uuid4())
        self.routes = len(self._numbers)

    def execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        """Fold and persist a batch in one action; in two where items of one record scatter.

        Returns:
            What the tasks did, and what failed: if anything did, the report is of no use.

        Raises:
            SparkEndedError: Spark's JVM or its context ended.
        """
        if self._spark.sparkContext._jsc is None:
            raise SparkEndedError("Spark's context was stopped by another part of this program")
        try:
            return self._execute(job)
        except (Py4JNetworkError, ConnectionError):
            raise SparkEndedError("Spark's JVM ended. Check its memory (--conf spark.driver.memory=...)") from None

    def _execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        stages = self._flow.stages
        self._spark.sparkContext.setJobGroup(self._group, f"{self._flow.name}, batch {job.batch}")
        tasks = len(job.tasks)
        frame = self._spark.range(0, tasks, 1, tasks).mapInArrow(reading(job), SCHEMA)
        for stage in stages[1:] if job.folds_while_reading else stages:
            frame = self._shuffled(frame).mapInArrow(folding(job, stage), SCHEMA)
        if not self._flow.scatters:
            if job.holds_outputs:
                frame = self._shuffled(frame).mapInArrow(publishing(job), SCHEMA)
            at_once = not job.holds_outputs and not (len(stages) == 1 and job.may_share_keys)
            return _collect(self._persisted(frame, job, stages[:-1] if at_once else stages))
        frame = frame.persist()
        try:
            report, failures = _collect(frame.where(F.col("kind") >= int(Kind.REPORT)))
            if failures or not report.failed.keys() <= job.excluded.keys():
                return report, failures
            return _collect(self._persisted(self._shuffled(frame).mapInArrow(publishing(job), SCHEMA), job, stages))
        finally:
            with suppress(Py4JError, ConnectionError):  # the JVM may have ended
                frame.unpersist()

    def cancel(self) -> None:
        """Cancel what is being executed, from another thread; its tasks are lost."""
        with suppress(Py4JError, ConnectionError):  # the JVM may have ended already
            if self._spark.sparkContext._jsc is not None:
                self._spark.sparkContext.cancelJobGroup(self._group)

    def _persisted(self, frame: DataFrame, job: Job, stages: Sequence[Stage]) -> DataFrame:
        """The frame, after which these stages are persisted, the last one first."""
        for stage in reversed(stages):
            frame = self._shuffled(frame).mapInArrow(persisting(job, stage), SCHEMA)
        return frame

    def _shuffled(self, frame: DataFrame) -> DataFrame:
        """Every block to the task of its route."""
        number = F.element_at(F.array(*(F.lit(one) for one in self._numbers)), F.col("route") + 1)
        return frame.repartition(self.routes, number)


def _collect(frame: DataFrame) -> tuple[TaskReport, list[Exception]]:
    """Run the action. Errors of tasks arrive as blocks; errors that Spark raises concern workers or the source."""
    try:
        rows = frame.select("kind", "payload").collect()
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
    return outcome_of((row.kind, bytes(row.payload)) for row in rows)


def _numbers(spark: SparkSession) -> list[int]:
    """Numbers that Spark's hash partitioning sends to task 0, 1, 2, ...: one for each."""
    routes = spark.sparkContext.defaultParallelism
    numbers = spark.range(64 * routes).select(F.col("id").cast("int").alias("id"))
    placed = numbers.select("id", F.expr(f"pmod(hash(id), {routes})").alias("task")).collect()
    first: dict[int, int] = {}
    for row in placed:
        first.setdefault(row.task, row.id)
    return [first[task] for task in range(routes)]


def first_line(text: str) -> str:
    """The first line of Spark's error text; stack traces follow it."""
    return text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
