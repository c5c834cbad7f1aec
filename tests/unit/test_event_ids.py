"""Event ids that the kit gives: the same text in every process and version."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from envelope import Envelope, EnvelopeError, Hop, HopWriter, Reason, decode, encode
from envelope.event_ids import EventIdKind, EventIds, coordinates_of
from envelope.redrive import Redrive, redrive_hops
from jobs.republish import InputRecord, InputTopics, JsonPayload, Processor, Wrapping, identity
from tests.messages import Leg

ORDER = {"number": 17, "till": "till 3", "lines": [{"b": 1, "a": "é"}], "paid": True, "price": 0.1, "note": None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coordinates", "orders#Qx1:2:17"),
        ("field:number", "17"),
        ("field:till", "till 3"),
        ("hash:number", "6f897b75d5f96dd8e6af3e5d40684fa5"),
        ("hash:number,till", "8596796a935191a27af7d31ae41e75eb"),
        ("hash:number,till,lines,paid,price,note", "77f18b85aebe13af5a375563b9bf5bd9"),
    ],
)
def test_golden_ids(text: str, expected: str) -> None:
    """What was given once is given by every later version."""
    assert EventIds.parse(text).of(coordinates_of("orders", 2, 17, "Qx1", "", 0), ORDER) == expected


def test_an_offset_that_is_used_again_makes_another_id() -> None:
    assert coordinates_of("orders", 2, 17, "Qx1", "eu", 3) == "eu/orders#Qx1:2:17@3"


def test_an_id_is_the_same_in_another_process_with_another_seed_of_hashes() -> None:
    program = f"from envelope.event_ids import EventIds; print(EventIds.parse('hash:number,lines').of('', {ORDER!r}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in "12"
    }
    assert found == {EventIds.parse("hash:number,lines").of("", ORDER) + "\n"}


def test_values_that_differ_have_different_hashes() -> None:
    values: list[Any] = [1, "1", True, None, 1.0, "", "i1:1", [1], ["1"], {"a": 1}, b"1"]
    ids = {EventIds.parse("hash:a").of("", {"a": value}) for value in values}
    assert len(ids) == len(values)
    of = EventIds.parse("hash:a,b").of
    assert of("", {"a": "ab", "b": "c"}) != of("", {"a": "a", "b": "bc"})
    assert of("", {"a": "x", "b": "y"}) != EventIds.parse("hash:b,a").of("", {"a": "x", "b": "y"})
    assert of("", {"a": {"x": 1, "y": 2}, "b": 0}) == of("", {"a": {"y": 2, "x": 1}, "b": 0}), "an object has no order"


def test_a_dot_leads_into_an_object_and_a_message_has_fields() -> None:
    assert EventIds.parse("field:order.number").of("", {"order": {"number": 5}}) == "5"
    assert EventIds.parse("field:tail").of("", Leg(tail="N1")) == "N1"


@pytest.mark.parametrize("data", [{}, {"b": 1}, None, SimpleNamespace(a=1)])
def test_a_missing_field_is_a_reason_code(data: Any) -> None:
    for text in ("field:a", "hash:a"):
        with pytest.raises(EnvelopeError, match="missing_field: the payload has no field 'a'"):
            EventIds.parse(text).of("", data)


@pytest.mark.parametrize("value", [None, 1.5, True, "", [1]])
def test_a_field_that_is_no_id_is_a_reason_code_and_not_quoted(value: Any) -> None:
    with pytest.raises(EnvelopeError, match="bad_payload: field 'a'"):
        EventIds.parse("field:a").of("", {"a": value})


@pytest.mark.parametrize("text", ["", "field", "field:", "field:a,b", "hash", "hash:a,,b", "coordinates:a", "uuid"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"coordinates, field:NAME, or hash:NAME,NAME"):
        EventIds.parse(text)
    assert EventIds.parse("hash:a,b") == EventIds(EventIdKind.HASH, ("a", "b"))


def processed(value: bytes, event_id: str | None = "coordinates", **record: Any) -> Envelope:
    source = InputTopics("orders", Wrapping.NONE, JsonPayload, event_id=event_id)
    processor = Processor(identity, via="r", source=source, targets={"out": 1_000_000})
    made = InputRecord("orders", 2, record.get("offset", 17), b"k", value, topic_id="Qx1")
    [sent] = processor.process(made, HopWriter("orders", 2, "r"))
    return decode(sent.value)


def test_a_republisher_gives_raw_records_an_event_id_on_request() -> None:
    value = json.dumps(ORDER).encode()
    assert processed(value).event_id == "orders#Qx1:2:17"
    assert processed(value, "field:number").event_id == "17"
    assert processed(value, "hash:number").event_id == EventIds.parse("hash:number").of("", ORDER)
    assert processed(value, None).event_id == ""
    with pytest.raises(EnvelopeError) as refused:
        processed(b"{}", "field:number")
    assert refused.value.reason is Reason.MISSING_FIELD


def test_a_redriven_record_has_the_id_of_the_record_that_was_rejected() -> None:
    value = json.dumps(ORDER).encode()
    hops = redrive_hops(
        Hop("orders", 2, 17, topic_id="Qx1"), Hop("orders.dead", 0, 5), Redrive(application="r", hole=False)
    )
    again = encode(Envelope(value, hops))
    assert processed(again, offset=99).event_id == processed(value).event_id == "orders#Qx1:2:17"


def test_ids_are_for_records_without_an_envelope_and_fields_for_a_declared_payload() -> None:
    with pytest.raises(ValueError, match="without an envelope"):
        InputTopics("orders", event_id="coordinates")
    with pytest.raises(ValueError, match="declare the payload"):
        InputTopics.of("orders", "raw", event_id="field:number")
    assert InputTopics.of("orders", "raw", event_id="coordinates").event_id == EventIds(EventIdKind.COORDINATES)
