"""Outputs of publish steps after the last stage, when a record comes back of which only some items are missing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from tests.support.both import TOPIC_ID, Both
from tests.support.chain import Chain
from tests.support.letters import LEGS, Count, back, leg

BAD = -1
NOW = {"diverts": True, "fails": False}


@pytest.fixture(autouse=True)
def _now() -> None:
    NOW.update(diverts=True, fails=False)


ITEMS = pl.concat_list("v", pl.lit(1)).alias("v")


def diverts(element: Element[Any]) -> bool:
    return NOW["diverts"] and bool(element["v"] == BAD)


def fails(element: Element[Any]) -> bool:
    if NOW["fails"] and element["v"] == BAD:
        raise ValueError
    return True


Step = Callable[[Flow[Any]], Flow[Any]]
TAILS: dict[str, tuple[Step, int]] = {
    "before the flat-map": (lambda flow: flow.publish("out").flat_map(ITEMS).divert(diverts).filter(fails), 100),
    "before the diversion": (lambda flow: flow.flat_map(ITEMS).publish("out").divert(diverts).filter(fails), 200),
    "after it": (lambda flow: flow.flat_map(ITEMS).divert(diverts).filter(fails).publish("out"), 200),
}
FLOW = Flow("fleet").source(LEGS).aggregate("totals", "k", Count())


def fed(flow: Flow[Any], expected: int) -> Chain:
    """A flow that has diverted an item of its third record of a hundred."""
    chain = Chain(flow)
    for start in range(0, 100, 20):
        chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 20)))
    assert chain.folded() == (expected if expected == 100 else expected - 1)
    NOW["diverts"] = False
    return chain


def settled(chain: Chain, expected: int) -> bool:
    return (chain.folded(), chain.second.dead_letters, chain.first.run.ledger.listed) == (expected, [], {})


@pytest.mark.parametrize("where", TAILS)
def test_only_a_diverted_item_is_published_when_it_comes_back(where: str) -> None:
    tail, expected = TAILS[where]
    chain = fed(tail(FLOW), expected)
    for n in range(2):
        chain.process(back(chain.first.dead_letters[0], 100 + n, "fleet", n))
        assert len(chain.first.outputs) == expected
    assert settled(chain, expected)


@pytest.mark.parametrize("where", TAILS)
@pytest.mark.parametrize("again", ["fails", "diverts"])
def test_a_diverted_item_that_is_rejected_again_is_published_once_when_it_comes_back(where: str, again: str) -> None:
    tail, expected = TAILS[where]
    chain = fed(tail(FLOW), expected)
    NOW[again] = True
    chain.process(back(chain.first.dead_letters[-1], 100, "fleet"))
    assert len(chain.first.dead_letters) == 2
    NOW[again] = False
    for n in range(2):
        chain.process(back(chain.first.dead_letters[n], 101 + n, "fleet", n))
    assert len(chain.first.outputs) == expected
    assert settled(chain, expected)


@pytest.mark.parametrize("where", TAILS)
@pytest.mark.parametrize("again", ["fails", "diverts", ""])
def test_the_vectorised_path_publishes_the_same(where: str, again: str) -> None:
    tail, expected = TAILS[where]
    both = Both(tail(FLOW))

    def process(*records: Record) -> None:
        both.process([replace(one, topic_id=TOPIC_ID) for one in records])

    for start in (0, 50):
        process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 50)))
    NOW["diverts"] = False
    if again:
        NOW[again] = True
        process(back(both.dead_letters[-1], 100, "fleet"))
        NOW[again] = False
    for n in range(2):
        process(back(both.dead_letters[-1], 101 + n, "fleet", n))
    assert len(both.memory.outputs) == expected
    assert both.memory.run.ledger.listed == {}


@pytest.mark.parametrize("where", TAILS)
def test_a_record_that_is_rejected_as_a_whole_and_then_loses_an_item_is_published_once(where: str) -> None:
    tail, expected = TAILS[where]
    NOW.update(diverts=False, fails=True)
    chain = Chain(tail(FLOW))
    chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(100)))
    NOW.update(diverts=True, fails=False)
    chain.process(back(chain.first.dead_letters[-1], 100, "fleet"))
    assert chain.first.dead_letters[-1].items == ((0,),)
    NOW["diverts"] = False
    for n in range(2):
        chain.process(back(chain.first.dead_letters[n], 101 + n, "fleet", n))
    assert len(chain.first.outputs) == expected
    assert settled(chain, expected)
