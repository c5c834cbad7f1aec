"""Which expressions a flow accepts: those whose result for a row is that row's alone."""

import polars as pl
import pytest

from aggregations.definition.expressions import describe_expression, expression, key_bytes, text_of
from aggregations.errors import FlowError

X = pl.col("x")

SEVERAL_ROWS = {
    "a sum": X.sum(),
    "a difference from the mean": X - X.mean(),
    "the number of rows": pl.len(),
    "a history over another column": X.sum().over("y"),
    "a running total": X.cum_sum(),
    "the row before": X.shift(1),
    "a difference to the row before": X.diff(),
    "a filled gap": X.fill_null(strategy="forward"),
    "a gap filled with the mean": X.fill_null(X.mean()),
    "a sort": X.sort(),
    "a rank": X.rank(),
    "a filter": X.filter(X > 1),
    "an exploded list": X.explode(),
    "whether all are true": X.all(),
    "whether any is true": X.any(),
    "whether it is unique": X.is_unique(),
    "whether it is the first of its kind": X.is_first_distinct(),
    "a product": X.product(),
    "a number of nulls": X.null_count(),
    "a quantile": X.quantile(0.5),
    "a run-length id": X.rle_id(),
    "a peak": X.peak_max(),
    "a correlation": pl.corr("x", "y"),
    "texts joined": X.str.join(","),
    "membership in another column": X.is_in(pl.col("y").implode()),
    "bits of all rows": X.bitwise_and(),
    "the smallest by another column": X.min_by("y"),
    "a sample": X.sample(1),
    "a sample of a list": pl.col("l").list.sample(1),
    "a sample of a list's elements": pl.col("l").list.eval(pl.element().sample(1)),
    "row numbers": pl.int_range(pl.len()),
    "a rolling sum": X.rolling_sum(2),
    "the head up to another column": X.head(pl.col("y")),
    "hidden in a condition": pl.when(X > 1).then(X.max()).otherwise(0),
    "hidden in an alias": X.max().alias("x"),
    "a literal column": pl.lit(pl.Series([1, 2])),
}

ONE_ROW = {
    "arithmetic": X * 2 + pl.col("y"),
    "a comparison": (X > 1) & pl.col("y").is_null(),
    "a condition": pl.when(X > 1).then(X).otherwise(0),
    "membership in values": X.is_in([1, 2]),
    "text": pl.col("s").str.to_uppercase() + pl.format("{}-{}", "x", "s"),
    "text and time together": pl.col("s").str.len_bytes() + pl.col("t").dt.hour(),
    "a sum over columns": pl.sum_horizontal("x", "y"),
    "the first that is not null": pl.coalesce("x", "y"),
    "a list within the row": pl.col("l").list.sum(),
    "a list sorted within the row": pl.col("l").list.sort(),
    "a field of a struct": pl.col("st").struct.field("a"),
    "of three kinds of columns": pl.when(pl.col("s").str.starts_with("a"))
    .then(pl.col("t").dt.hour())
    .otherwise(pl.col("l").list.sum()),
    "a cast": X.cast(pl.Float64),
    "a value within bounds": X.clip(0, 9),
    "a value replaced": X.replace({1: 2}),
    "a literal": pl.lit("x"),
    "a column that is called as a function is": pl.col("Rank") + 1,
    "a result that is called as a function is": (X + 1).alias("Len"),
}


@pytest.mark.parametrize("found", SEVERAL_ROWS.values(), ids=SEVERAL_ROWS)
def test_an_expression_over_several_rows_is_refused(found):
    with pytest.raises(FlowError, match="several rows"):
        expression(found)


@pytest.mark.parametrize("found", ONE_ROW.values(), ids=ONE_ROW)
def test_an_expression_over_one_row_is_accepted(found):
    assert expression(found) is found


AS_LONG_AS_A_RECORD_SAYS = {
    "copies": X.repeat_by("n"),
    "numbers": pl.int_ranges(0, "n"),
    "a padded text": X.str.pad_start(pl.col("n")),
    "a text padded at its end": X.str.pad_end(pl.col("n") + 1, "x"),
    "zeros": (X.str.zfill("n") + "x").str.len_chars(),
    "days": pl.date_ranges("a", "b"),
    "times": pl.datetime_ranges("a", "b", "1us"),
    "steps": pl.linear_spaces(0, 1, "n"),
    "copies in a list": pl.col("l").list.eval(pl.element().repeat_by(pl.element())),
}
AS_LONG_AS_THE_FLOW_SAYS = [
    X.repeat_by(3),
    pl.int_ranges(0, pl.lit(4)),
    X.str.pad_start(5),
    pl.linear_spaces("a", 1, 5),
    pl.lit("RepeatBy") + X,
]


@pytest.mark.parametrize("found", AS_LONG_AS_A_RECORD_SAYS.values(), ids=AS_LONG_AS_A_RECORD_SAYS)
def test_a_result_that_is_as_long_as_a_record_says_is_refused(found):
    with pytest.raises(FlowError, match="one record could take all memory; pass a plain function"):
        expression(found)


@pytest.mark.parametrize("found", AS_LONG_AS_THE_FLOW_SAYS, ids=str)
def test_a_result_that_is_as_long_as_the_flow_says_is_accepted(found):
    assert expression(found) is found


def test_numbers_of_texts_that_depend_on_what_the_process_has_seen_are_refused():
    with pytest.raises(FlowError, match=r"pl\.Enum"):
        expression(pl.col("s").cast(pl.Categorical).to_physical())
    assert expression(pl.col("s").cast(pl.Enum(["a", "b"])).to_physical()) is not None
    assert expression(pl.col("t").dt.date().to_physical()) is not None


@pytest.mark.parametrize("found", ["^x.*$", pl.all(), pl.col("x", "y"), pl.exclude("y")], ids=str)
def test_an_expression_of_several_columns_is_refused(found):
    with pytest.raises(FlowError, match="several columns"):
        expression(found)


def test_python_code_inside_an_expression_is_refused_with_the_way_out():
    with pytest.raises(FlowError, match="plain function of the element"):
        expression(X.map_elements(abs, return_dtype=pl.Int64))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X.round(1), X.round(2)),
        (X.dt.truncate("1h"), X.dt.truncate("2h")),
        (X.is_in([1, 2, 3, 4, 5, 6, 7]), X.is_in([1, 2, 3, 9, 5, 6, 7])),
        (X.str.replace("a", "b"), X.str.replace("a", "c")),
        (X.cast(pl.Int8), X.cast(pl.Int16)),
    ],
    ids=["decimals", "intervals", "values", "patterns", "types"],
)
def test_the_text_of_an_expression_has_every_argument(one, other):
    assert describe_expression(one) == describe_expression(one)
    assert describe_expression(one) != describe_expression(other)


def test_a_column_by_name_and_by_expression_has_the_same_text():
    assert describe_expression("x") == describe_expression(X) == "x"


@pytest.mark.parametrize(
    ("value", "key"), [("é", "é".encode()), (b"\x00\xff", b"\x00\xff"), (-17, b"-17"), ("", b""), (None, None)]
)
def test_a_key_is_text_as_utf8_an_integer_in_decimal_or_bytes_as_they_are(value, key):
    assert key_bytes(value) == key


@pytest.mark.parametrize("value", [1.0, True, [1], {"a": 1}, "\ud800"], ids=repr)
def test_a_key_of_another_kind_is_refused(value):
    with pytest.raises(FlowError, match=r"^(the key is of type|the key contains)"):
        key_bytes(value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (pl.when(X > 1).then(2).otherwise(X), '.when([col("x") > 1]).then(2).otherwise(col("x"))'),
        (X.is_between(1, 3.5), 'col("x").is_between([1, 3.5])'),
        (X.ne_missing("y"), '[col("x") is distinct from ("y")]'),
        (X == "(y)", '[col("x") == ("(y)")]'),
        (pl.col("at").dt.timestamp("ms"), 'col("at").dt.timestamp(ms)'),
        (pl.col("line").struct.field("sku"), 'col("line").struct.field_by_name(sku)'),
    ],
)
def test_an_expression_is_shown_without_types_and_with_the_parentheses_of_calls(given: pl.Expr, text: str) -> None:
    assert text_of(given) == text
