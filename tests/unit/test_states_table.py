"""States as a table: columns, types, order and selection."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import DefinitionChangedError, FlowError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs import States, View, states
from jobs.table.selection import Selection
from tests.support import states_flow
from tests.support.redis_server import DURABLE, server

SALES = Topic("sales", Json({"shop": str, "cents": int, "rate": float, "open": bool}), envelope=False)
TYPED = Fields(
    sales=count(),
    cents=total("cents"),
    rates=total("rate"),
    opened=total("open"),
    price=mean("cents"),
    low=minimum("rate"),
    high=maximum(pl.col("cents").cast(pl.UInt64)),
    ever=maximum("open"),
    name=first("shop"),
    latest=last("cents"),
)


def filled(fold: Any, store: str, *lines: dict[str, Any]) -> Flow:
    """A flow that has folded these sales."""
    flow = Flow("shops").source(SALES).aggregate("shop", "shop", fold, co_partitioned=False)
    runner = MemoryRunner(flow, bind(flow, {}, store))
    runner.process([Record("sales", 0, at, b"k", json.dumps(line).encode()) for at, line in enumerate(lines)])
    runner.close()
    return flow


def read(flow: Flow, store: str, **options: Any) -> States:
    return states(flow, "shop", bind(flow, {}, store), **options)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/states.db"


def test_every_field_has_the_type_of_its_aggregate(store: str) -> None:
    line = {"shop": "A", "cents": 7, "rate": 1, "open": True}
    flow = filled(TYPED, store, line, {**line, "cents": 8}, {"shop": "B"})
    frame = read(flow, store).frame()
    assert dict(zip(frame.columns[1:11], frame.dtypes[1:11], strict=True)) == {
        "sales": pl.Int64,
        "cents": pl.Int64,
        "rates": pl.Float64,
        "opened": pl.Int64,
        "price": pl.Float64,
        "low": pl.Float64,
        "high": pl.Decimal(20, 0),
        "ever": pl.Boolean,
        "name": pl.String,
        "latest": pl.Int64,
    }
    assert frame.rows()[0][1:11] == (2, 15, 2.0, 2, 7.5, 1.0, 8, True, "A", 8)
    assert frame.rows()[1][1:11] == (1, 0, 0.0, 0, None, None, None, None, "B", None)
    assert frame.select("_key", "_key_bytes", "_version", "_epoch", "_batch", "_lanes", "_holes").rows()[0] == (
        *("A", b"A", 1, 1, 1),
        *(1, 0),
    )


def test_a_field_whose_type_the_definition_does_not_tell_is_json(store: str) -> None:
    flow = (
        Flow("shops")
        .source(SALES)
        .map(lambda element: {**element.value, "cents": element.value["cents"] * 2**40})
        .aggregate("shop", "shop", Fields(sales=count(), cents=total("cents"), name=last("shop")), co_partitioned=False)
    )
    runner = MemoryRunner(flow, bind(flow, {}, store))
    runner.process([Record("sales", 0, 0, b"k", b'{"shop": "A", "cents": 3000000}')])
    runner.close()
    frame = read(flow, store).frame()
    assert frame.select("sales", "cents", "name").rows() == [(1, str(3_000_000 * 2**40), '"A"')]


def test_the_result_of_a_fold_in_plain_python_is_json(store: str) -> None:
    flow = filled(states_flow.Cents(), store, {"shop": "A", "cents": 1}, {"shop": "A", "cents": 2})
    assert read(flow, store).frame().select("_key", "state").rows() == [("A", '{"cents":[1,2]}')]


def test_a_key_that_is_no_text_is_null_beside_its_bytes(store: str) -> None:
    flow = (
        Flow("shops")
        .source(SALES)
        .aggregate("shop", lambda element: b"\xff", Fields(sales=count()), co_partitioned=False)
    )
    runner = MemoryRunner(flow, bind(flow, {}, store))
    runner.process([Record("sales", 0, 0, b"k", b"{}")])
    runner.close()
    assert read(flow, store).frame().select("_key", "_key_bytes").rows() == [(None, b"\xff")]


def test_a_key_with_nothing_but_a_dead_letter_has_null_fields_and_a_pending_position(store: str) -> None:
    class Fails(states_flow.Cents):
        def fold(self, state: Any, element: Any) -> Any:
            raise ValueError

    flow = filled(Fails(), store, {"shop": "A", "cents": 1})
    [row] = read(flow, store, histories=True).frame().to_dicts()
    assert (row["state"], row["_holes"], row["_lanes"]) == (None, 1, 0)
    assert row["_pending"] == [{"lane": "sales:0#", "position": "[0]"}]
    assert read(flow, store, where="_holes > 0").frame().height == 1


def test_record_batches_have_the_rows_of_the_frame_in_parts(store: str) -> None:
    flow = filled(TYPED, store, *({"shop": f"{at:04d}", "cents": at} for at in range(2500)))
    found = read(flow, store, histories=True)
    batches = [*found.batches()]
    assert [batch.num_rows for batch in batches] == [1000, 1000, 500]
    assert pl.DataFrame(pl.from_arrow(pa.Table.from_batches(batches))).equals(found.frame())
    assert [view.key for view in found] == [b"%04d" % at for at in range(2500)]
    assert [*found] == [*found], "it can be read again"
    assert isinstance(next(iter(found)), View)


def test_no_state_is_a_frame_with_all_columns(store: str) -> None:
    flow = Flow("shops").source(SALES).aggregate("shop", "shop", TYPED, co_partitioned=False)
    found = read(flow, store)
    assert (found.frame().height, found.frame().schema) == (0, found.schema)
    assert [*found.batches()] == []


def test_a_condition_may_be_a_polars_expression(store: str) -> None:
    flow = filled(TYPED, store, *({"shop": f"{at}", "cents": at} for at in range(9)))
    assert read(flow, store, where=pl.col("cents") > 6).frame()["_key"].to_list() == ["7", "8"]
    assert read(flow, store, where=pl.lit(value=True)).frame().height == 9
    assert read(flow, store, where=pl.col("low") > 0).frame().height == 0, "null is not true"
    for wrong in (pl.col("cents").sum() > 1, pl.col("cents").map_elements(lambda one: hash(one) > 1, pl.Boolean)):
        with pytest.raises(FlowError, match="where: "):
            read(flow, store, where=wrong)


def test_a_field_with_the_name_of_another_column_is_refused(store: str) -> None:
    flow = filled(Fields(_version=count()), store, {"shop": "A"})
    with pytest.raises(FlowError, match="a table has a column _version of its own; rename the field"):
        read(flow, store)


def test_a_state_of_an_earlier_definition_that_does_not_fit_is_named(store: str) -> None:
    filled(Fields(n=maximum("rate")), store, {"shop": "A", "rate": 1.5})
    flow = Flow("shops").source(SALES).aggregate("shop", "shop", Fields(n=maximum("cents")), co_partitioned=False)
    with pytest.raises(DefinitionChangedError, match=r"stage shop, key b'A': column n is Int64, and this state"):
        read(flow, store).frame()
    assert [view.state for view in read(flow, store)] == [{"n": 1.5}]


@pytest.mark.parametrize("scheme", ["sqlite", "lmdb", "redis"])
def test_pages_are_in_the_order_of_keys_whatever_the_store(scheme: str, tmp_path: Path) -> None:
    with server(*DURABLE) as running:
        url = running.url if scheme == "redis" else f"{scheme}://{tmp_path}/states"
        flow = filled(TYPED, url, *({"shop": f"{at * 7919 % 300:03d}", "cents": at} for at in range(300)))
        keys, after = [], None
        while page := [view.key for view in read(flow, url, after=after, limit=70, prefix=b"1", where="sales > 0")]:
            keys += page
            after = page[-1]
        assert keys == [b"%03d" % at for at in range(100, 200)]
        assert read(flow, url, keys=[b"250", b"003", b"999"], limit=1).frame()["_key"].to_list() == ["003"]


@pytest.mark.parametrize(
    ("prefix", "after", "begin", "end"),
    [
        (b"", None, b"", None),
        (b"a", None, b"a", b"b"),
        (b"a\xff\xff", None, b"a\xff\xff", b"b"),
        (b"\xff", None, b"\xff", None),
        (b"a", b"ab", b"ab\0", b"b"),
        (b"b", b"a", b"b", b"c"),
        (b"", b"", b"\0", None),
    ],
)
def test_prefix_and_last_key_make_a_range(prefix: bytes, after: bytes | None, begin: bytes, end: bytes | None) -> None:
    found = Selection(prefix=prefix, after=after)
    assert (found.begin, found.end) == (begin, end)
