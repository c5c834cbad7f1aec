"""Outputs of publish steps before a stage, when records are rejected and come back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.run.discard import fill_holes
from aggregations.run.memory import MemoryRunner
from envelope import decode
from envelope.redrive import HEALED
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.errors import Transient
from tests.support.both import TOPIC_ID, Both
from tests.support.chain import Chain
from tests.support.letters import LEGS, Count, back, leg, runner

BROKEN = {"now": True}
BAD = -1
Step = Callable[[Flow[Any]], Flow[Any]]


@pytest.fixture(autouse=True)
def _broken() -> None:
    BROKEN["now"] = Fold.broken = True


def fails(element: Element[Any]) -> bool:
    if BROKEN["now"] and element["v"] == BAD:
        raise ValueError
    return True


def key(element: Element[Any]) -> Any:
    return element["k"] if fails(element) else None


class Fold(Count):
    broken = True

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if self.broken:
            fails(element)
        return {"n": state["n"] + 1}


FAILING: dict[str, Step] = {
    "before it": lambda flow: flow.filter(fails).publish("out").aggregate("totals", "k", Count()),
    "in it": lambda flow: flow.publish("out", key=key).aggregate("totals", "k", Count()),
    "after it": lambda flow: flow.publish("out").filter(fails).aggregate("totals", "k", Count()),
    "key": lambda flow: flow.publish("out").aggregate("totals", key, Count()),
    "later stage": lambda flow: (
        flow.aggregate("first", "k", Count()).filter(fails).publish("out").aggregate("totals", "k", Count())
    ),
}


def fed(flow: Flow[Any]) -> Chain:
    """A flow that has rejected its third record of a hundred."""
    chain = Chain(flow)
    for start in range(0, 100, 20):
        chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 20)))
    assert chain.folded() == 99
    BROKEN["now"] = False
    return chain


@pytest.mark.parametrize("where", FAILING)
def test_what_was_rejected_before_a_stage_is_published_as_missing_and_the_next_flow_folds_it_once(where: str) -> None:
    chain = fed(FAILING[where](Flow("fleet").source(LEGS)))
    [died] = chain.first.dead_letters
    for n in range(3):
        chain.process(back(died, 100 + n, "fleet", n))
    chain.process(leg(103, 3, v=BAD))
    assert chain.first.results("totals") == {b"K": {"n": 100}}
    assert (chain.folded(), chain.second.dead_letters) == (100, [])
    assert chain.first.run.ledger.listed == {}


@pytest.mark.parametrize("where", [where for where in FAILING if where != "later stage"])
def test_a_plain_copy_of_it_takes_its_place_in_the_next_flow_too(where: str) -> None:
    chain = fed(FAILING[where](Flow("fleet").source(LEGS)))
    [died] = chain.first.dead_letters
    chain.process(leg(100, 3, v=BAD))
    assert (chain.first.results("totals"), chain.folded()) == ({b"K": {"n": 100}}, 100)
    chain.process(back(died, 101, "fleet"), leg(102, 3, v=BAD))
    assert (chain.folded(), chain.second.dead_letters) == (100, [])


def test_what_was_published_and_then_failed_in_the_fold_is_not_published_again() -> None:
    chain = Chain(Flow("fleet").source(LEGS).publish("out").aggregate("totals", "k", Fold()))
    for start in range(0, 100, 20):
        chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 20)))
    BROKEN["now"] = False
    chain.process(back(chain.first.dead_letters[0], 100, "fleet"))
    assert chain.first.results("totals") == {b"K": {"n": 100}}
    assert len(chain.first.outputs) == chain.folded() == 100


@pytest.mark.parametrize("application", ["another flow", "fleet"])
def test_a_dead_letter_of_another_reader_or_of_a_later_stage_is_not_published_again(application: str) -> None:
    flow = Flow("fleet").source(LEGS).publish("out").aggregate("first", "k", Count()).filter(fails)
    chain = Chain(flow.aggregate("totals", "k", Count()))
    chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(100)))
    BROKEN["now"] = False
    chain.process(back(chain.first.dead_letters[0], 100, application))
    assert chain.first.results("totals") == {b"K": {"n": 100 if application == "fleet" else 99}}
    assert len(chain.first.outputs) == chain.folded() == 100


def test_a_diverted_item_is_published_when_it_comes_back_and_its_siblings_are_not() -> None:
    def items(element: Element[Any]) -> list[dict[str, Any]]:
        return [{"k": "K", "v": element["v"]}, {"k": "K", "v": 1}]

    flow = Flow("fleet").source(LEGS).flat_map(items).publish("out")
    flow = flow.divert(lambda element: BROKEN["now"] and element["v"] == BAD)
    chain = Chain(flow.aggregate("totals", lambda element: element["k"], Count()))
    chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(100)))
    assert chain.folded() == 199
    BROKEN["now"] = False
    chain.process(back(chain.first.dead_letters[0], 100, "fleet"))
    assert chain.first.results("totals") == {b"K": {"n": 200}}
    assert len(chain.first.outputs) == chain.folded() == 200


def test_what_was_folded_late_and_then_rejected_is_published_when_it_comes_back() -> None:
    flow = Flow("fleet").source(LEGS).aggregate("first", "k", Fold()).filter(fails).publish("out")
    chain = Chain(flow.aggregate("totals", "k", Count()))
    for start in range(0, 100, 20):
        chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 20)))
    Fold.broken = False
    chain.process(leg(100, 3, v=BAD))
    assert chain.first.run.ledger.listed.keys() == {"totals", "totals>"}
    BROKEN["now"] = False
    chain.process(back(chain.first.dead_letters[-1], 101, "fleet"))
    assert chain.first.results("totals") == {b"K": {"n": 100}}
    assert (chain.folded(), chain.second.dead_letters, chain.first.run.ledger.listed) == (100, [], {})


def test_an_output_that_a_crash_repeats_is_folded_once_by_the_next_flow() -> None:
    chain = fed(FAILING["before it"](Flow("fleet").source(LEGS)))
    letter = back(chain.first.dead_letters[0], 100, "fleet")
    with faults.use(Injector([Fault.parse("manifest.error")])), pytest.raises(Transient):
        chain.first.process([letter])
    chain.read()
    stores, outputs = chain.first.run.urls, chain.first.outputs
    chain.first = MemoryRunner(chain.flow, stores, topic_ids={"legs": "T"})
    chain.first.outputs += outputs
    chain.process(letter)
    assert len(chain.first.outputs) == 101
    assert (chain.folded(), chain.second.dead_letters) == (100, [])


def test_a_discard_removes_what_was_not_published_from_the_ledger() -> None:
    run = runner(FAILING["after it"](Flow("fleet").source(LEGS)))
    run.process([leg(0), leg(1, v=BAD), Record("legs", 0, 2, b"K", b"no envelope", topic_id="T")])
    unreadable, readable = run.dead_letters
    assert {stage: len(groups) for stage, groups in run.run.ledger.listed.items()} == {"totals": 2, "totals>": 2}
    given_up = back(readable, 1, "fleet", letter=0)
    fill_holes(run.run, [given_up], unreadable=[unreadable.record.node], apply=True)
    assert run.run.ledger.listed == {}
    BROKEN["now"] = False
    run.process([back(readable, 3, "fleet")])
    assert (len(run.outputs), run.results("totals")) == (1, {b"K": {"n": 1}})


@pytest.mark.parametrize("where", ["before it", "after it", "key"])
def test_the_vectorised_path_publishes_the_same(where: str) -> None:
    both = Both(FAILING[where](Flow("fleet").source(LEGS)))

    def process(*records: Record) -> None:
        both.process([replace(one, topic_id=TOPIC_ID) for one in records])

    for start in (0, 50):
        process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 50)))
    BROKEN["now"] = False
    [died] = both.dead_letters
    process(back(died, 100, "another flow"))
    process(back(died, 101, "fleet"), leg(102, 3, v=BAD))
    process(back(died, 103, "fleet"))
    assert both.results("totals") == {b"K": {"n": 100}}
    assert both.memory.run.ledger.listed == {}
    outputs = both.memory.outputs
    assert (len({one.order for one in outputs}), len(outputs)) == (100, 101)  # the plain copy is published as such
    marked = [one.order for one in outputs if any(hop.via == HEALED for hop in decode(one.value).chain)]
    assert marked == [(103, 0)]


def test_an_output_before_a_flat_map_is_not_published_again_for_a_diverted_item() -> None:
    def items(element: Element[Any]) -> list[dict[str, Any]]:
        return [{"k": "K", "v": element["v"]}, {"k": "K", "v": 1}]

    flow = Flow("fleet").source(LEGS).publish("out").flat_map(items)
    flow = flow.divert(lambda element: BROKEN["now"] and element["v"] == BAD)
    chain = Chain(flow.aggregate("totals", lambda element: element["k"], Count()))
    chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(100)))
    BROKEN["now"] = False
    chain.process(back(chain.first.dead_letters[0], 100, "fleet"))
    assert chain.first.results("totals") == {b"K": {"n": 200}}
    assert len(chain.first.outputs) == chain.folded() == 100
    assert chain.first.run.ledger.listed == {}


def test_a_filter_that_drops_a_redriven_record_leaves_its_outputs_published_once_in_effect() -> None:
    flow = Flow("fleet").source(LEGS).publish("out").filter(fails).filter(lambda element: element["v"] != BAD)
    chain = fed(flow.aggregate("totals", "k", Count()))
    for n in range(2):
        chain.process(back(chain.first.dead_letters[0], 100 + n, "fleet", n))
    assert chain.first.results("totals") == {b"K": {"n": 99}}
    assert (chain.folded(), chain.second.dead_letters) == (100, [])


def test_an_item_that_is_diverted_when_its_rejected_record_comes_back_can_be_redriven() -> None:
    diverts = True

    def items(element: Element[Any]) -> list[dict[str, Any]]:
        return [{"k": "K", "v": 1}, {"k": "K", "v": element["v"]}]

    flow = Flow("fleet").source(LEGS).flat_map(items).publish("out").filter(fails)
    flow = flow.divert(lambda element: diverts and element["v"] == BAD)
    chain = Chain(flow.aggregate("totals", lambda element: element["k"], Count()))
    chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(100)))
    assert chain.folded() == 198
    BROKEN["now"] = False
    chain.process(back(chain.first.dead_letters[-1], 100, "fleet"))
    assert chain.first.dead_letters[-1].items == ((1,),)
    diverts = False
    for n in (1, 2):
        chain.process(back(chain.first.dead_letters[-1], 100 + n, "fleet", n))
    assert chain.first.results("totals") == {b"K": {"n": 200}}
    assert (chain.folded(), chain.second.dead_letters, chain.first.run.ledger.listed) == (200, [], {})
