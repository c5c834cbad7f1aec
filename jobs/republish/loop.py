"""The loop of a republisher: slices of records, and the commits between them."""

import time
from typing import TYPE_CHECKING, Final

from envelope import TopicPartition
from jobs.republish.counts import OnStatistics
from jobs.republish.filtering import RecordFilter
from jobs.republish.growth_watch import GrowthWatch
from jobs.republish.input import Input
from jobs.republish.partition import bytes_of
from jobs.republish.processor import Processor
from jobs.republish.worker import Worker, now_ms
from persistence.commit.faults import REPUBLISH_COMMIT, effect
from persistence.garbage import no_collection
from persistence.kafka import AcknowledgedProducer

if TYPE_CHECKING:
    from jobs.republish.service import Republisher

_MOST_RECORDS: Final = 10_000  # records read at once ...
_SLICE_SECONDS: Final = 0.2  # ... fewer when the transform is slow ...
_SLICE_BYTES: Final = 16 << 20  # ... or the records are large


class Loop:
    """One run of a republisher: its consumer, its producer, and the loop between them."""

    def __init__(
        self,
        of: "Republisher",
        member_ids: set[str],
        growth: GrowthWatch,
        producer: AcknowledgedProducer,
        max_bytes: dict[str, int],
        ends: dict[TopicPartition, int] | None,
        processor: Processor,
        progress: OnStatistics | None,
        judging: RecordFilter | None,
    ) -> None:
        self._of = of
        self._progress = progress
        self._input = Input(
            of._source_settings,
            of._group,
            of._inputs,
            of._name,
            before_revoke=self._commit,
            statistics=of.statistics,
            member_ids=member_ids,
            growth=growth,
            ends=ends,
            cluster=of._cluster,
            accept=of._accept,
            pointers=processor.forwards and not judging,
        )
        self._worker = Worker(
            name=of._name,
            processor=processor,
            source=self._input,
            producer=producer,
            retry=of._retry,
            dead_letter=(of._dead_letter, max_bytes[of._dead_letter]) if of._dead_letter else None,
            cluster=of._cluster,
            judging=judging,
        )

    def run(self) -> None:
        """Process records until the end; always leave the group, and commit nothing after an error."""
        most, active = 100, time.monotonic()
        try:
            while not self._of._stop.is_set() and not self._input.caught_up:
                self._input.wake(now_ms())
                with no_collection():
                    began, handled = self._slice(min(most, self._of._batch_size - self._worker.pending))
                if handled:
                    active = time.monotonic()
                    most = _next_size(*handled, active - began)
                self._input.follow()
                self._input.check_idle(began - active)
                if self._worker.is_due(self._of._batch_size, self._of._max_wait):
                    self._commit()
            self._commit(self._of._drain)
        except BaseException:
            self._input.abandon()
            raise
        self._input.close()

    def _slice(self, most: int) -> tuple[float, tuple[int, int] | None]:
        """Steps 1 to 3 for some records; return when they were read, and how many records and bytes they were."""
        messages = self._input.read(most)
        began = time.monotonic()
        if not messages:
            return began, None
        size = bytes_of(messages)
        self._worker.handle(messages)
        return began, (len(messages), size)

    def _commit(self, timeout: float | None = None) -> None:
        """Steps 4 to 7; the consumer also runs them before partitions are revoked."""
        if not self._worker.pending:
            self._input.commit_ends(timeout)
            return
        self._worker.finish(timeout)
        effect(REPUBLISH_COMMIT, lambda: self._input.commit(timeout))
        statistics = self._of.statistics
        statistics.add(self._worker.take_counts())
        if self._progress:
            self._progress(statistics)


def _next_size(records: int, size: int, seconds: float) -> int:
    """Number of records to read at once, so that a slice stays short and small."""
    by_time = _SLICE_SECONDS * records / max(seconds, 1e-6)
    by_bytes = _SLICE_BYTES * records / max(size, 1)
    return max(1, min(_MOST_RECORDS, int(by_time), int(by_bytes)))
