"""Redriven records: what a dead letter stands for at the stages that hold its record, and at filters. Right values by hand."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping
from aggregations.per_message import passing
from aggregations.run.discard import fill_holes
from envelope import Reason, decode
from envelope.filters import (
    Arrival,
    Beyond,
    EventIdFilter,
    ProducerFilter,
    SequenceFilter,
    SessionWindows,
    Stamp,
    TimeWindows,
    deduplicate_by_key,
    distinct,
    from_value,
)
from envelope.filters.arrival import judge_late, tracking
from envelope.filters.skipped import RANGES, Skipped
from tests.property.test_redriven import mended
from tests.simulation.redriven import Count, back, broken, fail, step
from tests.support.both import TOPIC_ID, Both

ORDERS = Topic("orders", Json({"k": str, "fails": str, "tier": int}), envelope=False)
EVENTS = Topic("t", Json({"k": str, "m": str, "fails": str, "at": int, "tier": int}), envelope=False, time="at")
TABLE = Topic("tab", Json({"c": str}), envelope=False)


def order(offset: int, fails: str = "", **columns: Any) -> Record:
    value = json.dumps({"k": "ada", "fails": fails, "tier": 0, **columns}).encode()
    return Record("orders", 0, offset, b"ada", value, topic_id=TOPIC_ID)


def at(offset: int, seconds: int, fails: str = "") -> Record:
    value = {"k": "k", "m": "x", "fails": fails, "at": seconds * 1000, "tier": 0}
    return Record("t", 0, offset, b"k", json.dumps(value).encode(), seconds * 1000, topic_id=TOPIC_ID)


def third_order(element: Element[Any], state: Any) -> Iterator[dict[str, Any]]:
    if state["n"] == 3:
        yield element.value


def process(both: Both, *records: Record) -> None:
    for one in records:
        both.process([one])


def test_what_a_function_emitted_of_an_order_is_emitted_again_after_two_more_orders() -> None:
    flow = Flow("regulars").source(ORDERS).aggregate("customer", "k", Fields(n=count()), emit=third_order)
    both = Both(flow.aggregate("regulars", lambda element: "all", Count()))
    with broken():
        process(both, order(0), order(1), order(2, "two"), order(3), order(4))
    [dead] = both.dead_letters
    process(both, back(both.flow, dead, 5), back(both.flow, dead, 6))
    assert both.results("regulars") == {b"all": {"0": 1}}
    assert both.memory.report.verdicts["regulars"] == {"rejected": 1, "redriven": 1, "duplicate": 1}


@pytest.mark.parametrize("size", [1, 25])
def test_an_order_is_counted_in_the_tier_that_it_had_when_its_fold_failed(size: int) -> None:
    emit = Emit(fails="fails", tier=pl.col("new.n") // 10)
    flow = Flow("tiers").source(ORDERS).aggregate("customer", "k", Fields(n=count()), emit=emit)
    both = Both(flow.aggregate("tier", "tier", Count()))
    orders = [order(offset, "two" if offset == 4 else "") for offset in range(25)]
    with broken():
        for start in range(0, 25, size):
            both.process(orders[start : start + size])
    process(both, back(both.flow, both.dead_letters[0], 25))
    assert both.results("tier") == {b"0": {"0": 9}, b"1": {"1": 10}, b"2": {"2": 6}}


def test_a_condition_of_emit_is_that_of_the_state_from_before_the_record() -> None:
    emit = Emit(fails="fails", tier="new.n").when(pl.col("new.n") % 2 == 0)
    flow = Flow("even").source(ORDERS).flat_map(lambda element: [element.value, element.value])
    flow = flow.aggregate("customer", "k", Fields(n=count()), emit=emit).map(step)
    both = Both(flow.aggregate("tier", lambda element: "all", Count()))
    with broken():
        process(both, order(0, "step"), order(1))
    process(both, back(both.flow, both.dead_letters[0], 2))
    assert both.results("tier") == {b"all": {"2": 1, "4": 1}}


def test_sessions_emit_again_what_they_were_when_the_record_arrived() -> None:
    def sizes(element: Element[Any], state: Any) -> list[dict[str, Any]]:
        return [{**element.value, "tier": state["n"]}]

    flow = Flow("s").source(EVENTS)
    flow = flow.aggregate("one", "k", Fields(n=count()), window=session("10s"), emit=sizes)
    both = Both(flow.aggregate("two", lambda element: "all", Count()))
    with broken():
        process(both, at(0, 1000), at(1, 1005, "two"), at(2, 1006), at(3, 1007))
    process(both, back(both.flow, both.dead_letters[0], 4))
    assert both.results("two") == {b"all": {"1": 1, "2": 1, "3": 1, "4": 1}}


def test_the_states_from_before_rejected_records_are_kept_until_these_are_settled() -> None:
    flow = Flow("regulars").source(ORDERS).aggregate("customer", "k", Fields(n=count()), emit=third_order)
    both = Both(flow.aggregate("regulars", lambda element: "all", Count()))
    with broken():
        process(both, order(0), order(1), order(2, "two"), order(3))
    assert both.memory.states("customer")[b"ada"].kept == {"orders:0#T1": {(2,): {"n": 2}}}
    process(both, order(4), back(both.flow, both.dead_letters[0], 5))
    assert not both.memory.run.ledger.listed
    process(both, order(6))
    assert not both.memory.states("customer")[b"ada"].kept


def test_discarded_letters_are_no_longer_waited_for() -> None:
    flow = Flow("regulars").source(ORDERS).aggregate("customer", "k", Fields(n=count()), emit=third_order)
    both = Both(flow.aggregate("regulars", lambda element: "all", Count()))
    with broken():
        process(both, order(0), order(1), order(2, "two"))
    run = both.memory.run
    letter = both.dead_letters[0]
    given_up = back(both.flow, letter, letter.record.offset)
    assert fill_holes(run, [given_up], apply=True) == {letter.record.node: 1}
    assert not run.ledger.listed
    process_alone = both.memory.process([order(3)])
    assert process_alone.verdicts["customer"] == {"accepted": 1}
    assert not both.memory.states("customer")[b"ada"].kept


def test_a_letter_whose_state_is_not_kept_any_more_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "KEPT_BYTES", 0)
    flow = Flow("regulars").source(ORDERS).aggregate("customer", "k", Fields(n=count()), emit=third_order)
    both = Both(flow.aggregate("regulars", lambda element: "all", Count()))
    with broken():
        process(both, order(0), order(1), order(2, "two"), order(3))
    process(both, back(both.flow, both.dead_letters[0], 4))
    assert not both.results("regulars")
    again = both.dead_letters[1]
    assert (again.stage, again.reason, again.hole) == ("regulars", Reason.FOLD_FAILED, True)
    assert again.detail == "stage customer no longer has the state from before it, which emit= needs"
    assert both.memory.run.ledger.listed


def test_kept_states_give_way_from_the_earliest_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "KEPT_BYTES", 10)
    waiting = frozenset({("g", 1), ("g", 2), ("g", 3)})
    kept = passing.keeping({"g": {(1,): "1234", (2,): "1234", (9,): "1234"}}, [], waiting)
    assert kept == {"g": {(2,): "1234"}}


def closed_window(flow: Flow[Any]) -> Both:
    """An event of 1007 s whose older window is closed fails behind the stage, and is redriven."""
    both = Both(flow)
    with broken():
        process(both, at(0, 1012), at(1, 1007, "any"))
    process(both, back(flow, both.dead_letters[0], 2))
    return both


def any_step(element: Element[Any]) -> Any:
    fail(element, "any")
    return element.value


class AnyCount(Count):
    def fold(self, state: Any, element: Element[Any]) -> Any:
        fail(element, "any")
        return super().fold(state, element)


def any_value(element: Element[Any]) -> bytes:
    return json.dumps(any_step(element)["at"]).encode()


WINDOWED = Flow("w").source(EVENTS).aggregate("one", "k", Fields(n=count()), window=hopping("10s", "5s"))


@pytest.mark.parametrize(
    "flow",
    [
        WINDOWED.publish("out").map(any_step).aggregate("two", lambda element: "all", Count()),
        WINDOWED.publish("out").aggregate("two", pl.lit("all"), AnyCount()),
        WINDOWED.publish("out").aggregate("two", pl.lit("all"), AnyCount()).publish("end"),
    ],
    ids=["a step", "the last fold", "a fold before outputs"],
)
def test_what_a_closed_window_did_not_pass_on_is_not_passed_on_again(flow: Flow[Any]) -> None:
    both = closed_window(flow)
    assert both.results("two") == {b"all": {"0": 3}}
    published = [decode(one.value).chain[-1].index for one in both.memory.outputs if one.topic == "out"]
    assert sorted(index or 0 for index in published) == [0, 1, 1]


def test_what_a_closed_window_did_not_pass_on_is_not_published_after_the_last_stage() -> None:
    both = closed_window(WINDOWED.publish("out", value=any_value))
    assert sorted(decode(one.value).payload for one in both.memory.outputs) == [b"1007000", b"1012000", b"1012000"]


@pytest.mark.parametrize("late", ["drop", "dead_letter"])
def test_behind_a_lookup_a_closed_window_does_not_settle_a_letter_of_an_open_one(late: Any) -> None:
    flow = Flow("l").source(EVENTS).aggregate("one", "k", Fields(n=count()))
    flow = flow.lookup("tb", TABLE, key="m", columns=["c"])
    both = Both(flow.aggregate("two", "c", AnyCount(), window=hopping("10s", "5s", late=late)))
    process(both, Record("tab", 0, 0, b"x", b'{"c": "A"}', 1, topic_id=TOPIC_ID))
    with broken():
        process(both, at(0, 1012), at(1, 1007, "any"))
    [dead] = [one for one in both.dead_letters if one.reason is Reason.FOLD_FAILED]
    process(both, back(both.flow, dead, 2))
    assert both.results("two")[b"A@1970-01-01T00:16:45Z"] == {"0": 2}
    assert not both.memory.run.ledger.listed


def test_a_closed_window_behind_emit_does_not_settle_the_hole_of_an_open_one() -> None:
    def numbered(element: Element[Any], state: Any) -> list[dict[str, Any]]:
        return [{**element.value, "tier": state["n"]}]

    flow = Flow("e").source(EVENTS).aggregate("one", "k", Fields(n=count()), emit=numbered)
    both = Both(flow.aggregate("two", lambda element: "all", AnyCount(), window=hopping("10s", "5s")))
    with broken():
        process(both, at(0, 1012), at(1, 1007, "any"), at(2, 1011))
    assert both.memory.run.ledger.listed == {"two<": {"t:0#T1": {(1, 0)}}}
    process(both, back(both.flow, both.dead_letters[0], 3))
    assert both.results("two")[b"all@1970-01-01T00:16:45Z"] == {"1": 1, "2": 1, "3": 1}
    assert not both.memory.run.ledger.listed


NUMBERS = Topic("orders", Json({"n": int, "cents": int}), envelope=False)
BY_NUMBER = Flow("F").source(NUMBERS).deduplicate(SequenceFilter(from_value("n")))
COUNTED = BY_NUMBER.aggregate("all", pl.lit("all"), Fields(n=count(), cents=total("cents")))


def number(offset: int, n: int, *, readable: bool = True) -> Record:
    value = json.dumps({"n": n, "cents": 1 if readable else "oops"}).encode()
    return Record("orders", 0, offset, b"k", value, topic_id=TOPIC_ID)


@pytest.mark.parametrize("unread", [{4, 12}, {4}, {12}, {7}, {7, 15}, {0, 8}], ids=str)
@pytest.mark.parametrize("size", [1, 8, 16])
def test_of_two_records_with_one_number_one_is_passed_on_whichever_could_not_be_read(
    unread: set[int], size: int
) -> None:
    """A producer sends 1 to 8, fails, and sends them again."""
    both = Both(COUNTED)
    records = [number(offset, offset % 8 + 1, readable=offset not in unread) for offset in range(16)]
    for start in range(0, 16, size):
        both.process(records[start : start + size])
    process(both, *(back(COUNTED, one, 16 + n, mended) for n, one in enumerate(both.dead_letters)))
    assert len(both.dead_letters) == len(unread)
    assert both.results("all") == {b"all": {"n": 8, "cents": 8}}
    process(both, number(20, 9))
    assert both.results("sequence") == {b"orders:0": {"seen": 9}}


def test_a_filter_that_has_skipped_too_many_numbers_rejects_a_letter_as_unproven() -> None:
    skipped = Skipped()
    for n in range(RANGES + 1):
        skipped = skipped.before(10 * n + 10, 10 * n)
    assert (skipped.floor, len(skipped.ranges)) == (9, RANGES)
    assert skipped.judge(5, 5)[0].reason is Reason.UNPROVEN
    assert skipped.judge(15, 15)[0].forward
    assert not skipped.judge(20, 20)[0].forward
    assert skipped.judge(20, 21)[0].reason is Reason.OUT_OF_SEQUENCE
    assert Skipped.load(skipped.dump()) == skipped


def arrival(n: int, seconds: int = 0, key: bytes = b"k") -> Arrival:
    return Arrival("t", 0, n, key, {"n": n, "id": f"i{n}"}, seconds * 1000)


def test_without_notes_a_lower_number_is_unproven_and_an_operator_may_assert_it() -> None:
    rule = SequenceFilter(from_value("n"))
    _, state = rule.judge(rule.zero(), arrival(7))
    ruling, state = judge_late(rule, state, arrival(5))
    assert (ruling.reason, ruling.forward) == (Reason.UNPROVEN, False)
    assert judge_late(rule, state, arrival(5), asserted=True)[0].forward
    assert not judge_late(rule, state, arrival(7))[0].reason


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_message_of_an_earlier_session_that_was_missing_is_not_fenced(contiguous: bool) -> None:
    def stamp(one: Arrival) -> Stamp:
        return Stamp("p", one.value["n"], epoch=one.value["n"] // 3, contiguous=contiguous)

    rule = ProducerFilter(stamp)
    state = rule.zero()
    for n in (1, 3, 4):
        _, state = rule.judge(tracking(rule, state, on=True), arrival(n))
    state = rule.load(rule.dump(state))
    first, state = judge_late(rule, state, arrival(2))
    second, state = judge_late(rule, state, arrival(2))
    assert (first.forward, second.forward) == (True, False)


def test_beyond_the_horizon_an_id_is_passed_on_once_or_is_unproven_as_the_filter_says() -> None:
    for beyond, forward in ((Beyond.FORWARD, [True, False]), (Beyond.DROP, [False, False])):
        rule = EventIdFilter(from_value("id"), timedelta(days=1), limit=1, beyond=beyond)
        state = rule.zero()
        for n in (8, 9):
            _, state = rule.judge(state, arrival(n, seconds=n))
        rulings = []
        for _ in range(2):
            ruling, state = judge_late(rule, state, arrival(1, seconds=1))
            rulings.append(ruling)
        assert [one.forward for one in rulings] == forward
        assert (rulings[0].reason is Reason.UNPROVEN) is (beyond is Beyond.DROP)


@pytest.mark.parametrize(
    "rule",
    [
        distinct(TimeWindows(timedelta(seconds=10), grace=timedelta(0))),
        distinct(SessionWindows(timedelta(seconds=10), grace=timedelta(0))),
        deduplicate_by_key(timedelta(seconds=10)),
    ],
    ids=["windows", "sessions", "interval"],
)
def test_a_letter_of_what_a_filter_has_forgotten_is_unproven(rule: Any) -> None:
    state = rule.zero()
    for n in (1, 50):
        _, state = rule.judge(state, arrival(n, seconds=n))
    ruling, state = judge_late(rule, state, arrival(2, seconds=2))
    assert ruling.reason is Reason.UNPROVEN
    assert judge_late(rule, state, arrival(2, seconds=2), asserted=True)[0].forward


@pytest.mark.parametrize("beyond", [Beyond.FORWARD, Beyond.DROP, Beyond.REJECT])
def test_two_letters_of_one_id_beyond_the_horizon_are_passed_on_once_or_are_unproven(beyond: Beyond) -> None:
    rule = EventIdFilter(from_value("n"), timedelta(seconds=10), beyond=beyond)
    flow = Flow("F").source(NUMBERS).deduplicate(rule)
    both = Both(flow.aggregate("all", pl.lit("all"), Fields(n=count(), cents=total("cents"))))

    def seconds(one: Record, time: int) -> Record:
        return replace(one, timestamp_ms=time * 1000)

    unread = [seconds(number(offset, 2, readable=False), 2) for offset in (1, 2)]
    process(both, seconds(number(0, 1), 3), *unread, seconds(number(3, 90), 90), seconds(number(4, 99), 99))
    process(both, *(back(flow, one, 5 + n, mended) for n, one in enumerate(both.dead_letters)))
    forwards = beyond is Beyond.FORWARD
    assert both.results("all")[b"all"]["n"] == (4 if forwards else 3)
    assert [one.reason for one in both.dead_letters[2:]] == ([] if forwards else [Reason.UNPROVEN] * 2)
    if not forwards:
        [one, _] = both.dead_letters[2:]
        process(both, back(flow, one, 7, asserted=True))
        assert both.results("all")[b"all"]["n"] == 4
