"""Expressions over single values: the result depends on that value alone."""

import numpy as np
import polars as pl
import pytest

from aggregations.definition.schemas import UNKNOWN, Passed
from aggregations.per_message.rows import evaluate_values
from envelope import EnvelopeError, Reason

DOUBLE = {"double": pl.col("x") * 2}


def results(values, wanted=DOUBLE, schema=UNKNOWN):
    """The values found, or the reason code of the failure."""
    found = evaluate_values(values, wanted, schema)
    return [one.reason.value if isinstance(one, EnvelopeError) else one for one in found]


def test_an_expression_is_evaluated_for_every_value():
    assert results([{"x": 1}, {"x": None}, {"x": 3}]) == [{"double": 2}, {"double": None}, {"double": 6}]


def test_an_expression_that_raises_for_one_value_fails_that_one_only():
    strict = {"number": pl.col("x").cast(pl.Int64)}
    values = [{"x": str(n)} for n in range(9)]
    values[4] = {"x": "four"}
    assert results(values, strict, {"x": pl.String()}) == [
        {"number": n} if n != 4 else "transform_failed" for n in range(9)
    ]


def test_an_expression_of_literals_has_a_result_for_every_value():
    assert results([{"x": 1}, {"x": 2}], {"one": pl.lit(1)}) == [{"one": 1}, {"one": 1}]


@pytest.mark.parametrize("wanted", [DOUBLE, {"x": "x"}], ids=["expression", "column"])
def test_a_value_without_the_column_fails_alone_whatever_else_is_in_the_batch(wanted):
    assert results([{"x": 1}, {"y": 1}], wanted)[1] == "missing_field"
    assert results([{"y": 1}], wanted) == ["missing_field"]


@pytest.mark.parametrize("wanted", [DOUBLE, {"x": "x"}], ids=["expression", "column"])
def test_a_value_that_is_no_mapping_has_no_columns(wanted):
    assert results([17, {"x": 1}], wanted)[0] == "missing_field"


@pytest.mark.parametrize(
    "values",
    [
        [{"x": 1}, {"x": 2.5}],
        [{"x": 1}, {"x": None}, {"x": 2**62}],
        [{"x": True}, {"x": 3}],
        [{"x": 2**64}, {"x": 3}],
        [{"x": np.int64(3)}, {"x": 1}],
        [{"x": 1, "other": object()}, {"x": 2, "other": "text"}],
        [{"x": "a"}, {"x": 1}, {"x": b"b"}],
        [{"x": "\ud800"}, {"x": "a"}],
        [{"x": object()}, {"x": 1}],
        [{"x": (1, 2)}, {"x": 1}],
    ],
    ids=["float", "null", "boolean", "large", "numpy", "other columns", "types", "surrogate", "object", "list"],
)
@pytest.mark.parametrize("of", [pl.col("x") + pl.col("x"), "x"], ids=["expression", "column"])
def test_what_else_is_in_the_batch_changes_no_result_and_no_type(values, of):
    alone = [repr(results([value], {"_": of})) for value in values]
    together = [repr([one]) for one in results(values, {"_": of})]
    assert together == alone


def test_numbers_and_texts_of_other_libraries_become_pythons_own():
    class Text(str):
        __slots__ = ()

    found = results([{"x": np.float64(1.5)}, {"x": np.int8(3)}, {"x": Text("a")}], {"x": "x"})
    assert [type(one["x"]) for one in found] == [float, int, str]


def test_the_reason_is_a_code_and_quotes_no_value():
    [error] = evaluate_values([{"x": "secret"}], {"n": pl.col("x").cast(pl.Int64)}, {"x": pl.String()})
    assert error.reason is Reason.TRANSFORM_FAILED
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"x": 2**62}, "overflow"),
        ({"x": 2**64}, "overflow"),
        ({"x": 2**200}, "overflow"),
        ({"x": 2**61}, {"double": 2**62}),
    ],
    ids=["64 bits", "65 bits", "201 bits", "within"],
)
def test_an_integer_that_leaves_64_bits_is_refused_by_name(value, wanted):
    assert results([value, {"x": 1}]) == [wanted, {"double": 2}]


LISTS = {"sum": pl.col("l").list.sum(), "letters": pl.col("t").str.len_chars(), "first": pl.col("l").list.first()}
COLUMNS = {"l": pl.List(pl.Int64()), "t": pl.String()}


@pytest.mark.parametrize("schema", [COLUMNS, Passed(COLUMNS), UNKNOWN], ids=["columns", "passed on", "unknown"])
def test_a_null_and_an_empty_list_fit_every_expression(schema):
    values = [{"l": [], "t": None}, {"l": None, "t": "ab"}, {"l": [None], "t": ""}, {"l": [1, 2], "t": None}]
    assert results(values, LISTS, schema) == [
        {"sum": 0, "letters": None, "first": None},
        {"sum": None, "letters": 2, "first": None},
        {"sum": 0, "letters": 0, "first": None},
        {"sum": 3, "letters": None, "first": 1},
    ]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([5, 300, -1, 1.5, "a", None], pl.UInt8()),
        ([0.5, 5, True], pl.Float64()),
        ([[], [1], ["a"], (2, 3), None], pl.List(pl.Int64())),
        ([{"a": 1, "b": None}, {"a": 1}, {"a": "x", "b": None}], pl.Struct({"a": pl.Int64(), "b": pl.String()})),
    ],
    ids=["integers", "floats", "lists", "structs"],
)
def test_a_value_that_does_not_fit_the_column_has_its_own_type_whatever_is_beside_it(values, dtype):
    alone = [repr(results([{"x": one}], {"_": pl.struct("x")}, Passed(x=dtype))) for one in values]
    together = results([{"x": one} for one in values], {"_": pl.struct("x")}, Passed(x=dtype))
    assert [repr([one]) for one in together] == alone
    assert [one["_"]["x"] for one in together] == [list(one) if isinstance(one, tuple) else one for one in values]


def test_a_small_integer_that_a_function_passes_on_keeps_its_width():
    assert results([{"x": 5}, {"x": 300}], {"_": ~pl.col("x")}, Passed(x=pl.UInt8())) == [{"_": 250}, {"_": -301}]
