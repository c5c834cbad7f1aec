"""The codec against dataclass equality: any envelope, any hop, any damage."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envelope import Envelope, EnvelopeError, Hop, Reason, append_hop, decode, encode
from envelope import envelope_pb2 as pb
from envelope.codec import Rewriter, encode_hop, parse, rewrite
from envelope.framing import strip_frame
from envelope.hops import HopWriter
from envelope.limits import MAX_EPOCH, OFFSET_BITS

I64 = st.integers(-(2**63), 2**63 - 1)
OFFSETS = st.integers(0, 2**63 - 2) | st.integers(2**14 - 2, 2**14 + 2)
PLACES = st.tuples(OFFSETS, st.none() | st.integers(-1, 0)) | st.tuples(
    st.integers(0, 2**OFFSET_BITS - 1), st.integers(1, MAX_EPOCH)
)
"""Offsets with leader epochs; both together have to fit in 63 bits."""
U32 = st.none() | st.integers(0, 2**32 - 1)
NAMES = st.from_regex(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,30}", fullmatch=True)
TEXT = st.text(max_size=20)
# Fields 1000 and 1001 are not in the schema: a varint and a string.
UNKNOWN = st.sampled_from([b"", b"\xc0\x3e\x07", b"\xc0\x3e\x07\xca\x3e\x02hi"])

hops = st.builds(
    lambda place, **fields: Hop(offset=place[0], leader_epoch=place[1], **fields),
    place=PLACES,
    topic=NAMES,
    partition=st.integers(0, 2**31 - 1),
    via=TEXT,
    index=U32,
    count=U32,
    rekeyed=st.booleans(),
    keyless=st.booleans(),
    pass_through=st.booleans(),
    topic_id=TEXT,
    timestamp_ms=st.none() | I64,
    cluster=TEXT,
    unknown=UNKNOWN,
)
envelopes = st.builds(
    Envelope,
    payload=st.binary(max_size=60),
    chain=st.lists(hops, max_size=5).map(tuple),
    key=st.none() | st.binary(max_size=10),
    event_id=TEXT,
    event_time_us=st.none() | I64,
    payload_type=TEXT,
    content_type=TEXT,
    producer=TEXT,
    sequence=st.none() | I64,
    destination=TEXT,
    traceparent=TEXT,
    unknown=UNKNOWN,
    producer_epoch=st.none() | I64,
    last_sequence=st.none() | I64,
    sequence_per_partition=st.booleans(),
)


@given(envelopes)
def test_what_is_encoded_is_decoded(envelope: Envelope) -> None:
    assert decode(encode(envelope)) == envelope


@given(envelopes, st.lists(hops, min_size=1, max_size=4))
def test_appending_bytes_is_appending_to_the_chain(envelope: Envelope, more: list[Hop]) -> None:
    value, expected = encode(envelope), envelope
    for hop in more:
        value, expected = append_hop(value, hop), expected.with_hop(hop)
    assert decode(value) == expected


@given(envelopes, hops, st.binary(max_size=8), NAMES)
def test_a_hop_may_bring_a_new_key_and_destination(envelope: Envelope, hop: Hop, key: bytes, topic: str) -> None:
    got = decode(append_hop(encode(envelope), hop, key=key, destination=topic))
    assert (got.key, got.destination, got.chain) == (key, topic, (*envelope.chain, hop))


@given(envelopes, hops)
def test_an_envelope_without_a_checksum_is_read_and_gets_one_with_the_next_hop(envelope: Envelope, hop: Hop) -> None:
    message = pb.Envelope.FromString(encode(envelope))
    message.ClearField("sealed")
    message.ClearField("checksum")
    bare = message.SerializeToString()
    assume(len(bare) > 2)
    assert decode(bare) == envelope
    sealed = append_hop(bare, hop)
    assert decode(sealed) == envelope.with_hop(hop)
    assert pb.Envelope.FromString(sealed).HasField("checksum")


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "payload": st.binary(max_size=20),
        "key": st.one_of(st.none(), st.binary(max_size=4)),
        "event_id": st.text(max_size=4),
        "event_time_us": st.one_of(st.none(), st.integers(0, 9)),
    },
)


@given(envelopes, st.lists(st.tuples(hops, CHANGES), max_size=5))
def test_each_of_several_rewritings_is_that_of_the_envelope_itself(
    envelope: Envelope, several: list[tuple[Hop, dict[str, Any]]]
) -> None:
    message = parse(encode(envelope))
    rewriter, before = Rewriter(message), message.SerializeToString()
    for hop, fields in several:
        assert rewriter.write(encode_hop(hop), fields) == rewrite(message, encode_hop(hop), **fields)
    assert message.SerializeToString() == before


@given(envelopes, st.binary(max_size=60), st.lists(hops, max_size=2))
def test_a_rewritten_envelope_keeps_all_but_what_was_changed(
    envelope: Envelope, payload: bytes, more: list[Hop]
) -> None:
    value = rewrite(parse(encode(envelope)), b"".join(map(encode_hop, more)), payload=payload, key=None)
    got = decode(value)
    assert got == Envelope(
        payload,
        (*envelope.chain, *more),
        None,
        envelope.event_id,
        envelope.event_time_us,
        envelope.payload_type,
        envelope.content_type,
        envelope.producer,
        envelope.sequence,
        envelope.destination,
        envelope.traceparent,
        unknown=envelope.unknown,
        producer_epoch=envelope.producer_epoch,
        last_sequence=envelope.last_sequence,
        sequence_per_partition=envelope.sequence_per_partition,
    )


@given(envelopes, st.data())
def test_no_strict_prefix_of_an_envelope_is_accepted(envelope: Envelope, data: st.DataObject) -> None:
    value = encode(envelope)
    length = data.draw(st.integers(0, len(value) - 1) | st.just(2))
    with pytest.raises(EnvelopeError):
        decode(value[:length])


@given(envelopes, st.data())
def test_no_single_flipped_bit_is_accepted(envelope: Envelope, data: st.DataObject) -> None:
    value = bytearray(encode(envelope))
    at = data.draw(st.integers(0, len(value) - 1) | st.integers(0, 7))
    value[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(EnvelopeError):
        decode(bytes(value))


@given(envelopes, envelopes)
def test_two_envelopes_one_behind_the_other_are_not_merged(first: Envelope, second: Envelope) -> None:
    with pytest.raises(EnvelopeError) as caught:
        decode(encode(first) + encode(second))
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH


@given(envelopes, st.binary(min_size=1, max_size=9))
def test_bytes_behind_the_checksum_are_not_ignored(envelope: Envelope, tail: bytes) -> None:
    with pytest.raises(EnvelopeError):
        decode(encode(envelope) + tail)


@given(st.binary(max_size=128), st.sampled_from([b"", b"\x08\x01", b"\x08\x01\x10\x01", b"\x08\x01:"]))
def test_any_other_bytes_are_read_or_refused_with_a_reason(rest: bytes, head: bytes) -> None:
    try:
        decode(head + rest)
    except EnvelopeError as error:
        assert error.reason in Reason


@given(envelopes, st.integers(0, 2**32 - 1), st.lists(st.integers(0, 300), max_size=3))
def test_confluent_framing_is_stripped(envelope: Envelope, schema: int, indexes: list[int]) -> None:
    def zigzag(number: int) -> bytes:
        number *= 2
        out = b""
        while number > 0x7F:
            out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
        return out + bytes([number])

    frame = b"\0" + schema.to_bytes(4, "big") + zigzag(len(indexes)) + b"".join(map(zigzag, indexes))
    value = encode(envelope)
    assert strip_frame(frame + value) == value
    assert decode(frame + value) == envelope


STEPS = st.tuples(
    PLACES | st.tuples(st.integers(10**6, 10**6 + 40_000), st.none() | st.integers(0, 2)),
    st.none() | st.integers(-5, 2**42) | st.integers(1_700_000_000_000, 1_700_000_040_000),
    st.sampled_from([(0, 1, False, False), (0, 2, False, False), (1, 2, True, False), (0, 1, False, True)]),
)


@given(NAMES, st.integers(0, 300), TEXT, TEXT, TEXT, st.lists(STEPS, max_size=20))
def test_the_hop_writer_writes_what_the_codec_writes(
    topic: str, partition: int, via: str, topic_id: str, cluster: str, steps: list
) -> None:
    writer = HopWriter(topic, partition, via, topic_id=topic_id, cluster=cluster)
    for (offset, epoch), timestamp_ms, (index, count, rekeyed, pass_through) in steps:
        hop = Hop(
            topic, partition, offset, via, index, count, rekeyed, pass_through, topic_id, epoch, timestamp_ms, cluster
        )
        got = writer.write(
            offset, timestamp_ms, epoch, index=index, count=count, rekeyed=rekeyed, pass_through=pass_through
        )
        assert got == encode_hop(hop)
