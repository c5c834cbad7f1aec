"""Watches the source's number of partitions in the driver: see `aggregations.run.growth` for the rule.

A flow that publishes must keep the order of each key. It reads new partitions only after the records in the old ones.
This requires that the number of partitions is a multiple of the previous one, and is detected while the flow runs: then
keys move only from old partitions to new ones. Any other growth is refused unless everything is read.
"""

import logging
import time
from collections.abc import Iterable

from aggregations.engine.opening import Opening
from aggregations.run.growth import describe
from aggregations.run.plan import grown
from aggregations.run.risks import refuse
from persistence.growth import is_drained
from persistence.manifest import Growth

_LOG = logging.getLogger("headwater.engine")


class PartitionWatch:
    """Watches the source's partitions for one run.

    Args:
        opening: The run.
        metadata_max_age: Seconds for which producers may not know of new partitions.

    Attributes:
        shared: A key arrived in two partitions.
        widens: Waiting partitions become readable: the query must be restarted with them.
    """

    def __init__(self, opening: Opening, metadata_max_age: float) -> None:
        self._topics = opening.topics
        self._run = opening.run
        self._topic_id = opening.plan.topic_id
        self._max_age = metadata_max_age
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
        run, before = self._run, self._run.growth
        known = max([self._topics.partitions([run.source])[run.source], *(1 + one for one in read)])
        changed = run.look(
            known,
            clock_ms=time.time_ns() // 1_000_000,
            ends=self._ends,
            shared=self.shared,
            max_age_seconds=self._max_age,
        )
        self.shared = False  # the growth is noted, and may end
        if changed:
            _LOG.warning(
                "%s", describe(run.source, run.growth) if run.growth else f"growth of topic {run.source} is over"
            )
        if run.flow.publishes and run.growth is not None and run.growth.partitions_now > len(run.positions):
            self._keep_order(before, run.growth)
        return changed

    def widened(self) -> dict[int, int]:
        """Start offsets including the waiting partitions that became readable; empty when there are none."""
        run = self._run
        if not self.widens and run.flow.publishes:
            self.look(run.positions)
        if not self.widens:
            return {}
        self.widens = False
        lows = {partition: marks.low for (_, partition), marks in self._topics.marks([run.source]).items()}
        starts = {**lows, **run.positions}
        run.start_at(run.source, self._topic_id, starts, run.growth)
        return starts

    def _ends(self) -> dict[int, int]:
        return {partition: end for (_, partition), end in self._topics.ends([self._run.source]).items()}

    def _keep_order(self, before: Growth | None, growth: Growth) -> None:
        run = self._run
        positions = run.positions
        if before is not None and before.partitions_now == growth.partitions_now:
            self.widens = is_drained(growth, positions, positions)
        elif run.accept_disorder or all(end <= positions.get(one, 0) for one, end in self._ends().items()):
            self.widens = True
        elif before is not None or growth.partitions_now % growth.partitions_before:
            refuse([grown(run.flow.name, run.source, growth)], ())
