"""`flat_map` over a list column: what it gives, what it refuses, and the rare cases in which items of a record differ."""

import json
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import FlowError
from aggregations.run.memory import MemoryRunner
from envelope import Reason
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

ORDERS = Topic("orders", Json({"who": str, "lines": [{"sku": str, "n": int}], "tags": [str]}), envelope=False)
COUNT = Fields(items=count())
BROKEN = {"now": True}


@pytest.fixture(autouse=True)
def _broken() -> Iterator[None]:
    BROKEN["now"] = True
    yield


def orders() -> Flow[Any]:
    return Flow("shop").source(ORDERS)


def order(offset: int, *lines: Any, tags: Any = None, who: str = "ann") -> Record:
    found = [None if line is None else {"sku": line[0], "n": line[1]} for line in lines]
    value = json.dumps({"who": who, "lines": found, "tags": tags}).encode()
    return Record("orders", 0, offset, who.encode(), value, topic_id=TOPIC_ID)


def sku() -> pl.Expr:
    return pl.col("lines").struct.field("sku")


def test_an_item_takes_the_place_of_the_list_and_the_other_columns_stay() -> None:
    both = Both(
        orders().flat_map("lines").map(n=pl.col("lines").struct.field("n")).aggregate("a", "who", Fields(n=total("n")))
    )
    both.process([order(0, ("pear", 2), ("plum", 3)), order(1, ("pear", 5), who="bob")])
    assert both.results("a") == {b"ann": {"n": 5}, b"bob": {"n": 5}}


def test_null_and_empty_lists_give_nothing_and_a_null_item_is_an_item() -> None:
    both = Both(orders().flat_map("tags").aggregate("a", "who", Fields(items=count(), tags=count("tags"))))
    both.process([order(0), order(1, tags=[]), order(2, tags=["red", None])])
    assert both.results("a") == {b"ann": {"items": 2, "tags": 1}}
    assert both.memory.report.filtered == 0


def test_an_expression_names_the_column_of_the_item() -> None:
    flow = orders().flat_map(pl.col("tags").list.head(1).alias("tag"))
    assert flow.schema == {**ORDERS.schema, "tag": pl.String()}
    both = Both(flow.aggregate("a", "tag", COUNT))
    both.process([order(0, tags=["red", "blue"])])
    assert both.results("a") == {b"red": {"items": 1}}


def test_it_stays_on_the_vectorised_path() -> None:
    flow = orders().flat_map("lines").map(sku=sku()).aggregate("a", "sku", COUNT)
    assert not flow.calls_functions
    assert flow.columns == {"lines", "sku"}
    assert "vectorised" in flow.describe().splitlines()[2]


def test_each_list_and_expression_has_a_definition_of_its_own() -> None:
    flows = [
        orders().flat_map(of).aggregate("a", "who", COUNT) for of in ("lines", "tags", pl.col("tags").list.head(1))
    ]
    assert len({flow.stages[0].definition for flow in flows}) == 3


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ("who", "flat_map.*who is of type String, not a list"),
        ("none", "no column none"),
        (pl.col("tags").alias("_tags"), "begin with _ are reserved; rename _tags with alias"),
        (pl.col("tags").sort(), "reads several rows"),
        (7, "takes a column name, a polars expression or a function of the element; got int"),
    ],
)
def test_what_gives_no_list_is_refused_when_the_flow_is_defined(items: Any, text: str) -> None:
    with pytest.raises(FlowError, match=text):
        orders().flat_map(items)


@pytest.mark.parametrize("value", [7, "text", {"a": 1}])
def test_a_value_that_is_no_list_is_a_dead_letter(value: Any) -> None:
    flow = orders().map(lambda element: {"who": "ann", "found": value}).flat_map("found").aggregate("a", "who", COUNT)
    runner = MemoryRunner(flow, {"a": fresh_store()})
    runner.process([order(0)])
    assert [(one.reason, one.detail) for one in runner.dead_letters] == [
        (Reason.TRANSFORM_FAILED, "flat_map() needs a list")
    ]


def test_a_list_of_a_function_s_value_is_flat_mapped_too() -> None:
    flow = orders().map(lambda element: {"found": ("a", "a", "b")}).flat_map("found").aggregate("a", "found", COUNT)
    runner = MemoryRunner(flow, {"a": fresh_store()})
    runner.process([order(0)])
    assert runner.results("a") == {b"a": {"items": 2}, b"b": {"items": 1}}


def test_a_record_has_the_cause_of_its_last_item_that_failed() -> None:
    both = Both(
        orders()
        .flat_map("lines")
        .map(n=pl.col("lines").struct.field("n") * 2, number=sku().cast(pl.Int64))
        .aggregate("a", "who", COUNT)
    )
    both.process(
        [order(0, ("x", 1), ("1", 2**63 - 1), ("2", 1)), order(1, ("1", 2**63 - 1), ("x", 1)), order(2, ("3", 1))]
    )
    assert both.reasons() == [(0, Reason.OVERFLOW), (1, Reason.TRANSFORM_FAILED)]
    assert both.results("a") == {b"ann": {"items": 1}}


def test_no_item_is_folded_if_one_cannot_be_whatever_their_keys() -> None:
    both = Both(
        orders().flat_map("lines").map(sku=sku(), n=pl.col("lines").struct.field("n")).aggregate("a", "sku", SUM)
    )
    both.process([order(0, ("pear", 2**63 - 1)), order(1, ("plum", 1))])
    both.process([order(2, ("plum", 1), ("pear", 1), ("fig", 1)), order(3, ("fig", 5))])
    assert both.reasons() == [(2, Reason.OVERFLOW)]
    assert both.results("a") == {b"pear": {"n": 2**63 - 1}, b"plum": {"n": 1}, b"fig": {"n": 5}}


SUM = Fields(n=total("n"))


def red(element: Element[Any]) -> bool:
    return BROKEN["now"] and element["tags"] == "red"


def test_items_that_are_diverted_after_the_last_stage_come_back_alone() -> None:
    both = Both(orders().aggregate("a", "who", COUNT).flat_map("tags").publish("out").divert(red))
    both.process([order(0, tags=["blue", "red", "green"])])
    assert [one.indices for one in both.memory.outputs] == [(0,), (2,)]
    assert [(one.stage, one.items) for one in both.dead_letters] == [("end", ((1,),))]
    BROKEN["now"] = False
    both.process([both.redriven(both.dead_letters[0], 1)])
    assert [one.indices for one in both.memory.outputs] == [(0,), (2,), (1,)]


def test_an_item_that_is_diverted_before_a_stage_is_published_when_it_comes_back_and_its_record_is_not() -> None:
    flow = orders().publish("orders.out").flat_map("tags").publish("items.out").divert(red)
    both = Both(flow.aggregate("a", "tags", COUNT))
    both.process([order(0, tags=["blue", "red"])])
    assert published(both) == [("orders.out", ()), ("items.out", (0,))]
    BROKEN["now"] = False
    for n in (1, 2):
        both.process([both.redriven(both.dead_letters[0], n)])
    assert published(both)[2:] == [("items.out", (1,))]
    assert both.memory.run.ledger.listed == {}
    assert both.results("a") == {b"blue": {"items": 1}, b"red": {"items": 1}}


def test_a_record_with_an_item_that_fails_publishes_nothing_until_it_comes_back_and_then_all() -> None:
    flow = orders().publish("orders.out").flat_map("tags").publish("items.out").filter(lambda one: not failing(one))
    both = Both(flow.aggregate("a", "tags", COUNT))
    both.process([order(0, tags=["blue", "red"])])
    assert published(both) == []
    BROKEN["now"] = False
    for n in (1, 2):
        both.process([both.redriven(both.dead_letters[0], n)])
    assert published(both) == [("orders.out", ()), ("items.out", (0,)), ("items.out", (1,))]
    assert both.memory.run.ledger.listed == {}


def failing(element: Element[Any]) -> bool:
    if red(element):
        raise ValueError
    return False


def published(both: Both) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.topic, one.indices) for one in both.memory.outputs]
