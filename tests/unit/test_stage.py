"""One stage: the order of a batch, verdicts, and what is kept and passed on."""

from collections import Counter

import pytest

from aggregations.definition.aggregates import count, last, total
from aggregations.definition.fields import Fields
from aggregations.per_message.arrivals import Arrival
from envelope import Route, Siblings, Standing, Verdict
from envelope.dedup import history
from tests.support.pure import element
from tests.support.stages import LANE, again, arrival, fold, stage, verdicts


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
    assert (outcome.states, outcome.retired) == ({}, 0)


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
    assert outcome.states[b"k"].fold == ["v1"]


def test_verdicts_are_counted():
    assert fold([arrival(1), arrival(2), arrival(2)]).verdicts == Counter(accepted=2, duplicate_in_batch=1)


def test_fields_fold_as_a_class_does():
    fields = stage(Fields(n=count(), m=total("m"), l=last("m")))
    outcome = fold([arrival(n, values={"m": n, "l": n}) for n in (2, 1)], of=fields)
    state = outcome.states[b"k"].fold
    assert fields.fold.result(state) == {"n": 2, "m": 3, "l": 2}


def test_lanes_beyond_the_limit_are_retired_and_counted():
    of, loaded = stage(lanes=2), {}
    for batch in range(4):
        outcome = fold([arrival(1, lane=f"l{batch}", own=batch)], loaded, of=of, batch=batch)
        loaded = again(outcome, loaded)
    assert outcome.retired == 1
    assert [lane for lane, history in loaded[b"k"].histories.lanes.items() if not history.held] == ["l0", "l1"]


def test_the_lane_that_is_retired_is_the_one_longest_unused():
    of, loaded = stage(lanes=2), {}
    for batch, lane in enumerate(["first", "second", "first", "third"]):
        outcome = fold([arrival(batch, lane=lane)], loaded, of=of, batch=batch)
        loaded = again(outcome, loaded)
    assert [lane for lane, history in loaded[b"k"].histories.lanes.items() if not history.held] == ["second"]


def test_positions_with_event_ids_of_chains_of_different_length_meet_in_one_batch():
    short = Arrival(element("a", 1), b"k", Standing("a:0#>r>t", "a:0#>r>t", (17, -1, "e")), None, {})
    long = Arrival(element("b", 2), b"k", Standing("a:0#>r>m>s>t", "a:0#>r>m>s>t", (17, -1, -1, "f")), None, {})
    assert fold([long, short]).states[b"k"].fold == ["a", "b"]


@pytest.mark.parametrize(("siblings", "folded"), [(Siblings.GROUP, ["v1", "v1"]), (Siblings.DROP, ["v1"])])
def test_messages_that_nothing_tells_apart_are_folded_as_the_source_says(siblings, folded):
    outcome = fold([arrival(1, index=-1, own=own, ambiguous=True) for own in (1, 2)], siblings=siblings)
    assert outcome.states[b"k"].fold == folded


def test_while_the_topic_grows_no_position_is_evicted_and_the_next_fold_of_the_key_evicts_them():
    of, lane = stage(history=2), "raw:0#R>rep>legs"
    grown = fold([arrival(n, lane=lane) for n in range(5)], of=of, evict=False)
    assert len(grown.states[b"k"].histories.lanes[lane].held) == 5
    after = fold([arrival(9, lane=lane)], again(grown), of=of)
    assert after.states[b"k"].histories.lanes[lane].held == ((4, 0), (9, 0))


@pytest.mark.parametrize(("replays", "held"), [(True, ((1, 0), (2, 0))), (False, ((2, 0),))])
def test_late_folds_are_forgotten_only_when_no_run_that_crashed_may_have_folded_them(monkeypatch, replays, held):
    monkeypatch.setattr(history, "HEALED", 1)
    first = fold([arrival(1, route=Route.MISSING)], batch=1, replays=replays)
    second = fold([arrival(2, route=Route.MISSING)], again(first), batch=2, replays=replays)
    assert second.states[b"k"].histories.lanes[f"!{LANE}"].held == held
