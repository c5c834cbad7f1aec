"""Whether the stores of a flow fit each other and the flow: their manifests, marks and durability. Pure.

Anything that makes it unsafe to resume is a finding with the name of a risk.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from aggregations.definition.stages import continues
from aggregations.run.risks import Risk, unsafe
from envelope import TopicPartition
from persistence.findings import Finding
from persistence.manifest import Manifest, ahead
from persistence.marks import Bucket, Mark
from persistence.protocol import Capabilities

_EMPTY = Bucket()


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
            unsafe(
                Risk.STORE_EMPTY,
                f"flow {flow}: the store of stage {', '.join(lost)} contains nothing of the flow although another store does: "
                "it was emptied, or its URL is that of another store",
                "Correct the URL, restore the store, or rebuild into a new generation (--generation)",
            )
        )
    for up, down, behind in _behind(manifests):
        places = ", ".join(f"{topic}:{partition}" for topic, partition in behind[:5])
        findings.append(
            unsafe(
                Risk.DOWNSTREAM_BEHIND,
                f"flow {flow}: the store of stage {down} is behind that of stage {up} at {places}: it lost data, and a "
                f"replay would not restore the data because stage {up} would drop the records as duplicates",
                "Restore the store, or rebuild the flow (`headwater replay`)",
            )
        )
    findings += _added(flow, manifests, definitions, homes)
    findings += _changed(flow, manifests, definitions)
    return findings


def check_turns(flow: str, manifests: Sequence[tuple[str, Manifest | None]]) -> list[Finding]:
    """Check that no store of a flow that notes its batches is more than one batch behind a store downstream of it.

    Elsewhere such a store is filled again by the replay. Here the replay would look up other rows, and fold an element
    under another key than the one downstream that holds it; or a filter over all partitions would pass on another one of
    two duplicates. Within one batch, tables do not change, and that batch is repeated.

    Args:
        flow: Name of the flow.
        manifests: (first stage of the store, its manifest), upstream first.
    """
    known = [(name, one) for name, one in manifests if one is not None]
    return [
        unsafe(
            Risk.STORE_WENT_BACK,
            f"flow {flow}: the store of stage {up} is {below.batch - above.batch} batches behind that of stage {down}: it "
            "lost data, and a replay would look up other rows, or pass on other records, than these batches did",
            "Restore all stores of the flow from backups of the same moment, or rebuild the flow (`headwater replay`)",
        )
        for (up, above), (down, below) in pairwise(known)
        if below.batch > above.batch + 1
    ]


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
        unsafe(
            Risk.STAGE_ADDED,
            f"flow {flow} first ran without stage {stage} in its store: the stage was added, renamed or bound to another store",
            "Rebuild the flow (`headwater replay --redefine`), or bind the stage to its earlier store (--store)",
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
    """Findings for stages whose states were made by another definition, or in another order of stages.

    A definition with further sources continues the states.
    """
    remedy = (
        "Rebuild the flow (`headwater replay --redefine`), or accept the risk if old and new states mean the same and source, "
        "siblings and co_partitioned are unchanged; otherwise copies are folded again"
    )
    known = [manifest.definitions for _, manifest in manifests if manifest]
    stored = {stage: made for one in known for stage, made in one.items()}
    changed = [
        f"stage {stage} has definition {definition}; the flow last ran with {stored[stage]}"
        for stage, definition in definitions.items()
        if not continues(definition, stored.get(stage, definition))
    ]
    findings = [unsafe(Risk.DEFINITION, f"flow {flow}: {', '.join(changed)}", remedy)] if changed else []
    if any(
        [one for one in before if one in definitions] != [one for one in definitions if one in before]
        for before in known
    ):
        # The downstream states of a half-written batch exist. If their stage moved upstream, it would drop the replay.
        findings.append(unsafe(Risk.DEFINITION, f"flow {flow}: its stages were in a different order before", remedy))
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


def lost_manifests(flow: str, stores: Iterable[str]) -> list[Finding]:
    """Findings for stores that have buckets with marks but no manifest, which is written before the first states.

    Args:
        flow: Name of the flow.
        stores: First stage of each such store.
    """
    return [
        unsafe(
            Risk.STORE_EMPTY,
            f"flow {flow}: the store of stage {name} has states of the flow but no manifest: a part of it was lost, and a "
            "replay of what the topic still has would not restore it",
            "Restore the store, or rebuild into a new generation (--generation)",
        )
        for name in stores
    ]


def _behind(manifests: Sequence[tuple[str, Manifest | None]]) -> list[tuple[str, str, list[TopicPartition]]]:
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
                        f"stage {stage}, bucket {bucket}: save {wanted.short} was acknowledged but the newest is {mark.short}"
                    )
    if not lost:
        return []
    places = "; ".join(lost[place] for place in sorted(lost)[:5])
    return [
        unsafe(
            Risk.STORE_WENT_BACK,
            f"flow {flow}: {len(lost)} buckets of its stores lost acknowledged states ({places}), and a "
            "replay would not restore them",
            "Restore all stores of the flow from backups of the same moment, or rebuild the flow (`headwater replay`)",
        )
    ]


def check_durability(stores: Sequence[tuple[str, Capabilities]]) -> list[Finding]:
    """A stage counts as persisted only if it is at least as durable as what is written next.

    That is the stage upstream of it, or the manifest. Within one store, ordered durability is enough: after a crash
    the store contains an earlier consistent cut of all its writes.

    Args:
        stores: (first stage of the store, its capabilities), upstream first.
    """
    findings = [
        unsafe(
            Risk.NOT_DURABLE,
            f"the store of stage {down} may lose acknowledged states while that of stage {up}, written after it, keeps its own",
            "Configure it to sync before it acknowledges (appendfsync always, commitlog_sync group), or keep both stages in it",
        )
        for (up, _), (down, capabilities) in pairwise(stores)
        if not capabilities.durable
    ]
    first, capabilities = stores[0]
    if not capabilities.durable and not capabilities.ordered_durability:
        findings.append(
            unsafe(
                Risk.NOT_DURABLE,
                f"the store of stage {first} may lose acknowledged states and keep later writes",
                "Configure it to sync before it acknowledges (appendfsync always, commitlog_sync group, synchronous=full, sync=full)",
            )
        )
    return findings
