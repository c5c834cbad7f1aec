"""Partitions are added to the source of several members that lag, die or are suspended: each key keeps its order."""

from collections import defaultdict
from random import Random
from typing import Any

import pytest

from jobs.republish import Republisher, identity
from jobs.republish.absence import Unsafe
from jobs.republish.counts import TopicGrowth
from jobs.republish.growth import Note
from tests.simulation.clients import simulated_clients
from tests.simulation.driver import METADATA_MAX_AGE
from tests.simulation.faults import ENDS, End, Script
from tests.simulation.kafka import CLOCK, Cluster
from tests.simulation.life import Life
from tests.simulation.planted import planted
from tests.simulation.service import Service, payload_of, rooted
from tests.simulation.steps import SERVICE_POINTS
from tests.simulation.topology import FINAL, Processor, Spec, StageSpec, event
from tests.simulation.world import World

SEEDS = 30


def spec(random):
    processor = Processor("p0", "r0", FINAL, members=random.choice([1, 2, 3]), static=random.random() < 0.3)
    partitions = {"r0": random.choice([1, 2, 2]), FINAL: 1}
    return Spec(
        ("r0",), partitions, (processor,), (StageSpec("s0", "k"),), history=512, lanes=64, split=1, growth="lagging"
    )


def write(world, random):
    for _ in range(random.randint(4, 20)):
        world.produce("r0", event(world.spec, f"e{len(world.oracle.events)}"))


def live(world, random):
    """A member works on its partitions, on one of them, or alone; or it dies, or is suspended."""
    service = world.services[0]
    number, limit = random.randrange(8), random.randint(1, 12)
    work = random.choice(
        [lambda: service.share(number, limit), lambda: service.step(number, limit), lambda: service.turn(limit)]
    )
    place = random.choice(SERVICE_POINTS), random.randrange(4)
    fate = random.random()
    if fate < 0.2:
        world.stand_still(work, Script({place: End.PAUSE}))
    else:
        script = Script({place: random.choice(ENDS)} if fate < 0.5 else {})
        world.under(script, lambda: world.serve(work))


def grow(world, random):
    """Partitions are doubled during a backlog while one member has them all; others may resume later."""
    service, log = world.services[0], world.cluster.topics["r0"]
    if len(log.partitions) > 4 or service.grows:
        return  # a further growth during a growth is refused
    script, waiting, limit = Script(), len(world.stale), random.randint(1, 6)
    world.stand_still(lambda: service.wait(limit, script.pause), script)
    write(world, random)
    world.cluster.grow("r0", by=len(log.partitions), learned=METADATA_MAX_AGE * random.random())
    write(world, random)
    if len(world.stale) > waiting:
        world.go_on(waiting)


def wake(world, random):
    world.go_on(random.randrange(8))


def sleep(world, random):
    CLOCK.sleep(METADATA_MAX_AGE * random.random())


def drawn(random):
    kinds = random.choices([write, live, wake, sleep, grow], [4, 12, 2, 2, 2], k=60)
    return [lambda world, kind=kind: kind(world, random) for kind in kinds]


def out_of_order(world):
    """Keys with a record at the target before an older one; of copies, the first counts."""
    seen: defaultdict[bytes | None, list[int]] = defaultdict(list)
    for record in world.cluster.topics[FINAL].records():
        number, numbers = int(payload_of(record.value)["id"].partition("/")[0][1:]), seen[record.key]
        if number not in numbers:
            numbers.append(number)
    return [key for key, numbers in seen.items() if numbers != sorted(numbers)]


def grown(seed):
    """A world at its end."""
    random = Random(f"growth {seed}")
    world = World(spec(random))
    world.run(drawn(random))
    return world


def test_the_order_of_each_key_is_kept_however_members_come_and_go():
    worlds = [grown(seed) for seed in range(SEEDS)]
    assert not [seed for seed, world in enumerate(worlds) if out_of_order(world)]
    assert {len(world.cluster.topics["r0"].partitions) for world in worlds} >= {2, 4, 8}


@pytest.mark.parametrize(
    "bug", ["service-reads-new-partitions-at-once", "service-trusts-one-end", "service-forgets-growth"]
)
def test_a_planted_bug_shows_in_the_order(bug):
    with planted(bug):
        assert any(out_of_order(grown(seed)) for seed in range(SEEDS))


def test_ends_that_are_taken_while_producers_do_not_know_of_new_partitions_show_in_the_order(monkeypatch):
    taken = Note.grown
    monkeypatch.setattr(Note, "grown", lambda self, now, clock_ms, max_age_ms, end: taken(self, now, clock_ms, 0, end))
    assert any(out_of_order(grown(seed)) for seed in range(SEEDS))


PASSAGE = Processor("p", "in", "out", members=2)


@pytest.fixture
def broker():
    """A broker with a service's topics: two partitions, each with two events that are read."""
    cluster = Cluster()
    for name, partitions in (("in", 2), ("out", 1), (PASSAGE.dead, 1)):
        cluster.create(name, partitions)
    for number in range(4):
        produce(cluster, number, number % 2)
    with simulated_clients():
        service_of(cluster).drain()
        yield cluster


def produce(cluster, number, partition):
    cluster.produce("in", b"k", rooted({"id": f"e{number}", "k": "k"}), partition=partition)


def service_of(cluster, **options):
    def deliver(out):
        cluster.produce(out.topic, out.key, out.value, headers=out.headers)

    return Service(PASSAGE, cluster, deliver, **options)


def ids(cluster):
    """What is at the target, each once."""
    records = cluster.topics["out"].records()
    return list(dict.fromkeys(int(payload_of(record.value)["id"].partition("/")[0][1:]) for record in records))


def notes(cluster):
    """What the group has noted, without the topic's id and the time."""
    found = sorted((at[2], Note.read(one.metadata)) for at, one in cluster.groups.items() if at[1] == "in")
    return [(note.resolved, note.now, note.until) for _, note in found]


def watched(cluster, *, by, unread=3):
    """A life during which partitions are added, with later records in old and new ones."""

    def grow():
        for number in range(4, 4 + unread):
            produce(cluster, number, 0)
        cluster.grow("in", by=by)
        for number in range(10, 10 + unread):
            produce(cluster, number, 2)

    service = service_of(cluster)
    service.wait(1, grow)
    return service


def long_life(cluster, revoked=-1, **options):
    """A member with all the time in the world, that is stopped when it has read everything it may."""
    places = [("in", number) for number in range(9)]
    life: Any = Life(cluster, service_of(cluster)._sent, dict.fromkeys(places, 99), idle=200, revoked=revoked)
    made = Republisher(
        lambda record: identity(record),
        source="in",
        target="out",
        name="p",
        settings=life,
        metadata_max_age=METADATA_MAX_AGE,
        **options,
    )
    life.stop = made.stop
    shown = []
    made.run(progress=lambda done: shown.append(dict(done.growing)))
    return shown


def test_a_group_knows_how_many_partitions_there_are_before_it_has_read_anything(broker):
    broker.create("in", 3)
    with simulated_clients():
        service_of(broker).drain()
    assert notes(broker) == [(3, 0, None)] * 3


def test_new_partitions_wait_until_the_old_ones_are_read_to_their_ends(broker):
    service = watched(broker, by=2)
    assert ids(broker) == [0, 2, 1, 3, 4]
    assert notes(broker) == [(2, 4, None)] * 4
    service.drain()
    assert ids(broker)[5:] == [5, 6]
    CLOCK.sleep(METADATA_MAX_AGE)
    produce(broker, 7, 1)
    shown = long_life(broker)
    assert ids(broker)[5:] == [5, 6, 7, 10, 11, 12]
    assert shown[0] == {"in": TopicGrowth(2, 4, unread=1)}
    assert not shown[-1]
    assert notes(broker) == [(4, 0, None)] * 4


def test_new_partitions_are_read_at_once_when_nothing_was_unread(broker):
    service_of(broker).wait(9, lambda: broker.grow("in"))
    service_of(broker).drain()
    assert notes(broker) == [(3, 0, None)] * 3
    produce(broker, 4, 2)
    service_of(broker).drain()
    assert ids(broker)[4:] == [4]


@pytest.mark.parametrize("by", [1, 2])
def test_a_growth_that_no_order_can_be_kept_in_is_refused_and_can_be_accepted(broker, by):
    """A growth that is not a multiple, seen or not; and one that no member saw."""
    if by == 1:
        watched(broker, by=1)
    else:
        produce(broker, 4, 0)
        broker.grow("in", by=2)
    began = CLOCK.monotonic()
    with pytest.raises(Unsafe, match=rf"group p: topic in grew from 2 to {2 + by} .*--accept grown-undrained"):
        long_life(broker)
    assert CLOCK.monotonic() - began >= 10, "another member may have seen more"
    assert ids(broker) == [0, 2, 1, 3]
    long_life(broker, accept=["grown-undrained"])
    assert notes(broker) == [(2 + by, 0, None)] * (2 + by)
    assert set(ids(broker)) >= {0, 1, 2, 3, 4}
    long_life(broker)


def test_a_second_growth_during_the_first_is_refused(broker):
    watched(broker, by=2)
    broker.grow("in", by=4)
    with pytest.raises(Unsafe, match="grew from 2 to 8 partitions"):
        long_life(broker)


def test_a_growth_is_forgotten_with_the_topic(broker):
    watched(broker, by=2)
    broker.create("in", 4, late_commits=True)
    produce(broker, 20, 3)
    service_of(broker).drain()
    assert notes(broker) == [(4, 0, None)] * 4
    assert ids(broker)[-1] == 20


@pytest.mark.parametrize("look", range(1, 7))
def test_a_partition_that_waited_is_read_when_it_comes_back_after_the_growth(broker, look):
    """The client finds it paused, as it left it."""
    service = watched(broker, by=2)
    CLOCK.sleep(METADATA_MAX_AGE)
    service.step(1, 1)
    assert notes(broker)[0] == (2, 4, 5)
    long_life(broker, revoked=look)
    assert ids(broker)[-5:] == [5, 6, 10, 11, 12]
