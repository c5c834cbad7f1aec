"""What a topic or a store does not take: an output, a published state, a key. It never ends a flow."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest

from aggregations.definition.aggregates import count, last
from aggregations.definition.aggregates_exact import collect
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import START_BYTES, hopping, tumbling
from aggregations.run.snapshots import read_snapshot
from envelope import Reason, decode
from envelope.filters import Scope, SequenceFilter, deduplicate, from_value
from envelope.limits import DEFAULT_LIMITS
from persistence import memory
from persistence.errors import Terminal
from persistence.stored_filter import StoredFilter
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

TOPIC = "in"
LINES = Topic(TOPIC, Json({"k": str, "text": str, "n": int, "items": pl.List(pl.String)}), envelope=False)
COUNT = Fields(n=count())
LIMIT = 1000
SMALL, BIG = "x" * 10, "x" * LIMIT
SECOND = 1_000
TOO_LARGE, TOO_LONG = Reason.PAYLOAD_TOO_LARGE, Reason.KEY_TOO_LONG
LONGEST = 60


def line(offset: int, text: str = SMALL, key: str = "a", topic: str = TOPIC, **more: Any) -> Record:
    value = json.dumps({"k": key, "text": text, **more}).encode()
    return Record(topic, 0, offset, key.encode(), value, offset * SECOND, topic_id=TOPIC_ID)


def source(name: str = "f", topic: Topic = LINES) -> Flow[Any]:
    return Flow(name).source(topic)


def texts(outputs: Sequence[Any], topic: str = "out") -> list[Any]:
    return [json.loads(decode(one.value).payload)["text"] for one in outputs if one.topic == topic]


def ran(flow: Flow[Any], records: Sequence[Record], **largest: int) -> Both:
    both = Both(flow, largest=largest)
    both.process(records)
    return both


@pytest.mark.parametrize("size", [LIMIT - 600, LIMIT, 5 * LIMIT])
def test_an_output_that_its_topic_does_not_take_is_a_dead_letter_of_its_record(size: int) -> None:
    flow = source().publish("out").aggregate("s", key="k", fold=COUNT)
    both = ran(flow, [line(0), line(1, "x" * size), line(2)], out=LIMIT)
    kept = size < LIMIT - 256
    assert both.reasons() == ([] if kept else [(1, TOO_LARGE)])
    assert both.results("s") == {b"a": {"n": 3 if kept else 2}}
    for one in both.dead_letters:
        assert (one.stage, one.hole) == ("s", False)
        assert one.detail.startswith("an output of ")
        assert one.detail.endswith(f" bytes, out takes {LIMIT}")


PLACES = {
    "before the stage": lambda flow: flow.publish("out").aggregate("s", key="k", fold=COUNT),
    "after the stage": lambda flow: flow.aggregate("s", key="k", fold=COUNT).publish("out"),
    "without a stage": lambda flow: flow.publish("out"),
    "in a branch": lambda flow: flow.branch(None, "b", lambda b: b.publish("out")).aggregate("s", key="k", fold=COUNT),
    "of a function": lambda flow: flow.map(lambda e: dict(e.value)).publish("out").aggregate("s", key="k", fold=COUNT),
    "chosen": lambda flow: flow.publish(pl.lit("out"), topics=["out", "other"]).aggregate("s", key="k", fold=COUNT),
}


@pytest.mark.parametrize("place", [name for name in PLACES if name != "in a branch"])
def test_a_dead_letter_of_a_large_output_is_published_when_it_comes_back_and_its_topic_takes_it(place: str) -> None:
    flow = PLACES[place](source())
    both = ran(flow, [line(0, "one"), line(1, BIG), line(2, "two")], out=LIMIT)
    assert both.reasons() == [(1, TOO_LARGE)]
    assert texts(both.memory.outputs) == ["one", "two"]
    again = Both(flow, both.stores)
    again.process([again.redriven(both.dead_letters[0], 3)])
    assert texts(again.memory.outputs) == [BIG]
    if flow.stages:
        assert again.results("s") == {b"a": {"n": 3}}
    again.process([again.redriven(both.dead_letters[0], 4)])
    assert texts(again.memory.outputs) == [BIG]


def test_of_a_collection_with_a_large_output_nothing_is_published_or_folded() -> None:
    flow = (
        source()
        .flat_map("items")
        .publish("out", value=lambda e: e["items"].encode())
        .aggregate("s", key="k", fold=COUNT)
    )
    records = [line(0, items=["a", "b"]), line(1, items=["a", BIG, "c"]), line(2, items=["c"])]
    both = ran(flow, records, out=LIMIT)
    assert both.reasons() == [(1, TOO_LARGE)]
    assert both.results("s") == {b"a": {"n": 3}}
    assert [decode(one.value).payload for one in both.memory.outputs] == [b"a", b"b", b"c"]


def test_of_two_outputs_of_a_record_neither_is_published_if_one_is_too_large() -> None:
    flow = source().publish("wide").publish("out").aggregate("s", key="k", fold=COUNT)
    both = ran(flow, [line(0, BIG), line(1)], wide=10 * LIMIT, out=LIMIT)
    assert both.reasons() == [(0, TOO_LARGE)]
    assert (texts(both.memory.outputs, "wide"), texts(both.memory.outputs)) == ([SMALL], [SMALL])


def test_the_key_of_an_output_counts() -> None:
    flow = source().publish("out", key="text", value=lambda e: b"v").aggregate("s", key="k", fold=COUNT)
    both = ran(flow, [line(0), line(1, "x" * LIMIT)], out=LIMIT)
    assert both.reasons() == [(1, TOO_LARGE)]


def test_an_output_that_no_reader_would_take_is_a_dead_letter_although_its_topic_takes_it() -> None:
    flow = source().publish("out", key="text").aggregate("s", key="k", fold=COUNT)
    both = ran(flow, [line(0), line(1, "x" * 700_000)], out=10**7)
    assert both.reasons() == [(1, TOO_LARGE)]
    assert both.dead_letters[0].detail.endswith(f" bytes, the limit is {DEFAULT_LIMITS.message_bytes}")


class Kept:
    def zero(self) -> dict[str, Any]:
        return {"kept": ""}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        return {"kept": element["text"]}

    def result(self, state: dict[str, Any]) -> Any:
        return {"kept": state["kept"], "n": 1 // (state["kept"] != "fails")}


@pytest.mark.parametrize("fold", [Fields(kept=last("text")), Kept()], ids=["fields", "python"])
@pytest.mark.parametrize("text", [BIG, "x" * (DEFAULT_LIMITS.payload_bytes - 60)], ids=["topic", "envelope"])
def test_a_state_that_is_too_large_is_not_published_but_counted_and_named(
    fold: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    largest = {"out": LIMIT if text is BIG else 10 * len(text)}
    both = Both(source().aggregate("s", key="k", fold=fold).publish_states("out"), largest=largest)
    with caplog.at_level(logging.WARNING):
        both.process([line(0, key="good"), line(1, text, key="large"), line(2, text, key="second")])
    assert [read_snapshot(one.value).state["kept"] for one in both.memory.outputs] == [SMALL]
    assert both.memory.report.unpublished == {"s": 2}
    assert {key: len(one["kept"]) for key, one in both.results("s").items()} == {
        b"good": len(SMALL), b"large": len(text), b"second": len(text),
    }  # fmt: skip
    [mine, _] = [one.getMessage() for one in caplog.records]
    assert mine.startswith("stage s, key b'large': its state is in the store, and was not published: ")
    assert mine.endswith("States that were not published: 2")
    assert text not in mine
    assert both.dead_letters == []
    both.process([line(3, "new", key="large")])
    assert read_snapshot(both.memory.outputs[-1].value).state["kept"] == "new"


def test_a_state_whose_result_fails_is_not_published_but_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    both = Both(source().aggregate("s", key="k", fold=Kept()).publish_states("out"))
    with caplog.at_level(logging.WARNING):
        both.process([line(0, key="good"), line(1, "fails", key="bad")])
    assert [one.key for one in both.memory.outputs] == [b"good"]
    assert both.memory.report.unpublished == {"s": 1}
    assert (
        "key b'bad': its state is in the store, and was not published: its result cannot be written (ZeroDivisionError)"
        in (caplog.text)
    )


@pytest.mark.parametrize("window", [tumbling("10s"), session("5s")], ids=["windows", "sessions"])
def test_a_closed_window_that_is_too_large_does_not_keep_others_from_being_published(window: Any) -> None:
    flow = source().aggregate("s", key="k", fold=Fields(kept=collect("text", 9)), window=window)
    both = Both(flow.publish_states("out", on="close"), largest={"out": LIMIT})
    both.process([line(0, key="good"), line(1, BIG, key="large"), line(100), line(200)])
    assert {one.key.partition(b"@")[0] for one in both.memory.outputs if one.key} == {b"good", b"a"}
    assert both.memory.report.unpublished == {"s": 1}
    assert both.dead_letters == []


class ShortKeys(memory.MemoryStore):
    """A store that takes short keys only, as Cassandra takes 65,535 bytes."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, max_key_bytes=LONGEST)

    def load(self, stage: Any, keys: Sequence[bytes]) -> Any:
        self._check(keys)
        return super().load(stage, keys)

    def save(self, stage: Any, writes: Any, **more: Any) -> Any:
        self._check([one.key for one in writes])
        return super().save(stage, writes, **more)

    @staticmethod
    def _check(keys: Sequence[bytes]) -> None:
        if any(len(key) > LONGEST for key in keys):
            raise Terminal("the key is too long")


@pytest.fixture
def short() -> Iterator[None]:
    with patch("persistence.memory.MemoryStore", ShortKeys):
        yield


def of_length(size: int) -> str:
    return ("key " * size)[:size]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("longest", "options"),
    [
        (LONGEST, {}),
        (LONGEST - START_BYTES, {"window": tumbling("10s")}),
        (LONGEST - START_BYTES, {"window": hopping("10s", "5s")}),
        (LONGEST, {"window": session("5s")}),
        (LONGEST, {"expire_after": "10s"}),
    ],
    ids=["no window", "tumbling", "hopping", "session", "expiring"],
)
@pytest.mark.parametrize("key", ["k", lambda e: e["k"], "_key"], ids=["column", "function", "record key"])
def test_a_key_that_the_store_does_not_take_is_a_dead_letter(key: Any, longest: int, options: Any) -> None:
    both = ran(
        source().aggregate("s", key=key, fold=COUNT, **options),
        [line(0, key="a"), line(1, key=of_length(longest)), line(2, key=of_length(longest + 1)), line(3, key="a")],
    )
    assert both.reasons() == [(2, TOO_LONG)]
    [dead] = both.dead_letters
    assert (dead.stage, dead.hole) == ("s", False)
    assert dead.detail == f"the stage's key has more than {longest} bytes, the limit of its store"
    assert sum(one["n"] for one in both.results("s").values()) == (
        6 if options.get("window") == hopping("10s", "5s") else 3
    )


@pytest.mark.usefixtures("short")
def test_a_long_key_of_a_later_stage_or_of_a_collection_is_a_dead_letter_of_its_record() -> None:
    flow = source().aggregate("s", key="k", fold=COUNT).flat_map("items").aggregate("t", key="items", fold=COUNT)
    both = ran(flow, [line(0, items=["x", "y"]), line(1, items=["x", of_length(LONGEST + 1)]), line(2, items=["y"])])
    assert both.reasons() == [(1, TOO_LONG)]
    assert [one.stage for one in both.dead_letters] == ["t"]
    assert both.results("t") == {b"x": {"n": 1}, b"y": {"n": 2}}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "rule",
    [
        SequenceFilter(from_value("n"), scope_by=Scope.KEY),
        deduplicate(from_value("k"), timedelta(seconds=0), partitions=4),
        SequenceFilter(from_value("n")),
    ],
    ids=["by key", "over all partitions", "by partition"],
)
def test_a_filter_by_key_rejects_a_long_key_and_others_do_not_see_it(rule: Any) -> None:
    flow = source().deduplicate(rule).publish("out")
    both = ran(flow, [line(n, key=key, n=n + 1) for n, key in enumerate(["a", of_length(LONGEST + 1), "b"])])
    by_key = getattr(rule, "scope_by", None) is Scope.KEY
    assert both.reasons() == ([(1, TOO_LONG)] if by_key else [])
    assert len(both.memory.outputs) == (2 if by_key else 3)


TABLE = Topic("names", Json({"k": str, "name": str}), envelope=False)


@pytest.mark.usefixtures("short")
def test_a_table_rejects_a_long_key_and_a_lookup_of_one_finds_no_row() -> None:
    names = [line(n, key=key, topic="names", name=key[:3]) for n, key in enumerate(["a", of_length(LONGEST + 1)])]
    table = Flow("f").source(LINES).aggregate("s", key="n", fold=COUNT)
    flow = table.lookup("names", TABLE, key="k", columns=["name"]).aggregate("t", key="name", fold=COUNT)
    both = Both(flow)
    both.process(names)
    assert both.reasons() == [(1, TOO_LONG)]
    both.process([line(0, key="a", n=1), line(1, key=of_length(LONGEST + 1), n=2)])
    assert both.reasons()[1:] == [(1, Reason.NULL_KEY)]


@pytest.mark.usefixtures("short")
def test_a_stored_filter_by_key_rejects_a_long_key() -> None:
    rule = SequenceFilter(from_value("n"), scope_by=Scope.KEY)
    stored, passed = StoredFilter(rule, fresh_store()), list[Any]()
    records = [
        SimpleNamespace(topic=TOPIC, partition=0, offset=n, key=key, value={"n": n + 1}, timestamp_ms=n, headers=())
        for n, key in enumerate([b"a", b"k" * (LONGEST + 1), b"k" * LONGEST])
    ]
    done = stored.process(records, lambda filtered: passed.extend(one.offset for one, _ in filtered.passed))
    assert passed == [0, 2]
    assert [(one.offset, ruling.reason) for one, ruling in done.rejected] == [(1, TOO_LONG)]
