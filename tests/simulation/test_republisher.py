"""The republishers of the simulated worlds are the real ones: its code runs, on clients of a simulated broker."""

from collections import Counter

import pytest
from confluent_kafka import KafkaException, TopicPartition

from jobs.republish import service as real
from jobs.republish.input import Input, TopicReplaced
from jobs.republish.passage import Passage
from jobs.republish.worker import Worker
from jobs.simulation.clients import Session, SimulatedConsumer, simulated_clients
from jobs.simulation.kafka import Cluster
from jobs.simulation.service import Outgoing, Service, payload_of, rooted
from jobs.simulation.shrink import outcome
from jobs.simulation.topology import Passage as Spec
from persistence.kafka import AcknowledgedProducer

WAYS = (
    (Passage, "process"),
    (Passage, "detour"),
    (Worker, "_bury"),
    (Input, "hold"),
    (Input, "wake"),
    (Input, "_on_lost"),
    (Input, "_check_topics"),
)


@pytest.fixture
def walked(monkeypatch):
    """How often each way was walked."""
    counts = Counter()

    def counting(name, real):
        def walk(*arguments, **options):
            counts[name] += 1
            try:
                return real(*arguments, **options)
            except TopicReplaced:
                counts["topic replaced"] += 1
                raise

        return walk

    for owner, name in WAYS:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    express = Passage.express

    def short(self):
        way = express(self)
        return way and counting("express", way)

    monkeypatch.setattr(Passage, "express", short)
    return counts


def test_worlds_walk_every_way_through_the_republisher(walked):
    assert not any(outcome(seed) for seed in range(40))
    assert set(walked) == {name for _, name in WAYS} | {"topic replaced", "express"}


@pytest.fixture
def broker():
    """A broker with a passage's topics and three events in its source."""
    cluster, passage = Cluster(), Spec("p", "in", "out")
    for topic in ("in", "out", passage.dead):
        cluster.create(topic, 1)
    for number in range(3):
        cluster.produce("in", b"k0", rooted({"id": f"e{number}", "k": "k0"}))
    return cluster


def deliver_to(cluster):
    def deliver(output: Outgoing):
        cluster.produce(output.topic, output.key, output.value)

    return deliver


def ids(cluster, topic):
    return [payload_of(record.value)["id"] for record in cluster.topics[topic].records()]


def test_a_life_goes_on_where_the_last_one_has_committed(broker):
    service = Service(Spec("p", "in", "out"), broker, deliver_to(broker))
    with simulated_clients():
        service.step(0, 0, 2)
        assert (ids(broker, "out"), service.lag()) == (["e0/p.0", "e1/p.0"], 1)
        service.drain()
    assert (ids(broker, "out"), service.lag()) == (["e0/p.0", "e1/p.0", "e2/p.0"], 0)


def test_who_was_replaced_in_the_group_commits_nothing(broker):
    first, second = (SimulatedConsumer({"session": Session(broker, print, {}), "group.id": "p"}) for _ in range(2))
    nobody = {"on_assign": print, "on_revoke": print, "on_lost": print}
    first.subscribe(["in"], **nobody)
    first.commit([TopicPartition("in", 0, 1)], asynchronous=False)
    second.subscribe(["in"], **nobody)
    with pytest.raises(KafkaException, match="generation"):
        first.commit([TopicPartition("in", 0, 3)], asynchronous=False)
    assert broker.committed("p", "in", 0) == 1


def test_the_real_clients_are_back_when_the_worlds_are_through():
    with simulated_clients():
        assert real.AcknowledgedProducer is not AcknowledgedProducer
    assert real.AcknowledgedProducer is AcknowledgedProducer
