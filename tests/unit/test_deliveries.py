"""What a batch of records that something else has read adds to a flow's progress: positions alone count."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.run.deliveries import SHOWN, Delivered, contradictions, gaps, joined, missing, new
from envelope import TopicPartition

A, B = TopicPartition("legs", 0), TopicPartition("legs", 1)


def delivered(place: TopicPartition, first: int, end: int, **more: Any) -> dict[TopicPartition, Delivered]:
    return {place: Delivered(place, first, end, end - first, **more)}


def test_what_is_in_is_left_out() -> None:
    assert new(delivered(A, 0, 50), {A: 20}) == {A: (20, 50)}
    assert new(delivered(A, 0, 20), {A: 20}) == {}
    assert new(delivered(A, 0, 20), {B: 20}) == {A: (0, 20)}


def test_a_batch_that_begins_behind_the_position_is_missing_something() -> None:
    batch = {**delivered(A, 30, 50), **delivered(B, 10, 50)}
    assert missing(batch.values(), {A: 20, B: 20}) == {A: [(20, 30)]}
    assert missing(batch.values(), {A: 30}) == {B: [(0, 10)]}
    assert missing(batch.values(), {A: 30, B: 10}) == {}


def test_holes_within_count_and_those_that_are_in_do_not() -> None:
    batch = delivered(A, 0, 50, holes=((5, 7), (18, 22), (40, 41)))
    assert missing(batch.values(), {A: 20}) == {A: [(20, 22), (40, 41)]}


def test_parts_are_joined_with_the_hole_between_them() -> None:
    parts = [Delivered(A, 10, 20, 10), Delivered(A, 0, 8, 7, ((3, 4),)), Delivered(B, 0, 1, 1)]
    assert joined(parts) == {A: Delivered(A, 0, 20, 17, ((3, 4), (8, 10))), B: Delivered(B, 0, 1, 1)}


def test_a_gap_names_each_partition_once_with_one_remedy() -> None:
    absent = {TopicPartition("legs", n): [(0, 5)] for n in range(SHOWN + 3)}
    (found,) = gaps("fleet", absent, lambda *_: "nobody knows")
    assert found.risk == "gap"
    assert found.what.count("the batch lacks offsets 0 to 4 of legs:") == SHOWN
    assert found.what.endswith("; and 3 more")
    assert gaps("fleet", absent, lambda *_: "") == []
    (found,) = gaps("fleet", {A: [(0, 5)]}, lambda *_: "the topic has records there")
    assert "the topic has records there" in found.what


def test_two_records_at_one_offset_count_only_if_they_are_new() -> None:
    batch = delivered(A, 0, 50, contradicted=(3, 30))
    assert contradictions(batch.values(), {A: 20}) == ["legs:0 has two different records at offset 30"]
    assert contradictions(batch.values(), {}) == ["legs:0 has two different records at offset 3 and at 1 more"]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12),
    st.sampled_from(["checkpoint kept", "anything"]),
)
def test_batches_in_any_order_fold_every_offset_once_or_are_refused(batches: list[tuple[int, int]], kind: str) -> None:
    """Whatever ranges a checkpoint makes Spark deliver: no offset is folded twice, and none is passed over."""
    position, folded = 0, []
    for first, size in batches:
        begin = position if kind == "checkpoint kept" else first
        batch = delivered(A, begin, begin + size)
        if missing(batch.values(), {A: position}):
            assert begin > position
            continue
        for start, end in new(batch, {A: position}).values():
            folded += range(start, end)
            position = end
    assert folded == list(range(position))


@pytest.mark.parametrize("planted", ["rows below are folded again", "a gap is accepted", "dropped as a whole"])
def test_the_property_finds_planted_mistakes(planted: str) -> None:
    def run(batches: list[tuple[int, int]]) -> bool:
        position, folded = 0, []
        for first, end in batches:
            batch = delivered(A, first, end)
            if missing(batch.values(), {A: position}) and planted != "a gap is accepted":
                continue
            ranges = {A: (first, end)} if planted == "rows below are folded again" else new(batch, {A: position})
            if planted == "dropped as a whole" and first < position:
                ranges = {}
                position = max(position, end)
            for start, last in ranges.values():
                folded += range(max(start, first), last)
                position = max(position, last)
        return folded == list(range(position))

    assert not run([(0, 10), (5, 20)] if planted != "a gap is accepted" else [(0, 10), (12, 20)])
