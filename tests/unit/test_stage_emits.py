"""What a stage emits from its state, and what is passed on to a later stage."""

from collections import Counter
from dataclasses import replace

import pytest

from aggregations.per_message.stage import Decided, KeyState
from envelope import Decision, EnvelopeError, Reason, Verdict
from tests.support.stages import InPlace, Log, arrival, fold, stage, verdicts


class Emits(Log):
    def zero(self):
        return [0]

    def fold(self, state, element):
        state[0] += 1
        return state


def test_a_stage_may_emit_from_its_state_and_what_it_emitted_does_not_change_behind_it():
    outcome = fold(
        [arrival(n) for n in (1, 2, 3)], of=stage(Emits(), emit=lambda element, state: [state, element.value])
    )
    assert [[one.value for one in decided.emitted] for decided in outcome.decided] == [
        [[1], "v1"], [[2], "v2"], [[3], "v3"],
    ]  # fmt: skip
    assert [one.indices for one in outcome.decided[0].emitted] == [(0,), (1,)]


def test_an_emit_that_changes_the_state_it_was_given_changes_nothing():
    def emit(element, state):
        state.append("mine")
        return [element.value]

    assert fold([arrival(1), arrival(2)], of=stage(emit=emit)).states[b"k"].fold == ["v1", "v2"]


def test_what_is_redriven_to_a_later_stage_is_passed_on_and_neither_folded_nor_counted():
    passing = replace(arrival(1), transit=True)
    outcome = fold([passing, arrival(2)])
    assert outcome.decided[0] == Decided(passing, Decision(Verdict.REDRIVEN, fold=False), emitted=(passing.element,))
    assert outcome.states[b"k"].fold == ["v2"]
    assert outcome.verdicts == Counter(accepted=1)
    assert fold([passing]).states == {}


def test_what_is_passed_on_is_emitted_from_the_state_that_holds_it_and_does_not_change_that():
    def emit(element, state):
        state.append("changed")
        return [state, element.value]

    passing, held = replace(arrival(1), transit=True), {b"k": KeyState(["v1", "v2"])}
    for loaded, state in [(held, ["v1", "v2"]), ({}, [])]:
        [one] = fold([passing], loaded, of=stage(emit=emit)).decided
        assert [(each.value, each.indices) for each in one.emitted] == [([*state, "changed"], (0,)), ("v1", (1,))]
        assert (one.arrival, one.decision) == (passing, Decision(Verdict.REDRIVEN, fold=False))
    assert held[b"k"].fold == ["v1", "v2"]


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (RuntimeError("secret"), Reason.FOLD_FAILED, "RuntimeError in the fold of stage s"),
        (EnvelopeError(Reason.NOT_FINITE, "a NaN"), Reason.NOT_FINITE, "a NaN"),
    ],
)
def test_what_cannot_be_passed_on_is_a_dead_letter_that_leaves_no_hole(error, reason, detail):
    def emit(element, state):
        raise error

    passing = replace(arrival(1), transit=True)
    outcome = fold([passing], of=stage(emit=emit))
    [one] = outcome.decided
    assert one == Decided(passing, Decision(Verdict.REJECTED, fold=False), reason, detail)
    assert not one.hole
    assert outcome.states == {}


def test_an_emit_that_fails_rejects_the_message_and_undoes_its_fold():
    def emit(element, state):
        if element.offset == 2:
            raise RuntimeError
        return [element.value]

    outcome = fold([arrival(n) for n in (1, 2, 3)], of=stage(InPlace(), emit=emit))
    assert outcome.states[b"k"].fold == ["v1", "v3"]
    assert verdicts(outcome) == ["accepted", "rejected", "accepted"]
