"""The states that a stage keeps: those that survive JSON, without later changes by the fold."""

from collections import Counter

import pytest

from envelope import Reason, Verdict
from tests.support.stages import InPlace, Log, again, arrival, fold, stage


class Answer(Log):
    """Returns the value given to it at the start, for any input."""

    def __init__(self, answer):
        self.answer = answer

    def fold(self, state, element):
        return self.answer


def endless():
    state = []
    state.append(state)
    return state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (float("nan"), Reason.NOT_FINITE),
        ([{"a": float("inf")}], Reason.NOT_FINITE),
        (2**63, Reason.OVERFLOW),
        ((1, 2), Reason.FOLD_FAILED),
        (Counter(a=1), Reason.FOLD_FAILED),
        ({1: 2}, Reason.FOLD_FAILED),
        ({"\ud800": 2}, Reason.FOLD_FAILED),
        ("\ud800", Reason.FOLD_FAILED),
        (b"x", Reason.FOLD_FAILED),
        ({1, 2}, Reason.FOLD_FAILED),
        (Verdict.ACCEPTED, Reason.FOLD_FAILED),
        (endless(), Reason.FOLD_FAILED),
    ],
    ids=str,
)
def test_a_state_that_json_would_not_give_back_is_refused_and_never_stored(state, reason):
    outcome = fold([arrival(1)], of=stage(Answer(state)))
    assert outcome.decided[0].reason is reason
    assert not outcome.states[b"k"].folded


@pytest.mark.parametrize("state", [None, True, 0, -1.5, "é", [], {"a": [None, {"b": 1}]}], ids=repr)
def test_a_state_that_json_gives_back_is_kept_null_included(state):
    class Counts(Log):
        """Answers and counts how often it began anew."""

        begun = 0

        def zero(self):
            Counts.begun += 1
            return "begun"

        def fold(self, before, element):
            return state if before == "begun" else before

    of = stage(Counts())
    loaded = again(fold([arrival(1)], of=of))
    assert loaded[b"k"].folded
    loaded = again(fold([arrival(2)], loaded, of=of), loaded)
    assert loaded[b"k"].fold == state
    assert Counts.begun == 1


def test_a_zero_that_is_shared_is_not_changed_by_a_fold_in_place():
    class Shared(InPlace):
        start = []

        def zero(self):
            return self.start

    outcome = fold([arrival(1, b"a"), arrival(2, b"b")], of=stage(Shared()))
    assert {key: state.fold for key, state in outcome.states.items()} == {b"a": ["v1"], b"b": ["v2"]}
    assert Shared.start == []


def test_the_loaded_state_is_not_changed_by_a_fold_in_place():
    loaded = again(fold([arrival(1)]))
    fold([arrival(2), arrival(3, value="bad")], loaded, of=stage(InPlace()))
    assert loaded[b"k"].fold == ["v1"]
