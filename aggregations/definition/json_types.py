"""Types of JSON columns: their declarations, how msgspec reads them, and their plain Python values."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import polars as pl

from aggregations.definition.arguments import check_type
from aggregations.errors import FlowError

Plain: TypeAlias = Callable[[Any], Any]
"""Converts a value that msgspec has read to lists and dictionaries."""

MAX_DEPTH: Final = 500
"""Deepest nesting of a document, undeclared fields included.

The depth that msgspec can read depends on the free stack of the interpreter, which differs between callers. Half of
the usual 1,000 is available to all of them.
"""

SHALLOW_BYTES: Final = 2 * MAX_DEPTH
"""A document of at most this many bytes cannot be too deep, since each level takes two."""

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
_SCALARS: dict[type[pl.DataType], Any] = {pl.Float64: float, pl.String: str, pl.Boolean: bool}
_UNREADABLE = re.compile(r'[\x00-\x1f"\\\ud800-\udfff]')
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def json_type(name: str, declared: Any) -> pl.DataType:
    """Return the polars type of a declaration.

    Args:
        name: Place of the declaration, such as `lines[].article`, for the error.
        declared: A polars type, a Python type, `[item]` for a list or `{"field": type}` for an object.

    Raises:
        FlowError: The type, or a type within it, cannot be read from JSON, or the name of a field is not text.
    """
    if isinstance(declared, list) and len(declared) == 1:
        return pl.List(json_type(f"{name}[]", declared[0]))
    if isinstance(declared, Mapping) and declared:
        for field in declared:
            check_name(f"column {name!r}: the name of a field", field)
        return pl.Struct({field: json_type(f"{name}.{field}", kind) for field, kind in declared.items()})
    dtype = _PYTHON.get(declared) if isinstance(declared, type) else declared
    dtype = declared if dtype is None else dtype
    dtype = dtype() if isinstance(dtype, type) and issubclass(dtype, pl.DataType) and not dtype.is_nested() else dtype
    match dtype:
        case pl.List():
            return pl.List(json_type(f"{name}[]", dtype.inner))
        case pl.Array() if dtype.size > 0:
            return pl.Array(json_type(f"{name}[]", dtype.inner), dtype.size)
        case pl.Struct() if dtype.fields:
            for one in dtype.fields:
                check_name(f"column {name!r}: the name of a field", one.name)
            return pl.Struct({field.name: json_type(f"{name}.{field.name}", field.dtype) for field in dtype.fields})
        case pl.DataType() if type(dtype) in _BITS or type(dtype) in _SCALARS:
            return dtype
    raise FlowError(
        f"column {name!r}: {declared!r} cannot be read from JSON; use an integer, Float64, String, Boolean, a list of these "
        "([str]) or an object ({'field': str})"
    )


def check_name(what: str, name: object) -> None:
    """Check that polars and msgspec can read a field of this name.

    Raises:
        FlowError: They cannot.
    """
    check_type(what, name, str, "text")
    assert isinstance(name, str)
    if not name or _UNREADABLE.search(name):
        raise FlowError(
            f"{what} is {name!r}: a field without a name, or with a quote, a backslash, a control character or half of a "
            "surrogate pair in its name cannot be read. Rename it upstream; fields that are not declared are ignored"
        )


def struct_of(fields: Sequence[tuple[str, pl.DataType]]) -> type[msgspec.Struct]:
    """The type into which msgspec reads an object: one attribute per field, `f0` and so on, None if it is missing."""
    return msgspec.defstruct(
        "Columns",
        [(f"f{i}", _annotation(kind) | None, None) for i, (_, kind) in enumerate(fields)],
        rename={f"f{i}": name for i, (name, _) in enumerate(fields)},
        gc=False,
    )


def plain(kind: pl.DataType) -> Plain | None:
    """Return the conversion of values of this type to plain lists and dictionaries; None if they are already plain."""
    if isinstance(kind, pl.List | pl.Array):
        inner = plain(_dtype(kind.inner))
        return None if inner is None else lambda items: None if items is None else [inner(one) for one in items]
    if isinstance(kind, pl.Struct):
        names = [field.name for field in kind.fields]
        nested = [(one.name, found) for one in kind.fields if (found := plain(_dtype(one.dtype))) is not None]

        def fields(value: msgspec.Struct | None) -> dict[str, Any] | None:
            if value is None:
                return None
            found = dict(zip(names, msgspec.structs.astuple(value), strict=True))
            for name, make in nested:
                found[name] = make(found[name])
            return found

        return fields
    return None


def is_too_deep(document: bytes) -> bool:
    """Whether a document nests deeper than `MAX_DEPTH`, not counting brackets within text."""
    if len(document) <= SHALLOW_BYTES or document.count(b"[") + document.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(document):
        kind = document[token.start()]
        if kind in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif kind in b"]}":
            depth -= 1
    return False


def _annotation(kind: pl.DataType) -> Any:
    if isinstance(kind, pl.List):
        return _list_of(_dtype(kind.inner))
    if isinstance(kind, pl.Array):
        return Annotated[_list_of(_dtype(kind.inner)), msgspec.Meta(min_length=kind.size, max_length=kind.size)]
    if isinstance(kind, pl.Struct):
        return struct_of([(field.name, _dtype(field.dtype)) for field in kind.fields])
    if type(kind) not in _BITS:
        return _SCALARS[type(kind)]
    bits = _BITS[type(kind)]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind.is_signed_integer() else (0, (1 << bits) - 1)
    return Annotated[int, msgspec.Meta(ge=low, le=high)]


def _list_of(kind: pl.DataType) -> Any:
    return GenericAlias(list, (_annotation(kind) | None,))


def _dtype(nested: Any) -> pl.DataType:
    """A type nested in a type that `json_type` returned."""
    assert isinstance(nested, pl.DataType)
    return nested
