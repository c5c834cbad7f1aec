"""What the in-memory runner publishes, passes from stage to stage and shows to readers."""

import json
from dataclasses import replace

import pytest

from aggregations.definition.aggregates import count, last
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from envelope import Hop, decode
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.errors import Transient
from tests.support.pure import (
    COLUMNS,
    FLEET,
    TOPIC,
    bare,
    chained,
    fresh_store,
    hop,
    leg,
    runner,
    states,
    wrapped,
)


def outputs(run):
    return [(out.topic, out.key, json.loads(decode(out.value).payload), decode(out.value).chain) for out in run.outputs]


def test_what_is_published_behind_the_stages_has_the_whole_chain_and_no_duplicate():
    run = runner(
        Flow("f").source(wrapped()).aggregate("a", "tail", FLEET).publish("out", key="carrier", name="processor")
    )
    first = hop("raw", 0, 7)
    run.process([chained(4, first, carrier="UA"), chained(5, first, carrier="UA")])
    [(topic, key, payload, chain)] = outputs(run)
    assert (topic, key) == ("out", b"UA")
    assert payload == {**dict.fromkeys(COLUMNS), "tail": "N1", "carrier": "UA"}
    assert chain == (first, Hop(TOPIC, 0, 4, via="processor", index=0, rekeyed=True, topic_id="T1"))


def test_what_was_published_can_be_folded_by_another_flow_exactly_once():
    first = runner(
        Flow("f")
        .source(bare())
        .flat_map(lambda e: [e.value, e.value])
        .aggregate("a", "tail", Fields(n=count()))
        .publish(TOPIC + "2")
    )
    first.process([leg(n, minutes=1) for n in range(3)])
    second = runner(Flow("g").source(Topic(TOPIC + "2", bare().payload)).aggregate("b", "tail", FLEET))
    records = [Record(TOPIC + "2", 0, n, out.key, out.value, topic_id="T2") for n, out in enumerate(first.outputs * 2)]
    second.process(records)
    assert states(second, "b") == {"N1": {"n": 6, "m": 6}}


def test_what_is_published_before_a_stage_and_the_states_behind_it_go_out_together():
    run = runner(Flow("f").source(bare()).publish("passed").aggregate("a", "tail", FLEET).publish_states("states"))
    run.process([leg(0, minutes=1), leg(1, minutes=1)])
    assert [out.topic for out in run.outputs] == ["passed", "passed", "states"]


def test_the_headers_of_a_record_reach_the_functions_of_the_flow():
    run = runner(
        Flow("f")
        .source(bare(stable=["_headers"]))
        .filter(lambda e: ("kind", b"leg") in e.headers)
        .aggregate("a", "tail", FLEET)
    )
    run.process([replace(leg(0, minutes=1), headers=(("kind", b"leg"),)), leg(1, minutes=1)])
    assert states(run, "a") == {"N1": {"n": 1, "m": 1}}


class Running:
    def zero(self):
        return 0

    def fold(self, state, element):
        return state + element["minutes"]


def test_what_a_stage_emits_from_its_state_is_folded_once_by_the_next_one():
    flow = (
        Flow("f")
        .source(bare())
        .aggregate("sums", "tail", Running(), emit=lambda e, state: [{"carrier": e["carrier"], "sum": state}] * 2)
        .aggregate("last", "carrier", Fields(n=count(), top=last("sum")))
    )
    store, records = fresh_store(), [leg(n, carrier="UA", minutes=n) for n in range(5)]
    with faults.use(Injector([Fault.parse("persist:sums.error")])), pytest.raises(Transient):
        runner(flow, store).process(records[:3])
    run = runner(flow, store)
    run.process(records[:3])
    run.process(records)
    assert run.results("sums") == {b"N1": 10}
    assert states(run, "last") == {"UA": {"n": 10, "top": 10}}


def test_a_class_may_say_what_readers_see():
    class Half(Running):
        def result(self, state):
            return state / 2

    run = runner(Flow("f").source(bare()).aggregate("a", "tail", Half()))
    run.process([leg(1, minutes=3)])
    assert run.results("a") == {b"N1": 1.5}
    assert run.states("a")[b"N1"].fold == 3
