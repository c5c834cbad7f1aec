"""The simulated driver of the engine: starts like the real one, then runs batches of the real runner."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.run import deliveries
from aggregations.run.memory import MemoryRunner
from aggregations.run.plan import Broker, plan
from aggregations.run.risks import refuse
from envelope import TopicPartition
from envelope.limits import branch_id
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.manifest import Progress
from tests.simulation import stream
from tests.simulation.faults import Crash
from tests.simulation.kafka import CLOCK, Cluster, Committed
from tests.simulation.oracle import Violation
from tests.simulation.stream import Checkpoint, delivered

_MOST = 1000
METADATA_MAX_AGE = 20.0
"""Seconds for which producers may not know of a new partition: about ten lives of services."""


class Driver:
    """One run of the flow.

    Args:
        flow: The flow.
        cluster: The broker.
        stores: URL by stage.
        accept: Risks taken on purpose.
        checkpoint: Spark's checkpoint, if Spark delivers the records.
        until: Offset by topic and partition up to which it reads, and does not tell the consumer group; None for a run that
            reads everything.
        rebuild: Further arguments of the runner.

    Raises:
        RunRefusedError: It would be unsafe to continue.
    """

    def __init__(
        self,
        flow: Flow[Any],
        cluster: Cluster,
        stores: Mapping[str, str],
        accept: Sequence[str] = (),
        *,
        checkpoint: Checkpoint | None = None,
        until: Mapping[TopicPartition, int] | None = None,
        **rebuild: Any,
    ) -> None:
        self._until = until
        self.name, self.topics = flow.name, tuple(flow.topics)
        self._cluster = cluster
        self.logs = {topic: cluster.topics[topic] for topic in self.topics}
        self.runner = MemoryRunner(
            flow,
            stores,
            topic_ids={topic: log.topic_id for topic, log in cluster.topics.items()},
            accept=accept,
            ends={place: partition.high for place, partition in self._partitions()},
            whole={topic: partial(self._ends, topic) for topic in self.topics},
            clock=lambda: CLOCK.time_ns() / 1e9,
            metadata_max_age=METADATA_MAX_AGE,
            **rebuild,
        )
        run = self.runner.run
        plans = [
            plan(self.name, run.manifest, run.manifests, self._broker(topic), crashed=run.crashed)
            for topic in self.topics
        ]
        refuse([finding for made in plans for finding in made.findings], accept)
        for made in plans:
            run.start_at(made.topic, made.topic_id, made.starts, made.growth, logs=made.logs)
        self.next = {
            TopicPartition(made.topic, partition): start for made in plans for partition, start in made.starts.items()
        }

        self._checkpoint = checkpoint
        if checkpoint is not None:
            checkpoint.restart(self._highs())

    def _highs(self) -> dict[TopicPartition, int]:
        return {place: partition.high for place, partition in self._partitions()}

    @property
    def lag(self) -> int:
        """Number of unread records."""
        return sum(
            max(self._end(place, partition.high) - max(partition.low, self.next.get(place, 0)), 0)
            for place, partition in self._partitions()
        )

    def records(self, limit: int, slow: int) -> list[Record]:
        """Up to `limit` records of every partition but the slow one of the first topic; first the batch to be repeated.

        Raises:
            Crash: A topic was created again: the broker no longer knows its id.
        """
        self._check_topics()
        begun, logs = (
            self.runner.unfinished,
            self.runner.run.logs({name: log.topic_id for name, log in self.logs.items()}),
        )
        return [
            replace(record, topic_id=branch_id(record.topic_id, number))
            for place, partition in self._partitions()
            if place != (self.topics[0], slow) or place in begun
            for start, log in [(self.next.get(place, 0), logs.get(place, Progress(0)))]
            for number in [log.branch(max(start, partition.low))]
            for record in self._cluster.read(*place, start, _MOST if begun else limit)
            if record.offset < (begun.get(place, 0) if begun else self._end(place, partition.high))
            and log.branch(record.offset) == number  # a batch reads one branch of a log
        ]

    def advance(self, records: Sequence[Record]) -> None:
        """Advance the positions past these records."""
        for record in records:
            self.next[TopicPartition(record.topic, record.partition)] = record.offset + 1

    def batch(self, limit: int, slow: int = -1) -> None:
        """Fold up to `limit` records of every partition but the slow one, and commit."""
        if self._checkpoint is not None:
            self._batch_of(self._checkpoint, limit, slow)
            return
        records = self.records(limit, slow)
        self.runner.process(records)
        self.advance(records)
        if self._until is None:
            effect(CommitStep.RETURN, lambda: None)
            effect(CommitStep.OFFSETS, self.commit)

    def _batch_of(self, checkpoint: Checkpoint, limit: int, slow: int) -> None:
        """Fold what is new of the batch that Spark delivers. If it is refused, the query gets a new checkpoint."""
        self._check_topics()
        slowly = TopicPartition(self.topics[0], slow)
        planned = checkpoint.next({place: end for place, end in self._highs().items() if place != slowly}, limit)
        if not planned and self.lag:  # a checkpoint that is ahead: the lag of the group shows it, or the next record
            checkpoint.reset()
        rows = checkpoint.rows(
            [
                record
                for place, (start, end) in planned.items()
                for record in self._cluster.read(*place, start, _MOST)
                if record.offset < end
            ]
        )
        run = self.runner.run
        found = delivered(rows)
        if deliveries.gaps(self.name, deliveries.missing(found.values(), run.start), self._known):
            checkpoint.reset()
            return
        ranges = deliveries.new(found, run.start)
        new = {
            (row.topic, row.partition, row.offset): row
            for row in rows
            if (at := ranges.get(TopicPartition(row.topic, row.partition))) and at[0] <= row.offset < at[1]
        }
        if new and stream.is_to_be_folded(checkpoint.committed, run.batch - 2):
            self.runner.process([new[place] for place in sorted(new)])
        self.next |= run.start
        effect(CommitStep.RETURN, lambda: None)
        effect(CommitStep.OFFSETS, self.commit)
        if planned:
            checkpoint.commit()

    def _known(self, place: TopicPartition, spans: Sequence[tuple[int, int]]) -> str:
        has = any(record.offset < end for start, end in spans for record in self._cluster.read(*place, start, 1))
        return "it has records there" if has else ""

    def _check_topics(self) -> None:
        if any(self._cluster.topics[topic] is not log for topic, log in self.logs.items()):
            raise Crash("a topic was created again while the engine ran")

    def commit(self) -> None:
        """Commit the consumer group's offsets, unless a newer run does.

        Raises:
            Violation: A newer run has begun, and its offsets may have been set back.
        """
        run = self.runner.run
        if run.superseded():
            return
        for (topic, number), offset in self.next.items():
            self._cluster.commit(self.name, topic, number, Committed(offset))
        if run.epoch < max(store.installed_epoch(run.ref) for _, store in run.distinct_stores()):
            raise Violation(f"a run of epoch {run.epoch} told the consumer group though a newer one has begun")

    def _broker(self, topic: str) -> Broker:
        log = self.logs[topic]
        marks = {number: (partition.low, partition.high) for number, partition in enumerate(log.partitions)}
        group = {at[2]: one.offset for at, one in self._cluster.groups.items() if at[:2] == (self.name, topic)}
        epochs = {number: partition.leader_epoch for number, partition in enumerate(log.partitions)}
        ends = {
            place.partition: log.partitions[place.partition].end_of(one.leader_epoch)
            for place, one in self.runner.run.logs({topic: log.topic_id}).items()
            if one.leader_epoch not in (None, epochs[place.partition])
        }
        return Broker(topic, log.topic_id, marks, group, CLOCK.time_ns() // 1_000_000, epochs, ends)

    def _partitions(self) -> list[tuple[TopicPartition, Any]]:
        """Every partition of every topic."""
        return [
            (TopicPartition(topic, number), partition)
            for topic, log in self.logs.items()
            for number, partition in enumerate(log.partitions)
        ]

    def _end(self, place: TopicPartition, high: int) -> int:
        return high if self._until is None else self._until.get(place, 0)

    def _ends(self, topic: str) -> dict[int, int]:
        return {number: partition.high for number, partition in enumerate(self.logs[topic].partitions)}
