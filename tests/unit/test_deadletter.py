"""A dead letter keeps its record byte for byte and says where it was and why."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope import Reason
from envelope.deadletter import DeadLetter, bury, own_headers

LETTER = DeadLetter(
    topic="flights.raw",
    partition=3,
    offset=1234,
    reason=Reason.BAD_PAYLOAD,
    topic_id="PxoY3ACJQLqZcIuB3RIpew",
    lineage="a:0:1 -> flights.raw:3:1234",
    stage="carrier",
    attempt=2,
    application="legs",
    time_ms=1_700_000_000_123,
    error="ZeroDivisionError",
)
HEADERS = [("a", b"1"), ("a", b"2"), ("none", None), ("bin", b"\xff\x00")]


def size(remains) -> int:
    headers = sum(len(name) + len(value or b"") + 2 for name, value in remains.headers)
    return len(remains.key or b"") + len(remains.value or b"") + headers


def test_the_facts_are_read_back_from_the_headers() -> None:
    assert DeadLetter.read(LETTER.headers()) == LETTER
    bare = DeadLetter("t", 0, 0, Reason.EMPTY)
    assert DeadLetter.read(bare.headers()) == bare


def test_the_headers_are_text_that_a_person_reads() -> None:
    assert dict(LETTER.headers()) == {
        "hw-dlq-topic": b"flights.raw",
        "hw-dlq-partition": b"3",
        "hw-dlq-offset": b"1234",
        "hw-dlq-topic-id": b"PxoY3ACJQLqZcIuB3RIpew",
        "hw-dlq-lineage": b"a:0:1 -> flights.raw:3:1234",
        "hw-dlq-stage": b"carrier",
        "hw-dlq-reason": b"bad_payload",
        "hw-dlq-error": b"ZeroDivisionError",
        "hw-dlq-attempt": b"2",
        "hw-dlq-application": b"legs",
        "hw-dlq-time": b"2023-11-14T22:13:20.123Z",
    }


@given(
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=200),
    st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=5),
)
def test_key_value_and_headers_are_kept_byte_for_byte(key, value, headers) -> None:
    remains = bury(LETTER, key, value, headers, 1_000_000)
    assert (remains.key, remains.value) == (key, value)
    assert own_headers(remains.headers) == own_headers(headers)
    assert DeadLetter.read(remains.headers) == LETTER


def test_a_second_death_replaces_the_headers_of_the_first() -> None:
    first = bury(DeadLetter("b", 0, 1, Reason.FOLD_FAILED), b"k", b"v", HEADERS, 10_000)
    second = bury(LETTER, b"k", b"v", first.headers, 10_000)
    assert second.headers == HEADERS + LETTER.headers()


def test_a_value_that_does_not_fit_is_trimmed_with_its_length_and_digest() -> None:
    value = bytes(range(256)) * 100
    remains = bury(LETTER, b"key", value, HEADERS, 5000)
    found = dict(remains.headers)
    assert size(remains) <= 5000
    assert remains.key == b"key"
    assert remains.value and value.startswith(remains.value)
    assert own_headers(remains.headers) == HEADERS
    assert found["hw-dlq-trimmed"] == b"value"
    assert found["hw-dlq-value-bytes"] == b"25600"
    assert found["hw-dlq-value-sha256"] == sha256(value).hexdigest().encode()
    assert DeadLetter.read(remains.headers) == LETTER


@pytest.mark.parametrize(
    ("key", "headers", "trimmed"),
    [(b"key", [("h", b"x" * 10)] * 10_000, b"value, headers"), (b"k" * 9000, HEADERS, b"value, headers, key")],
    ids=["10,000 headers", "a long key"],
)
def test_headers_and_key_are_trimmed_only_when_trimming_the_value_is_not_enough(key, headers, trimmed) -> None:
    remains = bury(LETTER, key, b"value", headers, 5000)
    assert size(remains) <= 5000
    assert dict(remains.headers)["hw-dlq-trimmed"] == trimmed
    assert key.startswith(remains.key or b"")
    assert DeadLetter.read(remains.headers) == LETTER


def test_a_dead_letter_of_kafka_connect_is_understood() -> None:
    headers = [
        ("own", b"1"),
        ("__connect.errors.topic", b"orders"),
        ("__connect.errors.partition", b"4"),
        ("__connect.errors.offset", b"99"),
        ("__connect.errors.connector.name", b"sink"),
        ("__connect.errors.task.id", b"0"),
        ("__connect.errors.stage", b"VALUE_CONVERTER"),
        ("__connect.errors.class.name", b"org.apache.kafka.connect.json.JsonConverter"),
        ("__connect.errors.exception.class.name", b"org.apache.kafka.connect.errors.DataException"),
        ("__connect.errors.exception.message", b"... a value ..."),
    ]
    assert DeadLetter.read(headers) == DeadLetter(
        "orders", 4, 99, None, stage="VALUE_CONVERTER", application="sink",
        error="org.apache.kafka.connect.errors.DataException",
    )  # fmt: skip


@pytest.mark.parametrize("start", ["kafka_dlt-", "kafka_"])
def test_a_dead_letter_of_spring_kafka_is_understood(start: str) -> None:
    headers = [
        (f"{start}original-topic", b"orders"),
        (f"{start}original-partition", (4).to_bytes(4, "big")),
        (f"{start}original-offset", (2**40).to_bytes(8, "big")),
        (f"{start}exception-fqcn", b"java.lang.IllegalStateException"),
        (f"{start}exception-message", b"... a value ..."),
        (f"{start}original-consumer-group", b"billing"),
        ("retry_topic-attempts", (3).to_bytes(4, "big")),
    ]
    assert DeadLetter.read(headers) == DeadLetter(
        "orders", 4, 2**40, None, attempt=3, application="billing", error="java.lang.IllegalStateException"
    )


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("hw-dlq-topic", b"t")],
        [("hw-dlq-topic", b"t"), ("hw-dlq-partition", b"x"), ("hw-dlq-offset", b"1")],
        [("hw-dlq-topic", b"\xff"), ("hw-dlq-partition", b"0"), ("hw-dlq-offset", b"1")],
        [("hw-dlq-topic", b"t"), ("hw-dlq-partition", b"0"), ("hw-dlq-offset", b"1"), ("hw-dlq-time", b"soon")],
        [("kafka_dlt-original-topic", b"t"), ("kafka_dlt-original-partition", b"4")],
        [("__connect.errors.topic", None)],
    ],
)
def test_headers_that_are_no_dead_letters_are_not_taken_for_one(headers) -> None:
    assert DeadLetter.read(headers) is None


def test_a_reason_code_of_a_newer_version_is_no_error() -> None:
    headers = [("hw-dlq-reason", b"too_new"), *DeadLetter("t", 0, 1, None).headers()]
    letter = DeadLetter.read(headers)
    assert letter
    assert letter.reason is None
