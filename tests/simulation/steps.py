"""The steps of a world. A step is a kind and three numbers, which are taken modulo a size, so it fits any world."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from aggregations.errors import RunRefusedError
from persistence.manifest import minimum
from tests.simulation.audit import AUDIT
from tests.simulation.changes import Change
from tests.simulation.cuts import cut
from tests.simulation.draw import draw_spec
from tests.simulation.driver import METADATA_MAX_AGE
from tests.simulation.faults import ENDS, End, Script
from tests.simulation.functions import OUT, OUTAGE
from tests.simulation.kafka import CLOCK, Log
from tests.simulation.losses import back, restore, snapshot
from tests.simulation.oracle import Violation
from tests.simulation.rebuilds import rebuild
from tests.simulation.repairs import repair
from tests.simulation.service import Service
from tests.simulation.topology import FINAL, FLOW, SPANNING, Spec
from tests.simulation.world import World

_MOST_PARTITIONS, _MOST_DRAINED = 6, 4

POINTS = ("persist", "load", "manifest", "publish", "persist", "dead_letter", "manifest", "epoch", "return", "offsets")
"""Kinds of effects of the engine; the most critical ones twice."""
_EPOCH_EFFECTS = 5
"""Maximum effects of a start: the epoch in two stores, their manifests, and the first manifests with positions."""
SERVICE_POINTS = ("deliver", "republish", "coordinator", "deliver")
"""The same of a service."""
FILTER_POINTS = ("filter", "write", "deliver", "republish", "filter", "write", "coordinator", "deliver")
"""The same of a service with a filter."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. Call it with its world."""

    kind: str
    a: int
    b: int
    c: int

    def __call__(self, world: World) -> None:
        KINDS[self.kind][1](world, self.a, self.b, self.c)

    def __str__(self) -> str:
        return f"{self.kind}({self.a}, {self.b}, {self.c})"


def draw_world(seed: int, steps: int = 80) -> tuple[Spec, list[Step]]:
    """Draw a world and its steps."""
    spec, random = draw_spec(seed), Random(f"steps {seed}")
    possible = {
        "grow": bool(spec.growth),
        "recreate": spec.recreates,
        **dict.fromkeys(["republish", "rewind", "stale", "deliver"], bool(spec.processors)),
        "share": any(processor.members > 1 for processor in spec.processors),
        "audit": bool(spec.audit),
        "mend": spec.mends,
        # A filter whose states are lost passes on what it passed on before, at the place of a later copy.
        "back": not spec.deduplicates,
        # If a flow that lost its stores publishes a message again, and an operator asserts it is new, its readers fold it.
        # A filter over all partitions, whose store went back by several batches, would pass on others of two duplicates.
        **dict.fromkeys(["snapshot", "restore"], spec.audit != OUT and spec.deduplicates not in SPANNING),
    }
    weights = [weight * possible.get(kind, True) for kind, (weight, _) in KINDS.items()]
    kinds = random.choices(list(KINDS), weights, k=steps)
    made = [Step(kind, *(random.randrange(1 << 16) for _ in range(3))) for kind in kinds]
    for kind, added in (("repair", spec.repairs), ("rebuild", spec.rebuilds), ("cut", spec.cuts)):
        own = Random(f"{kind}s {seed}")
        for _ in range(3 if added else 0):
            made.insert(own.randrange(len(made) + 1), Step(kind, *(own.randrange(1 << 16) for _ in range(3))))
    return spec, made


def _produce(world: World, a: int, b: int, c: int) -> None:
    """Let producers write one to six events."""
    world.write(world.spec.roots[b % len(world.spec.roots)], 1 + a % 6)


def _republish(world: World, a: int, b: int, c: int) -> None:
    """Let a service process one partition; every other time with a fault at one of its effects."""
    if world.services:
        service = world.services[a % len(world.services)]
        script = Script({(_point(service, c), (c >> 5) % 4): ENDS[c % 4]} if c & 4 else {})
        world.under(script, lambda: world.serve(lambda: service.step(a >> 8, 1 + b % 16)))


def _point(service: Service, number: int) -> str:
    """A kind of effect of a service."""
    points = FILTER_POINTS if service.processor.deduplicates else SERVICE_POINTS
    return points[(number >> 3) % len(points)]


def _stale(world: World, a: int, b: int, c: int) -> None:
    """Suspend a service before one of its effects. After it resumes, it may die after some records."""
    if world.services:
        service = world.services[a % len(world.services)]
        point = "filter" if service.processor.deduplicates and c & 256 else "republish" if c & 4 else "deliver"
        ends: dict[Any, End] = {(point, c % 4): End.PAUSE}
        if c & 8:
            ends["deliver", 4 + (c >> 4) % 4] = End.BEFORE
        world.stand_still(lambda: service.step(a >> 8, 1 + b % 16), Script(ends))


def _share(world: World, a: int, b: int, c: int) -> None:
    """Members of one group at once: one is suspended with its partitions while others join and leave; it may resume."""
    groups = [service for service in world.services if service.processor.members > 1]
    if not groups:
        return
    service, waiting = groups[a % len(groups)], len(world.stale)
    if service.processor.source in world.spec.roots:
        world.write(service.processor.source, 1 + b % 6)
    point = _point(service, c), (c >> 5) % 2
    world.stand_still(lambda: service.share(a >> 8, 1 + b % 16), Script({point: End.PAUSE}))
    for n in range(1 + c % 3):
        script = Script({("deliver", b % 4): ENDS[(b >> 2) % 4]} if b & 16 else {})
        world.under(script, lambda n=n: world.serve(lambda: service.share((a >> 8) + n + 1, 1 + b % 16)))  # type: ignore[misc]
    if len(world.stale) > waiting and c & 4:
        world.go_on(waiting)


def _deliver(world: World, a: int, b: int, c: int) -> None:
    """Resume a suspended service."""
    world.go_on(a)


def _rewind(world: World, a: int, b: int, c: int) -> None:
    """Set a service's offset back; not while its topic grows, because setting offsets removes the group's notes."""
    if world.services and not world.services[a % len(world.services)].grows:
        world.services[a % len(world.services)].rewind(b, 1 + c % 30)


def _engine(world: World, a: int, b: int, c: int) -> None:
    """Let the engine fold a batch, or die or fail at one of its effects."""
    ends: dict[int | tuple[str, int], End] = {}
    if b & 1:
        point = POINTS[(b >> 3) % len(POINTS)]
        ends[point, (b >> 8) % _EPOCH_EFFECTS if point == "epoch" else (b >> 8) % 4 // 3] = ENDS[c % 4]
    if b % 8 == 6:
        ends["write", (b >> 3) % 6] = ENDS[(c >> 2) % 4]
    if b % 8 in (2, 3):
        # Few batches contain dead letters.
        ends["dead_letter", 0] = ENDS[(c >> 2) % 4]
    script = Script(ends)
    world.under(script, lambda: world.engine(1 + a % 10))


def _slow(world: World, a: int, b: int, c: int) -> None:
    """Make one partition of the flow's topic lag from now on, or no longer."""
    world.slow = a % 6 - 2


def _kill(world: World, a: int, b: int, c: int) -> None:
    """Let the engine die between two batches. Sometimes an operator tries to start it with another definition."""
    world.driver = None
    if a % 3 == 0 and any(store.load_manifest(world.live.ref) for store in world.stores.values()):
        change = list(Change)[(a >> 2) % len(Change)]
        try:
            world.start(change)
        except RunRefusedError:
            return
        raise Violation(f"the engine starts although its flow was changed after it had begun: {change}")


def _zombie(world: World, a: int, b: int, c: int) -> None:
    """Suspend the engine before one of its effects."""
    world.zombie(1 + a % 10, (POINTS[b % len(POINTS)], (b >> 8) % 2))


def _wake(world: World, a: int, b: int, c: int) -> None:
    """Resume a suspended engine."""
    world.wake(a)


def _duel(world: World, a: int, b: int, c: int) -> None:
    """Suspend the engine before its writes, let another one take over and work, then resume the first one."""
    waiting = len(world.zombies)
    world.zombie(1 + a % 10, [("persist", 0), ("write", 1), ("persist", 1), ("write", 3)][b % 4])
    for n in range(c % 3):
        world.engine(1 + (a >> n) % 10)
    if len(world.zombies) > waiting:
        world.wake(waiting)


def _grow(world: World, a: int, b: int, c: int) -> None:
    """Add a partition to a topic."""
    if not world.spec.growth:
        return
    topic = _topic(world, a)
    if world.spec.growth != "lagging" and len(topic.partitions) >= _MOST_DRAINED:
        return
    if world.spec.growth == "lagging" and (topic.topic == FINAL or c % 4):
        _grow_behind(world, a >> 4, b, c >> 2)
        return
    readers = [service for service in world.services if service.processor.source == topic.topic]
    if world.spec.growth == "lagging" and len(readers) == 1:
        _grow_source(world, readers[0], a >> 4, b, c >> 2)
        return
    if world.spec.growth != "undrained":
        world.resolve()
    if len(topic.partitions) < _MOST_DRAINED:
        world.cluster.grow(topic.topic)
        if world.spec.growth != "undrained":
            for service in world.services:
                if service.processor.source == topic.topic:
                    world.serve(service.drain)  # a member runs and sees it
        if topic.topic in world.spec.sources:
            # If it were read again from before the growth, a key's records would come from two partitions at once.
            world.replayable = False
            world.copies.clear()


def _grow_behind(world: World, a: int, b: int, c: int) -> None:
    """Add a partition to the flow's topic while another one has unread records, and lags from then on.

    Producers learn of the new one later. The engine may have read everything before, may see the growth before the
    producers, and may die after it.
    """
    log = world.cluster.topics[FINAL]
    if len(log.partitions) >= _MOST_PARTITIONS:
        return
    # Nothing records the number of partitions from before a flow began to read a topic.
    if c & 3:
        world.slow = -1
    world.engine(1000 if c & 3 else 1)
    if c & 256:
        _pass_on(world, 6 + a % 6)
    world.cluster.grow(FINAL, learned=METADATA_MAX_AGE * (b % 16) / 16)
    # Nor from when a copy of the stores was made; and a record may be rejected since and redriven to a new partition.
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
    """Double the partitions of a service's topic while records are unread, and let the service see it.

    Producers learn of the new ones later. A growth that no member sees, or during another one, would be refused.
    """
    log = world.cluster.topics[service.processor.source]
    world.resolve()
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
    """Write events, and let services pass them on as far as a topic."""
    for root in world.spec.roots:
        world.write(root, count)
    ahead = {topic}
    for processor in world.spec.processors[::-1] * 2:
        ahead |= {processor.source} if ahead & {*processor.targets} else set()
    for service in world.services:
        if service.processor.source in ahead - {topic}:
            world.serve(service.drain)


def _recreate(world: World, a: int, b: int, c: int) -> None:
    """Delete a topic and create it again, after all its records are read; a service may be waiting for more."""
    if not world.spec.recreates:
        return
    world.resolve()
    topic = _topic(world, a)
    readers = [service for service in world.services if service.processor.source == topic.topic]
    waiting = len(world.stale)
    if readers and b % 2:
        script = Script()
        world.stand_still(lambda: readers[c % len(readers)].wait(1 + b % 8, script.pause), script)
    world.cluster.create(topic.topic, len(topic.partitions), late_commits=bool(c & 8))
    if topic.topic in world.spec.roots and len(world.stale) > waiting:
        world.write(topic.topic, 1 + c % 6)
        world.go_on(waiting)
    world.copies.clear()
    if topic.topic in world.spec.sources:
        world.replayable = False
        world.driver = None
    if world.audit and topic.topic == world.audit.topic:
        world.audit.driver = None


def _trim(world: World, a: int, b: int, c: int) -> None:
    """Let retention delete the records that every reader has read."""
    log = _topic(world, a)
    for number, partition in enumerate(log.partitions):
        readers = [service for service in world.services if service.processor.source == log.topic]
        passed = [reader.committed(log.topic, number) for reader in readers]
        if log.topic in world.spec.sources:
            manifests = [store.load_manifest(world.live.ref) for store in world.stores.values()]
            # A manifest of another incarnation is not about this one.
            same = all(one is None or one.topic_ids.get(log.topic) == log.topic_id for one in manifests)
            passed.append(minimum(manifests).get(log.topic, {}).get(number, 0) if same else 0)
        if world.audit and log.topic == world.audit.topic:
            passed.append(world.audit.committed(number))
        partition.low = max(partition.low, min([*passed, partition.high]))
    if log.topic in world.spec.sources:
        world.replayable = False
        world.copies.clear()


def _redrive(world: World, a: int, b: int, c: int) -> None:
    """Redrive dead letters of the flow, of the second flow or of a republisher, most of them mended."""
    spec = world.spec
    others = [*([AUDIT] if spec.audit else []), *(one.name for one in spec.processors if one.refusing and spec.revives)]
    name = others[a % len(others)] if others and c % 2 else FLOW
    letters = world.letters_of(name)
    for _ in range(1 + (c >> 1) % 3):
        if world.redriven[name] < len(letters):
            # In the order of the dead-letter topic, or once more.
            world.redriven[name] += b % 4 > 0
            world.bring_back(letters[max(world.redriven[name] - 1, 0)], mend=b % 8 != 1)


def _mend(world: World, a: int, b: int, c: int) -> None:
    """Let the flow accept from now on what it rejected: first from services that send again, then from dead letters.

    Dead letters without a hole, of records that were not proven first deliveries, must be redriven before.
    """
    if not world.spec.mends or OUTAGE.over:
        return
    world.resolve()
    for _ in range(2):
        _pass_on(world, 12)  # no process died meanwhile, so the records rejected now are first deliveries
        world.resolve()
    first = [letter for letter in world.letters if world.is_listed_where_it_died(letter)]
    OUTAGE.over = True
    world.oracle.over()
    for letter in first:
        world.bring_back(letter, mend=False)
    world.resolve()
    for service in world.services:
        for partition in range(0 if service.grows else 3):
            service.rewind(partition, 1 + b % 60)
        world.serve(service.drain)
    for _ in range(c % 3):
        world.under(Script({("persist", (c >> 4) % 2): ENDS[(c >> 2) % 4]} if c & 8 else {}), lambda: world.engine(20))
        world.check()
    for letter in world.letters:
        if letter not in first:
            world.bring_back(letter, mend=False)


def _audit(world: World, a: int, b: int, c: int) -> None:
    """Let the second flow fold a batch, or die or fail at one of its effects."""
    if world.audit:
        audit = world.audit
        script = Script({(POINTS[(b >> 3) % len(POINTS)], (b >> 8) % 2): ENDS[c % 4]} if b & 1 else {})
        world.under(script, lambda: audit.engine(1 + a % 12))


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
    "snapshot": (2, snapshot),
    "restore": (3, restore),
    "redrive": (7, _redrive),
    "back": (2, back),
    "audit": (8, _audit),
    "mend": (2, _mend),
    "repair": (0, repair),
    "rebuild": (0, rebuild),
    "cut": (0, cut),
}
"""Weight and function by kind of step. A world has eighty steps; repairs, rebuilds and cuts are added to them."""
