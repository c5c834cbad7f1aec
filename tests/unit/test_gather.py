"""Rows of a DataFrame are brought into the order of their offsets, each offset once."""

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.engine import delivered_rows
from aggregations.engine.message_objects import HEADERS
from aggregations.engine.ranges import Range
from aggregations.run.deliveries import contradictions, missing
from aggregations.spark import gather
from aggregations.spark.gather import Chunk, check_same, tables
from envelope import TopicPartition

Row = tuple[str, int, int, bytes]
"""Topic, partition, offset and value."""


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    topics, partitions, offsets, values = ([row[n] for row in rows] for n in range(4))
    stamps = pa.array([1_700_000_000_000_000] * len(rows), pa.timestamp("us", "Europe/Berlin"))
    arrays = [
        pa.array([None] * len(rows), pa.binary()),
        pa.array(values, pa.large_binary()),
        pa.array(topics, pa.string()),
    ]
    arrays += [pa.array(partitions, pa.int32()), pa.array(offsets, pa.int64()), stamps]
    arrays.append(pa.array([[{"key": "k", "value": b"v"}]] * len(rows), HEADERS))
    return pa.RecordBatch.from_arrays(arrays, [*delivered_rows.columns(headers=True)])


def gathered(batches: Sequence[Sequence[Row]]) -> list[Chunk]:
    """What one slot gets of these batches."""
    blocks = [row for block in gather._cut(map(batch_of, batches)) for row in block.to_pylist()]
    return list(gather._ordered((0, (one["topic"], one["partition"], one["records"])) for one in blocks))


rows = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 30)), max_size=60).map(
    lambda found: [(*one, f"{one}".encode()) for one in found]
)


@given(rows, st.integers(0, 9), st.integers(1, 20))
def test_rows_in_any_order_and_more_than_once_are_each_offset_once_in_order(
    found: list[Row], seed: int, size: int
) -> None:
    again = [*found, *random.Random(seed).sample(found, len(found) // 3)]
    random.Random(seed).shuffle(again)
    chunks = gathered([again[start : start + size] for start in range(0, len(again), size)])
    whole = gather.joined(what for what, _ in chunks)
    for place in {TopicPartition(topic, partition) for topic, partition, _, _ in found}:
        offsets = sorted({offset for topic, partition, offset, _ in found if (topic, partition) == place})
        mine = whole.pop(place)
        assert (mine.first, mine.end, mine.records) == (offsets[0], offsets[-1] + 1, len(offsets))
        assert mine.contradicted == ()
        read = [
            (table.column("offset").to_pylist(), table.column("value").to_pylist())
            for table in tables(chunks, [Range(place.partition, 0, 40, place.topic)])
        ]
        assert [one for part, _ in read for one in part] == offsets
        assert [one for _, part in read for one in part] == [f"{(*place, at)}".encode() for at in offsets]
    assert not whole


def test_a_range_is_a_part_of_what_a_slot_has() -> None:
    chunks = gathered([[("a", 0, offset, b"") for offset in range(20)]])
    (table,) = tables(chunks, [Range(0, 5, 9, "a")])
    assert table.column("offset").to_pylist() == [5, 6, 7, 8]
    assert table.column("topic").to_pylist() == ["a"] * 4
    assert table.column("partition").type == pa.int32()
    assert table.column("timestamp").type == pa.timestamp("ms")
    assert table.column("headers").type == HEADERS
    assert list(tables(chunks, [Range(1, 0, 20, "a"), Range(0, 30, 40, "a")])) == []


def test_holes_and_contradictions_are_told() -> None:
    chunks = gathered([[("a", 0, 0, b"x"), ("a", 0, 1, b"x"), ("a", 0, 4, b"x"), ("a", 0, 1, b"y")]])
    ((what, _),) = chunks
    assert what.holes == ((2, 4),)
    assert what.contradicted == (1,)


def test_rows_without_a_place_are_told() -> None:
    batch = batch_of([("a", 0, 0, b"x")])
    nowhere = batch.set_column(4, "offset", pa.array([None], pa.int64()))
    ((block,),) = (one.to_pylist() for one in gather._cut([nowhere]))
    assert block["topic"] == ""


def test_many_records_are_several_chunks(monkeypatch: object) -> None:
    count = gather.CHUNK_RECORDS + 10
    chunks = gathered([[("a", 0, offset, b"") for offset in range(count)]])
    assert [(what.first, what.end) for what, _ in chunks] == [(0, gather.CHUNK_RECORDS), (gather.CHUNK_RECORDS, count)]


def test_rows_of_more_than_two_gigabytes_are_ordered_in_wider_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivered_rows, "WIDE_BYTES", 0)
    chunks = gathered([[("a", 0, offset, b"v%d" % offset) for offset in (3, 1, 2, 0, 1)]])
    (table,) = tables(chunks, [Range(0, 0, 9, "a")])
    assert table.column("value").to_pylist() == [b"v0", b"v1", b"v2", b"v3"]
    assert table.column("value").type == pa.binary()


def test_a_slot_that_reads_other_records_the_second_time_is_noticed() -> None:
    import pytest

    from aggregations.errors import TasksLostError

    first, second = gathered([[("a", 0, 0, b"x")]]), gathered([[("a", 0, 0, b"x"), ("a", 0, 1, b"x")]])
    told = gather.joined(what for what, _ in first)
    check_same(first, told, 0, 2)
    with pytest.raises(TasksLostError, match="delivered others when it was read again"):
        check_same(second, told, 0, 2)


def test_the_ninth_hole_and_the_ninth_contradiction_are_told_too() -> None:
    """What is in is left out later: among the first ones there may be none that counts."""
    even = [("a", 0, offset, b"x") for offset in range(0, 40, 2)]
    ((what, _),) = gathered([[*even, *(("a", 0, offset, b"y") for offset in range(0, 40, 2))]])
    assert len(what.holes) == 19
    assert what.contradicted == tuple(range(0, 40, 2))
    place = TopicPartition("a", 0)
    assert missing([what], {place: 36}) == {place: [(37, 38)]}
    assert contradictions([what], {place: 38}) == ["a:0 has two different records at offset 38"]
    assert contradictions([what], {place: 36})[0].endswith("at offset 36 and at 1 more")
