"""JSON columns: what a type takes, message by message and vectorised, up to its last number."""

import struct
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from aggregations import Fields, Flow, Topic, count, histogram, total
from aggregations.columns.arrays import Spans
from aggregations.columns.payload import payload_columns
from aggregations.definition.payloads import Json, Raw
from envelope import EnvelopeError, Reason
from tests.messages import Every
from tests.support.both import Both, record

BOUNDS: dict[Any, tuple[int, int]] = {
    pl.Int8: (-(2**7), 2**7 - 1),
    pl.Int16: (-(2**15), 2**15 - 1),
    pl.Int32: (-(2**31), 2**31 - 1),
    pl.Int64: (-(2**63), 2**63 - 1),
    int: (-(2**63), 2**63 - 1),
    pl.UInt8: (0, 2**8 - 1),
    pl.UInt16: (0, 2**16 - 1),
    pl.UInt32: (0, 2**32 - 1),
}


def read(kind: Any, number: int) -> list[Any]:
    """What both readers make of a number; nothing where they refuse it."""
    payload, text = Json({"n": kind}), b'{"n": %d}' % number
    frame, good = payload_columns(payload, None)(Spans.of(pa.array([text], pa.binary())))
    try:
        one = [payload.reader(None)(text)["n"]]
    except EnvelopeError as error:
        assert error.reason is Reason.BAD_PAYLOAD
        one = []
    assert (frame.get_column("n").to_list() if good.all() else []) == one
    return one


@pytest.mark.parametrize("kind", BOUNDS, ids=str)
def test_an_integer_column_takes_what_its_type_holds_and_no_number_more(kind: Any) -> None:
    low, high = BOUNDS[kind]
    assert read(kind, low) == [low]
    assert read(kind, high) == [high]
    assert read(kind, low - 1) == []
    assert read(kind, high + 1) == []


def test_raw_bytes_are_read_where_a_column_is_wanted_and_not_where_none_is() -> None:
    assert Raw().reader(None)(b"x") == Raw().reader(frozenset({"value"}))(b"x") == {"value": b"x"}
    assert Raw().reader(frozenset())(b"x") == {}


def test_a_float_of_32_bits_is_the_same_number_for_expressions_and_functions() -> None:
    """starrocks#50760, datafusion#13078: 3.3 as 32 bits is below 3.3, wherever it is compared."""
    flow = (
        Flow("floats")
        .source(Topic("t", Every, envelope=False))
        .aggregate(
            "s",
            key=pl.lit("a"),
            fold=Fields(
                at_least=count(where=pl.col("float") >= 3.3),
                equal=count(where=pl.col("float") == 0.1),
                sums=total(pl.col("float") * 3),
                h=histogram("float", bounds=[0.1, 3.3]),
                nested=count(where=pl.col("rep_float").list.first() >= 3.3),
            ),
        )
    )
    numbers = [struct.unpack("<f", struct.pack("<f", one))[0] for one in (3.3, 0.1, 16777216.0, -2.5)]
    both = Both(flow)
    both.process(
        [record("t", i, b"a", Every(float=n, rep_float=[n]).SerializeToString()) for i, n in enumerate(numbers)]
    )
    assert both.results("s")[b"a"] == {
        "at_least": sum(n >= 3.3 for n in numbers),
        "equal": sum(n == 0.1 for n in numbers),
        "sums": sum(n * 3 for n in numbers),
        "h": {"bounds": [0.1, 3.3], "counts": [1, 2, 1]},
        "nested": sum(n >= 3.3 for n in numbers),
    }
