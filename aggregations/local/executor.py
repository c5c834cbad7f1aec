"""Folds and persists batches in this process: one task that reads every partition and has every key.

All stages are folded before anything is published. What follows is in the order of `persistence.commit.order`.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa

from aggregations.definition.flow import Flow, Stage
from aggregations.engine.clients import topics_of
from aggregations.engine.fetch import Fetcher
from aggregations.engine.job import Job, TaskReport, newly_failed
from aggregations.engine.messages import MessagePath
from aggregations.engine.path import Path, Work
from aggregations.engine.persist import persist
from aggregations.engine.publish import publish
from aggregations.engine.ranges import Range, Slot
from aggregations.engine.retry import StoppedError
from aggregations.engine.roots import check_source
from aggregations.per_message.ledger import UnlistedError
from envelope.dedup.lineage import position_order
from persistence.commit.order import steps_of_tasks
from persistence.commit.steps import CommitStep
from persistence.garbage import no_collection
from persistence.kafka import KafkaSettings
from persistence.protocol import Write

FEW_RECORDS = 5_000
"""Records of a batch up to which a vectorised flow is folded message by message, with the same result. Loading compiled
code takes as long as folding about so many."""
_COMPILING_SECONDS: Final = 3.0
"""More time than it takes to load compiled code, and much less than it takes to compile it."""
_LOG = logging.getLogger("headwater.local")


class LocalExecutor:
    """Folds and persists batches of one flow. Used by one thread, except `cancel`.

    Args:
        flow: The flow.
        kafka: Settings of the Kafka cluster.

    Attributes:
        routes: 1: there is one task.
        is_local: True.
    """

    def __init__(self, flow: Flow[Any], kafka: KafkaSettings) -> None:
        self._flow = flow
        self._kafka = kafka
        self._fetchers: dict[str, Fetcher] = {}
        self._columnar: Path | None = None
        self._cancelled = threading.Event()
        self.routes = 1
        self.is_local = True

    def close(self) -> None:
        """Close the consumers."""
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers.clear()

    def cancel(self) -> None:
        """Give up the batch under way, from another thread, unless some of it may be persisted."""
        self._cancelled.set()

    def execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        """Fold and persist a batch.

        Returns:
            What was done, and what failed: if anything did, the report is of no use.

        Raises:
            StoppedError: It was cancelled.
        """
        try:
            with no_collection():
                return self._execute(job), []
        except (StoppedError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except Exception as error:
            return TaskReport(), [error]
        except BaseException as error:  # polars panics with one
            failure = RuntimeError(f"{type(error).__name__} while batch {job.progress.batch} was folded")
            failure.__cause__ = error
            return TaskReport(), [failure]

    def _execute(self, job: Job) -> TaskReport:
        work = Work(job)
        every = Slot(0, tuple(one for slot in job.attempt.tasks for one in slot.ranges))
        path, ranges = self._path_of(every.ranges), every.by_topic()
        arrivals = path.read(work, self._chunks(job, ranges, compiled=path is self._columnar))
        # Only after all rows were read: if a topic still is the driver's topic, the rows belong to it.
        for topic, its in ranges.items():
            check_source(topics_of(self._kafka), job.flow, topic, job.progress.topic_ids[topic], job.read(its))
        folded: dict[str, tuple[Stage, list[Write]]] = {}
        for stage in job.flow.stages:
            self._check()
            writes, arrivals = path.fold(work, stage, arrivals)
            folded[stage.name] = stage, writes
        if unlisted := work.collector.unlisted():
            raise UnlistedError(frozenset(unlisted), beside=False)
        if newly_failed(work.report, job.attempt.excluded):
            return work.report  # the batch is folded again without these records
        self._check()
        if job.holds_outputs:
            work.outputs.sort(key=lambda output: position_order(output.order))
        for step in steps_of_tasks([*folded]):
            if step.kind is CommitStep.PUBLISH:
                with work.timed("publish"):
                    publish(work)
                continue
            stage, writes = folded[step.name]
            if writes:
                job.progress.known.note(stage.name, persist(work, stage, writes))
        work.report.seen = dict(work.incarnations.seen)
        work.report.changes = work.collector.changes
        work.report.counts.add_copies(work.collector.copies)
        return work.report

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise StoppedError

    def _path_of(self, ranges: Sequence[Range]) -> Path:
        """The path for these ranges: the compiled one for many records, and for all that follow them."""
        if self._columnar is None:
            many = sum(one.end - one.start for one in ranges) > FEW_RECORDS
            if not many:
                return MessagePath()
            self.close()  # a consumer that makes no objects continues
            self._columnar = _load()
        return self._columnar

    def _chunks(self, job: Job, ranges: Mapping[str, Sequence[Range]], *, compiled: bool) -> Iterator[pa.Table]:
        """The records of each topic. Each topic has a consumer: the others fetch ahead."""
        for topic, its in ranges.items():
            fetcher = self._fetcher_of(job.flow, topic, compiled=compiled)
            fetch = partial(fetcher.read, stays=True, stopped=self._cancelled.is_set)
            for table in fetch(its) if job.archive is None else job.archive.read(its, fetch):
                self._check()
                yield table

    def _fetcher_of(self, flow: Flow[Any], topic: str, *, compiled: bool) -> Fetcher:
        if topic not in self._fetchers:
            self._fetchers[topic] = Fetcher(
                self._kafka,
                topic,
                f"headwater-{flow.name}",
                headers=flow.reads_headers,
                compiled=compiled,
            )
        return self._fetchers[topic]


def _load() -> Path:
    """Load the vectorised path and its compiled code; on a machine that has not run it before, it is compiled."""
    said = "compiling code for this machine, once; this takes a minute or more"
    timer = threading.Timer(_COMPILING_SECONDS, lambda: _LOG.warning(said))
    timer.daemon = True
    timer.start()
    try:
        from aggregations.columns.prepare import load_reading, prepare
        from aggregations.engine.columnar import ColumnarPath

        load_reading()
        prepare()
        return ColumnarPath()
    finally:
        timer.cancel()
