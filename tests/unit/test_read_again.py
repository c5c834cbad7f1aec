"""A record that is read again after a crash, although the ledger lists it: the code was fixed in between."""

from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.per_message.ledger import Entry
from aggregations.run.memory import MemoryRunner
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from tests.simulation.faults import Crash, crash
from tests.simulation.redriven import EVENTS, READERS, back, broken, event, published, step
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

ONE = Fields(n=count())
EVENT = Flow("f").source(EVENTS).map(tier=pl.lit(1))
FLOWS: dict[str, tuple[str, Flow[Any]]] = {
    "a step": ("step", EVENT.aggregate("a", "k", ONE).map(step).aggregate("b", "k", ONE)),
    "outputs before a step": ("step", EVENT.publish("out").map(step).aggregate("a", "k", ONE)),
    "outputs": ("end", EVENT.aggregate("a", "k", ONE).publish("out", value=published)),
    "outputs without a stage": ("end", EVENT.publish("out", value=published)),
}
LISTED = {"a step": ["b"], "outputs before a step": ["a", "a>"], "outputs": ["end"], "outputs without a stage": ["end"]}


@pytest.mark.parametrize("name", FLOWS)
def test_its_dead_letter_is_a_copy_and_a_reader_of_its_outputs_is_exact(name):
    place, flow = FLOWS[name]
    urls, outputs, letters = dict.fromkeys(flow.stage_names, fresh_store()), [], []

    def processed(fault, records):
        runner = MemoryRunner(flow, urls)
        runner.run.start_at("t", TOPIC_ID, {0: 0} | runner.run.positions("t"))
        try:
            with faults.use(Injector([Fault.parse(one) for one in fault], crash)):
                runner.process(records)
        except Crash:
            pass
        outputs.extend(runner.outputs)
        letters.extend(runner.dead_letters)
        return runner

    log = [event(0, 0, "A", 1000, place), event(1, 1, "A", 1000, "")]
    with broken():
        processed(["publish.before"], log)  # from here on nothing is known to be a first delivery
        crashed = processed(["publish.after"], log)
    assert [letter.record.offset for letter in letters] == [0]
    assert crashed.run.ledger.listed
    again = processed([], log)
    assert not again.run.ledger.listed
    last = processed([], [back(flow, letters[0], 2)])
    assert [one for stage in flow.stages for one in last.results(stage.name).values()] == [{"n": 2}] * len(flow.stages)
    assert len(letters) == 1
    for reader in READERS if outputs else ():
        run = MemoryRunner(reader, {"all": fresh_store()})
        for offset, one in enumerate(outputs):
            run.process([Record("out", 0, offset, one.key, one.value, topic_id="O1")])
        assert [one["n"] for one in run.results("all").values()] == [2]
        assert not run.dead_letters


@pytest.mark.parametrize("name", FLOWS)
def test_it_is_struck_from_the_ledger_on_both_paths(name):
    _, flow = FLOWS[name]
    both = Both(flow)
    listed = {Entry(stage, "!t:0#T1", (0,)) for stage in LISTED[name]}
    for run in (both.memory.run, both.run):
        run.list_dead(listed)
    both.process([event(0, 0, "A", 1000, ""), event(1, 1, "A", 1000, "")])
    assert not both.memory.run.ledger.listed
