"""Bugs of the commit: its order, the start of a run, what stores compare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.run import begin, common, consistency, memory, run
from aggregations.run.consistency import check_stores
from aggregations.run.plan import Broker, Plan, plan
from persistence import cas
from persistence import memory as memory_store
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.errors import Transient
from persistence.manifest import Manifest
from tests.simulation import driver
from tests.simulation.patch import Patch

_Effects = Sequence[tuple[str, Callable[[], object]]]


def _publish(publish: Callable[[], object]) -> None:
    effect(CommitStep.PUBLISH, publish)


def _persist(stages: _Effects) -> None:
    for name, persist in stages:
        effect(CommitStep.PERSIST.of(name), persist)


def _manifest(manifests: _Effects) -> None:
    for name, save in manifests:
        effect(CommitStep.MANIFEST.of(name), save)


def _upstream_first(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    _persist(stages)
    _manifest(list(reversed(manifests)))


def _manifest_first(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    _manifest(list(reversed(manifests)))
    _persist(list(reversed(stages)))


def _upstream_manifest_first(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    _persist(list(reversed(stages)))
    _manifest(manifests)


def _published_last(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _persist(list(reversed(stages)))
    _manifest(list(reversed(manifests)))
    _publish(publish)


def _swallowing(work: Callable[[], object]) -> None:
    try:
        work()
    except Transient:
        return


def _publish_not_awaited(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _swallowing(lambda: _publish(publish))
    _persist(list(reversed(stages)))
    _manifest(list(reversed(manifests)))


def _persist_not_awaited(publish: Any, stages: _Effects, manifests: _Effects) -> None:
    _publish(publish)
    for one in reversed(stages):
        _swallowing(lambda one=one: _persist([one]))  # type: ignore[misc]
    _manifest(list(reversed(manifests)))


def _maximum(manifests: Sequence[Manifest | None]) -> dict[str, dict[int, int]]:
    highest: dict[str, dict[int, int]] = {}
    for manifest in manifests:
        for topic, partitions in (manifest.positions if manifest else {}).items():
            mine = highest.setdefault(topic, {})
            for partition, progress in partitions.items():
                mine[partition] = max(mine.get(partition, 0), progress.next_offset)
    return highest


def _same_topic(flow: str, start: Manifest | None, manifests: Any, broker: Broker, **options: Any) -> Plan:
    known = start.topic_ids.get(broker.topic, "") if start else ""
    return plan(flow, start, manifests, replace(broker, topic_id=known), **options)


def _upstream_may_be_empty(flow: str, manifests: Any, *rest: Any) -> Any:
    first = next((number for number, (_, manifest) in enumerate(manifests) if manifest), 0)
    return check_stores(flow, manifests[first:], *rest)


def _blind(at: Any, writes: Any, stored: Any, **options: Any) -> Any:
    return list(writes)


def _no_epoch(*arguments: Any) -> None:
    """Lets every epoch pass."""


def _any_manifest(*arguments: Any) -> None:
    """Lets every manifest pass."""


def _resolve_without_epoch(at: Any, writes: Any, stored: Any, *, epoch: int, batch: int) -> Any:
    return cas.resolve(at, writes, stored, epoch=max([epoch, *(one.epoch for one in stored.values())]), batch=batch)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "upstream-first": ("upstream states are persisted first", [(memory, "commit", _upstream_first)]),
    "manifest-first": ("manifests are written before states", [(memory, "commit", _manifest_first)]),
    "upstream-manifest-first": (
        "the upstream manifest is written first",
        [(memory, "commit", _upstream_manifest_first)],
    ),
    "published-last": ("dead letters are produced behind the manifests", [(memory, "commit", _published_last)]),
    "letters-not-awaited": ("nobody waits for dead letters", [(memory, "commit", _publish_not_awaited)]),
    "states-not-awaited": ("nobody waits for states", [(memory, "commit", _persist_not_awaited)]),
    "maximum-of-manifests": ("a run starts where the most advanced store is", [(common, "minimum", _maximum)]),
    "wiped-upstream-accepted": (
        "an upstream store that has nothing of a flow under way is filled with what comes",
        [(begin, "check_stores", _upstream_may_be_empty)],
    ),
    "first-start-taken-for-a-loss": (
        "a store without a manifest is refused though the first start died before it wrote one",
        [(Manifest, "begun", property(lambda _: True))],
    ),
    "older-run-tells-the-group": (
        "a woken older run sets the consumer group's offsets",
        [(run.Run, "superseded", lambda _: False)],
    ),
    "added-stage-accepted": ("a stage is added to a flow that has begun", [(consistency, "_added", lambda *_: [])]),
    "lost-store-accepted": ("a downstream store that lost data is accepted", [(begin, "check_stores", lambda *_: [])]),
    "incarnation-ignored": (
        "a topic that was created again is read on from the old offset",
        [(driver, "plan", _same_topic)],
    ),
    "epoch-ignored": (
        "an older run may write",
        [
            (memory_store, "check_epoch", _no_epoch),
            (memory_store, "check_manifest", _any_manifest),
            (memory_store, "resolve", _resolve_without_epoch),
        ],
    ),
    "epoch-and-version-ignored": (
        "an older run may write, whatever version is stored",
        [
            (memory_store, "check_epoch", _no_epoch),
            (memory_store, "check_manifest", _any_manifest),
            (memory_store, "resolve", _blind),
        ],
    ),
}
