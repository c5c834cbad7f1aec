"""Topics, groups and the acknowledged producer on a real broker."""

import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from envelope import Reason
from envelope.deadletter import DeadLetterHeaders, Form
from jobs import stack
from jobs.dead_letters.redrive import redrive
from persistence.kafka import AcknowledgedProducer, BrokerRefused, KafkaSettings, Topics
from persistence.kafka import Message as Outgoing
from persistence.kafka.array_producer import spans_of
from persistence.kafka.facts import Watermarks
from persistence.kafka.reading import assign

pytestmark = pytest.mark.integration

# org.apache.kafka.common.utils.UtilsTest.testMurmur2
JAVA_MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def murmur2(data: bytes) -> int:
    """org.apache.kafka.common.utils.Utils.murmur2, as Java computes it: a signed 32-bit number."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def read(bootstrap: str, topic: str, partitions: int, count: int) -> list:
    """The first `count` records of a topic."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex, "enable.auto.commit": False})
    assign(consumer, [TopicPartition(topic, p, OFFSET_BEGINNING) for p in range(partitions)])
    records: list = []
    while len(records) < count:
        got = consumer.consume(count - len(records), 10)
        assert got, f"{len(records)} of {count} records within 10 s"
        assert not [record.error() for record in got if record.error()]
        records += got
    consumer.close()
    return records


@pytest.fixture(params=["objects", "arrays"])
def make(request: pytest.FixtureRequest) -> Callable[..., AcknowledgedProducer]:
    """Producers of confluent-kafka, and those through librdkafka's C API."""
    return partial(AcknowledgedProducer, arrays=request.param == "arrays")


@pytest.fixture
def producer(kafka: str, make: Callable[..., AcknowledgedProducer]) -> Iterator[AcknowledgedProducer]:
    with make(KafkaSettings(kafka), delivery_timeout=20) as producer:
        yield producer


def test_our_copy_of_javas_murmur2_gives_kafkas_own_golden_values() -> None:
    assert {key: murmur2(key) for key in JAVA_MURMUR2} == JAVA_MURMUR2


def test_keys_land_where_a_java_producer_puts_them(
    kafka: str, topic: Callable[..., str], producer: AcknowledgedProducer
) -> None:
    name = topic(partitions=7)
    keys = [*JAVA_MURMUR2, "grüße".encode(), b"\x00\xff\xfe", *(b"N%d" % i for i in range(300))]
    producer.send_many(name, [Outgoing(value=b"v", key=key) for key in keys[::3]])
    producer.send_arrays(name, spans_of([b"v"] * len(keys[1::3])), spans_of(keys[1::3]))
    for key in keys[2::3]:
        producer.send(name, b"v", key)
    producer.flush()
    landed = {record.key(): record.partition() for record in read(kafka, name, 7, len(keys))}
    assert landed == {key: (murmur2(key) & 0x7FFFFFFF) % 7 for key in keys}


def test_flush_returns_when_everything_is_in_the_log(
    topic: Callable[..., str], producer: AcknowledgedProducer, topics: Topics
) -> None:
    name = topic(partitions=2)
    for _ in range(10):
        producer.send_many(name, [Outgoing(value=b"v", key=b"%d" % i) for i in range(1000)])
    producer.flush()
    assert sum(marks.high for marks in topics.marks([name]).values()) == 10_000


def test_more_than_the_queue_holds_waits_and_keeps_the_order(
    kafka: str, topic: Callable[..., str], make: Callable[..., AcknowledgedProducer]
) -> None:
    name = topic()
    settings = KafkaSettings(kafka, {"queue.buffering.max.messages": "200"})
    with make(settings) as producer:
        for start in range(0, 2000, 50):
            producer.send_many(name, [Outgoing(value=b"%d" % i) for i in range(start, start + 30)])
            values = [b"%d" % i for i in range(start + 30, start + 49)]
            producer.send_arrays(name, spans_of(values), spans_of([b"k"] * 19))
            producer.send(name, b"%d" % (start + 49))
        producer.flush()
    assert [int(record.value()) for record in read(kafka, name, 1, 2000)] == list(range(2000))


def test_null_values_null_keys_and_headers_arrive_as_they_are(
    kafka: str, topic: Callable[..., str], producer: AcknowledgedProducer
) -> None:
    name = topic()
    producer.send(name, None, b"tombstone", [("a", b"1"), ("a", b"2"), ("b", None)])
    producer.send(name, b"", None)
    producer.flush()
    first, second = read(kafka, name, 1, 2)
    assert (first.key(), first.value()) == (b"tombstone", None)
    assert first.headers() == [("a", b"1"), ("a", b"2"), ("b", None)]
    assert (second.key(), second.value() or b"") == (None, b"")


def test_a_record_that_the_topic_refuses_is_an_error_of_flush_and_the_producer_goes_on(
    topic: Callable[..., str], producer: AcknowledgedProducer, topics: Topics
) -> None:
    name = topic(max_message_bytes=1000)
    assert topics.max_message_bytes([name]) == {name: 1000}
    producer.send(name, random.Random(1).randbytes(5000))  # the limit is of what is left after compression
    with pytest.raises(BrokerRefused, match=rf"producing to {name}.*max\.message\.bytes"):
        producer.flush()
    producer.send(name, b"small")
    producer.flush()
    assert topics.marks([name]) == {(name, 0): Watermarks(0, 1, leader_epoch=0)}


def test_a_record_over_the_clients_limit_is_refused_at_once_and_nothing_goes_on_behind_it(
    kafka: str, topic: Callable[..., str], make: Callable[..., AcknowledgedProducer], topics: Topics
) -> None:
    name = topic()
    with make(KafkaSettings(kafka), delivery_timeout=20, message_max_bytes=1_000_000) as producer:
        with pytest.raises(BrokerRefused, match=r"too large.*message\.max\.bytes"):
            producer.send(name, bytes(2_000_000))
        with pytest.raises(BrokerRefused, match="too large"):
            producer.send_many(
                name, [Outgoing(value=b"%d" % i if i != 100 else bytes(2_000_000), key=b"k") for i in range(9000)]
            )
        producer.flush()
    arrived = read(kafka, name, 1, topics.marks([name])[name, 0].high)
    assert [record.value() for record in arrived] == [b"%d" % i for i in range(len(arrived))]
    assert len(arrived) <= 100


def test_a_record_that_does_not_fit_into_the_queue_is_refused(
    topic: Callable[..., str], producer: AcknowledgedProducer
) -> None:
    name = topic()
    with pytest.raises(BrokerRefused, match="too large"):
        producer.send(name, bytes(129 << 20))
    producer.send(name, b"small")
    producer.flush()


def test_a_topic_that_is_not_there_is_refused_with_the_remedy(
    kafka: str, topics: Topics, make: Callable[..., AcknowledgedProducer]
) -> None:
    with pytest.raises(BrokerRefused, match=r"topic nowhere: .*Create the topic"):
        topics.describe(["nowhere"])
    with make(KafkaSettings(kafka), topic_metadata_propagation_max_ms=500) as producer:
        producer.send("nowhere", b"payload", b"key")
        with pytest.raises(BrokerRefused, match=r"producing to nowhere: Broker: Unknown topic .*Create the topic"):
            producer.flush()


def test_records_for_a_topic_that_was_deleted_meanwhile_are_an_error(
    kafka: str, topics: Topics, make: Callable[..., AcknowledgedProducer]
) -> None:
    """librdkafka queues none of them, or, once it has forgotten the topic, queues all and refuses them later."""
    name = f"gone-{uuid.uuid4().hex}"
    topics.create(name)
    with make(KafkaSettings(kafka), topic_metadata_propagation_max_ms=500) as producer:
        producer.send_many(name, [Outgoing(value=b"v")])
        producer.flush()
        topics.delete([name])
        with pytest.raises(BrokerRefused, match=rf"producing to {name}: \w+: Unknown .* must be sent again") as raised:
            while True:  # until the client hears of it
                producer.send_many(name, [Outgoing(value=b"payload"), Outgoing(value=b"payload")])
                producer.flush()
        assert "payload" not in str(raised.value)


def test_creating_twice_changes_nothing_and_creating_again_gives_another_id(topics: Topics) -> None:
    name = f"twice-{uuid.uuid4().hex}"
    first = topics.create(name, 3, {"retention.ms": "-1"})
    assert topics.create(name, 3) == first
    with pytest.raises(BrokerRefused, match="3 partitions, not 4"):
        topics.create(name, 4)
    topics.delete([name, "never-was"])
    again = topics.create(name, 3)
    assert again.topic_id != first.topic_id
    assert len(again.topic_id) == 22
    topics.delete([name])


def test_marks_end_before_an_open_transaction_and_ends_after_it(
    settings: KafkaSettings, topic: Callable[..., str], topics: Topics
) -> None:
    name = topic()
    producer = Producer(settings.client(transactional_id=uuid.uuid4().hex))
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(name, b"v")
    producer.flush(20)
    assert topics.marks([name]) == {(name, 0): Watermarks(0, 0, leader_epoch=0)}
    assert topics.ends([name]) == {(name, 0): 1}
    producer.abort_transaction(20)


def test_added_partitions_are_seen(topic: Callable[..., str], topics: Topics) -> None:
    name = topic(partitions=2)
    topics.add_partitions(name, 5)
    assert topics.partitions([name]) == {name: 5}
    assert set(topics.marks([name])) == {(name, part) for part in range(5)}


def test_a_time_before_1970_is_the_beginning_of_the_log(kafka: str, topic: Callable[..., str], topics: Topics) -> None:
    name = topic(1)
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        producer.send(name, b"x")
        producer.flush()
    # Kafka takes -1 for the end of the log, and refuses most other negative times.
    assert [topics.offsets_at(name, time_ms) for time_ms in (0, -1, -2, -3, -62_135_596_800_000)] == [{0: 0}] * 5


def test_group_offsets_are_set_and_read_back(topic: Callable[..., str], topics: Topics) -> None:
    name, group = topic(partitions=3), uuid.uuid4().hex
    assert topics.group_offsets(group) == {}
    topics.alter_group_offsets(group, {(name, 0): 5, (name, 2): 7})
    assert topics.group_offsets(group) == {(name, 0): 5, (name, 2): 7}
    with pytest.raises(BrokerRefused, match=f"{name}:9"):
        topics.alter_group_offsets(group, {(name, 9): 5})


def test_a_topic_that_is_deleted_between_its_listing_and_its_description_is_left_out_of_a_groups_offsets(
    topic: Callable[..., str], topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, group, names = topic(), uuid.uuid4().hex, topics.names
    topics.alter_group_offsets(group, {(name, 0): 5})
    listed = iter([[*names(), f"gone-{group}"]])
    monkeypatch.setattr(topics, "names", lambda: next(listed, None) or names())
    assert topics.group_offsets(group) == {(name, 0): 5}


@pytest.mark.parametrize("ask", ["alter_group_offsets('g', {('t', 1): 0})", "group_offsets('g')"])
def test_a_new_broker_answers_for_a_group_although_its_coordinator_is_not_ready_yet(ask: str) -> None:
    """In a separate process, because the admin client's call ended it: see `Topics._committed`."""
    with stack.ephemeral() as servers:
        code = f"""
from persistence.kafka import KafkaSettings, Topics
topics = Topics(KafkaSettings({servers.kafka!r}))
topics.create("t", 4)
topics.{ask}
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_offsets_of_a_group_that_runs_are_refused(kafka: str, topic: Callable[..., str], topics: Topics) -> None:
    name, group = topic(), uuid.uuid4().hex
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": group})
    consumer.subscribe([name])
    while not consumer.assignment():
        consumer.poll(0.1)
    with pytest.raises(BrokerRefused, match="stop them first"):
        topics.alter_group_offsets(group, {(name, 0): 5})
    consumer.close()


def test_a_letter_that_its_topic_does_not_take_is_counted_and_the_others_go_back(
    producer: AcknowledgedProducer, settings: KafkaSettings, topics: Topics, topic: Callable[..., str]
) -> None:
    small, dead = topic(**{"max.message.bytes": 20_000}), topic()
    for offset, value in enumerate((b"a", random.Random(1).randbytes(19_800), b"c")):
        facts = DeadLetterHeaders(small, 0, offset, Reason.FOLD_FAILED, application="fleet", form=Form.PAYLOAD)
        producer.send(dead, value, b"k", facts.headers())
    producer.flush()
    result = redrive(settings, dead, apply=True)
    assert (sum(result.done.values()), result.unusable) == (2, {"payload_too_large": 1})
    assert topics.marks([small])[small, 0].high == 2
    again = redrive(settings, dead)
    group = (small, "", "fold_failed")
    assert (again.dead_letters, again.foreign, again.done[group], again.before) == (3, 0, 2, {group: 2})
    assert (result.before, redrive(settings, dead, apply=True).before) == ({group: 0}, {group: 2})


def test_letters_are_read_to_the_end_of_a_topic_whose_last_offset_is_no_record(
    settings: KafkaSettings, topics: Topics, topic: Callable[..., str]
) -> None:
    dead = topic()
    producer = Producer(settings.client(transactional_id=uuid.uuid4().hex))
    producer.init_transactions(20)
    producer.begin_transaction()
    facts = DeadLetterHeaders(dead, 0, 0, Reason.FOLD_FAILED, application="fleet", form=Form.PAYLOAD)
    producer.produce(dead, b"v", b"k", headers=facts.headers())
    producer.commit_transaction(20)
    while topics.marks([dead])[dead, 0].high < 2:  # the transaction's marker is an offset without a record
        pass
    assert redrive(settings, dead).dead_letters == 1
