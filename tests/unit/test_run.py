"""One run against its stores: epoch, fencing, where to start, and what is refused."""

import sys
from collections import Counter
from contextlib import nullcontext, suppress

import msgspec
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from aggregations.per_message.ledger import Entry
from aggregations.run.begin import begin, look
from aggregations.run.binding import bind
from aggregations.run.incarnations import Incarnations, merge_incarnations
from aggregations.run.memory import MemoryRunner
from aggregations.run.states import state_of, writes_of
from envelope import TopicPartition, Verdict
from persistence import memory as memory_store
from persistence import registry
from persistence.commit import faults
from persistence.errors import Fenced, Terminal, Transient
from persistence.manifest import Growth, Manifest, Progress
from persistence.registry import open_store
from tests.support.pure import COLUMNS, bare, fresh_store, leg, runner, states, wrapped

COUNT = Fields(n=count())


def flow(fields=COUNT, *, topic=None, **options):
    source = Flow("fleet").source(topic or bare())
    return source.aggregate("a", "tail", fields, **options).aggregate("b", "carrier", COUNT)


def two_stores():
    return {"a": fresh_store(), "b": fresh_store()}


def legs(*offsets, partition=0):
    return [leg(offset, carrier="UA", partition=partition) for offset in offsets]


def test_a_stage_is_bound_by_name_or_by_its_own_url_or_to_the_default():
    own = flow(store="memory://own")
    assert bind(own, {"b": "memory://b"}) == {"a": "memory://own", "b": "memory://b"}
    assert bind(own, {"a": "memory://a"}, "memory://rest") == {"a": "memory://a", "b": "memory://rest"}


def test_a_stage_without_a_store_is_named():
    with pytest.raises(FlowError, match="no store for stage a, b: give --store URL or --store a=URL"):
        bind(flow(), {})
    with pytest.raises(FlowError, match="no store for stage b: give --store URL or --store b=URL"):
        bind(flow(), {"a": "memory://a"})


def test_a_store_for_no_stage_is_refused():
    with pytest.raises(FlowError, match="no stage 'c'; it has a, b"):
        bind(flow(), {"c": "memory://c"})


def test_a_store_that_comes_back_behind_another_one_is_refused_without_showing_its_url():
    three = flow().aggregate("c", "tail", COUNT)
    with pytest.raises(FlowError, match="adjacent stages") as error:
        bind(three, {"b": "memory://b"}, "redis://:secret@host")
    assert "secret" not in str(error.value)


def test_every_run_has_a_higher_epoch_in_every_store():
    stores = two_stores()
    first, second = begin(flow(), stores), begin(flow(), stores)
    assert second.epoch > first.epoch
    assert [store.installed_epoch(second.ref) for _, store in second.distinct_stores()] == [second.epoch] * 2


def test_the_epoch_is_above_what_any_of_the_stores_knows():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    open_store(stores["b"]).install_epoch(ref, 41)
    assert begin(flow(), stores).epoch == 42


def test_a_run_is_fenced_by_a_newer_one_at_its_next_write():
    store = fresh_store()
    old, new = runner(flow(), store), runner(flow(), store)
    with pytest.raises(Fenced):
        old.process(legs(0))
    assert new.process(legs(0)).verdicts["a"] == Counter(accepted=1)


def test_two_stages_in_one_store_have_one_manifest():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    assert [name for name, _ in run.distinct_stores()] == ["a"]


def test_a_new_run_starts_where_the_manifest_ends_and_counts_batches_on():
    store = fresh_store()
    first = runner(flow(), store)
    first.process([*legs(0, 1, 2), *legs(7, partition=1)])
    first.process(legs(3))
    second = runner(flow(), store)
    assert second.run.start == {("legs", 0): 4, ("legs", 1): 8}
    assert second.run.batch == 3


def test_generations_of_a_flow_do_not_touch():
    store = bind(flow(), {}, fresh_store())
    first, second = begin(flow(), store), begin(flow(), store, generation=2)
    assert (first.epoch, second.epoch) == (1, 1)


def save(url, ref, manifest):
    open_store(url).install_epoch(ref, manifest.epoch)
    open_store(url).save_manifest(ref, manifest)


def manifest(offset, *, batch=1, topic_id="T1", incarnations=("T1",), partition=0):
    return Manifest(1, batch, {"legs": {partition: Progress(offset)}}, {"legs": topic_id}, {"legs": incarnations})


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
    with pytest.raises(RunRefusedError, match="flow fleet: the store of stage b has nothing"):
        MemoryRunner(flow(), {**stores, "b": fresh_store()})


def test_an_upstream_store_that_is_lost_is_refused_and_when_accepted_filled_with_what_the_topic_still_has():
    """Its states would begin in the middle: whether all that it held is still in the topic, nobody can prove."""
    stores = two_stores()
    MemoryRunner(flow(), stores).process(legs(*range(10)))
    emptied = {**stores, "a": fresh_store()}
    with pytest.raises(RunRefusedError, match=r"store of stage a has nothing .*--generation.*--accept store-empty"):
        MemoryRunner(flow(), emptied)
    filled = MemoryRunner(flow(), emptied, accept=["store-empty"])
    assert filled.run.start == {}
    filled.process(legs(*range(12)))
    assert (states(filled, "a"), states(filled, "b")) == ({"N1": {"n": 12}}, {"UA": {"n": 12}})


def test_of_three_stores_every_one_that_is_lost_is_named():
    three = flow().aggregate("c", "tail", COUNT)
    stores = {name: fresh_store() for name in "abc"}
    MemoryRunner(three, stores).process(legs(0))
    with pytest.raises(RunRefusedError, match="the store of stage a, b has nothing"):
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


def one_stage():
    return Flow("fleet").source(bare()).aggregate("a", "tail", COUNT)


@pytest.mark.parametrize("finished", [True, False])
def test_a_stage_that_is_added_to_a_flow_under_way_is_refused_though_its_first_batch_is_half_written(finished):
    store = fresh_store()
    with faults.use(faults.Injector([] if finished else [faults.Fault.parse("manifest.error")])):
        with nullcontext() if finished else pytest.raises(Transient):
            runner(one_stage(), store).process(legs(0))
    with pytest.raises(RunRefusedError, match=r"has begun without stage b .*--generation.*--accept stage-added"):
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
        with pytest.raises(RunRefusedError, match="has begun without stage b"):
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


def test_stages_in_another_order_are_another_definition():
    """Of a half-written batch the downstream stage has its part: in front it would drop the replay."""
    store = fresh_store()
    with faults.use(faults.Injector([faults.Fault.parse("persist:a.error")])), pytest.raises(Transient):
        runner(flow(), store).process(legs(0))
    turned = Flow("fleet").source(bare()).aggregate("b", "carrier", COUNT).aggregate("a", "tail", COUNT)
    with pytest.raises(DefinitionChangedError, match="were in a different order"):
        runner(turned, store)


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


def test_the_next_manifest_never_goes_back_and_keeps_the_other_partitions():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5, TopicPartition("legs", 1): 3}, {"legs": "T1"}, {}))
    after = run.following({TopicPartition("legs", 0): 2}, {"legs": "T1"}, {})
    assert {p: progress.next_offset for p, progress in after.positions["legs"].items()} == {0: 5, 1: 3}
    assert (after.batch, after.epoch) == (2, run.epoch)


def test_a_partition_of_which_nothing_was_read_stands_at_its_beginning_in_the_next_manifest():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    assert run.following({TopicPartition("legs", 0): 0}, {}, {}).positions == {"legs": {0: Progress(0)}}


@pytest.mark.parametrize("ids", [{}, {"legs": ""}])
def test_the_next_manifest_keeps_the_partitions_of_a_topic_without_an_id(ids):
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5}, {}, {}))
    assert run.following({TopicPartition("legs", 1): 3}, ids, {}).positions == {
        "legs": {0: Progress(5), 1: Progress(3)}
    }


def test_the_next_manifest_keeps_what_is_known_of_topics_that_the_batch_has_nothing_of():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5}, {"legs": "T1"}, {}))
    after = run.following({TopicPartition("more", 0): 3}, {"more": "M"}, {})
    assert after.positions == {"legs": {0: Progress(5)}, "more": {0: Progress(3)}}
    assert after.topic_ids == {"legs": "T1", "more": "M"}


def test_a_topic_created_again_starts_anew_in_the_next_manifest():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5, TopicPartition("legs", 1): 3}, {"legs": "T1"}, {}))
    after = run.following({TopicPartition("legs", 0): 2}, {"legs": "T2"}, {})
    assert {p: progress.next_offset for p, progress in after.positions["legs"].items()} == {0: 2}
    assert after.topic_ids == {"legs": "T2"}


def test_the_ids_of_a_consumed_topic_are_kept_in_order_of_age_though_it_is_nobodys_root():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5}, {"legs": "T1"}, {"raw": ("R",)}))
    after = run.following({TopicPartition("legs", 0): 2}, {"legs": "T2"}, run.incarnations({}).merged())
    assert after.incarnations == {"raw": ("R",), "legs": ("T1", "T2")}


def test_a_look_at_a_flow_shows_how_far_its_first_store_is_and_disturbs_no_run():
    stores = two_stores()
    running = MemoryRunner(flow(), stores)
    running.process(legs(0, 1))
    with faults.use(faults.Injector([faults.Fault.parse("manifest:a.error")])), pytest.raises(Transient):
        running.process(legs(2))
    seen = look(flow(), stores)
    assert (seen.ref, seen.start) == (running.run.ref, {("legs", 0): 2})
    assert look(flow(), stores, generation=2).start == {}
    assert running.process(legs(2)).verdicts["a"] == Counter(duplicate=1)


def test_a_look_makes_the_checks_of_a_start_takes_no_epoch_and_writes_nothing():
    stores = two_stores()
    assert look(flow(), stores).manifest is None
    running = MemoryRunner(flow(), stores)
    running.process(legs(0))
    kept = [store.load_manifest(running.run.ref) for store in running.run.stores.values()]
    changed = flow(Fields(n=count("minutes")))
    with pytest.raises(DefinitionChangedError, match="stage a has definition"):
        look(changed, stores)
    assert look(changed, stores, accept=["definition"]).start == {("legs", 0): 1}
    assert [store.load_manifest(running.run.ref) for store in running.run.stores.values()] == kept
    assert running.process(legs(1)).verdicts["a"] == Counter(accepted=1)


def test_a_look_shows_the_growth_that_the_run_at_work_has_noted():
    stores = two_stores()
    running = begin(flow(), stores)
    running.look(2, clock_ms=7, ends=None)
    running.advanced(running.noting())
    assert running.noting().growth == {}, "nothing was read yet, so nothing has grown"
    running.advanced(running.following({TopicPartition("legs", 0): 1}, {"legs": "T"}, {}))
    running.look(2, clock_ms=7, ends=None)
    for name, _ in running.distinct_stores():
        running.save_manifest(name, running.noting())
    seen = look(flow(), stores)
    assert seen.growth == running.growth == seen.manifest.growth["legs"]
    assert seen.growth.partitions_now == 2


def test_a_run_knows_that_a_newer_one_has_taken_its_epoch():
    one = Flow("fleet").source(bare()).aggregate("a", "tail", COUNT)
    store = {"a": fresh_store()}
    old = begin(one, store)
    assert not old.superseded()
    new = begin(one, store)
    assert (old.superseded(), new.superseded()) == (True, False)


def test_a_look_during_another_run_s_first_start_sees_no_lost_store(monkeypatch):
    """It asks the upstream store before the first manifest is there, and the downstream one when the run is at work."""
    stores, load = two_stores(), memory_store.MemoryStore.load_manifest
    first = iter([True])

    def meanwhile(self, ref):
        found = load(self, ref)
        if next(first, False):
            MemoryRunner(flow(), stores).process(legs(0))
        return found

    monkeypatch.setattr(memory_store.MemoryStore, "load_manifest", meanwhile)
    assert look(flow(), stores).start == {("legs", 0): 1}


def test_a_changed_definition_is_refused_and_may_be_accepted():
    store = fresh_store()
    runner(flow(), store).process(legs(0))
    changed = flow(Fields(n=count("minutes")))
    with pytest.raises(RunRefusedError, match=r"stage a has definition .*ebuild"):
        begin(changed, bind(changed, {}, store))
    again = MemoryRunner(changed, bind(changed, {}, store), accept=["definition"])
    again.process([leg(1, carrier="UA", minutes=1)])
    assert states(again, "a") == {"N1": {"n": 2}}


@pytest.mark.parametrize(
    "other",
    [
        lambda: flow(co_partitioned=False),
        lambda: flow(topic=bare(siblings="drop")),
        lambda: flow(topic=bare(cluster="paris")),
        lambda: flow(topic=wrapped()),
        lambda: flow(topic=Topic("mirror", Json(COLUMNS), envelope=False)),
    ],
)
def test_what_renames_lanes_or_positions_is_refused_behind_a_half_written_batch_which_it_would_fold_again(other):
    store = fresh_store()
    with faults.use(faults.Injector([faults.Fault.parse("manifest.error")])), pytest.raises(Transient):
        runner(flow(), store).process(legs(0, 1))
    with pytest.raises(DefinitionChangedError, match="stage a has definition"):
        runner(other(), store)
    again = runner(flow(), store)
    again.process(legs(0, 1))
    assert states(again, "a") == {"N1": {"n": 2}}


def test_a_state_of_another_definition_is_refused_even_where_no_manifest_was_written():
    store = fresh_store()
    with faults.use(faults.Injector([faults.Fault.parse("manifest.error")])), pytest.raises(Transient):
        runner(flow(), store).process(legs(0))
    with pytest.raises(RunRefusedError, match="stage a has definition"):
        runner(flow(Fields(n=count("minutes"))), store)


def test_a_definition_is_accepted_once_also_when_the_run_that_accepted_it_dies_before_its_manifest():
    store, changed = fresh_store(), flow(Fields(n=count("minutes")))
    runner(flow(), store).process(legs(0))
    with faults.use(faults.Injector([faults.Fault.parse("manifest.error")])), pytest.raises(Transient):
        MemoryRunner(changed, bind(changed, {}, store), accept=["definition"]).process([leg(1, "N2")])
    with pytest.raises(DefinitionChangedError, match="stage a has definition"):
        runner(flow(), store)
    again = runner(changed, store)
    assert again.process([leg(1, "N2", minutes=3), leg(2, "N1", minutes=4)]).verdicts["a"] == Counter(
        duplicate=1, accepted=1
    )
    assert states(again, "a") == {"N1": {"n": 2}, "N2": {"n": 0}}


def test_a_state_of_a_definition_that_no_manifest_knows_is_refused_before_it_is_folded():
    store = fresh_store()
    run = runner(flow(), store)
    run.process(legs(0))
    ref, stage = run.run.ref.stage("a"), run.flow.stages[0]
    [(key, stored)] = open_store(store).scan(ref)
    strange = writes_of({key: state_of(stored, ref, key)}, "strange")
    open_store(store).save(ref, strange, epoch=run.run.epoch, batch=run.run.batch)
    with pytest.raises(
        DefinitionChangedError, match=f"a state has definition strange, the flow has {stage.definition}"
    ):
        run.process(legs(1))


def test_a_run_that_is_refused_leaves_the_older_one_fenced_all_the_same():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["a"], ref, manifest(9))
    with pytest.raises(RunRefusedError):
        begin(flow(), stores)
    assert open_store(stores["a"]).installed_epoch(ref) == 2


def stored(run):
    """The manifests without what each store says of its stages."""
    found = [store.load_manifest(run.ref) for _, store in run.distinct_stores()]
    assert [list(one.definitions.items()) for one in found] == [list(run.definitions().items())] * len(found)
    assert [one.kept for one in found] == [("a",), ("b",)]
    return [msgspec.structs.replace(one, definitions={}, kept=()) for one in found]


def test_the_start_of_a_first_run_is_written_into_every_store():
    run = begin(flow(), two_stores())
    run.start_at("legs", "T1", {0: 0, 1: 5})
    positions = {"legs": {0: Progress(0), 1: Progress(5)}}
    assert stored(run) == [Manifest(run.epoch, 0, positions, {"legs": "T1"}, {"legs": ("T1",)}, seen={})] * 2
    assert run.manifest.positions == positions
    assert run.batch == 1


def test_the_start_of_a_later_run_is_written_where_it_differs_and_keeps_what_is_known_of_other_topics():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    known = Manifest(
        1,
        4,
        {"legs": {0: Progress(7)}, "old": {3: Progress(8)}},
        {"legs": "T1", "old": "O"},
        {"legs": ("T0", "T1"), "old": ("O",)},
    )
    save(stores["b"], ref, known)
    save(stores["a"], ref, known)
    run = begin(flow(), stores)
    run.start_at("legs", "T1", {0: 7})
    assert stored(run) == [msgspec.structs.replace(known, epoch=run.epoch)] * 2
    run.start_at("legs", "T1", {0: 7, 1: 0})
    positions = {"legs": {0: Progress(7), 1: Progress(0)}, "old": {3: Progress(8)}}
    after = Manifest(run.epoch, 4, positions, known.topic_ids, known.incarnations)
    assert stored(run) == [after] * 2
    assert run.manifest.positions == positions


def test_a_topic_without_an_id_leaves_no_id_behind():
    run = begin(flow(), two_stores())
    run.start_at("legs", "", {0: 2})
    assert stored(run) == [Manifest(run.epoch, 0, {"legs": {0: Progress(2)}}, seen={})] * 2


def test_the_growth_that_is_found_at_a_start_is_written_into_every_store_though_every_offset_is_known():
    """A run that dies before its first manifest leaves it to the next: without it, histories would evict positions."""
    stores = two_stores()
    starts, growth = {0: 5, 1: 0}, Growth(1, 2, 7)
    begin(flow(), stores).start_at("legs", "T1", starts)
    begin(flow(), stores).start_at("legs", "T1", starts, growth)
    run = begin(flow(), stores)
    assert run.growth == growth
    assert [one.growth for one in stored(run)] == [{"legs": growth}] * 2
    run.start_at("legs", "T1", starts)
    assert begin(flow(), stores).growth is None
    assert [one.growth for one in stored(run)] == [{}] * 2


def test_a_start_that_says_nothing_new_writes_nothing():
    run = begin(flow(), two_stores())
    run.start_at("legs", "T1", {0: 5}, Growth(1, 2, 7))
    watch = faults.Injector([])
    with faults.use(watch):
        run.start_at("legs", "T1", {0: 5}, Growth(1, 2, 7))
    assert watch.reached == {}


def test_a_growth_is_written_once_before_its_batch_and_its_end_goes_with_the_batch_that_reaches_it():
    """Written before, the end would let the next run evict what a replay of that batch still needs."""
    run = begin(flow(), two_stores())
    run.start_at("legs", "T1", {0: 5})
    run.growth = Growth(1, 2, 7)
    watch = faults.Injector([])
    with faults.use(watch):
        run.note_growth()
        run.note_growth()
        run.growth = None
        run.note_growth()
    assert watch.reached == {"ledger": 2}
    assert [one.growth for one in stored(run)] == [{"legs": Growth(1, 2, 7)}] * 2
    assert run.following({TopicPartition("legs", 0): 6}, {"legs": "T1"}, {}).growth == {}


@pytest.mark.parametrize("outcome", ["error", "unanswered"])
def test_a_run_that_cannot_write_its_end_counts_as_crashed_and_is_closed_without_an_error(outcome):
    stores = two_stores()
    ended = MemoryRunner(flow(), stores)
    ended.process(legs(0))
    with faults.use(faults.Injector([faults.Fault.parse(f"finish.{outcome}")])):
        ended.close()
    assert begin(flow(), stores).crashed


def test_a_run_whose_last_batch_failed_does_not_say_that_it_ended_of_its_own_accord():
    """What that batch persisted no manifest says: a record of it is no proven first delivery to the next run."""
    stores = two_stores()
    failed = MemoryRunner(flow(), stores)
    with faults.use(faults.Injector([faults.Fault.parse("manifest.error")])), pytest.raises(Transient):
        failed.process(legs(0))
    failed.close()
    crashed = MemoryRunner(flow(), stores, ends={TopicPartition("legs", 0): 1})
    assert crashed.run.crashed
    crashed.process(legs(0))
    crashed.close()
    assert not begin(flow(), stores).crashed


def created_again():
    """A run on two stores that begins to read a topic that was created again, and the stores."""
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(50))
    save(stores["a"], ref, manifest(50))
    run = begin(flow(), stores)
    run.start_at("legs", "T2", {0: 0})
    return run, stores


def test_a_topic_that_was_created_again_is_started_at_and_written_down_with_its_first_batch():
    run, _ = created_again()
    assert stored(run) == [msgspec.structs.replace(manifest(50), epoch=run.epoch)] * 2
    assert run.start == {("legs", 0): 0}
    assert run.manifest.topic_ids == {"legs": "T1"}


@pytest.mark.parametrize(
    "write", [lambda run: run.list_dead({Entry("a", "!legs:0#T2", (0,))}), lambda run: run.finish()]
)
def test_a_crash_between_two_stores_before_a_batch_of_the_topic_created_again_is_folded_is_no_loss(write):
    run, stores = created_again()
    upstream = stored(run)[0]
    write(run)
    assert [(one.positions, one.topic_ids) for one in stored(run)] == [(upstream.positions, {"legs": "T1"})] * 2
    save(stores["a"], run.ref, upstream)  # as it was before the second write
    assert begin(flow(), stores).start == {("legs", 0): 50}


def test_ids_of_a_topic_are_told_apart_by_age():
    current = {"raw": "now", "other": "first"}
    seen = Incarnations({"raw": ("old", "now")}, current)
    assert seen.verdict("raw", "now") is None
    assert seen.verdict("raw", "old") is Verdict.STALE_INCARNATION
    assert seen.verdict("raw", "never seen") is Verdict.STALE_INCARNATION
    assert seen.verdict("raw", "") is None
    assert seen.verdict("other", "first") is None
    assert seen.verdict("unknown to the broker", "any") is None
    assert seen.merged() == {"raw": ("old", "now"), "other": ("first",)}
    later = Incarnations(seen.merged(), current | {"raw": "next"})
    assert later.verdict("raw", "now") is Verdict.STALE_INCARNATION
    assert later.verdict("raw", "next") is Verdict.NEW_INCARNATION
    assert later.merged() == {"raw": ("old", "now", "next"), "other": ("first",)}


def test_ids_known_before_come_first_when_they_are_merged():
    assert merge_incarnations({"t": ("a",)}, {"t": ["b", "a"]}, {"u": ["c"]}) == {"t": ("a", "b"), "u": ("c",)}


def test_totals_of_both_stages_survive_a_change_of_runs_at_every_batch():
    store = fresh_store()
    summed = flow(Fields(n=count(), m=total("minutes")))
    for offset in range(6):
        run = runner(summed, store)
        run.process([leg(offset, f"N{offset % 2}", carrier="UA", minutes=offset)])
    assert states(run, "a") == {"N0": {"n": 3, "m": 6}, "N1": {"n": 3, "m": 9}}
    assert states(run, "b") == {"UA": {"n": 6}}


def test_a_runner_is_made_of_a_flow_with_a_source():
    with pytest.raises(FlowError, match="has no aggregate"):
        MemoryRunner(Flow("fleet").source(bare()), {})


closed: list[str] = []


def open_counted(url):
    store = open_store(url.removeprefix("counted+"))
    close = store.close
    store.close = lambda: (closed.append(url), close())
    return store


@pytest.mark.parametrize(
    ("opening", "second"), [(begin, "sqlite://{}/file/states.db"), (begin, "nowhere://"), (look, "nowhere://")]
)
def test_a_store_that_cannot_be_opened_leaves_none_of_the_others_open(tmp_path, opening, second):
    registry.register("counted+memory", "tests.unit.test_run:open_counted")
    (tmp_path / "file").touch()
    first = f"counted+{fresh_store()}"
    with pytest.raises(Terminal):
        opening(flow(), {"a": first, "b": second.format(tmp_path)})
    assert sys.modules["tests.unit.test_run"].closed[-1:] == [first]
