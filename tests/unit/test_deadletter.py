"""A dead letter keeps its record byte for byte, with its coordinates and the reason."""

from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope import Reason
from envelope.deadletter import DeadLetterHeaders, DeadLetterRecord, Form, dead_letter_record, own_headers, size_of
from envelope.raised import Raised, cut

LETTER = DeadLetterHeaders(
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
    raised=Raised("ZeroDivisionError"),
)
EXPLAINED = replace(
    LETTER,
    detail="ZeroDivisionError in the fold of stage carrier",
    raised=Raised("ZeroDivisionError", "fleet.py:14 in fold", "division by zero"),
)
PLACE = ("topic", "partition", "offset"), (b"orders", b"4", b"99")
HEADERS = [("a", b"1"), ("a", b"2"), ("none", None), ("bin", b"\xff\x00")]


def size(dead) -> int:
    headers = sum(len(name) + len(value or b"") + 2 for name, value in dead.headers)
    return len(dead.key or b"") + len(dead.value or b"") + headers


def test_a_record_takes_its_bytes_and_256_more_and_10_for_each_header() -> None:
    assert size_of(None, None, []) == 256
    assert size_of(b"key", b"value", [("a", b"12"), ("é", None)]) == 256 + 3 + 5 + (1 + 2 + 10) + (2 + 10)


def test_the_facts_are_read_back_from_the_headers() -> None:
    assert DeadLetterHeaders.read(LETTER.headers()) == LETTER
    for generation in (1, 2):  # read as another one, the redriven record is a copy to the flow that gave it up
        letter = DeadLetterHeaders("t", 1, 2, None, generation=generation)
        assert DeadLetterHeaders.read(letter.headers()) == letter
    items = DeadLetterHeaders("t", 1, 2, Reason.BAD_PAYLOAD, generation=3, items=((0, 12), (3,)), form=Form.PAYLOAD)
    for letter in (
        DeadLetterHeaders("t", 0, 0, Reason.EMPTY),
        DeadLetterHeaders("t", 1, 2, None, stage="s", hole=True),
        items,
    ):
        assert DeadLetterHeaders.read(letter.headers()) == letter
    assert ("hw-dlq-hole", b"1") in replace(LETTER, hole=True).headers()
    assert DeadLetterHeaders.read(
        [*DeadLetterHeaders("t", 0, 0, None).headers(), ("hw-dlq-hole", b"0")]
    ) == DeadLetterHeaders("t", 0, 0, None)
    names = [name for name, _ in DeadLetterHeaders("t", 0, 0, None).headers()]
    assert names == ["hw-dlq-topic", "hw-dlq-partition", "hw-dlq-offset", "hw-dlq-attempt"]


def test_of_what_our_headers_leave_out_the_defaults_are_read() -> None:
    headers = [(f"hw-dlq-{name}", text) for name, text in zip(*PLACE, strict=True)]
    assert DeadLetterHeaders.read(headers) == DeadLetterHeaders("orders", 4, 99, None)


def test_headers_of_one_system_that_cannot_be_read_hide_no_others() -> None:
    connect = [(f"__connect.errors.{name}", text) for name, text in zip(*PLACE, strict=True)]
    assert DeadLetterHeaders.read([("hw-dlq-topic", b"t"), *connect]) == DeadLetterHeaders("orders", 4, 99, None)


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
    dead = dead_letter_record(LETTER, key, value, headers, 1_000_000)
    assert (dead.key, dead.value) == (key, value)
    assert own_headers(dead.headers) == own_headers(headers)
    assert DeadLetterHeaders.read(dead.headers) == LETTER


def test_what_user_code_raised_is_in_headers_of_its_own_and_is_read_back() -> None:
    headers = dict(EXPLAINED.headers())
    assert headers["hw-dlq-detail"] == b"ZeroDivisionError in the fold of stage carrier"
    assert headers["hw-dlq-error"] == b"ZeroDivisionError"
    assert headers["hw-dlq-error-at"] == b"fleet.py:14 in fold"
    assert headers["hw-dlq-error-text"] == b"division by zero"
    assert DeadLetterHeaders.read(EXPLAINED.headers()) == EXPLAINED


def test_a_record_that_fits_without_the_explanation_is_kept_whole() -> None:
    value = bytes(5000)
    exact = 256 + accounted([*HEADERS, *EXPLAINED.headers()]) + len(b"key") + len(value)
    whole = dead_letter_record(EXPLAINED, b"key", value, HEADERS, exact)
    assert whole == DeadLetterRecord(b"key", value, HEADERS + EXPLAINED.headers())
    brief = dead_letter_record(EXPLAINED, b"key", value, HEADERS, exact - 1)
    assert brief == DeadLetterRecord(b"key", value, HEADERS + LETTER.headers())


@given(
    st.integers(0, 3000),
    st.integers(0, 9000),
    st.lists(st.tuples(st.just("h"), st.binary(max_size=300)), max_size=9),
    st.integers(1500, 12_000),
    st.text(max_size=2000),
)
def test_a_dead_letter_is_never_larger_than_its_topic_takes(key, value, headers, max_bytes, text) -> None:
    letter = replace(EXPLAINED, raised=Raised("ZeroDivisionError", "fleet.py:14 in fold", cut(text)))
    dead = dead_letter_record(letter, bytes(key), bytes(value), headers, max_bytes)
    assert size_of(dead.key, dead.value, dead.headers) <= max_bytes
    without = dead_letter_record(LETTER, bytes(key), bytes(value), headers, max_bytes)
    assert (dead.key, own_headers(dead.headers)) == (without.key, own_headers(without.headers))
    assert (dead.value == bytes(value)) == (without.value == bytes(value))


def test_a_trimmed_dead_letter_keeps_the_explanation_where_key_and_headers_leave_room_for_it() -> None:
    read = DeadLetterHeaders.read(dead_letter_record(EXPLAINED, b"key", bytes(9000), HEADERS, 5000).headers)
    assert read == EXPLAINED
    least = 256 + accounted([*HEADERS, *EXPLAINED.headers()]) + len(b"key") + 400
    for max_bytes, kept in ((least, True), (least - 1, False)):
        trimmed = dead_letter_record(EXPLAINED, b"key", bytes(9000), HEADERS, max_bytes)
        assert ("hw-dlq-error-text" in dict(trimmed.headers)) is kept


def test_an_exception_is_cut_and_is_utf8_whatever_its_text_is() -> None:
    assert cut("x" * 5000) == "x" * 1000
    assert cut("é" * 5000) == "é" * 500
    assert cut("a" + "é" * 5000) == "a" + "é" * 499
    assert cut("\ud83d") == "\\ud83d"


def test_a_second_death_replaces_the_headers_of_the_first() -> None:
    first = dead_letter_record(DeadLetterHeaders("b", 0, 1, Reason.FOLD_FAILED), b"k", b"v", HEADERS, 10_000)
    second = dead_letter_record(LETTER, b"k", b"v", first.headers, 10_000)
    assert second.headers == HEADERS + LETTER.headers()


def test_a_value_that_does_not_fit_is_trimmed_with_its_length_and_digest() -> None:
    value = bytes(range(256)) * 100
    dead = dead_letter_record(LETTER, b"key", value, HEADERS, 5000)
    found = dict(dead.headers)
    assert size(dead) <= 5000
    assert dead.key == b"key"
    assert dead.value and value.startswith(dead.value)
    assert own_headers(dead.headers) == HEADERS
    assert found["hw-dlq-trimmed"] == b"value"
    assert found["hw-dlq-value-bytes"] == b"25600"
    assert found["hw-dlq-value-sha256"] == sha256(value).hexdigest().encode()
    assert DeadLetterHeaders.read(dead.headers) == LETTER


@pytest.mark.parametrize(
    ("key", "headers", "trimmed"),
    [(b"key", [("h", b"x" * 10)] * 10_000, b"value, headers"), (b"k" * 9000, HEADERS, b"value, headers, key")],
    ids=["10,000 headers", "a long key"],
)
def test_headers_and_key_are_trimmed_only_when_trimming_the_value_is_not_enough(key, headers, trimmed) -> None:
    dead = dead_letter_record(LETTER, key, b"value", headers, 5000)
    assert size(dead) <= 5000
    assert dict(dead.headers)["hw-dlq-trimmed"] == trimmed
    assert key.startswith(dead.key or b"")
    assert DeadLetterHeaders.read(dead.headers) == LETTER


def accounted(headers) -> int:
    return sum(len(name.encode()) + len(value or b"") + 10 for name, value in headers)


def room(max_bytes: int) -> int:
    """Size left for a record, besides headwater's headers, if it must be trimmed."""
    return max_bytes - 256 - accounted(LETTER.headers()) - 400


def test_a_record_that_fits_to_the_byte_is_whole_and_one_byte_less_trims_its_value() -> None:
    value = bytes(5000)
    exact = 256 + accounted([*HEADERS, *LETTER.headers()]) + len(b"key") + len(value)
    assert dead_letter_record(LETTER, b"key", value, HEADERS, exact) == DeadLetterRecord(
        b"key", value, HEADERS + LETTER.headers()
    )
    trimmed = dead_letter_record(LETTER, b"key", value, HEADERS, exact - 1)
    assert len(trimmed.value or b"") == room(exact - 1) - accounted(HEADERS) - len(b"key")
    assert dict(trimmed.headers)["hw-dlq-trimmed"] == b"value"


@pytest.mark.parametrize(
    ("spare", "key_left", "value_left", "trimmed"),
    [
        (accounted(HEADERS) + 900 + 7, 900, 7, b"value"),
        (accounted(HEADERS) + 900, 900, 0, b"value"),
        (accounted(HEADERS) + 899, 900, accounted(HEADERS) - 1, b"value, headers"),
        (900, 900, 0, b"value, headers"),
        (899, 899, 0, b"value, headers, key"),
        (0, 0, 0, b"value, headers, key"),
        (-1, 0, 0, b"value, headers, key"),
    ],
)
def test_what_is_left_of_a_record_fills_the_room(spare: int, key_left: int, value_left: int, trimmed: bytes) -> None:
    key, value, max_bytes = b"k" * 900, b"v" * 9000, spare - room(0)
    dead = dead_letter_record(LETTER, key, value, HEADERS, max_bytes)
    assert (dead.key, dead.value) == (key[:key_left], value[:value_left])
    assert own_headers(dead.headers) == ([] if b"headers" in trimmed else HEADERS)
    found = dict(dead.headers)
    assert found["hw-dlq-trimmed"] == trimmed
    for name, content in [("value", value), ("key", key)]:
        digest = sha256(content).hexdigest().encode()
        is_trimmed = name.encode() in trimmed
        assert found.get(f"hw-dlq-{name}-bytes") == (b"%d" % len(content) if is_trimmed else None)
        assert found.get(f"hw-dlq-{name}-sha256") == (digest if is_trimmed else None)


def test_a_record_without_value_is_trimmed_to_an_empty_one() -> None:
    dead = dead_letter_record(LETTER, b"k", None, HEADERS * 1000, 5000)
    assert (dead.key, dead.value) == (b"k", b"")
    assert dict(dead.headers)["hw-dlq-value-sha256"] == sha256(b"").hexdigest().encode()


def test_where_not_even_the_facts_fit_nothing_else_is_kept() -> None:
    dead = dead_letter_record(LETTER, None, b"value", [], 10)
    assert (dead.key, dead.value) == (b"", b"")
    assert dict(dead.headers)["hw-dlq-key-bytes"] == b"0"


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
    assert DeadLetterHeaders.read(headers) == DeadLetterHeaders(
        "orders", 4, 99, None, stage="VALUE_CONVERTER", application="sink",
        raised=Raised("org.apache.kafka.connect.errors.DataException"),
    )  # fmt: skip


def test_of_another_systems_dead_letter_the_coordinates_are_enough() -> None:
    connect = [(f"__connect.errors.{name}", text) for name, text in zip(*PLACE, strict=True)]
    assert DeadLetterHeaders.read(connect) == DeadLetterHeaders("orders", 4, 99, None)
    spring = [
        ("kafka_original-topic", b"orders"),
        ("kafka_original-partition", bytes([255] * 4)),
        ("kafka_original-offset", bytes([255] * 8)),
    ]
    assert DeadLetterHeaders.read(spring) == DeadLetterHeaders("orders", -1, -1, None)


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
    assert DeadLetterHeaders.read(headers) == DeadLetterHeaders(
        "orders", 4, 2**40, None, attempt=3, application="billing", raised=Raised("java.lang.IllegalStateException")
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
        [("kafka_dlt-original-topic", b"t"), ("kafka_dlt-original-partition", b"four")],
        [("kafka_dlt-original-topic", b"t"), ("kafka_dlt-original-offset", b"offset:8")],
        [("__connect.errors.topic", None)],
    ],
)
def test_headers_that_are_no_dead_letters_are_not_taken_for_one(headers) -> None:
    assert DeadLetterHeaders.read(headers) is None


def test_a_reason_code_of_a_newer_version_is_no_error() -> None:
    headers = [("hw-dlq-reason", b"too_new"), *DeadLetterHeaders("t", 0, 1, None).headers()]
    letter = DeadLetterHeaders.read(headers)
    assert letter
    assert letter.reason is None
