"""Begins a run of a flow on its stores, or opens them read-only: acquires the epoch and reads and checks the manifests."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.stages import continues
from aggregations.errors import RunRefusedError
from aggregations.run.border import check_whole
from aggregations.run.common import common
from aggregations.run.consistency import check_marks, check_stores, check_turns, lost_manifests
from aggregations.run.live import check_live, ref_of, settle_pointer
from aggregations.run.retire import check_can_expire
from aggregations.run.risks import LOSSES, Risk, refuse
from aggregations.run.run import Run
from aggregations.run.shapes import check_states
from persistence.commit.faults import EPOCH, effect
from persistence.epochs import take_epoch
from persistence.findings import Finding
from persistence.manifest import Manifest, Rebuilt
from persistence.marks import Bucket
from persistence.registry import open_stores


def begin(
    flow: Flow[Any],
    urls: Mapping[str, str],
    *,
    generation: int | None = None,
    accept: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
    rebuilt: Rebuilt | None = None,
    notes: bool = False,
) -> Run:
    """Begin a run: acquire an epoch, fence every older run, then read the progress of each store.

    The epoch comes from the first stage's store and is installed in all stores before anything is loaded.

    Args:
        flow: The flow.
        urls: URL of the store by stage name, from `bind`.
        generation: Generation of the states; None for the live one.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        clock: Returns the time in seconds since 1970.
        rebuilt: The run is that of a rebuild, with this note; None for any other run.
        notes: Note every batch before it is folded, because the broker cannot say later what this run may have read.

    Raises:
        RunRefusedError: The stores are inconsistent with each other or the flow, and the risk is not accepted. Or the
            generation is not live. Or batches are to be noted, and an earlier run crashed that did not note them.
        Fenced: A newer run has begun meanwhile.
    """
    with opened(flow, urls, generation, accept_definition=Risk.DEFINITION in accept) as run:
        run.clock = clock
        run.accept_disorder = Risk.GROWN_UNDRAINED in accept
        run.accept_eviction = Risk.GROWTH_FULL in accept
        run.rebuilt = rebuilt
        run.notes = notes
        check_live(run, rebuilds=rebuilt is not None)
        run.manifests = [(name, store.load_manifest(run.ref)) for name, store in run.distinct_stores()]
        check_whole(run.ref, run.manifests)  # before the epoch, which would fence a restore that is at work
        run.epoch = take_epoch(run.ref, [store for _, store in run.distinct_stores()], point=EPOCH)
        check_live(run, rebuilds=rebuilt is not None)
        settle_pointer(run)
        _read(run, accept)
        found = [manifest for _, manifest in run.manifests if manifest is not None]
        if notes and any(one.begun and not (one.clean or one.noted) for one in found):
            raise RunRefusedError(
                f"flow {flow.name}: an earlier run with access to the broker did not end cleanly, and only the broker can say "
                "which records it may have folded. Give the Kafka settings (kafka=) to one run"
            )
        _note_stages(run)
        run.crashed = not all(manifest.clean for manifest in found)
        if any(manifest.clean for manifest in found) or _are_apart(run):
            run.advanced(run.changed())  # from here on the manifest does not count as clean
            # Upstream first, since a crash may have left stores ahead of where the run begins: after another one, among these
            # or the manifests of a smaller batch, no store may be behind one upstream of it, as if it had lost data.
            for name, _ in run.distinct_stores():
                effect(EPOCH, lambda name=name: run.save_manifest(name, run.changed()))  # type: ignore[misc]
    return run


def look(flow: Flow[Any], urls: Mapping[str, str], *, generation: int | None = None, accept: Sequence[str] = ()) -> Run:
    """Open a flow's stores read-only, with the checks of `begin`. An active run is not affected.

    It acquires no epoch and writes nothing.

    Args:
        flow: The flow.
        urls: URL of the store by stage name, from `bind`.
        generation: Generation of the states; None for the live one.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.

    Raises:
        RunRefusedError: The stores are inconsistent with each other or the flow, and the risk is not accepted.
    """
    with opened(flow, urls, generation) as run:
        _read(run, accept)
    return run


@contextmanager
def opened(
    flow: Flow[Any], urls: Mapping[str, str], generation: int | None, *, accept_definition: bool = False
) -> Iterator[Run]:
    """A run without an epoch, on open stores; they are closed if the block raises."""
    with ExitStack() as stack:
        handles = open_stores(urls.values(), stack)
        stores = {name: handles[url] for name, url in urls.items()}
        check_can_expire(flow, stores)
        yield Run(flow, ref_of(flow, stores, generation), stores, urls, 0, None, accept_definition)
        stack.pop_all()


def _read(run: Run, accept: Sequence[str]) -> None:
    """Read the progress of each store.

    Raises:
        RunRefusedError: The stores are inconsistent with each other or the flow, and the risk is not accepted.
    """
    for _ in range(2):
        # Upstream first, because an active run writes downstream first. If that run has only just begun, the first
        # read may be older than its first manifest.
        run.manifests = [(name, store.load_manifest(run.ref)) for name, store in run.distinct_stores()]
        if all(manifest for _, manifest in run.manifests):
            break
    run.times = max(
        (manifest.times for _, manifest in run.manifests if manifest), key=lambda times: times[-1:], default=()
    )
    run.rebuilt = next((one.rebuilt for _, one in run.manifests if one and one.rebuilt), run.rebuilt)
    run.unasked = run.notes or any(one.unasked for _, one in run.manifests if one)
    run.given_up = max((one.given_up for _, one in run.manifests if one), key=len, default=())
    check_whole(run.ref, run.manifests)
    refuse(_findings(run), accept)
    for stage in _redefined(run):
        check_states(stage, run.stage_ref(stage), run.stores[stage.name])
    noted = all(one.noted for _, one in run.manifests if one)
    run.advanced(common([one for _, one in run.manifests], run.ref, finishes=run.flow.notes_batches or noted))
    growing = run.manifest.growth if run.manifest else {}
    run.growths = {topic: growing[topic] for topic in run.sources if topic in growing}


def _findings(run: Run) -> list[Finding]:
    """Read manifests and buckets, and return findings about inconsistencies."""
    run.acknowledged.learn(run.manifests, buckets := run.buckets())
    homes = run.homes()
    findings = [
        *check_stores(run.flow.name, run.manifests, run.flow.definitions, homes),
        *check_marks(run.flow.name, run.manifests, buckets, homes, run.acknowledged.since),
        *lost_manifests(run.flow.name, _without_manifest(run, buckets)),
        *(check_turns(run.flow.name, run.manifests) if run.flow.notes_batches else ()),
    ]
    if any(one.risk in LOSSES for one in findings):
        # Used only if the risk is accepted: marks that were acknowledged before are then no longer checked.
        run.acknowledged.since = run.epoch
    return findings


def _without_manifest(run: Run, buckets: Mapping[str, Mapping[str, Bucket]]) -> list[str]:
    """Stores that have marks but no manifest, also when it is read after the marks: a run may just have begun."""
    homes = run.homes()
    marked = {homes[stage] for stage, held in buckets.items() if any(one.mark.count for one in held.values())}
    missing = {name for name, manifest in run.manifests if manifest is None} & marked
    return [name for name, store in run.distinct_stores() if name in missing and store.load_manifest(run.ref) is None]


def _redefined(run: Run) -> list[Stage]:
    """Stages with another definition in a manifest, apart from added sources; these definitions are noted as continued."""
    found = [manifest for _, manifest in run.manifests if manifest is not None]
    earlier: dict[str, tuple[str, ...]] = {}
    redefined = []
    for stage in run.flow.stages:
        made = {one.definitions[stage.name] for one in found if stage.name in one.definitions}
        if not all(continues(stage.definition, one) for one in made):
            redefined.append(stage)
        made |= {definition for one in found for definition in one.earlier.get(stage.name, ())}
        if made - {stage.definition}:
            earlier[stage.name] = tuple(sorted(made - {stage.definition}))
    run.earlier = earlier
    return redefined


def _note_stages(run: Run) -> None:
    """Write the flow's stages into every store whose manifest names other stages, before anything is folded.

    Otherwise a half-written batch would not show which stages existed. For a new flow every store gets a manifest:
    from then on a store without a manifest has lost it. An accepted loss is noted, too: the next run need not
    accept it again, wherever this run crashes.
    """
    begun = any(manifest and manifest.begun for _, manifest in run.manifests)
    for name, manifest in reversed(run.manifests):
        if manifest is None and begun:
            continue  # the risk is accepted: the store gets a manifest with the first positions
        noted = run.of_store(name, msgspec.structs.replace(manifest or Manifest(0, 0, seen={}), epoch=run.epoch))
        if manifest is None or _stages(manifest) != _stages(noted) or manifest.since != run.acknowledged.since:
            effect(EPOCH, lambda name=name, noted=noted: run.save_manifest(name, noted))  # type: ignore[misc]


def _are_apart(run: Run) -> bool:
    """Whether stores are ahead of where the run begins. One that begins anew gets a manifest with the first positions."""
    found = [one for _, one in run.manifests]
    begun = [one.positions for one in found if one is not None]
    return run.manifest is not None and None not in found and any(one != run.manifest.positions for one in begun)


def _stages(manifest: Manifest) -> tuple[object, ...]:
    """The stages in a manifest: those of the flow, in order, those of its store, and earlier definitions."""
    return list(manifest.definitions.items()), manifest.kept, manifest.earlier, manifest.noted, manifest.unasked
