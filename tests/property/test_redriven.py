"""Broken, fixed and redriven: a flow has what it would have if its code, or its records, had never been broken."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping
from aggregations.per_message import dead_letters, judging, passing, stage
from aggregations.per_message.ledger import dead_entry
from aggregations.per_message.passing import passed_again
from aggregations.report import DeadLetter
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, decode, encode
from envelope.deadletter import DeadLetterHeaders, Form
from envelope.filters import EventIdFilter, ProducerFilter, Scope, SequenceFilter, from_value
from envelope.filters.arrival import REDRIVEN, judge_late
from jobs.dead_letters.redrive import Mend, redriven
from tests.simulation.patch import Patch, patched
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

EVENTS = Topic("t", Json({"k": str, "m": str, "fails": str, "at": int}), time="at")
TABLE = Topic("tab", Json({"c": str}), envelope=False)
ORDERS = Topic("orders", Json({"n": int, "cents": int}), envelope=False)
BROKEN = {"on": False}
PLACES = ("", "", "step", "two", "end")
"""Where a record fails while the code is broken; most do not."""


@contextmanager
def broken() -> Iterator[None]:
    BROKEN["on"] = True
    try:
        yield
    finally:
        BROKEN["on"] = False


def fail(element: Element[Any], place: str) -> None:
    if BROKEN["on"] and element["fails"] == place:
        raise ValueError(place)


def step(element: Element[Any]) -> Any:
    fail(element, "step")
    return element.value


def published(element: Element[Any]) -> bytes:
    fail(element, "end")
    return json.dumps({"k": element["k"], "tier": element["tier"]}).encode()


class Count:
    """Counts elements, and those of each tier."""

    def zero(self) -> Any:
        return {}

    def fold(self, state: Any, element: Element[Any]) -> Any:
        fail(element, "two")
        tier = str(element["tier"])
        return {**state, tier: state.get(tier, 0) + 1}


def tiers(element: Element[Any], state: Any) -> Iterator[dict[str, Any]]:
    """As many items as the state says: the third event of a key has none."""
    for n in range(state["n"] % 3):
        yield {**element.value, "tier": state["n"] + n}


def twice(element: Element[Any]) -> list[Any]:
    return [element.value, {**element.value, "tier": -2}]


COLUMNS: dict[str, Any] = {"k": "k", "m": "m", "fails": "fails", "tier": pl.col("new.n") + pl.col("old.n")}
EMITS: dict[str, Any] = {
    "the element": None,
    "columns": Emit(**COLUMNS),
    "some columns": Emit(**COLUMNS).when(pl.col("new.n") % 3 != 0),
    "a function": tiers,
}


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    emit = EMITS[draw(st.sampled_from(sorted(EMITS)))]
    windows: dict[str, Any] = {"window": hopping("10s", "5s")} if draw(st.booleans(), label="windows") else {}
    later: dict[str, Any] = {"window": hopping("10s", "5s", lateness="1d")} if windows else {}
    flow: Flow[Any] = Flow("f").source(EVENTS)
    flow = flow.aggregate("one", "k", Fields(n=count()), emit=emit, **windows)
    if emit is None:
        flow = flow.map(tier=pl.lit(-1))
    if emit is not tiers and draw(st.booleans(), label="lookup"):
        flow = flow.lookup("tb", TABLE, key="m", columns=["c"])
    if draw(st.booleans(), label="a flat map"):
        flow = flow.flat_map(twice)
    if draw(st.booleans(), label="a step"):
        flow = flow.map(step)
    key: Any = draw(st.sampled_from(["k", lambda element: str(element["tier"])]))
    flow = flow.aggregate("two", key, Count(), **later)
    return flow.publish("out", value=published) if draw(st.booleans(), label="outputs") else flow


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


def event(offset: int, root: int, key: str, seconds: int, fails: str) -> Record:
    payload = json.dumps({"k": key, "m": "x", "fails": fails, "at": seconds * 1000}).encode()
    hop = Hop("raw", 0, root, via="rep", index=0, topic_id="R1")
    value = encode(Envelope(payload, chain=(hop,), key=b"k"))
    return Record("t", 0, offset, b"k", value, seconds * 1000, topic_id=TOPIC_ID)


def back(flow: Flow[Any], dead: DeadLetter, offset: int, mend: Mend | None = None, *, asserted: bool = False) -> Record:
    """A dead letter as `headwater redrive` brings it back."""
    one = dead.record
    facts = DeadLetterHeaders(
        *(one.topic, one.partition, one.offset, dead.reason),
        topic_id=one.topic_id,
        stage=dead.stage,
        application=flow.name,
        hole=dead.hole,
        items=dead.items,
        form=Form.ENVELOPE if flow.source_of(one.topic).envelope else Form.PAYLOAD,
        timestamp_ms=one.timestamp_ms,
    )
    value = redriven(one.key, one.value, (), facts, Hop("dead", 0, offset, topic_id="D"), mend, asserted=asserted)
    return Record(one.topic, one.partition, offset, one.key, value, one.timestamp_ms, one.headers, one.topic_id)


def filled_table(both: Both | MemoryRunner, flow: Flow[Any]) -> None:
    if len(flow.parts) > 1:
        both.process([Record("tab", 0, 0, b"x", b'{"c": "A"}', 1, topic_id=TOPIC_ID)])


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


def _by_the_present_state(stage: Any, state: Any, kept: Any, arrival: Any, types: Any) -> Any:
    if arrival.sibling or stage.emit is None:
        return passed_again(stage, state, kept, arrival, types)
    return passing._made_now(stage, state, arrival, types)


def _of_the_whole_record(*arguments: Any, fixed: int = 0, **options: Any) -> Any:
    return dead_entry(*arguments, **options)


def _missing(rule: Any, state: Any, arrival: Any, *, asserted: bool = False) -> Any:
    ruling, state = judge_late(rule, state, arrival)
    return (ruling if ruling.forward else REDRIVEN), state


PLANTED: dict[str, tuple[Callable[[], Any], Patch]] = {
    "emit gets the state as it is now": (
        lambda: FLOWS(check_flow),
        (stage, "passed_again", _by_the_present_state),
    ),
    "the state from before a record is not kept": (
        lambda: FLOWS(check_flow),
        (stage, "keeping", lambda *_: {}),
    ),
    "a dead letter stands for items that were not passed on": (
        lambda: FLOWS(check_flow),
        (dead_letters, "dead_entry", _of_the_whole_record),
    ),
    "a filter takes every dead letter for missing": (
        lambda: BY_NUMBER(check_numbers),
        (judging, "judge_late", _missing),
    ),
    "a filter does not note what it skips": (
        lambda: BY_NUMBER(check_numbers),
        (judging, "tracking", lambda rule, state, on: state),
    ),
}


SEEDS: dict[str, int] = {"a dead letter stands for items that were not passed on": 5}
"""Where the search for a rare one begins."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    searched, patch = PLANTED[name]
    search = settings(max_examples=300, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)
    with patched([patch]), pytest.raises(AssertionError):
        search(seed(SEEDS.get(name, 0))(searched()))()
