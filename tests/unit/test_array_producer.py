"""The producer through librdkafka's C API, on the broker within librdkafka."""

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from persistence.kafka import AcknowledgedProducer, KafkaSettings
from persistence.kafka.array_producer import ArrayProducer, Report, spans_of, texts_of
from persistence.kafka.reading import assign
from tests.unit.test_republish_pointers import broker_of, member

TEXTS = [b"a", b"", b"\0\xff" * 200, b"last"]


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    mock = member("x")
    yield broker_of(mock)
    mock.close()


class Failures(list[tuple[int, str]]):
    """Undelivered records: the code of the error, and the topic."""

    def note(self, error: KafkaError, report: Report) -> None:
        self.append((error.code(), report.topic()))


def producer_of(
    servers: str, failures: Failures, errors: list[KafkaError] | None = None, **settings: Any
) -> ArrayProducer:
    config = {
        "bootstrap.servers": servers,
        "on_delivery": failures.note,
        "logger": logging.getLogger("headwater.kafka"),
    }
    config |= {"enable.idempotence": True, "partitioner": "murmur2_random", "delivery.report.only.error": True}
    config |= {} if errors is None else {"error_cb": errors.append}
    return ArrayProducer(config | {name.replace("_", "."): value for name, value in settings.items()})


def read(servers: str, topic: str, count: int) -> list[Any]:
    consumer: Consumer = member(servers)
    assign(consumer, [TopicPartition(topic, partition, 0) for partition in range(4)])
    found: list[Any] = []
    while len(found) < count:
        found += [one for one in consumer.consume(100, 1) if not one.error()]
    consumer.close()
    return sorted(found, key=lambda one: (one.partition(), one.offset()))


def test_spans_and_texts() -> None:
    assert texts_of(spans_of(TEXTS)) == TEXTS
    assert texts_of(spans_of([])) == []
    assert texts_of(spans_of([None, b"", None])) == [None, b"", None]
    data, starts, sizes = spans_of(TEXTS)
    assert texts_of((data, starts[1:3], sizes[1:3])) == TEXTS[1:3]


LETTERS, STARTS, SIZES = spans_of([b"ab", b"cd"])


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ((np.repeat(LETTERS, 2)[::2], STARTS, SIZES), "contiguous"),
        ((LETTERS.astype(np.int64), STARTS, SIZES), "uint8"),
        ((LETTERS, STARTS.astype(np.int32), SIZES), "int64"),
        ((LETTERS, STARTS, SIZES[:1]), "arrays of 2"),
        (spans_of([b"a"]), "arrays of 1"),
        ((LETTERS, STARTS, SIZES + 1), "within"),
        ((LETTERS, STARTS - 1, SIZES), "within"),
        ((LETTERS, STARTS + (1 << 62), SIZES), "within"),
        ((LETTERS, STARTS, SIZES + (2**63 - 3)), "within"),
    ],
)
def test_arrays_that_may_not_be_read_at_their_addresses_are_refused(values: Any, match: str) -> None:
    with AcknowledgedProducer(KafkaSettings("127.0.0.1:1"), arrays=True) as producer:
        with pytest.raises(ValueError, match=match):
            producer.send_arrays("t", values, spans_of([b"k", None]))
        assert producer.is_settled()


def test_records_arrive_in_order_however_they_are_given(servers: str) -> None:
    topic, failures = f"t{uuid.uuid4().hex}", Failures()
    producer = producer_of(servers, failures)
    headers = [("a", b"1"), ("a", None), ("größe", b"")]
    producer.produce(topic, b"v", b"k", headers=headers)
    assert producer.produce_batch(topic, [{"value": b"w", "key": b"k"}, {"value": None, "key": b"k"}]) == 2
    producer.produce_arrays(topic, spans_of(TEXTS), spans_of([b"k"] * 4))
    assert producer.produce_batch(topic, [{"value": b"", "key": b"k"}]) == 1
    assert producer.produce_batch(topic, []) == 0
    producer.produce(topic, None, b"k")
    producer.produce(topic, b"", b"k")
    assert producer.flush(10) == len(producer) == 0
    found = read(servers, topic, 10)
    assert [one.value() for one in found] == [b"v", b"w", None, *TEXTS, b"", None, b""]
    assert [one.headers() for one in found] == [headers, *[None] * 9]
    assert {one.key() for one in found} == {b"k"}
    assert len({one.partition() for one in found}) == 1
    assert failures == []


def test_records_without_a_key_and_to_a_partition(servers: str) -> None:
    topic, failures = f"t{uuid.uuid4().hex}", Failures()
    producer = producer_of(servers, failures)
    producer.produce(topic, b"v", None, 3)
    producer.produce(topic, b"v", b"", 2)
    assert producer.produce_batch(topic, [{"value": b"w"}, {"value": b"w", "key": None}]) == 2
    producer.produce_arrays(topic, spans_of([b"w", None]), spans_of([None, b"tombstone"]))
    assert producer.flush(10) == 0
    found = read(servers, topic, 6)
    assert [(one.key(), one.partition()) for one in found if one.value() == b"v"] == [(b"", 2), (None, 3)]
    assert [one.key() for one in found if one.value() == b"w"] == [None, None, None]
    assert [one.key() for one in found if one.value() is None] == [b"tombstone"]


def test_a_record_that_is_too_large_is_refused(servers: str) -> None:
    producer = producer_of(servers, Failures(), message_max_bytes=2000)
    for send in (
        lambda: producer.produce("t", bytes(3000)),
        lambda: producer.produce_batch("t", [{"value": b"v"}, {"value": bytes(3000)}]),
        lambda: producer.produce_arrays("t", spans_of([b"v", bytes(3000)]), spans_of([b"k", b"k"])),
    ):
        with pytest.raises(KafkaException) as caught:
            send()
        assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    producer.purge()
    producer.flush(1)


def test_a_full_queue_is_told(servers: str) -> None:
    producer = producer_of("127.0.0.1:1", Failures(), queue_buffering_max_messages=2)
    producer.produce("t", b"1")
    producer.produce("t", b"2")
    with pytest.raises(BufferError):
        producer.produce("t", b"3")
    with pytest.raises(KafkaException, match="Queue full"):
        producer.produce_batch("t", [{"value": b"3"}])
    producer.purge()


def test_what_is_dropped_is_reported_and_no_longer_waits() -> None:
    failures, errors = Failures(), list[KafkaError]()
    producer = producer_of("127.0.0.1:1", failures, errors)
    assert producer.flush(0) == 0
    producer.produce("orders", b"1")
    producer.produce_arrays("orders", spans_of([b"2"]), spans_of([b"k"]))
    assert producer.flush(0.5) == 2
    assert failures == []
    producer.purge()
    assert producer.flush(5) == 0
    assert failures == [(KafkaError._PURGE_QUEUE, "orders")] * 2
    assert {error.code() for error in errors} <= {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
    assert errors


def test_a_record_that_waits_too_long_is_reported_within_the_flush() -> None:
    failures = Failures()
    producer = producer_of("127.0.0.1:1", failures, enable_idempotence=False, message_timeout_ms=300)
    producer.produce("orders", b"1")
    assert producer.flush(20) == 0
    assert failures == [(KafkaError._MSG_TIMED_OUT, "orders")]


def test_a_setting_that_the_client_does_not_know_is_refused() -> None:
    with pytest.raises(KafkaException, match="No such configuration property"):
        producer_of("127.0.0.1:1", Failures(), no_such="1")
    with pytest.raises(KafkaException, match="Failed to create producer"):
        producer_of("127.0.0.1:1", Failures(), acks="1")


def test_log_lines_reach_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    producer = producer_of("127.0.0.1:1", Failures(), debug="eos")
    producer.poll()
    assert any("rdkafka#producer-" in one.getMessage() for one in caplog.records if one.name == "headwater.kafka")
