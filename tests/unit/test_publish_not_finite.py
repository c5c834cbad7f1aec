"""NaN and infinities in what a flow publishes by default: a dead letter, as in a fold, and not null (orjson#441)."""

import json
from typing import Any

import polars as pl
import pytest

from aggregations import Fields, Flow, Json, Topic, count
from envelope import EnvelopeError, Reason, decode
from persistence.finite_json import json_of
from tests.support.both import Both, record

TOPIC = Topic("t", Json({"k": str, "amount": float, "rate": float}), envelope=False)


def of(offset: int, amount: float | None, rate: float) -> Any:
    return record("t", offset, b"k", json.dumps({"k": "k", "amount": amount, "rate": rate}).encode())


def test_a_quotient_by_zero_is_a_dead_letter_and_null_is_published() -> None:
    flow = Flow("f").source(TOPIC).map(per=pl.col("amount") / pl.col("rate")).publish("mid")
    both = Both(flow.aggregate("s", key="k", fold=Fields(n=count())))
    both.process([of(0, 10.0, 2.0), of(1, 10.0, 0.0), of(2, 0.0, 0.0), of(3, None, 1.0)])
    assert both.reasons() == [(1, "not_finite"), (2, "not_finite")]
    payloads = [json.loads(decode(one.value).payload) for one in both.memory.outputs]
    assert [one["per"] for one in payloads] == [5.0, None]


@pytest.mark.parametrize("value", [float("nan"), [1, {"a": float("inf")}], {"a": None, "b": (float("-inf"),)}])
def test_a_number_that_json_does_not_have_is_found_at_any_depth(value: Any) -> None:
    with pytest.raises(EnvelopeError) as raised:
        json_of(value)
    assert raised.value.reason is Reason.NOT_FINITE


def test_nulls_and_the_text_null_are_written() -> None:
    assert json_of({"a": None, "null": "null", "b": [1.5, None]}) == b'{"a":null,"null":"null","b":[1.5,null]}'
