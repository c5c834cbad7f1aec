"""The republisher on a real broker: killed, rebalanced, drained, poisoned."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from envelope import Envelope, Hop, decode, encode
from envelope.deadletter import DeadLetter, own_headers
from jobs import stack
from jobs.republish import Output, Record, Republisher, RetryTopics, Source, Statistics, identity
from persistence import faults
from persistence.errors import Transient
from persistence.kafka import AcknowledgedProducer, BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from tests.integration.republish_process import split

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
Make = Callable[..., str]


@pytest.fixture
def settings(kafka: str) -> KafkaSettings:
    return KafkaSettings(kafka)


@pytest.fixture
def topics(settings: KafkaSettings) -> Topics:
    return Topics(settings, timeout=20)


def produce(settings: KafkaSettings, topic: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> None:
    with AcknowledgedProducer(settings) as producer:
        for key, value in records:
            producer.send(topic, value, key)
        producer.flush()


def read_all(settings: KafkaSettings, topic: str) -> list[Any]:
    """Every record that the topic holds now."""
    left = {(t, p): m.high for (t, p), m in Topics(settings).marks([topic]).items() if m.high > m.low}
    consumer = Consumer(settings.client(group_id=uuid.uuid4().hex, enable_auto_commit=False, enable_partition_eof=True))
    consumer.assign([TopicPartition(t, p, OFFSET_BEGINNING) for t, p in left])
    found: list[Any] = []
    while left:
        got = consumer.consume(1000, 0.2)
        message: Any
        for message in got:
            if message.error():
                left.pop((message.topic(), message.partition()), None)
            else:
                found.append(message)
    consumer.close()
    return found


def run(settings: KafkaSettings, transform: Callable = identity, **arguments: Any) -> Statistics:
    arguments = {"name": "r", "group": uuid.uuid4().hex, **arguments}
    return Republisher(transform, settings=settings, **arguments).run(until_caught_up=True)


def process(faults: str = "", **arguments: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "HEADWATER_FAULT": faults, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.integration.republish_process", json.dumps(arguments)]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def outputs(settings: KafkaSettings, topic: str) -> dict[tuple, list[bytes]]:
    """Root coordinates and fan-out index -> payloads of every copy."""
    copies: dict[tuple, list[bytes]] = defaultdict(list)
    for message in read_all(settings, topic):
        envelope = decode(message.value())
        hop = envelope.chain[0]
        assert (message.key(), hop.rekeyed) == (envelope.key, True)
        copies[hop.topic, hop.partition, hop.offset, hop.index, hop.count].append(message.value())
    return copies


INPUTS = [(b"k%d" % (i % 50), b"%d:%s" % (i, b",".join([b"a", b"b", b"c"][: i % 4]))) for i in range(2000)]
POISON = [(b"p%d" % i, b"poison %d" % i) for i in range(7)]


def expected(settings: KafkaSettings, topic: str) -> dict[tuple, Any]:
    """What has to come out of the records of a topic, by root and index."""
    wanted: dict[tuple, Any] = {}
    for message in read_all(settings, topic):
        try:
            made = split(FakeRecord(message.value()))  # type: ignore[arg-type]
        except ValueError:
            continue
        for index, output in enumerate(made):
            wanted[topic, message.partition(), message.offset(), index, len(made)] = output.payload
    return wanted


class FakeRecord:
    def __init__(self, payload: bytes) -> None:
        self.payload = payload


@pytest.mark.parametrize(
    "fault",
    [
        "republish:produce.before@3",
        "republish:produce.after@3",
        "republish:flush.after@2",
        "republish:dead_letter.before@1",
        "republish:dead_letter.after@1",
        "republish:commit.before@2",
        "republish:commit.after@2",
    ],
)
def test_a_republisher_that_is_killed_repeats_and_loses_nothing(
    fault: str, settings: KafkaSettings, topic: Make
) -> None:
    source, target, dead = topic(4, "in"), topic(3, "out"), topic(1, "dead")
    mixed = [*INPUTS[:900], *POISON, *INPUTS[900:]]
    produce(settings, source, mixed)
    arguments: dict[str, Any] = {
        "bootstrap": settings.bootstrap,
        "options": {"group.instance.id": "one"},  # the next run takes the place of the killed one at once
        "source": source,
        "kind": "raw",
        "target": target,
        "dead_letter": dead,
        "name": "split",
        "group": uuid.uuid4().hex,
        "batch_size": 500,
        "until_caught_up": True,
    }
    first = process(fault, **arguments)
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    second = process(**arguments)
    second.communicate(timeout=60)
    assert second.returncode == 0

    wanted, copies = expected(settings, source), outputs(settings, target)
    assert set(copies) == set(wanted)
    for place, values in copies.items():
        assert len(set(values)) == 1, "copies of one output are the same bytes"
        assert decode(values[0]).payload == wanted[place]
    buried = read_all(settings, dead)
    assert {(m.key(), m.value()) for m in buried} == set(POISON)
    letters = [DeadLetter.read(m.headers()) for m in buried]
    assert {(letter.topic, letter.reason, letter.error) for letter in letters if letter} == {
        (source, "transform_failed", "ValueError")
    }


def test_a_stop_by_signal_finishes_what_is_under_way_and_repeats_nothing(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target = topic(4, "in"), topic(3, "out")
    produce(settings, source, INPUTS)
    arguments: dict[str, Any] = {
        "bootstrap": settings.bootstrap,
        "source": source,
        "kind": "raw",
        "target": target,
        "name": "split",
        "group": uuid.uuid4().hex,
        "batch_size": 100,
    }
    first = process(**arguments)
    assert first.stdout
    assert int(first.stdout.readline()) > 0
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    rest, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    done = json.loads(rest.splitlines()[-1])["consumed"]
    assert sum(topics.group_offsets(arguments["group"]).values()) == done
    second = process(**arguments, until_caught_up=True)
    second.communicate(timeout=60)
    copies = outputs(settings, target)
    assert set(copies) == set(expected(settings, source))
    assert {len(values) for values in copies.values()} == {1}


def test_members_that_come_and_go_lose_nothing_and_never_commit_backwards(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(6, "in"), topic(3, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS)
    seen: dict[tuple[str, int], int] = {}
    backwards = []
    reached = {name: threading.Event() for name in ("first", "second")}
    errors = []

    def watch() -> None:
        for place, offset in topics.group_offsets(group, [source]).items():
            if offset < seen.get(place, 0):
                backwards.append(place)
            seen[place] = offset

    def member(name: str) -> tuple[Republisher, threading.Thread]:
        republisher = Republisher(
            split,
            source=Source.of(source, "raw"),
            target=target,
            name="split",
            group=group,
            settings=settings,
            batch_size=20,
            max_wait=0.05,
        )

        def work() -> None:
            try:
                republisher.run(progress=lambda counts: reached[name].set())
            except Exception as error:
                errors.append(error)
                reached[name].set()

        thread = threading.Thread(target=work)
        thread.start()
        return republisher, thread

    first, first_thread = member("first")
    assert reached["first"].wait(60)
    second, second_thread = member("second")
    while not reached["second"].is_set() and not errors:
        produce(settings, source, INPUTS[:200])
        watch()
    first.stop()
    first_thread.join(60)
    produce(settings, source, INPUTS[:200])
    ends = {place: marks.high for place, marks in topics.marks([source]).items()}
    while seen != ends and not errors:
        watch()
    second.stop()
    second_thread.join(60)
    assert not errors
    assert not backwards
    assert first.statistics.rebalances > 1
    copies, wanted = outputs(settings, target), expected(settings, source)
    assert set(copies) == set(wanted)
    assert all(len(set(values)) == 1 for values in copies.values())


def test_chains_grow_hop_by_hop_and_keep_what_they_carry(settings: KafkaSettings, topic: Make, topics: Topics) -> None:
    one, two, three = (topic(2, name) for name in ("one", "two", "three"))
    start = Envelope(b"payload", key=b"k", event_id="e", traceparent="00-a-b-01", unknown=b"\xc0\x3e\x07")
    produce(settings, one, [(b"k", encode(start))])
    run(settings, source=one, target=two, name="first")
    run(settings, lambda r: [Output(key=b"x"), Output(key=b"y")], source=two, target=three, name="second")
    ids = topics.topic_ids([one, two])
    got = sorted((decode(m.value()) for m in read_all(settings, three)), key=lambda e: e.chain[-1].index or 0)
    assert [e.key for e in got] == [b"x", b"y"]
    for index, envelope in enumerate(got):
        first, second = envelope.chain
        assert (first.topic, first.via, first.index, first.count, first.rekeyed) == (one, "first", 0, 1, False)
        assert (second.topic, second.via, second.index, second.count, second.rekeyed) == (two, "second", index, 2, True)
        assert (first.topic_id, second.topic_id) == (ids[one], ids[two])
        assert None not in (first.leader_epoch, first.timestamp_ms, second.timestamp_ms)
        assert envelope == Envelope(
            b"payload", (first, second), envelope.key, "e", traceparent="00-a-b-01", unknown=b"\xc0\x3e\x07"
        )


def test_poison_of_every_kind_is_kept_byte_for_byte_and_the_rest_goes_on(settings: KafkaSettings, topic: Make) -> None:
    source, target, dead = topic(1, "in"), topic(1, "out"), topic(1, "dead")
    good = encode(Envelope(b"v", key=b"k"))
    headers = [("h", b"1"), ("h", b"\xff"), ("none", None)]
    poison = [
        (b"k", None, "empty"),
        (b"k", b"", "empty"),
        (b"k", b"junk", "not_an_envelope"),
        (b"k", good[:-1], "truncated"),
        (b"other", good, "key_mismatch"),
        (None, encode(Envelope(b"v", destination="elsewhere")), "wrong_destination"),
        (b"k", encode(Envelope(b"v", (Hop(source, 0, 0),), key=b"k")), "chain_loop"),
    ]
    with AcknowledgedProducer(settings) as producer:
        for key, value, _ in poison:
            producer.send(source, good, b"k")
            producer.send(source, value, key, headers)
        producer.flush()
    counts = run(settings, source=source, target=target, dead_letter=dead, name="r")
    assert counts.consumed == 14
    assert counts.produced == len(read_all(settings, target)) == 7
    buried = read_all(settings, dead)
    assert [(m.key(), m.value() or b"") for m in buried] == [(key, value or b"") for key, value, _ in poison]
    for i, (message, (_, _, reason)) in enumerate(zip(buried, poison, strict=True)):
        letter = DeadLetter.read(message.headers())
        assert letter
        assert (letter.topic, letter.partition, letter.offset, letter.reason) == (source, 0, 2 * i + 1, reason)
        assert (letter.application, letter.attempt) == ("r", 1)
        assert letter.lineage.endswith(f"{source}:0:{2 * i + 1}")
        assert own_headers(message.headers()) == headers
    assert counts.dead_lettered == {"empty": 2, **{reason: 1 for _, _, reason in poison[2:]}}


def test_a_dead_letter_that_is_too_large_is_trimmed(settings: KafkaSettings, topic: Make) -> None:
    source, target, dead = topic(1, "in"), topic(1, "out"), topic(1, "dead", max_message_bytes=2000)
    produce(settings, source, [(b"k", os.urandom(50_000))])
    run(settings, source=source, target=target, dead_letter=dead)
    (message,) = read_all(settings, dead)
    assert dict(message.headers())["hw-dlq-value-bytes"] == b"50000"
    assert DeadLetter.read(message.headers())


def test_without_a_dead_letter_topic_poison_stops_the_service_before_it(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, [(b"k", b"junk")])
    with pytest.raises(BrokerRefused, match=rf"{source}:0:0 cannot be republished \(not_an_envelope.*dead-letter"):
        run(settings, source=source, target=target, group=group)
    assert topics.group_offsets(group) == {}


@pytest.mark.parametrize("missing", ["source", "target", "dead_letter"])
def test_a_topic_that_is_missing_is_named_before_anything_is_read(
    missing: str, settings: KafkaSettings, topic: Make
) -> None:
    names: dict[str, Any] = {"source": topic(1), "target": topic(1), "dead_letter": topic(1), missing: "nowhere"}
    with pytest.raises(BrokerRefused, match=r"topic nowhere.*Create the topic"):
        run(settings, **names)


def test_a_topic_that_is_read_and_written_is_refused(settings: KafkaSettings) -> None:
    with pytest.raises(ValueError, match="round for ever"):
        Republisher(identity, source="a", target=["b", "a"], name="r", settings=settings)


def test_a_broker_that_is_not_there_is_one_line_with_the_remedy() -> None:
    republisher = Republisher(identity, source="a", target="b", name="r", settings=KafkaSettings("127.0.0.1:1"))
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1.*Check that the broker runs"):
        republisher.run()


def test_a_failing_transform_is_tried_again_over_the_retry_topics_and_then_given_up(
    settings: KafkaSettings, topic: Make
) -> None:
    source, target, dead = topic(2, "in"), topic(1, "out"), topic(1, "dead")
    retry = RetryTopics({topic(1, "soon"): 0.2, topic(1, "later"): 0.5})
    produce(settings, source, [(b"k%d" % i, encode(Envelope(b"%d" % i, key=b"k%d" % i))) for i in range(1, 9)])
    tries: dict[bytes, list[int]] = defaultdict(list)

    def needs_tries(record: Record) -> Output:
        tries[record.payload].append(record.attempt)
        return Output(b"%d" % (1 // (int(record.payload) <= record.attempt)))

    done = threading.Event()
    republisher = Republisher(
        needs_tries,
        source=source,
        target=target,
        dead_letter=dead,
        retry=retry,
        name="r",
        group=uuid.uuid4().hex,
        settings=settings,
        max_wait=0.05,
    )

    def progress(counts: Statistics) -> None:
        if counts.produced + sum(counts.dead_lettered.values()) == 8:
            done.set()

    thread = threading.Thread(target=lambda: republisher.run(progress=progress))
    thread.start()
    assert done.wait(60)
    republisher.stop()
    thread.join(60)
    assert {int(payload): len(attempts) for payload, attempts in tries.items()} == {
        1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3
    }  # fmt: skip
    assert republisher.statistics.retried == 7 + 6
    for message in read_all(settings, target):
        chain = decode(message.value()).chain
        assert [hop.transparent for hop in chain] == [True] * (len(chain) - 1) + [False]
        assert message.headers() is None
    letters = [DeadLetter.read(message.headers()) for message in read_all(settings, dead)]
    assert [(letter.attempt, letter.error) for letter in letters if letter] == [(3, "ZeroDivisionError")] * 5


def test_added_partitions_are_read_from_their_beginning(settings: KafkaSettings, topic: Make, topics: Topics) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:100])
    arguments: dict[str, Any] = {
        "source": Source.of(source, "raw"),
        "target": target,
        "group": group,
        "transform": split,
    }
    run(settings, **arguments)
    topics.add_partitions(source, 4)
    produce(settings, source, INPUTS[100:300])
    run(settings, **arguments)
    copies = outputs(settings, target)
    assert set(copies) == set(expected(settings, source))
    assert {len(values) for values in copies.values()} == {1}


def test_a_topic_that_was_created_again_gives_chains_with_its_new_id(settings: KafkaSettings, topics: Topics) -> None:
    source, target, group = (f"{name}-{uuid.uuid4().hex}" for name in ("in", "out", "group"))
    topics.create(target, 1)
    ids = []
    for _ in range(2):
        ids.append(topics.create(source, 1).topic_id)
        produce(settings, source, [(b"k", b"0:a")])
        run(settings, split, source=Source.of(source, "raw"), target=target, group=group)
        topics.delete([source])
    assert [decode(m.value()).chain[0].topic_id for m in read_all(settings, target)] == ids
    topics.delete([target])


@pytest.mark.parametrize("before", [0, 20])
def test_a_topic_created_again_under_a_running_republisher_is_noticed(
    before: int, settings: KafkaSettings, topics: Topics
) -> None:
    source, target, group = (f"{name}-{uuid.uuid4().hex}" for name in ("in", "out", "group"))
    topics.create(target, 1)
    first = topics.create(source, 1).topic_id
    produce(settings, source, INPUTS[:before])
    republisher = Republisher(
        identity, source=Source.of(source, "raw"), target=target, name="r", group=group, settings=settings, max_wait=0.1
    )
    over = threading.Event()

    def supervised() -> None:
        while not over.is_set():
            try:
                republisher.run()
            except BrokerRefused:  # it looked while the topic was gone: started again, as a supervisor would
                continue

    thread = threading.Thread(target=supervised)
    thread.start()
    while republisher.statistics.consumed < before or not republisher.statistics.rebalances:
        assert thread.is_alive()
    topics.delete([source])
    second = topics.create(source, 1).topic_id
    produce(settings, source, INPUTS[:30])
    wanted = {(first, offset) for offset in range(before)} | {(second, offset) for offset in range(30)}
    found: set[tuple[str, int]] = set()
    while found != wanted:
        assert thread.is_alive()
        hops = [decode(message.value()).chain[0] for message in read_all(settings, target)]
        found = {(hop.topic_id, hop.offset) for hop in hops}
        assert found <= wanted
    over.set()
    republisher.stop()
    thread.join(60)
    topics.delete([source, target])


def test_what_retention_deleted_is_counted_and_the_rest_goes_on(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:10])
    topics.alter_group_offsets(group, {(source, 0): 2})
    admin, upto = AdminClient(settings.client()), TopicPartition(source, 0, 6)
    admin.delete_records([upto])[upto].result(20)
    counts = run(settings, split, source=Source.of(source, "raw"), target=target, group=group)
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
    counts = run(settings, split, source=Source.of(source, "raw"), target=target)
    assert (counts.consumed, counts.expired) == (2, 0)
    assert [decode(m.value()).payload for m in read_all(settings, target)] == [b"0/a", b"2/a"]


def test_if_the_dead_letter_topic_refuses_nothing_is_committed(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, dead, group = topic(1, "in"), topic(1, "out"), topic(1, "dead"), uuid.uuid4().hex
    produce(settings, source, [(b"k", b"junk")])
    refusing = faults.Injector([faults.Fault.parse("republish:dead_letter.error")])
    with faults.use(refusing), pytest.raises(Transient):
        run(settings, source=source, target=target, dead_letter=dead, group=group)
    assert topics.group_offsets(group) == {}
    run(settings, source=source, target=target, dead_letter=dead, group=group)
    assert len(read_all(settings, dead)) == 1
    assert topics.group_offsets(group) == {(source, 0): 1}


@pytest.mark.slow
def test_a_broker_that_dies_and_comes_back_costs_neither_messages_nor_the_service(tmp_path: Path) -> None:
    settings = KafkaSettings(stack.up(tmp_path).kafka)
    try:
        topics = Topics(settings, timeout=60)
        source, target, group = "in", "out", "r"
        for name in (source, target):
            topics.create(name, 2)
        republisher = Republisher(
            split, source=Source.of(source, "raw"), target=target, name="r", settings=settings, max_wait=0.1
        )
        thread = threading.Thread(target=republisher.run)
        thread.start()
        produce(settings, source, INPUTS[:500])
        while not republisher.statistics.consumed:
            assert thread.is_alive()
        broker = stack.up(tmp_path).find("kafka")
        assert broker
        os.kill(broker.pid, signal.SIGKILL)
        os.waitpid(broker.pid, 0)
        assert stack.up(tmp_path).kafka == settings.bootstrap
        produce(settings, source, INPUTS[500:])
        ends = {place: marks.high for place, marks in topics.marks([source]).items()}
        while topics.group_offsets(group, [source]) != ends:
            assert thread.is_alive()
        republisher.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert set(outputs(settings, target)) == set(expected(settings, source))
    finally:
        stack.down(tmp_path)


@pytest.mark.slow
def test_a_topic_created_again_after_a_restart_of_its_broker_is_read_when_the_service_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.republish.input._LOOK_SECONDS", 5.0)
    settings = KafkaSettings(stack.up(tmp_path).kafka)
    try:
        topics = Topics(settings, timeout=60)
        for name in ("in", "out"):
            topics.create(name, 1)
        produce(settings, "in", INPUTS[:50])
        broker = stack.up(tmp_path).find("kafka")
        assert broker
        os.kill(broker.pid, signal.SIGKILL)
        os.waitpid(broker.pid, 0)
        stack.up(tmp_path)  # the partition's leader epoch is 1 now, that of the new topic will be 0
        republisher = Republisher(identity, source=Source.of("in", "raw"), target="out", name="r", settings=settings)
        ended: list[str] = []

        def serve() -> None:
            try:
                republisher.run()
            except BrokerRefused as error:
                ended.append(str(error))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        while topics.group_offsets("r", ["in"]) != {("in", 0): 50}:
            assert thread.is_alive()
        topics.delete(["in"])
        topics.create("in", 1)
        produce(settings, "in", INPUTS[:30])
        thread.join(60)
        assert not thread.is_alive()
        assert "created again" in ended[0] or "Create the topic" in ended[0]
        assert republisher.statistics.consumed == 50
        assert run(settings, source=Source.of("in", "raw"), target="out", group="r").consumed == 30
    finally:
        stack.down(tmp_path)


def test_a_root_beyond_the_end_of_its_topic_is_refused_when_asked_for(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    root, source, target, dead = (topic(1, name) for name in ("root", "in", "out", "dead"))
    produce(settings, root, [(b"k", b"v")] * 3)
    topic_id = topics.topic_ids([root])[root]
    hops = [
        Hop(root, 0, 2, topic_id=topic_id),
        Hop(root, 0, 3, topic_id=topic_id),
        Hop(root, 0, 2**62, topic_id="of-another-life"),
        Hop("elsewhere", 0, 2**62),
        Hop(root, 7, 0),
    ]
    produce(settings, source, [(b"k", encode(Envelope(b"v", (hop,), key=b"k"))) for hop in hops])
    counts = run(settings, source=source, target=target, dead_letter=dead, check_roots=True)
    assert (counts.produced, counts.dead_lettered) == (3, {"root_beyond_end": 2})
    letters = [DeadLetter.read(message.headers()) for message in read_all(settings, dead)]
    assert [letter.offset for letter in letters if letter] == [1, 4]
