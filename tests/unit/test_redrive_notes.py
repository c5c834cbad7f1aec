"""Notes of redriven dead letters are read back, whatever else is in the topic."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope.redrive_notes import HEADER, Notes, notes_of

places = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900)), max_size=800)


@given(places, places, places)
def test_what_was_noted_is_counted_once_and_nothing_else(first, second, asked):
    notes = Notes()
    for one in (*notes_of(first), *notes_of(second), *notes_of(first)):
        assert notes.take(one.headers, one.value)
        assert len(one.value) + len(one.key) < 10_000
    noted = {*first, *second}
    for partition in range(3):
        offsets = {offset for at, offset in asked if at == partition}
        assert notes.count(partition, offsets) == sum((partition, offset) in noted for offset in offsets)


def test_a_note_names_the_runs_of_each_partition_and_at_most_200():
    [note] = notes_of([(4, 7), (3, 6), (3, 5)])
    assert (note.value, note.headers) == (b'{"3": [[5, 6]], "4": [[7, 7]]}', [(HEADER, b"3")])
    assert note.key == b"hw-dlq-redriven:3:5"
    first, second = notes_of((1, offset) for offset in range(0, 402, 2))
    assert (first.headers, second.headers) == ([(HEADER, b"200")], [(HEADER, b"1")])
    assert second.value == b'{"1": [[400, 400]]}'


def test_runs_that_overlap_count_once_and_what_lies_between_two_does_not():
    notes = Notes()
    for run in ([4, 9], [0, 5], [1, 2], [4, 6], [11, 12]):
        notes.take([(HEADER, b"1")], json.dumps({"7": [run]}).encode())
    assert [offset for offset in range(15) if notes.count(7, [offset])] == [*range(10), 11, 12]
    assert notes.count(7, range(15)) == 12


def test_a_note_is_a_few_bytes_however_many_follow_each_other():
    [note] = notes_of((0, offset) for offset in range(1_000_000))
    assert (note.value, note.headers) == (b'{"0": [[0, 999999]]}', [(HEADER, b"1000000")])
    assert note.key == b"hw-dlq-redriven:0:0"
    assert list(notes_of([])) == []


@pytest.mark.parametrize(
    "value", [None, b"", b"[]", b"{", b'{"a": [[1, 2]]}', b'{"0": [[1]]}', b'{"0": 7}', b"[" * 99_999]
)
def test_a_note_that_cannot_be_read_says_nothing_and_is_no_dead_letter(value):
    notes = Notes()
    assert notes.take([(HEADER, b"1")], value)
    assert notes.count(0, range(10)) == 0


def test_any_other_record_is_no_note():
    assert not Notes().take([("hw-dlq-topic", b"t")], b'{"0": [[0, 9]]}')
