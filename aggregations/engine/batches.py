"""Folds and commits the batches of one run: attempts, and the manifest after each batch."""

import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

from aggregations.definition.flow import Flow
from aggregations.engine.dropped import Dropped
from aggregations.engine.job import Attempt, Exclusion, Job, RecordAtStage, RunProgress, TaskReport, newly_failed
from aggregations.engine.journal import Journal, entry_of
from aggregations.engine.opening import Opening
from aggregations.engine.options import RunOptions
from aggregations.engine.partition_watch import PartitionWatch
from aggregations.engine.partitioners import are_apart
from aggregations.engine.publish import produce_outputs
from aggregations.engine.ranges import Slot
from aggregations.engine.retry import ATTEMPTS, StoppedError, may_pass, pause_seconds, worst
from aggregations.engine.roots import ask_ends, check_logs, check_source, ids_of
from aggregations.errors import SharedKeyError, TasksLostError
from aggregations.per_message.ledger import Doubt, Entry, UnlistedError
from aggregations.per_message.publishing import OutputMessage
from aggregations.per_message.times import times_in
from aggregations.report import Report
from aggregations.run.closing import with_closing
from aggregations.run.final import FinalSnapshots
from aggregations.run.held_outputs import hold_outputs
from aggregations.run.incarnations import NO_ID, merge_incarnations
from aggregations.run.live import check_newest
from aggregations.run.retire import Retirement
from aggregations.run.run import Run
from aggregations.run.turns import begin_batch, forget_beyond
from envelope import TopicPartition
from envelope.dedup.history import width_of
from envelope.limits import branch_id
from persistence.commit.faults import close_of, effect
from persistence.commit.order import steps_of_driver
from persistence.commit.steps import CommitStep
from persistence.errors import Transient
from persistence.kafka import BrokerError, BrokerUnavailable
from persistence.manifest import Manifest

T = TypeVar("T")
_LOG = logging.getLogger("headwater.engine")


class Executor(Protocol):
    """Folds and persists batches: what one engine does differently from another.

    Attributes:
        routes: Number of tasks that read at the same time.
        is_local: All tasks run on this machine.
    """

    routes: int
    is_local: bool

    def execute(self, job: Job) -> tuple[TaskReport, list[Exception]]:
        """Fold and persist a batch.

        Returns:
            What the tasks did, and what failed: if anything did, the report is of no use.
        """
        ...

    def cancel(self) -> None:
        """Cancel what is being executed, from another thread."""
        ...


class Batches:
    """Folds batches of Kafka records and commits each in the protocol's order.

    Args:
        flow: The flow.
        opening: The run.
        executor: Folds and persists each batch.
        watches: Watches the partitions of each source, by topic.
        options: Options bound to the flow.
        progress: Called after each batch with its report.
        stop: Set to end the run: a batch that waits for a retry is left to the next run.
        journal: The flow's journal; None if it has none.

    Attributes:
        total: What the tasks of all committed batches reported.
        slots: Number of slots that read at the same time.
        idle: Partitions that do not hold up the closing watermark, as of the current batch.
    """

    def __init__(
        self,
        flow: Flow[Any],
        opening: Opening,
        executor: Executor,
        watches: Mapping[str, PartitionWatch],
        options: RunOptions,
        *,
        progress: Callable[[Report], None] | None,
        stop: threading.Event,
        journal: Journal | None = None,
    ) -> None:
        self.total = TaskReport()
        self._flow = flow
        self._part = flow.parts[-1]
        self._opening = opening
        self._run = opening.run
        self._executor = executor
        self.slots = executor.routes
        self.idle: Collection[TopicPartition] = ()
        self._retirement = Retirement(self._run)
        self._final = FinalSnapshots(self._run, self._publish_closed, opening.largest)
        self._watches = watches
        self._options = options
        self._progress = progress
        self._stop = stop
        self._spread = False
        self._apart: bool | None = None
        self._shared: set[str] = set()
        self._id = str(uuid.uuid4())
        self._jobs = count(1)
        self._warned = False
        self._journal = journal
        self._tries = 0

    def commit_batch(self, tasks: Sequence[Slot], ends: Mapping[TopicPartition, int]) -> None:
        """Fold and persist what these slots read, and write its manifest into every store."""
        self._part = self._flow.part_of(tasks[0].ranges[0].topic) if tasks else self._part
        self._begin(tasks)
        run = self._run
        replays = run.replays
        report = self.fold(tasks, ends)
        for stage, marks in report.marks:
            run.known.note(stage, marks)
        incarnations = merge_incarnations(run.manifest.incarnations if run.manifest else {}, report.seen)
        manifest = run.following(ends, self._opening.topic_ids, incarnations, report.changes)
        self.advance(with_closing(run, manifest, self.idle))
        if self._journal is not None:
            self._journal.write(
                entry_of(
                    run.ref,
                    *run.times[-1],
                    self._opening.topic_ids,
                    ends,
                    [one for slot in tasks for one in slot.ranges],
                    report.dropped,
                    again=replays or self._tries > 1,
                    share=self._journal.share,
                    logs=run.logs(self._opening.topic_ids),
                )
            )
            report.dropped = Dropped()
        report.counts.batches = 1
        self.leave(report.counts)
        self.total.add(report)
        report.counts.log_raised(_LOG)
        self._warn()
        if self._progress is not None:
            self._progress(report.counts)

    def _begin(self, tasks: Sequence[Slot]) -> None:
        """Note the ends of a batch that looks up tables, or changes one."""
        ends = {one.place: one.end for slot in tasks for one in slot.ranges}
        self._repeated(
            f"beginning of batch {self._run.batch}", lambda: begin_batch(self._run, ends, self._opening.topic_ids)
        )

    def _warn(self) -> None:
        """Log once that messages without a key arrive."""
        if self._warned or not (keyless := self.total.counts.keyless):
            return
        self._warned = True
        for stage, records in keyless.items():
            width = width_of(self._flow.stage(stage).aggregate.history, wide=True)
            _LOG.warning(
                "stage %s: %d of the first %d records were republished without a key. If such records are sent "
                "again, they may arrive on other partitions, and are recognised only within each lane's history of %d "
                "positions (aggregate(history=...))",
                stage,
                records,
                self.total.counts.records,
                width,
            )

    def _publish_closed(self, stage: str, outputs: Sequence[OutputMessage]) -> None:
        """Produce the states of a stage's windows that have closed; in a rebuild, hold them."""
        if self._options.sends:
            effect(close_of(stage), lambda: produce_outputs(self._options.kafka, outputs, self._opening.largest))
        elif self._options.rebuilding is not None:
            effect(close_of(stage), lambda: self._hold_closed(outputs))

    def _hold_closed(self, outputs: Sequence[OutputMessage]) -> None:
        run, store = self._run, self._run.stores[self._flow.stage_names[0]]
        hold_outputs(store, run.ref, outputs, epoch=run.epoch, batch=run.batch, attempt=next(self._jobs))

    def leave(self, counts: Report) -> None:
        """Publish the windows that have closed, then remove the states that are due."""
        after = f"after batch {self._run.batch - 1}"
        counts.add(self._repeated(f"closed windows {after}", self._final.publish))
        counts.removed.update(self._repeated(f"removal {after}", self._retirement.remove))

    def advance(self, manifest: Manifest) -> None:
        """Write a manifest into every store, downstream store first, and continue from it."""
        for step in steps_of_driver([name for name, _ in self._run.distinct_stores()]):
            self._save_manifest(step.name, manifest)
        self._run.advanced(manifest)

    def _save_manifest(self, name: str, manifest: Manifest) -> None:
        """Write a manifest. Writing the same manifest again succeeds, so a transient failure needs no new fold."""
        save = lambda: effect(CommitStep.MANIFEST.of(name), lambda: self._run.save_manifest(name, manifest))  # noqa: E731
        self._repeated(f"manifest of batch {manifest.batch}", save)

    def _repeated(self, what: str, action: Callable[[], T]) -> T:
        """Call until nothing fails for a moment; what `pause` raises ends it. Repeating the action must be safe."""
        for attempt in count(1):
            try:
                return action()
            except (Transient, BrokerUnavailable) as error:
                self.pause(what, attempt, error)
        raise AssertionError

    def fold(self, tasks: Sequence[Slot], ends: Mapping[TopicPartition, int]) -> TaskReport:
        """Fold and persist a batch; the next attempt completes a half-written batch and repeats no completed write."""
        excluded: dict[RecordAtStage, Exclusion] = {}
        attempt, doubt, again, self._tries = 1, dict(self._run.doubt), False, 0
        while True:
            self._tries += 1
            report, failures = self._try(tasks, ends, attempt, excluded, doubt, again=again)
            again = bool(failures)
            if not failures:
                scattered = newly_failed(report, excluded)
                if not (self._part.scatters and scattered):
                    return report
                # Other tasks may have folded items of these records: fold again without these records.
                excluded |= scattered
                continue
            unlisted = [one for one in failures if isinstance(one, UnlistedError)]
            if len(unlisted) < len(failures) or any(one.beside for one in unlisted):
                doubt |= ends  # this attempt may have persisted some of it
            if unlisted:
                attempt = self._list_dead({entry for one in unlisted for entry in one.entries}, attempt)
                continue
            if self._spreads([one for one in failures if isinstance(one, SharedKeyError)]):
                continue
            if any(isinstance(one, TasksLostError) for one in failures):
                self.check_source()
            error = worst(failures)
            if not may_pass(error):
                raise error
            self.pause(f"batch {self._run.batch}", attempt, error)
            attempt += 1

    def _spreads(self, shared: Sequence[SharedKeyError]) -> bool:
        """Note that a key was found in two partitions; return whether that was not known before."""
        topics = {one.topic for one in shared if one.topic} - self._shared
        if not topics and (self._spread or not shared):
            return False
        _LOG.warning("batch %d: %s", self._run.batch, shared[0])
        self._spread = True
        self._shared |= topics
        for topic in topics & self._watches.keys():
            self._watches[topic].shared = True
        return True

    def _are_apart(self) -> bool:
        """Whether the sources of this batch are not partitioned alike, as far as a sample shows it before the first one."""
        if len({self._watches[topic].partitions for topic in self._part.topics if topic in self._watches}) > 1:
            return True
        if not self._part.merges or self.slots == 1:
            return False
        if self._opening.topics is None:
            return True
        if self._apart is None:
            self._apart = are_apart(self._part, self._options.broker, self._opening.topics)
        return self._apart

    def _list_dead(self, entries: set[Entry], attempt: int) -> int:
        """List dead letters of inner stages; return the number of the batch's current attempt."""
        while True:
            try:
                self._run.list_dead(entries)
            except Transient as error:
                self.pause(f"ledger of batch {self._run.batch}", attempt, error)
                attempt += 1
            else:
                return attempt

    def _try(
        self,
        tasks: Sequence[Slot],
        read: Mapping[TopicPartition, int],
        attempt: int,
        excluded: Mapping[RecordAtStage, Exclusion],
        doubt: Doubt,
        *,
        again: bool,
    ) -> tuple[TaskReport, list[Exception]]:
        try:
            if again:
                # The marks that the previous attempt's saves returned are not known here.
                self._run.check_marks()
                self._retirement.learn(self._run.buckets())
            for topic, watch in self._watches.items():
                watch.look(partition for name, partition in read if name == topic)
            check_newest(self._run)
            self._run.check_progress()
            self._run.note_growth()
            job = self._job(tasks, attempt, excluded, doubt)
        except (BrokerUnavailable, Transient) as error:
            return TaskReport(), [error]
        return self._executor.execute(job)

    def cancel(self) -> None:
        """Cancel the batch under way, from another thread: its tasks are lost."""
        self._executor.cancel()

    def check_source(self) -> None:
        """Raise if a source was replaced by another topic of that name, or lost records, which explains why reading failed."""
        if self._opening.topics is None:
            return
        with suppress(BrokerError):
            for topic, topic_id in self._opening.topic_ids.items():
                check_source(self._opening.topics, self._flow, topic, topic_id)
            self._check_logs(self._changed_epochs())  # not noted: an attempt may have folded records that are lost

    def note_epochs(self, found: Mapping[TopicPartition, int | None] | None = None) -> None:
        """Note leader epochs that have changed, between two batches, before anything is read as of them.

        Args:
            found: Epoch by partition, None for one that is not known; without it the broker is asked.

        Raises:
            RunRefusedError: A log lost records that were folded.
        """
        changed = self._repeated("leader epochs", lambda: self._changed_epochs(found))
        if changed:
            ends = self._repeated("ends of leader epochs", lambda: self._check_logs(changed))
            forget_beyond(self._run, ends)
            self._repeated("leader epochs", lambda: self._run.note_epochs(changed, ends))

    def _changed_epochs(self, found: Mapping[TopicPartition, int | None] | None = None) -> dict[TopicPartition, int]:
        """Leader epochs that are others than the noted ones; the broker is asked for those that are not given."""
        known, topics = self._run.logs(self._opening.topic_ids), self._opening.topics
        if found is None:
            noted = [place for place, one in known.items() if one.leader_epoch is not None]
            found = topics.leader_epochs(noted) if noted and topics is not None else {}
        return {
            place: epoch
            for place, epoch in found.items()
            if epoch is not None and place in known and known[place].leader_epoch != epoch
        }

    def _check_logs(self, changed: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """As `check_logs`, for what is committed of partitions with another leader, if their topics are still the same."""
        known, opening = self._run.logs(self._opening.topic_ids), self._opening
        for topic in {place.topic for place in changed}:
            check_source(opening.broker, self._flow, topic, opening.topic_ids[topic])
        read = {place: (known[place].leader_epoch, known[place].next_offset) for place in changed}
        return check_logs(opening.broker, self._flow, read, changed)

    def check_topics(self, ends: Mapping[TopicPartition, int]) -> None:
        """Raise if rows that were read do not belong to the sources as they are; a broker that does not answer is asked again.

        Args:
            ends: Next offset after the rows, by partition.
        """
        topics = self._opening.topics
        if topics is not None:
            known = self._run.logs(self._opening.topic_ids)
            read = {place: (known[place].leader_epoch, end) for place, end in ends.items() if place in known}
            for topic, topic_id in self._opening.topic_ids.items():
                its = {place: one for place, one in read.items() if place.topic == topic}
                self._repeated(f"id of {topic}", partial(check_source, topics, self._flow, topic, topic_id, its))

    def pause(self, what: str, attempt: int, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            StoppedError: The run was stopped.
            Exception: The error, when this was the last attempt.
        """
        if not self._stop.is_set():
            if attempt == ATTEMPTS:
                raise error
            _LOG.warning("%s, attempt %d: %s", what, attempt, error)
        if self._stop.wait(pause_seconds(attempt)):
            _LOG.warning("stopped; the next run folds batch %d", self._run.batch)
            raise StoppedError

    def _job(
        self,
        tasks: Sequence[Slot],
        number: int,
        excluded: Mapping[RecordAtStage, Exclusion],
        doubt: Doubt,
    ) -> Job:
        known = dict(self._run.manifest.incarnations) if self._run.manifest else {}
        ends = ask_ends(self._opening.topics, known)
        run, opening = self._run, self._opening
        unknown = {topic: one for topic, one in run.topic_ids.items() if one == NO_ID}
        progress = RunProgress(
            ref=run.ref,
            run=self._id,
            epoch=run.epoch,
            batch=run.batch,
            topic_ids={**run.topic_ids, **ids_of(ends), **opening.topic_ids, **unknown},
            **_logs(run, tasks, opening.topic_ids),
            unasked=run.unasked,
            incarnations=known,
            known=run.known,
            earlier=None if run.accept_definition else run.earlier,
            ledger=run.ledger,
            evict=run.evicts,
            replays=run.replays,
            times=times_in(run.manifest, opening.topic_ids),
            removed=self._retirement.removed,
            closed=self._final.closed(self._retirement.removed),
            largest=opening.largest,
            longest_keys=run.longest_keys,
        )
        attempt = Attempt(
            number=number,
            serial=next(self._jobs),
            tasks=tasks,
            routes=self._executor.routes,
            local=self._executor.is_local,
            driver=os.getpid(),
            ends=ends,
            asked=tuple(known),
            excluded=excluded,
            doubt=doubt,
            # Only of topics with the same number of partitions are the records of one key read by one task.
            spread=self._spread or self._are_apart(),
            shared=frozenset(self._shared),
        )
        return Job(self._part, self._options, progress, attempt, opening.archive)


def _logs(run: Run, tasks: Sequence[Slot], topic_ids: Mapping[str, str]) -> dict[str, Any]:
    """What tasks need to know of the logs that they read."""
    known = run.logs(topic_ids)
    read = [one for slot in tasks for one in slot.ranges if one.place in known]
    return {
        "branch_ids": {
            one.place: branch_id(topic_ids[one.topic], number)
            for one in read
            if (number := known[one.place].branch(one.start))
        },
        "leader_epochs": {one.place: epoch for one in read if (epoch := known[one.place].leader_epoch) is not None},
    }
