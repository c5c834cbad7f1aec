"""The flow's progress as offsets of a consumer group, for lag tools. Headwater itself never reads them to resume."""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from aggregations.run.live import check_newest
from aggregations.run.run import Run
from envelope import TopicPartition
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.errors import StoreError, Transient
from persistence.kafka import BrokerError, Topics

OFFSETS_SECONDS = 30.0
"""Seconds between writes of the group's offsets when there is nothing to read. An older run that was frozen right
before its write may have set them back."""
_LOG = logging.getLogger("headwater.engine")


class GroupOffsets:
    """Writes the offsets of one run's consumer group. Advisory: a failure only affects what lag tools show.

    Args:
        group: Name of the group; None if nothing is written.
        topics: Administrative access to topics; None without access to the broker: nothing is written.
        run: The run.

    Attributes:
        written_at: Monotonic time of the last write in seconds; 0 when this run has not written any yet.
    """

    def __init__(self, group: str | None, topics: Topics | None, run: Run) -> None:
        self._group = group
        self._topics = topics
        self._run = run
        self.written_at = 0.0

    def write(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Write next offsets by topic and partition."""
        if (group := self._group) is None or (topics := self._topics) is None:
            return
        self.written_at = time.monotonic()
        try:
            effect(CommitStep.OFFSETS, lambda: self._write(topics, group, offsets))
        except (BrokerError, StoreError) as error:
            _LOG.warning("consumer group offsets of %s: %s", self._group, error)

    def write_reached(self) -> None:
        """Write the next offsets of the sources that the manifest has."""
        self.write({place: offset for place, offset in self._run.start.items() if place.topic in self._run.sources})

    def repeat(self, began: float) -> None:
        """Write them again if nothing was written for `OFFSETS_SECONDS`, counted from `began` at the earliest.

        Raises:
            Fenced: A newer run has begun.
        """
        if time.monotonic() - max(self.written_at, began) >= OFFSETS_SECONDS:
            with suppress(Transient):
                check_newest(self._run)
            self.write_reached()

    def _write(self, topics: Topics, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        # The epoch is checked right before the write: a run that was frozen since its batch would set a newer run's
        # offsets back.
        if self._run.superseded():
            _LOG.warning("consumer group offsets of %s are left to the newer run", group)
            return
        topics.alter_group_offsets(group, offsets)
