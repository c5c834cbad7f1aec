"""Kinds of payload: a protobuf message, JSON with declared columns, or plain bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import msgspec
import polars as pl
from google.protobuf.message import DecodeError, Message

from aggregations.definition import protobuf
from aggregations.definition.arguments import check_type
from aggregations.definition.json_types import check_name, is_too_deep, json_type, plain, struct_of
from aggregations.definition.protobuf import MessageType
from aggregations.errors import FlowError
from envelope import EnvelopeError, Reason
from envelope.framing import SCHEMA_ID_FRAME, strip_frame

RawColumns: TypeAlias = dict[str, object]
PayloadReader: TypeAlias = Callable[[bytes], RawColumns]


class Payload(Protocol):
    """Kind of a payload. Frozen, picklable, equal by content."""

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Column name to polars type."""

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        """Return a function that reads the columns of one payload, only `columns` if given.

        The function raises `EnvelopeError` with `BAD_PAYLOAD`. A field that no column needs is not read.
        """


@dataclass(frozen=True, slots=True)
class Protobuf:
    """A protobuf message: its fields are the columns. See `MessageType.schema`.

    A frame of Schema Registry in front of it is taken off, and has to name the same message of its schema.
    """

    type: MessageType

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return self.type.schema

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        message = protobuf.trimmed(self.type, columns)
        parse, fields, indexes = message.FromString, protobuf.reader(message.DESCRIPTOR), self.type.indexes

        def read(payload: bytes) -> RawColumns:
            if payload[:1] == b"\0":
                payload = strip_frame(payload, indexes)
            try:
                return fields(parse(payload))
            except DecodeError as error:
                raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not the declared protobuf message") from error

        return read


@dataclass(frozen=True, init=False)
class Json:
    """A JSON object with declared columns: a missing field or `null` is null, other fields are ignored.

    Columns are integers (`pl.Int8` … `pl.Int64`, `pl.UInt8` … `pl.UInt32`, or `int`), `pl.Float64` (`float`),
    `pl.String` (`str`) and `pl.Boolean` (`bool`), lists (`pl.List`, or `[item]`), lists of one length (`pl.Array`) and
    objects (`pl.Struct`, or `{"field": type}`), nested as deep as you like:

        Json({"order": str, "lines": [{"article": str, "quantity": int}]})

    The same holds within lists and objects: null and missing fields are null, other fields are ignored. A whole number
    is accepted as a float; there are no other conversions. If a name occurs twice in an object, the last value counts,
    and both must be of the declared type. A frame of Schema Registry in front of it is taken off. Expressions see polars lists and structs (`pl.col("lines").list.len()`),
    functions see lists and dictionaries. A document, undeclared fields included, is at most 500 levels deep.

    Args:
        columns: Name to type.

    Raises:
        FlowError: A name cannot be read, or a type is not one of these.
    """

    columns: tuple[tuple[str, pl.DataType], ...]

    def __init__(self, columns: Mapping[str, Any]) -> None:
        check_type("Json()", columns, Mapping, 'a mapping of column names to types, such as {"order": str}')
        for name in columns:
            check_name("Json(): the name of a column", name)
        object.__setattr__(self, "columns", tuple((name, json_type(name, kind)) for name, kind in columns.items()))

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return dict(self.columns)

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        decode, make = self.decoder(columns), plain(pl.Struct(self.wanted(columns)))
        assert make is not None

        def read(payload: bytes) -> RawColumns:
            if (found := decoded(decode, payload)) is None:
                raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not JSON of the declared types")
            return make(found)  # type: ignore[no-any-return]

        return read

    def wanted(self, columns: frozenset[str] | None) -> dict[str, pl.DataType]:
        """The schema of the columns needed; None for all."""
        return {name: kind for name, kind in self.columns if columns is None or name in columns}

    def decoder(self, columns: frozenset[str] | None) -> "msgspec.json.Decoder[msgspec.Struct]":
        """Return msgspec's decoder into a struct with one field a column; see `decoded`."""
        return _json_decoder(self, columns)


def decoded(decoder: "msgspec.json.Decoder[msgspec.Struct]", document: bytes) -> msgspec.Struct | None:
    """Read one document; None when it is not JSON of the types that the decoder expects, or is nested too deeply."""
    if document[:1] == b"\0":
        document = document[SCHEMA_ID_FRAME:]
    if is_too_deep(document):
        return None
    try:
        return decoder.decode(document)
    except (ValueError, RecursionError):  # msgspec's errors, and text that is not UTF-8
        return None


@dataclass(frozen=True, slots=True)
class Raw:
    """Unparsed bytes, in one column: `value`."""

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return {"value": pl.Binary()}

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        if columns is not None and "value" not in columns:
            return lambda payload: {}
        return lambda payload: {"value": payload}


def payload_of(declared: object) -> Payload:
    """Return the payload kind for a declaration: a message class, `Json(...)` or `Raw()`.

    Raises:
        FlowError: It is none of them.
    """
    if isinstance(declared, Protobuf | Json | Raw):
        return declared
    if isinstance(declared, type) and issubclass(declared, Message):
        return Protobuf(MessageType.of(declared))
    raise FlowError(f"the payload must be a protobuf message class, Json({{...}}) or Raw(), not {declared!r}")


@lru_cache(maxsize=256)
def _json_decoder(payload: Json, columns: frozenset[str] | None) -> "msgspec.json.Decoder[msgspec.Struct]":
    return msgspec.json.Decoder(
        struct_of([(n, kind) for n, kind in payload.columns if columns is None or n in columns])
    )
