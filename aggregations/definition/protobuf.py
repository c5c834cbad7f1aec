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

from envelope.framing import indexes_of

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
    _F.TYPE_FLOAT: pl.Float64(),  # as Python reads it: functions and expressions compare the same number
    _F.TYPE_DOUBLE: pl.Float64(),
    _F.TYPE_BOOL: pl.Boolean(),
    _F.TYPE_STRING: pl.String(),
    _F.TYPE_BYTES: pl.Binary(),
}
_PACKAGE = "headwater.columns"
_LENGTH = {_F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_MESSAGE}
"""Types that are written with their length."""
_RIVAL = "_rival_"
"""Beginning of the names of fields that no column is made of: members of a oneof, which unset the others."""


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
    def indexes(self) -> tuple[int, ...]:
        """Its place in its file: number among the messages, and so on within them. Schema Registry's message indexes."""
        return indexes_of(self.descriptor())

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
    rejected in every syntax. Of a oneof, all members stay: the last one on the wire unsets the others (protobuf's
    "Encoding", "Last One Wins"). Those that are not wanted are no columns (`is_column`), and their content is not parsed.
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
        if is_column(field)
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


def is_column(field: Field) -> bool:
    """Whether a field of a trimmed message is a column, or is there only to unset other members of its oneof."""
    return not field.name.startswith(_RIVAL)


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
    wanted = {field.number: _below(columns, field.name) for field, _ in _columns(of, within)}
    wanted = {number: inner for number, inner in wanted.items() if inner is None or inner}
    oneofs: dict[str, int] = {}
    for field in of.fields:
        oneof = _oneof(field)
        is_rival = field.number not in wanted
        if is_rival and (field.type == _F.TYPE_GROUP or not any(one.number in wanted for one in oneof)):
            continue
        one = message.field.add(name=field.name, number=field.number, type=field.type)
        one.label = one.LABEL_REPEATED if field.is_repeated else one.LABEL_OPTIONAL
        if field.type == _F.TYPE_ENUM:
            one.type = one.TYPE_INT32
        if is_rival:
            one.name = f"{_RIVAL}{field.number}"
            one.type = one.TYPE_BYTES if field.type in _LENGTH else one.type
        elif field.type == _F.TYPE_MESSAGE:
            inner = f"{name}_{field.number}"
            one.type_name = f".{_PACKAGE}.{inner}"
            add_message(file, inner, field.message_type, wanted[field.number], (*within, of.full_name))
        if oneof:
            name_of_oneof = field.containing_oneof.name
            if name_of_oneof not in oneofs:
                oneofs[name_of_oneof] = len(message.oneof_decl)
                message.oneof_decl.add(name=name_of_oneof)
            one.oneof_index = oneofs[name_of_oneof]
    # Synthetic oneofs come after all others.
    for one, field in zip(message.field, [of.fields_by_number[each.number] for each in message.field], strict=True):
        if field.has_presence and field.type != _F.TYPE_MESSAGE and not one.HasField("oneof_index"):
            one.proto3_optional = True
            one.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_presence_{field.number}")
    return message


def _oneof(field: Field) -> list[Field]:
    """The members of the oneof that a field is in; none if it has no other members."""
    oneof = field.containing_oneof
    return [] if oneof is None or len(oneof.fields) == 1 else list(oneof.fields)


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
