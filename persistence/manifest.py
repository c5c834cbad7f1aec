"""The manifest: how far a flow's input is folded into one store, and how manifests of several stores are combined.

If stages are in different stores, every store has a manifest. Manifests are written downstream-first,
so at any moment a downstream manifest is at or ahead of the manifests upstream of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from envelope import TopicPartition
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.seal import DamagedError, seal, unseal
from persistence.times import Committed

SCHEMA = 1


class Progress(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Progress of one partition.

    Attributes:
        next_offset: The offset to read next: every record below it is folded, none at or above it.
        time_us: The latest event time of the records below it, in microseconds since 1970; None if there is none, or if
            the flow has no windows.
        leader_epoch: Epoch of the partition's leader as of which the log is read; None if the broker gave none.
        branches: (first offset, number), ordered: from this offset on the log was written anew, over records that were
            lost (KIP-320). Numbers ascend with time. They are at least the leader epoch that was noticed.
    """

    next_offset: int
    time_us: int | None = None
    leader_epoch: int | None = None
    branches: tuple[tuple[int, int], ...] = ()

    def branch(self, offset: int) -> int:
        """Number of the branch of the log that an offset belongs to; 0 for the log as it was first read."""
        return max((number for first, number in self.branches if first <= offset), default=0)


class Growth(msgspec.Struct, frozen=True):
    """Partitions were added to a consumed topic, and the records from before that are not all read yet.

    Attributes:
        partitions_before: Number of partitions before the growth.
        partitions_now: Number of partitions now.
        seen_at_ms: When `partitions_now` was first seen, in milliseconds since 1970.
        until: Next offset by partition up to which the topic has to be read; None until producers have had the time
            to learn of the new partitions.
    """

    partitions_before: int
    partitions_now: int
    seen_at_ms: int
    until: Mapping[int, int] | None = None


class Rebuilt(msgspec.Struct, frozen=True):
    """A note that a generation is a rebuild.

    Attributes:
        replaces: The generation that was live when the rebuild began.
        at_ms: When it began, in milliseconds since 1970.
        by: Who began it: user and host.
        why: The reason that was given.
        continues: Generations whose states it began with, from a snapshot: their dead letters fill its holes as well.
    """

    replaces: int
    at_ms: int
    by: str
    why: str
    continues: tuple[int, ...] = ()


class GivenUp(msgspec.Struct, frozen=True, array_like=True):
    """The batches of a generation that a restore gave up: those after its snapshot, of the epochs before its own.

    Attributes:
        epoch: Epoch of the snapshot.
        batch: Batch of the snapshot.
        until: Epoch of the restore.
    """

    epoch: int
    batch: int
    until: int

    def has(self, epoch: int, batch: int) -> bool:
        """Whether a batch is one of them."""
        return (self.epoch, self.batch) < (epoch, batch) and epoch < self.until


class Manifest(msgspec.Struct, frozen=True):
    """How far the input of a flow is folded into one store.

    Attributes:
        epoch: Epoch of the run that wrote it.
        batch: Number of the batch within that run.
        positions: Progress per consumed topic and partition.
        topic_ids: Current topic id per consumed topic; absent when the broker gives none.
        incarnations: Per topic every topic id that the broker reported as current when the topic was
            consumed or named as a root, in the order in which they were first seen.
        definitions: Definition hash of every stage of the flow, in its order.
        earlier: Earlier definition hashes by stage whose states were accepted and may still be there.
        kept: The stages that this store keeps; empty in a manifest of a version that did not write them.
        dead: Positions of dead letters that left no hole, per stage and group (`aggregations.per_message.ledger`).
        forgotten: Number of further such dead letters per stage, beyond the limit of the list.
        seen: Highest position read per route; None when it is not known for every route.
        clean: The run that wrote it ended cleanly: no batch was begun after it.
        marks: Marks that buckets had acknowledged, by stage and bucket: of the stages in this store and of those
            downstream of them (`persistence.marks`).
        since: Epoch of the last run that accepted the loss of data in a store. Marks acknowledged by earlier runs are
            no longer checked.
        growth: The current growth per consumed topic.
        starting_offsets: Offset per consumed topic and partition that the flow was given to begin at; a partition that it
            does not name began where its log began.
        times: When batches were committed (`persistence.times`).
        closing_us: The event time that every partition has reached, in microseconds since 1970
            (`aggregations.run.closing`); None if there is none, or if the flow has no event times.
        published: Due time, in seconds since 1970, up to which the windows of a stage that publishes them when they close are
            published (`aggregations.run.final`), by stage; of the stages that this store keeps it counts.
        unfinished: Next offset per topic and partition after a batch that was begun and is not committed; only of a flow with
            tables, which a run reads again only after these records, and with a filter over all partitions, whose batch is
            repeated as it was, and if batches are `noted`.
        noted: Every batch was noted in `unfinished` before it was folded: a run without access to the broker then knows
            which records an earlier one may have folded.
        unasked: A run without access to the broker has folded into this generation. Topics that `topic_ids` and
            `incarnations` do not name have no id from then on, also for runs that can ask.
        restoring: Checksum of the snapshot that is being restored into the store; empty when none is.
        rebuilt: Who rebuilt this generation, when and why; None if `headwater replay` did not make it.
        given_up: Batches that a restore gave up, one entry for each restore.
        mending: States are being mended (`aggregations.run.mend`): some may be from before, others from after.
        schema: Version of this layout.
    """

    epoch: int
    batch: int
    positions: Mapping[str, Mapping[int, Progress]] = {}
    topic_ids: Mapping[str, str] = {}
    incarnations: Mapping[str, tuple[str, ...]] = {}
    definitions: Mapping[str, str] = {}
    kept: tuple[str, ...] = ()
    dead: Mapping[str, Mapping[str, tuple[tuple[int | str, ...], ...]]] = {}
    forgotten: Mapping[str, int] = {}
    seen: Mapping[str, tuple[int | str, ...]] | None = None
    clean: bool = False
    marks: Mapping[str, Mapping[str, str]] = {}
    since: int = 0
    growth: Mapping[str, Growth] = {}
    earlier: Mapping[str, tuple[str, ...]] = {}
    starting_offsets: Mapping[str, Mapping[int, int]] = {}
    times: tuple[Committed, ...] = ()
    closing_us: int | None = None
    published: Mapping[str, int] = {}
    unfinished: Mapping[str, Mapping[int, int]] = {}
    noted: bool = False
    unasked: bool = False
    restoring: str = ""
    rebuilt: Rebuilt | None = None
    given_up: tuple[GivenUp, ...] = ()
    mending: bool = False
    schema: int = SCHEMA

    @property
    def begun(self) -> bool:
        """Whether it records any progress, and not only that a run was about to begin."""
        return bool(self.positions or self.batch)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialize a manifest to one line of JSON that ends in its checksum."""
    return seal(_encoder.encode(manifest))


def decode_manifest(value: bytes, flow: FlowRef) -> Manifest:
    """Parse what `encode_manifest` wrote.

    Raises:
        Corrupt: It is damaged, is not a manifest, or was written by a newer version.
    """
    try:
        manifest = _decoder.decode(unseal(value))
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the manifest cannot be read: {error}", ref=flow) from error
    if manifest.schema > SCHEMA:
        raise Corrupt(
            f"the manifest has schema {manifest.schema}; this code reads {SCHEMA}", "Upgrade headwater", ref=flow
        )
    return manifest


def with_progress_of(manifest: Manifest, former: Manifest, topic: str) -> Manifest:
    """A manifest with the progress of a topic as in a former one."""

    def put(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
        others = {name: one for name, one in now.items() if name != topic}
        return {**others, topic: then[topic]} if topic in then else others

    return msgspec.structs.replace(
        manifest,
        positions=put(manifest.positions, former.positions),
        growth=put(manifest.growth, former.growth),
        starting_offsets=put(manifest.starting_offsets, former.starting_offsets),
    )


def unread(
    ends: Mapping[str, Mapping[int, int]], positions: Mapping[str, Mapping[int, Progress]]
) -> dict[str, dict[int, int]]:
    """The ends that are above the positions, per topic and partition."""
    return {
        topic: above
        for topic, mine in ends.items()
        if (above := {one: end for one, end in mine.items() if end > _next(positions, topic, one)})
    }


def _next(positions: Mapping[str, Mapping[int, Progress]], topic: str, partition: int) -> int:
    progress = positions.get(topic, {}).get(partition)
    return 0 if progress is None else progress.next_offset


def minimum(manifests: Sequence[Manifest | None]) -> Mapping[str, Mapping[int, int]]:
    """Where to start so that no store misses a record: per topic and partition the lowest next offset.

    A partition that any of the manifests does not name is left out: it starts at its beginning.
    Manifests of different incarnations of a topic are compared by the age of the incarnation first.

    Args:
        manifests: One per store; None for a store without a manifest.
    """
    known = [manifest for manifest in manifests if manifest is not None]
    if not known or len(known) < len(manifests):
        return {}
    start: dict[str, dict[int, int]] = {}
    for topic, partitions in known[0].positions.items():
        for partition in partitions:
            places = [_place(manifest, topic, partition, known) for manifest in known]
            if all(place is not None for place in places):
                start.setdefault(topic, {})[partition] = min(place for place in places if place)[1]
    return start


def ahead(upstream: Manifest | None, downstream: Manifest | None) -> list[TopicPartition]:
    """Partitions in which the upstream manifest is ahead of the downstream manifest.

    Manifests are written downstream-first, so a crash cannot cause this: the downstream
    store has lost data. A replay would not refill it, because the upstream states hold those
    records and would drop them. The flow is refused until it is rebuilt.

    Returns:
        These partitions, sorted; empty when all is well.
    """
    if upstream is None:
        return []
    known = [upstream] if downstream is None else [downstream, upstream]
    found = []
    for topic, partitions in upstream.positions.items():
        if downstream is not None and _age(downstream, topic, known) > _age(upstream, topic, known):
            # The topic was created again, and so far only the downstream manifest records it.
            continue
        for partition in partitions:
            above = _place(upstream, topic, partition, known)
            below = None if downstream is None else _place(downstream, topic, partition, known)
            if above is not None and above[1] > 0 and (below is None or above > below):
                found.append(TopicPartition(topic, partition))
    return sorted(found)


def branched(branches: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Branches of one log, without those whose records later ones replaced."""
    kept: list[tuple[int, int]] = []
    for first, number in sorted(set(branches), key=lambda one: one[1]):
        kept = [*(one for one in kept if one[0] < first), (first, number)]
    return tuple(kept)


def written_anew(branches: Sequence[tuple[int, int]], first: int, epoch: int | None) -> tuple[tuple[int, int], ...]:
    """Branches of one log with a new one from an offset on, which was noticed in a leader epoch."""
    return branched((*branches, (first, max(epoch or 0, 1, *(1 + number for _, number in branches)))))


def reached(progress: Progress, others: Iterable[Progress]) -> int:
    """Next offset of one store in the log as it is now, which may have lost records since: another store notes that."""
    noted = max((number for _, number in progress.branches), default=0)
    lost = (first for one in others for first, number in one.branches if number > noted)
    return min((progress.next_offset, *lost))


def progress_of(manifests: Iterable[Manifest], topic: str, partition: int, topic_id: str) -> list[Progress]:
    """Progress of a partition in each manifest that has read this incarnation of the topic."""
    mine = (one.positions.get(topic, {}) for one in manifests if one.topic_ids.get(topic, "") == topic_id)
    return [found[partition] for found in mine if partition in found]


def _place(manifest: Manifest, topic: str, partition: int, known: Sequence[Manifest]) -> tuple[int, int] | None:
    """(age of the topic's incarnation, next offset), comparable over the manifests in `known`."""
    progress = manifest.positions.get(topic, {}).get(partition)
    if progress is None:
        return None
    others = progress_of(known, topic, partition, manifest.topic_ids.get(topic, ""))
    return _age(manifest, topic, known), reached(progress, others)


def _age(manifest: Manifest, topic: str, known: Sequence[Manifest]) -> int:
    """Number of a manifest's incarnation of the topic, in the order in which they were first seen; -1 when unknown."""
    # Ids are only ever appended to `incarnations`, so the longest list is the newest and contains all of them.
    order = max((other.incarnations.get(topic, ()) for other in known), key=len)
    topic_id = manifest.topic_ids.get(topic, "")
    return order.index(topic_id) if topic_id in order else -1
