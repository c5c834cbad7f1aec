"""The columnar reader against the per-message reader: the same rows, values, standings, reasons."""

import math
import struct

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.columns import schema
from aggregations.columns.batch import Batch
from aggregations.columns.decode import Decoder
from aggregations.definition.element import Record
from aggregations.definition.payloads import Json, Raw
from aggregations.definition.source import RecordDecoder, Topic
from envelope import Envelope, EnvelopeError, Hop, Limits, Siblings, Tombstones, encode
from envelope import envelope_pb2 as pb
from envelope.codec import append_hop, varint
from tests.messages import Every, Leg, Point

TOPIC_IDS = {"legs": "idLegs", "raw": "idRaw"}
LIMITS = Limits(hops=3, payload_bytes=120, overhead_bytes=400, topic_chars=20)

hops = st.builds(
    Hop,
    topic=st.sampled_from(["raw", "mid", "retry", "legs"]),
    partition=st.integers(0, 2),
    offset=st.integers(0, 5) | st.just(2**63 - 2),
    via=st.sampled_from(["", "r", "s/ü"]),
    index=st.none() | st.integers(0, 2) | st.just(2**32 - 1),
    rekeyed=st.booleans(),
    keyless=st.booleans(),
    pass_through=st.booleans(),
    topic_id=st.sampled_from(["", "id1", "id2"]),
    cluster=st.sampled_from(["", "eu"]),
    timestamp_ms=st.none() | st.integers(-5, 5),
)


def scalars() -> st.SearchStrategy[bytes]:
    """Any field: known or not, of any wire type, well formed or not."""
    tag = st.builds(lambda number, wire: varint(number << 3 | wire), st.integers(0, 60), st.integers(0, 7))
    number = st.sampled_from([0, 1, 127, 128, 2**31, 2**32, 2**63, 2**64 - 1]).map(varint)
    text = st.sampled_from([b"", b"abc", "é".encode(), b"\xff", b"\x08\x01", b"\x0b\x14"])
    return st.builds(lambda head, body: head + body, tag, number | text.map(lambda body: varint(len(body)) + body))


legs = st.builds(
    Leg,
    tail=st.sampled_from(["", "N1", "Ü"]),
    minutes=st.sampled_from([0, -1, 2**62]),
    late=st.booleans(),
    delay=st.none() | st.floats(),
)
every = st.builds(
    Every,
    int32=st.integers(-5, 5),
    opt_uint64=st.none() | st.just(2**64 - 1),
    rep_sint64=st.lists(st.integers(-3, 3), max_size=3),
    float=st.sampled_from([0.0, 1.5, math.inf]),
    rep_string=st.lists(st.sampled_from(["", "x"]), max_size=2),
    colour=st.sampled_from([0, 1, -7]),
    at=st.none() | st.builds(Point, x=st.integers(0, 3), name=st.none() | st.just("p")),
    track=st.lists(st.builds(Point, x=st.integers(0, 3)), max_size=2),
    opt_bytes=st.none() | st.binary(max_size=3),
)
JSON = Json({"n": pl.Int8, "x": float, "s": str, "b": bool})
json_texts = st.sampled_from(
    [
        b"{}",
        b'{"n": 5, "x": 1, "s": "\xc3\xbc", "b": null}',
        b'{"n": 128}',
        b'{"x": "1"}',
        b"[",
        b'{"b": true, "z": []}',
    ]
)
PAYLOADS = {
    "leg": (Leg, legs.map(lambda one: one.SerializeToString())),
    "every": (Every, every.map(lambda one: one.SerializeToString())),
    "json": (JSON, json_texts),
    "raw": (Raw(), st.binary(max_size=5)),
}


@st.composite
def mutated(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    value = bytearray(draw(values))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(value)))
        match draw(st.sampled_from(["flip", "cut", "insert", "field", "frame", "long"])):
            case "flip" if at < len(value):
                value[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del value[at:]
            case "insert":
                value[at:at] = draw(st.binary(min_size=1, max_size=2))
            case "field":
                value += draw(scalars())
            case "frame":
                value[:0] = b"\x00\x00\x00\x00\x01\x00"
            case "long":
                value += b"\x6a\x7f" + b"t" * 127 * draw(st.integers(1, 4))
    return bytes(value)


@st.composite
def envelopes(draw: st.DrawFn, payloads: st.SearchStrategy[bytes], full_name: str) -> bytes:
    """Envelopes as the kit writes them, as another writer might, and damaged ones."""
    payload = draw(mutated(payloads))
    fields = {
        "key": draw(st.sampled_from([None, None, b"k", b"k2"])),
        "event_id": draw(st.sampled_from(["", "e1", "e2"])),
        "event_time_us": draw(st.sampled_from([None, 0, -7])),
        "payload_type": draw(st.sampled_from(["", full_name, "other"])),
        "destination": draw(st.sampled_from(["", "", "legs", "other"])),
        "traceparent": draw(st.sampled_from(["", "t"])),
        "sequence": draw(st.sampled_from([None, 3])),
    }
    chain = draw(st.lists(hops, max_size=4))
    wide = Limits(payload_bytes=1 << 20)
    match draw(st.sampled_from(["kit", "kit", "kit", "appended", "foreign", "foreign hop"])):
        case "kit":
            return encode(Envelope(payload, tuple(chain), **fields), wide)  # type: ignore[arg-type]
        case "appended":
            value = encode(Envelope(payload, **fields), wide)  # type: ignore[arg-type]
            for hop in chain:
                value = append_hop(value, hop, key=draw(st.sampled_from([None, b"k"])), limits=wide)
            return value
        case "foreign":
            message = pb.Envelope(format=1, payload=payload, sealed=draw(st.booleans()), **fields)  # type: ignore[arg-type]
            if draw(st.booleans()):
                message.checksum = draw(st.integers(0, 9))
            return message.SerializeToString()
        case _:
            bad = pb.Hop(topic=draw(st.sampled_from(["", "a b", "x" * 21])), partition=-1)
            if draw(st.booleans()):
                bad.offset = -1
            return pb.Envelope(format=1, payload=payload, chain=[bad], **fields).SerializeToString()  # type: ignore[arg-type]


def table(records: list[Record]) -> pa.RecordBatch:
    """The records as Spark's Kafka source gives them."""
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([record.key for record in records], pa.binary()),
            "value": pa.array([record.value for record in records], pa.binary()),
            "topic": pa.array([record.topic for record in records], pa.string()),
            "partition": pa.array([record.partition for record in records], pa.int32()),
            "offset": pa.array([record.offset for record in records], pa.int64()),
            "timestamp": pa.array([record.timestamp_ms for record in records], pa.int64()),
        }
    )


def comparable(value: object) -> object:
    """Floats by their bits: NaN is NaN, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    return value


def check(decoder: Decoder, columns: frozenset[str] | None, records: list[Record]) -> Batch:
    topic = decoder.topic
    batch = decoder.decode(table(records))
    rows = {row[schema.ROW]: (place, row) for place, row in enumerate(batch.frame.iter_rows(named=True))}
    assert list(rows) == sorted(rows)
    assert {name: kind for name, kind in batch.frame.schema.items() if name[0] != "_"} == decoder.schema
    assert dict(list(batch.frame.schema.items())[len(decoder.schema) :][: len(schema.SYSTEM)]) == schema.SYSTEM
    refused = {rejection.row: (rejection.error.reason, rejection.error.detail) for rejection in batch.rejected}
    one_by_one = RecordDecoder(topic, columns)
    assert batch.skipped == sum(map(one_by_one.skips, records))
    for i, record in enumerate(records):
        if one_by_one.skips(record):
            assert i not in rows
            assert i not in refused
            continue
        try:
            expected = one_by_one.decode(record)
        except EnvelopeError as error:
            assert refused.pop(i) == (error.reason, error.detail)
            assert i not in rows
            continue
        place, row = rows.pop(i)
        found = {name: row[name] for name in decoder.schema}
        assert bool(row.get(schema.TOMBSTONE)) == (expected.columns is None)
        assert comparable(found) == comparable(expected.columns or dict.fromkeys(found))
        assert (row["_topic"], row["_partition"], row["_offset"]) == (record.topic, record.partition, record.offset)
        assert (row["_key"], row["_timestamp"]) == (record.key, record.timestamp_ms)
        assert (row["_event_time_us"], row["_event_id"]) == (expected.event_time_us, expected.event_id)
        signature = batch.signatures[row["_signature"]]
        line = expected.lineage.resolved(TOPIC_IDS)
        assert (signature.topic, signature.topic_id) == (line.root.topic, line.root.topic_id)
        for rekeyed in (False, True):
            standing = line.standing(rekeyed=rekeyed, event_id=expected.identity, keyless=record.key is None)
            assert batch.standing(place, rekeyed=rekeyed) == standing
            assert row["_exotic"] == (line.pass_through or -1 in standing.position[1:])
            if not row["_exotic"]:
                numbers = [int(component[place]) for component in batch.positions]
                width = len(standing.position)
                assert tuple(numbers[:width]) == standing.position
                assert set(numbers[width:]) <= {schema.MISSING}
    assert not rows
    assert not refused
    return batch


records_keys = st.sampled_from([None, b"k", b"k2"])


@pytest.mark.parametrize("enveloped", [True, False])
@pytest.mark.parametrize("kind", list(PAYLOADS))
@given(data=st.data())
def test_both_readers_accept_the_same_records_and_read_the_same_from_them(
    kind: str, enveloped: bool, data: st.DataObject
) -> None:
    payload, payloads = PAYLOADS[kind]
    full_name = getattr(payload, "DESCRIPTOR", Leg.DESCRIPTOR).full_name
    values = mutated(envelopes(payloads, full_name)) if enveloped else mutated(payloads)
    siblings = data.draw(st.sampled_from(Siblings), label="siblings")
    cluster = data.draw(st.sampled_from(["", "eu"]), label="cluster")
    nulls = data.draw(st.sampled_from(Tombstones), label="tombstones")
    retries = data.draw(st.sampled_from([{}, {"raw": "retry"}, {"legs": ["re*", "mid"]}]), label="retries")
    policies = {"siblings": siblings, "limits": LIMITS, "cluster": cluster, "tombstones": nulls, "retries": retries}
    topic = Topic("legs", payload, envelope=enveloped, **policies)
    names = sorted(topic.schema)
    columns = data.draw(st.none() | st.frozensets(st.sampled_from(names), max_size=len(names)), label="columns")
    decoder = Decoder(topic, TOPIC_IDS, columns)
    for _ in range(data.draw(st.integers(1, 2), label="batches")):
        records = data.draw(
            st.lists(
                st.builds(
                    Record,
                    topic=st.just("legs"),
                    partition=st.integers(0, 2),
                    offset=st.integers(0, 9),
                    key=records_keys,
                    value=st.none() | values,
                    timestamp_ms=st.integers(-1, 9) | st.just(2**63 - 1),
                ),
                max_size=8,
            ),
            label="records",
        )
        check(decoder, columns, records)
