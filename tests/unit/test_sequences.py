"""Sequence ids of a session, without Kafka; the rules of the documents are in `tests/seeds`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope import SequenceError, SequenceState
from envelope.sequences import MAX_SEQUENCE, TOPIC, Sequences


@pytest.mark.parametrize(
    ("sequence", "last", "count", "text"),
    [
        (-1, None, 1, "do not ascend between 0"),
        (5, 4, 1, "ids 5 to 4 do not ascend"),
        (MAX_SEQUENCE, MAX_SEQUENCE + 1, 1, "between 0 and"),
        (5, None, 2, "not by count="),
        (None, 7, 1, "needs sequence= and last="),
        (None, None, 0, "a count= from 1"),
    ],
)
def test_ids_that_make_no_sense_are_refused(sequence: int | None, last: int | None, count: int, text: str) -> None:
    with pytest.raises(SequenceError, match=text):
        Sequences().next(TOPIC, sequence, last, count)


def test_an_initial_id_never_goes_below_what_was_sent() -> None:
    ids = Sequences(initial=10, last={0: 50})
    assert ids.next(TOPIC, None, None, 1) == (51, 51)
    assert Sequences(initial=100, last={0: 50}).next(TOPIC, None, None, 1) == (100, 100)
    with pytest.raises(SequenceError, match="below the initial id 10"):
        Sequences(initial=10).next(TOPIC, 9, None, 1)
    with pytest.raises(SequenceError, match="initial sequence id -1"):
        Sequences(initial=-1)


def test_a_partition_without_holes_continues_after_its_last_id_whatever_the_initial_one() -> None:
    ids = Sequences(per_partition=True, initial=100, last={0: 50})
    assert (ids.next(0, None, None, 1), ids.next(1, None, None, 1)) == ((51, 51), (100, 100))


def test_a_message_that_a_partition_lacks_may_have_an_id_below_one_of_another_partition() -> None:
    """A session that sent 1 to partition 1, 2 to partition 1 and 3 to partition 0 crashed, and 2 did not arrive."""
    ids = Sequences(last={0: 3, 1: 1})
    for partition, sequence in ((0, 3), (0, 2), (1, 1), (TOPIC, 3)):
        with pytest.raises(SequenceError, match="does not ascend"):
            ids.next(partition, sequence, None, 1)
    assert Sequences(last={0: 3, 1: 1}).next(TOPIC, None, None, 1) == (4, 4)
    two = ids.next(1, 2, None, 1)
    ids.push(1, two, own=True)
    assert (two, ids.pushed(), ids.pushed(1)) == ((2, 2), 3, 2)
    ids.push(0, ids.next(0, 7, None, 1), own=True)
    with pytest.raises(SequenceError, match="5 does not ascend: 7 was sent"):
        ids.next(1, 5, None, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40), st.booleans())
def test_ids_ascend_in_each_partition_and_a_restart_continues_after_what_was_persisted(
    steps: list[tuple[int, int]], per_partition: bool
) -> None:
    ids, sent = Sequences(per_partition=per_partition), dict[int, list[int]]()
    for partition, what in steps:
        if what == 3:
            ids.acknowledge()
            ids = Sequences(per_partition=per_partition, last=ids.last)
            continue
        one = ids.next(partition if per_partition else TOPIC, None, None, what + 1)
        ids.push(partition, one, own=False)
        sent.setdefault(partition, []).extend(range(one.first, one.last + 1))
    for numbers in sent.values():
        assert numbers == sorted(set(numbers))
        assert not per_partition or numbers == [*range(len(numbers))]
    if not per_partition:
        everything = sorted(number for numbers in sent.values() for number in numbers)
        assert everything == [*range(len(everything))]


@pytest.mark.parametrize(("per_partition", "first"), [(False, 8), (True, 6)])
def test_ids_that_are_counted_in_a_topic_created_again_go_on_above_those_of_the_former_one(
    per_partition: bool, first: int
) -> None:
    ids = Sequences(per_partition=per_partition, former={0: 5, 1: 7})
    assert ids.persisted() is None
    for number in (first, first + 1):
        one = ids.next(0 if per_partition else TOPIC, None, None, 1)
        assert one == (number, number)
        ids.push(0, one, own=False)
    assert Sequences(former={0: 5, 1: 7}).next(0, 3, None, 1) == (3, 3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"last": 1}', '{"last": {"a": 1}, "offsets": {}}'])
def test_other_documents_are_no_state(text: str) -> None:
    with pytest.raises(ValueError, match="not the state of a producer session"):
        SequenceState.from_json(text)
