"""Watches the number of partitions of each source in the driver: see `aggregations.run.growth` for the rule.

A flow that publishes must keep the order of each key. It reads new partitions only after the records in the old ones.
This requires that the number of partitions is a multiple of the previous one, and is detected while the flow runs: then
keys move only from old partitions to new ones. Any other growth is refused unless everything is read.
"""

import logging
import time
from collections.abc import Iterable

from aggregations.engine.opening import Opening
from aggregations.run.growth import describe
from aggregations.run.plan import Plan, grown
from aggregations.run.risks import refuse
from persistence.growth import is_drained
from persistence.manifest import Growth

_LOG = logging.getLogger("headwater.engine")


class PartitionWatch:
    """Watches the partitions of one source for one run.

    Args:
        opening: The run.
        plan: Where it starts to read the source.
        metadata_max_age: Seconds for which producers may not know of new partitions.
        keeps_order: The records of one key must stay in order.

    Attributes:
        topic: The source.
        partitions: Its number of partitions, as of the last look.
        shared: A key arrived in two partitions.
        widens: Waiting partitions become readable: the query must be restarted with them.
    """

    def __init__(self, opening: Opening, plan: Plan, metadata_max_age: float, *, keeps_order: bool) -> None:
        self._topics = opening.broker
        self._run = opening.run
        self.topic = plan.topic
        self._topic_id = plan.topic_id
        self._max_age = metadata_max_age
        self._keeps_order = keeps_order
        self.partitions = 0
        self.shared = False
        self.widens = False

    def look(self, read: Iterable[int]) -> bool:
        """Note the number of partitions, after a batch was read and before it is folded.

        Args:
            read: Partitions that Spark knows.

        Returns:
            Whether anything about a growth has changed.

        Raises:
            RunRefusedError: The order of published messages cannot be kept.
            BrokerUnavailable: No broker answers.
        """
        run, topic = self._run, self.topic
        before = run.growths.get(topic)
        self.partitions = max([self._topics.partitions([topic])[topic], *(1 + one for one in read)])
        changed = run.look(
            topic,
            self.partitions,
            clock_ms=time.time_ns() // 1_000_000,
            ends=self._ends,
            shared=self.shared,
            max_age_seconds=self._max_age,
        )
        self.shared = False  # the growth is noted, and may end
        growth = run.growths.get(topic)
        if changed:
            _LOG.warning("%s", describe(topic, growth) if growth else f"growth of topic {topic} is over")
        if self._keeps_order and growth is not None and growth.partitions_now > len(run.positions(topic)):
            self._wait(before, growth)
        return changed

    def widened(self) -> dict[int, int]:
        """Start offsets including the waiting partitions that became readable; empty when there are none."""
        run, topic = self._run, self.topic
        if not self.widens and self._keeps_order:
            self.look(run.positions(topic))
        if not self.widens:
            return {}
        self.widens = False
        lows = {partition: marks.low for (_, partition), marks in self._topics.marks([topic]).items()}
        starts = {**lows, **run.positions(topic)}
        run.start_at(topic, self._topic_id, starts, run.growths.get(topic))
        return starts

    def _ends(self) -> dict[int, int]:
        return {partition: end for (_, partition), end in self._topics.ends([self.topic]).items()}

    def _wait(self, before: Growth | None, growth: Growth) -> None:
        run = self._run
        positions = run.positions(self.topic)
        if before is not None and before.partitions_now == growth.partitions_now:
            self.widens = is_drained(growth, positions, positions)
        elif run.accept_disorder or all(end <= positions.get(one, 0) for one, end in self._ends().items()):
            self.widens = True
        elif before is not None or growth.partitions_now % growth.partitions_before:
            refuse([grown(run.flow.name, self.topic, growth)], ())
