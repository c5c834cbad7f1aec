"""Variance, histograms and collected values: exact, in any order, whatever the batches."""

import math
import random
import statistics
from fractions import Fraction
from typing import Any

import msgspec
import polars as pl
import pytest

from aggregations.definition.aggregates import FieldAggregate, count, first, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, histogram, standard_deviation, variance
from aggregations.definition.aggregates_sketches import top
from aggregations.errors import FlowError
from envelope import EnvelopeError, Reason


def stored(state: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(state))


def one_by_one(field: FieldAggregate, values: list[Any], start: int = 0) -> Any:
    state = field.zero
    for place, value in enumerate(values, start):
        state = stored(field.add(state, value, None, ((place,), "lane")))
    return state


def in_batches(field: Any, values: list[Any], dtype: Any, size: int) -> Any:
    state, at = field.zero, [((place,), "lane") for place in range(len(values))]
    for i in range(0, len(values), size):
        some = field.prepared(pl.Series(values[i : i + size], dtype=dtype, strict=True))
        state = stored(field.extend(state, some, at[i : i + size]))
    return state


INTEGERS = [random.Random(1).randrange(-(2**63), 2**63) for _ in range(200)]
FLOATS = [random.Random(2).choice([0.1, -0.0, 5e-324, 1e150, 1e9 + 0.3, -2.5]) for _ in range(200)]
ANY = [(INTEGERS, pl.Int64), (FLOATS, pl.Float64), ([2**64 - 1, 0, 2**63], pl.UInt64), ([True, False], pl.Boolean)]


@pytest.mark.parametrize(("values", "dtype"), ANY)
@pytest.mark.parametrize(
    "field",
    [variance("x"), histogram("x", [-1e18, 0, 0.5, 1, 2.0**63, 1e200]), collect("x", 7), top("x", 3, size=1000)],
)
def test_a_state_does_not_depend_on_where_batches_end(field, values, dtype):
    expected = one_by_one(field, values)
    for size in (1, 3, 1000):
        assert msgspec.json.encode(in_batches(field, values, dtype, size)) == msgspec.json.encode(expected)


@pytest.mark.parametrize(("values", "dtype"), ANY)
def test_a_variance_is_that_of_the_exact_values_rounded_once(values, dtype):
    exact = statistics.variance([Fraction(value) for value in values])
    assert variance("x").result(one_by_one(variance("x"), values)) == float(exact)
    assert standard_deviation("x").result(one_by_one(variance("x"), values)) == math.sqrt(float(exact))


def test_a_variance_of_close_large_values_keeps_every_digit():
    values = [1e9 + 0.25, 1e9 + 0.5, 1e9 + 0.75]  # squares in floats would lose all of it
    assert variance("x").result(one_by_one(variance("x"), values)) == 0.0625


def test_a_variance_needs_two_values():
    field = variance("x")
    assert field.result(field.zero) is None
    assert field.result(one_by_one(field, [3])) is None
    assert field.result(one_by_one(field, [3, 5])) == 2.0


@pytest.mark.parametrize("values", [[3, 5, 8, 13], [0.5, 2.0**400, 5e-324, -1.25], [1, 0.5, 2, 0.25]])
def test_a_variance_does_not_depend_on_the_order_of_the_values(values):
    orders = [values, values[::-1], values[2:] + values[:2]]
    assert len({msgspec.json.encode(one_by_one(variance("x"), order)) for order in orders}) == 1


def test_a_value_whose_square_may_leave_the_range_is_rejected():
    field = variance("x")
    state = one_by_one(field, [2.0**511 * (1 - 2**-53), -(2.0**511) * (1 - 2**-53)])
    assert math.isfinite(field.result(state))
    with pytest.raises(EnvelopeError, match="a value is too large for a variance") as caught:
        field.add(state, -(2.0**511), None, ((), ""))
    assert caught.value.reason is Reason.OVERFLOW


def test_a_value_that_equals_a_bound_is_in_the_bucket_that_begins_there():
    field = histogram("x", [0, 10])
    assert field.result(one_by_one(field, [-1, 0, 9.5, 10, 11])) == {"bounds": [0.0, 10.0], "counts": [1, 2, 2]}
    assert field.result(field.zero) == {"bounds": [0.0, 10.0], "counts": [0, 0, 0]}


def test_large_integers_are_compared_with_bounds_without_rounding():
    field = histogram("x", [2.0**60])
    values = [2**60 - 1, 2**60, 2**60 + 1]
    assert field.result(in_batches(field, values, pl.Int64, 10))["counts"] == [1, 2]
    assert field.result(in_batches(field, values, pl.UInt64, 10))["counts"] == [1, 2]


def test_collected_are_the_values_at_the_lowest_positions_whatever_arrives_first():
    field = collect("x", 2)
    state = field.zero
    for place, value in [(5, "e"), (1, "a"), (9, "i"), (3, "c")]:
        state = stored(field.add(state, value, None, ((place,), "lane")))
    assert field.result(state) == {"values": ["a", "c"], "dropped": 2}
    assert field.result(field.zero) == {"values": [], "dropped": 0}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (count(), [1, 2, 3, 4]),
        (total("x"), [1, 2, 3, 4]),
        (minimum("x"), [2, 1, 3]),
        (mean("x"), [1, 2, 4]),
        (first("x"), [7, 8, 9]),
        (variance("x"), [0.1, 0.7, 1e300 / 1e200, 3.0]),
        (histogram("x", [2, 3]), [1, 2, 3, 4]),
        (collect("x", 2), [1, 2, 3, 4]),
        (top("x", 1), ["a", "b", "a", "c"]),
    ],
)
def test_merged_states_hold_what_both_hold(field, values):
    whole = one_by_one(field, values)
    for cut in range(len(values) + 1):
        parts = one_by_one(field, values[:cut]), one_by_one(field, values[cut:], cut)
        assert field.result(stored(field.merge(*parts))) == field.result(whole)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: histogram("x", []), "bounds takes 1 to 1,000 numbers, not 0"),
        (lambda: histogram("x", [2, 1]), "bounds must be in ascending order"),
        (lambda: histogram("x", [1, 1.0]), "bounds must be in ascending order"),
        (lambda: histogram("x", [math.nan]), "nan is not a bound"),
        (lambda: histogram("x", [2**60 + 1]), f"{2**60 + 1} is not a bound"),
        (
            lambda: histogram("x", ["1"]),  # type: ignore[list-item]
            "'1' is not a bound",
        ),
        (
            lambda: histogram("x", "12"),  # type: ignore[arg-type]
            "bounds takes a list of numbers; got str",
        ),
        (
            lambda: histogram("x", 1),  # type: ignore[arg-type]
            "bounds takes a list of numbers; got int",
        ),
        (lambda: collect("x", 0), "limit takes an integer from 1 to 1,000; got 0"),
        (lambda: collect("x", True), "limit takes an integer from 1 to 1,000; got True"),
        (lambda: variance(None), r"variance\(\) takes a column name or a polars expression; got None"),
        (
            lambda: variance("x", where=1),  # type: ignore[arg-type]
            r"variance\(where=\) takes a column name or a polars expression",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_when_the_flow_is_defined(make, text):
    with pytest.raises(FlowError, match=text):
        make()


STATES = {
    "count": one_by_one(count(), [1]),
    "minimum": one_by_one(minimum("x"), ["a"]),
    "mean": one_by_one(mean("x"), [1]),
    "first": one_by_one(first("x"), [1]),
    "variance": one_by_one(variance("x"), [1]),
    "histogram": one_by_one(histogram("x", [1]), [1]),
    "collect": one_by_one(collect("x", 3), [1]),
    "top": one_by_one(top("x", 1), [1]),
}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("count", count()),
        ("mean", mean("x")),
        ("first", first("x")),
        ("variance", variance("x")),
        ("histogram", histogram("x", [1])),
        ("collect", collect("x", 3)),
        ("top", top("x", 1)),
    ],
)
def test_a_state_fits_the_aggregate_that_made_it_and_no_other(kind, field):
    assert [name for name, state in STATES.items() if field.fits(state)] == [kind]


def test_a_histogram_is_not_continued_with_other_bounds():
    assert not histogram("x", [2]).fits(STATES["histogram"])
    assert not histogram("x", [1, 2]).fits(STATES["histogram"])


def test_collected_values_are_not_continued_with_a_limit_that_needs_dropped_ones():
    short, full = one_by_one(collect("x", 3), [1]), one_by_one(collect("x", 3), [1, 2, 3, 4])
    assert collect("x", 9).fits(short)
    assert not collect("x", 9).fits(full)
    assert not collect("x", 2).fits(full)


@pytest.mark.parametrize(
    "damaged",
    [
        {"count": -1, "sum": "1", "squares": "1", "scale": 0},
        {"count": 1, "sum": "x", "squares": "1", "scale": 0},
        {"count": 1, "sum": 1, "squares": "1", "scale": 0},
        {"count": 1, "sum": "1", "squares": "1"},
        [1, 1, 1, 0],
    ],
)
def test_a_damaged_state_does_not_fit(damaged):
    assert not variance("x").fits(damaged)
