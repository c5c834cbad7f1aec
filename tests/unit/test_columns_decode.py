"""Batches as Spark hands them over, and rows that are anything but common."""

import polars as pl
import pyarrow as pa
import pytest

from aggregations.columns import Decoder, lanes_of, schema
from aggregations.payload import Json, Raw
from aggregations.source import Topic
from envelope import Envelope, Hop, Reason, Siblings, Standing, encode
from tests.messages import Leg

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
        "_timestamp_ms": [0, 1000],
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
        decoder.decode(batch(leg(5, HOP), None))


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
    values = (None, b"junk", leg(1)[:-1], leg(1, Hop("legs", 0, 1)), leg(1, destination="other"))
    decoded = Decoder(Topic("legs", Leg)).decode(batch(*values))
    assert decoded.frame.height == 0
    assert [(row, reason) for row, reason, _ in decoded.rejected] == [
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
    assert [(row, reason) for row, reason, _ in decoded.rejected] == [(1, Reason.BAD_PAYLOAD)]


def test_a_retried_message_is_exotic_and_stands_where_the_first_try_stood() -> None:
    retry = (Hop("raw", 1, 3, via="r", transparent=True), Hop("retry", 0, 9, via="r", index=2))
    decoded = Decoder(Topic("legs", Leg)).decode(batch(leg(1, *retry), leg(2, Hop("raw", 1, 3, via="r", index=2))))
    assert decoded.frame.get_column("_exotic").to_list() == [True, False]
    assert decoded.frame.select("_p0", "_p1").rows() == [(3, 2), (3, 2)]
    first, second = (decoded.standing(row, rekeyed=False) for row in range(2))
    assert (first.lane, first.position) == (second.lane, second.position)
    assert first.transparent


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
