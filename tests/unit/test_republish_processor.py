"""One record on its way through a republisher, without Kafka."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from envelope import Envelope, EnvelopeError, Hop, Limits, Lineage, Node, Reason, decode, encode
from envelope.hops import HopWriter
from envelope.redrive import Redrive, redrive_hops
from envelope.times import micros_of
from jobs.republish import (
    PASS,
    InputRecord,
    InputTopics,
    JsonPayload,
    Outgoing,
    OutputRecord,
    Processor,
    RetryTopics,
    Transform,
    TransformError,
    Wrapping,
    identity,
)
from jobs.republish.retry import RETRY_DUE, due_ms
from tests.messages import Leg

TOPIC_ID = "PxoY3ACJQLqZcIuB3RIpew"
HOP = Hop("raw", 1, 3, via="r1", index=0, count=1)
ENVELOPE = Envelope(
    b"payload",
    (HOP,),
    key=b"N1",
    event_id="e1",
    event_time_us=5,
    payload_type="t",
    producer="p",
    sequence=7,
    traceparent="00-a-b-01",
    unknown=b"\xc0\x3e\x07",
)
VALUE = encode(ENVELOPE)


def processor(transform: Transform = identity, source: InputTopics | str = "legs", **options: Any) -> Processor:
    source = InputTopics((source,)) if isinstance(source, str) else source
    options = {"targets": {"out": 1_048_588, "other": 2000}, **options}
    return Processor(transform, via="r2", source=source, **options)


def record(value: bytes | None = VALUE, key: bytes | None = b"N1", topic: str = "legs", **fields: Any) -> InputRecord:
    facts: dict[str, Any] = {"timestamp_ms": 1_700_000_000_000, "leader_epoch": 4, "topic_id": TOPIC_ID} | fields
    return InputRecord(topic, 2, 17, key, value, **facts)


def through(way: Processor, item: InputRecord) -> list[Outgoing]:
    return way.process(item, HopWriter(item.topic, item.partition, "r2", topic_id=item.topic_id))


def refused(way: Processor, item: InputRecord) -> EnvelopeError:
    with pytest.raises(EnvelopeError) as caught:
        through(way, item)
    return caught.value


def my_hop(**changes: Any) -> Hop:
    facts: dict[str, Any] = {"via": "r2", "index": 0, "count": 1, "topic_id": TOPIC_ID, "leader_epoch": 4}
    return Hop("legs", 2, 17, timestamp_ms=1_700_000_000_000, **facts | changes)


def test_an_envelope_is_passed_on_with_one_hop_more() -> None:
    (out,) = through(processor(), record())
    assert (out.topic, out.key, decode(out.value)) == ("out", b"N1", ENVELOPE.with_hop(my_hop()))


@pytest.mark.parametrize("timestamp", [1_700_000_000_000_000_000, -(2**62), 2**63 - 1])
def test_a_timestamp_in_another_unit_does_not_stop_it(timestamp: int) -> None:
    """Report KAFKA-6482: nanoseconds ended it at every start. As in a flow, the event time is the nearest in 64 bits, and
    a timestamp before 1970 is none."""
    plain = InputTopics(("legs",), Wrapping.NONE)
    (out,) = through(processor(source=plain), record(b"{}", timestamp_ms=timestamp))
    found = decode(out.value)
    assert found.event_time_us == (micros_of(timestamp) if timestamp >= 0 else None)
    assert found.chain[0].timestamp_ms == timestamp
    assert decode(out.value, Limits()).event_time_us == found.event_time_us


def test_a_document_of_thousands_of_levels_is_a_dead_letter() -> None:
    """Stack depth reports of JSON parsers: 4 kB ended it at every start."""
    deep = b'{"k": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    error = refused(processor(source=InputTopics(("legs",), Wrapping.NONE, JsonPayload)), record(deep))
    assert error.reason is Reason.BAD_PAYLOAD


def test_the_same_record_gives_the_same_bytes_each_time() -> None:
    way = processor(lambda r: [PASS, OutputRecord(b"x"), OutputRecord(key=b"k")])
    assert through(way, record()) == through(way, record())


def test_a_record_without_an_envelope_is_the_root_of_its_event() -> None:
    (out,) = through(processor(source=InputTopics(("legs",), Wrapping.NONE)), record(b"bytes"))
    assert decode(out.value) == Envelope(b"bytes", (my_hop(),), key=b"N1", event_time_us=1_700_000_000_000_000)


def test_no_outputs_are_no_outputs() -> None:
    assert through(processor(lambda r: None), record()) == []
    assert through(processor(lambda r: []), record()) == []


def test_several_outputs_are_numbered_in_their_order() -> None:
    def split(item: InputRecord) -> Iterator[OutputRecord]:
        for part in item.payload.split(b"l"):
            yield OutputRecord(part)

    outs = [decode(out.value) for out in through(processor(split), record(encode(ENVELOPE)))]
    assert [(out.payload, out.chain[-1].index, out.chain[-1].count) for out in outs] == [(b"pay", 0, 2), (b"oad", 1, 2)]


def test_a_changed_payload_keeps_everything_else() -> None:
    (out,) = through(processor(lambda r: OutputRecord(b"new", payload_type="u")), record())
    assert decode(out.value) == Envelope(
        b"new",
        (HOP, my_hop()),
        key=b"N1",
        event_id="e1",
        event_time_us=5,
        payload_type="u",
        producer="p",
        sequence=7,
        traceparent="00-a-b-01",
        unknown=b"\xc0\x3e\x07",
    )


@pytest.mark.parametrize("payload", [{}, {"payload": b"new"}], ids=["same payload", "new payload"])
@pytest.mark.parametrize(
    ("before", "after", "rekeyed"),
    [(b"N1", b"N1", False), (b"N1", b"UA", True), (b"N1", None, True), (None, b"UA", True), (None, None, False)],
)
def test_rekeyed_follows_from_comparing_keys(before, after, rekeyed, payload) -> None:
    value = encode(Envelope(b"payload", key=before))
    (out,) = through(processor(lambda r: OutputRecord(key=after, **payload)), record(value, before))
    got = decode(out.value)
    assert (out.key, got.key, got.chain[-1].rekeyed) == (after, after, rekeyed)
    assert got.chain[-1].keyless == (after is None)


def test_a_hop_says_that_its_input_had_no_key_if_a_republisher_wrote_it() -> None:
    give_a_key = processor(lambda r: OutputRecord(key=b"UA"))
    republished = record(encode(Envelope(b"payload", (HOP,))), None)
    for item, keyless in ((record(encode(Envelope(b"payload")), None), False), (republished, True)):
        (out,) = through(give_a_key, item)
        assert decode(out.value).chain[-1].keyless == keyless


def test_a_target_may_be_chosen_and_only_a_declared_one() -> None:
    assert through(processor(lambda r: OutputRecord(topic="other")), record())[0].topic == "other"
    assert refused(processor(lambda r: OutputRecord(topic="elsewhere")), record()).reason is Reason.BAD_TOPIC


def test_a_target_that_the_event_came_through_is_a_loop() -> None:
    way = processor(targets={"out": 10_000, "raw": 10_000})
    assert through(way, record())
    back = processor(lambda r: OutputRecord(topic="raw"), targets={"out": 10_000, "raw": 10_000})
    assert refused(back, record()).reason is Reason.CHAIN_LOOP


def test_all_outputs_or_none() -> None:
    def third_fails(item: InputRecord) -> Iterator[OutputRecord]:
        for i in range(5):
            yield OutputRecord(b"%d" % (1 // (i - 2)))

    error = refused(processor(third_fails), record())
    assert isinstance(error, TransformError)
    assert (error.reason, error.error) == (Reason.TRANSFORM_FAILED, "ZeroDivisionError")


def test_the_text_of_an_exception_goes_nowhere() -> None:
    def leaks(item: InputRecord) -> None:
        raise ValueError(item.payload.decode())

    error = refused(processor(leaks), record())
    assert "payload" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_transform_may_refuse_with_a_reason_of_its_own() -> None:
    def refuse(item: InputRecord) -> None:
        raise EnvelopeError(Reason.MISSING_FIELD, "no tail number")

    assert refused(processor(refuse), record()).reason is Reason.MISSING_FIELD


@pytest.mark.parametrize("wrong", [b"bytes", [b"bytes"], 1, "text"])
def test_a_transform_that_returns_something_else_has_failed(wrong: Any) -> None:
    error = refused(processor(lambda r: wrong), record())
    assert error.reason is Reason.TRANSFORM_FAILED
    assert re.match(
        r"the transform returned (bytes|int|str); it returns None, an OutputRecord, or several$", error.detail
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_ten_million_outputs_are_refused_before_they_exist() -> None:
    made = []

    def endless(item: InputRecord) -> Iterator[OutputRecord]:
        for i in range(10_000_000):
            made.append(i)
            yield PASS

    assert refused(processor(endless, max_outputs=100), record()).reason is Reason.TOO_MANY_OUTPUTS
    assert len(made) == 101


def test_an_output_larger_than_its_topic_takes_is_refused_with_its_siblings() -> None:
    way = processor(lambda r: [PASS, OutputRecord(bytes(2500), topic="other")])
    assert refused(way, record()).reason is Reason.PAYLOAD_TOO_LARGE
    assert refused(processor(lambda r: OutputRecord(bytes(2_000_000))), record()).reason is Reason.PAYLOAD_TOO_LARGE


def test_an_output_whose_payload_no_reader_would_accept_is_refused() -> None:
    limits = Limits(payload_bytes=100)
    assert len(through(processor(lambda r: [PASS, OutputRecord(bytes(100))], limits=limits), record())) == 2
    way = processor(lambda r: [PASS, OutputRecord(bytes(101))], limits=limits)
    assert refused(way, record()).reason is Reason.PAYLOAD_TOO_LARGE


def test_json_is_parsed_and_nonsense_refused() -> None:
    source = InputTopics.of("legs", "json")
    (out,) = through(processor(lambda r: OutputRecord(key=r.data["tail"].encode()), source), record(b'{"tail": "N7"}'))
    assert out.key == b"N7"
    (out,) = through(
        processor(lambda r: OutputRecord(key=r.data["tail"].encode()), source), record(b'\0\0\0\0\7{"tail": "N7"}')
    )
    assert (out.key, decode(out.value).payload) == (b"N7", b'{"tail": "N7"}')
    for wrong in (b'{"tail": ', b"\xff", b"\0\0\0\0\7"):
        assert refused(processor(source=source), record(wrong)).reason is Reason.BAD_PAYLOAD


@pytest.mark.parametrize("kind", ["raw", "json", "cloudevents"])
def test_a_redriven_record_of_no_bytes_is_refused_as_empty(kind: str) -> None:
    hops = redrive_hops(Hop("legs", 2, 17), Hop("dead", 0, 0), Redrive(hole=False, application="r2"))
    value = encode(Envelope(b"", hops, key=b"N1"))
    assert refused(processor(source=InputTopics.of("legs", kind)), record(value)).reason is Reason.EMPTY


@pytest.mark.parametrize("stamp", [1_600_000_000_000, None])
def test_the_event_time_of_a_redriven_record_is_that_of_the_rejected_one_however_often_it_is_redriven(
    stamp: int | None,
) -> None:
    hops = redrive_hops(
        Hop("legs", 2, 17, timestamp_ms=stamp), Hop("dead", 0, 0), Redrive(hole=False, application="r2")
    )
    value = encode(Envelope(b"x", hops, key=b"N1"))
    source = InputTopics.of("legs", "raw")
    outputs = [through(processor(source=source), record(value, timestamp_ms=now)) for now in (1_700_000_000_000, 5)]
    times = {decode(out.value).event_time_us for made in outputs for out in made}
    assert times == {None if stamp is None else stamp * 1_000}


@pytest.mark.parametrize("frame", [b"", b"\0\0\0\0\x07\0", b"\0\0\0\0\x07\x02\x04"])
def test_a_protobuf_payload_is_parsed_its_framing_stripped_and_its_type_noted(frame: bytes) -> None:
    source = InputTopics(("legs",), Wrapping.NONE, Leg)
    (out,) = through(
        processor(lambda r: OutputRecord(key=r.data.tail.encode()), source),
        record(frame + Leg(tail="N7").SerializeToString()),
    )
    got = decode(out.value)
    assert (out.key, got.payload_type) == (b"N7", Leg.DESCRIPTOR.full_name)
    assert got.payload == Leg(tail="N7").SerializeToString()


def test_a_payload_that_is_not_what_the_source_declares_is_refused() -> None:
    bare, wrapped = InputTopics(("legs",), Wrapping.NONE, Leg), InputTopics(("legs",), payload=Leg)
    assert refused(processor(source=bare), record(b"\xff\xff")).reason is Reason.BAD_PAYLOAD
    framed = b"\0\0\0\0\7\2\2" + Leg(tail="N7").SerializeToString()  # the second message of its schema
    assert refused(processor(source=bare), record(framed)).reason is Reason.UNKNOWN_PAYLOAD_TYPE
    assert refused(processor(source=wrapped), record()).reason is Reason.UNKNOWN_PAYLOAD_TYPE


def test_a_cloudevent_becomes_an_envelope_and_its_headers_go_with_it() -> None:
    headers = [("ce_specversion", b"1.0"), ("ce_id", b"1"), ("ce_source", b"s"), ("ce_type", b"t"), ("own", b"x")]
    (out,) = through(processor(source=InputTopics.of("legs", "cloudevents")), record(b"data", headers=headers))
    assert out.headers == [("own", b"x")]
    got = decode(out.value)
    assert (got.event_id, got.payload_type, got.payload, got.chain) == ("s#1", "t", b"data", (my_hop(),))
    assert got.event_time_us == 1_700_000_000_000_000
    dated = [*headers, ("ce_time", b"1970-01-01T00:00:01Z")]
    (out,) = through(processor(source=InputTopics.of("legs", "cloudevents")), record(b"data", headers=dated))
    assert decode(out.value).event_time_us == 1_000_000
    assert (
        refused(processor(source=InputTopics.of("legs", "cloudevents")), record(b"data")).reason is Reason.MISSING_FIELD
    )


def test_headers_pass_through_and_the_trace_is_carried_on() -> None:
    headers = [("a", b"1"), ("a", None), ("traceparent", b"00-x-y-01")]
    (out,) = through(processor(source=InputTopics.of("legs", "raw")), record(b"data", headers=headers))
    assert out.headers == headers
    assert decode(out.value).traceparent == "00-x-y-01"
    (out,) = through(processor(lambda r: OutputRecord(headers=[("b", b"2")])), record(headers=headers))
    assert out.headers == [("b", b"2")]


def test_headers_of_retries_and_earlier_deaths_end_here() -> None:
    headers = [("hw-retry-attempt", b"2"), ("hw-dlq-topic", b"legs"), ("a", b"1")]
    assert through(processor(), record(headers=headers))[0].headers == [("a", b"1")]


def test_the_mirror_is_written_on_request() -> None:
    headers = [("a", b"1"), ("hw-root", b"old:0:0"), ("CE_ID", b"old")]
    (out,) = through(processor(headers_mirror=True), record(headers=headers))
    found = dict(out.headers)
    assert (found["hw-root"], found["ce_id"], found["a"], "CE_ID" in found) == (b"raw:1:3", b"e1", b"1", False)
    (out,) = through(processor(source=InputTopics.of("legs", "raw"), headers_mirror=True), record(b"data"))
    assert dict(out.headers)["hw-root"] == b"legs:2:17"


def test_a_destination_is_written_where_there_was_one_or_on_request() -> None:
    def destination(way: Processor, **changes: Any) -> str:
        (out,) = through(way, record(encode(Envelope(b"p", key=b"N1", **changes))))
        return decode(out.value).destination

    assert destination(processor()) == ""
    assert destination(processor(), destination="legs") == "out"
    assert destination(processor(lambda r: OutputRecord(b"new")), destination="legs") == "out"
    assert destination(processor(mark_destination=True)) == "out"


def test_the_record_tells_the_transform_where_it_came_from() -> None:
    seen: list[InputRecord] = []

    def look(item: InputRecord) -> None:
        seen.append(item)

    through(processor(look), record(headers=[("hw-retry-attempt", b"3")]))
    (item,) = seen
    assert (item.topic, item.partition, item.offset, item.chain) == ("legs", 2, 17, (HOP,))
    assert item.root == Node("raw", 1, 3)
    assert str(item.lineage) == "raw:1:3 -> legs:2:17"
    assert (item.event_id, item.event_time_us, item.payload, item.attempt) == ("e1", 5, b"payload", 3)
    assert item.envelope == ENVELOPE
    assert repr(item) == "InputRecord(legs:2:17)"


RETRY = RetryTopics({"legs.retry": 5.0})


@pytest.mark.parametrize(
    "source", [InputTopics(("legs",)), InputTopics(("legs",), Wrapping.NONE, JsonPayload)], ids=["envelope", "JSON"]
)
def test_a_detour_over_a_retry_topic_changes_nothing_of_where_a_message_stands(source: InputTopics) -> None:
    value = VALUE if source.wrapping is Wrapping.ENVELOPE else b'{"a": 1}'
    way = processor(
        lambda r: [OutputRecord(key=b"a"), OutputRecord(key=b"b")], source, retry_topics={"legs.retry": 10_000}
    )
    direct = through(way, record(value))

    first = record(value, headers=[("own", b"x")])
    way.open(first)
    detour = way.detour(
        first,
        HopWriter("legs", 2, "r2", topic_id=TOPIC_ID),
        "legs.retry",
        RETRY.headers("legs.retry", 1, "OSError", 1000),
    )
    assert detour.headers == [
        ("own", b"x"),
        ("hw-retry-attempt", b"2"),
        ("hw-retry-due", b"6000"),
        ("hw-retry-error", b"OSError"),
    ]
    again = InputRecord("legs.retry", 0, 99, detour.key, detour.value, detour.headers)
    late = way.process(again, HopWriter("legs.retry", 0, "r2"))
    assert again.attempt == 2
    assert again.payload == first.payload
    assert again.data == first.data
    for one, other in zip(direct, late, strict=True):
        own = Node("out", 1, 1)
        lineages = [Lineage.of(decode(out.value).chain, own) for out in (one, other)]
        assert lineages[0].standing().position == lineages[1].standing().position
        assert lineages[0].standing().lane == lineages[1].standing().lane
        assert lineages[1].pass_through


def test_retry_topics_are_used_one_after_the_other() -> None:
    retry = RetryTopics({"r.5s": 5, "r.1m": 60})
    assert [retry.next(attempt) for attempt in (1, 2, 3)] == ["r.5s", "r.1m", None]
    with pytest.raises(ValueError, match="delay"):
        RetryTopics({"r": -1})


def test_an_envelope_that_was_written_for_another_topic_is_refused() -> None:
    value = encode(replace(ENVELOPE, destination="elsewhere"))
    assert refused(processor(), record(value)).reason is Reason.WRONG_DESTINATION
    assert through(processor(), record(encode(replace(ENVELOPE, destination="legs"))))


def test_key_and_headers_count_in_the_size_that_a_topic_takes() -> None:
    limited = processor(targets={"out": 1500})
    assert through(limited, record(headers=(("h", bytes(500)),)))
    assert refused(limited, record(headers=(("h", bytes(1500)),))).reason is Reason.PAYLOAD_TOO_LARGE
    assert refused(limited, record(headers=(("h" * 1500, None),))).reason is Reason.PAYLOAD_TOO_LARGE
    wide = processor(lambda r: OutputRecord(key=bytes(1500)), targets={"out": 1500})
    assert refused(wide, record()).reason is Reason.PAYLOAD_TOO_LARGE


def test_a_record_that_was_retried_twice_is_due_when_its_last_retry_says() -> None:
    first, last = (RETRY_DUE, b"1000"), (RETRY_DUE, b"5000")
    assert due_ms([first, ("other", b"9000"), last]) == 5000
    assert due_ms([first, (RETRY_DUE, b"soon")]) == due_ms([first, (RETRY_DUE, None)]) == due_ms([]) == 0
