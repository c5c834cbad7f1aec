"""The closing watermark: the event time that every partition of every source has reached.

Nothing that is still to be read can belong to a window that ends, with its lateness, at or before the closing watermark:
for each partition, the latest event time of the records below its next offset is at or above it, so the log of the
partition itself has closed the window for all of its further records.

It is a function of the manifest alone. Records that a crashed run folded without a manifest do not count: they are read
again, and are not late when they are. It is part of the manifest, so that neither a restart nor a partition that is
added, created again or no longer idle can lower it.

Three things hold it up, besides a partition that lags: a partition without any event time; a growth of a topic, while
records of a key may be in a partition that is not read yet; and a run without the broker, which does not know what
partitions there are. The only exception is a partition that is idle: its topic
says after which time (`Topic(idle=)`), it is read to its end, and no record of it came in this time. Of the records that
it delivers afterwards, those whose windows were removed in the meantime are too late.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from aggregations.run.run import Run
from envelope import TopicPartition
from persistence.manifest import Manifest, Progress


def closing_watermark(
    before: int | None,
    positions: Mapping[str, Mapping[int, Progress]],
    sources: Collection[str],
    idle: Collection[TopicPartition] = (),
) -> int | None:
    """The closing watermark after a batch.

    Args:
        before: The one before the batch.
        positions: Progress by topic and partition after the batch.
        sources: The consumed topics.
        idle: Partitions that do not hold it up.

    Returns:
        Microseconds since 1970, never below `before`; None if no event time was reached everywhere yet.
    """
    if any(not positions.get(topic) for topic in sources):
        return before
    times = [
        progress.time_us
        for topic in sources
        for partition, progress in positions[topic].items()
        if TopicPartition(topic, partition) not in idle
    ]
    known = [time for time in times if time is not None]
    if not known or len(known) < len(times):
        return before
    return min(known) if before is None else max(before, min(known))


def with_closing(run: Run, manifest: Manifest, idle: Collection[TopicPartition]) -> Manifest:
    """The manifest of a batch with the closing watermark after it.

    Args:
        run: The run, before the batch.
        manifest: The manifest of the batch.
        idle: The idle partitions; none is while records of a crashed run are in doubt.
    """
    if run.growths or run.notes or not run.flow.is_timed:
        return manifest
    tables = {topic for part in run.flow.tables.values() for topic in part.topics}
    sources = [topic for topic in run.sources if topic not in tables]
    reached = closing_watermark(manifest.closing_us, manifest.positions, sources, () if run.replays else idle)
    return msgspec.structs.replace(manifest, closing_us=reached)


class IdlePartitions:
    """Finds the partitions that have had nothing to read for as long as their topic allows.

    A partition counts as active when a run first sees it, so a restart makes no partition idle.

    Args:
        limits: Seconds by topic; None if its partitions are never idle.
    """

    def __init__(self, limits: Mapping[str, int | None]) -> None:
        self._limits = limits
        self._active: dict[TopicPartition, float] = {}

    def look(
        self, partitions: Iterable[TopicPartition], unread: Collection[TopicPartition], now: float
    ) -> frozenset[TopicPartition]:
        """The idle partitions.

        Args:
            partitions: All partitions.
            unread: Those that have something to read.
            now: The time in seconds, of a clock that is not set back.
        """
        idle = []
        for one in partitions:
            since = now if one in unread else self._active.get(one, now)
            self._active[one] = since
            limit = self._limits.get(one.topic)
            if limit is not None and now - since >= limit:
                idle.append(one)
        return frozenset(idle)
