"""Dates, times and durations that Python's values do not hold: the same on both paths, and never a truncated value."""

import json
from typing import Any

import polars as pl
import pytest

from aggregations import Emit, Fields, Flow, Json, Topic, count, last
from aggregations.errors import FlowError
from envelope import Reason
from tests.support.both import Both, record

SOURCE = Topic("t", Json({"v": int}), envelope=False)
V = pl.col("v")
BEYOND = 253_402_300_800_000_000  # the first microsecond of the year 10000
CASES: dict[str, tuple[pl.Expr, list[int | None], list[int]]] = {
    "a date and time": (V.cast(pl.Datetime("us")), [BEYOND - 1, BEYOND, None, -62_135_596_800_000_001], [1, 3]),
    "milliseconds": (V.cast(pl.Datetime("ms")), [1_700_000_000_123, 2**62], [1]),
    "a time zone": (
        V.cast(pl.Datetime("us")).dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Berlin"),
        [1_729_990_800_000_000, BEYOND - 7_200_000_000, BEYOND - 1],
        [2],
    ),
    "a date": (V.cast(pl.Int32).cast(pl.Date), [20_000, 2**31 - 1], [1]),
    "a time": (V.cast(pl.Time), [1_000, 1_001], [1]),
    "a duration": (V.cast(pl.Duration("ms")), [5, 2**62], [1]),
    "dates in a list": (pl.concat_list(V.cast(pl.Datetime("us")), V.cast(pl.Datetime("us"))), [0, BEYOND, 7], [1]),
    "a time in a struct": (pl.struct(a=V.cast(pl.Time)), [2_000, None, 2_001], [2]),
}


@pytest.mark.parametrize(("made", "values", "refused"), CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_value_beyond_pythons_is_a_dead_letter_on_both_paths(
    made: pl.Expr, values: list[int | None], refused: list[int]
) -> None:
    shown = pl.col("x").is_not_null()
    flow = Flow("f").source(SOURCE).map(x=made)
    both = Both(flow.map(known=shown).aggregate("all", "_key", Fields(n=count(), v=last("v"), x=last("known"))))
    both.process([record("t", offset, b"k", json.dumps({"v": one}).encode()) for offset, one in enumerate(values)])
    assert both.reasons() == [(offset, Reason.TRANSFORM_FAILED) for offset in refused]
    assert both.results("all")[b"k"]["n"] == len(values) - len(refused)


@pytest.mark.parametrize(
    "define",
    [
        lambda flow, of: flow.map(x=of),
        lambda flow, of: flow.map(x=pl.struct(of)),
        lambda flow, of: flow.flat_map(pl.concat_list(of).alias("x")),
        lambda flow, of: flow.aggregate("a", "_key", Fields(n=count()), emit=Emit(x=of)),
    ],
    ids=["map", "struct", "flat_map", "emit"],
)
@pytest.mark.parametrize(
    "of", [pl.from_epoch("v", time_unit="ns"), V.cast(pl.Duration("ns"))], ids=["time", "duration"]
)
def test_nanoseconds_are_refused_with_the_remedy(define: Any, of: pl.Expr) -> None:
    with pytest.raises(FlowError, match=r"column 'x' is of type .*ns.*cast it to microseconds"):
        define(Flow("f").source(SOURCE), of)
