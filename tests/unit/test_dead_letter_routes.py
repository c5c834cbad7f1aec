"""Every route of a redriven dead letter: it is folded once by the reader that rejected it, and by no other."""

import json
from dataclasses import replace
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, decode, encode
from envelope.deadletter import DeadLetterHeaders, Form
from jobs.dead_letters.redrive import redriven
from tests.support.letters import FLEET, LEGS, Count, Sum, back, feed, leg, legs, runner


@pytest.fixture(autouse=True)
def _broken() -> None:
    Sum.broken = True


OTHER = Flow("other").source(LEGS).aggregate("counts", "k", Fields(n=count()))


def test_a_letter_is_folded_by_the_flow_that_gave_it_up_and_is_a_copy_to_every_other() -> None:
    mine, other = feed(runner(FLEET), legs()), feed(runner(OTHER), legs())
    [died] = mine.dead_letters
    Sum.broken = False
    for offset in (100, 101):
        mine.process([back(died, offset, "fleet")])
        other.process([back(died, offset, "fleet")])
    assert mine.results("totals") == {b"K": {"n": 100, "sum": 5099}}
    assert other.results("counts") == {b"K": {"n": 100}}
    assert (mine.report.verdicts["totals"]["redriven"], other.report.verdicts["counts"]["copy"]) == (1, 2)
    assert (len(mine.dead_letters), other.dead_letters) == (1, [])


def test_a_new_generation_that_folded_the_record_itself_drops_its_letter() -> None:
    [died] = feed(runner(FLEET), legs()).dead_letters
    Sum.broken = False
    rebuilt = feed(runner(FLEET), [*legs(), back(died, 100, "fleet")])
    assert rebuilt.results("totals") == {b"K": {"n": 100, "sum": 5099}}
    assert rebuilt.report.verdicts["totals"] == {"accepted": 100, "copy": 1}
    assert rebuilt.dead_letters == []


def test_a_letter_of_another_flow_that_cannot_even_be_keyed_here_is_dropped_and_not_given_up_again() -> None:
    def key(element: Element[Any]) -> str:
        if element["v"] == 5000:
            raise KeyError
        return "all"

    [died] = feed(runner(FLEET), legs()).dead_letters
    strict = runner(Flow("strict").source(LEGS).aggregate("counts", key, Fields(n=count())))
    strict.process([back(died, 100, "fleet")])
    assert strict.dead_letters == []
    assert strict.report.verdicts["counts"] == {"copy": 1}


TWO = FLEET.aggregate("carriers", "c", Fields(n=count()))


@pytest.mark.parametrize("route", ["copy", "letter", "both"])
def test_what_fills_a_hole_is_folded_at_every_later_stage_once(route: str) -> None:
    run = feed(runner(TWO), legs())
    [died] = run.dead_letters
    assert run.results("carriers") == {b"UA": {"n": 99}}
    Sum.broken = False
    copy, letter = leg(100, 5, v=5000), back(died, 101, "fleet")
    for record in {"copy": [copy], "letter": [letter], "both": [copy, letter]}[route]:
        run.process([record])
    run.process([leg(102, 5, v=5000), back(died, 103, "fleet")])
    assert run.results("totals") == {b"K": {"n": 100, "sum": 5099}}
    assert run.results("carriers") == {b"UA": {"n": 100}}


def test_the_output_of_what_was_healed_is_folded_by_the_next_flow_once() -> None:
    first = feed(runner(FLEET.publish("out", value=lambda e: json.dumps(e.value).encode())), legs())
    out = Topic("out", Json({"k": str, "c": str, "v": int}))
    second = runner(Flow("second").source(out).aggregate("sums", "k", Fields(n=count())))

    def pass_on(start: int) -> list[Record]:
        return [
            Record("out", 0, n, one.key, one.value, topic_id="O") for n, one in enumerate(first.outputs[start:], start)
        ]

    feed(second, pass_on(0))
    assert second.results("sums") == {b"K": {"n": 99}}
    Sum.broken = False
    first.process([leg(100, 5, v=5000)])
    [healed] = pass_on(99)
    second.process([healed])
    second.process([Record("out", 0, 100, healed.key, healed.value, topic_id="O")])
    assert second.results("sums") == {b"K": {"n": 100}}
    assert second.report.verdicts["sums"] == {"accepted": 99, "redriven": 1, "duplicate": 1}


def order(offset: int, items: str) -> Record:
    chain = (Hop("raw", 0, offset, via="rep", index=0, topic_id="R"),)
    return Record(
        "orders", 0, offset, b"x", encode(Envelope(json.dumps({"items": items}).encode(), chain, b"x")), topic_id="T"
    )


def test_a_diverted_item_comes_back_without_its_siblings_and_its_letter_names_it() -> None:
    refused = {"bad"}
    flow = (
        Flow("shop")
        .source(Topic("orders", Json({"items": str})))
        .flat_map(lambda element: [{"sku": one} for one in element["items"].split(",")])
        .divert(lambda element: element["sku"] in refused)
        .aggregate("sku", lambda element: element["sku"], Count())
    )
    run = feed(runner(flow), [order(n, "a,bad" if n == 0 else "a") for n in range(60)])
    [died] = run.dead_letters
    assert (died.reason, died.items) == ("diverted", ((1,),))
    run.process([back(died, 60, "shop")])
    assert run.results("sku") == {b"a": {"n": 60}}
    refused.clear()
    for offset in (61, 62):
        run.process([back(run.dead_letters[-1], offset, "shop")])
    assert run.results("sku") == {b"a": {"n": 60}, b"bad": {"n": 1}}


@pytest.mark.parametrize("step", ["map", "fold"])
def test_a_letter_of_a_topic_without_envelopes_that_dies_again_comes_back_from_its_second_letter(step: str) -> None:
    broken = {"now": True}

    def fail(element: Element[Any]) -> dict[str, Any]:
        if step == "map" and broken["now"] and element["v"] < 0:
            raise ValueError
        return dict(element.value)

    class Fold(Count):
        def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
            if step == "fold" and broken["now"] and element["v"] < 0:
                raise ValueError
            return super().fold(state, element)

    bare = Topic("legs", Json({"k": str, "v": int}), envelope=False)
    run = runner(Flow("bare").source(bare).map(fail).aggregate("counts", lambda element: element["k"], Fold()))

    def returned(offset: int) -> Record:
        died = run.dead_letters[-1]
        record = died.record
        facts = DeadLetterHeaders(
            "legs",
            0,
            record.offset,
            died.reason,
            "T",
            "",
            died.stage,
            application="bare",
            hole=died.hole,
            form=Form.PAYLOAD,
        )
        value = redriven(record.key, record.value, (), facts, Hop("dead", 0, offset, topic_id="D"))
        return Record("legs", 0, offset, record.key, value, topic_id="T")

    feed(
        run, [Record("legs", 0, n, b"K", b'{"k":"K","v":%d}' % (-1 if n == 3 else 1), topic_id="T") for n in range(60)]
    )
    run.process([returned(60)])
    assert len(run.dead_letters) == 2
    broken["now"] = False
    run.process([returned(61)])
    run.process([returned(62)])
    assert run.results("counts") == {b"K": {"n": 60}}


def test_an_item_diverted_behind_the_last_stage_is_published_without_its_siblings() -> None:
    refused = {"bad"}
    flow = (
        Flow("shop")
        .source(Topic("orders", Json({"items": str})))
        .aggregate("orders", lambda element: element.key, Count())
        .flat_map(lambda element: [{"sku": one} for one in element["items"].split(",")])
        .divert(lambda element: element["sku"] in refused)
        .publish("out")
    )
    run = runner(flow)
    run.process([order(0, "a,bad,c")])
    refused.clear()
    for offset in (1, 2):
        run.process([back(run.dead_letters[0], offset, "shop")])
    published = [json.loads(decode(one.value).payload)["sku"] for one in run.outputs]
    assert published == ["a", "c", "bad"]
    assert run.run.ledger.listed == {}


def test_a_diverted_item_whose_record_dies_in_front_of_its_flat_map_is_a_letter_again() -> None:
    broken, refused = {"now": False}, {"bad"}

    def first(element: Element[Any]) -> dict[str, Any]:
        if broken["now"]:
            raise ValueError
        return dict(element.value)

    flow = (
        Flow("shop")
        .source(Topic("orders", Json({"items": str})))
        .map(first)
        .flat_map(lambda element: [{"sku": one} for one in element["items"].split(",")])
        .divert(lambda element: element["sku"] in refused)
        .aggregate("sku", lambda element: element["sku"], Count())
    )
    run = runner(flow)
    run.process([order(0, "a,bad")])
    broken["now"] = True
    run.process([back(run.dead_letters[0], 1, "shop")])
    assert [one.items for one in run.dead_letters] == [((1,),), ((1,),)]
    broken["now"] = False
    refused.clear()
    for offset in (2, 3):
        run.process([back(run.dead_letters[-1], offset, "shop")])
    assert run.results("sku") == {b"a": {"n": 1}, b"bad": {"n": 1}}


def test_an_entry_is_struck_when_its_event_is_folded_although_a_copy_dies_in_the_same_batch() -> None:
    run = feed(runner(FLEET), legs())
    letter, copy = back(run.dead_letters[0], 100, "fleet"), leg(101, 5, v=5000)
    body = json.dumps({"k": "K", "c": "UA", "v": 1}).encode()
    mended = Record("legs", 0, 100, b"K", encode(replace(decode(letter.value), payload=body)), topic_id="T")
    run.process([mended, copy])
    assert run.results("totals")[b"K"]["n"] == 100
    assert run.run.ledger.listed == {}


@pytest.mark.parametrize("step", ["map", "divert"])
def test_what_fails_behind_a_publish_is_published_once_when_it_comes_back(step: str) -> None:
    broken = {"now": True}

    def odd(element: Element[Any]) -> bool:
        return broken["now"] and element["v"] == 5000

    def check(element: Element[Any]) -> dict[str, Any]:
        if odd(element):
            raise ValueError
        return dict(element.value)

    first = Flow("first").source(LEGS).aggregate("counts", "k", Count()).publish("out")
    first = first.map(check) if step == "map" else first.divert(odd)
    run = feed(runner(first.publish("audit")), legs())
    broken["now"] = False
    for offset in (100, 101):
        run.process([back(run.dead_letters[0], offset, "first")])
    out = Topic("out", Json({"k": str, "c": str, "v": int}))
    second = runner(Flow("second").source(out).aggregate("sums", "k", Fields(n=count())))
    outputs = [one for one in run.outputs if one.topic == "out"]
    feed(second, [Record("out", 0, n, one.key, one.value, topic_id="O") for n, one in enumerate(outputs)])
    assert second.results("sums") == {b"K": {"n": 100}}
    assert second.dead_letters == []
