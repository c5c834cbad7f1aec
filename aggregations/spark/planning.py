"""What a batch of the source `headwater` reads, decided in the driver: today's start plan, limits and turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from aggregations.engine.engine import Engine
from aggregations.engine.options import RunOptions
from aggregations.engine.ranges import before
from aggregations.spark.source import OffsetRange, Offsets
from envelope import TopicPartition
from persistence.commit.faults import STREAM_BEGIN, STREAM_PLAN, effect

_MOST_COMMITS: Final = 100
"""Most commits of one micro-batch."""


class KafkaPlan:
    """Plans the micro-batches of one aggregator; see `aggregations.spark.source.Planner`.

    Args:
        engine: Returns the engine of the current run.
        options: Its options. A micro-batch of a backlog has as many commits as `trigger_seconds` take, so that the next one
            begins at once. Up to 4.1 only `until_caught_up` says that the query stops at the ends of the log.
    """

    def __init__(self, engine: Callable[[], Engine], options: RunOptions) -> None:
        self._engine = engine
        self._most = options.max_records or 0
        self._trigger = options.trigger_seconds
        self._goal = None if options.rebuilding is None else options.rebuilding.until
        self._bounded = options.until_caught_up
        self._reached: Offsets | None = None
        self._newest: Offsets = {}
        self._planned: Mapping[TopicPartition, int] = {}
        self._commits = 1
        self._begins, self._fresh = True, False

    @property
    def ends(self) -> Mapping[TopicPartition, int]:
        """Where the micro-batch ends that was planned last."""
        return self._planned

    def committed(self, commits: int, seconds: float) -> None:
        """Note how long a micro-batch took, for the size of the next one."""
        if commits:
            self._commits = max(1, min(_MOST_COMMITS, 1 + int(self._trigger * commits / max(seconds, 1e-3))))

    def initial(self) -> Offsets:
        self._fresh = True  # a checkpoint that has offsets is not asked for its first ones
        return _offsets(self._start())

    def prepare(self) -> None:
        self._bounded = True

    def latest(self, start: Offsets | None, *, everything: bool) -> Offsets:
        return effect(STREAM_PLAN, lambda: self._latest(start, everything=everything))

    def ranges(self, end: Offsets) -> Sequence[OffsetRange]:
        return effect(STREAM_BEGIN, lambda: self._ranges(end))

    def _latest(self, start: Offsets | None, *, everything: bool) -> Offsets:
        engine = self._engine()
        stands = self._start()
        begins, self._begins = self._begins, False
        if begins and self._elsewhere(start, _offsets(stands)):
            return _offsets(stands)
        backlog = engine.look()
        self._newest = _offsets({**stands, **{one.place: one.end for one in backlog}})
        if self._bounded:
            if self._goal is None:
                self._goal = {one.place: one.end for one in backlog}
            backlog = before(backlog, self._goal)
        most = 0 if everything else self._most * (1 if self._bounded else self._commits)
        if engine.is_stopped or not (ranges := engine.plan(backlog, most)):
            return start or self._reached or _offsets(stands)
        self._reached = _offsets({**stands, **{one.place: one.end for one in ranges}})
        return self._reached

    def _elsewhere(self, start: Offsets | None, stands: Offsets) -> bool:
        """Whether Spark's checkpoint stands elsewhere than the flow, so that Spark might take what there is to read for read.

        A first batch of nothing then brings it to where the flow stands. A query that ends after its first batch has none.
        """
        if start is not None:
            return start != stands
        return not (self._fresh or self._bounded)

    @property
    def is_behind(self) -> bool:
        """Whether a query that has ended has not read all that it had to: Spark took it for read."""
        return self._goal is not None and bool(self._engine().left(self._goal))

    def newest(self) -> Offsets:
        return self._newest

    def _ranges(self, end: Offsets) -> Sequence[OffsetRange]:
        stands = self._start()
        self._planned = {
            TopicPartition(topic, int(partition)): offset
            for topic, partitions in end.items()
            for partition, offset in partitions.items()
        }
        return [
            OffsetRange(*place, stands.get(place, 0), offset)
            for place, offset in sorted(self._planned.items())
            if offset > stands.get(place, 0)
        ]

    def _start(self) -> dict[TopicPartition, int]:
        run = self._engine().run
        return {place: offset for place, offset in run.start.items() if place.topic in run.sources}


def _offsets(ends: Mapping[TopicPartition, int]) -> Offsets:
    offsets: Offsets = {}
    for (topic, partition), offset in sorted(ends.items()):
        offsets.setdefault(topic, {})[str(partition)] = offset
    return offsets
