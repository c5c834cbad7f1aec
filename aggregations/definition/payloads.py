"""What a topic's payload is: a protobuf message, JSON with declared columns, or plain bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
import polars as pl
from google.protobuf.message import DecodeError, Message

from aggregations.definition import protobuf
from aggregations.definition.protobuf import MessageType
from envelope import EnvelopeError, Reason

_BITS: dict[type[pl.DataType], int] = {
    pl.Int8: 8,
    pl.Int16: 16,
    pl.Int32: 32,
    pl.Int64: 64,
    pl.UInt8: 8,
    pl.UInt16: 16,
    pl.UInt32: 32,
}
_PYTHON: dict[object, type[pl.DataType]] = {int: pl.Int64, float: pl.Float64, str: pl.String, bool: pl.Boolean}
_JSON_TYPES: dict[type[pl.DataType], Any] = {pl.Float64: float, pl.String: str, pl.Boolean: bool}

RawColumns: TypeAlias = dict[str, object]
PayloadReader: TypeAlias = Callable[[bytes], RawColumns]


class Payload(Protocol):
    """Kind of a payload. Frozen, picklable, equal by content."""

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Column name to polars type."""

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        """Return the function that reads one payload's columns, only these if given.

        It raises `EnvelopeError` with `BAD_PAYLOAD`. A field that no column needs is not looked at.
        """


@dataclass(frozen=True, slots=True)
class Protobuf:
    """A protobuf message: its fields are the columns. See `MessageType.schema`."""

    type: MessageType

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return self.type.schema

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        message = protobuf.trimmed(self.type, columns)
        parse, fields = message.FromString, protobuf.reader(message.DESCRIPTOR)

        def read(payload: bytes) -> RawColumns:
            try:
                return fields(parse(payload))
            except DecodeError as error:
                raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not the protobuf message declared") from error

        return read


@dataclass(frozen=True, init=False)
class Json:
    """A JSON object with declared columns: a missing field or `null` is null, other fields are ignored.

    Columns are integers (`pl.Int8` … `pl.Int64`, `pl.UInt8` … `pl.UInt32`, or `int`), `pl.Float64` (`float`),
    `pl.String` (`str`) and `pl.Boolean` (`bool`). A whole number may stand for a float; no other type stands
    for another.

    Args:
        columns: Name to type.

    Raises:
        TypeError: A type that is none of these.
    """

    columns: tuple[tuple[str, pl.DataType], ...]

    def __init__(self, columns: Mapping[str, Any]) -> None:
        object.__setattr__(self, "columns", tuple((name, _json_type(name, kind)) for name, kind in columns.items()))

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return dict(self.columns)

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        names = tuple(name for name, _ in self.columns if columns is None or name in columns)
        decode = self.decoder(columns).decode

        def read(payload: bytes) -> RawColumns:
            try:
                return dict(zip(names, msgspec.structs.astuple(decode(payload)), strict=True))
            except ValueError as error:  # msgspec's own errors and text that is not UTF-8
                raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not JSON with the types declared") from error

        return read

    def decoder(self, columns: frozenset[str] | None) -> "msgspec.json.Decoder[msgspec.Struct]":
        """Return msgspec's decoder into a struct with one field a column."""
        return _json_decoder(self, columns)


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes as they are, in one column: `value`."""

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return {"value": pl.Binary()}

    def reader(self, columns: frozenset[str] | None) -> PayloadReader:
        if columns is not None and "value" not in columns:
            return lambda payload: {}
        return lambda payload: {"value": payload}


def payload_of(declared: object) -> Payload:
    """Return the payload kind for what a person declares: a message class, `Json(...)` or `Raw()`.

    Raises:
        TypeError: It is none of them.
    """
    if isinstance(declared, Protobuf | Json | Raw):
        return declared
    if isinstance(declared, type) and issubclass(declared, Message):
        return Protobuf(MessageType.of(declared))
    raise TypeError(f"a payload is a protobuf message class, Json(...) or Raw(), not {declared!r}")


def _json_type(name: str, kind: Any) -> pl.DataType:
    dtype = _PYTHON.get(kind, kind)
    dtype = dtype() if isinstance(dtype, type) and issubclass(dtype, pl.DataType) else dtype
    if not isinstance(dtype, pl.DataType) or (type(dtype) not in _BITS and type(dtype) not in _JSON_TYPES):
        raise TypeError(
            f"column {name!r}: {kind!r} cannot be read from JSON; use an integer, Float64, String or Boolean"
        )
    return dtype


@lru_cache(maxsize=256)
def _json_decoder(of: Json, columns: frozenset[str] | None) -> "msgspec.json.Decoder[msgspec.Struct]":
    wanted = [(name, kind) for name, kind in of.columns if columns is None or name in columns]
    struct = msgspec.defstruct(
        "Columns",
        [(f"f{i}", _annotation(kind) | None, None) for i, (_, kind) in enumerate(wanted)],
        rename={f"f{i}": name for i, (name, _) in enumerate(wanted)},
        gc=False,
    )
    return msgspec.json.Decoder(struct)


def _annotation(kind: pl.DataType) -> Any:
    if type(kind) not in _BITS:
        return _JSON_TYPES[type(kind)]
    bits = _BITS[type(kind)]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind.is_signed_integer() else (0, (1 << bits) - 1)
    return Annotated[int, msgspec.Meta(ge=low, le=high)]
