"""The short way of a republisher gives what the long one gives, or nothing."""

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE
from hypothesis import given
from hypothesis import strategies as st

from aggregations.definition.element import Record
from envelope import Envelope, EnvelopeError, Hop, encode
from envelope.hops import HopWriter
from jobs.republish import InputRecord, InputTopics, JsonPayload, Processor, Wrapping, identity
from tests.simulation.life import SimulatedMessage

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
    assert (out.topic, out.key, list(out.headers)) == ("out", record.key, list(record.headers))
    return out.value


class Delivered(SimulatedMessage):
    """A record as a consumer delivers it, perhaps without a timestamp or a leader epoch."""

    def __init__(self, record: InputRecord) -> None:
        place = record.topic, record.partition, record.offset
        super().__init__(Record(*place, record.key, record.value, headers=record.headers))
        self._given = record

    def timestamp(self) -> tuple[int, int]:
        time = self._given.timestamp_ms
        return (TIMESTAMP_NOT_AVAILABLE, -1) if time is None else (TIMESTAMP_CREATE_TIME, time)

    def leader_epoch(self) -> int | None:  # type: ignore[override]
        return self._given.leader_epoch


records = st.builds(
    lambda envelope, damaged, partition, **record: InputRecord(
        "legs", partition, value=damage(encode(envelope), damaged), **record
    ),
    envelope=envelopes,
    damaged=st.integers(-1, 400),
    partition=st.integers(0, 2),
    offset=st.sampled_from([0, 1, 127, 128, 2**62]) | st.integers(0, 2**20),
    key=st.sampled_from([b"k", b"k", b"other", b"", None]),
    headers=st.sampled_from([(), (), (), [("h", b"1")]]),
    timestamp_ms=st.sampled_from([None, 0, 1]) | st.integers(1_700_000_000_000, 1_700_000_100_000),
    leader_epoch=st.sampled_from([None, 0, 1, 400]),
)


def damage(value: bytes, at: int) -> bytes:
    return value if at < 0 or at >= len(value) else value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def writers(topic_id: str = "id") -> dict[tuple[str, int], HopWriter]:
    return {("legs", one): HopWriter("legs", one, "r", topic_id=topic_id, cluster="c") for one in range(2)}


@given(st.lists(st.lists(records, max_size=5), min_size=1, max_size=3), st.integers(300, 800))
def test_the_short_way_gives_what_the_long_way_gives_or_nothing(slices: list[list[InputRecord]], room: int) -> None:
    processor = Processor(identity, via="r", source=InputTopics(("legs",)), targets={"out": room})
    express = processor.express()
    assert express
    for number, records in enumerate(slices):
        assigned = writers(f"id{number // 2}")  # the topic was created again
        given_ones = express.each([Delivered(one) for one in records], assigned)
        assert len(given_ones) == len(records)
        for record, made in zip(records, given_ones, strict=True):
            if record.partition == 2:  # not assigned any more
                assert made is None
                continue
            expected = long_way(processor, record, assigned[record.topic, record.partition])
            assert made is None or made == expected


@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 2**50), st.sampled_from([None, 0, 7])), min_size=1))
def test_usual_records_do_take_the_short_way(places: list[tuple[int, int, int | None]]) -> None:
    processor = Processor(identity, via="r", source=InputTopics(("legs",)), targets={"out": 1000})
    express, assigned = processor.express(), writers()
    assert express
    key = None if places[0][0] % 2 else b"k"
    value = encode(Envelope(b"payload", (Hop("raw", 0, 1), Hop("mid", 0, 1)), key=key))
    records = [InputRecord("legs", 1, offset, key, value, (), time, epoch) for offset, time, epoch in places]
    messages = [Delivered(one) for one in records]
    assert not any(express.each(messages, assigned))  # its topics are not checked yet
    expected = [long_way(processor, one, assigned["legs", 1]) for one in records]
    assert all(expected)
    assert list(express.each(messages, assigned)) == expected
    # A slice may be empty, and contain errors: those are not judged here.
    assert list(express.each([], assigned)) == []


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
