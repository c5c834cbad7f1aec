"""`flat_map` over list columns on the vectorised path: item by item what it does message by message."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, last, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.report import DeadLetter
from tests.support.both import Both
from tests.support.drawn import bring_back, chained_batches

ORDERS = Topic("orders", Json({"who": str, "lines": [{"sku": str, "n": int, "tags": [str]}], "tags": [str]}))
BROKEN = {"now": True}


@pytest.fixture(autouse=True)
def _broken() -> Iterator[None]:
    yield
    BROKEN["now"] = True


class Listing:
    """A fold in Python that refuses some items, until that is mended."""

    def zero(self) -> Any:
        return []

    def fold(self, state: Any, element: Element[Any]) -> Any:
        if BROKEN["now"] and element["sku"] == "bad":
            raise ValueError
        return [*state, [element.offset, *element.indices, repr(element.value), str(element.lineage)]]


def checked(element: Element[Any]) -> bool:
    if BROKEN["now"] and element["sku"] == "odd":
        raise KeyError(element["sku"])
    return element["sku"] != "no"


def diverted(element: Element[Any]) -> bool:
    return BROKEN["now"] and element["sku"] in ("test", "plum")


def refusing(element: Element[Any]) -> bytes | None:
    if BROKEN["now"] and element["sku"] == "odd":
        raise ValueError
    return None if element["sku"] is None else b"%d:" % len(element.indices) + element["sku"].encode()


SUMS = Fields(items=count(), n=total("n"), at=last("sku"))
LINE = pl.col("lines").struct.field
AROUND = ["filter", "checked", "divert", "divert for now", "fails", "publish", "publish by a function"]
INSIDE = [*AROUND, "overflow", "tags"]


def added(flow: Flow[Any], step: str, name: str) -> Flow[Any]:
    match step:
        case "filter":
            return flow.filter(pl.col("n") != 5)
        case "checked":
            return flow.filter(checked)
        case "divert":
            return flow.divert(pl.col("sku") == "test")
        case "divert for now":
            return flow.divert(diverted)
        case "fails":
            return flow.map(number=pl.col("sku").str.replace("odd", "1").str.replace("[a-z]+", "2").cast(pl.Int64))
        case "overflow":
            return flow.map(n=pl.col("n") * 2**62)
        case "tags":
            return flow.flat_map("tags")
        case "publish":
            return flow.publish("out", name=name)
        case _:
            return flow.publish("out", key=refusing, name=name)


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    items = draw(st.sampled_from(["lines", "lines", pl.col("lines").list.head(2)]))
    flow: Flow[Any] = Flow("shop").source(ORDERS)
    if draw(st.booleans()):
        flow = flow.publish("orders.out", name="before")
    flow = flow.flat_map(items).map(sku=LINE("sku"), n=LINE("n"))
    if draw(st.booleans()):
        flow = flow.map(tags=LINE("tags"))
    for number, step in enumerate(draw(st.lists(st.sampled_from(INSIDE), max_size=3, unique=True))):
        flow = added(flow, step, f"first-{number}")
    flow = flow.aggregate(
        "first", draw(st.sampled_from(["sku", "sku", "who", refusing])), draw(st.sampled_from([SUMS, SUMS, Listing()]))
    )
    for number, step in enumerate(draw(st.lists(st.sampled_from(AROUND), max_size=2, unique=True))):
        flow = added(flow, step, f"second-{number}")
    if draw(st.booleans()):
        flow = flow.aggregate(
            "second", draw(st.sampled_from(["who", refusing])), draw(st.sampled_from([SUMS, Listing()]))
        )
    tail = [*AROUND, *(["tags"] if flow.schema is not None and flow.schema["tags"] == pl.List(pl.String) else [])]
    for number, step in enumerate(draw(st.lists(st.sampled_from(tail), max_size=3, unique=True))):
        flow = added(flow, step, f"last-{number}")
    return flow


def mostly(usual: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 11).flatmap(lambda one: usual if one else seldom)


NULL = st.none()
tags = mostly(st.lists(mostly(st.sampled_from(["red", "blue"]), NULL), max_size=3), NULL)
lines = st.fixed_dictionaries(
    {
        "sku": mostly(
            st.sampled_from(["pear", "pear", "plum", "7"]), st.sampled_from(["bad", "odd", "test", "no", None])
        ),
        "n": mostly(st.sampled_from([0, 1, 1, 5]), st.sampled_from([2**63 - 2, -(2**63), None])),
        "tags": tags,
    }
)
orders = st.fixed_dictionaries(
    {
        "who": mostly(st.sampled_from(["ann", "bob"]), NULL),
        "lines": mostly(st.lists(mostly(lines, NULL), max_size=4), NULL),
        "tags": tags,
    }
)


BATCHES = chained_batches("orders", orders, [b"ann", b"ann", None])


def back(both: Both, dead: DeadLetter, offset: int, how: str) -> Record:
    """A rejected record that comes back."""
    if how == "copy":
        return replace(dead.record, offset=offset)
    return both.redriven(dead, offset, "" if how == "redriven" else "another")


BACK = st.sampled_from(["redriven", "redriven", "redriven", "of another flow", "copy"])


@settings(max_examples=2 * settings.default.max_examples)
@given(flow=flows(), found=BATCHES, mended=st.booleans(), ways=st.lists(st.lists(BACK, min_size=1), max_size=3))
def test_both_paths_expand_lists_alike_and_take_back_what_they_rejected(
    flow: Flow[Any], found: list[list[Record]], mended: bool, ways: list[list[str]]
) -> None:
    BROKEN["now"] = True
    both = Both(flow)
    for batch in found:
        both.process(batch)
    BROKEN["now"] = not mended
    bring_back(both, found, ways, partial(back, both))
