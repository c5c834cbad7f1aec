"""The compiled reader against the reference: what it accepts is valid, and is read the same; what is usual, it accepts."""

import random
import struct

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aggregations.columns import checksum, payload_reading, schema
from aggregations.columns.arrays import Spans
from aggregations.columns.decode import Decoder
from aggregations.columns.payload import payload_columns
from aggregations.definition.element import Record
from aggregations.definition.payloads import Protobuf
from aggregations.definition.protobuf import MessageType, reader, trimmed
from aggregations.definition.source import RecordDecoder, Topic
from envelope import Envelope, EnvelopeError, Hop, Limits, append_hop, encode
from envelope import envelope_pb2 as pb
from envelope.codec import SEAL_TAG, varint
from tests.messages import Every, Leg

EVERY = Protobuf(MessageType.of(Every))
SCALARS = frozenset(
    field.name for field in Every.DESCRIPTOR.fields if not field.is_repeated and field.message_type is None
)
TOPIC = Topic("legs", Leg, limits=Limits(hops=3, payload_bytes=200, overhead_bytes=400, topic_chars=20))
NUMBERS = [field.number for field in Every.DESCRIPTOR.fields] + [0, 300, 2**29 - 1]
HARD = [0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def comparable(value: object) -> object:
    """Floats by their bits."""
    return struct.pack("d", value) if isinstance(value, float) else value


@st.composite
def varints(draw: st.DrawFn) -> bytes:
    """Numbers, in the shortest form, in a longer one, with too many bits, or cut off."""
    value = bytearray(varint(draw(st.sampled_from(HARD))))
    match draw(st.sampled_from(["short", "short", "long", "wide", "cut"])):
        case "long":
            value[-1] |= 0x80
            value += b"\x80" * draw(st.integers(0, 9)) + b"\x00"
        case "wide":
            value = bytearray(b"\xff" * draw(st.integers(8, 11)) + draw(st.sampled_from([b"\x01", b"\x02", b"\x7f"])))
        case "cut":
            value[-1] |= 0x80
    return bytes(value)


texts = st.sampled_from(
    [b"", b"abc", "é€𝄞".encode(), b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x08\x01"]
) | st.binary(max_size=9)
tags = (
    st.builds(lambda number, kind: varint(number << 3 | kind), st.sampled_from(NUMBERS), st.integers(0, 7)) | varints()
)
bodies = (
    varints()
    | texts.map(lambda text: varint(len(text)) + text)
    | st.builds(lambda size, text: size + text, varints(), texts)
    | st.binary(max_size=9)
)
wires = st.lists(st.builds(bytes.__add__, tags, bodies), max_size=4).map(b"".join)


def fields_of(message: type[Every], columns: frozenset[str] | None, value: bytes) -> dict[str, object] | None:
    try:
        return reader(message.DESCRIPTOR)(message.FromString(value))
    except DecodeError:
        return None


@pytest.mark.parametrize("columns", [None, SCALARS, frozenset({"at.x"}), frozenset()])
@settings(max_examples=5 * settings.default.max_examples)
@given(found=st.lists(wires, min_size=1, max_size=5))
@example(found=[b"\x08" + b"\xff" * 9 + b"\x01", b"\x0a", b"\xff" * 10])
def test_a_payload_that_is_accepted_is_read_as_the_reference_parser_reads_it(
    columns: frozenset[str] | None, found: list[bytes]
) -> None:
    message = trimmed(EVERY.type, columns)
    frame, good = payload_columns(EVERY, columns)(Spans.of(pa.array(found, pa.binary())))
    rows = iter(frame.iter_rows(named=True))
    for value, accepted in zip(found, good.tolist(), strict=True):
        if accepted:
            expected = fields_of(message, columns, value)
            assert expected is not None, value
            if columns is None or columns == SCALARS:
                got = {name: comparable(one) for name, one in next(rows).items() if name in SCALARS}
                assert got == {name: comparable(one) for name, one in expected.items() if name in SCALARS}
    assert frame.height in (0, int(good.sum()))


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(data=st.data())
def test_what_a_protobuf_library_writes_is_accepted(data: st.DataObject) -> None:
    message = Every()
    for field in Every.DESCRIPTOR.fields:
        if field.message_type is None and data.draw(st.booleans()):
            kind = {9: "ü€", 12: b"\xff\x00", 8: True, 1: -0.5, 2: float("inf")}
            low = -(2**31) if field.type in (5, 17, 15) else 0 if field.type in (13, 7, 4, 6) else -(2**63)
            high = 2**31 - 1 if field.type in (5, 17, 15) else 2**32 - 1 if field.type in (13, 7) else 2**63 - 1
            one = (
                kind[field.type]
                if field.type in kind
                else 1
                if field.type == 14
                else data.draw(st.sampled_from([low, high, 1]))
            )
            if field.is_repeated:
                getattr(message, field.name).extend([one, one])
            else:
                setattr(message, field.name, one)
    value = message.SerializeToString()
    frame, good = payload_columns(EVERY, SCALARS)(Spans.of(pa.array([b"", value], pa.binary())))
    assert good.all()
    expected = fields_of(trimmed(EVERY.type, SCALARS), SCALARS, value)
    assert {name: comparable(one) for name, one in frame.row(1, named=True).items()} == {
        name: comparable(one) for name, one in (expected or {}).items()
    }


def table(values: list[bytes | None], keys: list[bytes | None]) -> pa.RecordBatch:
    rows = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": pa.array(["legs"] * rows),
            "partition": pa.array([i % 2 for i in range(rows)], pa.int32()),
            "offset": pa.array(range(rows), pa.int64()),
            "timestamp": pa.array([5] * rows, pa.int64()),
        }
    )


def agrees(values: list[bytes | None], keys: list[bytes | None]) -> None:
    decoder, one_by_one = Decoder(TOPIC), RecordDecoder(TOPIC)
    batch = decoder.decode(table(values, keys))
    rows = {row[schema.ROW]: row for row in batch.frame.iter_rows(named=True)}
    refused = {one.row: (one.error.reason, one.error.detail) for one in batch.rejected}
    for i, (value, key) in enumerate(zip(values, keys, strict=True)):
        record = Record("legs", i % 2, i, key, value, timestamp_ms=5)
        if one_by_one.skips(record):
            continue
        try:
            expected = one_by_one.decode(record)
        except EnvelopeError as error:
            assert refused[i] == (error.reason, error.detail), value
            continue
        row = rows[i]
        assert batch.standing(list(rows).index(i), rekeyed=False) == expected.lineage.standing(
            event_id=expected.identity, keyless=key is None
        )
        assert {name: comparable(row[name]) for name in decoder.schema} == {
            name: comparable(one) for name, one in (expected.columns or {}).items()
        }
        assert (row["_event_id"], row["_event_time_us"]) == (expected.event_id, expected.event_time_us)
        signature = batch.signatures[row["_signature"]]
        standing = expected.lineage.standing()
        assert row["_p0"] == standing.position[0]
        assert (signature.kept.lane, signature.topic) == (standing.lane, expected.lineage.root.topic)


def usual(rng: random.Random) -> bytes:
    """An envelope as our codec or any protobuf library writes it."""
    topics, vias = rng.sample(["raw", "mid.x", "a-b_c"], 3), ["", "r", "s/ü"]
    chain = [
        Hop(topic, rng.choice([0, 1, 2**31 - 1]), offset, rng.choice(vias),
            rng.choice([None, 0, 2**32 - 1]), None, rng.random() < 0.3, timestamp_ms=rng.choice([None, -5]),
            topic_id=rng.choice(["", "ü"]), keyless=rng.random() < 0.3, leader_epoch=epoch)
        for topic in topics[: rng.randrange(4)]
        for offset, epoch in [rng.choice([(0, None), (7, 3), (2**63 - 2, 0), (2**45 - 1, 2**18 - 1), (8, -1)])]
    ]  # fmt: skip
    payload = Leg(tail=rng.choice(["", "N1", "Ü€"]), minutes=rng.choice([0, -1, 2**62]), late=True).SerializeToString()
    fields = {
        "event_id": rng.choice(["", "e", "é"]), "event_time_us": rng.choice([None, -7, 2**62]),
        "key": rng.choice([None, b"k"]), "destination": rng.choice(["", "legs"]), "producer": "ü",
        "payload_type": rng.choice(["", Leg.DESCRIPTOR.full_name]), "sequence": rng.choice([None, -3]),
        "producer_epoch": rng.choice([None, 0, 2**62]), "last_sequence": rng.choice([None, 4]),
        "sequence_per_partition": rng.random() < 0.5,
    }  # fmt: skip
    if rng.random() < 0.5:
        return encode(Envelope(payload, tuple(chain), **fields))  # type: ignore[arg-type]
    value = encode(Envelope(payload, **fields))  # type: ignore[arg-type]
    for hop in chain:
        value = append_hop(value, hop, key=b"k", destination="legs")
    message = pb.Envelope.FromString(value)
    for name in ("sealed", "checksum"):
        message.ClearField(name)
    parts = [message.SerializeToString()[2:], b"\xa2\x06\x01z\xa8\x06\x05"]  # and unknown fields
    rng.shuffle(parts)
    return b"\x08\x01" + b"".join(parts)


def resealed(value: bytes) -> bytes:
    body = value[:-6]
    return body + SEAL_TAG + google_crc32c.value(body).to_bytes(4, "little")


def damaged(value: bytes, rng: random.Random) -> bytes:
    found = bytearray(value)
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = rng.randbytes(rng.choice([1, 2, 9]))
            case 3:
                found[at:at] = varint(rng.choice(HARD))
            case 4:
                found[at:at] = found[rng.randrange(len(found) + 1) :][: rng.randrange(20)]
            case 5:
                found += varint(rng.randrange(18) << 3 | rng.randrange(8)) + varint(rng.choice([0, 1, 2, *HARD]))
    return resealed(bytes(found)) if rng.random() < 0.7 and len(found) > 10 else bytes(found)


@pytest.mark.parametrize("seed", range(6))
def test_usual_envelopes_are_all_read_by_the_compiled_reader(seed: int) -> None:
    rng = random.Random(seed)
    values = [usual(rng) for _ in range(300)]
    agrees([*values], [b"k"] * 300)
    decoder = Decoder(TOPIC)
    decoder._one = None  # type: ignore[assignment]
    assert decoder.decode(table([*values], [b"k"] * 300)).frame.height == 300


@pytest.mark.parametrize("seed", range(12))
def test_damaged_envelopes_are_judged_as_by_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    values: list[bytes | None] = [None]
    for _ in range(400):
        value = usual(rng)
        values.append(value if rng.random() < 0.1 else damaged(value, rng))
    agrees(values, [rng.choice([b"k", b"k", b"k", None, b"other"]) for _ in values])


def like(chain: tuple[Hop, ...], rng: random.Random) -> bytes:
    """An envelope whose hops mostly differ from these in their offsets alone, in every form that a parser accepts."""
    value = bytearray(b"\x08\x01")
    for hop in chain:
        partition = rng.choice([hop.partition, hop.partition, hop.partition, 1, 16, 17, 2**31 - 1])
        offset = rng.choice([0, 7, 127, 128, 2**63 - 2, 2**63 - 1, rng.randrange(2**40)])
        inner = bytearray(pb.Hop(topic=hop.topic, partition=partition).SerializeToString())
        number = varint(3 << 3) + varint(offset)
        inner += rng.choice([number] * 12 + [b"", b"\x20\x01", number[:-1] + bytes([number[-1] | 0x80, 0]), number * 2])
        inner += pb.Hop(via=hop.via, index=hop.index, topic_id=hop.topic_id, timestamp_ms=5).SerializeToString()
        if rng.random() < 0.3:
            epoch = rng.choice([0, 1, 1, 1, 2**18 - 1, 2**18, -1])
            inner += pb.Hop(leader_epoch=epoch).SerializeToString()
        if rng.random() < 0.1:
            inner += rng.choice([number, number + varint(6 << 3 | 0) + b"\x01", b"\x00", varint(2 << 3) + b"\x03"])
        if rng.random() < 0.1:
            at = rng.randrange(len(inner))
            inner[at] ^= 1 << rng.randrange(8)
        value += b"\x4a" + varint(len(inner)) + inner
    return bytes(value)


@pytest.mark.parametrize("seed", range(12))
def test_hops_that_resemble_earlier_ones_are_judged_as_by_the_reference(seed: int) -> None:
    """The compiled reader compares a hop with an earlier one before it reads it."""
    rng = random.Random(seed)
    names = rng.sample(["raw", "mid.x", "a-b_c", "r" * 20], 4)
    chain = tuple(
        Hop(name, rng.choice([0, 3]), 1, rng.choice(["", "wrap", "s/ü"]), rng.choice([None, 0, 5]), topic_id="AAAA")
        for name in names[: 1 + seed % 4]
    )
    agrees([like(chain, rng) for _ in range(600)], [None] * 600)


def test_more_routes_than_the_tables_hold_are_still_read() -> None:
    values: list[bytes | None] = [
        encode(Envelope(b"", tuple(Hop(f"t{i}-{depth}", i, i, "r") for depth in range(3)))) for i in range(1000)
    ]
    agrees(values, [None] * 1000)


@pytest.mark.parametrize(
    "crc32c", [checksum.by_tables, *([checksum.by_instruction] if checksum.HAS_INSTRUCTION else [])]
)
def test_checksums_are_those_of_the_codec(crc32c) -> None:
    rng = random.Random(3)
    for size in [*range(40), 100, 1000]:
        value, start = rng.randbytes(size + 7), rng.randrange(7)
        data = np.frombuffer(value, np.uint8)
        assert crc32c(data, start, start + size) == google_crc32c.value(value[start : start + size])


def test_nothing_outside_a_value_is_read() -> None:
    """Each value ends where its buffer's meaning ends: the bytes behind it would complete whatever is cut off."""
    whole = Every(string="abc", fixed64=7, int64=-1).SerializeToString()
    columns = payload_columns(EVERY, SCALARS)
    data = np.frombuffer(whole + b"\x00" * 64, np.uint8)
    for size in range(len(whole)):
        frame, good = columns(Spans(data, np.array([0]), np.array([size])))
        expected = fields_of(trimmed(EVERY.type, SCALARS), SCALARS, whole[:size])
        assert bool(good[0]) == (expected is not None)
        assert frame.rows(named=True) == ([] if expected is None else [expected])


def test_kinds_of_fields_are_numbered_as_the_compiled_code_expects() -> None:
    kinds = payload_reading
    assert kinds.BOOL < kinds.FIXED32 < kinds.FIXED64 < kinds.STRING < kinds.BYTES < kinds.MESSAGE < kinds.REPEATED
