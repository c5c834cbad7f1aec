"""KIP-655 in flows: every example through each operator, message by message and in columns, and a step of the user."""

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.window_columns import window_columns
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Verdict, decode
from envelope.filters import (
    Filter,
    Ruling,
    SessionWindows,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_header,
    from_value,
)
from tests.seeds.test_001_deduplicate import EXAMPLES
from tests.seeds.test_001_distinct import RECORDS
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

Event = tuple[str, int]
"""Key and id, and time in seconds."""
S = 1000
WINDOW = ("window_start_ms", "window_end_ms")
OPERATORS: dict[str, Any] = {
    "by key": deduplicate_by_key,
    "by key and value": lambda interval: deduplicate_by_key_value(from_value("id"), interval),
}
# One state has one stream time, as one task of Kafka Streams has.
OVER_PARTITIONS: dict[str, Any] = {
    "by id": lambda interval: deduplicate(from_value("id"), interval, partitions=1),
    "by a changed key": lambda interval: deduplicate_by_key(interval, key=from_value("id"), partitions=1),
}


def passed(rule: Any, events: list[Event], *, partitions: int = 1, batch: int = 1) -> list[bool]:
    """Whether each event is passed on; the events are read in this order, and take turns in the partitions."""
    flow = Flow("kip").source(Topic("topic", Json({"id": str}), envelope=False)).deduplicate(rule).publish("out")
    both = Both(flow)
    records = [
        Record(
            *("topic", n % partitions, n // partitions, key.encode(), json.dumps({"id": key}).encode(), time * S),
            topic_id=TOPIC_ID,
        )
        for n, (key, time) in enumerate(events)
    ]
    for start in range(0, len(records), batch):
        both.process(records[start : start + batch])
    hops = [decode(one.value).chain[-1] for one in both.memory.outputs]
    places = {(hop.partition, hop.offset) for hop in hops}
    return [(one.partition, one.offset) in places for one in records]


@pytest.mark.parametrize("batch", [1, 2, 10])
@pytest.mark.parametrize("operator", [*OPERATORS, *OVER_PARTITIONS])
@pytest.mark.parametrize("title", EXAMPLES)
def test_the_examples_in_a_flow(title: str, operator: str, batch: int) -> None:
    seconds, events = EXAMPLES[title]
    rule = (OPERATORS | OVER_PARTITIONS)[operator](timedelta(seconds=seconds))
    assert passed(rule, [(key, time) for key, time, _ in events], batch=batch) == [one for *_, one in events]


@pytest.mark.parametrize("operator", OVER_PARTITIONS)
@pytest.mark.parametrize("title", EXAMPLES)
def test_the_examples_in_a_flow_over_several_partitions(title: str, operator: str) -> None:
    seconds, events = EXAMPLES[title]
    rule = OVER_PARTITIONS[operator](timedelta(seconds=seconds))
    assert passed(rule, [(key, time) for key, time, _ in events], partitions=3) == [one for *_, one in events]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (TimeWindows(timedelta(seconds=10)), [4, 23, 34]),
        (SessionWindows(timedelta(seconds=10)), [4, 23]),
        (SessionWindows(timedelta(seconds=9)), [4, 23, 34]),
    ],
)
def test_the_examples_of_distinct_in_a_flow(windows: Any, expected: list[int]) -> None:
    for batch in (1, 5, 20):
        found = passed(distinct(windows), [("key", time) for time in RECORDS], batch=batch)
        assert [time for time, one in zip(RECORDS, found, strict=True) if one] == expected


@pytest.mark.parametrize("how", ["columns", "a function"])
@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (TimeWindows(timedelta(seconds=10)), [(0, 10, 4), (20, 30, 23), (30, 40, 34)]),
        (SessionWindows(timedelta(seconds=10)), [(4, 4, 4), (23, 23, 23)]),
        (SessionWindows(timedelta(seconds=9)), [(4, 4, 4), (23, 23, 23), (34, 34, 34)]),
    ],
)
def test_the_windowed_keys_of_distinct_are_columns_of_a_flow(windows: Any, expected: list[Any], how: str) -> None:
    """`([key@4000/4000], 4)`, in seconds; and a record without a key has no window."""
    rule = distinct(windows)

    def windowed(element: Element[Any]) -> dict[str, Any]:
        window = rule.window(element)
        ends = (None, None) if window is None else (window.start_ms, window.end_ms)
        return {**element.value, **dict(zip(WINDOW, ends, strict=True))}

    source = Topic("topic", Json({"id": int}), envelope=False)
    flow: Flow[Any] = Flow("kip").source(source).deduplicate(rule)
    flow = flow.map(**window_columns(rule)) if how == "columns" else flow.map(windowed)
    both = Both(flow.publish("out"))
    times = [(b"key", time) for time in RECORDS] + [(None, 50)]
    both.process(
        [
            Record("topic", 0, n, key, b'{"id": %d}' % time, time * S, topic_id=TOPIC_ID)
            for n, (key, time) in enumerate(times)
        ]
    )
    found = [json.loads(decode(one.value).payload) for one in both.memory.outputs]
    rows = [(*(one[name] for name in WINDOW), one["id"]) for one in found]
    assert rows == [*((start * S, end * S, time) for start, end, time in expected), (None, None, 50)]


def test_the_windows_of_other_filters_and_of_times_that_are_in_no_column_are_refused() -> None:
    with pytest.raises(FlowError, match=r"takes a filter that distinct\(\) has made"):
        window_columns(deduplicate_by_key(timedelta(seconds=1)))
    with pytest.raises(FlowError, match=r"calls window\(\)"):
        window_columns(distinct(TimeWindows(timedelta(seconds=1)), time=from_header("at")))
    in_value = window_columns(distinct(TimeWindows(timedelta(seconds=1)), time=from_value("at")))
    frame = pl.DataFrame({"at": [-1, 0, 1999], "_key": [b"k", None, b"k"]})
    assert frame.select(**in_value).rows() == [(-1000, 0), (None, None), (1000, 2000)]


def test_an_operator_has_a_name_and_a_store_of_the_user_s_choice() -> None:
    """`Deduplicated.as(name)` and `with(storeName, ...)`."""
    own, other = fresh_store(), fresh_store()
    rule = deduplicate_by_key(timedelta(seconds=10))
    flow = Flow("kip").source(Topic("topic", envelope=False)).deduplicate(rule, name="payments", store=own)
    flow = flow.aggregate("all", "_topic", Fields(n=count()))
    stores = bind(flow, {"all": other})
    runner = MemoryRunner(flow, stores)
    runner.process([Record("topic", 0, n, b"a", b"paid", n) for n in range(2)])
    assert stores == {"payments": own, "all": other}
    assert set(runner.results("payments")) == {b"topic:0"}
    assert runner.results("all") == {b"topic": {"n": 1}}


@dataclass(frozen=True)
class OnTime:
    """A step of the user: drops what another filter passes on although it is late with respect to stream time."""

    rule: Filter[Any]
    lateness_ms: int
    name: str = "on-time"

    def scope(self, arrival: Any) -> bytes | None:
        return self.rule.scope(arrival)

    def zero(self) -> Any:
        return self.rule.zero()

    def judge(self, state: Any, arrival: Any) -> tuple[Ruling, Any]:
        ruling, state = self.rule.judge(state, arrival)
        if ruling.forward and arrival.timestamp_ms < state.stream_time_ms - self.lateness_ms:
            return Ruling(Verdict.BEYOND_HORIZON, forward=False), state
        return ruling, state

    def dump(self, state: Any) -> Any:
        return self.rule.dump(state)

    def load(self, value: Any) -> Any:
        return self.rule.load(value)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_the_user_reads_stream_time_and_drops_late_records(batch: int) -> None:
    """ "In case it's needed, the user may add a processor to purge those late records"."""
    rule = deduplicate_by_key(timedelta(seconds=10))
    events = [("k1", 10), ("k2", 21), ("k1", 9), ("k3", 11)]
    assert passed(rule, events, batch=batch) == [True, True, True, True]
    assert passed(OnTime(rule, 10 * S), events, batch=batch) == [True, True, False, True]
