"""One run of a flow: batch after batch of Kafka's records, exact across crashes."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.batches import Batches, Executor
from aggregations.engine.group_offsets import GroupOffsets
from aggregations.engine.journal import Journal
from aggregations.engine.opening import Opening
from aggregations.engine.options import RunOptions
from aggregations.engine.partition_watch import PartitionWatch
from aggregations.engine.ranges import Range, Source, aligned, before, of_one_branch, slots_of
from aggregations.engine.retry import StoppedError
from aggregations.errors import SparkEndedError
from aggregations.per_message.times import Times, times_in
from aggregations.report import Report
from aggregations.run.closing import IdlePartitions
from aggregations.run.holding import holders
from aggregations.run.run import Run
from aggregations.run.turns import Turns, batch_to_repeat, check_turn
from envelope import TopicPartition
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.errors import StoreError
from persistence.kafka import BrokerError, BrokerUnavailable

_LOG = logging.getLogger("headwater.engine")

_LOOK_SECONDS = 1.0
"""Seconds between two checks of the number of partitions, when new partitions are not read at once."""
_STOP_SECONDS = 5.0
"""Seconds that a stop waits for the batch under way before it cancels the batch."""
_SHOWN = 8
"""Partitions that one warning names."""
_LEAST_SECONDS = 0.01
"""Shortest persist interval, in seconds."""


def finish(run: Run) -> None:
    """Note that the run ended cleanly. If that fails, the next run doubts what this run may have read."""
    try:
        run.finish()
    except StoreError as error:
        _LOG.warning("end of the run: %s", error)


class Engine:
    """One run of a flow: commits batches one after the other.

    Args:
        flow: The flow.
        opening: The run.
        executor: Folds and persists each batch.
        options: Options bound to the flow.
        progress: Called after each batch with its report.
        stop: Set to end the run.
    """

    def __init__(
        self,
        flow: Flow[Any],
        opening: Opening,
        executor: Executor,
        options: RunOptions,
        *,
        progress: Callable[[Report], None] | None,
        stop: threading.Event,
    ) -> None:
        self.flow = flow
        self.options = options
        self.run = opening.run
        max_age, journal = options.metadata_max_age, options.journal
        self._keeps_order = order = options.keeps_order(flow)
        self._watches = {
            plan.topic: PartitionWatch(opening, plan, max_age, keeps_order=order) for plan in opening.plans
        }
        self._journal = None
        if journal is not None and opening.topics is not None:
            most_bytes = opening.topics.max_message_bytes([journal])[journal]
            self._journal = Journal(options.broker, journal, options.journal_share, most_bytes=most_bytes)
        self._offsets = GroupOffsets(options.group, opening.topics, opening.run)
        self.batches = Batches(
            flow,
            opening,
            executor,
            self._watches,
            options,
            progress=progress,
            stop=stop,
            journal=self._journal,
        )
        topics = opening.topics
        names = opening.run.sources if topics is not None else ()
        self._sources = [Source(topics, name, widens=not order) for name in names if topics is not None]
        self._turns = Turns(opening.run)
        self._topic_ids = opening.topic_ids
        limits = {name: topic.skew_seconds for name, topic in flow.topics.items()}
        self._skews = {name: seconds for name, seconds in limits.items() if seconds is not None}
        self._stop = stop
        self._began = time.monotonic()
        self._looked_at_tables = False
        self._looked = 0.0
        self._warned = False
        self._idle_partitions = IdlePartitions({name: topic.idle_seconds for name, topic in flow.topics.items()})

    def stream(self, ends: Mapping[TopicPartition, int] | None = None) -> Report:
        """Commit batch after batch until the run is stopped, or has caught up if its options say so.

        Args:
            ends: Where to stop in each partition; others are not read. None for the ends of the rebuild, or else the
                current ones.

        Returns:
            The counts of all batches.
        """
        total = self.total
        options = self.options
        seconds = 0.0 if options.until_caught_up else max(options.trigger_seconds, _LEAST_SECONDS)
        if ends is None and options.rebuilding is not None:
            ends = options.rebuilding.until
        try:
            self.begin()
            with self._cancelling():
                self._loop(seconds, ends)
        except StoppedError:
            return total  # it may have persisted a part, which the next run must not treat as proven
        except SparkEndedError:
            if self._stop.is_set():  # the signal that stopped the run ended its JVM as well
                return total
            raise
        finally:
            self.close()
        self.finish()
        return total

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped."""
        return self._stop.is_set()

    @property
    def total(self) -> Report:
        """The counts of all batches so far."""
        return self.batches.total.counts

    def begin(self) -> None:
        """Complete what a crashed run left."""
        self.batches.leave(self.total)
        self._began = time.monotonic()

    def finish(self) -> None:
        """End the run cleanly, between two batches."""
        if not self._offsets.written_at:
            self._offsets.write_reached()
        finish(self.run)

    def cancel(self) -> None:
        """Cancel the batch under way, from another thread."""
        self.batches.cancel()

    def close(self) -> None:
        """Release what the engine has opened."""
        if self._journal is not None:
            self._journal.close()

    def look(self) -> list[Range]:
        """All that there is to read from Kafka now. If that is nothing, do what is due between batches."""
        backlog = self._backlog()
        if not self._looked_at_tables:
            self._looked_at_tables = True
            self._turns.begin({one.place: one.end for one in backlog})
        if not backlog:
            self._note_idle(backlog)
            self._idle(self._began)
        return backlog

    def left(self, ends: Mapping[TopicPartition, int]) -> list[Range]:
        """What there is to read from Kafka before these ends."""
        return before(self._backlog(), ends)

    def plan(self, backlog: list[Range], max_records: int) -> list[Range]:
        """What of a backlog the next batch reads: at most so many records, 0 for no limit; all of an unfinished batch."""
        backlog = of_one_branch(backlog, self.run.logs(self._topic_ids))
        if ends := batch_to_repeat(self.run):
            return before(backlog, ends)
        return aligned(self._turn(backlog), max_records, self._reached(), self._skews)

    def widened(self) -> bool:
        """Begin to read partitions that waited for others; return whether there are any."""
        return bool([one for one in self._watches.values() if one.widened()])

    def widen(self, topic: str) -> bool:
        """Begin to read partitions that were added to a topic; return whether the order of keys allows it."""
        watch = self._watches[topic]
        return bool(watch.widened() or watch.widened())

    def _loop(self, trigger_seconds: float, ends: Mapping[TopicPartition, int] | None) -> None:
        until_caught_up = self.options.until_caught_up
        goal = ends
        began, begun = time.monotonic(), False
        while not self._stop.is_set():
            begin = time.monotonic()
            backlog = self._backlog()
            self._note_idle(backlog)
            if self._stop.is_set():
                return
            if until_caught_up:
                goal = goal if goal is not None else {one.place: one.end for one in backlog}
                backlog = before(backlog, goal)
            if not begun:
                self._turns.begin({one.place: one.end for one in backlog})
                begun = True
            if ranges := self.plan(backlog, self.options.max_records):
                self._commit(ranges)
            elif until_caught_up:
                if not self.widened():
                    return
                goal = ends
            else:
                self._idle(began)
            if ranges == backlog:  # otherwise a whole batch is left
                self._stop.wait(max(begin + trigger_seconds - time.monotonic(), 0.0))

    def commit_all(self, left: Callable[[], list[Range]]) -> None:
        """Commit batch after batch until nothing is left, or the run is stopped.

        Args:
            left: Returns the ranges that are still to be folded.

        Raises:
            RunRefusedError: Nothing that is left may be folded next, because a batch of another part of the flow is
                unfinished.
        """
        while not self._stop.is_set() and (backlog := left()):
            self._note_idle(backlog)
            ranges = self.plan(backlog, self.options.max_records)
            if not ranges:
                check_turn(self.run, self.flow.part_of(backlog[0].topic))
            self._commit(ranges)

    def _turn(self, backlog: list[Range]) -> list[Range]:
        """The ranges of the part of the flow that is read next."""
        part = self._turns.next([one.topic for one in backlog])
        return [] if part is None else [one for one in backlog if one.topic in part.topics]

    def _reached(self) -> Times:
        """The event time that each partition has reached, if that decides what is read next."""
        return times_in(self.run.manifest, self._topic_ids) if self._skews else {}

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """Cancel the batch under way if it takes too long after the run was stopped."""
        ended = threading.Event()

        def cancel() -> None:
            while not self._stop.wait(_LOOK_SECONDS):
                if ended.is_set():
                    return
            while not ended.wait(_STOP_SECONDS):
                self.batches.cancel()

        watch = threading.Thread(target=cancel, name="headwater-stop", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()

    def _backlog(self) -> list[Range]:
        """All that there is to read. A broker that does not answer is asked again."""
        for attempt in count(1):
            try:
                found = [one for source in self._sources for one in source.look(self.run.positions(source.topic))]
                self.batches.note_epochs(
                    {place: one for source in self._sources for place, one in source.epochs.items()}
                )
                return found
            except BrokerError as error:
                self.batches.check_source()
                if not isinstance(error, BrokerUnavailable):
                    raise
                try:
                    self.batches.pause(f"ends of {', '.join(self.run.sources)}", attempt, error)
                except StoppedError:  # between batches
                    break
        return []

    def _note_idle(self, backlog: Sequence[Range]) -> None:
        """Note the partitions that the next batch's closing watermark does not wait for."""
        unread = {one.place for one in backlog}
        all_of_them = {
            *unread,
            *(place for place in self.run.start if place.topic in self.run.sources),
            *(TopicPartition(one.topic, partition) for one in self._sources for partition in one.positions),
        }
        self.batches.idle = self._idle_partitions.look(all_of_them, unread, time.monotonic())
        self._warn(unread)

    def _warn(self, unread: Collection[TopicPartition]) -> None:
        """Log once which partitions hold up the closing watermark although they are read to their end."""
        run = self.run
        if self._warned or run.manifest is None or run.growths or run.replays:
            return
        if found := holders(self.flow, run.manifest.positions, unread):
            self._warned = True
            waits = ", and windows are not published," if any(one.final_snapshots for one in self.flow.stages) else ""
            _LOG.warning(
                "windows that have closed and states that have expired stay in the stores%s as long as these partitions have "
                "no newer record: %s. Set Topic(%r, idle='10m') to go on without partitions that are silent for so long",
                waits,
                ", ".join(map(str, found[:_SHOWN])) + (f" and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""),
                found[0].place.topic,
            )

    def _commit(self, ranges: Sequence[Range]) -> None:
        """Commit a batch; its end offsets become the group's."""
        named = {place: offset for place, offset in self.run.start.items() if place.topic in self.run.sources}
        named |= {
            TopicPartition(source.topic, partition): offset
            for source in self._sources
            for partition, offset in source.positions.items()
        }
        named |= {one.place: one.end for one in ranges}
        self.batches.commit_batch(slots_of(ranges, self.batches.slots), named)
        effect(CommitStep.RETURN, lambda: None)
        self._offsets.write(named)
        self._widen()

    def _widen(self) -> None:
        """Read the partitions that waited for others."""
        for one in self._watches.values():
            if one.widens:
                one.widened()

    def _idle(self, began: float) -> None:
        """What is done when there is nothing to read."""
        self._offsets.repeat(began)
        if self._keeps_order and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(BrokerUnavailable, StoppedError):
                if [one for one in self._watches.values() if one.look(self.run.positions(one.topic))]:
                    self.batches.advance(self.run.noting())
                self._widen()
