"""A protobuf message class as columns: the fields that can be columns, and a descriptor with only those.

The trimmed message has the names and wire format of the original, without the fields that no column needs, so
that neither reader spends time on them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import polars as pl
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# The stubs have two kinds of descriptors; only one is used at run time.
Descriptor: TypeAlias = Any
Field: TypeAlias = Any
FileProto: TypeAlias = descriptor_pb2.FileDescriptorProto
MessageProto: TypeAlias = descriptor_pb2.DescriptorProto

_F = FieldDescriptor
_SCALARS: dict[int, pl.DataType] = {
    _F.TYPE_INT32: pl.Int32(),
    _F.TYPE_SINT32: pl.Int32(),
    _F.TYPE_SFIXED32: pl.Int32(),
    _F.TYPE_ENUM: pl.Int32(),
    _F.TYPE_INT64: pl.Int64(),
    _F.TYPE_SINT64: pl.Int64(),
    _F.TYPE_SFIXED64: pl.Int64(),
    _F.TYPE_UINT32: pl.UInt32(),
    _F.TYPE_FIXED32: pl.UInt32(),
    _F.TYPE_UINT64: pl.UInt64(),
    _F.TYPE_FIXED64: pl.UInt64(),
    _F.TYPE_FLOAT: pl.Float32(),
    _F.TYPE_DOUBLE: pl.Float64(),
    _F.TYPE_BOOL: pl.Boolean(),
    _F.TYPE_STRING: pl.String(),
    _F.TYPE_BYTES: pl.Binary(),
}
_PACKAGE = "headwater.columns"


@dataclass(frozen=True, slots=True)
class MessageType:
    """A protobuf message type by value: compared by content and picklable, independent of the module of its class.

    Attributes:
        full_name: Full name of the message.
        files: Serialized file descriptors, each after the files that it imports.
    """

    full_name: str
    files: tuple[bytes, ...]

    @classmethod
    def of(cls, message: type[Message]) -> "MessageType":
        """Return the type of a message class."""
        return cls(message.DESCRIPTOR.full_name, tuple(dict.fromkeys(_files(message.DESCRIPTOR.file))))

    def descriptor(self) -> Descriptor:
        """Return its descriptor, built in a pool of its own."""
        return _descriptor(self)

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Column name to polars type.

        An enum is its number, a message a struct, a repeated field a list. An unset field is null if the field has
        presence; otherwise it has its default. Each member of a oneof is a column of its own.

        Not supported, and therefore not columns: maps, groups, messages that contain themselves.
        """
        return {field.name: kind for field, kind in _columns(self.descriptor(), ())}


@lru_cache(maxsize=256)
def trimmed(message_type: MessageType, columns: frozenset[str] | None = None) -> type[Message]:
    """Return a message class with only the fields of `columns`; all fields for None.

    "chain.topic" keeps that one field of the messages in `chain`; "chain" keeps them whole. An enum becomes an
    int32 and `required` becomes `optional`; the wire format is the same. Text that is not UTF-8 is
    rejected in every syntax.
    """
    file = new_file()
    add_message(file, "Columns", message_type.descriptor(), columns)
    return message_class(file, "Columns")


def reader(descriptor: Descriptor) -> Callable[[Message], dict[str, object]]:
    """Return the function that reads the fields of a trimmed message by name: None, scalars, lists, dicts.

    Args:
        descriptor: Descriptor of the trimmed message.
    """
    fields = [
        (field.name, field.is_repeated, field.has_presence, reader(field.message_type) if field.message_type else None)
        for field in descriptor.fields
    ]

    def read(message: Message) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, repeated, presence, inner in fields:
            value = getattr(message, name)
            if repeated:
                found[name] = list(value) if inner is None else [inner(one) for one in value]
            elif presence and not message.HasField(name):
                found[name] = None
            else:
                found[name] = value if inner is None else inner(value)
        return found

    return read


def new_file() -> FileProto:
    """Return an empty file for generated message types."""
    return FileProto(name="headwater/columns.proto", package=_PACKAGE, syntax="proto3")


def message_class(file: FileProto, name: str) -> type[Message]:
    """Return the class of message `name` of a file, built in a pool of its own."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def add_message(
    file: FileProto,
    name: str,
    of: Descriptor,
    columns: frozenset[str] | None = None,
    within: tuple[str, ...] = (),
) -> MessageProto:
    """Add to `file` a message `name` with the fields of `of` that can be columns and are in `columns`."""
    message = file.message_type.add(name=name)
    for field, _ in _columns(of, within):
        inner_columns = _below(columns, field.name)
        if inner_columns is not None and not inner_columns:
            continue
        one = message.field.add(name=field.name, number=field.number, type=field.type)
        one.label = one.LABEL_REPEATED if field.is_repeated else one.LABEL_OPTIONAL
        if field.type == _F.TYPE_ENUM:
            one.type = one.TYPE_INT32
        if field.type == _F.TYPE_MESSAGE:
            inner = f"{name}_{field.number}"
            one.type_name = f".{_PACKAGE}.{inner}"
            add_message(file, inner, field.message_type, inner_columns, (*within, of.full_name))
        elif field.has_presence:
            one.proto3_optional = True
            one.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_presence_{field.number}")
    return message


def _below(columns: frozenset[str] | None, field: str) -> frozenset[str] | None:
    """The columns within `field`: None for all of it, an empty set if it is not wanted."""
    if columns is None or field in columns:
        return None
    return frozenset(column.removeprefix(f"{field}.") for column in columns if column.startswith(f"{field}."))


def _files(file: Descriptor) -> Iterator[bytes]:
    for dependency in file.dependencies:
        yield from _files(dependency)
    yield file.serialized_pb


@lru_cache(maxsize=64)
def _descriptor(message_type: MessageType) -> Descriptor:
    pool = descriptor_pool.DescriptorPool()
    for file in message_type.files:
        pool.AddSerializedFile(file)
    return pool.FindMessageTypeByName(message_type.full_name)


def _columns(message: Descriptor, within: tuple[str, ...]) -> list[tuple[Field, pl.DataType]]:
    found = []
    for field in message.fields:
        kind = _kind(field, (*within, message.full_name))
        if kind is not None:
            found.append((field, pl.List(kind) if field.is_repeated else kind))
    return found


def _kind(field: Field, within: tuple[str, ...]) -> pl.DataType | None:
    if field.type != _F.TYPE_MESSAGE:
        return _SCALARS.get(field.type)
    inner = field.message_type
    if inner.full_name in within or inner.GetOptions().map_entry:
        return None
    columns = _columns(inner, within)
    return pl.Struct({one.name: kind for one, kind in columns}) if columns else None
