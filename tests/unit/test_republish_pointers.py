"""Messages that are taken as pointers are those that confluent-kafka delivers; on the broker within librdkafka."""

import ctypes
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from aggregations.columns import message_kernels
from jobs.republish.columns import columns_of
from jobs.republish.pointers import Pointed, Pointers
from persistence.kafka.array_producer import texts_of
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import assign

LEAVES = """
from tests.unit.test_republish_pointers import broker_of, member
from confluent_kafka import Producer
servers = broker_of(mock := member("x"))
producer = Producer({"bootstrap.servers": servers, "log_level": 0})
producer.produce("t", b"v", b"k", partition=0)
assert producer.flush(10) == 0
from jobs.republish.pointers import Pointed
from confluent_kafka import TopicPartition
consumer = member(servers)
pointed = Pointed(consumer)
pointed.split_off("t", 0)
consumer.assign([TopicPartition("t", 0, 0)])
assert len(pointed.take(1, 10)) == 1
"""

INTERRUPTED_WHILE_TAKING = f"""{LEAVES}
from aggregations.columns import message_kernels
def interrupted(*arguments):
    assert take(*arguments) == 1
    raise KeyboardInterrupt
consumer.seek(TopicPartition("t", 0, 0))
take, message_kernels.taken = message_kernels.taken, interrupted
try:
    pointed.take(1, 10)
except KeyboardInterrupt:
    pointed.close()
    consumer.close()
"""
INTERRUPTED_WHILE_GIVING_BACK = f"""{LEAVES}
from aggregations.columns import message_kernels
def interrupted(*arguments):
    give_back(*arguments)
    raise KeyboardInterrupt
give_back, message_kernels.destroyed = message_kernels.destroyed, interrupted
try:
    pointed.give_back()
except KeyboardInterrupt:
    message_kernels.destroyed = give_back
    pointed.close()
    consumer.close()
"""
LEFT_TO_A_DAEMON = f"""
import atexit, logging, os, threading
atexit.register(lambda: os._exit(0 if any(map(any, pointed._taken)) and not released else 3))
from persistence.kafka import array_producer
released = []
array_producer._release = lambda *of: released.append(of)
def work():
    global pointed, producer
    exec({LEAVES!r}, globals())
    settings = {{"bootstrap.servers": servers, "on_delivery": print, "logger": logging.getLogger()}}
    producer = array_producer.ArrayProducer(settings)
    ready.set()
    while True:
        pointed.take(1, 1)
ready = threading.Event()
threading.Thread(target=work, daemon=True).start()
assert ready.wait(50)
"""


def member(servers: str) -> Consumer:
    """A consumer; of a broker of its own if there are no servers `x`."""
    own = {"test.mock.num.brokers": 1} if servers == "x" else {}
    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": uuid.uuid4().hex,
            "enable.partition.eof": True,
            "log_level": 0,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            **own,
        }
    )


def broker_of(consumer: Consumer) -> str:
    broker = consumer.list_topics("t", 10).brokers[1]
    return f"{broker.host}:{broker.port}"


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    mock = member("x")
    yield broker_of(mock)
    mock.close()


RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, str | bytes | None]]]] = [
    (b"k", b"value", []),
    (None, b"no key", []),
    (b"", b"an empty key", []),
    (b"k", None, []),
    (b"k", b"", []),
    (b"k", b"\0" * 300, [("a", b"1"), ("a", None), ("größe", b"")]),
    (b"k2", b"last", []),
]


class Told(NamedTuple):
    """All that a message tells."""

    place: tuple[str, int, int]
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp: tuple[int, int]
    leader_epoch: int | None
    size: int

    @classmethod
    def by(cls, one: Any) -> "Told":
        place = one.topic(), one.partition(), one.offset()
        return cls(place, one.key(), one.value(), headers_of(one), one.timestamp(), one.leader_epoch(), len(one))


def filled(servers: str, times: int = 1) -> str:
    topic = f"t{uuid.uuid4().hex}"
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for _ in range(times):
        for key, value, headers in RECORDS:
            producer.produce(topic, value, key, 0, headers=headers)
    assert producer.flush(10) == 0
    return topic


def ended(some: Any) -> bool:
    return any(one.error() for one in some)


@pytest.fixture
def pointed(servers: str) -> Iterator[tuple[Pointed, Consumer, str]]:
    topic, consumer = filled(servers, 3), member(servers)
    made = Pointed(consumer)
    made.split_off(topic, 0)
    assign(consumer, [TopicPartition(topic, 0, 0)])
    yield made, consumer, topic
    made.close()
    made.close()
    consumer.close()


def taken(pointed: Pointed, count: int) -> Pointers:
    """Exactly so many messages."""
    found = Pointers(np.empty(0, np.int64))
    for _ in range(100):
        found += pointed.take(count - len(found), 0.2)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} messages within 20 s")


def test_pointed_messages_tell_what_confluent_kafkas_tell(servers: str, pointed: tuple[Pointed, Consumer, str]) -> None:
    one, consumer, topic = pointed
    count = 3 * len(RECORDS)
    found = taken(one, count + 1)
    assert consumer.consume(10, 0) == []
    objects: list[Any] = []
    plain = member(servers)
    assign(plain, [TopicPartition(topic, 0, 0)])
    while not ended(objects):
        objects += plain.consume(100, 0.1)
    plain.close()
    assert [Told.by(message) for message in found[:count]] == [Told.by(message) for message in objects[:count]]
    assert [(one.key(), one.value(), headers_of(one)) for one in found[:count]] == RECORDS * 3
    end, expected = found[count].error(), objects[count].error()
    assert end is not None
    assert (end.code(), end.str()) == (KafkaError._PARTITION_EOF, expected.str())
    assert (found[count].topic(), found[count].offset()) == (topic, count)
    assert found[0].error() is None

    columns, wanted = columns_of(found), columns_of(objects)
    assert columns.rows.tolist() == wanted.rows.tolist() == [at for at in range(count) if at % 7 in (0, 1, 6)]
    assert [columns.at[code] for code in columns.codes] == [wanted.at[code] for code in wanted.codes]
    assert columns.offsets.tolist() == wanted.offsets.tolist()
    assert columns.times.tolist() == wanted.times.tolist()
    assert (texts_of(columns.values), texts_of(columns.keys)) == (texts_of(wanted.values), texts_of(wanted.keys))
    assert found.nbytes == sum(len(key or b"") + len(value or b"") for key, value, _ in RECORDS) * 3


def test_nothing_of_before_a_seek_or_an_assignment_is_taken(pointed: tuple[Pointed, Consumer, str]) -> None:
    one, consumer, topic = pointed
    assert taken(one, 2)[1].offset() == 1
    consumer.pause([TopicPartition(topic, 0)])
    consumer.seek(TopicPartition(topic, 0, 5))
    assert not len(one.take(10, 0.2))
    consumer.resume([TopicPartition(topic, 0)])
    assert taken(one, 2)[0].offset() == 5
    consumer.unassign()
    assert not len(one.take(10, 0.2))
    consumer.assign([TopicPartition(topic, 0, 3)])  # the client ended the forwarding with the assignment
    assert taken(one, 1)[0].offset() == 3
    assert consumer.consume(10, 0) == []


def test_what_was_not_split_off_is_the_consumers(servers: str) -> None:
    topic, consumer = filled(servers), member(servers)
    one = Pointed(consumer)
    assign(consumer, [TopicPartition(topic, 0, 0)])
    assert len(consumer.consume(7, 10)) == 7
    assert not len(one.take(10, 0))
    one.close()
    consumer.close()


def test_no_message_has_no_columns() -> None:
    made = columns_of(Pointers(np.empty(0, np.int64)))
    assert (len(made.rows), list(made.runs(0))) == (0, [])


@pytest.mark.parametrize("program", [LEAVES, INTERRUPTED_WHILE_TAKING, INTERRUPTED_WHILE_GIVING_BACK])
def test_a_process_ends_though_messages_were_not_given_back(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_a_daemon_thread_uses_is_not_released_when_the_process_ends() -> None:
    subprocess.run([sys.executable, "-c", LEFT_TO_A_DAEMON], check=True, timeout=60)


def test_addresses_of_messages_that_the_client_dropped_itself_are_not_given_back() -> None:
    """It leaves them behind those that count: `rd_kafka_purge_outdated_messages`."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

    def left(count: int) -> tuple[int, list[int]]:
        def consume(queue: int, milliseconds: int, into: int, most: int) -> int:
            assert (queue, milliseconds, most) == (7, 200, 5)
            ctypes.memmove(into, np.array([11, 12, 13, 14, 0], np.int64).ctypes.data, 40)
            return count

        messages = np.zeros(5, np.int64)
        function = kind(consume)
        at = ctypes.cast(function, ctypes.c_void_p).value
        assert at is not None
        return message_kernels.taken(messages, at, 7, 200), messages.tolist()

    assert left(4) == (4, [11, 12, 13, 14, 0])
    assert left(2) == (2, [11, 12, 0, 0, 0])
    assert left(0) == (0, [0] * 5)
    assert left(-1) == (-1, [0] * 5)
