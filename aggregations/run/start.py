"""Checks a flow's progress in the stores, the broker and the consumer group before a run resumes. Pure.

The manifests are the source of truth for progress; the group's offsets are shown but never used. Anything that makes
it unsafe to resume is a finding with the name of a risk: the run is refused unless that risk is accepted by name.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.run.growth import advance, describe
from persistence.compaction import COMPACTED_SOURCE
from persistence.findings import Finding
from persistence.growth import GROWN_UNDRAINED, undrained
from persistence.manifest import Growth, Manifest, ahead
from persistence.marks import Bucket, Mark
from persistence.protocol import Capabilities


class Risk(StrEnum):
    """A reason to refuse a run; `--accept NAME` accepts the risk."""

    LOST_RECORDS = "lost-records"
    """Retention deleted records that the flow has not folded: they stay missing."""
    BEYOND_END = "beyond-end"
    """The log ends before the flow's offset: the flow resumes at the log's end."""
    TOPIC_RECREATED = "topic-recreated"
    """The topic was deleted and created again: the new one is read from its beginning, into lanes of its own."""
    DOWNSTREAM_BEHIND = "downstream-behind"
    """A downstream store lost data that a replay does not restore: the data stays missing."""
    STORE_EMPTY = "store-empty"
    """A store contains nothing of the flow while another store does: the data of a downstream store stays missing, a
    store upstream of all others is filled again from the records that are still in the topic."""
    STAGE_ADDED = "stage-added"
    """A stage was added to a flow that has run before, or bound to another store: it misses what was folded before."""
    STORE_WENT_BACK = "store-went-back"
    """A part of a store lost acknowledged writes, but its manifest did not go back: the data stays missing."""
    NOT_DURABLE = "not-durable"
    """A store acknowledges writes before they are safe: a crash of its server may lose states but keep later writes."""
    COMPACTED_SOURCE = COMPACTED_SOURCE
    """The source topic is compacted: records that Kafka deletes before they are read stay missing."""
    GROWN_UNDRAINED = GROWN_UNDRAINED
    """Partitions were added before the topic was read to its end: published messages of a key may be out of order."""
    GROWTH_FULL = "growth-full"
    """More positions of a key arrived while the topic grew than a lane keeps: messages below its floor are dropped."""
    DEFINITION = "definition"
    """The states were made by another definition: they are continued as if both definitions meant the same."""


LOSSES: Final = frozenset({Risk.DOWNSTREAM_BEHIND, Risk.STORE_EMPTY, Risk.STAGE_ADDED, Risk.STORE_WENT_BACK})
"""Risks of a store without, or no longer with, data that other stores rely on."""

_EMPTY = Bucket()


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
    """

    partition: int
    start: int | None
    stores: Mapping[str, int | None]
    group: int | None
    low: int
    high: int

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
    """

    topic: str
    topic_id: str
    partitions: Sequence[PartitionPlan] = ()
    findings: Sequence[Finding] = field(default_factory=tuple)
    growth: Growth | None = None
    waiting: Collection[int] = ()

    @property
    def starts(self) -> dict[int, int]:
        """Offset that is read first, by partition, for the partitions that do not wait."""
        return {one.partition: one.first for one in self.partitions if one.partition not in self.waiting}

    def lines(self) -> list[str]:
        """The plan as text, one partition a line."""
        lines = [f"topic {self.topic} (id {self.topic_id or 'unknown'})"]
        for one in self.partitions:
            start = "its beginning" if one.start is None else f"{one.start}"
            start += ", once the others are drained" if one.partition in self.waiting else ""
            known = ", ".join(f"{name} {'-' if at is None else at}" for name, at in one.stores.items())
            group = "-" if one.group is None else one.group
            lines.append(
                f"  partition {one.partition}: starts at {start}; manifests: {known or '-'}; group {group}; "
                f"log {one.low} to {one.high}; {one.lag} to read"
            )
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
    """

    topic: str
    topic_id: str
    marks: Mapping[int, tuple[int, int]]
    group: Mapping[int, int] = field(default_factory=dict)
    clock_ms: int = 0


def check_stores(
    flow: str,
    manifests: Sequence[tuple[str, Manifest | None]],
    definitions: Mapping[str, str],
    homes: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """Compare the manifests of a flow's stores with each other and with the flow's definition.

    Args:
        flow: Name of the flow.
        manifests: (first stage of the store, its manifest), upstream first.
        definitions: Definition hash by stage, in the flow's order.
        homes: Name of the store by stage, as in `manifests`.
    """
    findings: list[Finding] = []
    if lost := _empty(manifests):
        findings.append(
            _unsafe(
                Risk.STORE_EMPTY,
                f"flow {flow}: the store of stage {', '.join(lost)} has nothing of the flow, and another store has: it was "
                "emptied, or its URL is another one's",
                "Correct the URL, restore it, or rebuild into a new generation (--generation)",
            )
        )
    for up, down, behind in _behind(manifests):
        places = ", ".join(f"{topic}:{partition}" for topic, partition in behind[:5])
        findings.append(
            _unsafe(
                Risk.DOWNSTREAM_BEHIND,
                f"flow {flow}: the store of stage {down} is behind the one of stage {up} at {places}: it lost data, and "
                f"stage {up} would drop the replay that could refill it",
                "Restore it, or rebuild into a new generation (--generation)",
            )
        )
    findings += _added(flow, manifests, definitions, homes)
    findings += _changed(flow, manifests, definitions)
    return findings


def _added(
    flow: str,
    manifests: Sequence[tuple[str, Manifest | None]],
    definitions: Mapping[str, str],
    homes: Mapping[str, str],
) -> list[Finding]:
    """Stages that the manifests, or the manifest of their own store, do not name: a replay would not fill them.

    The stages upstream hold what was folded and would drop it. Even if no batch is finished, one may be half written.
    """
    added = _new(manifests, definitions, homes)
    return [
        _unsafe(
            Risk.STAGE_ADDED,
            f"flow {flow} has begun without stage {stage} in its store: it was added, renamed or bound to another store",
            "Rebuild into a new generation (--generation), or bind it to its store (--store)",
        )
        for stage in definitions
        if stage in added
    ]


def _new(manifests: Sequence[tuple[str, Manifest | None]], stages: Iterable[str], homes: Mapping[str, str]) -> set[str]:
    return {
        stage
        for name, manifest in manifests
        if manifest and manifest.definitions
        for stage in stages
        if stage not in manifest.definitions
        or (manifest.kept and homes.get(stage) == name and stage not in manifest.kept)
    }


def _changed(
    flow: str, manifests: Sequence[tuple[str, Manifest | None]], definitions: Mapping[str, str]
) -> list[Finding]:
    """Findings for stages whose states were made by another definition, or in another order of stages."""
    remedy = (
        "Rebuild into a new generation (--generation), or accept it if old and new states mean the same and source, "
        "siblings and co_partitioned are the same: with others, copies are folded again"
    )
    known = [manifest.definitions for _, manifest in manifests if manifest]
    stored = {stage: made for one in known for stage, made in one.items()}
    findings = [
        _unsafe(
            Risk.DEFINITION,
            f"flow {flow}: stage {stage} has definition {definition}, the flow last ran with {stored[stage]}",
            remedy,
        )
        for stage, definition in definitions.items()
        if stored.get(stage, definition) != definition
    ]
    if any(
        [one for one in before if one in definitions] != [one for one in definitions if one in before]
        for before in known
    ):
        # The downstream states of a half-written batch exist. If their stage moved upstream, it would drop the replay.
        findings.append(_unsafe(Risk.DEFINITION, f"flow {flow}: its stages were in a different order before", remedy))
    return findings


def _empty(manifests: Sequence[tuple[str, Manifest | None]]) -> list[str]:
    """Stores that have lost their manifest.

    First of all, every store gets an empty manifest, the most downstream store first. So a store without a manifest has
    lost it if a store upstream of it has one, or if the manifest of a store downstream of it has begun.
    """
    return [
        name
        for i, (name, manifest) in enumerate(manifests)
        if manifest is None
        and (any(above for _, above in manifests[:i]) or any(below and below.begun for _, below in manifests[i + 1 :]))
    ]


def _behind(manifests: Sequence[tuple[str, Manifest | None]]) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """(store, the store downstream of it that is behind, the partitions where it is behind)."""
    return [
        (up, down, places)
        for (up, upstream), (down, downstream) in pairwise(manifests)
        if downstream is not None and (places := ahead(upstream, downstream))
    ]


def check_marks(
    flow: str,
    manifests: Sequence[tuple[str, Manifest | None]],
    buckets: Mapping[str, Mapping[str, Bucket]],
    homes: Mapping[str, str],
    since: int,
) -> list[Finding]:
    """Compare the marks that buckets acknowledged, as stored in manifests and upstream buckets, with the current marks.

    Only a bucket that is behind has lost data; one that is ahead was written by a batch whose manifest was not written.
    A manifest stores marks of the stages in its store and downstream, a bucket those of the stages downstream: if an
    upstream part goes back together with its manifest, the replay fills it again. Stores that `check_stores` reports as
    having lost data are not checked, nor are new stages.

    Args:
        flow: Name of the flow.
        manifests: (first stage of the store, its manifest), upstream first.
        buckets: Buckets by stage, for stages whose stores keep marks.
        homes: First stage of the store of every stage.
        since: First epoch whose marks count.
    """
    lacking = {*_empty(manifests), *(down for _, down, _ in _behind(manifests))}
    stages = {one for one in buckets if homes[one] not in lacking} - _new(manifests, buckets, homes)
    sources = [one.marks for _, one in manifests if one and one.epoch >= since]
    sources += [one.downstream for held in buckets.values() for one in held.values() if one.epoch >= since]
    lost: dict[tuple[str, str], str] = {}
    for acknowledged in sources:
        for stage in acknowledged.keys() & stages:
            for bucket, text in acknowledged[stage].items():
                mark, wanted = buckets[stage].get(bucket, _EMPTY).mark, Mark.parse(text)
                if not mark.holds(wanted):
                    lost[stage, bucket] = (
                        f"stage {stage}, bucket {bucket}: save {wanted.short} was acknowledged, the last is {mark.short}"
                    )
    if not lost:
        return []
    places = "; ".join(lost[place] for place in sorted(lost)[:5])
    return [
        _unsafe(
            Risk.STORE_WENT_BACK,
            f"flow {flow}: {len(lost)} buckets of its stores lost states that they had acknowledged ({places}), and a "
            "replay would not bring them back",
            "Restore all stores of the flow to one moment, or rebuild into a new generation",
        )
    ]


def plan(
    flow: str,
    start: Manifest | None,
    manifests: Sequence[tuple[str, Manifest | None]],
    broker: Broker,
    *,
    publishes: bool = False,
) -> Plan:
    """Decide where each partition starts.

    Args:
        flow: Name of the flow.
        start: Common manifest of all stores; None for a flow that never ran.
        manifests: (first stage of the store, its manifest), upstream first.
        broker: The broker's facts about the topic.
        publishes: The flow publishes elements, which must keep the order of each key.
    """
    known_id = start.topic_ids.get(broker.topic) if start else None
    findings, progress = [], start.positions.get(broker.topic, {}) if start else {}
    if known_id and broker.topic_id and known_id != broker.topic_id:
        findings.append(recreated(flow, broker.topic, known_id, broker.topic_id))
        start, progress = None, {}
    partitions = []
    for partition, (low, high) in sorted(broker.marks.items()):
        offset = progress[partition].next_offset if partition in progress else None
        place = f"{broker.topic}:{partition}"
        if offset is not None and offset < low:
            findings.append(
                _unsafe(
                    Risk.LOST_RECORDS,
                    f"flow {flow}: {place} is folded up to {offset} and its log begins at {low}: {low - offset} offsets were "
                    "deleted unread",
                    "Restore them from a copy of the topic, or accept the loss",
                )
            )
            offset = low
        if offset is not None and offset > high:
            findings.append(
                _unsafe(
                    Risk.BEYOND_END,
                    f"flow {flow}: {place} is folded up to {offset} and its log ends at {high}: the broker lost records, or "
                    "this is another cluster",
                    "Correct the address, or accept to continue at the end",
                )
            )
            offset = high
        stores = {
            name: manifest.positions[broker.topic][partition].next_offset
            if manifest and partition in manifest.positions.get(broker.topic, {})
            else None
            for name, manifest in manifests
        }
        partitions.append(PartitionPlan(partition, offset, stores, broker.group.get(partition), low, high))
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
    return Plan(broker.topic, broker.topic_id, partitions, findings, growth, sorted(waiting))


def grown(flow: str, topic: str, growth: Growth) -> Finding:
    """The order of what is published cannot be kept."""
    return _unsafe(
        Risk.GROWN_UNDRAINED,
        f"flow {flow}: {undrained(topic, growth.partitions_before, growth.partitions_now)}",
        "Accept it if readers of what the flow publishes need no order, or if their history= is larger than the unread "
        "records of a key",
    )


def recreated(flow: str, topic: str, known: str, now: str) -> Finding:
    """The topic that the flow reads was replaced by another topic of the same name."""
    return _unsafe(
        Risk.TOPIC_RECREATED,
        f"flow {flow}: topic {topic} has id {now}, the flow read {known}: it was created again",
        "If that was meant, accept it: the new topic is folded from its beginning",
    )


def check_durability(stores: Sequence[tuple[str, Capabilities]]) -> list[Finding]:
    """A stage counts as persisted only if it is at least as durable as what is written next.

    That is the stage upstream of it, or the manifest. Within one store, ordered durability is enough: after a crash
    the store contains an earlier consistent cut of all its writes.

    Args:
        stores: (first stage of the store, what it can do), upstream first.
    """
    findings = [
        _unsafe(
            Risk.NOT_DURABLE,
            f"the store of stage {down} may lose what it acknowledged, and the one of stage {up} is written right after it",
            "Let it sync before it acknowledges (appendfsync always, commitlog_sync group), or keep both stages in it",
        )
        for (up, _), (down, capabilities) in pairwise(stores)
        if not capabilities.durable
    ]
    first, capabilities = stores[0]
    if not capabilities.durable and not capabilities.ordered_durability:
        findings.append(
            _unsafe(
                Risk.NOT_DURABLE,
                f"the store of stage {first} may lose states that it acknowledged and keep what was written after them",
                "Let it sync before it acknowledges (appendfsync always, commitlog_sync group, synchronous full)",
            )
        )
    return findings


def _unsafe(risk: Risk, what: str, remedy: str) -> Finding:
    return Finding(risk.value, what, remedy, unsafe=True)


def refuse(findings: Sequence[Finding], accept: Collection[str]) -> None:
    """Refuse a run unless the risk of every unsafe finding is accepted.

    Raises:
        RunRefusedError: A risk is not accepted; the text lists every such finding and the flag that accepts it.
    """
    left = [finding for finding in findings if finding.unsafe and finding.risk not in accept]
    if left:
        risks = " ".join(f"--accept {risk}" for risk in dict.fromkeys(finding.risk for finding in left))
        changed = all(finding.risk == Risk.DEFINITION for finding in left)
        error = DefinitionChangedError if changed else RunRefusedError
        raise error(
            "; ".join(f"{one.what.removesuffix('.')}. {one.remedy.removesuffix('.')}" for one in left) + f" ({risks})"
        )
