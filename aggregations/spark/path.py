"""The two ways a task can work, behind one door: whole columns, or message by message."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import process_time
from typing import Any, Protocol

import pyarrow as pa

from aggregations.element import Element
from aggregations.flow import Stage
from aggregations.run import Incarnations
from aggregations.spark.job import Job, TaskReport
from aggregations.spark.roots import Roots
from aggregations.steps import Output
from envelope import Node, Reason
from persistence.protocol import Write


@dataclass(slots=True)
class Grave:
    """A record on its way to the dead-letter topic.

    Attributes:
        own: Its coordinates.
        stage: Stage that could not take it; empty for one that could not be read, `end` behind the last stage.
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        lineage: Its lineage as text, where it could be read.
        hole: It left a hole under its keys.
    """

    own: Node
    stage: str
    reason: Reason
    detail: str
    lineage: str = ""
    hole: bool = False


@dataclass
class Work:
    """What a task has in hand beside the elements.

    Attributes:
        job: The batch.
        report: Its own report.
        graves: Dead letters, one per record and stage.
        outputs: Messages to be published.
    """

    job: Job
    report: TaskReport = field(default_factory=TaskReport)
    graves: dict[tuple[Node, str], Grave] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)

    @cached_property
    def roots(self) -> Roots:
        """Which roots can exist, and current topic ids."""
        return Roots(self.job.ends, self.job.asked, self.job.topic_ids, self.job.kafka)

    @cached_property
    def incarnations(self) -> Incarnations:
        """Topic ids known and met."""
        return Incarnations(self.job.incarnations, self.roots.topic_ids)

    def bury(
        self, own: Node, stage: str, reason: Reason, detail: str, lineage: str = "", *, hole: bool = False
    ) -> None:
        """Note a dead letter."""
        self.graves.setdefault((own, stage), Grave(own, stage, reason, detail, lineage, hole))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the CPU seconds of a phase."""
        begin = process_time()
        try:
            yield
        finally:
            seconds = self.report.seconds
            seconds[phase] = seconds.get(phase, 0.0) + process_time() - begin


class Path(Protocol):
    """How a task reads, packs and folds. `A` stands for a path's own form of a batch of arrivals at a stage."""

    def read(self, work: Work, batches: Iterable[pa.RecordBatch]) -> Any:
        """Read Kafka's rows up to the door of the first stage."""
        ...

    def pack(self, work: Work, arrivals: Any, routes: int) -> list[bytes]:
        """Divide arrivals by key: one payload per route, empty where there is nothing."""
        ...

    def unpack(self, work: Work, payloads: Sequence[bytes]) -> Any:
        """Put payloads of several tasks together."""
        ...

    def fold(self, work: Work, stage: Stage, arrivals: Any) -> tuple[list[Write], Any]:
        """Load, judge and fold one stage.

        Returns:
            The writes of the stage, and the arrivals at the next one; None behind the last.
        """
        ...


def text_of(element: Element[Any]) -> str:
    """An element's lineage as text."""
    return str(element.lineage)
