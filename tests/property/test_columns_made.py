"""`Fields` over values that a function made: on columns what they are message by message, whatever the types."""

from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, variance
from aggregations.definition.aggregates_sketches import approximate_distinct, top
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from tests.support.both import Both
from tests.support.pure import bare, leg

MADE: list[Any] = []
"""The value that the function makes of each record, by offset."""


def make(element: Element[Any]) -> Any:
    return MADE[element.own.offset]


integers = st.sampled_from([0, 1, -5, 2**62, 2**63 - 1])
texts = st.sampled_from(["", "a", "é"])
columns = st.sampled_from(
    [
        integers,
        st.sampled_from([0.0, 0.5, -2.25, float("inf")]),
        texts,
        st.booleans(),
        st.none(),
        st.sampled_from([2**63, 2**64, -(2**63)]),
        st.sampled_from([1, 1.5, True, "a", b"b", "\ud800", [1]]),
    ]
).map(lambda values: values | st.none())
fields = st.fixed_dictionaries(
    {"n": st.just(count())},
    optional={
        "known": st.just(count("x")),
        "sum": st.just(total("x")),
        "low": st.just(minimum("x")),
        "high": st.just(maximum(pl.col("x"))),
        "mean": st.just(mean("y")),
        "first": st.just(first("x")),
        "last": st.just(last("y", by="x")),
        "twice": st.just(total(pl.col("y") * 2)),
        "where": st.just(count(where=pl.col("x") == pl.col("y"))),
        "spread": st.just(variance("y")),
        "some": st.just(collect("x", 2)),
        "kinds": st.just(approximate_distinct("y")),
        "usual": st.just(top("x", 1)),
    },
).map(lambda found: Fields(**found))


@st.composite
def values(draw: st.DrawFn) -> list[list[Any]]:
    """What the function makes, in batches."""
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        x, y = draw(columns), draw(columns)
        mapping = st.fixed_dictionaries({"k": st.sampled_from(["a", "b"]), "x": x, "y": y})
        batches.append(draw(st.lists(mapping, min_size=1, max_size=5)))
        if draw(st.integers(0, 5)) == 0:
            batches[-1].append(draw(st.sampled_from([7, {"k": "a"}, {"k": "a", "x": 1}])))
    return batches


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(values(), fields)
def test_values_of_functions_are_folded_on_columns_as_message_by_message(found: list[list[Any]], fold: Fields) -> None:
    both = Both(Flow("f").source(bare()).map(make).aggregate("a", lambda element: "k", fold))
    MADE[:] = [value for batch in found for value in batch]
    offset = 0
    for batch in found:
        both.process([leg(offset + i) for i in range(len(batch))])
        offset += len(batch)


def test_text_after_numbers_is_rejected_as_message_by_message() -> None:
    both = Both(Flow("f").source(bare()).map(make).aggregate("a", lambda element: "k", Fields(low=minimum("x"))))
    MADE[:] = [{"x": 1}, {"x": "a"}]
    both.process([leg(0)])
    both.process([leg(1)])
    assert both.results("a") == {b"k": {"low": 1}}
    assert [reason.value for _, reason in both.reasons()] == ["fold_failed"]
