"""Rows arrive at the tasks of the next stage as they were sent, also those whose columns are the same in all rows."""

from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from aggregations.columns import schema
from aggregations.columns.signature import Lane, Signature
from aggregations.engine.path import route_of
from aggregations.engine.rows import STAGE_KEY, Rows, by_partition
from aggregations.engine.transfer import pack, unpack

COLUMNS: dict[str, tuple[pl.DataType, st.SearchStrategy[Any]]] = {
    STAGE_KEY: (pl.Binary(), st.sampled_from([b"", b"a", b"\xff\x00", b"abc"])),
    schema.PARTITION: (pl.Int32(), st.integers(0, 2)),
    schema.TOPIC: (pl.String(), st.sampled_from(["t", "größe", ""])),
    schema.KEY: (pl.Binary(), st.none() | st.sampled_from([b"", b"k", b"\x80" * 3])),
    schema.AGAIN: (pl.Boolean(), st.none() | st.booleans()),
    schema.TOMBSTONE: (pl.Boolean(), st.none() | st.just(value=True)),
    "whole": (pl.UInt64(), st.none() | st.integers(0, 2**64 - 1)),
    "small": (pl.Int8(), st.integers(-1, 0)),
    "part": (pl.Float64(), st.none() | st.sampled_from([0.0, -0.0, float("nan"), 1.5])),
    "text": (pl.String(), st.none() | st.sampled_from(["", "x", "a longer text than twelve bytes"])),
    "many": (pl.List(pl.Int64()), st.none() | st.lists(st.none() | st.integers(0, 3), max_size=2)),
}

LANE = Lane("t:0", "t:0")
SIGNATURES = [Signature(LANE, LANE, False, False, (), "t", "")]


@st.composite
def rows_of(draw: st.DrawFn) -> Rows:
    height = draw(st.integers(0, 6))
    columns = {}
    for name, (dtype, values) in COLUMNS.items():
        same = draw(st.booleans())
        found = [draw(values)] * height if same else draw(st.lists(values, min_size=height, max_size=height))
        columns[name] = pl.Series(found, dtype=dtype)
    frame = pl.DataFrame(columns).with_columns(pl.int_range(height, dtype=pl.Int64).alias(schema.OFFSET))
    frame = frame.with_columns(pl.lit(0, pl.UInt32).alias(schema.SIGNATURE))
    if draw(st.booleans()):
        return Rows(frame, SIGNATURES)
    made = frame.drop(schema.TOMBSTONE).with_columns(pl.int_range(height, dtype=pl.Int64).alias(schema.MADE))
    return Rows(made, SIGNATURES, [{"n": number} for number in range(height)])


@given(rows_of(), st.integers(1, 3), st.booleans())
def test_every_row_arrives_once_at_the_task_of_its_key_as_it_was(rows: Rows, routes: int, files: bool) -> None:
    with TemporaryDirectory() as directory:
        _check(rows, routes, directory if files else "")


def _check(rows: Rows, routes: int, directory: str) -> None:
    payloads = pack(rows, routes, directory)
    goes_to = [route_of(key, routes) for key in rows.frame.get_column(STAGE_KEY).to_list()]
    for route, payload in enumerate(payloads):
        sent = rows.frame.filter(pl.Series([one == route for one in goes_to], dtype=pl.Boolean))
        assert bool(payload) == bool(sent.height)
        if not payload:
            continue
        found = unpack([payload])
        assert_frame_equal(found.frame.drop(schema.MADE, strict=False), sent.drop(schema.MADE, strict=False))
        assert list(map(str, found.frame.get_column("part"))) == list(map(str, sent.get_column("part")))  # also -0.0
        assert (found.values is None) == (rows.values is None)
        if found.values is not None:
            numbers = [found.values[at]["n"] for at in found.frame.get_column(schema.MADE)]
            assert numbers == sent.get_column(schema.OFFSET).to_list()


def test_a_column_that_is_the_same_in_all_rows_costs_nothing() -> None:
    keys = pl.Series(STAGE_KEY, [b"k%d" % number for number in range(100)], pl.Binary)
    frame = keys.to_frame().with_columns(pl.int_range(100, dtype=pl.Int64).alias(schema.OFFSET))
    plain = pl.Series(schema.SIGNATURE, [0] * 100, pl.UInt32)
    [short] = pack(Rows(frame.with_columns(plain), SIGNATURES), 1)
    [long] = pack(Rows(frame.with_columns(plain, pl.lit("t" * 50).alias(schema.TOPIC)), SIGNATURES), 1)
    assert len(long) < len(short) + 150


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), max_size=100), st.integers(1, 3))
def test_rows_are_in_the_order_of_partitions_and_in_one_chunk(runs: list[tuple[int, int]], chunks: int) -> None:
    """Few runs of one partition are put together, and many are sorted: their order is the same."""
    partitions = [partition for partition, size in runs for _ in range(size)]
    frame = pl.DataFrame({schema.PARTITION: pl.Series(partitions, dtype=pl.Int32)}).with_row_index(schema.OFFSET)
    size = -(-frame.height // chunks)
    parts = [frame[at * size : (at + 1) * size] for at in range(chunks)]
    ordered = by_partition(Rows(pl.concat(parts, rechunk=False), SIGNATURES)).frame
    assert_frame_equal(ordered, frame.sort(schema.PARTITION, maintain_order=True))
    assert ordered.n_chunks() == 1 or not frame.height
