"""A topic as a source, and one record read from it."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import polars as pl
import pytest

from aggregations.definition.element import Element, Record
from aggregations.definition.payloads import Json, Raw
from aggregations.definition.source import Decoded, RecordDecoder, Topic
from aggregations.errors import FlowError
from envelope import Envelope, EnvelopeError, Hop, Limits, Reason, Siblings, encode
from tests.messages import Every, Leg, Point

LEG = Leg(tail="N1", minutes=7)
RECORD = Record("legs", 2, 17, b"N1", None, timestamp_ms=5)
HOP = Hop("raw", 1, 3, via="r", index=0)


def read(topic: Topic, value: bytes | None, columns: frozenset[str] | None = None, **fields: object) -> Decoded:
    return RecordDecoder(topic, columns).decode(replace(RECORD, value=value, **fields))  # type: ignore[arg-type]


def reason(topic: Topic, value: bytes | None, **fields: object) -> Reason:
    with pytest.raises(EnvelopeError) as error:
        read(topic, value, **fields)  # type: ignore[arg-type]
    return error.value.reason


def sealed(payload: bytes = LEG.SerializeToString(), **fields: object) -> bytes:
    return encode(Envelope(payload, **fields))  # type: ignore[arg-type]


def test_a_protobuf_payload_in_an_envelope_has_its_fields_as_columns() -> None:
    decoded = read(Topic("legs", Leg), sealed(chain=(HOP,), key=b"N1", event_id="e", event_time_us=-4))
    assert decoded.columns == {"tail": "N1", "carrier": "", "minutes": 7, "late": False, "delay": None}
    assert str(decoded.lineage) == "raw:1:3 -> legs:2:17"
    assert (decoded.chain, decoded.key) == ((HOP,), b"N1")
    assert (decoded.event_id, decoded.event_time_us, decoded.identity) == ("e", -4, "e")


def test_an_element_has_what_its_record_and_its_envelope_say() -> None:
    decoded = read(Topic("legs", Raw()), sealed(b"x", chain=(HOP,), key=b"N1", event_id="e", event_time_us=-4))
    headers = (("h", b"v"), ("h", None))
    record = replace(RECORD, headers=headers)
    assert decoded.element(record) == Element(
        {"value": b"x"}, b"N1", RECORD.node, (HOP,), -4, "e", headers, timestamp_ms=RECORD.timestamp_ms
    )


def test_without_an_event_time_the_records_timestamp_counts() -> None:
    assert read(Topic("legs", Leg), sealed()).event_time_us == 5_000
    assert read(Topic("legs", Raw(), envelope=False), b"x").event_time_us == 5_000


def test_the_event_id_identifies_siblings_only_where_the_source_says_so() -> None:
    assert read(Topic("legs", Leg, siblings=Siblings.DROP), sealed(event_id="e")).identity == ""


def test_only_the_columns_asked_for_are_read() -> None:
    assert read(Topic("legs", Leg), sealed(), frozenset({"minutes"})).columns == {"minutes": 7}
    assert read(Topic("legs", Leg), sealed(b"\x0a\x01\xff"), frozenset({"minutes"})).columns == {"minutes": 0}
    assert reason(Topic("legs", Leg), sealed(b"\x0a\x01\xff")) is Reason.BAD_PAYLOAD
    json = Topic("legs", Json({"a": int, "b": int}))
    assert read(json, sealed(b'{"a": 1, "b": "x"}'), frozenset({"a"})).columns == {"a": 1}


def test_a_topic_without_envelopes_is_its_own_root() -> None:
    decoded = read(Topic("legs", Leg, envelope=False, cluster="eu"), LEG.SerializeToString())
    assert decoded.columns["minutes"] == 7
    assert decoded.lineage.root == replace(RECORD.node, cluster="eu")
    assert (decoded.chain, decoded.identity) == ((), "")


def test_confluent_framing_is_stripped_from_envelopes_and_from_bare_protobuf() -> None:
    frame = b"\x00\x00\x00\x00\x09\x00"
    assert read(Topic("legs", Leg, envelope=False), frame + LEG.SerializeToString()).columns["minutes"] == 7
    assert read(Topic("legs", Leg), frame + sealed()).columns["minutes"] == 7
    assert read(Topic("legs", Raw(), envelope=False), frame).columns == {"value": frame}


@pytest.mark.parametrize("value", [None, b""])
def test_a_record_without_value_is_empty_with_and_without_an_envelope(value: bytes | None) -> None:
    assert reason(Topic("legs", Leg), value) is Reason.EMPTY
    assert reason(Topic("legs", Leg, envelope=False), value) is Reason.EMPTY


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"key": b"N2"}, Reason.KEY_MISMATCH),
        ({"destination": "other"}, Reason.WRONG_DESTINATION),
        ({"payload_type": "tests.Point"}, Reason.UNKNOWN_PAYLOAD_TYPE),
        ({"chain": (Hop("legs", 0, 1),)}, Reason.CHAIN_LOOP),
        ({"payload": b"\x0a\xff"}, Reason.BAD_PAYLOAD),
    ],
)
def test_what_does_not_belong_here_is_refused(fields: dict[str, object], expected: Reason) -> None:
    assert reason(Topic("legs", Leg), sealed(**fields)) is expected  # type: ignore[arg-type]


def test_what_belongs_here_is_accepted() -> None:
    decoded = read(Topic("legs", Leg), sealed(key=b"N1", destination="legs", payload_type="tests.Leg"))
    assert decoded.columns["tail"] == "N1"
    assert read(Topic("legs", Json({"a": int})), sealed(b"{}", payload_type="leg/2")).columns == {"a": None}


def test_an_envelope_key_needs_a_record_key() -> None:
    assert reason(Topic("legs", Leg), sealed(key=b""), key=None) is Reason.KEY_MISMATCH


def test_a_bare_value_over_the_limit_is_too_large() -> None:
    topic = Topic("legs", Raw(), envelope=False, limits=Limits(payload_bytes=3))
    assert read(topic, b"abc").columns == {"value": b"abc"}
    assert reason(topic, b"abcd") is Reason.PAYLOAD_TOO_LARGE


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"n": 1, "x": 2, "s": "t", "b": true, "other": {}}', {"n": 1, "x": 2.0, "s": "t", "b": True}),
        (b'{"n": null}', {"n": None, "x": None, "s": None, "b": None}),
        (b'{"n": 128}', None),
        (b'{"n": 1.0}', None),
        (b'{"n": true}', None),
        (b'{"x": "2"}', None),
        (b'{"x": 1e999}', None),
        (b'{"s": "\xff"}', None),
        (b'{"s": "\\ud800"}', None),
        (b'{"b": 1}', None),
        (b"null", None),
        (b"[]", None),
        (b"{} {}", None),
        (b"", None),
    ],
)
def test_json_has_the_declared_types_or_is_refused(value: bytes, expected: dict[str, object] | None) -> None:
    topic = Topic("legs", Json({"n": pl.Int8, "x": float, "s": str, "b": bool}))
    if expected is None:
        assert reason(topic, sealed(value)) is Reason.BAD_PAYLOAD
    else:
        assert read(topic, sealed(value)).columns == expected


def test_messages_are_structs_repeated_fields_lists_enums_numbers_and_recursion_no_column() -> None:
    topic = Topic("legs", Every)
    point = pl.Struct({"x": pl.Int64, "name": pl.String})
    assert topic.schema["at"] == point
    assert topic.schema["track"] == pl.List(point)
    assert topic.schema["colour"] == pl.Int32()
    assert topic.schema["rep_bool"] == pl.List(pl.Boolean)
    assert "parent" not in topic.schema
    value = Every(at=Point(x=1), track=[Point(name="p"), Point()], colour=-7, rep_int32=[1, -1])
    columns = read(topic, sealed(value.SerializeToString())).columns
    assert columns["at"] == {"x": 1, "name": None}
    assert columns["track"] == [{"x": 0, "name": "p"}, {"x": 0, "name": None}]
    assert (columns["colour"], columns["rep_int32"]) == (-7, [1, -1])
    assert read(topic, sealed(b"")).columns["at"] is None


@pytest.mark.parametrize("payload", [Every, Json({"a": pl.Int64, "b": float}), Raw(), None])
def test_a_topic_is_picklable_and_equal_by_content_whatever_module_its_class_came_from(payload: object) -> None:
    topic = Topic("legs", payload)
    again = pickle.loads(pickle.dumps(topic))
    assert again == topic
    assert hash(again) == hash(topic)
    assert again.schema == topic.schema


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (lambda: Topic("no topic", Leg), "'no topic' is not a topic name that Kafka allows; use 1 to 249 letters"),
        (lambda: Topic(3, Leg), "3 is not a topic name"),  # type: ignore[arg-type]
        (lambda: Topic("legs", dict), "topic legs: the payload must be .*Json"),
        (lambda: Topic("legs", Json({"_row": int})), "topic legs: .* reserved; rename _row"),
        (lambda: Topic("legs", Leg, siblings="all"), "siblings= takes one of event_id, group, drop; got 'all'"),  # type: ignore[arg-type]
        (lambda: Topic("legs", Leg, tombstones="keep"), "tombstones= takes one of skip, dead_letter, element"),  # type: ignore[arg-type]
        (lambda: Topic("legs", Leg, limits=3), r"limits= takes envelope.Limits\(...\); got int"),  # type: ignore[arg-type]
        (lambda: Topic("legs", Leg, cluster=3), "cluster= takes text; got int"),  # type: ignore[arg-type]
        (lambda: Topic("legs", Leg, envelope="no"), "envelope= takes True or False; got str"),  # type: ignore[arg-type]
        (lambda: Json({"a": pl.Date}), "Float64"),
        (lambda: Json([("a", int)]), r"Json\(\) takes a mapping of column names.*got list"),  # type: ignore[arg-type]
        (lambda: Json({"": int}), "the name of a column is '': a field without a name"),  # polars#8955
        (lambda: Json({'a"b': int}), "the name of a column is 'a\"b': a field without a name, or with a quote"),
        (lambda: Json({"a": {"b\\c": int}}), "column 'a': the name of a field is .*Rename it upstream"),
        (lambda: Json({"a": [pl.Struct({"b\n": pl.Int64})]}), "the name of a field is .*control character"),
        (lambda: Json({"\ud800": int}), "surrogate"),
        (lambda: Json({3: int}), "the name of a column takes text; got int"),  # type: ignore[dict-item]
        (lambda: Json({"a": {3: int}}), "column 'a': the name of a field takes text; got int"),
    ],
)
def test_impossible_definitions_are_refused_at_once_with_what_to_change(bad: Callable[[], object], match: str) -> None:
    with pytest.raises(FlowError, match=match):
        bad()
