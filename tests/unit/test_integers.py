"""Which expressions compute in 64 bits, and which are refused where they are written."""

import math

import polars as pl
import pytest

from aggregations.definition.aggregates import total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.integers import select_exact
from aggregations.definition.source import Topic
from aggregations.errors import FlowError
from tests.messages import Every

X = pl.col("x")
LISTS = pl.DataFrame(
    {"x": [1], "l": [[2**63 - 1, 1]], "small": [[100, 100]], "s": [{"x": 1}], "f": [[1.5, 2.0]]},
    schema={
        "x": pl.Int64,
        "l": pl.List(pl.Int64),
        "small": pl.Array(pl.Int8, 2),
        "s": pl.Struct({"x": pl.Int8}),
        "f": pl.List(pl.Float64),
    },
)


def one(of, frame=LISTS):
    found, overflow = select_exact(frame, {"_": of})
    return "overflow" if overflow is not None else found.item()


@pytest.mark.parametrize(
    ("of", "wanted"),
    [
        (pl.mean_horizontal(pl.lit(127, pl.Int8), pl.lit(127, pl.Int8)), 127.0),
        (pl.col("small").arr.sum(), 200),
        (pl.col("l").list.sum(), "overflow"),
        ((pl.col("l").list.sum() * 0).fill_null(7), "overflow"),
        (pl.col("s").struct.field("x") * 1000, 1000),
        ((pl.lit(True) + pl.lit(True)) * 2**62, "overflow"),
        ((X * 2).name.suffix("_double") + 1, 3),
        ((X * 2).cast(pl.String) + "!", "2!"),
        (pl.when(X > 0).then(2**63).otherwise(2).abs(), "overflow"),
        (pl.when(X > 0).then(2**63).otherwise(2) - 2**62, 2**62),
        (pl.when(X < 0).then(pl.lit(7, pl.UInt64)).otherwise(-1) * 3, -3),
        (X.cast(pl.Int128) * 2**62 * 2**62, "overflow"),
        (pl.col("f").list.eval(pl.element() * 2).list.sum(), 7.0),
    ],
    ids=str,
)
def test_whatever_sums_or_multiplies_integers_is_exact_or_refused(of, wanted):
    assert one(of) == wanted


def test_a_cast_that_a_person_wrote_stays_polars_own():
    assert one((X * 300).cast(pl.Int8, wrap_numerical=True)) == 44
    with pytest.raises(pl.exceptions.InvalidOperationError):
        one((X * 300).cast(pl.Int8))


@pytest.mark.parametrize(
    "of",
    [
        pl.col("l").list.diff().list.first(),
        pl.col("l").list.eval(pl.element() * 2).list.first(),
        (pl.col("l") + pl.col("l")).list.first(),
        (pl.col("s") * 2).struct.field("x"),
        pl.col("s").struct.with_fields(pl.field("x") * 2).struct.field("x"),
    ],
    ids=str,
)
def test_arithmetic_inside_lists_and_structs_is_refused_with_the_way_out(of):
    with pytest.raises(FlowError, match="pass a plain function"):
        one(of)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_number_that_cannot_be_written_down_is_refused_beside_integers(number):
    with pytest.raises(FlowError, match="is_nan"):
        one(pl.when(X.cast(pl.Float64) == number).then(X * 2))


def test_a_flow_says_so_where_it_is_written():
    flow = Flow("f").source(Topic("s", Every, envelope=False))
    with pytest.raises(FlowError, match="inside lists or structs"):
        flow.aggregate("a", "string", Fields(n=total(pl.col("rep_sint64").list.diff().list.first())))


def test_a_mapped_column_has_64_bits_whatever_it_was_made_of():
    flow = Flow("f").source(Topic("s", Every, envelope=False)).map(square=pl.col("int32") ** 2, gap=-pl.col("uint32"))
    assert {name: flow.schema[name] for name in ("square", "gap")} == {"square": pl.Int64, "gap": pl.Int64}
