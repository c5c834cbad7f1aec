"""Combines the manifests of a flow's stores. Pure."""

from collections.abc import Mapping, Sequence

from aggregations.per_message.ledger import Ledger, merged
from aggregations.run.growth import merge
from aggregations.run.incarnations import merge_incarnations
from persistence.manifest import Manifest, Progress, branched, minimum, progress_of, unread
from persistence.protocol import FlowRef


def common(manifests: Sequence[Manifest | None], ref: FlowRef, *, finishes: bool = False) -> Manifest | None:
    """The common manifest of all stores: the lowest offset of each partition, so that no store misses a record.

    A store that was restored from an older copy, or did not receive its last manifest, is
    filled again; the other stores drop what they already hold.

    Args:
        manifests: One per store; None for a store without a manifest.
        ref: The flow.
        finishes: The flow finishes a batch that was begun before it reads on (`aggregations.run.turns`).
    """
    found = [manifest for manifest in manifests if manifest is not None]
    if not found:
        return None
    # Ids are only ever appended: all lists of a topic have the same beginning, and stay in order of age when merged.
    incarnations = merge_incarnations(*(manifest.incarnations for manifest in found))
    topic_ids = {topic: _oldest(topic, found, incarnations) for one in found for topic in one.topic_ids}
    positions = {
        topic: {
            partition: _progress(found, topic, partition, offset, topic_ids) for partition, offset in partitions.items()
        }
        for topic, partitions in minimum(manifests).items()
    }
    growing = {
        topic: merge([one.growth[topic] for one in found if topic in one.growth and _is_of(one, topic, topic_ids)])
        for topic in positions
    }
    return Manifest(
        epoch=max(manifest.epoch for manifest in found),
        batch=max(manifest.batch for manifest in found),
        positions=positions,
        topic_ids=topic_ids,
        incarnations=incarnations,
        **merged(Ledger.of(ref.flow, ref.generation, manifest) for manifest in found).fields(),
        growth={topic: growth for topic, growth in growing.items() if growth is not None},
        starting_offsets={
            topic: offsets
            for one in found
            for topic, offsets in one.starting_offsets.items()
            if _is_of(one, topic, topic_ids)
        },
        closing_us=_closing(found),
        published=_published(found),
        unfinished=_unfinished(found, positions, topic_ids) if finishes else {},
    )


def _closing(manifests: Sequence[Manifest]) -> int | None:
    """The closing watermark that every store's manifest has reached: that of the lowest offsets, or an earlier one."""
    reached = [one.closing_us for one in manifests if one.closing_us is not None]
    return min(reached) if len(reached) == len(manifests) else None


def _published(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Up to which due time closed windows are published, by stage: as the store that keeps the stage notes it."""
    return {stage: one.published[stage] for one in manifests for stage in one.kept if stage in one.published}


def _unfinished(
    manifests: Sequence[Manifest], positions: Mapping[str, Mapping[int, Progress]], topic_ids: Mapping[str, str]
) -> dict[str, dict[int, int]]:
    """The ends of the unfinished batch: as noted, or as the manifests have them that were written already."""
    ends: dict[str, dict[int, int]] = {}
    for one in manifests:
        read = {topic: {at: to.next_offset for at, to in parts.items()} for topic, parts in one.positions.items()}
        for topic, its in (*one.unfinished.items(), *read.items()):
            if _is_of(one, topic, topic_ids):
                mine = ends.setdefault(topic, {})
                mine |= {partition: max(end, mine.get(partition, 0)) for partition, end in its.items()}
    return unread(ends, positions)


def _progress(
    manifests: Sequence[Manifest], topic: str, partition: int, offset: int, topic_ids: Mapping[str, str]
) -> Progress:
    """Progress up to an offset: the event time of a manifest that was written there, and what any says of the log."""
    places = progress_of(manifests, topic, partition, topic_ids.get(topic, ""))
    time_us = next((place.time_us for place in places if place.next_offset == offset), None)
    epochs = (place.leader_epoch for place in places if place.leader_epoch is not None)
    return Progress(
        offset, time_us, max(epochs, default=None), branched(one for place in places for one in place.branches)
    )


def _is_of(manifest: Manifest, topic: str, topic_ids: Mapping[str, str]) -> bool:
    return manifest.topic_ids.get(topic) == topic_ids.get(topic)


def _oldest(topic: str, manifests: Sequence[Manifest], incarnations: Mapping[str, tuple[str, ...]]) -> str:
    """The id that the lowest offsets of a topic belong to: `minimum` takes the oldest incarnation's."""
    order = {topic_id: age for age, topic_id in enumerate(incarnations.get(topic, ()))}
    ids = (manifest.topic_ids[topic] for manifest in manifests if topic in manifest.topic_ids)
    return min(ids, key=lambda topic_id: order.get(topic_id, -1))
