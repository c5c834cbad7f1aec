"""Which executor reads a slot."""

from hypothesis import given
from hypothesis import strategies as st

from aggregations.spark.placement import placed

EXECUTORS = {"0": "a", "1": "b"}


def test_slots_are_divided_evenly_and_keep_their_executor() -> None:
    first = placed([0, 1, 2, 3], {}, EXECUTORS)
    assert first == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert placed([0, 1, 2, 3], first, EXECUTORS) == first
    # In a batch without records for some slots, the others stay where they were.
    assert placed([1], first, EXECUTORS) == first
    assert placed([3, 0], first, EXECUTORS) == first


def test_the_slots_of_an_executor_that_ended_move_and_a_new_one_takes_its_share() -> None:
    first = placed([0, 1, 2, 3], {}, EXECUTORS)
    assert placed([0, 1, 2, 3], first, {"1": "b"}) == dict.fromkeys(range(4), "1")
    assert placed([0, 1, 2, 3], first, {"1": "b", "2": "a"}) == {0: "2", 1: "1", 2: "2", 3: "1"}
    alone = placed([0, 1, 2, 3], {}, {"0": "a"})
    assert placed([0, 1, 2, 3], alone, EXECUTORS) == {0: "0", 1: "0", 2: "1", 3: "1"}


@given(
    slots=st.lists(st.integers(0, 9), unique=True, min_size=1),
    before=st.dictionaries(st.integers(0, 9), st.sampled_from("0123")),
    executors=st.sets(st.sampled_from("0123"), min_size=1),
)
def test_slots_are_always_divided_evenly_among_living_executors(
    slots: list[int], before: dict[int, str], executors: set[str]
) -> None:
    found = placed(slots, before, dict.fromkeys(executors, "host"))
    load = [sum(found[slot] == one for slot in slots) for one in executors]
    assert sum(load) == len(slots)
    assert max(load) <= -(-len(slots) // len(executors))
