"""Batches as Spark hands them over, and rows that are anything but common."""

import polars as pl
import pyarrow as pa
import pytest

from aggregations.columns import schema
from aggregations.columns.decode import Decoder
from aggregations.columns.signature import lanes_of
from aggregations.definition.element import Record
from aggregations.definition.payloads import Json, Raw
from aggregations.definition.source import RecordDecoder, Topic
from envelope import Envelope, EnvelopeError, Hop, Limits, Reason, Route, Siblings, Standing, Tombstones, encode
from envelope import envelope_pb2 as pb
from tests.messages import Leg
from tests.support.pure import table_of

HOP = Hop("raw", 1, 3, via="r", index=2, topic_id="i")


def leg(minutes: int, *chain: Hop, **fields: object) -> bytes:
    payload = Leg(tail="N1", minutes=minutes).SerializeToString()
    return encode(Envelope(payload, chain, **fields))  # type: ignore[arg-type]


def batch(*values: bytes | None, key: bytes | None = b"N1") -> pa.RecordBatch:
    rows = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([key] * rows, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": pa.array(["legs"] * rows, pa.string()),
            "partition": pa.array([2] * rows, pa.int32()),
            "offset": pa.array(range(7, 7 + rows), pa.int64()),
            "timestamp": pa.array([1_000_000 * i for i in range(rows)], pa.timestamp("us", "UTC")),
            "headers": pa.array([None] * rows, pa.null()),
        }
    )


@pytest.mark.parametrize("odd", [b"\x08\x01\x38\x05", b"\x08\x01\x4a\x0b\x0a\x03raw\x10\x01\x18\x03\x20\x05"])
def test_a_field_of_another_wire_type_is_refused_as_by_the_codec(odd: bytes) -> None:
    sealed = encode(Envelope(b"", unknown=odd[2:]))
    decoded = Decoder(Topic("legs"), {}).decode(batch(odd, leg(5, HOP), sealed))
    assert [(one.row, one.error.reason) for one in decoded.rejected] == [(0, Reason.MALFORMED), (2, Reason.MALFORMED)]
    assert decoded.frame[schema.ROW].to_list() == [1]


def test_a_batch_of_sparks_kafka_source_has_payload_columns_system_columns_and_positions() -> None:
    decoded = Decoder(Topic("legs", Leg), {"legs": "own"}).decode(batch(leg(5, HOP, event_id="e"), leg(6)))
    expected = {
        "tail": ["N1", "N1"],
        "carrier": ["", ""],
        "minutes": [5, 6],
        "late": [False, False],
        "delay": [None, None],
        "_row": [0, 1],
        "_topic": ["legs", "legs"],
        "_partition": [2, 2],
        "_offset": [7, 8],
        "_key": [b"N1", b"N1"],
        "_timestamp": [0, 1000],
        "_event_time_us": [0, 1_000_000],
        "_event_id": ["e", ""],
        "_signature": [0, 1],
        "_exotic": [False, False],
        "_p0": [3, 8],
        "_p1": [2, None],
    }
    assert decoded.frame.to_dict(as_series=False) == expected
    assert [one.kept.lane for one in decoded.signatures] == ["raw:1#i>r>legs", "legs:2#own"]
    assert [one.rekeyed.lane for one in decoded.signatures] == ["raw:1#i>r>legs:2", "legs:2#own"]
    assert [one.topic for one in decoded.signatures] == ["raw", "legs"]
    assert [component.tolist() for component in decoded.positions] == [[3, 8], [2, schema.MISSING]]


def test_a_common_batch_is_not_read_record_by_record() -> None:
    decoder = Decoder(Topic("legs", Leg))
    decoder._one = None  # type: ignore[assignment]
    assert decoder.decode(batch(leg(5, HOP), leg(6))).frame.height == 2
    with pytest.raises(AttributeError):
        decoder.decode(batch(leg(5, HOP), b""))


def test_chunks_slices_and_wider_types_are_read_alike() -> None:
    whole = batch(leg(1, HOP), b"", leg(3), leg(4, HOP))
    decoder = Decoder(Topic("legs", Leg))
    frame = decoder.decode(whole).frame
    table = pa.Table.from_batches([whole.slice(0, 1), whole.slice(1, 0), whole.slice(1)])
    assert decoder.decode(table).frame.equals(frame)
    wide = table.set_column(1, "value", table.column("value").cast(pa.large_binary()))
    assert decoder.decode(wide).frame.equals(frame)
    tail = decoder.decode(whole.slice(2))
    assert tail.frame.get_column("minutes").to_list() == [3, 4]
    assert tail.frame.get_column("_row").to_list() == [0, 1]


@pytest.mark.parametrize("payload", [Leg, Json({"minutes": int}), Raw()])
@pytest.mark.parametrize("enveloped", [True, False])
def test_an_empty_batch_has_the_columns_of_every_other(payload: object, enveloped: bool) -> None:
    decoder = Decoder(Topic("legs", payload, envelope=enveloped))
    decoded = decoder.decode(batch())
    assert decoded.frame.schema == {**decoder.schema, **schema.SYSTEM, "_p0": pl.Int64}
    assert (decoded.frame.height, decoded.signatures, decoded.rejected) == (0, (), [])


def test_a_batch_of_rejected_records_has_their_reasons_in_order() -> None:
    values = (b"", b"junk", leg(1)[:-1], leg(1, Hop("legs", 0, 1)), leg(1, destination="other"))
    decoded = Decoder(Topic("legs", Leg)).decode(batch(*values))
    assert decoded.frame.height == 0
    assert [(one.row, one.error.reason) for one in decoded.rejected] == [
        (0, Reason.EMPTY),
        (1, Reason.NOT_AN_ENVELOPE),
        (2, Reason.TRUNCATED),
        (3, Reason.CHAIN_LOOP),
        (4, Reason.WRONG_DESTINATION),
    ]


def test_a_group_that_ends_as_another_is_refused_like_the_reference_parser_does() -> None:
    # Group 20 opened, group 21 closed: not in the schema, and not well formed.
    payload = Leg(minutes=1).SerializeToString() + b"\xa3\x01\xac\x01"
    values = (leg(1), encode(Envelope(payload)), leg(2))
    decoded = Decoder(Topic("legs", Leg)).decode(batch(*values))
    assert decoded.frame.get_column("minutes").to_list() == [1, 2]
    assert [(one.row, one.error.reason) for one in decoded.rejected] == [(1, Reason.BAD_PAYLOAD)]


def test_a_retried_message_is_exotic_and_stands_where_the_first_try_stood() -> None:
    retry = (Hop("raw", 1, 3, via="r", pass_through=True), Hop("retry", 0, 9, via="r", index=2))
    decoded = Decoder(Topic("legs", Leg)).decode(batch(leg(1, *retry), leg(2, Hop("raw", 1, 3, via="r", index=2))))
    assert decoded.frame.get_column("_exotic").to_list() == [True, False]
    assert decoded.frame.select("_p0", "_p1").rows() == [(3, 2), (3, 2)]
    first, second = (decoded.standing(row, rekeyed=False) for row in range(2))
    assert (first.lane, first.position) == (second.lane, second.position)
    assert first.route is Route.RETRIED


def test_an_event_id_stands_in_for_an_index_where_the_source_says_so() -> None:
    value = leg(1, Hop("raw", 1, 3, via="r"), event_id="e")
    by_id = Decoder(Topic("legs", Leg)).decode(batch(value))
    assert by_id.standing(0, rekeyed=True) == Standing("raw:1#>r>legs:2", "raw:1#>r>legs", (3, -1, "e"))
    dropped = Decoder(Topic("legs", Leg, siblings=Siblings.DROP)).decode(batch(value))
    assert dropped.standing(0, rekeyed=True).position == (3, -1)
    assert dropped.standing(0, rekeyed=True).ambiguous
    assert by_id.frame.get_column("_exotic").to_list() == [True]


def test_the_stages_key_decides_the_lane_message_by_message() -> None:
    decoded = Decoder(Topic("legs", Leg)).decode(batch(leg(1, HOP), leg(2, HOP)))
    codes = decoded.frame.get_column("_signature").to_numpy()
    lanes, places = lanes_of(decoded.signatures, codes, pl.Series([False, True]).to_numpy())
    assert [places[lane].lane for lane in lanes] == ["raw:1#i>r>legs", "raw:1#i>r>legs:2"]


def test_a_payload_column_may_have_any_name_but_the_engines() -> None:
    topic = Topic("legs", Json({"dep delay": int, "f0": str, "Clear": bool}), envelope=False)
    decoded = Decoder(topic).decode(batch(b'{"dep delay": 4, "Clear": true}'))
    assert decoded.frame.select(list(topic.schema)).rows() == [(4, None, True)]


def foreign(*chain: pb.Hop, **fields: object) -> bytes:
    """An envelope as another writer may write it: without a seal."""
    return pb.Envelope(format=1, payload=Leg(minutes=4).SerializeToString(), chain=chain, **fields).SerializeToString()  # type: ignore[arg-type]


def hop(topic: str = "raw", **fields: int) -> bytes:
    return foreign(pb.Hop(topic=topic, via="r", index=0, **{"partition": 0, "offset": 1, **fields}))  # type: ignore[arg-type]


PLAIN = foreign()
SEALED = leg(5)
CASES: dict[str, tuple[bytes, Reason | None]] = {
    "no seal": (PLAIN, None),
    "a seal in other order, and none": (PLAIN + b"\x10\x01", Reason.TRUNCATED),
    "a checksum with a field behind it": (PLAIN + b"\xfd\x7f\x01\x02\x03\x04" + b"\x6a\x01t", Reason.TRUNCATED),
    "a checksum that is wrong": (PLAIN + b"\xfd\x7f\x01\x02\x03\x04", Reason.CHECKSUM_MISMATCH),
    "a flip in the seal": (SEALED[:3] + b"\x00" + SEALED[4:], Reason.CHECKSUM_MISMATCH),
    "a flip in the payload": (SEALED.replace(b"N1", b"N2"), Reason.CHECKSUM_MISMATCH),
    "a tail cut off": (SEALED[:-6], Reason.TRUNCATED),
    "a tail of another value": (SEALED[:-1] + b"\x00", Reason.CHECKSUM_MISMATCH),
    "a payload that ends as a checksum begins": (PLAIN + b"\x3a\x06\xfd\x7f\x00\x00\x00\x00", None),
    "the same with a seal that may be flipped": (
        b"\x08\x01\x10\x00\x3a\x06\xfd\x7f\x00\x00\x00\x00",
        Reason.CHECKSUM_MISMATCH,
    ),
    "framed": (b"\x00\x00\x00\x00\x01\x00" + SEALED, None),
    "two bytes": (b"\x08\x01", Reason.TRUNCATED),
    "the next version": (b"\x08\x02" + SEALED[2:], Reason.UNSUPPORTED_FORMAT),
    "the largest payload": (encode(Envelope(b"\x0a\x26" + b"x" * 38)), None),
    "a payload too large": (encode(Envelope(b"\x0a\x27" + b"x" * 39)), Reason.PAYLOAD_TOO_LARGE),
    "a message too large": (foreign(traceparent="t" * 240), Reason.PAYLOAD_TOO_LARGE),
    "the longest chain": (leg(5, HOP, Hop("mid", 0, 1)), None),
    "too long a chain": (leg(5, HOP, Hop("mid", 0, 1), Hop("mid2", 0, 1)), Reason.TOO_MANY_HOPS),
    "a possible hop": (hop(offset=2**63 - 2, partition=2**31 - 1), None),
    "a topic Kafka would refuse": (hop("a b"), Reason.BAD_TOPIC),
    "a topic too long": (hop("x" * 21), Reason.BAD_TOPIC),
    "no topic": (hop(""), Reason.MISSING_FIELD),
    "an offset no record has": (hop(offset=2**63 - 1), Reason.BAD_COORDINATES),
    "a leader epoch": (hop(offset=2**45 - 1, leader_epoch=2**18 - 1), None),
    "no leader epoch, as some clients write it": (hop(offset=2**45, leader_epoch=-1), None),
    "an offset too high beside a leader epoch": (hop(offset=2**45, leader_epoch=1), Reason.BAD_COORDINATES),
    "a leader epoch too high": (hop(leader_epoch=2**18), Reason.BAD_COORDINATES),
    "a negative offset": (hop(offset=-1), Reason.BAD_COORDINATES),
    "a negative partition": (hop(partition=-1), Reason.BAD_COORDINATES),
    "no offset": (foreign(pb.Hop(topic="raw", partition=1)), Reason.MISSING_FIELD),
    "no partition": (foreign(pb.Hop(topic="raw", offset=1)), Reason.MISSING_FIELD),
    "another key": (leg(5, key=b"N2"), Reason.KEY_MISMATCH),
    "its key": (leg(5, key=b"N1"), None),
    "another type": (leg(5, payload_type="tests.Point"), Reason.UNKNOWN_PAYLOAD_TYPE),
    "a payload cut off": (encode(Envelope(b"\x0a\x05N")), Reason.BAD_PAYLOAD),
    "text that is no UTF-8": (encode(Envelope(b"\x0a\x01\xff")), Reason.BAD_PAYLOAD),
    "a header that is no UTF-8": (PLAIN + b"\x6a\x01\xff", Reason.MALFORMED),
}
LIMITS = Limits(hops=2, payload_bytes=40, overhead_bytes=200, topic_chars=20)


@pytest.mark.parametrize("name", CASES)
def test_among_good_records_an_odd_one_is_judged_as_it_is_alone(name: str) -> None:
    value, reason = CASES[name]
    topic = Topic("legs", Leg, limits=LIMITS)
    decoded = Decoder(topic).decode(batch(leg(1, HOP), value, leg(3)))
    refused = [(one.row, one.error.reason) for one in decoded.rejected]
    assert refused == ([] if reason is None else [(1, reason)])
    assert decoded.frame.get_column("_row").to_list() == ([0, 1, 2] if reason is None else [0, 2])
    record = Record("legs", 2, 8, b"N1", value, timestamp_ms=1000)
    if reason is None:
        alone = RecordDecoder(topic).decode(record)
        row = decoded.frame.row(1, named=True)
        assert {column: row[column] for column in topic.schema} == alone.columns
        assert decoded.standing(1, rekeyed=True) == alone.lineage.standing(rekeyed=True)
        return
    with pytest.raises(EnvelopeError) as error:
        RecordDecoder(topic).decode(record)
    assert (error.value.reason, error.value.detail) == (reason, decoded.rejected[0].error.detail)


@pytest.mark.parametrize("enveloped", [True, False])
def test_tombstones_are_skipped_and_counted_or_rejected_as_the_policy_says(enveloped: bool) -> None:
    good = leg(1) if enveloped else Leg(tail="N1").SerializeToString()
    rows = batch(good, None, b"", good, None)
    skipping = Decoder(Topic("legs", Leg, envelope=enveloped)).decode(rows)
    assert (skipping.skipped, [one.row for one in skipping.rejected]) == (2, [2])
    rejecting = Decoder(Topic("legs", Leg, envelope=enveloped, tombstones=Tombstones.DEAD_LETTER)).decode(rows)
    refused = [(one.row, one.error.reason) for one in rejecting.rejected]
    assert (rejecting.skipped, refused) == (0, [(row, Reason.EMPTY) for row in (1, 2, 4)])
    for decoded in (skipping, rejecting):
        assert decoded.frame.get_column("_row").to_list() == [0, 3]
    passing = Decoder(Topic("legs", Leg, envelope=enveloped, tombstones=Tombstones.ELEMENT)).decode(rows)
    assert (passing.skipped, [one.row for one in passing.rejected]) == (0, [2])
    found = passing.frame.select("_row", "_tombstone", "_offset", "tail").rows()
    offsets = rows.column("offset").to_pylist()
    assert found == [
        (row, True if row in (1, 4) else None, offsets[row], None if row in (1, 4) else "N1") for row in (0, 1, 3, 4)
    ]


@pytest.mark.parametrize("time", ["at", None])
def test_records_without_an_event_time_in_the_envelope_are_read_in_columns(
    time: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic("timed", Json({"at": pl.Int64}), time=time)
    hops = [Hop("raw", 0, 7, via="kit", index=0, topic_id="R", timestamp_ms=stamp) for stamp in (2, 2, 3, None, -1)]
    values = [encode(Envelope(b'{"at": 5}', (hop, Hop("mid", 0, 8, timestamp_ms=9)))) for hop in hops]
    records = [Record("timed", 0, n, b"k", value, 40, topic_id="T") for n, value in enumerate(values)]

    def one_by_one(*_: object) -> None:
        raise AssertionError("a record was read by itself")

    monkeypatch.setattr(RecordDecoder, "decode", one_by_one)
    frame = Decoder(topic, {"timed": "T"}, timed=True).decode(table_of(records)).frame
    assert frame.get_column("_event_time_us").to_list() == [2_000, 2_000, 3_000, 40_000, 40_000]
    assert frame.get_column("_time").to_list() == [2_000, 2_000, 3_000, None, None]
