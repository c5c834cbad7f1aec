"""Declarative folds: what each aggregate makes of values, one by one and by batches."""

import json
import math
import random

import polars as pl
import pytest

from aggregations.columns.fold import unfit_rows
from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
from aggregations.definition.fields import Fields
from aggregations.errors import FlowError
from envelope import EnvelopeError, Reason

AT = ((0,), "a:0#i")
ALL = Fields(
    n=count(),
    known=count("x"),
    sum=total("x"),
    low=minimum("x"),
    high=maximum("x"),
    middle=mean("x"),
    earliest=first("x"),
    latest=last("x"),
)


def fold(fields, rows, state=None):
    """The state after rows of inputs, each at its own position, through JSON after every row as a store would."""
    state = fields.zero() if state is None else state
    for offset, values in enumerate(rows):
        state = json.loads(json.dumps(fields.add(state, values, ((offset,), "a:0#i"))))
    return state


def inputs(fields, *xs):
    return [dict.fromkeys(fields.inputs(), x) for x in xs]


def refused(fields, state, values, at=AT):
    with pytest.raises(EnvelopeError) as error:
        fields.add(state, values, at)
    return error.value.reason


def test_every_aggregate_gives_what_sql_gives():
    assert ALL.result(fold(ALL, inputs(ALL, 3, 1, 2))) == {
        "n": 3, "known": 3, "sum": 6, "low": 1, "high": 3, "middle": 2.0, "earliest": 3, "latest": 2,
    }  # fmt: skip


def test_nulls_are_skipped_and_only_count_sees_the_element():
    assert ALL.result(fold(ALL, inputs(ALL, None, 4, None))) == {
        "n": 3, "known": 1, "sum": 4, "low": 4, "high": 4, "middle": 4.0, "earliest": 4, "latest": 4,
    }  # fmt: skip


def test_of_no_values_a_total_is_zero_and_the_others_are_null():
    assert ALL.result(fold(ALL, inputs(ALL, None))) == {
        "n": 1, "known": 0, "sum": 0, "low": None, "high": None, "middle": None, "earliest": None, "latest": None,
    }  # fmt: skip


def test_texts_have_a_least_a_greatest_a_first_and_a_last():
    fields = Fields(low=minimum("x"), high=maximum("x"), known=count("x"), latest=last("x"))
    assert fields.result(fold(fields, inputs(fields, "b", "é", "a"))) == {
        "low": "a", "high": "é", "known": 3, "latest": "a",
    }  # fmt: skip


def test_booleans_are_numbers_to_a_total():
    fields = Fields(late=total("x"), share=mean("x"))
    assert fields.result(fold(fields, inputs(fields, True, False, True))) == {"late": 2, "share": 2 / 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_by_every_aggregate_that_reads(bad):
    for field in (count("x"), total("x"), minimum("x"), maximum("x"), mean("x"), first("x"), last("x")):
        fields = Fields(f=field)
        assert refused(fields, fields.zero(), {"f": bad}) is Reason.NOT_FINITE
    ordered = Fields(f=last("x", by="t"))
    assert refused(ordered, ordered.zero(), {"f": 1, "f.by": bad}) is Reason.NOT_FINITE


@pytest.mark.parametrize("field", [total("x"), mean("x")])
@pytest.mark.parametrize(("start", "more"), [(2**63 - 1, 1), (-(2**63), -1)])
def test_an_integer_total_stops_at_64_bits(field, start, more):
    fields = Fields(f=field)
    state = fold(fields, [{"f": start}])
    assert refused(fields, state, {"f": more}) is Reason.OVERFLOW
    assert fields.add(state, {"f": -more}, AT)


def test_a_floating_total_stops_at_infinity():
    fields = Fields(f=total("x"))
    assert refused(fields, fold(fields, [{"f": 1.7e308}]), {"f": 1.7e308}) is Reason.OVERFLOW


@pytest.mark.parametrize("field", [count("x"), minimum("x"), last("x")])
def test_an_integer_beyond_64_bits_is_refused_before_a_store_would(field):
    fields = Fields(f=field)
    assert fields.add(fields.zero(), {"f": 2**64 - 1}, AT)
    assert refused(fields, fields.zero(), {"f": 2**64}) is Reason.OVERFLOW
    assert refused(fields, fields.zero(), {"f": -(2**63) - 1}) is Reason.OVERFLOW


@pytest.mark.parametrize("value", [b"x", [1], {"a": 1}, "\ud800"], ids=repr)
def test_what_a_state_cannot_hold_is_refused(value):
    for field in (count("x"), minimum("x"), last("x")):
        fields = Fields(f=field)
        assert refused(fields, fields.zero(), {"f": value}) is Reason.BAD_PAYLOAD


@pytest.mark.parametrize(
    ("value", "unfit"),
    [(2**64 - 1, False), (2**64, True), (-(2**63), False), (-(2**63) - 1, True), (2**127, True), (None, False)],
)
def test_the_vectorised_fold_leaves_to_the_definition_what_is_beyond_64_bits(value, unfit):
    fields = Fields(f=minimum("x"))
    dtype = pl.UInt128 if value == 2**127 else pl.Int128
    inputs = pl.DataFrame({"f": [5, value]}, schema={"f": dtype})
    assert unfit_rows(fields, inputs, 2).tolist() == [False, unfit]


def test_text_has_no_total():
    for field in (total("x"), mean("x")):
        fields = Fields(f=field)
        assert refused(fields, fields.zero(), {"f": "1"}) is Reason.BAD_PAYLOAD


def test_a_refused_value_leaves_the_state_as_it_was():
    fields = Fields(n=count(), sum=total("x"))
    state = fields.zero()
    refused(fields, state, {"sum": math.nan})
    assert state == {"n": 0, "sum": 0}


def test_first_and_last_go_by_position_and_not_by_arrival():
    fields = Fields(earliest=first("x"), latest=last("x"))
    rows = [(offset, f"v{offset}") for offset in range(8)]
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        state = fields.zero()
        for offset, value in rows:
            state = fields.add(state, {"earliest": value, "latest": value}, ((offset,), "a:0#i"))
        assert fields.result(state) == {"earliest": "v0", "latest": "v7"}


def test_first_and_last_by_a_column_break_ties_by_position_and_then_by_lane():
    fields = Fields(earliest=first("x", by="t"), latest=last("x", by="t"))
    arrivals = [("a", 1, 5, "l"), ("b", 1, 6, "l"), ("c", 9, 1, "l"), ("d", 9, 1, "m"), ("e", 5, 3, "l")]
    for seed in range(5):
        random.Random(seed).shuffle(arrivals)
        state = fields.zero()
        for value, by, offset, lane in arrivals:
            row = {"earliest": value, "earliest.by": by, "latest": value, "latest.by": by}
            state = json.loads(json.dumps(fields.add(state, row, ((offset,), lane))))
        assert fields.result(state) == {"earliest": "a", "latest": "d"}


def test_a_null_order_skips_the_value():
    fields = Fields(latest=last("x", by="t"))
    state = fold(fields, [{"latest": "a", "latest.by": 1}, {"latest": "b", "latest.by": None}])
    assert fields.result(state) == {"latest": "a"}


def test_positions_of_chains_of_different_length_can_be_compared_when_an_event_id_is_in_them():
    fields = Fields(latest=last("x"))
    state = fields.add(fields.zero(), {"latest": "short"}, ((17, -1, "e"), "a"))
    state = fields.add(state, {"latest": "long"}, ((17, -1, -1, "f"), "b"))
    assert fields.result(state) == {"latest": "long"}


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_joined_to_a_state_is_what_its_values_one_by_one_make_of_it(seed):
    draw = random.Random(seed)
    fields = Fields(n=count(), known=count("x"), sum=total("x"), low=minimum("x"), high=maximum("x"), middle=mean("x"))
    one_by_one, joined = fields.zero(), fields.zero()
    for _ in range(6):
        values = [draw.choice([None, draw.randint(-9, 9)]) for _ in range(draw.randint(0, 4))]
        one_by_one = fold(fields, inputs(fields, *values), one_by_one)
        frame = pl.DataFrame({"x": values}, schema={"x": pl.Int64})
        partials = frame.select(**{name: field.batch(pl.col("x")) for name, field in fields.fields.items()}).row(
            0, named=True
        )
        joined = {name: field.join(joined[name], partials[name]) for name, field in fields.fields.items()}
        assert joined == one_by_one


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (dict, "at least one"),
        (lambda: {"f": 3}, "takes an aggregate such as count"),
        (lambda: {"f": total(pl.col("x").sum())}, "several rows"),
        (lambda: {"f": last("x", by=pl.col("t").max())}, "several rows"),
        (lambda: {"f": last("x", by="t"), "f.by": count()}, "rename"),
    ],
    ids=["none", "no aggregate", "several rows", "ordered by several rows", "two of one name"],
)
def test_fields_that_cannot_work_are_refused_where_they_are_written(fields, match):
    with pytest.raises(FlowError, match=match):
        Fields(**fields())


@pytest.mark.parametrize(
    ("field", "dtype", "match"),
    [(count("x"), pl.Binary, "cast it"), (minimum("x"), pl.Date, "cast it"), (total("x"), pl.String, "total of text")],
)
def test_a_field_of_a_type_that_its_aggregate_does_not_take_is_refused(field, dtype, match):
    with pytest.raises(FlowError, match=match):
        Fields(f=field).check({"f": dtype()})


def test_the_description_has_every_field_with_all_that_it_reads():
    assert (
        Fields(n=count(), s=total("x"), l=last("x", by="t")).describe() == "Fields(n=count(), s=total(x), l=last(x, t))"
    )
    assert Fields(s=total(pl.col("x").round(1))).describe() != Fields(s=total(pl.col("x").round(2))).describe()
