"""Broken, fixed and redriven: a flow has what it would have if its code, or its records, had never been broken."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, decode, encode
from envelope.filters import EventIdFilter, ProducerFilter, Scope, SequenceFilter, from_value
from tests.simulation.patch import patched
from tests.simulation.redriven import BUGS, EMITS, PLACES, Shape, back, broken, event, row
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

ORDERS = Topic("orders", Json({"n": int, "cents": int}), envelope=False)


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    emit = draw(st.sampled_from(sorted(EMITS)))
    switches = ("windows", "lookup", "flat", "step", "tier", "outputs")
    return Shape(emit, **{name: draw(st.booleans(), label=name) for name in switches}).flow()


@st.composite
def batches(draw: st.DrawFn) -> list[list[Record]]:
    """Events, some of which a republisher sends again."""
    events = st.tuples(st.sampled_from("AB"), st.integers(1000, 1030), st.sampled_from(PLACES))
    found, sent = list[list[Record]](), list[tuple[str, int, str]]()
    offset = 0
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)):
        batch = []
        for _ in range(size):
            root = draw(st.integers(0, 4 * len(sent)), label="root")
            if root >= len(sent):
                root = len(sent)
                sent.append(draw(events))
            batch.append(event(offset, root, *sent[root]))
            offset += 1
        found.append(batch)
    return found


def filled_table(both: Both | MemoryRunner, flow: Flow[Any]) -> None:
    if len(flow.parts) > 1:
        both.process([row()])


def results(run: MemoryRunner) -> tuple[dict[bytes, Any], list[bytes]]:
    return run.results("two"), sorted(decode(one.value).payload for one in run.outputs if one.topic == "out")


def check_flow(flow: Flow[Any], found: list[list[Record]], data: st.DataObject) -> None:
    never = MemoryRunner(flow, {name: fresh_store() for name in flow.stage_names}, ends={})
    filled_table(never, flow)
    for batch in found:
        never.process(batch)
    both = Both(flow)
    filled_table(both, flow)
    fixed = data.draw(st.integers(0, len(found)), label="batches before the fix")
    with broken():
        for batch in found[:fixed]:
            both.process(batch)
    letters = data.draw(st.permutations(both.dead_letters), label="letters")
    offset, waiting = sum(map(len, found[:fixed])), list(letters)
    for batch in [*found[fixed:], list[Record]()]:
        now = data.draw(st.integers(0, len(waiting)), label="redriven now") if batch else len(waiting)
        both.process(
            [replace(one, offset=offset + n) for n, one in enumerate(batch)]
            + [back(flow, one, offset + len(batch) + n) for n, one in enumerate(waiting[:now])]
        )
        offset += len(batch) + now
        del waiting[:now]
    both.process([back(flow, one, offset) for one in letters[:1]])
    assert results(both.memory) == results(never)
    assert len(both.dead_letters) == len(letters)
    assert not both.memory.run.ledger.listed


FILTERS: dict[str, Any] = {
    "sequence": SequenceFilter(from_value("n")),
    "sequence by key": SequenceFilter(from_value("n"), scope_by=Scope.KEY),
    "ids": EventIdFilter(from_value("n"), timedelta(days=1)),
    "producer": ProducerFilter(),
}


def order(rule: str, offset: int, number: int, *, readable: bool, contiguous: bool = False) -> Record:
    payload = json.dumps({"n": number, "cents": 1 if readable else "oops"}).encode()
    if rule == "producer":
        one = Envelope(payload, key=b"k", producer="p", sequence=number, sequence_per_partition=contiguous)
        payload = encode(one)
    return Record("orders", 0, offset, b"k", payload, topic_id=TOPIC_ID)


def mended(key: bytes | None, value: bytes | None) -> bytes:
    assert value is not None
    try:
        payload = decode(value).payload
    except Exception:  # a topic without envelopes
        payload = value
    return payload.replace(b'"oops"', b"1")


def check_numbers(rule: str, steps: Sequence[int], first: int, again: int, size: int, data: st.DataObject) -> None:
    """A producer sends numbers, fails, and sends again from one that it has sent, or from the next one."""
    numbers = [sum(steps[: n + 1]) for n in range(len(steps))]
    sent = [*numbers[:first], *numbers[min(again, first) :]]
    readable = [data.draw(st.sampled_from([True, True, False])) for _ in sent]
    contiguous = set(steps) == {1} and data.draw(st.booleans(), label="contiguous")
    topic = ORDERS if rule != "producer" else Topic("orders", Json({"n": int, "cents": int}))
    flow = Flow("f").source(topic).deduplicate(FILTERS[rule])
    flow = flow.aggregate("all", "_key", Fields(n=count(), sum=total("n"), cents=total("cents")))
    both = Both(flow)
    records = [
        order(rule, offset, number, readable=fine, contiguous=contiguous)
        for offset, (number, fine) in enumerate(zip(sent, readable, strict=True))
    ]
    for start in range(0, len(records), size):
        both.process(records[start : start + size])
    offset = len(records)
    for dead in data.draw(st.permutations(both.dead_letters), label="letters"):
        both.process([back(flow, dead, offset, mended)])
        offset += 1
    assert both.results("all") == {b"k": {"n": len(numbers), "sum": sum(numbers), "cents": len(numbers)}}
    assert not both.memory.run.ledger.listed


FLOWS = given(flow=flows(), found=batches(), data=st.data())
BY_NUMBER = given(
    rule=st.sampled_from(sorted(FILTERS)),
    steps=st.lists(st.sampled_from([1, 1, 3]), min_size=1, max_size=6),
    first=st.integers(0, 6),
    again=st.integers(0, 6),
    size=st.integers(1, 20),
    data=st.data(),
)


@FLOWS
def test_a_flow_that_was_fixed_has_what_it_would_have_if_it_had_never_been_broken(**arguments: Any) -> None:
    check_flow(**arguments)


@BY_NUMBER
def test_a_number_is_passed_on_once_whichever_records_of_it_could_not_be_read(**arguments: Any) -> None:
    check_numbers(**arguments)


PLANTED: dict[str, Callable[[], Any]] = {
    name: (lambda: BY_NUMBER(check_numbers)) if name.startswith("a filter") else (lambda: FLOWS(check_flow))
    for name in BUGS
}


SEEDS: dict[str, int] = {"a dead letter stands for items that were not passed on": 5}
"""Where the search for a rare one begins."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    search = settings(max_examples=300, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)
    with patched([BUGS[name]]), pytest.raises(AssertionError):
        search(seed(SEEDS.get(name, 0))(PLANTED[name]()))()
