"""The short way of a republisher gives what the long one gives, or nothing."""

from hypothesis import given
from hypothesis import strategies as st

from envelope import Envelope, EnvelopeError, Hop, encode
from envelope.hops import HopWriter
from jobs.republish import InputRecord, InputTopics, JsonPayload, Processor, Wrapping, identity

hops = st.builds(
    Hop,
    topic=st.sampled_from(["legs", "out", "raw", "mid", "other"]),
    partition=st.integers(0, 3),
    offset=st.integers(0, 2**40),
    via=st.sampled_from(["r1", ""]),
    index=st.none() | st.integers(0, 3),
    pass_through=st.booleans(),
)
envelopes = st.builds(
    Envelope,
    payload=st.binary(max_size=300),
    chain=st.lists(hops, min_size=29, max_size=32).map(tuple) | st.lists(hops, max_size=3).map(tuple),
    key=st.sampled_from([b"k", b"", None]),
    destination=st.sampled_from(["", "", "legs", "out"]),
    unknown=st.sampled_from([b"", b"\xc0\x3e\x07"]),
)


def long_way(processor: Processor, record: InputRecord, writer: HopWriter) -> bytes | None:
    try:
        (out,) = processor.process(record, writer)
    except EnvelopeError:
        return None
    assert (out.topic, out.key, out.headers) == ("out", record.key, ())
    return out.value


@given(
    st.lists(
        st.tuples(
            envelopes,
            st.sampled_from([b"k", b"other"]),
            st.integers(0, 2**20),
            st.integers(1_700_000_000_000, 1_700_000_100_000),
            st.integers(-1, 400),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(300, 800),
)
def test_the_short_way_gives_what_the_long_way_gives_or_nothing(steps: list, room: int) -> None:
    processor = Processor(identity, via="r", source=InputTopics(("legs",)), targets={"out": room})
    express = processor.express()
    assert express
    writers = [HopWriter("legs", 2, "r", topic_id="id") for _ in range(2)]
    for envelope, key, offset, timestamp_ms, damaged in steps:
        value = bytearray(encode(envelope))
        if 0 <= damaged < len(value):
            value[damaged] ^= 1
        record = InputRecord("legs", 2, offset, key, bytes(value), (), timestamp_ms, 1)
        expected = long_way(processor, record, writers[0])
        got = express(bytes(value), key, offset, timestamp_ms, 1, writers[1])
        assert got is None or got == expected


def test_the_usual_record_does_take_the_short_way() -> None:
    processor = Processor(identity, via="r", source=InputTopics(("legs",)), targets={"out": 1000})
    express, writer = processor.express(), HopWriter("legs", 2, "r")
    assert express
    value = encode(Envelope(b"payload", (Hop("raw", 0, 1), Hop("mid", 0, 1)), key=b"k"))
    assert express(value, b"k", 17, 1_700_000_000_000, 0, writer) is None
    expected = long_way(processor, InputRecord("legs", 2, 17, b"k", value, (), 1_700_000_000_000, 0), writer)
    assert expected
    assert express(value, b"k", 17, 1_700_000_000_000, 0, writer) == expected


def test_there_is_no_short_way_for_another_transform_or_option() -> None:
    source = InputTopics(("legs",))
    assert not Processor(lambda r: None, via="r", source=source, targets={"out": 1000}).express()
    for read in (
        InputTopics(("legs",), payload=JsonPayload),
        InputTopics(("legs",), Wrapping.NONE),
        InputTopics(("legs",), "cloudevents"),
    ):
        assert not Processor(identity, via="r", source=read, targets={"out": 1000}).express()
    assert not Processor(identity, via="r", source=source, targets={"out": 1000}, headers_mirror=True).express()
    assert not Processor(identity, via="r", source=source, targets={"out": 1000}, roots=["raw"]).express()
