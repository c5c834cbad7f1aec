"""The in-memory runner: a flow run message by message with the real commit."""

from collections import Counter

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import FlowError
from aggregations.run.memory import MemoryRunner
from envelope import Reason, TopicPartition
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.errors import Transient
from tests.support.pure import (
    FLEET,
    TOPIC,
    TOPIC_ID,
    bare,
    batch,
    chained,
    fleet,
    fresh_store,
    hop,
    leg,
    runner,
    states,
    wrapped,
)

EXPECTED = {"AA": {"n": 4, "m": 20}, "UA": {"n": 5, "m": 25}}


def test_two_stages_fold_every_message_once():
    run = runner(fleet())
    report = run.process(batch(*range(10)))
    assert states(run, "aircraft") == {"N0": {"n": 3, "m": 18}, "N1": {"n": 3, "m": 12}, "N2": {"n": 3, "m": 15}}
    assert states(run, "carrier") == EXPECTED
    assert (report.records, report.filtered, report.batches) == (10, 1, 1)
    assert report.verdicts == {"aircraft": Counter(accepted=9), "carrier": Counter(accepted=9)}


def test_what_was_folded_is_dropped_by_the_first_stage_and_never_reaches_the_second():
    run = runner(fleet())
    run.process(batch(*range(10)))
    again = run.process(batch(*range(10)))
    assert again.verdicts == {"aircraft": Counter(duplicate=9), "carrier": Counter()}
    assert states(run, "carrier") == EXPECTED
    assert run.report.records == 20


@pytest.mark.parametrize("outcome", faults.FaultOutcome)
@pytest.mark.parametrize(
    "point",
    [
        "fetch",
        "load:aircraft",
        "load:carrier",
        "fold",
        "publish",
        "persist:carrier",
        "persist:aircraft",
        "manifest",
        "epoch",
    ],
)
def test_after_a_crash_at_any_step_a_new_run_on_the_same_stores_is_exact(point, outcome):
    class Crash(Exception):
        pass

    def crash():
        raise Crash

    store = fresh_store()
    records = batch(*range(10))
    with faults.use(Injector([Fault(point, outcome, 2)], crash)), pytest.raises((Crash, Transient)):
        for n in range(0, 10, 2):
            run = runner(fleet(), store)
            run.process(records[run.run.start.get(TopicPartition(TOPIC, 0), 0) :][: n + 2])
    run = runner(fleet(), store)
    run.process(records[run.run.start.get(TopicPartition(TOPIC, 0), 0) :])
    assert states(run, "carrier") == EXPECTED


def test_downstream_states_are_written_before_upstream_ones_and_manifests_last():
    stores = {"aircraft": fresh_store(), "carrier": fresh_store()}
    run = MemoryRunner(fleet(), stores)
    reached = []

    class Watch:
        def effect(self, point, action):
            reached.append(str(point))
            return action()

    with faults.use(Watch()):
        run.process([*batch(1), Record(TOPIC, 0, 2, None, b"")])
    assert reached == [
        "fetch",
        "load:aircraft",
        "fold",
        "load:carrier",
        "fold",
        "ledger",
        "ledger",
        "load:aircraft",
        "fold",
        "load:carrier",
        "fold",
        "publish",
        "dead_letter",
        "persist:carrier",
        "persist:aircraft",
        "manifest:carrier",
        "manifest:aircraft",
    ]


def test_a_crash_before_the_upstream_state_is_written_leaves_the_event_downstream_only_and_is_finished_by_the_replay():
    store = fresh_store()
    with faults.use(Injector([Fault.parse("persist:aircraft.error")])), pytest.raises(Transient):
        runner(fleet(), store).process(batch(1, 2, 3))
    run = runner(fleet(), store)
    assert states(run, "aircraft") == {}
    assert states(run, "carrier") == {"AA": {"n": 1, "m": 2}, "UA": {"n": 2, "m": 4}}
    report = run.process(batch(1, 2, 3))
    assert report.verdicts["carrier"] == Counter(duplicate=3)
    assert states(run, "carrier") == {"AA": {"n": 1, "m": 2}, "UA": {"n": 2, "m": 4}}


def test_expressions_and_callables_give_the_same_states():
    by_callables = (
        Flow("fleet")
        .source(bare())
        .filter(lambda e: e["minutes"] > 0)
        .aggregate("aircraft", lambda e: e["tail"], FLEET)
        .aggregate("carrier", lambda e: e["carrier"], FLEET)
    )
    run, other = runner(fleet()), runner(by_callables)
    for part in (batch(*range(4)), batch(*range(2, 9))):
        run.process(part)
        other.process(part)
    for stage in ("aircraft", "carrier"):
        assert run.states(stage) == other.states(stage)


CARRIER = pl.col("carrier").str.to_uppercase().fill_null("none")


@pytest.mark.parametrize(
    "flow",
    [
        Flow("f").source(bare()).filter(CARRIER == "none").aggregate("a", "tail", FLEET),
        Flow("f").source(bare()).aggregate("a", CARRIER, FLEET),
        Flow("f").source(bare()).aggregate("a", "tail", Fields(m=total(CARRIER.str.len_chars()))),
        Flow("f").source(bare()).aggregate("a", "tail", FLEET).filter(CARRIER == "none").aggregate("b", "tail", FLEET),
        Flow("f").source(bare()).aggregate("a", "tail", FLEET).filter(CARRIER == "none").publish("out"),
    ],
    ids=["before a stage", "key", "fields", "between stages", "behind the stages"],
)
def test_a_null_has_its_column_s_type_wherever_an_expression_stands(flow):
    run = runner(flow)
    report = run.process([leg(0, minutes=1)])
    assert (run.dead_letters, report.filtered) == ([], 0)


def test_the_columns_behind_a_stage_that_emits_are_of_what_it_emits():
    half = Fields(m=total(pl.col("minutes") * 2))
    emits = Flow("f").source(bare()).aggregate("a", "tail", FLEET, emit=lambda e, state: [{"minutes": 0.5}])
    run = runner(emits.aggregate("b", pl.lit("all"), half))
    run.process([leg(0, minutes=3)])
    assert states(run, "b") == {"all": {"m": 1.0}}


def test_a_column_that_the_flow_does_not_need_cannot_be_wrong():
    run = runner(Flow("f").source(bare()).aggregate("a", "tail", Fields(m=total("minutes"))))
    run.process([leg(0, minutes=1, carrier=["no", "text"])])
    assert states(run, "a") == {"N1": {"m": 1}}


def test_retired_lanes_are_counted_over_all_stages():
    run = runner(
        Flow("f").source(bare()).aggregate("a", "tail", FLEET, lanes=1).aggregate("b", "carrier", FLEET, lanes=1)
    )
    retired = [run.process([leg(0, carrier="UA", partition=lane)]).retired for lane in range(3)]
    assert retired == [0, 2, 2]
    assert run.report.retired == 4


def test_an_empty_batch_moves_nothing():
    run = runner(fleet())
    run.process(batch(1))
    run.process([])
    assert run.run.start == {(TOPIC, 0): 2}


def tombstone(offset, key=b"N1"):
    return Record(TOPIC, 0, offset, key, None, topic_id=TOPIC_ID)


@pytest.mark.parametrize("topic", [bare(), wrapped()], ids=["bare", "enveloped"])
def test_tombstones_are_skipped_and_counted_and_progress_goes_past_them(topic):
    run = runner(Flow("fleet").source(topic).aggregate("a", "tail", Fields(n=count())))
    report = run.process([tombstone(0), tombstone(1, None)])
    assert (report.records, report.tombstones, report.reasons) == (2, 2, {})
    assert (run.dead_letters, run.results("a"), run.run.start) == ([], {}, {(TOPIC, 0): 2})
    run.process([tombstone(2)])
    assert run.report.tombstones == 3


class Deletions:
    """Counts the tombstones of a key, and its other records."""

    def zero(self):
        return {"deleted": 0, "written": 0}

    def fold(self, state, element):
        state["deleted" if element.value is None else "written"] += 1
        return state


@pytest.mark.parametrize("topic", [bare, wrapped])
def test_a_flow_that_asks_for_tombstones_gets_them_with_none_as_value_and_their_own_coordinates(topic):
    flow = Flow("fleet").source(topic(tombstones="element")).aggregate("a", lambda one: one.key, Deletions())
    store = fresh_store()
    run = runner(flow, store)
    written = leg(1) if topic is bare else chained(1, hop("raw", 0, 7))
    report = run.process([tombstone(0), written, tombstone(2)])
    assert states(run, "a") == {"N1": {"deleted": 2, "written": 1}}
    assert f"{TOPIC}:0#{TOPIC_ID}" in run.states("a")[b"N1"].histories.lanes
    assert report.tombstones == 0
    again = runner(flow, store)
    again.process([tombstone(0), tombstone(2)])
    assert states(again, "a") == {"N1": {"deleted": 2, "written": 1}}


def test_an_expression_over_a_tombstone_is_a_dead_letter():
    flow = Flow("fleet").source(bare(tombstones="element")).filter(pl.col("minutes") > 0)
    run = runner(flow.aggregate("a", lambda one: one.key, Deletions()))
    run.process([tombstone(0)])
    assert [letter.reason for letter in run.dead_letters] == [Reason.MISSING_FIELD]


def test_a_flow_of_columns_that_asks_for_tombstones_has_a_key_that_they_have():
    flow = Flow("fleet").source(bare(tombstones="element")).aggregate("a", "tail", Fields(n=count()))
    with pytest.raises(FlowError, match=r"passes tombstones to the flow.*key it by '_key' or by a function"):
        runner(flow)
    by_key = Flow("fleet").source(bare(tombstones="element")).aggregate("a", "_key", Fields(n=count()))
    run = runner(by_key)
    run.process([tombstone(0), tombstone(1)])
    assert states(run, "a") == {"N1": {"n": 2}}


def test_tombstones_as_elements_are_part_of_the_definition_and_other_policies_are_not():
    skipped, dead, handed = (
        Flow("f").source(bare(tombstones=policy)).aggregate("a", lambda one: one.key, Deletions()).stages[0].definition
        for policy in ("skip", "dead_letter", "element")
    )
    assert skipped == dead != handed


def test_a_key_that_comes_over_several_partitions_counts_one_new_lane_for_each_after_its_first():
    run = runner(Flow("fleet").source(bare()).aggregate("a", "tail", Fields(n=count()), co_partitioned=False))
    run.process([leg(0, "N1", partition=partition) for partition in range(3)])
    run.process([leg(1, "N1", partition=partition) for partition in range(4)])
    assert run.report.verdicts["a"] == Counter(accepted=1 + 3, new_lane=2 + 1)
