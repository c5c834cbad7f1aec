"""The republishers of the simulated worlds are the real ones: its code runs, on clients of a simulated broker."""

import importlib
import pkgutil
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from jobs import republish
from jobs.republish import counts, pointers, processor, roots
from jobs.republish import input as reading
from jobs.republish.express import Express
from jobs.republish.input import Input
from jobs.republish.offsets import MemberFenced
from jobs.republish.topic_check import TopicCheck, TopicReplaced
from jobs.republish.worker import Worker
from persistence.kafka import AcknowledgedProducer
from tests.simulation import service as service_module
from tests.simulation.clients import TIMED, simulated_clients
from tests.simulation.consumer import SimulatedConsumer
from tests.simulation.kafka import CLOCK, Cluster
from tests.simulation.life import Life
from tests.simulation.service import RETRY_SECONDS, Service, payload_of, rooted
from tests.simulation.shrink import outcome
from tests.simulation.topology import Processor

WAYS = (
    (processor.Processor, "transformed"),
    (processor.Processor, "detour"),
    (Worker, "_publish_dead_letters"),
    (Input, "hold"),
    (Input, "wake"),
    (Input, "jumped"),
    (Input, "raise_for"),
    (Input, "_on_lost"),
    (Input, "_on_revoke"),
    (Input, "_join_again"),
    (TopicCheck, "finish"),
    (roots.RootEnds, "is_beyond"),
    (AcknowledgedProducer, "_fail"),
    (Express, "passed_on"),
)


@pytest.fixture
def walked(monkeypatch):
    """How often each way was walked."""
    counted: Counter[object] = Counter()

    def counting(name, real):
        def walk(*arguments, **options):
            counted[name] += 1
            try:
                return real(*arguments, **options)
            except (TopicReplaced, MemberFenced) as error:
                counted[type(error)] += 1
                raise

        return walk

    for owner, name in WAYS:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    return counted


def test_worlds_walk_every_way_through_the_republisher(walked):
    assert not any(outcome(seed) for seed in range(60))
    assert set(walked) == {name for _, name in WAYS} | {TopicReplaced, MemberFenced}


PASSAGE = Processor("p", "in", "out", retries=1)


@pytest.fixture
def broker():
    """A broker with a service's topics and three events in its source."""
    cluster = Cluster()
    for topic in ("in", "out", *PASSAGE.retry_topics, PASSAGE.dead):
        cluster.create(topic, 1)
    for number in range(3):
        cluster.produce("in", b"k0", rooted({"id": f"e{number}", "k": "k0"}))
    return cluster


def service_of(cluster, processor=PASSAGE):
    return Service(processor, cluster, lambda out: cluster.produce(out.topic, out.key, out.value, headers=out.headers))


def ids(cluster, topic):
    """Ids in a topic, each once: records read while a partition moved and returned are there twice."""
    return list(dict.fromkeys(payload_of(record.value)["id"] for record in cluster.topics[topic].records()))


def test_a_life_goes_on_where_the_last_one_has_committed(broker):
    service = service_of(broker, replace(PASSAGE, retries=0))
    with simulated_clients():
        service.step(0, 2)
        assert (ids(broker, "out"), service.lag()) == (["e0/p.0", "e1/p.0"], 1)
        service.drain()
    assert (ids(broker, "out"), service.lag()) == (["e0/p.0", "e1/p.0", "e2/p.0"], 0)


def test_the_end_of_a_partition_is_not_reached_while_its_records_wait_for_their_next_try(broker, monkeypatch):
    monkeypatch.setattr(service_module, "_is_trouble", lambda payload, life: True)
    service = service_of(broker)
    with simulated_clients():
        service.drain()
        assert broker.committed("p", "in", 0) == 3
        service.drain()  # it gets the end of the retry topic after records that are not due
        assert (broker.committed("p", "p.retry0", 0), ids(broker, "out")) == (0, [])
        CLOCK.sleep(RETRY_SECONDS)
        service.drain()
    assert ids(broker, "out") == ["e0/p.0", "e1/p.0", "e2/p.0"]


def test_a_life_that_waits_goes_back_to_what_waited(broker, monkeypatch):
    troubled = iter([True, True, False, True])
    monkeypatch.setattr(service_module, "_is_trouble", lambda payload, life: next(troubled))
    service = service_of(broker)

    def due():
        broker.produce("in", b"k0", rooted({"id": "e3", "k": "k0"}))
        CLOCK.sleep(RETRY_SECONDS)

    with simulated_clients():
        service.drain()
        service.lives = 4  # the fifth is one that is not stopped as soon as nothing comes
        service.wait(9, due)  # holds two records, then a third one arrives after them
    assert (ids(broker, "out"), service.lag()) == (["e2/p.0", "e0/p.0", "e1/p.0", "e3/p.0"], 0)


CONSUMER = {
    "group.id": "p",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "earliest",
    "enable.partition.eof": False,
}


def test_who_was_replaced_in_the_group_commits_nothing(broker):
    first, second = (SimulatedConsumer({**CONSUMER, "life": Life(broker, print, {})}) for _ in range(2))
    nobody = {"on_assign": print, "on_revoke": print, "on_lost": print}
    first.subscribe(["in"], **nobody)
    first.commit([TopicPartition("in", 0, 1)], asynchronous=False)
    second.subscribe(["in"], **nobody)
    with pytest.raises(KafkaException, match="generation"):
        first.commit([TopicPartition("in", 0, 3)], asynchronous=False)
    assert broker.committed("p", "in", 0) == 1


class MemberOf:
    """A member of group `p` at one of two places: what it was given, and what it has given up."""

    def __init__(self, cluster, place):
        self.log = []
        self._consumer = SimulatedConsumer({**CONSUMER, "life": Life(cluster, print, {}, place=place, places=2)})
        self._consumer.subscribe(["in"], on_assign=self._given, on_revoke=self._revoked, on_lost=self._lost)

    def poll(self):
        self._consumer.consume(1, 0)
        return self.log

    def _given(self, consumer, parts):
        consumer.incremental_assign(parts)
        self.log += [f"+{part.partition}" for part in parts]

    def _revoked(self, consumer, parts):
        self.log += [f"-{part.partition}" for part in parts]

    def _lost(self, consumer, parts):
        self.log += [f"lost {part.partition}" for part in parts]


def test_members_share_the_partitions_and_get_what_another_one_has_when_it_gives_it_up(broker):
    broker.create("in", 4)
    broker.readers["p"].joined = 1
    with simulated_clients():
        first = MemberOf(broker, 0)
        assert first.poll() == ["+1", "+3"]
        second = MemberOf(broker, 1)
        assert second.poll() == ["+0", "+2"]
        third = MemberOf(broker, 1)  # in the place of the second, and all is dealt out anew
        assert third.poll() == []
        assert first.poll() == ["+1", "+3", "-1", "-3", "+0", "+2"]
        assert third.poll() == ["+1", "+3"]
        assert second.poll()[2:] == ["lost 0", "lost 2", "+1", "+3"]  # and it takes the place again


def test_who_has_the_group_for_itself_takes_every_partition_at_once(broker):
    broker.create("in", 4)
    with simulated_clients():
        member = MemberOf(broker, 0)
        member.poll()
        alone = SimulatedConsumer({**CONSUMER, "life": Life(broker, print, {})})
        given = []
        alone.subscribe(["in"], on_assign=lambda _, parts: given.extend(parts), on_revoke=print, on_lost=print)
        alone.consume(1, 0)
        assert [part.partition for part in given] == [0, 1, 2, 3]
        assert member.poll()[2:4] == ["lost 0", "lost 2"]


def test_a_record_without_a_key_goes_to_another_partition_each_time(broker):
    broker.create("in", 3)
    assert [broker.produce("in", None, b"{}").partition for _ in range(4)] == [0, 1, 2, 0]


def test_the_real_clients_are_back_when_the_worlds_are_through():
    with simulated_clients():
        assert vars(reading)["Consumer"] is SimulatedConsumer
    assert vars(reading)["Consumer"] is Consumer


def test_every_module_of_the_republisher_that_asks_for_the_time_asks_the_simulated_clock():
    modules = [importlib.import_module(one.name) for one in pkgutil.iter_modules(republish.__path__, "jobs.republish.")]
    asking = {module for module in modules if hasattr(module, "time")}
    # `counts` tells people how long it took; `pointers` is for real clients only
    assert asking - {counts, pointers} <= set(TIMED)
