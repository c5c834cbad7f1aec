"""Steps in which stores lose data: all of it, a part, or everything since a copy."""

from collections.abc import Mapping
from contextlib import suppress

from aggregations.errors import RunRefusedError
from persistence.errors import StoreError
from persistence.manifest import ahead
from persistence.marks import Mark
from tests.simulation.driver import Driver
from tests.simulation.faults import ENDS, Crash, Script
from tests.simulation.oracle import Violation
from tests.simulation.stores import BUCKETS, FLOW_PART, Copy, SimulatedStore
from tests.simulation.world import World

_NOTHING = Copy({}, {}, {}, {}, {}, {})


def snapshot(world: World, a: int, b: int, c: int) -> None:
    """Copy the stores."""
    world.copies.append({url: store.copy() for url, store in world.stores.items()})


def restore(world: World, a: int, b: int, c: int) -> None:
    """Restore stores to a copy, or empty them, while nothing runs."""
    upstream, *downstream = world.stores
    choices = list(world.copies)
    if world.replayable:
        choices.append(dict.fromkeys(world.stores, _NOTHING))
    recent = b % 3 == 0 and downstream
    if recent:
        # The upstream store goes back by a batch or two; the records that it needs again are still in the topic.
        choices = [{url: store.copy() for url, store in world.stores.items()}]
        for _ in range(1 + c % 2):
            world.engine(1 + a % 10)
            world.check()
    if not choices:
        return
    for process, _ in world.zombies:
        process.kill()
    world.zombies.clear()
    world.driver = None
    number = a % len(choices)
    copy = choices[number]
    if not recent:
        # Later copies belong to a discarded history.
        del world.copies[number + 1 if number < len(world.copies) else 0 :]
    # First only one store goes back, to check that the start is refused if necessary.
    some = [upstream] if recent or (b % 3 == 2 and downstream) else downstream if b % 3 == 1 else []
    newer = {url: world.stores[url].copy() for url in some}
    for url in some:
        world.stores[url].restore(copy[url])
    if not some or not _check_start(world, newer) or not recent:
        # Then all of them: the remedy of a refusal, and also required if manifests cannot detect the loss.
        for url, store in world.stores.items():
            store.restore(copy[url])
        world.live.lost()
        if copy[upstream] is _NOTHING:
            # A first start that dies between the first manifests of two stores is not a loss.
            script = Script({("epoch", 2 + c % 2): ENDS[(c >> 3) % 4]})
            world.under(script, lambda: world.engine(1))
    world.watch.forget()


def back(world: World, a: int, b: int, c: int) -> None:
    """Let a part of one store go back while a run has acknowledged more; at the end, restore all stores."""
    for process, _ in world.zombies:
        process.kill()
    world.zombies.clear()
    url, store = list(world.stores.items())[a % len(world.stores)]
    older = store.copy()
    # Every other time the run dies before a manifest: only the upstream buckets then record what was acknowledged.
    script = Script({("manifest", (b >> 4) % 2): ENDS[c % 2]} if b & 1 else {})
    world.write(world.spec.roots[0], 4)
    for service in world.services:
        for number in range(2):
            world.serve(lambda service=service, number=number: service.step(number, 16))  # type: ignore[misc]
    world.under(script, lambda: world.engine(4 + a % 7))
    world.check()
    newest = {url: store.copy() for url, store in world.stores.items()}
    driver, world.driver = world.driver, None
    whole = b % 8 == 7
    part = BUCKETS[(b >> 1) % len(BUCKETS)]
    store.restore(older, (*BUCKETS, FLOW_PART) if whole else [part])
    lost = _misses(world)
    if driver is not None:
        _goes_on(world, driver, part, store)
    started = False
    with suppress(RunRefusedError):
        world.start()
        started = True
    if lost and started:
        raise Violation(f"the engine starts although {part if not whole else 'all'} of {url} went back")
    if whole and len(world.stores) == 1 and not started:
        raise Violation("the engine refuses a store that went back as a whole")
    for name, copy in newest.items():
        world.stores[name].restore(copy)
    world.watch.forget()


def _goes_on(world: World, driver: Driver, part: str, store: SimulatedStore) -> None:
    """Let the active run continue, and check that it writes nothing over a part that went back."""
    refs = [world.live.ref.stage(stage.name) for stage in world.spec.stages]
    known = {
        ref: driver.runner.run.known.of(ref.stage).get(part, Mark()) for ref in refs if world.home(ref.stage) is store
    }
    behind = {ref: mark for ref in known if not (mark := store.marks(ref)[part].mark).holds(known[ref])}
    with suppress(StoreError, Crash):
        driver.batch(10)
    for ref, mark in behind.items():
        if store.marks(ref)[part].mark != mark:
            raise Violation(f"the run writes over bucket {part} of {ref}, which went back")


def _misses(world: World) -> bool:
    """Whether a state lacks events that an upstream state holds, as after a crash between states and manifests."""
    world.watch.forget()
    try:
        world.watch.check()
    except Violation:
        return True
    return False


def _lost_holes(world: World, newer: Mapping[str, Copy]) -> bool:
    """Whether stores that went back have lost holes: their dead letters would then be copies."""
    return any(copy.holes - world.stores[url].copy().holes for url, copy in newer.items())


def _check_start(world: World, newer: Mapping[str, Copy]) -> bool:
    """Whether the engine starts, which it must if and only if no store lacks data that the other one depends on.

    Args:
        world: The world.
        newer: The content of the stores before they went back.
    """
    upstream, downstream = (store.load_manifest(world.live.ref) for store in world.stores.values())
    lost = bool(ahead(upstream, downstream))
    lost |= upstream is not None and downstream is None
    lost |= upstream is None and downstream is not None and bool(downstream.positions)
    try:
        world.start()
    except RunRefusedError as refused:
        lost = lost or _misses(world) or _lost_holes(world, newer)
        if not lost:
            raise Violation(f"the engine refuses stores that fit together: {refused}") from None
    else:
        if lost:
            raise Violation("the engine starts although a store lost data")
    return not lost
