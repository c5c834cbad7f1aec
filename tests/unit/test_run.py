"""One run on its stores: its epoch, fencing, read-only opening, and how a run ends."""

import sys
from collections import Counter
from contextlib import closing

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from aggregations.run.begin import begin, look
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from persistence import memory as memory_store
from persistence import registry
from persistence.commit import faults
from persistence.errors import Fenced, Terminal, Transient
from persistence.registry import open_store
from tests.support.pure import bare, fresh_store, leg, runner, states
from tests.support.two_stages import COUNT, flow, legs, manifest, save, two_stores


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
    first = look(flow(), stores)
    assert (first.manifest, first.changed().batch) == (None, 0)
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
    running.look("legs", 2, clock_ms=7, ends=None)
    running.advanced(running.noting())
    assert running.noting().growth == {}, "nothing was read yet, so nothing has grown"
    running.advanced(running.following({TopicPartition("legs", 0): 1}, {"legs": "T"}, {}))
    running.look("legs", 2, clock_ms=7, ends=None)
    for name, _ in running.distinct_stores():
        running.save_manifest(name, running.noting())
    seen = look(flow(), stores)
    assert seen.growths == running.growths == seen.manifest.growth
    assert seen.growths["legs"].partitions_now == 2


def test_a_run_knows_that_a_newer_one_has_taken_its_epoch():
    one = Flow("fleet").source(bare()).aggregate("a", "tail", COUNT)
    store = {"a": fresh_store()}
    old = begin(one, store)
    assert not old.superseded()
    new = begin(one, store)
    assert (old.superseded(), new.superseded()) == (True, False)


def test_a_look_during_another_run_s_first_start_sees_no_lost_store(monkeypatch):
    """It reads the upstream store before the first manifest exists, and the downstream one when the run is active."""
    stores, load = two_stores(), memory_store.MemoryStore.load_manifest
    first = iter([True])

    def meanwhile(self, ref):
        found = load(self, ref)
        if next(first, False):
            MemoryRunner(flow(), stores).process(legs(0))
        return found

    monkeypatch.setattr(memory_store.MemoryStore, "load_manifest", meanwhile)
    assert look(flow(), stores).start == {("legs", 0): 1}


def test_a_run_that_is_refused_leaves_the_older_one_fenced_all_the_same():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["a"], ref, manifest(9))
    with pytest.raises(RunRefusedError):
        begin(flow(), stores)
    assert open_store(stores["a"]).installed_epoch(ref) == 2


@pytest.mark.parametrize("outcome", ["error", "unanswered"])
def test_a_run_that_cannot_write_its_end_counts_as_crashed_and_is_closed_without_an_error(outcome):
    stores = two_stores()
    ended = MemoryRunner(flow(), stores)
    ended.process(legs(0))
    with faults.use(faults.Injector([faults.Fault.parse(f"finish.{outcome}")])):
        ended.close()
    assert begin(flow(), stores).crashed


def test_a_run_whose_last_batch_failed_does_not_say_that_it_ended_of_its_own_accord():
    """No manifest records what that batch persisted: for the next run, its records are not proven first deliveries."""
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


def test_totals_of_both_stages_survive_a_change_of_runs_at_every_batch():
    store = fresh_store()
    summed = flow(Fields(n=count(), m=total("minutes")))
    for offset in range(6):
        run = runner(summed, store)
        run.process([leg(offset, f"N{offset % 2}", carrier="UA", minutes=offset)])
    assert states(run, "a") == {"N0": {"n": 3, "m": 6}, "N1": {"n": 3, "m": 9}}
    assert states(run, "b") == {"UA": {"n": 6}}


def test_a_runner_is_made_of_a_flow_with_a_source():
    with pytest.raises(FlowError, match="does nothing with its elements"):
        MemoryRunner(Flow("fleet").source(bare()), {})
    with pytest.raises(FlowError, match="has no source"):
        MemoryRunner(Flow("fleet"), {})
    with pytest.raises(FlowError, match="flow= takes a Flow; got str"):
        MemoryRunner("fleet", {})  # type: ignore[arg-type]


def test_a_runner_binds_stages_as_their_definition_says_and_refuses_one_without_a_store():
    with pytest.raises(FlowError, match="no store for stage a"):
        MemoryRunner(flow(), {})
    with pytest.raises(FlowError, match=r"accept= takes a list of risks, such as \['definition'\]; got text"):
        MemoryRunner(flow(), bind(flow(), {}, fresh_store()), accept="definition")
    with pytest.raises(FlowError, match=r"unknown risk lost_records; choose from .*lost-records"):
        MemoryRunner(flow(), bind(flow(), {}, fresh_store()), accept=["lost_records"])
    urls = two_stores()
    assert MemoryRunner(flow(store=urls["a"]), {"b": urls["b"]}).run.urls == urls


closed: list[str] = []


def open_counted(url):
    store = open_store(url.removeprefix("counted+"))
    close = store.close
    store.close = lambda: (closed.append(url), close())
    return store


@pytest.mark.parametrize(
    ("opening", "second"), [(begin, "sqlite://{}/file/states.db"), (begin, "nowhere://"), (look, "nowhere://")]
)
def test_a_store_that_cannot_be_opened_leaves_none_of_the_others_open(tmp_path, opening, second, monkeypatch):
    monkeypatch.setitem(registry._targets, "counted+memory", "tests.unit.test_run:open_counted")
    (tmp_path / "file").touch()
    first = f"counted+{fresh_store()}"
    with pytest.raises(Terminal):
        opening(flow(), {"a": first, "b": second.format(tmp_path)})
    assert sys.modules["tests.unit.test_run"].closed[-1:] == [first]


@pytest.mark.parametrize("risk", [None, "definition", "grown-undrained", "growth-full"])
def test_a_run_knows_which_risks_of_later_batches_were_accepted(risk):
    run = begin(flow(), two_stores(), accept=[risk] if risk else [])
    accepted = (run.accept_definition, run.accept_disorder, run.accept_eviction)
    assert accepted == (risk == "definition", risk == "grown-undrained", risk == "growth-full")


def test_a_look_says_whether_the_growth_has_changed_and_waits_as_long_as_producers_may_not_know_of_it():
    stores = two_stores()
    with closing(MemoryRunner(flow(), stores, topic_ids={"legs": "T"})) as before:
        before.process([leg(0)])
    run = begin(flow(), stores)
    ends = {0: 9, 1: 9}
    changes = [(1, 0, False), (2, 5_000, True), (2, 5_000, False), (2, 64_999, False), (2, 65_000, True)]
    for partitions, clock_ms, changed in changes:
        assert run.look("legs", partitions, clock_ms=clock_ms, ends=lambda: ends, max_age_seconds=60) is changed


def test_a_run_that_fails_after_batches_of_its_own_counts_as_crashed_and_one_that_reads_nothing_does_not():
    stores = two_stores()
    failed = MemoryRunner(flow(), stores)
    failed.process(legs(0))
    with faults.use(faults.Injector([faults.Fault.parse("persist:a.error")])), pytest.raises(Transient):
        failed.process(legs(1))
    failed.close()
    crashed = MemoryRunner(flow(), stores, ends={TopicPartition("legs", 0): 2})
    assert crashed.run.crashed
    crashed.process(legs(1))
    crashed.close()
    idle = MemoryRunner(flow(), stores)
    assert not idle.run.crashed
    idle.close()
    assert not begin(flow(), stores).crashed
