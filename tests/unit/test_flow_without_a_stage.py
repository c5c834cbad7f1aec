"""A flow without a stage: source, steps, publish. It keeps no states, but a manifest, an epoch and a ledger."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import FlowError, RunRefusedError
from aggregations.run.binding import bind
from aggregations.run.discard import fill_holes
from envelope import Reason, Siblings, decode
from envelope.redrive import HEALED
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.errors import Fenced, Transient
from tests.support.both import TOPIC_ID, Both
from tests.support.chain import Chain
from tests.support.letters import LEGS, back, leg, runner, url

BAD = -1
BROKEN = {"now": True}
Step = Callable[[Flow[Any]], Flow[Any]]


@pytest.fixture(autouse=True)
def _broken() -> None:
    BROKEN["now"] = True


def fails(element: Element[Any]) -> bool:
    if BROKEN["now"] and element["v"] == BAD:
        raise ValueError
    return True


def diverts(element: Element[Any]) -> bool:
    return BROKEN["now"] and bool(element["v"] == BAD)


def key(element: Element[Any]) -> Any:
    return element["k"] if fails(element) else None


ITEMS = pl.concat_list("v", pl.lit(1)).alias("v")
RELAY = Flow("relay").source(LEGS)
OTHER = Topic("other", Json({"k": str, "c": str, "v": int, "more": str}))
SHAPES: dict[str, Callable[[Step], Flow[Any]]] = {
    "one source": lambda step: step(RELAY),
    "two sources": lambda step: step(Flow("relay").source(LEGS, OTHER)),
    "two sources, before they meet": lambda step: step(RELAY).merge(Flow("side").source(OTHER)),
}
FAILING: dict[str, tuple[Step, int]] = {
    "before the publish step": (lambda flow: flow.filter(fails).publish("out"), 1),
    "in it": (lambda flow: flow.publish("out", key=key), 1),
    "after it": (lambda flow: flow.publish("out").filter(fails), 1),
    "an item of it": (lambda flow: flow.flat_map(ITEMS).filter(fails).publish("out"), 2),
    "an item that was published": (lambda flow: flow.flat_map(ITEMS).publish("out").filter(fails), 2),
    "a diversion": (lambda flow: flow.divert(diverts).publish("out"), 1),
    "a diversion behind it": (lambda flow: flow.publish("out").divert(diverts), 1),
}
DIVERTED: dict[str, Step] = {
    "before the publish step": lambda flow: flow.flat_map(ITEMS).divert(diverts).publish("out"),
    "after it": lambda flow: flow.flat_map(ITEMS).publish("out").divert(diverts),
}


def fed(flow: Flow[Any], items: int = 1) -> Chain:
    """A flow that has rejected its third record of a hundred."""
    chain = Chain(flow)
    for start in range(0, 100, 20):
        chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 20)))
    assert chain.folded() == 99 * items
    return chain


def settled(chain: Chain, expected: int) -> bool:
    return (chain.folded(), chain.second.dead_letters, chain.first.run.ledger.listed) == (expected, [], {})


def test_it_publishes_every_element_with_its_lineage_and_keeps_only_a_manifest() -> None:
    chain = Chain(RELAY.filter(pl.col("v") > 0).publish("out"))
    chain.process(*(leg(n, v=n % 2) for n in range(10)))
    outputs = [decode(one.value) for one in chain.first.outputs]
    assert [[(hop.topic, hop.offset, hop.via) for hop in one.chain] for one in outputs] == [
        [("raw", 100 + n, "rep"), ("legs", n, "relay")] for n in range(1, 10, 2)
    ]
    [(name, store)] = chain.first.run.distinct_stores()
    manifest = store.load_manifest(chain.first.run.ref)
    assert name == END_OF_FLOW
    assert manifest is not None
    assert manifest.positions["legs"][0].next_offset == 10
    assert manifest.kept == (END_OF_FLOW,)


def test_several_sources_are_published_each_with_the_lineage_of_its_topic_and_one_manifest() -> None:
    chain = Chain(SHAPES["two sources"](lambda flow: flow.publish("out")))
    chain.process(*(leg(n, topic=topic) for n in range(5) for topic in ("legs", "other")))
    outputs = [decode(one.value) for one in chain.first.outputs]
    assert sorted((one.chain[-1].topic, one.chain[-1].offset) for one in outputs) == [
        (topic, n) for topic in ("legs", "other") for n in range(5)
    ]
    assert {hop.via for one in outputs for hop in one.chain[1:]} == {"relay"}
    assert chain.folded() == 10
    assert [chain.first.run.positions(topic) for topic in ("legs", "other")] == [{0: 5}, {0: 5}]


def test_a_source_can_be_added_and_not_removed() -> None:
    store = url()
    one, two = (SHAPES[shape](lambda flow: flow.publish("out")) for shape in ("one source", "two sources"))
    with closing(runner(one, store)) as before:
        before.process([leg(0)])
    with closing(runner(two, store)) as after:
        after.process([leg(1), leg(0, topic="other")])
        assert len(after.outputs) == 2
    with pytest.raises(RunRefusedError, match="definition"):
        runner(one, store)


def test_the_next_run_resumes_after_the_manifest_and_fences_the_earlier_one() -> None:
    store, flow = url(), RELAY.publish("out")
    first = runner(flow, store)
    first.process([leg(0)])
    with closing(runner(flow, store)) as second:
        assert second.run.positions("legs") == {0: 1}
        with pytest.raises(Fenced):
            first.process([leg(1)])


def test_a_batch_that_is_repeated_publishes_the_same_lineages_and_the_next_flow_drops_them() -> None:
    chain = Chain(RELAY.flat_map(ITEMS).publish("out"))
    with faults.use(Injector([Fault.parse("manifest:end.error")])), pytest.raises(Transient):
        chain.process(leg(0), leg(1))
    chain.read()
    outputs, chain.first = chain.first.outputs, runner(chain.flow, chain.first.run.urls[END_OF_FLOW])
    chain.first.outputs += outputs
    assert chain.first.run.crashed
    chain.process(leg(0), leg(1))
    chain.process(leg(2, 0))  # the producer of `legs` sent it again
    assert len(chain.first.outputs) == 4 + 4 + 2
    assert chain.folded() == 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", FAILING)
def test_a_rejected_record_is_published_once_it_comes_back_and_the_next_flow_folds_it_once(
    shape: str, where: str
) -> None:
    step, items = FAILING[where]
    chain = fed(SHAPES[shape](step), items)
    [died] = chain.first.dead_letters
    assert (died.stage, died.hole) == (END_OF_FLOW, False)
    BROKEN["now"] = False
    for n in range(3):
        chain.process(back(died, 100 + n, "relay", n))
    chain.process(leg(103, 3, v=BAD))
    assert settled(chain, 100 * items)
    assert chain.first.report.verdicts == {END_OF_FLOW: {"copy": 2}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", FAILING)
def test_a_plain_copy_of_a_rejected_record_is_published_as_missing(shape: str, where: str) -> None:
    step, items = FAILING[where]
    chain = fed(SHAPES[shape](step), items)
    [died] = chain.first.dead_letters
    chain.process(leg(100, 3, v=BAD))  # rejected again: still missing
    BROKEN["now"] = False
    chain.process(leg(101, 3, v=BAD))
    chain.process(back(died, 102, "relay"))
    assert settled(chain, 100 * items)
    assert {hop.via for hop in decode(chain.first.outputs[-1].value).chain} >= {HEALED}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", FAILING)
@pytest.mark.parametrize("times", [1, 2])
def test_a_record_that_is_rejected_again_stays_missing(shape: str, where: str, times: int) -> None:
    step, items = FAILING[where]
    chain = fed(SHAPES[shape](step), items)
    for n in range(times):
        chain.process(back(chain.first.dead_letters[-1], 100 + n, "relay", n))
    assert len(chain.first.dead_letters) == 1 + times
    BROKEN["now"] = False
    for n, died in enumerate(chain.first.dead_letters[:]):
        chain.process(back(died, 110 + n, "relay", 10 + n))
    assert settled(chain, 100 * items)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", DIVERTED)
@pytest.mark.parametrize("copy", ["plain", "redriven"])
def test_only_a_diverted_item_is_missing(shape: str, where: str, copy: str) -> None:
    chain = Chain(SHAPES[shape](DIVERTED[where]))
    for start in range(0, 100, 20):
        chain.process(*(leg(n, v=BAD if n == 3 else 1) for n in range(start, start + 20)))
    assert chain.folded() == 199
    [died] = chain.first.dead_letters
    assert died.items == ((0,),)
    again = leg(100, 3, v=BAD) if copy == "plain" else back(died, 100, "relay")
    chain.process(again)  # diverted again
    assert chain.folded() == 199
    BROKEN["now"] = False
    for n, one in enumerate(chain.first.dead_letters[:]):
        chain.process(back(one, 101 + n, "relay", n))
    assert settled(chain, 200)


def test_a_dead_letter_of_another_reader_is_a_copy_that_is_not_published() -> None:
    chain = Chain(RELAY.publish("out"))
    chain.process(leg(0), leg(1))
    [read] = fed(RELAY.filter(fails).publish("out")).first.dead_letters
    chain.process(back(replace(read, record=leg(1)), 2, "another"))
    assert len(chain.first.outputs) == 2
    assert chain.first.report.verdicts == {END_OF_FLOW: {"copy": 1}}


def test_an_unreadable_record_is_published_as_retried_because_nothing_proves_that_it_is_the_first_delivery() -> None:
    chain = Chain(RELAY.publish("out"))
    chain.process(Record("legs", 0, 0, b"K", b"not an envelope", topic_id="T"))
    [died] = chain.first.dead_letters
    assert died.stage == ""
    chain.process(back(replace(died, record=leg(0), reason=Reason.CHECKSUM_MISMATCH), 1, "relay"))
    assert [hop.via for hop in decode(chain.first.outputs[-1].value).chain if hop.pass_through] == [
        "headwater.redrive",
        "headwater.redrive@relay!",
    ]
    assert settled(chain, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", FAILING)
def test_a_discarded_dead_letter_is_not_published_when_it_comes_back(shape: str, where: str) -> None:
    step, items = FAILING[where]
    chain = fed(SHAPES[shape](step), items)
    [died] = chain.first.dead_letters
    BROKEN["now"] = False
    redriven = back(died, 100, "relay")
    own = replace(redriven, offset=died.record.offset)
    assert list(fill_holes(chain.first.run, [own], apply=False).values()) == [1]
    assert list(fill_holes(chain.first.run, [own], apply=True).values()) == [1]
    chain.process(redriven)
    assert settled(chain, 99 * items)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", [*FAILING, *(f"diverted {one}" for one in DIVERTED)])
@pytest.mark.parametrize("copy", ["plain", "redriven"])
def test_the_vectorised_path_publishes_the_same(shape: str, where: str, copy: str) -> None:
    both = Both(SHAPES[shape](FAILING[where][0] if where in FAILING else DIVERTED[where.removeprefix("diverted ")]))

    def process(*records: Record) -> None:
        both.process([replace(one, topic_id=TOPIC_ID) for one in records])

    process(*(leg(n, v=BAD if n == 3 else 1) for n in range(10)))
    [died] = both.dead_letters
    for n in range(3):
        BROKEN["now"] = n == 0
        again = leg(100 + n, 3, v=BAD) if copy == "plain" else back(died, 100 + n, "relay", n)
        # The other one is the dead letter of another reader.
        process(again, back(replace(died, record=leg(9)), 150 + n, "another"), leg(200 + n))
    assert both.memory.run.ledger.listed == {}


def test_it_needs_one_store_which_is_named_end() -> None:
    flow = RELAY.publish("out")
    assert bind(flow, {}, "memory://a") == bind(flow, {END_OF_FLOW: "memory://a"}) == {END_OF_FLOW: "memory://a"}
    with pytest.raises(FlowError, match=r"no store for stage end: give --store URL or --store end=URL"):
        bind(flow, {})
    with pytest.raises(FlowError, match="it keeps no states; its store is 'end'"):
        bind(flow, {"totals": "memory://a"})


def test_a_stage_cannot_be_added_to_it_or_removed_without_a_new_generation() -> None:
    for first, second in ((lambda flow: flow, count_legs), (count_legs, lambda flow: flow)):
        store, flow = url(), RELAY.publish("out")
        with closing(runner(first(flow), store)) as before:
            before.process([leg(0)])
        with pytest.raises(RunRefusedError, match="the stage was added"):
            runner(second(flow), store)


def count_legs(flow: Flow[Any]) -> Flow[Any]:
    return flow.aggregate("legs", "k", Fields(n=count()))


def test_its_steps_may_change_but_not_what_decides_the_lineage() -> None:
    store, flow = url(), RELAY.publish("out")
    with closing(runner(flow, store)) as before:
        before.process([leg(0)])
    with closing(runner(RELAY.filter(pl.col("v") > 0).publish("out", key="c").publish("more"), store)) as after:
        assert after.run.positions("legs") == {0: 1}
    other: Flow[Any] = Flow("relay").source(Topic("legs", LEGS.payload, siblings=Siblings.GROUP)).publish("out")
    with pytest.raises(RunRefusedError, match="definition"):
        runner(other, store)


def test_ids_of_root_topics_are_noted_in_the_manifest() -> None:
    run = runner(RELAY.publish("out"))
    run.topic_ids = {"legs": "T", "raw": "R"}
    run.process([leg(0)])
    assert run.run.manifest is not None
    assert run.run.manifest.incarnations == {"legs": ("T",), "raw": ("R",)}
