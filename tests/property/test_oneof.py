"""Oneofs: of several members on the wire the last one counts, whichever of them are columns (protobuf.js#2193)."""

from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from aggregations.columns.arrays import Spans
from aggregations.columns.payload import payload_columns
from aggregations.definition.payloads import Protobuf
from aggregations.definition.protobuf import MessageType

_F = descriptor_pb2.FieldDescriptorProto
ONEOFS = (("charge", _F.TYPE_INT64), ("note", _F.TYPE_STRING), ("rate", _F.TYPE_DOUBLE), ("part", _F.TYPE_MESSAGE))


def _class() -> Any:
    """`Pay`: an id and a oneof of a number, a text, a float, a `Part` and a `Pay`; a `Part` has a oneof of its own."""
    file = descriptor_pb2.FileDescriptorProto(name="oneofs.proto", package="oneofs", syntax="proto3")
    part = file.message_type.add(name="Part")
    part.oneof_decl.add(name="either")
    for number, (name, kind) in enumerate((("a", _F.TYPE_INT32), ("b", _F.TYPE_STRING), ("deep", _F.TYPE_MESSAGE)), 1):
        one = part.field.add(name=name, number=number, type=kind, label=_F.LABEL_OPTIONAL, oneof_index=0)
        if kind == _F.TYPE_MESSAGE:
            one.type_name = ".oneofs.Part"
    pay = file.message_type.add(name="Pay")
    pay.oneof_decl.add(name="amount")
    pay.field.add(name="id", number=1, type=_F.TYPE_STRING, label=_F.LABEL_OPTIONAL)
    for number, (name, kind) in enumerate((*ONEOFS, ("again", _F.TYPE_MESSAGE)), 2):
        one = pay.field.add(name=name, number=number, type=kind, label=_F.LABEL_OPTIONAL, oneof_index=0)
        if kind == _F.TYPE_MESSAGE:
            one.type_name = ".oneofs.Pay" if name == "again" else ".oneofs.Part"
    pay.field.add(name="parts", number=9, type=_F.TYPE_MESSAGE, label=_F.LABEL_REPEATED, type_name=".oneofs.Part")
    pay.field.add(name="single", number=10, type=_F.TYPE_MESSAGE, label=_F.LABEL_OPTIONAL, type_name=".oneofs.Part")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oneofs.Pay"))


Pay = _class()
PAYLOAD = Protobuf(MessageType.of(Pay))

parts = st.sampled_from([{"a": 1}, {"a": 0}, {"b": "x"}, {"deep": {"a": 2}}, {}])
pays = st.one_of(
    st.sampled_from(
        [{"charge": 7}, {"charge": 0}, {"note": "n"}, {"rate": 0.5}, {"again": {"charge": 3}}, {"id": "i"}]
    ),
    parts.map(lambda part: {"part": part}),
    parts.map(lambda part: {"single": part}),
    st.lists(parts, max_size=3).map(lambda some: {"parts": some}),
)


def expected(wire: bytes, columns: frozenset[str] | None) -> dict[str, object]:
    """What the reference parser of the whole message says."""

    def part(one: Any) -> dict[str, object]:
        return {name: getattr(one, name) if one.HasField(name) else None for name in ("a", "b")}

    whole = Pay.FromString(wire)
    found: dict[str, object] = {"id": whole.id}
    found |= {name: getattr(whole, name) if whole.HasField(name) else None for name, _ in ONEOFS}
    found["part"] = part(whole.part) if whole.HasField("part") else None
    found["parts"] = [part(one) for one in whole.parts]
    found["single"] = part(whole.single) if whole.HasField("single") else None
    return {name: value for name, value in found.items() if columns is None or name in columns}


@pytest.mark.parametrize(
    "columns",
    [None, frozenset({"charge"}), frozenset({"id", "note"}), frozenset({"part"}), frozenset({"parts", "single"})],
)
@given(wires=st.lists(st.lists(pays, max_size=4), min_size=1, max_size=5))
def test_the_last_member_of_a_oneof_counts_on_both_paths(
    columns: frozenset[str] | None, wires: list[list[dict[str, Any]]]
) -> None:
    values = [b"".join(Pay(**one).SerializeToString() for one in some) for some in wires]
    read = PAYLOAD.reader(columns)
    wanted = [expected(value, columns) for value in values]
    assert [read(value) for value in values] == wanted
    frame, good = payload_columns(PAYLOAD, columns)(Spans.of(pa.array(values, pa.binary())))
    assert frame.rows(named=True) == [one for one, fine in zip(wanted, good, strict=True) if fine]
    usual = [len(some) < 2 for some in wires]
    assert all(fine for fine, one in zip(good, usual, strict=True) if one), "one member is read in compiled code"
