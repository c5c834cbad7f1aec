"""One interface for the two paths of a task: whole columns, and few records message by message in the local runner."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import process_time
from typing import TYPE_CHECKING, Any, Protocol

import google_crc32c
import polars as pl
import pyarrow as pa

from aggregations.columns import schema
from aggregations.columns.elements import Elements
from aggregations.columns.signature import Signature
from aggregations.definition.flow import Stage
from aggregations.definition.lookups import Row
from aggregations.engine.clients import store_of
from aggregations.engine.job import Exclusion, Job, TaskReport
from aggregations.engine.roots import RootTopics
from aggregations.per_message.dead_letters import DeadLetterCollector
from aggregations.per_message.lookups import rows_before
from aggregations.per_message.publishing import OutputMessage
from aggregations.run.incarnations import Incarnations
from envelope import Node
from persistence.protocol import Write

if TYPE_CHECKING:
    from aggregations.engine.columnar import ColumnarPath


@dataclass
class Work:
    """Context of a task, apart from the elements.

    Attributes:
        job: The batch.
        report: Its own report.
        outputs: Messages to be published.
    """

    job: Job
    report: TaskReport = field(default_factory=TaskReport)
    outputs: list[OutputMessage] = field(default_factory=list)
    _within: float = 0.0  # CPU seconds of the phases within the current phase

    @cached_property
    def roots(self) -> RootTopics:
        """Which roots can exist, and current topic ids."""
        attempt, progress = self.job.attempt, self.job.progress
        kafka = None if progress.unasked else self.job.options.kafka
        return RootTopics(attempt.ends, attempt.asked, progress.topic_ids, kafka)

    @cached_property
    def incarnations(self) -> Incarnations:
        """Topic ids known and seen."""
        return Incarnations(self.job.progress.incarnations, self.roots.topic_ids)

    def elements(
        self, frame: pl.DataFrame, signatures: Sequence[Signature], values: Sequence[Any] | None = None
    ) -> Elements:
        """Rows of the vectorised path as elements, for the functions of the flow."""
        return Elements(frame, signatures, self.job.flow.source_of, self.job.node, values)

    def node(self, row: Mapping[str, Any]) -> Node:
        """Coordinates of a row's record."""
        return self.job.node(row[schema.TOPIC], row[schema.PARTITION], row[schema.OFFSET])

    def rows(self, table: str, keys: Sequence[bytes]) -> Mapping[bytes, Row]:
        """The rows of a table as of the manifest before the batch, by key."""
        progress = self.job.progress
        with self.timed("load"):
            store = store_of(self.job.options.urls[table])
            return rows_before(store, progress.ref, table, keys, epoch=progress.epoch, batch=progress.batch)

    @cached_property
    def collector(self) -> DeadLetterCollector:
        """Dead letters of this task."""
        flow = self.job.flow
        return DeadLetterCollector(
            self.job.progress.ledger,
            flow.stage_names[0],
            flow.siblings,
            self.roots.topic_ids,
            flow.followed,
            flow.publishing,
            flow.lists_holes,
        )

    def fail(self, stage: int, own: Node, cause: Exclusion) -> None:
        """Note that no task may fold an item of a record at a stage."""
        if not self.job.flow.scatters:
            return
        place = (stage, own.topic, own.partition, own.offset)
        if (known := self.report.failed.get(place)) is None or known.hole:
            self.report.failed[place] = cause

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the CPU seconds of a phase, without those of the phases within it."""
        around, self._within = self._within, 0.0
        begin = process_time()
        try:
            yield
        finally:
            spent, seconds = process_time() - begin, self.report.seconds
            seconds[phase] = seconds.get(phase, 0.0) + spent - self._within
            self._within = around + spent


class Path(Protocol):
    """How a task reads and folds. Each path has its own form of a batch of arrivals at a stage."""

    def read(self, work: Work, chunks: Iterable[pa.Table]) -> Any:
        """Run Kafka's records through the steps before the first stage, or through all steps of a flow without a stage.

        Args:
            work: Context of the task.
            chunks: The records; see `aggregations.engine.fetch.Fetcher.read`.
        """
        ...

    def fold(self, work: Work, stage: Stage, arrivals: Any) -> tuple[list[Write], Any]:
        """Load, judge and fold one stage.

        Returns:
            The writes of the stage, and the arrivals at the next stage; None after the last stage.
        """
        ...


def columnar_path() -> "ColumnarPath":
    """The path of whole columns."""
    from aggregations.engine.columnar import ColumnarPath  # the driver needs neither this nor what it compiles

    return ColumnarPath()


def route_of(key: bytes, routes: int) -> int:
    """Number of the task that folds a key: the same in every process."""
    return int(google_crc32c.value(key)) % routes
