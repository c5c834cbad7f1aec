"""What can happen in a world. A step is a kind and three numbers, taken modulo what there is: any step fits any world."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from aggregations.errors import RunRefusedError
from jobs.simulation.driver import METADATA_MAX_AGE, Driver
from jobs.simulation.faults import ENDS, Crash, End, Script
from jobs.simulation.kafka import CLOCK, Log
from jobs.simulation.oracle import Violation
from jobs.simulation.service import Service, mended, payload_of
from jobs.simulation.stores import BUCKETS, FLOW_PART, Copy, SimulatedStore
from jobs.simulation.topology import FINAL, FLOW, Payload, Spec, digest, draw
from jobs.simulation.world import World
from persistence.errors import StoreError
from persistence.manifest import ahead, minimum
from persistence.marks import Mark
from persistence.names import FlowRef

_REF = FlowRef(FLOW)
_NOTHING = Copy({}, {}, {}, {})
_MOST_PARTITIONS = 6


POINTS = ("persist", "load", "manifest", "publish", "persist", "dead_letter", "manifest", "term", "return", "offsets")
"""Kinds of effects of the engine; where most is at stake twice."""
_TERM_EFFECTS = 5
"""Most effects of a start: the term in two stores, their manifests, and the first of those with positions."""
SERVICE_POINTS = ("deliver", "republish", "coordinator", "deliver")
"""The same of a service."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. Called with the world that it happens in."""

    kind: str
    a: int
    b: int
    c: int

    def __call__(self, world: World) -> None:
        KINDS[self.kind][1](world, self.a, self.b, self.c)

    def __str__(self) -> str:
        return f"{self.kind}({self.a}, {self.b}, {self.c})"


def draw_world(seed: int, steps: int = 80) -> tuple[Spec, list[Step]]:
    """Draw a world and what happens in it."""
    spec, random = draw(Random(f"world {seed}")), Random(f"steps {seed}")
    possible = {
        "grow": bool(spec.growth),
        "recreate": spec.recreates,
        **dict.fromkeys(["republish", "rewind", "stale", "deliver"], bool(spec.passages)),
        "share": any(passage.members > 1 for passage in spec.passages),
    }
    weights = [weight * possible.get(kind, True) for kind, (weight, _) in KINDS.items()]
    kinds = random.choices(list(KINDS), weights, k=steps)
    return spec, [Step(kind, *(random.randrange(1 << 16) for _ in range(3))) for kind in kinds]


def _produce(world: World, a: int, b: int, c: int) -> None:
    """Producers write one to six events."""
    _write(world, world.spec.roots[b % len(world.spec.roots)], 1 + a % 6)


def _write(world: World, topic: str, count: int) -> None:
    for _ in range(count):
        world.produce(topic, event(world.spec, f"e{len(world.oracle.events)}"))


def event(spec: Spec, name: str) -> Payload:
    """The event of that name. One in five is bad for a stage, or in front of it."""
    stage = spec.stages[digest(name, "bad") % len(spec.stages)]
    return {
        "id": name,
        "k": f"k{digest(name, 'k') % 3}",
        "g": f"g{digest(name, 'g') % 2}",
        "h": "h",
        "x": digest(name, "x") % 100,
        "bad": ("", stage.name, f"!{stage.name}")[max(digest(name, "poison") % 10 - 7, 0)],
    }


def _republish(world: World, a: int, b: int, c: int) -> None:
    """A service works on one partition; every other time it meets a fault at one of its effects."""
    if world.services:
        service = world.services[a % len(world.services)]
        script = Script({(SERVICE_POINTS[(c >> 3) % 4], (c >> 5) % 4): ENDS[c % 4]} if c & 4 else {})
        world.under(script, lambda: world.serve(lambda: service.step(a >> 8, 1 + b % 16)))


def _stale(world: World, a: int, b: int, c: int) -> None:
    """A service stands still in front of one of its effects. When it goes on it may die after some records."""
    if world.services:
        service = world.services[a % len(world.services)]
        ends: dict[Any, End] = {("republish", c % 4) if c & 4 else ("deliver", c % 4): End.PAUSE}
        if c & 8:
            ends["deliver", 4 + (c >> 4) % 4] = End.BEFORE
        world.stand_still(lambda: service.step(a >> 8, 1 + b % 16), Script(ends))


def _share(world: World, a: int, b: int, c: int) -> None:
    """Members of one group at once: one stands still with its partitions while others come and go; then it may go on."""
    groups = [service for service in world.services if service.passage.members > 1]
    if not groups:
        return
    service, waiting = groups[a % len(groups)], len(world.stale)
    if service.passage.source in world.spec.roots:
        _write(world, service.passage.source, 1 + b % 6)
    point = SERVICE_POINTS[(c >> 3) % 4], (c >> 5) % 2
    world.stand_still(lambda: service.share(a >> 8, 1 + b % 16), Script({point: End.PAUSE}))
    for n in range(1 + c % 3):
        script = Script({("deliver", b % 4): ENDS[(b >> 2) % 4]} if b & 16 else {})
        world.under(script, lambda n=n: world.serve(lambda: service.share((a >> 8) + n + 1, 1 + b % 16)))  # type: ignore[misc]
    if len(world.stale) > waiting and c & 4:
        world.go_on(waiting)


def _deliver(world: World, a: int, b: int, c: int) -> None:
    """It goes on."""
    world.go_on(a)


def _rewind(world: World, a: int, b: int, c: int) -> None:
    """A service's offset is set back; not while its topic grows, as who sets offsets takes the group's notes away."""
    if world.services and not world.services[a % len(world.services)].grows:
        world.services[a % len(world.services)].rewind(b, 1 + c % 30)


def _engine(world: World, a: int, b: int, c: int) -> None:
    """The engine folds a batch, or dies, or errs, at one of its effects."""
    ends: dict[int | tuple[str, int], End] = {}
    if b & 1:
        point = POINTS[(b >> 3) % len(POINTS)]
        ends[point, (b >> 8) % _TERM_EFFECTS if point == "term" else (b >> 8) % 4 // 3] = ENDS[c % 4]
    if b % 8 == 6:
        ends["write", (b >> 3) % 6] = ENDS[(c >> 2) % 4]
    if b % 8 in (2, 3):
        # Few batches have dead letters.
        ends["dead_letter", 0] = ENDS[(c >> 2) % 4]
    script = Script(ends)
    world.under(script, lambda: world.engine(1 + a % 10))


def _slow(world: World, a: int, b: int, c: int) -> None:
    """One partition of the flow's topic lags behind from now on, or no longer."""
    world.slow = a % 6 - 2


def _kill(world: World, a: int, b: int, c: int) -> None:
    """The engine dies between two batches. Now and then somebody tries to start it with one stage more."""
    world.driver = None
    if a % 4 == 0 and any(store.load_manifest(_REF) for store in world.stores.values()):
        try:
            world.start(added=True)
        except RunRefusedError:
            return
        raise Violation("the engine starts although a stage was added to what has begun")


def _zombie(world: World, a: int, b: int, c: int) -> None:
    """The engine stands still in front of one of its effects."""
    world.zombie(1 + a % 10, (POINTS[b % len(POINTS)], (b >> 8) % 2))


def _wake(world: World, a: int, b: int, c: int) -> None:
    """An engine that stood still goes on."""
    world.wake(a)


def _duel(world: World, a: int, b: int, c: int) -> None:
    """The engine stands still with its writes in hand, another one takes over and works, the first one goes on."""
    waiting = len(world.zombies)
    world.zombie(1 + a % 10, [("persist", 0), ("write", 1), ("persist", 1), ("write", 3)][b % 4])
    for n in range(c % 3):
        world.engine(1 + (a >> n) % 10)
    if len(world.zombies) > waiting:
        world.wake(waiting)


def _grow(world: World, a: int, b: int, c: int) -> None:
    """A topic gets a partition."""
    if not world.spec.growth:
        return
    topic = _topic(world, a)
    if world.spec.growth == "lagging" and (topic.topic == FINAL or c % 4):
        _grow_behind(world, a >> 4, b, c >> 2)
        return
    readers = [service for service in world.services if service.passage.source == topic.topic]
    if world.spec.growth == "lagging" and len(readers) == 1:
        _grow_source(world, readers[0], a >> 4, b, c >> 2)
        return
    if world.spec.growth != "undrained":
        world.settle()
    if len(topic.partitions) < 4:
        world.cluster.grow(topic.topic)
        if world.spec.growth != "undrained":
            for service in world.services:
                if service.passage.source == topic.topic:
                    world.serve(service.drain)  # it was there and looked
        if topic.topic == FINAL:
            # Read again from before it grew, a key's records would come by two partitions at once.
            world.replayable = False
            world.copies.clear()


def _grow_behind(world: World, a: int, b: int, c: int) -> None:
    """The flow's topic gets a partition while records lie unread in one that lags behind from then on.

    Producers learn of the new one later. The engine may have read everything before, may see the growth before they do,
    and may die behind it.
    """
    log = world.cluster.topics[FINAL]
    if len(log.partitions) >= _MOST_PARTITIONS:
        return
    # What a topic was before a flow began to read it, nobody can say.
    if c & 3:
        world.slow = -1
    world.engine(1000 if c & 3 else 1)
    if c & 256:
        _pass_on(world, 6 + a % 6)
    world.cluster.grow(FINAL, learned=METADATA_MAX_AGE * (b % 16) / 16)
    # Nor what it was when a copy of the stores was made; and a letter may have died since, and come by a new partition.
    world.replayable = False
    world.copies.clear()
    if c & 12:
        world.engine(1000)
        world.engine(1000)
    _pass_on(world, 6 + a % 6)
    world.slow = (a >> 3) % (len(log.partitions) - 1)
    if c & 48:
        CLOCK.sleep(METADATA_MAX_AGE)
        _pass_on(world, 6 + a % 6)
    if c & 64:
        world.engine(1000)
    if c & 128:
        world.driver = None


def _grow_source(world: World, service: Service, a: int, b: int, c: int) -> None:
    """The topic of a service gets twice its partitions while records lie unread, and the service sees it.

    Producers learn of the new ones later. A growth that nobody sees, or during another one, would be refused.
    """
    log = world.cluster.topics[service.passage.source]
    world.settle()
    if len(log.partitions) > _MOST_PARTITIONS // 2 or service.grows:
        return
    script, waiting = Script(), len(world.stale)
    world.stand_still(lambda: service.wait(1 + b % 4, script.pause), script)
    _pass_on(world, 3 + a % 6, log.topic)
    world.cluster.grow(log.topic, by=len(log.partitions), learned=METADATA_MAX_AGE * (c % 4) / 4)
    _pass_on(world, 3 + a % 6, log.topic)
    if len(world.stale) > waiting:
        world.go_on(waiting)
    if c & 12:
        CLOCK.sleep(METADATA_MAX_AGE)
        _pass_on(world, 3 + a % 6, log.topic)
    for number in range(len(service.places) if c & 48 else 0, 0, -1):  # the new ones first
        world.serve(lambda number=number: service.step(number - 1, 1 + b % 8))  # type: ignore[misc]
        world.engine(1000)


def _pass_on(world: World, count: int, topic: str = FINAL) -> None:
    """Events are written, and go as far as a topic."""
    for root in world.spec.roots:
        _write(world, root, count)
    ahead = {topic}
    for passage in world.spec.passages[::-1] * 2:
        ahead |= {passage.source} if ahead & {*passage.targets} else set()
    for service in world.services:
        if service.passage.source in ahead - {topic}:
            world.serve(service.drain)


def _recreate(world: World, a: int, b: int, c: int) -> None:
    """A topic is deleted and created again; its records are all through, and a service may be waiting for more of them."""
    if not world.spec.recreates:
        return
    world.settle()
    topic = _topic(world, a)
    readers = [service for service in world.services if service.passage.source == topic.topic]
    waiting = len(world.stale)
    if readers and b % 2:
        script = Script()
        world.stand_still(lambda: readers[c % len(readers)].wait(1 + b % 8, script.pause), script)
    world.cluster.create(topic.topic, len(topic.partitions), late_commits=bool(c & 8))
    if topic.topic in world.spec.roots and len(world.stale) > waiting:
        _write(world, topic.topic, 1 + c % 6)
        world.go_on(waiting)
    world.copies.clear()
    if topic.topic == FINAL:
        world.replayable = False
        world.driver = None


def _trim(world: World, a: int, b: int, c: int) -> None:
    """Retention deletes what every reader has read."""
    log = _topic(world, a)
    for number, partition in enumerate(log.partitions):
        readers = [service for service in world.services if service.passage.source == log.topic]
        passed = [reader.committed(log.topic, number) for reader in readers]
        if log.topic == FINAL:
            manifests = [store.load_manifest(_REF) for store in world.stores.values()]
            # A manifest of another incarnation says nothing about this one.
            same = all(one is None or one.topic_ids.get(FINAL) == log.topic_id for one in manifests)
            passed.append(minimum(manifests).get(FINAL, {}).get(number, 0) if same else 0)
        partition.low = max(partition.low, min([*passed, partition.high]))
    if log.topic == FINAL:
        world.replayable = False
        world.copies.clear()


def _snapshot(world: World, a: int, b: int, c: int) -> None:
    """Somebody copies the stores."""
    world.copies.append({url: store.copy() for url, store in world.stores.items()})


def _restore(world: World, a: int, b: int, c: int) -> None:
    """Stores go back to a copy, or to nothing; nobody runs meanwhile."""
    upstream, *downstream = world.stores
    choices = list(world.copies)
    if world.replayable:
        choices.append(dict.fromkeys(world.stores, _NOTHING))
    recent = b % 3 == 0 and downstream
    if recent:
        # The upstream store goes back by a batch or two; what it needs again is still there.
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
        # What was copied later belongs to a past that has not been.
        del world.copies[number + 1 if number < len(world.copies) else 0 :]
    # One store alone goes back first, to see that the start is refused if it must be.
    some = [upstream] if recent or (b % 3 == 2 and downstream) else downstream if b % 3 == 1 else []
    for url in some:
        world.stores[url].restore(copy[url])
    if not some or not _check_start(world) or not recent:
        # All of them: what a refusal says, and what the next start needs where manifests cannot tell.
        for url, store in world.stores.items():
            store.restore(copy[url])
        if copy[upstream] is _NOTHING:
            # A first start dies between the first manifests of two stores, and is not taken for a loss.
            script = Script({("term", 2 + c % 2): ENDS[(c >> 3) % 4]})
            world.under(script, lambda: world.engine(1))
    world.watch.forget()


def _back(world: World, a: int, b: int, c: int) -> None:
    """A part of one store goes back behind a run that knows of more; at the end all stores are as they were before."""
    for process, _ in world.zombies:
        process.kill()
    world.zombies.clear()
    url, store = list(world.stores.items())[a % len(world.stores)]
    older = store.copy()
    # Every other time the run dies before a manifest: only the buckets upstream then know what was acknowledged.
    script = Script({("manifest", (b >> 4) % 2): ENDS[c % 2]} if b & 1 else {})
    _write(world, world.spec.roots[0], 4)
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
    """The run that was at work goes on: it writes nothing over what went back."""
    refs = [_REF.stage(stage.name) for stage in world.spec.stages]
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
    """Whether a state misses what one upstream of it holds, as after a crash between states and manifests."""
    world.watch.forget()
    try:
        world.watch.check()
    except Violation:
        return True
    return False


def _check_start(world: World) -> bool:
    """Whether the engine starts: exactly if each store has all that the other one's manifest or states count on."""
    upstream, downstream = (store.load_manifest(_REF) for store in world.stores.values())
    lost = bool(ahead(upstream, downstream))
    lost |= upstream is not None and downstream is None
    lost |= upstream is None and downstream is not None and bool(downstream.positions)
    try:
        world.start()
    except RunRefusedError as refused:
        lost = lost or _misses(world)
        if not lost:
            raise Violation(f"the engine refuses stores that fit together: {refused}") from None
    else:
        if lost:
            raise Violation("the engine starts although a store lost data")
    return not lost


def _redrive(world: World, a: int, b: int, c: int) -> None:
    """A dead letter comes back, mended."""
    if world.letters and world.redriven < len(world.letters):
        # In the order of the dead-letter topic, or once more.
        world.redriven += b % 4 > 0
        output = mended(*world.letters[max(world.redriven - 1, 0)])
        world.oracle.cured(payload_of(output.value)["id"])
        world.deliver(output)


def _topic(world: World, number: int) -> Log:
    names = sorted(world.spec.partitions)
    return world.cluster.topics[names[number % len(names)]]


KINDS: dict[str, tuple[int, Callable[[World, int, int, int], None]]] = {
    "produce": (12, _produce),
    "republish": (34, _republish),
    "engine": (22, _engine),
    "rewind": (8, _rewind),
    "stale": (3, _stale),
    "share": (8, _share),
    "deliver": (3, _deliver),
    "slow": (4, _slow),
    "kill": (2, _kill),
    "zombie": (5, _zombie),
    "wake": (5, _wake),
    "duel": (4, _duel),
    "grow": (6, _grow),
    "recreate": (3, _recreate),
    "trim": (2, _trim),
    "snapshot": (2, _snapshot),
    "restore": (3, _restore),
    "redrive": (5, _redrive),
    "back": (2, _back),
}
"""Kind of step to how often it happens and what it does. A world has eighty steps."""
