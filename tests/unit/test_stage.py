"""One stage: verdicts, folds, and what happens to a record when one of its items fails."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from aggregations.fields import Fields, count, last, total
from aggregations.flow import Aggregate
from aggregations.stage import Arrival, Decided, KeyState, fold_stage
from envelope import Decision, EnvelopeError, HolesFullError, Reason, Siblings, Standing, Verdict, Windows
from tests.support.pure import element

LANE = "legs:0#T1"


class Log:
    """Remembers every value in the order in which it was folded."""

    def zero(self):
        return []

    def fold(self, state, element):
        if element.value == "bad":
            raise RuntimeError("secret")
        return [*state, element.value]


class InPlace(Log):
    """The same, changing its state before it may fail."""

    def fold(self, state, element):
        state.append(element.value)
        if element.value == "bad":
            raise RuntimeError("secret")
        return state


FOLDS = pytest.mark.parametrize("fold", [Log(), InPlace()], ids=["by value", "in place"])


def stage(fold=None, **options):
    return Aggregate("s", "tail", fold or Log(), **options)


def arrival(offset, key=b"k", value=None, *, index=0, lane=LANE, own=None, incarnation=None, values=None, **fields):
    """A message at root offset `offset`; its record is at `own`, or at the same offset."""
    one = element(value if value is not None else f"v{offset}", offset if own is None else own)
    standing = Standing(lane, fields.pop("group", lane), (offset, index), **fields)
    return Arrival(one, key, standing, incarnation, {} if values is None else values)


def fold(arrivals, loaded=None, *, of=None, batch=1, **options):
    return fold_stage(of or stage(), loaded or {}, arrivals, batch=batch, **options)


def verdicts(outcome):
    return [one.decision.verdict.value for one in outcome.decided]


def again(outcome, loaded=None):
    """The states as the next batch loads them: through JSON, one version on."""
    saved = {
        key: KeyState(msgspec.json.decode(msgspec.json.encode(state.fold)), state.windows, state.version + 1)
        for key, state in outcome.states.items()
    }
    return {**(loaded or {}), **saved}


def test_a_batch_is_folded_in_the_order_of_positions_whatever_the_order_of_arrival():
    outcome = fold([arrival(3), arrival(1), arrival(2)])
    assert outcome.states[b"k"].fold == ["v1", "v2", "v3"]
    assert verdicts(outcome) == ["accepted"] * 3


def test_keys_do_not_touch_each_other():
    outcome = fold([arrival(1), arrival(2, b"other")])
    assert {key: state.fold for key, state in outcome.states.items()} == {b"k": ["v1"], b"other": ["v2"]}


def test_a_replay_is_dropped_and_a_state_that_nothing_changed_is_not_written():
    loaded = again(fold([arrival(1), arrival(2)]))
    outcome = fold([arrival(1), arrival(2)], loaded)
    assert verdicts(outcome) == ["duplicate", "duplicate"]
    assert outcome.states == {}


def test_the_version_that_was_loaded_goes_with_the_new_state():
    loaded = again(fold([arrival(1)]))
    assert fold([arrival(2)], loaded).states[b"k"].version == 1


def test_what_is_passed_on_is_each_accepted_element_and_no_duplicate():
    loaded = again(fold([arrival(1)]))
    outcome = fold([arrival(1), arrival(2), arrival(2)], loaded)
    assert [[e.value for e in one.emitted] for one in outcome.decided] == [[], ["v2"], []]


def test_a_topic_created_again_is_told_only_of_what_is_folded_for_the_first_time():
    new = {"lane": "legs:0#T2", "incarnation": Verdict.NEW_INCARNATION}
    outcome = fold([arrival(1, **new), arrival(1, **new)])
    assert verdicts(outcome) == ["new_incarnation", "duplicate_in_batch"]


def test_verdicts_are_counted():
    assert fold([arrival(1), arrival(2), arrival(2)]).verdicts == Counter(accepted=2, duplicate_in_batch=1)


def test_fields_fold_as_a_class_does():
    fields = stage(Fields(n=count(), m=total("m"), l=last("m")))
    outcome = fold([arrival(n, values={"m": n, "l": n}) for n in (2, 1)], of=fields)
    state = outcome.states[b"k"].fold
    assert fields.fold.result(state) == {"n": 2, "m": 3, "l": 2}


@FOLDS
def test_a_message_that_cannot_be_folded_goes_to_the_dead_letters_and_the_others_do_not_see_it(fold):
    outcome = fold_stage(stage(fold), {}, [arrival(1), arrival(2, value="bad"), arrival(3)], batch=1)
    assert outcome.states[b"k"].fold == ["v1", "v3"]
    assert verdicts(outcome) == ["accepted", "rejected", "accepted"]
    failed = outcome.decided[1]
    assert (failed.reason, failed.detail) == (Reason.FOLD_FAILED, "RuntimeError in the fold of stage s")
    assert failed.emitted == ()


@FOLDS
def test_several_failures_of_one_key_are_all_found(fold):
    bad = [arrival(n, value="bad" if n % 2 else None) for n in range(6)]
    outcome = fold_stage(stage(fold), {}, bad, batch=1)
    assert outcome.states[b"k"].fold == ["v0", "v2", "v4"]
    assert verdicts(outcome) == ["accepted", "rejected"] * 3


def test_a_failed_message_leaves_a_hole_and_its_redriven_copy_fills_it_once():
    loaded = again(fold([arrival(1, value="bad"), *(arrival(n) for n in range(2, 60))]))
    assert loaded[b"k"].windows.lanes[LANE].reaches((1, 0))
    redriven = arrival(1, value="mended", own=100, transparent=True)
    outcome = fold([redriven, arrival(1, value="mended", own=101, transparent=True)], loaded)
    assert verdicts(outcome) == ["redriven", "duplicate_in_batch"]
    loaded = again(outcome, loaded)
    assert loaded[b"k"].fold[-1] == "mended"
    assert loaded[b"k"].windows.holes == {}
    assert verdicts(fold([redriven], loaded)) == ["unproven"]


def test_a_state_of_holes_alone_is_no_folded_state():
    loaded = again(fold([arrival(1, value="bad")]))
    assert not loaded[b"k"].folded
    assert fold([arrival(2)], loaded).states[b"k"].fold == ["v2"]


def test_a_replay_of_a_failed_message_fails_again_and_leaves_no_second_hole():
    loaded = again(fold([arrival(1, value="bad")]))
    outcome = fold([arrival(1, value="bad")], loaded)
    assert verdicts(outcome) == ["rejected"]
    assert outcome.states[b"k"].windows.holes == {LANE: frozenset({(1, 0)})}


def test_an_unproven_message_goes_to_the_dead_letters_and_leaves_no_hole():
    loaded = again(fold([arrival(n) for n in range(40)]))
    outcome = fold([arrival(0, transparent=True)], loaded)
    assert outcome.decided[0].reason is Reason.UNPROVEN
    assert outcome.states == {}


def record(offset, *values, own=None, keys="abcde"):
    """The items of one flat-mapped record, each under its own key."""
    return [
        arrival(offset, keys[n].encode(), value, index=n, own=offset if own is None else own)
        for n, value in enumerate(values)
    ]


FIVE = ["v0", "v1", "bad", "v3", "v4"]


@FOLDS
def test_when_the_third_of_five_items_fails_none_is_folded_and_each_key_has_a_hole(fold):
    before = again(fold_stage(stage(fold), {}, [arrival(0, b"a", "old")], batch=1))
    outcome = fold_stage(stage(fold), before, record(1, *FIVE), batch=1)
    assert verdicts(outcome) == ["rejected"] * 5
    assert {key: state.windows.holes for key, state in outcome.states.items()} == {
        bytes([key]): {LANE: frozenset({(1, n)})} for n, key in enumerate(b"abcde")
    }
    assert outcome.states[b"a"].fold == ["old"]
    assert not any(one.emitted for one in outcome.decided)


@FOLDS
def test_items_of_other_records_under_the_same_keys_are_folded_as_if_the_failed_one_had_not_been(fold):
    batch = [*record(1, "w", "w"), *record(2, *FIVE), *record(3, "x", "x", "x")]
    outcome = fold_stage(stage(fold), {}, batch, batch=1)
    assert {key: state.fold for key, state in outcome.states.items() if state.fold} == {
        b"a": ["w", "x"], b"b": ["w", "x"], b"c": ["x"],
    }  # fmt: skip
    assert outcome.verdicts == Counter(accepted=5, rejected=5)


@FOLDS
def test_items_under_one_key_are_folded_whole_or_not_at_all(fold):
    outcome = fold_stage(stage(fold), {}, [*record(1, *FIVE, keys="kkkkk"), arrival(2)], batch=1)
    assert outcome.states[b"k"].fold == ["v2"]
    assert len(outcome.states[b"k"].windows.holes[LANE]) == 5


def test_a_failure_that_shows_only_when_another_record_is_left_out_is_found():
    class Alternates(Log):
        """Refuses two of the same in a row."""

        def fold(self, state, element):
            if state and state[-1] == element.value:
                raise RuntimeError
            return [*state, element.value]

    # The second record fails under b, which takes its item out of a, where the third one then fails.
    batch = [*record(1, "x"), *record(2, "y", "z"), *record(3, "x"), arrival(0, b"b", "z", lane="z:0#", own=9)]
    outcome = fold(batch, of=stage(Alternates()))
    assert verdicts(outcome) == ["accepted", "rejected", "rejected", "rejected", "accepted"]


def test_the_redriven_copy_of_a_failed_record_is_folded_whole():
    loaded = again(fold(record(1, *FIVE)))
    outcome = fold(record(1, "v0", "v1", "good", "v3", "v4", own=77), loaded)
    assert verdicts(outcome) == ["redriven"] * 5
    assert [outcome.states[bytes([key])].fold for key in b"abcde"] == [["v0"], ["v1"], ["good"], ["v3"], ["v4"]]


def test_a_failed_record_whose_items_are_held_already_is_a_duplicate_and_no_dead_letter():
    loaded = again(fold(record(1, "v0", "v1")))
    outcome = fold(record(1, "v0", "bad", own=8), loaded)
    assert verdicts(outcome) == ["duplicate", "duplicate"]


def test_a_copy_that_is_folded_in_the_same_batch_makes_the_failed_one_a_duplicate_without_a_hole():
    """A hole would let a third copy in once the position is below the floor."""

    class OnceOnly(Log):
        def fold(self, state, element):
            if element.value == "bad" and "key" not in state:
                raise RuntimeError
            return [*state, element.value]

    batch = [
        arrival(1, value="bad", lane="l:0", group="l", own=1),
        arrival(1, value="key", lane="m:0", group="m", own=2),
        arrival(1, value="bad", lane="n:0", group="l", own=3),
    ]
    outcome = fold(batch, of=stage(OnceOnly()))
    assert verdicts(outcome) == ["duplicate_in_batch", "accepted", "new_lane"]
    assert outcome.states[b"k"].windows.holes == {}


def test_a_field_that_could_not_be_evaluated_fails_its_whole_record():
    broken = arrival(1, b"b", index=1, values=EnvelopeError(Reason.TRANSFORM_FAILED, "no"))
    outcome = fold([arrival(1, b"a"), broken], of=stage(Fields(n=count())))
    assert verdicts(outcome) == ["rejected", "rejected"]
    assert outcome.decided[0].reason is Reason.TRANSFORM_FAILED


def test_an_overflow_rejects_the_message_and_keeps_the_total():
    fields = stage(Fields(m=total("m")))
    loaded = again(fold([arrival(1, values={"m": 2**63 - 2})], of=fields))
    outcome = fold([arrival(n, values={"m": 1}) for n in (2, 3)], loaded, of=fields)
    assert verdicts(outcome) == ["accepted", "rejected"]
    assert outcome.decided[1].reason is Reason.OVERFLOW
    assert outcome.states[b"k"].fold == {"m": 2**63 - 1}


def test_records_excluded_because_a_sibling_failed_elsewhere_are_rejected_with_that_cause():
    one = arrival(1, own=5)
    outcome = fold([one, arrival(2)], excluded={one.element.own: (Reason.OVERFLOW, "elsewhere")})
    assert verdicts(outcome) == ["rejected", "accepted"]
    assert (outcome.decided[0].reason, outcome.decided[0].detail) == (Reason.OVERFLOW, "elsewhere")


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
        assert one.decision == Decision(Verdict.REDRIVEN, fold=False)
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


class Answer(Log):
    """Returns what it was made with, whatever it is given."""

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


def test_more_holes_than_allowed_stop_the_batch():
    windows = Windows(holes={LANE: frozenset((n, 0) for n in range(1024))})
    with pytest.raises(HolesFullError, match=r"stage \w+, \w+:0:2000 \(fold_failed\): .*redrive"):
        fold([arrival(2000, value="bad")], {b"k": KeyState(None, windows, 1)})


def test_lanes_beyond_the_limit_are_retired_and_counted():
    of, loaded = stage(lanes=2), {}
    for batch in range(4):
        outcome = fold([arrival(1, lane=f"l{batch}", own=batch)], loaded, of=of, batch=batch)
        loaded = again(outcome, loaded)
    assert outcome.retired == 1
    assert [lane for lane, window in loaded[b"k"].windows.lanes.items() if not window.held] == ["l0", "l1"]


def test_positions_with_event_ids_of_chains_of_different_length_meet_in_one_batch():
    short = Arrival(element("a", 1), b"k", Standing("a:0#>r>t", "a:0#>r>t", (17, -1, "e")), None, {})
    long = Arrival(element("b", 2), b"k", Standing("a:0#>r>m>s>t", "a:0#>r>m>s>t", (17, -1, -1, "f")), None, {})
    assert fold([long, short]).states[b"k"].fold == ["a", "b"]


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        (Siblings.GROUP, ["rejected", "accepted"]),
        (Siblings.DROP, ["ambiguous", "accepted"]),
    ],
)
def test_a_failed_sibling_that_nothing_tells_apart_leaves_no_hole_beside_the_folded_one(siblings, expected):
    batch = [
        arrival(1, value="bad", index=-1, own=1, ambiguous=True),
        arrival(1, value="good", index=-1, own=2, ambiguous=True),
    ]
    outcome = fold(batch, siblings=siblings)
    assert verdicts(outcome) == expected
    assert outcome.states[b"k"].windows.holes == {}
