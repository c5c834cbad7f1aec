"""Orders with lines: JSON lists and objects as columns of expressions, and as plain lists and dictionaries of functions."""

import json

import polars as pl
import pytest

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import FlowError
from envelope import Reason
from tests.support.both import Both, record
from tests.support.pure import runner, states

ORDERS = Topic(
    "orders",
    Json(
        {
            "shop": str,
            "lines": [{"article": str, "quantity": int}],
            "place": {"town": str, "zip": int},
            "box": pl.Array(int, 2),
        }
    ),
    envelope=False,
)


def order(offset, shop="a", **more):
    return record("orders", offset, shop.encode(), json.dumps({"shop": shop, **more}).encode())


PEARS, PLUMS = {"article": "pear", "quantity": 3}, {"article": "plum", "quantity": 4}
BATCHES = [
    [
        order(0, lines=[PEARS, PLUMS], place={"town": "Rome", "zip": 7}, box=[1, 2]),
        order(1, "b", lines=[]),
        order(2, place={}),
        order(3, "b", lines=[None, {"quantity": None}], place={"zip": 9}),
    ],
    [
        order(4, lines=[{"article": 7}]),
        order(5, "b", lines=[PLUMS] * 400, place={"zip": 8, "planet": "earth"}),
        order(6, box=[1]),
    ],
]


def test_lists_and_objects_are_columns_of_expressions_on_both_paths():
    lines, place = pl.col("lines"), pl.col("place")
    both = Both(
        Flow("shops")
        .source(ORDERS)
        .filter(pl.col("shop") != "c")
        .map(first=lines.list.get(0, null_on_oob=True).struct.field("article"))
        .aggregate(
            "shop",
            "shop",
            Fields(
                orders=count(),
                lines=total(lines.list.len()),
                zip=maximum(place.struct.field("zip")),
                town=maximum(place.struct.field("town")),
                box=total(pl.col("box").arr.get(1)),
            ),
        )
        .aggregate("article", pl.col("first").fill_null("none"), Fields(orders=count(), lines=total(lines.list.len())))
    )
    for batch in BATCHES:
        both.process(batch)
    assert both.results("shop") == {
        b"a": {"orders": 2, "lines": 2, "zip": 7, "town": "Rome", "box": 2},
        b"b": {"orders": 3, "lines": 402, "zip": 9, "town": None, "box": 0},
    }
    assert both.results("article") == {
        b"pear": {"orders": 1, "lines": 2},
        b"plum": {"orders": 1, "lines": 400},
        b"none": {"orders": 3, "lines": 2},
    }
    assert both.reasons() == [(4, Reason.BAD_PAYLOAD), (6, Reason.BAD_PAYLOAD)]


def test_functions_get_plain_lists_and_dictionaries():
    flow = (
        Flow("articles")
        .source(ORDERS)
        .flat_map(lambda element: [line for line in element["lines"] or () if line])
        .aggregate("article", lambda element: element["article"], Fields(lines=count(), quantity=total("quantity")))
    )
    run = runner(flow)
    for batch in BATCHES:
        run.process(batch)
    assert states(run, "article") == {"pear": {"lines": 1, "quantity": 3}, "plum": {"lines": 401, "quantity": 1604}}
    # The line without an article has no key, so its whole order is rejected.
    assert [(one.record.offset, one.reason) for one in run.dead_letters] == [
        (3, Reason.NULL_KEY),
        (4, Reason.BAD_PAYLOAD),
        (6, Reason.BAD_PAYLOAD),
    ]


@pytest.mark.parametrize("column", ["lines", "place", "box"])
def test_what_a_key_or_a_state_cannot_be_is_refused_where_the_flow_is_written(column):
    flow = Flow("shops").source(ORDERS)
    with pytest.raises(FlowError, match=r"stage 's': the key is of type .*; use text, bytes or an integer"):
        flow.aggregate("s", column, Fields(n=count()))
    with pytest.raises(
        FlowError, match=r"field 'x' is of type .*; fold a number or text derived from it, such as its len\(\)"
    ):
        flow.aggregate("s", "shop", Fields(x=maximum(column)))
    with pytest.raises(FlowError, match="not Boolean"):
        flow.filter(column)
    with pytest.raises(FlowError, match="the key is of type"):
        flow.aggregate("s", "shop", Fields(n=count())).publish("out", key=column)


@pytest.mark.parametrize(
    ("declared", "place"),
    [
        ([bytes], r"column 'x\[\]': <class 'bytes'>"),
        ([], r"column 'x': \[\]"),
        ([int, str], r"column 'x': \[<class 'int'>, <class 'str'>\]"),
        ({}, r"column 'x': \{\}"),
        ({"a": [{"b": pl.Date}]}, r"column 'x\.a\[\]\.b': Date"),
        (pl.List(pl.Binary), r"column 'x\[\]': Binary"),
        (pl.Struct({"a": pl.UInt64}), r"column 'x\.a': UInt64"),
        (pl.Array(int, 0), "column 'x': Array"),
        (pl.List, "column 'x': .*List"),
        (list, "column 'x': <class 'list'>"),
        (pl.Struct([]), "column 'x': Struct"),
    ],
)
def test_a_type_that_cannot_be_read_from_json_is_named_with_its_place(declared, place):
    with pytest.raises(FlowError, match=rf"{place}.* cannot be read from JSON"):
        Json({"x": declared})
