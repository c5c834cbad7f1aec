"""Totals of floats do not depend on where batches end: decisions are taken from their last bit."""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import polars as pl
import pytest

from aggregations import Emit, Fields, Flow, Json, Topic, count, maximum, mean, minimum, total
from envelope import Reason
from tests.support.both import Both, record

SOURCE = Topic("paid", Json({"k": str, "x": float}), envelope=False)
ALL = Fields(t=total("x"), a=mean("x"), low=minimum("x"), high=maximum("x"))
SIZES = [(40,), (8,) * 5, (10,) * 4, (7,) * 6, (1,) * 40]


def folded(flow: Flow[Any], values: Sequence[float], sizes: Sequence[int]) -> Both:
    both, at = Both(flow), 0
    for size in sizes:
        both.process(
            [
                record("paid", n, b"a", json.dumps({"k": "a", "x": values[n]}).encode())
                for n in range(at, min(at + size, len(values)))
            ]
        )
        at += size
    return both


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: str(sizes[0]))
@pytest.mark.parametrize(("value", "threshold"), [(0.1, 0.8), (0.1, 1.0), (0.3, 1.8)])
def test_a_total_crosses_a_threshold_once(value: float, threshold: float, sizes: Sequence[int]) -> None:
    new, old = pl.col("new.t"), pl.col("old.t")
    flow = (
        Flow("f")
        .source(SOURCE)
        .aggregate("paid", "k", Fields(t=total("x")), emit=Emit(k="k").when((new >= threshold) & (old < threshold)))
        .aggregate("alerts", "k", Fields(n=count()))
    )
    both = folded(flow, [value] * 40, sizes)
    assert both.results("paid") == {b"a": {"t": sum([value] * 40)}}
    assert both.results("alerts") == {b"a": {"n": 1}}


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: str(sizes[0]))
def test_the_stored_text_is_that_of_one_value_after_the_other(sizes: Sequence[int]) -> None:
    values = [(-1) ** n * 0.1 * n for n in range(40)]
    assert values[0] == 0
    both = folded(Flow("f").source(SOURCE).aggregate("paid", "k", ALL), values, sizes)
    [*_, sum_of_all] = accumulate(values, initial=0)
    expected = {"t": sum_of_all, "a": [sum_of_all, 40], "low": min(values), "high": max(values)}
    assert both.memory.states("paid")[b"a"].fold == expected


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0)], ids=str)
def test_of_the_two_zeros_the_first_stays(values: Sequence[float]) -> None:
    for sizes in ((2,), (1, 1)):
        both = folded(Flow("f").source(SOURCE).aggregate("paid", "k", ALL), values, sizes)
        state = both.memory.states("paid")[b"a"].fold
        assert [str(state["low"]), str(state["high"])] == [str(values[0])] * 2


@pytest.mark.parametrize("sizes", [(3,), (1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_a_total_beyond_the_range_is_a_dead_letter_even_if_the_next_value_brings_it_back(sizes: Sequence[int]) -> None:
    both = folded(Flow("f").source(SOURCE).aggregate("paid", "k", ALL), [1e308, 1e308, -1e308], sizes)
    assert both.reasons() == [(1, Reason.OVERFLOW)]
    assert both.results("paid")[b"a"]["t"] == 0.0
