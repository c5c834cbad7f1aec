"""Two folds of the same values agree on what of their states is compared, whatever their order and their batches."""

import random
from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.definition.aggregates import FieldAggregate, count, first, last, maximum, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, histogram, standard_deviation, variance
from aggregations.definition.aggregates_sketches import SequenceAggregate, approximate_distinct, quantiles, top
from jobs.comparing import Likeness, alike

AGGREGATES = {
    one.describe(): one
    for one in (
        count("x"),
        total("x"),
        minimum("x"),
        maximum("x"),
        mean("x"),
        first("x"),
        last("x"),
        variance("x"),
        standard_deviation("x"),
        histogram("x", [-10.0, 0.0, 10.0]),
        collect("x", 5),
        approximate_distinct("x", precision=4),
        quantiles("x", k=8),
        top("x", 2, size=4),
    )
}
_numbers = st.one_of(st.integers(-(2**40), 2**40), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), st.integers(0, 6))


def folded(aggregate: FieldAggregate, values: Sequence[tuple[int, Any]], cuts: random.Random) -> Any:
    """The state of values with their positions, in batches of any size; one that takes whole batches gets those."""
    state = list(aggregate.zero) if isinstance(aggregate.zero, tuple) else aggregate.zero
    left = list(values)
    while left:
        size = cuts.randint(1, len(left))
        part, left = left[:size], left[size:]
        at = [((position,), "lane") for position, _ in part]
        if isinstance(aggregate, SequenceAggregate) and not aggregate.ordered and cuts.random() < 0.5:
            series = pl.Series([float(value) for _, value in part])
            state = aggregate.extend(state, aggregate.prepared(series), at)
        else:
            for (_, value), where in zip(part, at, strict=True):
                state = aggregate.add(state, float(value), None, where)
    return state


@pytest.mark.parametrize("name", AGGREGATES)
@given(values=st.lists(_numbers, min_size=1, max_size=60), rng=st.randoms(use_true_random=False))
def test_what_is_compared_does_not_depend_on_order_or_batches(
    name: str, values: Sequence[Any], rng: random.Random
) -> None:
    aggregate, numbered = AGGREGATES[name], list(enumerate(values))
    shuffled = list(numbered)
    rng.shuffle(shuffled)
    one, other = (aggregate.comparable(folded(aggregate, part, rng)) for part in (numbered, shuffled))
    if name.startswith(("total", "mean")):  # numbers of both signs may cancel out
        assert one == pytest.approx(other, rel=0, abs=1e-12 * sum(map(abs, values)))
    else:
        assert alike(one, other) is not Likeness.DIFFERENT


@pytest.mark.parametrize("name", AGGREGATES)
def test_what_is_compared_shows_a_value_that_is_missing(name: str) -> None:
    aggregate, rng = AGGREGATES[name], random.Random(3)
    values = [(position, value) for position, value in enumerate([5.5, -2.0, 7.0, 1.0])]
    whole = aggregate.comparable(folded(aggregate, values, rng))
    missing = [aggregate.comparable(folded(aggregate, values[:i] + values[i + 1 :], rng)) for i in range(4)]
    assert any(alike(whole, one) is Likeness.DIFFERENT for one in missing)
