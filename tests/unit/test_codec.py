"""The codec's borders, one by one; tests/property/test_codec.py has the rest."""

import pickle

import pytest

from envelope import Envelope, EnvelopeError, Hop, Limits, Reason, append_hop, decode, encode
from envelope import envelope_pb2 as pb
from envelope.codec import (
    HEAD,
    append_bytes,
    check_head,
    check_seal,
    encode_hop,
    is_sealed,
    parse,
    redriven_payload,
    rewrite,
    varint,
)
from envelope.framing import strip_frame
from envelope.limits import MAX_INDEX, check_coordinates, check_topic
from envelope.redrive import Redrive, redrive_hops
from tests.unit.bad_inputs import reason, sealed, unsealed

HOP = Hop("raw", 1, 3, via="r", index=0, count=1)
SMALL = Limits(hops=2, payload_bytes=10, overhead_bytes=100, topic_chars=5)


@pytest.mark.parametrize(
    ("envelope", "expected"),
    [
        (Envelope(b"x" * 10, (HOP, HOP)), None),
        (Envelope(b"x" * 11), Reason.PAYLOAD_TOO_LARGE),
        (Envelope(b"", (HOP, HOP, HOP)), Reason.TOO_MANY_HOPS),
        (Envelope(b"", (Hop("topic6", 0, 0),)), Reason.BAD_TOPIC),
        (Envelope(b"", format=2), Reason.UNSUPPORTED_FORMAT),
        (Envelope(b"", format=0), Reason.UNSUPPORTED_FORMAT),
    ],
)
def test_what_breaks_a_limit_is_neither_written_nor_read(envelope: Envelope, expected: Reason | None) -> None:
    assert reason(lambda: encode(envelope, SMALL)) is expected
    if envelope.format == 1:
        assert reason(lambda: decode(encode(envelope), SMALL)) is expected


def test_a_message_may_have_its_payload_and_the_overhead_and_no_byte_more() -> None:
    value = encode(Envelope(b"", event_id="e" * 50))
    for payload_bytes in (0, 7):
        assert (
            reason(lambda n=payload_bytes: decode(value, Limits(payload_bytes=n, overhead_bytes=len(value) - n)))
            is None
        )
        assert check_head(value, Limits(payload_bytes=payload_bytes, overhead_bytes=len(value) - payload_bytes)) is None
        tight = Limits(payload_bytes=payload_bytes, overhead_bytes=len(value) - payload_bytes - 1)
        assert reason(lambda limits=tight: decode(value, limits)) is Reason.PAYLOAD_TOO_LARGE
        assert reason(lambda limits=tight: check_head(value, limits)) is Reason.PAYLOAD_TOO_LARGE


@pytest.mark.parametrize("number", [0, 1, MAX_INDEX])
def test_an_index_or_count_has_32_bits(number: int) -> None:
    assert decode(encode(Envelope(b"", (Hop("t", 0, 0, index=number, count=number),)))).chain[0].count == number
    for bad in (-1, MAX_INDEX + 1):
        assert reason(lambda bad=bad: encode_hop(Hop("t", 0, 0, index=bad))) is Reason.BAD_COORDINATES
        assert reason(lambda bad=bad: encode_hop(Hop("t", 0, 0, index=0, count=bad))) is Reason.BAD_COORDINATES


@pytest.mark.parametrize(
    ("partition", "offset", "expected"),
    [
        (0, 0, None),
        (2**31 - 1, 2**63 - 2, None),
        (2**31, 0, Reason.BAD_COORDINATES),
        (0, 2**63 - 1, Reason.BAD_COORDINATES),
        (-1, 0, Reason.BAD_COORDINATES),
        (0, -1, Reason.BAD_COORDINATES),
        (None, 0, Reason.MISSING_FIELD),
        (0, None, Reason.MISSING_FIELD),
    ],
)
def test_coordinates_are_those_that_kafka_can_have(partition, offset, expected) -> None:
    assert reason(lambda: check_coordinates(partition, offset)) is expected
    if expected is None:
        assert check_coordinates(partition, offset) == (partition, offset)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("x" * 249, None),
        ("x" * 250, Reason.BAD_TOPIC),
        ("", Reason.MISSING_FIELD),
        (".", Reason.BAD_TOPIC),
        ("...", None),
        ("aZ0._-", None),
        ("a b", Reason.BAD_TOPIC),
    ],
)
def test_a_topic_has_a_name_that_kafka_allows(topic: str, expected: Reason | None) -> None:
    assert reason(lambda: check_topic(topic)) is expected
    if expected is None:
        assert check_topic(topic) == topic


def test_a_hop_is_appended_as_a_value_or_as_its_bytes_and_within_the_limits_given() -> None:
    value = encode(Envelope(b"payload", (HOP,), key=b"k", destination="legs"))
    more = Hop("legs", 0, 4)
    assert append_hop(value, encode_hop(more)) == append_hop(value, more) == append_bytes(value, encode_hop(more))
    assert decode(append_hop(value, more)) == Envelope(b"payload", (HOP, more), key=b"k", destination="legs")
    assert decode(append_hop(value, more, key=b"")).key == b""
    assert decode(append_hop(value, more, destination="out")) == Envelope(
        b"payload", (HOP, more), key=b"k", destination="out"
    )
    long = Hop("topic6", 0, 0)
    assert reason(lambda: append_hop(value, long, limits=SMALL)) is Reason.BAD_TOPIC
    assert append_hop(value, Hop("t" * 260, 0, 0), limits=Limits(topic_chars=260))


def test_an_envelope_without_a_seal_is_checked_before_it_gets_one() -> None:
    bare = unsealed(b"\x3a\x01a")
    assert append_hop(bare, HOP) == sealed(HEAD + b"\x3a\x01a" + encode_hop(HOP))
    assert reason(lambda: append_hop(b"", HOP)) is Reason.EMPTY
    assert reason(lambda: append_hop(b"\x08\x02\x3a\x01a", HOP)) is Reason.UNSUPPORTED_FORMAT
    assert reason(lambda: append_hop(unsealed(bytes(200)), HOP, limits=SMALL)) is Reason.PAYLOAD_TOO_LARGE
    assert reason(lambda: append_hop(HEAD + b"\x3a\x01a", HOP)) is Reason.TRUNCATED


def test_a_seal_is_checked_wherever_another_writer_puts_the_field_that_says_so() -> None:
    body = unsealed(b"\x3a\x02ab\x10\x01")
    value = sealed(body)
    assert decode(value) == Envelope(b"ab")
    assert reason(lambda: decode(value.replace(b"ab", b"cd"))) is Reason.CHECKSUM_MISMATCH
    assert reason(lambda: decode(value[:-1] + bytes([value[-1] ^ 1]))) is Reason.CHECKSUM_MISMATCH
    assert reason(lambda: decode(body)) is Reason.TRUNCATED
    assert decode(append_hop(value, HOP)) == Envelope(b"ab", (HOP,))
    assert decode(sealed(unsealed(b""))) == Envelope(b"")


def test_a_value_is_sealed_if_it_begins_so_and_then_it_ends_so() -> None:
    smallest = sealed(HEAD)
    assert is_sealed(smallest)
    assert decode(smallest) == Envelope(b"")
    assert not is_sealed(unsealed(b"\x3a\x01a"))
    for torn in (smallest[:-1], smallest[1:], HEAD, HEAD[:3] + smallest):
        assert reason(lambda torn=torn: is_sealed(torn)) in (Reason.TRUNCATED, None)
    assert reason(lambda: is_sealed(HEAD + smallest[-5:])) is Reason.TRUNCATED
    assert reason(lambda: check_seal(sealed(HEAD)[:-1] + b"x")) is Reason.CHECKSUM_MISMATCH


def test_a_flip_in_the_field_that_says_so_does_not_switch_the_check_off() -> None:
    value = sealed(HEAD + b"\x3a\x01a")
    for bit in range(8):
        flipped = value[:2] + bytes([value[2] ^ 1 << bit]) + value[3:]
        assert reason(lambda flipped=flipped: check_seal(flipped)) is Reason.CHECKSUM_MISMATCH
        assert reason(lambda flipped=flipped: decode(flipped)) is not None
    for event_id, first in (("", b""), ("e", b"\x1a\x01e")):
        other = unsealed(first + b"\x3a\x0aabcd" + value[-6:])  # a payload that ends as a seal does
        assert decode(other) == Envelope(b"abcd" + value[-6:], event_id=event_id)
    assert check_seal(value[:2]) is None


def test_a_pickled_error_keeps_its_reason_and_detail() -> None:
    error = EnvelopeError(Reason.BAD_TOPIC, "a b")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.reason, again.detail) == (EnvelopeError, Reason.BAD_TOPIC, "a b")
    assert error.args == again.args == (Reason.BAD_TOPIC, "a b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", Reason.EMPTY),
        (b"\x08", Reason.NOT_AN_ENVELOPE),
        (b"\x09\x01\x3a\x01a", Reason.NOT_AN_ENVELOPE),
        (b"\x08\x00\x3a\x01a", Reason.NOT_AN_ENVELOPE),
        (b"\x08\x02\x3a\x01a", Reason.UNSUPPORTED_FORMAT),
        (b"\x08\x01", Reason.TRUNCATED),
        (b"\x08\x01\x3a", None),
    ],
)
def test_the_head_tells_what_a_value_is(value: bytes, expected: Reason | None) -> None:
    assert reason(lambda: check_head(value)) is expected


def test_a_rewritten_payload_has_the_limit_and_other_fields_do_not_ask_for_it() -> None:
    message = parse(encode(Envelope(b"x" * 20, (HOP,))))
    assert reason(lambda: rewrite(message, payload=b"x" * 11, limits=SMALL)) is Reason.PAYLOAD_TOO_LARGE
    assert decode(rewrite(message, payload=b"x" * 10, limits=SMALL)).payload == b"x" * 10
    assert decode(rewrite(message, event_id="e", limits=SMALL)) == Envelope(b"x" * 20, (HOP,), event_id="e")
    assert decode(rewrite(message, encode_hop(HOP))).chain == (HOP, HOP)
    assert message == parse(encode(Envelope(b"x" * 20, (HOP,))))


def test_a_field_that_the_schema_does_not_name_is_kept_with_the_hop_or_envelope_that_has_it() -> None:
    unknown = b"\xc0\x3e\x07"
    hop = Hop("t", 0, 1, unknown=unknown)
    assert decode(encode(Envelope(b"", (hop, HOP), unknown=unknown))) == Envelope(b"", (hop, HOP), unknown=unknown)
    assert reason(lambda: decode(unsealed(unknown + b"\x38\x05"))) is Reason.MALFORMED
    assert reason(lambda: decode(unsealed(b"\x38\x05" + unknown))) is Reason.MALFORMED


@pytest.mark.parametrize("number", [0, 1, 127, 128, 129, 16383, 16384, 2**32 - 1, 2**63 - 1])
def test_a_varint_is_written_as_protobuf_writes_it(number: int) -> None:
    assert pb.Hop(offset=number).SerializeToString() == b"\x18" + varint(number)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 100, 8191, 8192, 9000])
def test_a_frame_has_as_many_indexes_as_it_says(count: int) -> None:
    frame = b"\0\0\0\0\7" + varint(2 * count)
    for index in (b"\x00", b"\x80\x01", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"):
        assert strip_frame(frame + index * count + b"value") == b"value"


@pytest.mark.parametrize(
    ("value", "behind"),
    [
        (b"\0\0\0\0\7\x01value", b"value"),  # -1 indexes are none
        (b"\0\0\0\0\7\x80\x00value", b"value"),
        (b"\0\0\0\0\7\0", b""),
        (b"\0\0\0\0\7", b"\0\0\0\0\7"),
        (b"\0\0", b"\0\0"),
        (b"", b""),
        (b"\1\0\0\0\7\0value", b"\1\0\0\0\7\0value"),
        (b"\0\0\0\0\7\xff", b"\0\0\0\0\7\xff"),
        (b"\0\0\0\0\7\x02\xff\xff", b"\0\0\0\0\7\x02\xff\xff"),
        (b"\0\0\0\0\7\x06\x00\x00", b"\0\0\0\0\7\x06\x00\x00"),
        (b"\0\0\0\0\7" + b"\xff" * 10 + b"\0value", b"\0\0\0\0\7" + b"\xff" * 10 + b"\0value"),
    ],
)
def test_what_is_no_whole_frame_is_left_as_it_is(value: bytes, behind: bytes) -> None:
    assert strip_frame(value) == behind


def test_a_redriven_payload_is_an_envelope_within_the_limits_whose_last_hop_says_so() -> None:
    hops = redrive_hops(Hop("plain", 0, 7), Hop("dead", 0, 1), Redrive(application="fleet"))
    back = encode(Envelope(b"body", hops))
    assert redriven_payload(back) == Envelope(b"body", hops)
    assert redriven_payload(back, Limits(hops=1)) is None
    for other in (
        (Hop("plain", 0, 7, via="retry", pass_through=True),),
        (Hop("plain", 0, 7, via="kit"),),
        (),
    ):
        assert redriven_payload(encode(Envelope(b"body", other))) is None
    assert redriven_payload(back[:-1]) is None


def test_the_error_of_an_envelope_that_cannot_be_read_has_no_chain() -> None:
    with pytest.raises(EnvelopeError) as caught:
        decode(b"")
    assert caught.value.chain is None
    assert caught.value.raised is None


@pytest.mark.parametrize(
    ("frame", "fits"),
    [
        (b"\0", True),
        (b"\2\0", True),
        (b"\4\2\4", True),
        (b"\2\2", False),
        (b"\2\4", False),
        (b"\6\2\4\0", False),
        (b"\1\0", True),
        (b"\1\1", False),
        (b"\1\x08", False),
    ],
)
def test_a_frame_has_to_name_the_expected_message_of_its_schema_or_the_first(frame: bytes, fits: bool) -> None:
    """confluent-kafka-python#1087, #1986: the last three are of early serializers in Python."""
    value = b"\0\0\0\0\7" + frame + b"value"
    assert strip_frame(b"value", [1, 2]) == b"value"
    if fits:
        assert strip_frame(value, [1, 2]) == b"value"
        return
    with pytest.raises(EnvelopeError, match="declare the type that is written") as raised:
        strip_frame(value, [1, 2])
    assert raised.value.reason is Reason.UNKNOWN_PAYLOAD_TYPE
