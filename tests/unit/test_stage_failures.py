"""What happens to a record when one of its items fails: it is folded whole or not at all, and leaves holes."""

from collections import Counter
from dataclasses import replace

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.per_message.cause import Cause
from aggregations.per_message.stage import KeyState, fold_stage
from envelope import EnvelopeError, Histories, History, Reason, Route, Siblings
from envelope.dedup.histories import HolesFullError
from envelope.dedup.room import KNOWN_LANES, SIBLINGS
from tests.support.stages import FOLDS, LANE, Log, again, arrival, fold, stage, verdicts


@FOLDS
def test_a_message_that_cannot_be_folded_goes_to_the_dead_letters_and_the_others_do_not_see_it(fold):
    outcome = fold_stage(stage(fold), {}, [arrival(1), arrival(2, value="bad"), arrival(3)], batch=1)
    assert outcome.states[b"k"].fold == ["v1", "v3"]
    assert verdicts(outcome) == ["accepted", "rejected", "accepted"]
    failed = outcome.decided[1]
    assert (failed.reason, failed.detail) == (Reason.FOLD_FAILED, "RuntimeError in the fold of stage s")
    assert failed.emitted == ()
    assert failed.raised.kind == "RuntimeError", "its author is told"


@FOLDS
def test_several_failures_of_one_key_are_all_found(fold):
    bad = [arrival(n, value="bad" if n % 2 else None) for n in range(6)]
    outcome = fold_stage(stage(fold), {}, bad, batch=1)
    assert outcome.states[b"k"].fold == ["v0", "v2", "v4"]
    assert verdicts(outcome) == ["accepted", "rejected"] * 3


def test_a_key_with_many_failures_is_not_folded_again_for_each_of_them():
    class Counts(Log):
        calls = 0

        def fold(self, state, element):
            Counts.calls += 1
            return super().fold(state, element)

    fold([arrival(n, value="bad" if n % 2 else None) for n in range(60)], of=stage(Counts()))
    assert Counts.calls <= 3 * 60


def test_a_failed_message_leaves_a_hole_and_its_redriven_copy_fills_it_once():
    loaded = again(fold([arrival(1, value="bad"), *(arrival(n) for n in range(2, 60))]))
    assert loaded[b"k"].histories.lanes[LANE].reaches((1, 0))
    redriven = arrival(1, value="mended", own=100, route=Route.RETRIED)
    outcome = fold([redriven, arrival(1, value="mended", own=101, route=Route.RETRIED)], loaded)
    assert verdicts(outcome) == ["redriven", "duplicate_in_batch"]
    loaded = again(outcome, loaded)
    assert loaded[b"k"].fold[-1] == "mended"
    assert loaded[b"k"].histories.holes == {}
    assert verdicts(fold([redriven], loaded)) == ["unproven"]


def test_a_state_of_holes_alone_is_no_folded_state():
    loaded = again(fold([arrival(1, value="bad")]))
    assert not loaded[b"k"].folded
    assert fold([arrival(2)], loaded).states[b"k"].fold == ["v2"]


def test_a_replay_of_a_failed_message_fails_again_and_leaves_no_second_hole():
    loaded = again(fold([arrival(1, value="bad")]))
    outcome = fold([arrival(1, value="bad")], loaded)
    assert verdicts(outcome) == ["rejected"]
    assert outcome.states[b"k"].histories.holes == {LANE: frozenset({(1, 0)})}


def test_an_unproven_message_goes_to_the_dead_letters_and_leaves_no_hole():
    loaded = again(fold([arrival(n) for n in range(40)]))
    outcome = fold([arrival(0, route=Route.RETRIED)], loaded)
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
    assert {key: state.histories.holes for key, state in outcome.states.items()} == {
        bytes([key]): {LANE: frozenset({(1, n)})} for n, key in enumerate(b"abcde")
    }
    assert outcome.states[b"a"].fold == ["old"]
    assert not any(one.emitted for one in outcome.decided)
    assert {one.decision.fold for one in outcome.decided} == {False}


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
    assert len(outcome.states[b"k"].histories.holes[LANE]) == 5


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


@pytest.mark.parametrize("in_batch", [False, True])
def test_an_item_of_a_failed_record_that_another_copy_brought_does_not_keep_the_others_from_their_holes(in_batch):
    copy = arrival(1, b"a", "v0", own=7)
    failed = record(1, "v0", "bad", own=8)
    outcome = fold([*failed, copy]) if in_batch else fold(failed, again(fold([copy])))
    assert verdicts(outcome)[:2] == ["duplicate_in_batch" if in_batch else "duplicate", "rejected"]
    assert outcome.states[b"b"].histories.holes == {LANE: frozenset({(1, 1)})}


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
    assert [one.decision.fold for one in outcome.decided] == [False, True, True]
    assert outcome.states[b"k"].histories.holes == {}


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
    outcome = fold([one, arrival(2)], excluded={one.element.own: Cause(Reason.OVERFLOW, "elsewhere")})
    assert verdicts(outcome) == ["rejected", "accepted"]
    assert (outcome.decided[0].reason, outcome.decided[0].detail) == (Reason.OVERFLOW, "elsewhere")


def test_more_holes_than_allowed_stop_the_batch():
    histories = Histories(holes={LANE: frozenset((n, 0) for n in range(1024))})
    with pytest.raises(HolesFullError, match=r"stage \w+, \w+:0:2000 \(fold_failed: \w+Error at .*\): .*redrive"):
        fold([arrival(2000, value="bad")], {b"k": KeyState(None, histories, 1)})


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
    assert outcome.states[b"k"].histories.holes == {}


def siblings_of(root, count, *, lane=LANE, group=LANE, first=0):
    """Messages of one root that only their event ids tell apart."""
    return [
        replace(one, standing=replace(one.standing, position=(root, -1, f"id{n:04}")))
        for n in range(first, first + count)
        for one in [arrival(root, b"k", f"v{n}", own=10_000 * root + n, lane=lane, group=group)]
    ]


def test_more_siblings_without_an_index_than_a_state_tells_apart_are_dead_letters_and_none_is_lost():
    first = fold(siblings_of(7, 700))
    outcome = fold(siblings_of(7, 700, first=400), again(first))
    counts = Counter(verdicts(outcome))
    assert (counts["duplicate"], counts["rejected"]) == (300, 1100 - SIBLINGS)
    rejected = [one for one in outcome.decided if one.reason]
    assert {(one.reason, one.hole) for one in rejected} == {(Reason.TOO_MANY_SIBLINGS, True)}
    states = again(outcome, again(first))
    assert len(states[b"k"].fold) == SIBLINGS
    assert len(states[b"k"].histories.holes[LANE]) == 1100 - SIBLINGS
    # After as many roots as the history holds, there is room again, and the rejected record is redriven.
    states = again(fold([one for root in range(8, 41) for one in siblings_of(root, 1)], states), states)
    back = fold([one.arrival for one in rejected], states)
    assert set(verdicts(back)) == {"redriven"}
    assert set(verdicts(fold([one.arrival for one in rejected], again(back, states)))) == {"below_floor"}


def test_siblings_are_counted_over_all_lanes_of_their_group():
    lanes = [f"{LANE}>r>b:{n}" for n in range(4)]
    loaded = {}
    for n, lane in enumerate(lanes):
        outcome = fold(siblings_of(7, 300, lane=lane, group=f"{LANE}>r>b", first=300 * n), loaded)
        loaded = again(outcome, loaded)
    assert Counter(one.reason for one in outcome.decided) == {
        None: SIBLINGS - 900,
        Reason.TOO_MANY_SIBLINGS: 1200 - SIBLINGS,
    }
    assert len(loaded[b"k"].fold) == SIBLINGS


def test_a_message_of_one_lane_more_than_a_state_knows_is_a_dead_letter():
    full = {b"k": KeyState([], Histories({f"legs:{n}#T1": History((), (0, 0)) for n in range(1, KNOWN_LANES)}), 1)}
    arrivals = [arrival(n, lane=f"{LANE}{n}", own=n) for n in range(3)] + [arrival(9, lane="legs:1#T1", own=9)]
    outcome = fold(arrivals, full)
    assert verdicts(outcome) == ["new_lane", "rejected", "rejected", "accepted"]
    assert [one.reason for one in outcome.decided] == [None, *[Reason.TOO_MANY_LANES] * 2, None]
    states = again(outcome, full)
    assert len(states[b"k"].histories.lanes) == KNOWN_LANES
    assert set(states[b"k"].histories.holes) == {f"{LANE}1", f"{LANE}2"}


@pytest.mark.parametrize(("copied", "passed_on"), [(False, Route.MISSING), (True, Route.RETRIED)])
def test_a_redriven_copy_that_comes_in_the_batch_in_which_its_record_dies_is_folded(copied, passed_on):
    """The record is not listed yet, so it counts as a copy of a record that this flow did not reject."""
    died = arrival(1, value="bad")
    died = replace(died, element=replace(died.element, again=copied))
    batch = [died, arrival(1, value="mended", own=100, route=Route.COPY), arrival(2, own=101, route=Route.COPY)]
    outcome = fold(batch)
    assert verdicts(outcome) == ["duplicate_in_batch", "redriven", "copy"]
    assert outcome.states[b"k"].fold == ["mended"]
    # Later stages also fold it below their floors, if no crashed attempt can have passed it on to them.
    assert [one.route for one in outcome.decided[1].emitted] == [passed_on]


def test_a_redriven_copy_in_another_group_than_the_record_that_dies_stays_a_copy():
    batch = [arrival(1, value="bad"), arrival(1, lane="other:0#T1", own=100, route=Route.COPY)]
    assert verdicts(fold(batch)) == ["rejected", "copy"]
