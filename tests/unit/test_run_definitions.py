"""A flow whose definition has changed since its states were made."""

from collections import Counter

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.states import state_of, writes_of
from persistence.commit import faults
from persistence.errors import Transient
from persistence.registry import open_store
from tests.support.pure import COLUMNS, bare, fresh_store, leg, runner, states, wrapped
from tests.support.two_stages import COUNT, flow, legs


def test_stages_in_another_order_are_another_definition():
    """Of a half-written batch the downstream stage has its part: in front it would drop the replay."""
    store = fresh_store()
    with faults.use(faults.Injector([faults.Fault.parse("persist:a.error")])), pytest.raises(Transient):
        runner(flow(), store).process(legs(0))
    turned = Flow("fleet").source(bare()).aggregate("b", "carrier", COUNT).aggregate("a", "tail", COUNT)
    with pytest.raises(DefinitionChangedError, match="were in a different order"):
        runner(turned, store)


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
        DefinitionChangedError, match=f"a state has definition strange; the stage has {stage.definition}"
    ):
        run.process(legs(1))


def test_states_of_any_definition_are_continued_only_if_that_is_accepted():
    stores = bind(flow(), {}, fresh_store())
    for accepted, continued in (([], ()), (["definition"], None)):
        run = begin(flow(), stores, accept=accepted)
        assert [run.earlier_of(stage) for stage in run.flow.stages] == [continued] * 2
