"""A run on several stores: which manifest counts, and which lost stores and added stages are refused."""

from contextlib import nullcontext, suppress

import pytest

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from persistence.commit import faults
from persistence.errors import Transient
from persistence.manifest import Manifest, Progress
from persistence.registry import open_store
from tests.support.pure import bare, fresh_store, runner, states
from tests.support.two_stages import COUNT, flow, legs, manifest, one_stage, save, two_stores


def test_a_crash_between_two_manifests_is_taken_up_at_the_lower_offset():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(9, batch=2))
    save(stores["a"], ref, manifest(5))
    run = begin(flow(), stores)
    assert run.start == {("legs", 0): 5}
    assert run.batch == 3


def test_a_partition_that_one_store_does_not_know_starts_at_its_beginning():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(9, partition=1))
    save(stores["a"], ref, manifest(5))
    assert begin(flow(), stores, accept=["downstream-behind"]).start == {}


def test_an_upstream_store_that_is_ahead_is_refused_with_the_remedy():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(5))
    save(stores["a"], ref, manifest(9, batch=2))
    with pytest.raises(RunRefusedError, match="legs:0") as error:
        begin(flow(), stores)
    assert "ebuild" in str(error.value)
    assert begin(flow(), stores, accept=["downstream-behind"]).start == {("legs", 0): 5}


def test_a_downstream_store_that_is_lost_after_the_first_batch_died_before_its_manifests_is_noticed():
    """The upstream states hold what the lost store had, and would drop the replay."""
    stores = two_stores()
    with faults.use(faults.Injector([faults.Fault.parse("manifest.error")])), pytest.raises(Transient):
        MemoryRunner(flow(), stores).process(legs(0))
    with pytest.raises(RunRefusedError, match="flow fleet: the store of stage b contains nothing"):
        MemoryRunner(flow(), {**stores, "b": fresh_store()})


def test_an_upstream_store_that_is_lost_is_refused_and_when_accepted_filled_with_what_the_topic_still_has():
    """Its states would begin in the middle: nothing proves that all its records are still in the topic."""
    stores = two_stores()
    MemoryRunner(flow(), stores).process(legs(*range(10)))
    emptied = {**stores, "a": fresh_store()}
    with pytest.raises(
        RunRefusedError, match=r"store of stage a contains nothing .*--generation.*--accept store-empty"
    ):
        MemoryRunner(flow(), emptied)
    filled = MemoryRunner(flow(), emptied, accept=["store-empty"])
    assert filled.run.start == {}
    filled.process(legs(*range(12)))
    assert (states(filled, "a"), states(filled, "b")) == ({"N1": {"n": 12}}, {"UA": {"n": 12}})


def test_of_three_stores_every_one_that_is_lost_is_named():
    three = flow().aggregate("c", "tail", COUNT)
    stores = {name: fresh_store() for name in "abc"}
    MemoryRunner(three, stores).process(legs(0))
    with pytest.raises(RunRefusedError, match="the store of stage a, b contains nothing"):
        begin(three, {**stores, "a": fresh_store(), "b": fresh_store()})


EPOCH_EFFECTS = 4
"""Effects of a first start with two stores: the epoch of each, then an empty manifest in each."""


@pytest.mark.parametrize("outcome", ["error", "unanswered"])
@pytest.mark.parametrize("nth", range(1, EPOCH_EFFECTS + 1))
def test_a_first_start_that_dies_anywhere_is_no_lost_store(nth, outcome):
    stores = two_stores()
    with faults.use(faults.Injector([faults.Fault.parse(f"epoch.{outcome}@{nth}")])), pytest.raises(Transient):
        begin(flow(), stores)
    again = MemoryRunner(flow(), stores)
    again.process(legs(0))
    assert states(again, "b") == {"UA": {"n": 1}}


EFFECTS = ["epoch", "fetch", "load", "fold", "publish", "persist", "manifest"]


@pytest.mark.parametrize("outcome", ["error", "unanswered"])
@pytest.mark.parametrize("point", EFFECTS)
def test_no_crash_of_the_first_start_and_batches_is_taken_for_a_loss(point, outcome):
    """Each effect, one after another, until the flow gets through without meeting the fault."""
    met, nth = True, 0
    while met:
        nth, stores = nth + 1, two_stores()
        injector = faults.Injector([faults.Fault.parse(f"{point}.{outcome}@{nth}")])
        with faults.use(injector):
            for _ in range(2):  # the second one meets what the first one left
                with suppress(Transient):
                    run = MemoryRunner(flow(), stores)
                    run.run.start_at("legs", "T1", {0: 0})
                    for first in (0, 3):
                        run.process(legs(*range(first, first + 3)))
                    break
        met = injector.reached[point] + sum(injector.reached[f"{point}:{stage}"] for stage in "ab") >= nth
        after = MemoryRunner(flow(), stores)
        after.process(legs(*range(6)))
        assert (states(after, "a"), states(after, "b")) == ({"N1": {"n": 6}}, {"UA": {"n": 6}}), nth
    assert nth > 1


@pytest.mark.parametrize("finished", [True, False])
def test_a_stage_that_is_added_to_a_flow_under_way_is_refused_though_its_first_batch_is_half_written(finished):
    store = fresh_store()
    with faults.use(faults.Injector([] if finished else [faults.Fault.parse("manifest.error")])):
        with nullcontext() if finished else pytest.raises(Transient):
            runner(one_stage(), store).process(legs(0))
    with pytest.raises(
        RunRefusedError, match=r"first ran without stage b .*`headwater replay --redefine`.*--accept stage-added"
    ):
        runner(flow(), store)
    accepted = MemoryRunner(flow(), bind(flow(), {}, store), accept=["stage-added"])
    accepted.process(legs(1))
    assert states(accepted, "b") == {"UA": {"n": 1}}
    assert runner(flow(), store).run.batch == accepted.run.batch


def test_a_stage_that_was_left_out_for_a_while_is_refused_when_it_comes_back_even_if_no_batch_was_finished():
    """The upstream stage holds what was folded meanwhile and would drop it."""
    for stores in (dict.fromkeys("ab", fresh_store()), two_stores()):
        MemoryRunner(flow(), stores).process(legs(0))
        without = MemoryRunner(one_stage(), {"a": stores["a"]})
        with faults.use(faults.Injector([faults.Fault.parse("manifest.error")])), pytest.raises(Transient):
            without.process(legs(1))
        with pytest.raises(RunRefusedError, match="first ran without stage b"):
            MemoryRunner(flow(), stores)


def test_an_upstream_stage_may_be_taken_away_and_what_is_behind_it_goes_on():
    store = fresh_store()
    runner(flow(), store).process(legs(0, 1))
    rest = Flow("fleet").source(bare()).aggregate("b", "carrier", COUNT)
    after = runner(rest, store)
    after.process(legs(1, 2))
    assert states(after, "b") == {"UA": {"n": 3}}


def test_a_renamed_stage_is_one_that_was_added():
    store = fresh_store()
    runner(one_stage(), store).process(legs(0))
    with pytest.raises(RunRefusedError, match="without stage other in its store"):
        runner(Flow("fleet").source(bare()).aggregate("other", "tail", COUNT), store)


def test_a_stage_that_is_bound_to_another_store_of_the_flow_is_refused():
    three = flow().aggregate("c", "tail", COUNT)
    up, down = fresh_store(), fresh_store()
    MemoryRunner(three, {"a": up, "b": up, "c": down}).process(legs(0))
    with pytest.raises(RunRefusedError, match="without stage b in its store"):
        begin(three, {"a": up, "b": down, "c": down})


def test_after_a_crash_between_manifests_the_older_incarnation_of_the_topic_is_gone_on_from():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(2, batch=2, topic_id="T2", incarnations=("T1", "T2")))
    save(stores["a"], ref, manifest(50))
    run = begin(flow(), stores)
    assert run.start == {("legs", 0): 50}
    assert run.manifest.topic_ids == {"legs": "T1"}
    assert run.manifest.incarnations == {"legs": ("T1", "T2")}


def test_the_id_of_a_lost_downstream_store_is_taken_with_its_offset():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(50))
    save(stores["a"], ref, manifest(2, batch=2, topic_id="T2", incarnations=("T1", "T2")))
    run = begin(flow(), stores, accept=["downstream-behind"])
    assert (run.start, run.manifest.topic_ids) == ({("legs", 0): 50}, {"legs": "T1"})


@pytest.mark.parametrize(
    ("older", "younger", "ids"), [("T9", "T1", ("T9", "T1")), ("", "T1", ("T1",)), ("gone", "T1", ("T1",))]
)
def test_an_id_is_as_old_as_it_was_seen_and_one_that_nobody_names_any_more_is_the_oldest(older, younger, ids):
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(2, batch=2, topic_id=younger, incarnations=ids))
    save(stores["a"], ref, manifest(50, topic_id=older, incarnations=ids[:1]))
    run = begin(flow(), stores)
    assert (run.start, run.manifest.topic_ids) == ({("legs", 0): 50}, {"legs": older})


def test_a_topic_of_whose_ids_no_order_is_known_goes_on():
    store = fresh_store()
    ref = begin(flow(), bind(flow(), {}, store)).ref
    save(store, ref, Manifest(1, 1, {"legs": {0: Progress(5)}}, {"legs": "T1"}))
    run = begin(flow(), bind(flow(), {}, store))
    assert (run.start, run.manifest.topic_ids) == ({("legs", 0): 5}, {"legs": "T1"})


def test_an_empty_store_that_was_accepted_is_still_one_if_nothing_was_folded_since():
    stores = two_stores()
    MemoryRunner(flow(), stores).process(legs(0))
    stores = {**stores, "b": fresh_store()}
    for _ in range(2):
        run = begin(flow(), stores, accept=["store-empty"])
        assert open_store(stores["b"]).load_manifest(run.ref) is None
        noted = open_store(stores["a"]).load_manifest(run.ref)
        assert noted is not None
        assert noted.since == run.epoch, "marks that were acknowledged before are no longer checked"


def test_a_new_flow_that_crashes_before_its_first_batch_can_still_prove_first_deliveries():
    stores = two_stores()
    begin(flow(), stores)
    assert begin(flow(), stores).ledger.seen == {}
