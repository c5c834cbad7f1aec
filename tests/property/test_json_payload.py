"""JSON with lists and objects: both readers, message by message and vectorised, against plain Python."""

import json
import math
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aggregations.columns.arrays import Spans
from aggregations.columns.payload import payload_columns
from aggregations.definition.json_types import MAX_DEPTH
from aggregations.definition.payloads import Json
from envelope import EnvelopeError

SCALARS = [pl.Int8(), pl.Int64(), pl.UInt32(), pl.Float64(), pl.String(), pl.Boolean()]
NAMES = st.sampled_from(["a", "b", "c d", "é", "f0"])
WRONG = st.sampled_from(
    [None, 128, -1, 2**63, 2**64, -(2**63) - 1, 2**200, 1.5, 1e300, "", "é\\", "1", True, [], {}, [[]]]
)


def _nested(inner: st.SearchStrategy[pl.DataType]) -> st.SearchStrategy[pl.DataType]:
    return (
        st.builds(pl.List, inner)
        | st.builds(pl.Array, inner, st.integers(1, 2))
        | st.builds(pl.Struct, st.dictionaries(NAMES, inner, min_size=1, max_size=3))
    )


TYPES = st.recursive(st.sampled_from(SCALARS), _nested, max_leaves=5)
SCHEMAS = st.dictionaries(NAMES, TYPES, min_size=1, max_size=3)


def values(kind: pl.DataType) -> st.SearchStrategy[Any]:
    """What a document may have where a type is wanted: mostly of that type."""
    match kind:
        case pl.List():
            right: st.SearchStrategy[Any] = st.lists(values(kind.inner), max_size=3)
        case pl.Array():
            right = st.lists(values(kind.inner), min_size=kind.size, max_size=kind.size)
        case pl.Struct():
            right = objects({field.name: field.dtype for field in kind.fields})
        case pl.Float64():
            right = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60)
        case pl.String():
            right = st.text(max_size=3)
        case pl.Boolean():
            right = st.booleans()
        case _:
            right = st.integers(0, 127)
    return st.one_of(right, right, right, right, right, st.none(), WRONG)


def objects(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    known = st.fixed_dictionaries({}, optional={name: values(kind) for name, kind in fields.items()})
    return st.builds(lambda more, found: {**more, **found}, st.dictionaries(st.just("z"), WRONG, max_size=1), known)


documents = SCHEMAS.flatmap(
    lambda schema: st.tuples(st.just(schema), st.lists(objects(schema), min_size=1, max_size=4))
)


def wanted(kind: Any, value: Any) -> Any:
    """What a reader makes of a value.

    Raises:
        ValueError: It is not of that type.
    """
    if value is None:
        return None
    match kind:
        case pl.List() | pl.Array():
            if not isinstance(value, list) or len(value) != getattr(kind, "size", len(value)):
                raise ValueError
            return [wanted(kind.inner, one) for one in value]
        case pl.Struct():
            if not isinstance(value, dict):
                raise ValueError
            return {field.name: wanted(field.dtype, value.get(field.name)) for field in kind.fields}
        case pl.Float64():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError
            return float(value)
        case pl.String() | pl.Boolean():
            if not isinstance(value, str if kind == pl.String else bool):
                raise ValueError
            return value
    low, high = {pl.Int8(): (-128, 127), pl.UInt32(): (0, 2**32 - 1)}.get(kind, (-(2**63), 2**63 - 1))
    if type(value) is not int or not low <= value <= high:
        raise ValueError
    return value


def read(payload: Json, texts: list[bytes], columns: frozenset[str] | None = None) -> list[Any]:
    """What both readers make of documents; None for one that they refuse."""
    reader = payload.reader(columns)
    singly: list[Any] = []
    for text in texts:
        try:
            singly.append(reader(text))
        except EnvelopeError:
            singly.append(None)
    frame, good = payload_columns(payload, columns)(Spans.of(pa.array(texts, pa.binary())))
    assert frame.schema == {name: kind for name, kind in payload.schema.items() if columns is None or name in columns}
    rows = frame.iter_rows(named=True) if frame.width else iter([{}] * frame.height)
    together = [next(rows) if is_good else None for is_good in good]
    assert repr(together) == repr(singly)
    return singly


@given(documents)
@example(({"a": pl.Int64()}, [{"a": 1.0}, {"a": 1e300}, {"a": 2**63}]))
@example(
    ({"a": pl.List(pl.Struct({"b": pl.Array(pl.Int8, 2)}))}, [{"a": [{"b": [1, None]}, None, {}]}, {"a": [{"b": [1]}]}])
)
def test_both_readers_make_the_same_of_any_document_and_it_is_what_its_types_say(given_: Any) -> None:
    schema, found = given_
    results = read(Json(schema), [json.dumps(one).encode() for one in found])
    for one, result in zip(found, results, strict=True):
        try:
            assert repr(result) == repr(wanted(pl.Struct(schema), one))
        except ValueError:
            assert result is None


LINES = Json(
    {"order": str, "lines": [{"article": str, "quantity": int, "tags": [str]}], "place": {"x": float, "y": float}}
)


def test_a_list_in_brackets_and_an_object_in_braces_are_polars_lists_and_structs() -> None:
    line = pl.Struct({"article": pl.String, "quantity": pl.Int64, "tags": pl.List(pl.String)})
    place = pl.Struct({"x": pl.Float64, "y": pl.Float64})
    assert LINES == Json({"order": pl.String, "lines": pl.List(line), "place": place})
    assert LINES.schema == {"order": pl.String, "lines": pl.List(line), "place": place}


def test_missing_null_and_undeclared_fields_are_what_they_are_at_the_top() -> None:
    text = b'{"lines": [{"article": "pear", "colour": "green"}, null, {"tags": ["a", null]}], "place": {"x": 1}}'
    assert read(LINES, [text, b"{}"]) == [
        {
            "order": None,
            "lines": [
                {"article": "pear", "quantity": None, "tags": None},
                None,
                {"article": None, "quantity": None, "tags": ["a", None]},
            ],
            "place": {"x": 1.0, "y": None},
        },
        {"order": None, "lines": None, "place": None},
    ]


@pytest.mark.parametrize(
    "text",
    [
        b'{"lines": {}}',
        b'{"lines": [[]]}',
        b'{"lines": [{"quantity": 9223372036854775808}]}',
        b'{"lines": [{"quantity": "1"}]}',
        b'{"lines": [{"quantity": "1", "quantity": 1}]}',
        b'{"place": {"x": NaN}}',
        b'{"place": {"x": 1e999}}',
        b'{"place": []}',
        b'{"lines": [{"article": "\xff"}]}',
        b'{"lines": [',
    ],
)
def test_what_is_not_of_its_type_at_any_depth_is_refused(text: bytes) -> None:
    assert read(LINES, [b"{}", text])[1] is None


def test_of_a_name_that_comes_twice_the_last_one_counts() -> None:
    assert read(LINES, [b'{"place": {"x": 1, "x": 2}, "place": {"y": 3}}'])[0]["place"] == {"x": None, "y": 3.0}


def test_a_field_that_no_column_needs_is_not_looked_at() -> None:
    text = b'{"lines": 7, "order": "o1"}'
    assert read(LINES, [text], frozenset({"order"})) == [{"order": "o1"}]
    assert read(LINES, [text]) == [None]


def nested(depth: int, more: bytes = b"") -> bytes:
    """A document of this depth, in an undeclared field."""
    return b'{"order": "o1", "z": ' + more + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_document_is_at_most_500_levels_deep_whoever_reads_it() -> None:
    text = b'"' + b"[{" * 1000 + b'\\\\", "y": '
    deepest, deeper, deepest_of_all = nested(MAX_DEPTH), nested(MAX_DEPTH + 1), nested(200_000)
    found = read(LINES, [deepest, deeper, deepest_of_all, nested(MAX_DEPTH, text), nested(MAX_DEPTH + 1, text)])
    assert [one is not None for one in found] == [True, False, False, True, False]
    flat = b'{"lines": [' + b", ".join([b'{"tags": []}'] * 2000) + b"]}"
    assert len(read(LINES, [flat])[0]["lines"]) == 2000

    def within(frames: int) -> list[Any]:
        return within(frames - 1) if frames else read(LINES, [deepest, deeper])

    assert [one is not None for one in within(200)] == [True, False]


def test_floats_are_finite() -> None:
    assert math.isfinite(read(LINES, [b'{"place": {"x": 123456789012345678901234567890}}'])[0]["place"]["x"])
