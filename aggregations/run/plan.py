"""Where a run starts: compares the manifests with the broker and the consumer group. Pure.

The manifests are the source of truth for progress; the group's offsets are shown but never used. Anything that makes
it unsafe to resume is a finding with the name of a risk.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from aggregations.run.growth import advance, describe
from aggregations.run.risks import Risk, unsafe
from persistence.findings import Finding
from persistence.growth import undrained
from persistence.manifest import Growth, Manifest, Progress, progress_of, reached, written_anew


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """Where one partition starts, and the facts used to decide it.

    Attributes:
        partition: Partition.
        start: Offset to start at; None for the partition's beginning.
        stores: Next offset by store; None when the manifest does not name the partition.
        group: Committed offset of the consumer group; None when there is none.
        low: First offset in the log.
        high: End of the log.
        skipped: Number of offsets in the log that are not read because the flow was given a later start.
        leader_epoch: Epoch of its leader; None if the broker gives none.
        branches: Where its log was written anew; see `persistence.manifest.Progress`.
    """

    partition: int
    start: int | None
    stores: Mapping[str, int | None]
    group: int | None
    low: int
    high: int
    skipped: int = 0
    leader_epoch: int | None = None
    branches: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> int:
        """Offset that is read first."""
        return self.low if self.start is None else self.start

    @property
    def lag(self) -> int:
        """Number of offsets to read."""
        return max(self.high - self.first, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The start of a run.

    Attributes:
        topic: Topic that is read.
        topic_id: Its current id.
        partitions: Plan of each partition of the topic.
        findings: Reasons why the run is unsafe.
        growth: The current growth of the topic; None when there is none.
        waiting: Partitions that are read after the others are drained.
        starting_offsets: Offset by partition that the flow was given to begin at; None when it begins at the beginning of
            the log, or has begun before.
        start_unused: A start position was given, but the flow has begun.
    """

    topic: str
    topic_id: str
    partitions: Sequence[PartitionPlan] = ()
    findings: Sequence[Finding] = field(default_factory=tuple)
    growth: Growth | None = None
    waiting: Collection[int] = ()
    starting_offsets: Mapping[int, int] | None = None
    start_unused: bool = False

    @property
    def starts(self) -> dict[int, int]:
        """Offset that is read first, by partition, for the partitions that do not wait."""
        return {one.partition: one.first for one in self.partitions if one.partition not in self.waiting}

    @property
    def logs(self) -> dict[int, Progress]:
        """What is known of the log of each partition, with the offset that is read first."""
        return {one.partition: Progress(one.first, None, one.leader_epoch, one.branches) for one in self.partitions}

    def lines(self) -> list[str]:
        """The plan as text, one partition a line."""
        lines = [f"topic {self.topic} (id {self.topic_id or 'unknown'})"]
        for one in self.partitions:
            start = "its beginning" if one.start is None else f"{one.start}"
            start += f" as given, skipping {one.skipped} offsets" if one.skipped else ""
            start += ", once the others are drained" if one.partition in self.waiting else ""
            known = ", ".join(f"{name} {'-' if at is None else at}" for name, at in one.stores.items())
            group = "-" if one.group is None else one.group
            lines.append(
                f"  partition {one.partition}: starts at {start}; manifests: {known or '-'}; group {group}; "
                f"log {one.low} to {one.high}; {one.lag} to read"
            )
        if self.start_unused:
            lines.append("  the start position is not used: the flow has begun. A new one needs a new --generation")
        if self.growth is not None:
            lines.append(f"  {describe(self.topic, self.growth)}")
        return lines


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker's facts about the source topic.

    Attributes:
        topic: Its name.
        topic_id: Its current id; empty when the broker gives none.
        marks: First and end offset by partition.
        group: Committed offset by partition.
        clock_ms: Time of the query, in milliseconds since 1970.
        leader_epochs: Epoch of the leader by partition, as far as the broker gives it.
        epoch_ends: By partition whose leader epoch has changed since it was noted: end of the records of the noted epoch
            and of earlier ones (KIP-320), -1 if the leader knows none of them. Later records were written since.
    """

    topic: str
    topic_id: str
    marks: Mapping[int, tuple[int, int]]
    group: Mapping[int, int] = field(default_factory=dict)
    clock_ms: int = 0
    leader_epochs: Mapping[int, int] = field(default_factory=dict)
    epoch_ends: Mapping[int, int] = field(default_factory=dict)


def plan(
    flow: str,
    start: Manifest | None,
    manifests: Sequence[tuple[str, Manifest | None]],
    broker: Broker,
    *,
    publishes: bool = False,
    crashed: bool = False,
    starting_offsets: Callable[[], Mapping[int, int]] | None = None,
    branches: Mapping[int, tuple[tuple[int, int], ...]] = {},
) -> Plan:
    """Decide where each partition starts.

    Args:
        flow: Name of the flow.
        start: Common manifest of all stores; None for a flow that never ran.
        manifests: (first stage of the store, its manifest), upstream first.
        broker: The broker's facts about the topic.
        publishes: The flow publishes elements, which must keep the order of each key.
        crashed: An earlier run did not end cleanly: it may have folded records beyond the manifests.
        starting_offsets: Returns the offset by partition to begin at; called if the topic was never read. None for the beginning of
            the log.
        branches: By partition where its log was written anew, as another generation knows it: its records have the same
            names in a generation that begins.
    """
    known_id = start.topic_ids.get(broker.topic) if start else None
    findings, progress = [], start.positions.get(broker.topic, {}) if start else {}
    if known_id and broker.topic_id and known_id != broker.topic_id:
        findings.append(recreated(flow, broker.topic, known_id, broker.topic_id))
        start, progress = None, {}
    begins = starting_offsets() if starting_offsets is not None and not progress and not findings else None
    partitions = []
    for partition, (low, high) in sorted(broker.marks.items()):
        offset = progress[partition].next_offset if partition in progress else None
        skipped = 0
        if begins is not None:
            offset, skipped = begins[partition], begins[partition] - low
        place = f"{broker.topic}:{partition}"
        log = progress.get(partition, Progress(0, branches=branches.get(partition, ())))
        if offset is not None:
            known = progress_of((one for _, one in manifests if one), broker.topic, partition, broker.topic_id)
            furthest = max([offset, *(reached(one, known) for one in known)])
            log, lost = _as_it_is(
                flow, broker, partition, Progress(offset, None, log.leader_epoch, log.branches), furthest, crashed
            )
            findings += lost
            offset = log.next_offset
        read = 0 if offset is None and progress else offset
        if read is not None and read < low:
            state = f"is folded up to {read}"
            if offset is None:
                state = "was added since the flow began and was never read"
            findings.append(
                unsafe(
                    Risk.LOST_RECORDS,
                    f"flow {flow}: {place} {state}, but its log begins at {low}: {low - read} offsets were deleted unread",
                    "Restore them from a copy of the topic, or accept the loss",
                )
            )
            offset = None if offset is None else low
        stores = {
            name: manifest.positions[broker.topic][partition].next_offset
            if manifest and partition in manifest.positions.get(broker.topic, {})
            else None
            for name, manifest in manifests
        }
        group, epoch = broker.group.get(partition), broker.leader_epochs.get(partition)
        partitions.append(PartitionPlan(partition, offset, stores, group, low, high, skipped, epoch, log.branches))
    before = start.growth.get(broker.topic) if start else None
    growth = advance(
        before,
        known=len(progress),
        now=len(broker.marks),
        clock_ms=broker.clock_ms,
        max_age_ms=0,
        positions={},
        ends=None,
    )
    waiting: Collection[int] = ()
    if publishes and growth is not None and len(progress) < len(broker.marks):
        if before is not None and before.partitions_now == growth.partitions_now:
            waiting = broker.marks.keys() - progress.keys()  # as in the previous run
        elif any(one.lag for one in partitions):
            findings.append(grown(flow, broker.topic, growth))
    return Plan(
        broker.topic,
        broker.topic_id,
        partitions,
        findings,
        growth,
        sorted(waiting),
        begins,
        start_unused=starting_offsets is not None and begins is None,
    )


def _as_it_is(
    flow: str, broker: Broker, partition: int, log: Progress, furthest: int, crashed: bool
) -> tuple[Progress, list[Finding]]:
    """Progress in a log as it is now, with a branch where records were lost, and findings about those that were folded.

    Args:
        flow: Name of the flow.
        broker: The broker's facts about the topic.
        partition: The partition.
        log: Progress as it was noted.
        furthest: The highest next offset of any store.
        crashed: An earlier run may have folded records beyond that, which may be lost: those in their place are others.
    """
    low, high = broker.marks[partition]
    end, epoch = broker.epoch_ends.get(partition), broker.leader_epochs.get(partition)
    place, findings, first = f"{broker.topic}:{partition}", [], end if crashed else None
    if end is not None and end < furthest:
        first = end if end >= 0 else min(high, furthest)
        findings.append(cut(flow, place, furthest, first, epoch))
    elif furthest > high:
        findings.append(
            unsafe(
                Risk.BEYOND_END,
                f"flow {flow}: {place} is folded up to {furthest}, but its log ends at {high}: the broker lost records, or "
                "this is another cluster",
                "Correct the address, or accept the risk to resume at the end of the log",
            )
        )
        first = high
    branches = log.branches if first is None else written_anew(log.branches, first, epoch)
    here = max((number for at, number in branches if at <= low), default=0)  # records below `low` are not read again
    offset = min(log.next_offset, first) if findings and first is not None else log.next_offset
    return Progress(offset, None, epoch, tuple(one for one in branches if one[1] >= here)), findings


def cut(flow: str, place: str, furthest: int, end: int, epoch: int | None) -> Finding:
    """A log lost records that were read, and gives their offsets to new ones."""
    return unsafe(
        Risk.BEYOND_END,
        f"flow {flow}: {place} is read up to {furthest}, but the broker lost its records from offset {end} on, and writes other "
        f"records at these offsets, in leader epoch {epoch}",
        f"What was folded of the lost records stays in the states. Accept the risk to resume at offset {end} with the new records",
    )


def grown(flow: str, topic: str, growth: Growth) -> Finding:
    """The order of what is published cannot be kept."""
    return unsafe(
        Risk.GROWN_UNDRAINED,
        f"flow {flow}: {undrained(topic, growth.partitions_before, growth.partitions_now)}",
        "Accept the risk if consumers of the published messages need no order, or if their history= is larger than the unread "
        "records of a key",
    )


def recreated(flow: str, topic: str, known: str, now: str) -> Finding:
    """The topic that the flow reads was replaced by another topic of the same name."""
    return unsafe(
        Risk.TOPIC_RECREATED,
        f"flow {flow}: topic {topic} was created again: its id is {now}, the flow read id {known}",
        "If that is intended, accept the risk: the new topic is folded from its beginning",
    )
