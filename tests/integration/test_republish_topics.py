"""What can happen to the topics of a republisher, and to their broker."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from envelope import decode
from jobs import stack
from jobs.republish import InputTopics, Republisher, identity
from persistence.commit.faults import REPUBLISH_COMMIT, NoFaults, use
from persistence.kafka import AcknowledgedProducer, BrokerUnavailable, KafkaSettings, Topics
from tests.integration.republish_process import split
from tests.support.republish import INPUTS, Make, expected, outputs, process, produce, read_all, run, wrapped

pytestmark = pytest.mark.integration


def test_added_partitions_are_read_from_their_beginning(settings: KafkaSettings, topic: Make, topics: Topics) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:100])
    arguments: dict[str, Any] = {
        "source": InputTopics.of(source, "raw"),
        "target": target,
        "group": group,
        "transform": split,
    }
    run(settings, **arguments)
    topics.add_partitions(source, 4)
    run(settings, **arguments)  # everything is read, so nothing has to wait
    assert topics.group_offsets(group, [source]) == {(source, 0): 100, (source, 1): 0, (source, 2): 0, (source, 3): 0}
    produce(settings, source, INPUTS[100:300])
    run(settings, **arguments)
    copies = outputs(settings, target)
    assert set(copies) == set(expected(settings, source))
    assert {len(values) for values in copies.values()} == {1}


def test_partitions_added_while_a_static_member_is_away_are_read_when_it_is_back(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    arguments = {
        "bootstrap": settings.bootstrap,
        "options": {"group.instance.id": "one"},
        "source": source,
        "kind": "raw",
        "target": target,
        "name": "r",
        "group": group,
        "max_wait": 0.1,
        "accept": ["grown-undrained"],
    }
    for partitions, records in ((1, INPUTS[:50]), (3, INPUTS[50:400])):
        if partitions > 1:
            topics.add_partitions(source, partitions)
        produce(settings, source, records)
        member = process(**arguments)
        ends = {place: marks.high for place, marks in topics.marks([source]).items()}
        assert len(ends) == partitions and all(ends.values())
        while topics.group_offsets(group, [source]) != ends:
            assert member.poll() is None
        member.kill()  # its place in the group is kept for as long as its session lasts
        member.communicate()
    assert set(outputs(settings, target)) == set(expected(settings, source))


def test_a_topic_that_was_created_again_gives_chains_with_its_new_id(settings: KafkaSettings, topics: Topics) -> None:
    source, target, group = (f"{name}-{uuid.uuid4().hex}" for name in ("in", "out", "group"))
    topics.create(target, 1)
    ids = []
    for _ in range(2):
        ids.append(topics.create(source, 1).topic_id)
        produce(settings, source, [(b"k", b"0:a")])
        run(settings, split, source=InputTopics.of(source, "raw"), target=target, group=group)
        topics.delete([source])
    assert [decode(m.value()).chain[0].topic_id for m in read_all(settings, target)] == ids
    topics.delete([target])


@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.parametrize("kind", ["raw", "envelope"])
def test_a_topic_created_again_under_a_running_republisher_is_noticed(
    before: int, kind: str, settings: KafkaSettings, topics: Topics
) -> None:
    source, target, group = (f"{name}-{uuid.uuid4().hex}" for name in ("in", "out", "group"))
    inputs = INPUTS if kind == "raw" else wrapped(INPUTS)
    topics.create(target, 1)
    first = topics.create(source, 1).topic_id
    produce(settings, source, inputs[:before])
    republisher = Republisher(
        identity,
        source=InputTopics.of(source, kind),
        target=target,
        name="r",
        group=group,
        settings=settings,
        max_wait=0.1,
    )
    thread = threading.Thread(target=republisher.run)
    thread.start()
    while republisher.statistics.consumed < before or not republisher.statistics.rebalances:
        assert thread.is_alive()
    topics.delete([source])
    second = topics.create(source, 1).topic_id
    produce(settings, source, inputs[:30])
    wanted = {(first, offset) for offset in range(before)} | {(second, offset) for offset in range(30)}
    found: set[tuple[str, int]] = set()
    while found != wanted:
        assert thread.is_alive()
        hops = [decode(message.value()).chain[-1] for message in read_all(settings, target)]
        found = {(hop.topic_id, hop.offset) for hop in hops}
        assert found <= wanted
    republisher.stop()
    thread.join(60)
    topics.delete([source, target])


def test_a_republisher_that_was_frozen_while_its_topic_was_created_again_reads_all_of_the_new_one(
    settings: KafkaSettings, topics: Topics
) -> None:
    source, target, group = (f"{name}-{uuid.uuid4().hex}" for name in ("in", "out", "group"))
    topics.create(target, 1)
    ids = [topics.create(source, 1).topic_id]
    produce(settings, source, INPUTS[:50])
    frozen = process(
        bootstrap=settings.bootstrap, source=source, kind="raw", target=target, name="split", group=group, max_wait=0.1
    )
    try:
        while topics.group_offsets(group, [source]) != {(source, 0): 50}:
            assert frozen.poll() is None
        frozen.send_signal(signal.SIGSTOP)
        topics.delete([source])
        ids.append(topics.create(source, 1).topic_id)
        produce(settings, source, INPUTS[100:300])  # beyond where it stands: it goes on there, left to the client
        frozen.send_signal(signal.SIGCONT)
        while topics.group_offsets(group, [source]) != {(source, 0): 200}:
            assert frozen.poll() is None
        frozen.send_signal(signal.SIGTERM)
        frozen.communicate(timeout=60)
    finally:
        frozen.kill()
    made = expected(settings, source)
    wanted = {(ids[1], offset, index) for _, _, offset, index, _ in made}
    hops = [decode(message.value()).chain[0] for message in read_all(settings, target)]
    found = [(hop.topic_id, hop.offset, hop.index) for hop in hops if hop.topic_id == ids[1]]
    assert (set(found), len(found)) == (wanted, len(wanted))
    assert {hop.offset for hop in hops if hop.topic_id == ids[0]} <= set(range(50))
    topics.delete([source, target])


@pytest.mark.parametrize(("of", "read"), [("the topic", 150), ("an earlier topic", 200), ("another tool", 150)])
def test_an_offset_that_counts_in_an_earlier_topic_is_not_gone_on_from(
    of: str, read: int, settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:200])
    current = topics.topic_ids([source])[source]
    said = {"the topic": current, "an earlier topic": topics.topic_ids([target])[target], "another tool": ""}[of]
    consumer = Consumer(settings.client(group_id=group, enable_auto_commit=False))
    consumer.commit(offsets=[TopicPartition(source, 0, 50, metadata=said)], asynchronous=False)
    consumer.close()
    arguments: dict[str, Any] = {"source": InputTopics.of(source, "raw"), "target": target, "group": group}
    assert run(settings, **arguments).consumed == read
    assert [at.metadata for at in _committed(settings, group, source)] == [f"{current} 1"]
    assert run(settings, **arguments).consumed == 0


def _committed(settings: KafkaSettings, group: str, topic: str) -> list[TopicPartition]:
    consumer = Consumer(settings.client(group_id=group, enable_auto_commit=False))
    try:
        return consumer.committed([TopicPartition(topic, 0)], timeout=20)
    finally:
        consumer.close()


def test_what_retention_deleted_is_counted_and_the_rest_goes_on(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:10])
    topics.alter_group_offsets(group, {(source, 0): 2})
    admin, upto = AdminClient(settings.client()), TopicPartition(source, 0, 6)
    admin.delete_records([upto])[upto].result(20)
    counts = run(settings, split, source=InputTopics.of(source, "raw"), target=target, group=group)
    assert (counts.expired, counts.consumed) == (4, 4)


def test_aborted_transactions_and_markers_leave_gaps_and_no_messages(settings: KafkaSettings, topic: Make) -> None:
    source, target = topic(1, "in"), topic(1, "out")
    producer = Producer(settings.client(transactional_id=uuid.uuid4().hex))
    producer.init_transactions(20)
    for i, commit in enumerate((True, False, True, False)):
        producer.begin_transaction()
        producer.produce(source, b"%d:a" % i, b"k")
        if commit:
            producer.commit_transaction(20)
        else:
            producer.flush(20)
            producer.abort_transaction(20)
    counts = run(settings, split, source=InputTopics.of(source, "raw"), target=target)
    assert (counts.consumed, counts.expired) == (2, 0)
    assert [decode(m.value()).payload for m in read_all(settings, target)] == [b"0/a", b"2/a"]


@contextmanager
def own_broker(root: Path, partitions: int = 1) -> Iterator[KafkaSettings]:
    """A broker for one test, which may end it, with the topics `in` and `out`."""
    settings = KafkaSettings(stack.up(root).kafka)
    try:
        for name in ("in", "out"):
            Topics(settings, timeout=60).create(name, partitions)
        yield settings
    finally:
        stack.down(root)


def kill(root: Path) -> None:
    """Kill that broker."""
    broker = stack.up(root).find("kafka")
    assert broker
    os.kill(broker.pid, signal.SIGKILL)
    os.waitpid(broker.pid, 0)


def kill_and_start_again(root: Path) -> str:
    """Kill that broker, start it on the same data and return its address."""
    kill(root)
    return stack.up(root).kafka


@pytest.mark.slow
def test_a_broker_that_dies_and_comes_back_costs_neither_messages_nor_the_service(tmp_path: Path) -> None:
    """It forwards through librdkafka's C API."""
    with own_broker(tmp_path, partitions=2) as settings:
        republisher = Republisher(identity, source="in", target="out", name="r", settings=settings, max_wait=0.1)
        thread = threading.Thread(target=republisher.run)
        thread.start()
        produce(settings, "in", wrapped(INPUTS[:500]))
        while not republisher.statistics.consumed:
            assert thread.is_alive()
        assert kill_and_start_again(tmp_path) == settings.bootstrap
        produce(settings, "in", wrapped(INPUTS[500:]))
        topics = Topics(settings, timeout=60)
        ends = {place: marks.high for place, marks in topics.marks(["in"]).items()}
        while topics.group_offsets("r", ["in"]) != ends:
            assert thread.is_alive()
        republisher.stop()
        thread.join(60)
        assert not thread.is_alive()
        hops = [decode(one.value()).chain[-1] for one in read_all(settings, "out")]
        own = {(hop.topic, hop.partition, hop.offset) for hop in hops}
        assert own == {("in", one.partition(), one.offset()) for one in read_all(settings, "in")}
        assert len(own) == len(INPUTS)


@pytest.mark.slow
def test_a_static_member_whose_broker_was_away_for_a_session_sees_partitions_that_are_added(tmp_path: Path) -> None:
    with own_broker(tmp_path) as settings:
        static = settings.with_options(
            group_instance_id="one", session_timeout_ms="6000", topic_metadata_refresh_interval_ms="5000"
        )
        republisher = Republisher(
            identity,
            source="in",
            target="out",
            name="r",
            settings=static,
            max_wait=0.1,
            metadata_max_age=0,
        )
        thread = threading.Thread(target=republisher.run, daemon=True)
        thread.start()
        produce(settings, "in", wrapped(INPUTS[:50]))
        topics = Topics(settings, timeout=60)

        def await_commits() -> None:
            ends = {place: marks.high for place, marks in topics.marks(["in"]).items()}
            deadline = time.monotonic() + 90
            while topics.group_offsets("r", ["in"]) != ends:
                assert thread.is_alive()
                assert time.monotonic() < deadline, f"{topics.group_offsets('r', ['in'])}, not {ends}"
                time.sleep(0.2)

        await_commits()
        topics.add_partitions("in", 3)
        kill(tmp_path)
        time.sleep(6)  # behind the session, and the client joins again by itself when the broker is back
        assert stack.up(tmp_path).kafka == settings.bootstrap
        produce(settings, "in", wrapped(INPUTS[50:]))
        await_commits()
        republisher.stop()
        thread.join(60)


@pytest.mark.slow
def test_what_a_broker_was_too_long_away_for_never_arrives_behind_what_was_sent_later(tmp_path: Path) -> None:
    with own_broker(tmp_path) as settings, AcknowledgedProducer(settings, delivery_timeout=20) as producer:
        producer.send("in", b"first")
        producer.flush()
        kill(tmp_path)
        producer.send("in", b"a")
        time.sleep(8)
        producer.send("in", b"b")
        # The start takes some twelve seconds: a message.timeout.ms of 20 s would let "a" out and "b" in.
        assert stack.up(tmp_path).kafka == settings.bootstrap
        producer.flush()
        assert [message.value() for message in read_all(settings, "in")] == [b"first", b"a", b"b"]


@pytest.mark.slow
def test_a_broker_that_dies_in_front_of_a_commit_and_stays_away_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.republish.offsets.PATIENCE_SECONDS", 3.0)

    class Dies(NoFaults):
        def effect(self, point: str, action: Any) -> Any:
            if point == REPUBLISH_COMMIT:
                stack.down(tmp_path)
            return action()

    with own_broker(tmp_path) as settings:
        produce(settings, "in", INPUTS[:50])
        republisher = Republisher(
            identity, source=InputTopics.of("in", "raw"), target="out", name="r", settings=settings, max_wait=0.1
        )
        with use(Dies()), pytest.raises(BrokerUnavailable, match="committing the input offsets: no answer for 3 s"):
            republisher.run()


@pytest.mark.slow
def test_a_topic_created_again_after_a_restart_of_its_broker_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.republish.input._LOOK_SECONDS", 5.0)
    with own_broker(tmp_path) as settings:
        produce(settings, "in", INPUTS[:50])
        kill_and_start_again(tmp_path)  # the partition's leader epoch is 1 now, that of the new topic will be 0
        republisher = Republisher(
            identity, source=InputTopics.of("in", "raw"), target="out", name="r", settings=settings, max_wait=0.1
        )
        thread = threading.Thread(target=republisher.run, daemon=True)
        thread.start()
        topics = Topics(settings, timeout=60)
        while topics.group_offsets("r", ["in"]) != {("in", 0): 50}:
            assert thread.is_alive()
        topics.delete(["in"])
        topics.create("in", 1)
        produce(settings, "in", INPUTS[:30])
        while topics.group_offsets("r", ["in"]) != {("in", 0): 30}:
            assert thread.is_alive()
        republisher.stop()
        thread.join(60)
        assert republisher.statistics.consumed == 80
