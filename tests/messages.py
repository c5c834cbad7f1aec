"""Protobuf message classes for tests, built without a compiler."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_F = descriptor_pb2.FieldDescriptorProto
_SCALARS = [
    ("int32", _F.TYPE_INT32),
    ("sint32", _F.TYPE_SINT32),
    ("sfixed32", _F.TYPE_SFIXED32),
    ("int64", _F.TYPE_INT64),
    ("sint64", _F.TYPE_SINT64),
    ("sfixed64", _F.TYPE_SFIXED64),
    ("uint32", _F.TYPE_UINT32),
    ("fixed32", _F.TYPE_FIXED32),
    ("uint64", _F.TYPE_UINT64),
    ("fixed64", _F.TYPE_FIXED64),
    ("float", _F.TYPE_FLOAT),
    ("double", _F.TYPE_DOUBLE),
    ("bool", _F.TYPE_BOOL),
    ("string", _F.TYPE_STRING),
    ("bytes", _F.TYPE_BYTES),
]


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="tests/messages.proto", package="tests", syntax="proto3")
    enum = file.enum_type.add(name="Colour")
    for name, number in (("RED", 0), ("GREEN", 1), ("BLUE", -7)):
        enum.value.add(name=name, number=number)
    point = file.message_type.add(name="Point")
    point.field.add(name="x", number=1, type=_F.TYPE_INT64, label=_F.LABEL_OPTIONAL)
    _optional(point, "name", 2, _F.TYPE_STRING)
    every = file.message_type.add(name="Every")
    for i, (name, kind) in enumerate(_SCALARS):
        every.field.add(name=name, number=1 + i, type=kind, label=_F.LABEL_OPTIONAL)
        _optional(every, f"opt_{name}", 101 + i, kind)
        every.field.add(name=f"rep_{name}", number=201 + i, type=kind, label=_F.LABEL_REPEATED)
    every.field.add(name="colour", number=51, type=_F.TYPE_ENUM, type_name=".tests.Colour", label=_F.LABEL_OPTIONAL)
    every.field.add(name="at", number=52, type=_F.TYPE_MESSAGE, type_name=".tests.Point", label=_F.LABEL_OPTIONAL)
    every.field.add(name="track", number=53, type=_F.TYPE_MESSAGE, type_name=".tests.Point", label=_F.LABEL_REPEATED)
    every.field.add(name="parent", number=54, type=_F.TYPE_MESSAGE, type_name=".tests.Every", label=_F.LABEL_OPTIONAL)
    leg = file.message_type.add(name="Leg")
    for i, (name, kind) in enumerate(
        [("tail", _F.TYPE_STRING), ("carrier", _F.TYPE_STRING), ("minutes", _F.TYPE_INT64), ("late", _F.TYPE_BOOL)]
    ):
        leg.field.add(name=name, number=1 + i, type=kind, label=_F.LABEL_OPTIONAL)
    _optional(leg, "delay", 5, _F.TYPE_DOUBLE)
    return file


def _optional(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: int) -> None:
    message.field.add(
        name=name,
        number=number,
        type=kind,
        label=_F.LABEL_OPTIONAL,
        proto3_optional=True,
        oneof_index=len(message.oneof_decl),
    )
    message.oneof_decl.add(name=f"_{name}")


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())

Point = message_factory.GetMessageClass(_pool.FindMessageTypeByName("tests.Point"))
Every = message_factory.GetMessageClass(_pool.FindMessageTypeByName("tests.Every"))
Leg = message_factory.GetMessageClass(_pool.FindMessageTypeByName("tests.Leg"))
