"""Data that the driver sends to its tasks, and the reports that they return."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.operators import publishes
from aggregations.engine.clients import store_of
from aggregations.engine.dropped import Dropped
from aggregations.engine.options import RunOptions
from aggregations.engine.ranges import Range, Slot
from aggregations.engine.roots import EndsByIncarnation
from aggregations.errors import SharedKeyError
from aggregations.per_message.cause import Cause
from aggregations.per_message.ledger import Changes, Doubt, Ledger
from aggregations.per_message.publishing import OutputMessage
from aggregations.per_message.stage import KeyState
from aggregations.per_message.times import Times
from aggregations.report import Report
from aggregations.run.incarnations import merge_incarnations
from aggregations.run.snapshots import snapshots_of
from aggregations.run.states import states_in
from envelope import Node, Reason, TopicPartition
from envelope.raised import Raised
from persistence.marks import KnownMarks, Marks
from persistence.protocol import FlowRef, Stored

if TYPE_CHECKING:
    from aggregations.engine.archive import Archive

RecordAtStage = tuple[int, str, int, int]
"""(stage index, topic, partition, offset): a record at a stage."""


class Exclusion(NamedTuple):
    """Why a stage must not fold a record: one of its items failed.

    Attributes:
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        hole: Its keys are known, and it leaves a hole in the state of each.
        raised: Exception of user code, when that is the reason; else None.
    """

    reason: Reason
    detail: str
    hole: bool
    raised: Raised | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """What a run knows when a batch begins: of itself, of its topics, and of what its states contain.

    Attributes:
        ref: Name and generation of the flow.
        run: Random id of the run.
        epoch: Epoch of the run.
        batch: Number of the batch.
        topic_ids: Current topic id by topic.
        branch_ids: Topic id of the records that the batch reads of a log after it was written anew (`branch_id`).
        leader_epochs: Noted epoch of each partition's leader, for the partitions that the batch reads.
        incarnations: Topic ids from the manifest, in the order in which they were first seen.
        known: Marks that buckets had acknowledged when the batch began.
        earlier: Earlier definitions by stage whose states are continued; None for any.
        ledger: Dead letters of the flow that left no hole.
        evict: Histories evict positions beyond their limit; not while the consumed topic grows.
        replays: A crashed run may have folded records that this run has not committed yet.
        times: Latest event time read, by topic and partition; empty in a flow without windows.
        removed: Due time up to which states have left the store, by stage, in seconds since 1970.
        closed: Time up to which elements are too late, by stage: see `aggregations.run.final.FinalSnapshots.closed`.
        unasked: Root topics that are not known have no id; see `Manifest.unasked`.
        largest: Largest record that can be produced to an output topic, in bytes, by topic.
        longest_keys: Bytes of the longest key by stage, if its store has a limit.
    """

    ref: FlowRef
    epoch: int
    batch: int
    known: KnownMarks
    run: str = ""
    topic_ids: dict[str, str] = field(default_factory=dict)
    branch_ids: Mapping[TopicPartition, str] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    incarnations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    earlier: Mapping[str, tuple[str, ...]] | None = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger(""))
    evict: bool = True
    replays: bool = False
    times: Times = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, int] = field(default_factory=dict)
    unasked: bool = False
    largest: Mapping[str, int] = field(default_factory=dict)
    longest_keys: Mapping[str, int] = field(default_factory=dict)

    def own_id(self, topic: str, partition: int) -> str:
        """Topic id of the records that the batch reads from a partition."""
        return self.branch_ids.get(TopicPartition(topic, partition)) or self.topic_ids.get(topic, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a batch: what is read, by which tasks, and what earlier attempts have shown.

    Attributes:
        number: Attempt at this batch, from 1.
        serial: Number of this job within the run: every try has its own.
        tasks: Ranges of the sources that each reading task reads, by task.
        routes: Number of tasks that a shuffle goes to.
        local: All tasks run on the driver's machine, in one executor.
        directory: Where tasks put rows for those of the next stage; empty: they go through Spark's shuffle.
        driver: Process id of the driver, for injected crashes.
        ends: Ends of the root topics, fetched after the batch was delivered.
        asked: Root topics that were queried.
        excluded: Records that a stage must not fold, with the cause.
        doubt: Offsets below which records may have been folded before.
        spread: The first stage, too, is folded after a shuffle: a key arrived in two partitions, or the sources are not
            co-partitioned.
        shared: Sources in which a key is known to have arrived in two partitions.
    """

    number: int = 1
    serial: int = 0
    tasks: Sequence[Slot] = ()
    routes: int = 1
    local: bool = False
    directory: str = ""
    driver: int = 0
    ends: EndsByIncarnation = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    excluded: Mapping[RecordAtStage, Exclusion] = field(default_factory=dict)
    doubt: Doubt = field(default_factory=dict)
    spread: bool = False
    shared: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of one run, as the tasks see it.

    Attributes:
        flow: The part of the flow that the batch reads.
        options: Options of the run, bound.
        progress: What the run knows when the batch begins.
        attempt: This attempt at the batch.
        archive: The archive that is read before Kafka; None for none.
    """

    flow: Flow[Any]
    options: RunOptions
    progress: RunProgress
    attempt: Attempt = Attempt()
    archive: "Archive | None" = None

    @property
    def folds_while_reading(self) -> bool:
        """Whether the task that reads a partition has all of its keys and folds the first stage itself."""
        return not self.attempt.spread and all(
            first.aggregate.co_partitioned and not first.fans_out for first in self.flow.stages[:1]
        )

    def checks_partition(self, topic: str, *, rekeyed: bool) -> bool:
        """Whether a key of the first stage must be in one partition of a topic: otherwise partitions were added.

        With several sources this is looked for after a shuffle, too, where a task has all records of its keys.

        Args:
            topic: The topic.
            rekeyed: The stage's key differs from the record's.
        """
        if not self.flow.merges:
            return self.folds_while_reading
        first = self.flow.stages[0]
        return (
            first.aggregate.co_partitioned and not first.fans_out and not rekeyed and topic not in self.attempt.shared
        )

    @property
    def may_share_keys(self) -> bool:
        """Whether two of the tasks that fold while they read may have the same key, for example after a growth."""
        return self.folds_while_reading and len(self.attempt.tasks) > 1

    @property
    def holds_outputs(self) -> bool:
        """Whether outputs wait for the task that produces them all.

        They wait if different tasks may fold items of one record: nothing may be published before all items are
        folded. They also wait if a task after a shuffle publishes: it has the keys of its stage, not the outputs' keys.
        Otherwise several tasks would alternate in producing messages of one key, and readers would receive old
        positions after newer ones.
        """
        shuffled = 1 if self.folds_while_reading else 0
        stages = self.flow.stages
        if not stages:
            return False  # the task that reads a partition publishes what it makes of it, in the order of offsets
        behind = [*(stage.before for stage in stages[shuffled + 1 :]), self.flow.tail][: len(stages) - shuffled]
        return self.flow.scatters or any(map(publishes, behind))

    def stored(self, stage: Stage, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Load states of a stage as they are stored; keys without one are missing."""
        return store_of(self.options.urls[stage.name]).load(self.progress.ref.stage(stage.name), keys)

    def states_in(self, stage: Stage, found: Mapping[bytes, Stored]) -> dict[bytes, KeyState]:
        """Decode states of a stage."""
        earlier = None if self.progress.earlier is None else self.progress.earlier.get(stage.name, ())
        return states_in(found, self.progress.ref.stage(stage.name), stage, earlier)

    def load(self, stage: Stage, keys: Sequence[bytes]) -> dict[bytes, KeyState]:
        """Load states of a stage; keys without one are missing."""
        return self.states_in(stage, self.stored(stage, keys))

    def excluded_at(self, stage: int, *, hole: bool) -> dict[Node, Cause]:
        """Records that one stage must not fold, with the cause.

        Args:
            stage: Index of the stage; the number of stages for the steps after the last stage.
            hole: Records that leave holes because their fold failed; else records that a step before it rejected.
        """
        return {
            self.node(topic, partition, offset): Cause(cause.reason, cause.detail, cause.raised)
            for (index, topic, partition, offset), cause in self.attempt.excluded.items()
            if index == stage and cause.hole is hole
        }

    def snapshots_of(self, stage: Stage, states: Mapping[bytes, KeyState], counts: Report) -> list[OutputMessage]:
        """Snapshots of a stage's changed states; states that are too large are counted."""
        return snapshots_of(
            stage,
            states,
            ref=self.progress.ref,
            epoch=self.progress.epoch,
            batch=self.progress.batch,
            attempt=self.attempt.number,
            largest=self.progress.largest,
            counts=counts,
        )

    def read(self, ranges: Sequence[Range]) -> dict[TopicPartition, tuple[int | None, int]]:
        """The leader epoch as of which ranges were planned, and their ends."""
        return {one.place: (self.progress.leader_epochs.get(one.place), one.end) for one in ranges}

    def node(self, topic: str, partition: int, offset: int) -> Node:
        """Coordinates with the topic's current id, and its cluster if there are several."""
        return Node(topic, partition, offset, self.progress.own_id(topic, partition), self.flow.cluster)


def shared_key(job: Job, stage: Stage, topic: str = "") -> SharedKeyError:
    """The error for a key that was found in two partitions.

    Args:
        job: The batch.
        stage: Its first stage.
        topic: The topic; empty if two tasks found it, which may have read it from two topics.
    """
    topics = list(job.flow.topics)
    where = f"flow {job.flow.name}, stage {stage.name}: a key was found in"
    if not topic and len(topics) > 1:
        return SharedKeyError(
            f"{where} partitions of different numbers of {', '.join(topics)}: their producers choose partitions "
            "differently, or partitions were added. From now on this run folds the stage after a shuffle"
        )
    topic = topic or topics[0]
    return SharedKeyError(
        f"{where} two partitions of {topic}. From now on this "
        "run brings all records of a key together before it folds them. If partitions were added, nothing else is "
        "needed. If the topic is not partitioned by the stage's key, rebuild the flow with co_partitioned=False "
        "(`headwater replay --redefine`); this generation would fold copies a second time",
        topic,
    )


@dataclass(slots=True)
class TaskReport:
    """Report of one task.

    Attributes:
        counts: Records, verdicts and the rest.
        seen: Topic ids that it saw for the first time, by topic.
        failed: Records that a stage could not fold, or that a step before it rejected.
        changes: Changes to the ledger.
        seconds: CPU seconds per phase.
        marks: Marks that saves returned: (stage, marks).
        dropped: For the journal, the records that were dropped.
    """

    counts: Report = field(default_factory=Report)
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[RecordAtStage, Exclusion] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    seconds: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[str, Marks]] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)

    def add(self, other: "TaskReport") -> None:
        """Add another task's report."""
        self.counts.add(other.counts)
        self.seen = merge_incarnations(self.seen, other.seen)
        for place, cause in other.failed.items():
            # If a step rejects one item, no key of the record needs to be known.
            if (known := self.failed.get(place)) is None or known.hole:
                self.failed[place] = cause
        self.changes.add(other.changes)
        self.marks += other.marks
        self.dropped.add(other.dropped)
        for phase, spent in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


def newly_failed(report: TaskReport, excluded: Mapping[RecordAtStage, Exclusion]) -> dict[RecordAtStage, Exclusion]:
    """Records of a report that are not excluded yet, or were excluded with a hole and must leave none."""
    return {
        place: cause
        for place, cause in report.failed.items()
        if place not in excluded or (excluded[place].hole and not cause.hole)
    }


def dumps(what: object) -> bytes:
    """Serialize for another process of this job. Never use it for data from outside the job."""
    return pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)


def loads(payload: bytes) -> Any:
    """Read what a process of this job wrote."""
    return pickle.loads(payload)  # noqa: S301 - written by our own tasks a moment ago
