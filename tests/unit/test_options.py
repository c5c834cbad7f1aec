"""Every option of a flow: `describe` shows it as text and as a picture, and it is part of the definitions that it decides."""

import inspect
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

import polars as pl
import pytest

from aggregations import Emit, Fields, Flow, Json, Topic, count, hopping, session, tumbling
from envelope import Limits

COUNT = Fields(n=count())
COLUMNS = {"k": str, "v": int, "m": str}
ROWS = {"name": str, "fee": int}


def flow(
    topic: Mapping[str, Any] | None = None,
    stage: Mapping[str, Any] | None = None,
    states: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    lookup: Mapping[str, Any] | None = None,
    publish: Mapping[str, Any] | None = None,
) -> Flow[Any]:
    """A flow with two stages, a table between them and two outputs, and one option changed."""
    made: Flow[Any] = Flow("f").source(Topic(**{"name": "t", "payload": Json(COLUMNS), **(topic or {})}))
    made = made.aggregate(**{"name": "first", "key": "_key", "fold": COUNT, **(stage or {})})
    made = made.publish_states(**{"topic": "s", **(states or {})})
    rows = Topic(**{"name": "rows", "payload": Json(ROWS), **(table or {})})
    made = made.lookup(**{"table": "table", "topic": rows, "key": "m", "columns": ["fee"], **(lookup or {})})
    return made.aggregate("second", "k", COUNT).publish(**{"topic": "out", **(publish or {})})


def encoded(element: object) -> bytes:
    return b""


SVG = "{http://www.w3.org/2000/svg}"
BOTH, LATER, NONE = {"first", "second"}, {"second"}, set[str]()
EARLY = {"window": tumbling("5m")}

# What is changed, by the call and its parameter; the stages whose definition it is part of; what `describe` shows.
# Not part of any definition: what decides neither which elements a state holds nor what they do to it.
OPTIONS: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "Topic(name)": ({"topic": {"name": "t2"}}, BOTH, "t2"),
    # Columns may be added; the expressions over them are part of the definition.
    "Topic(payload)": ({"topic": {"payload": Json(COLUMNS | {"more": int})}}, NONE, ""),
    "Topic(envelope)": ({"topic": {"envelope": False}}, BOTH, "t, without envelopes"),
    "Topic(siblings)": ({"topic": {"siblings": "drop"}}, BOTH, "t, siblings drop"),
    # A record beyond a limit is a dead letter, and can be redriven after the limit was raised.
    "Topic(limits)": ({"topic": {"limits": Limits(hops=9)}}, NONE, "Limits(hops=9,"),
    "Topic(cluster)": (
        {"topic": {"cluster": "paris"}, "table": {"cluster": "paris"}},
        BOTH | {"table"},
        "t, cluster paris",
    ),
    "Topic(tombstones)": ({"topic": {"tombstones": "element"}}, BOTH, "t, tombstones element"),
    # Neither a skipped tombstone nor a dead letter reaches a state.
    "Topic(tombstones) to dead letters": (
        {"topic": {"tombstones": "dead_letter"}},
        NONE,
        "t, tombstones dead_letter",
    ),
    "Topic(time)": ({"topic": {"time": "v"}}, BOTH, "t, time v"),
    "Topic(ahead)": ({"topic": {"ahead": "2h"}}, BOTH, "t, at most 2h ahead"),
    # It determines when windows leave and are published, not what they hold.
    "Topic(idle)": ({"topic": {"idle": "10m"}}, NONE, "t, idle after 10m"),
    # It determines the order of reading, which no state depends on.
    "Topic(skew)": ({"topic": {"skew": "5m"}}, NONE, "t, skew 5m"),
    # It allows expressions, which are part of the definition themselves.
    "Topic(stable)": ({"topic": {"stable": ["_headers"]}}, NONE, "t, stable _headers"),
    "Topic(retries)": ({"topic": {"retries": {"r": "r-retry"}}}, BOTH, "t, retries of r"),
    "aggregate(name)": ({"stage": {"name": "other"}}, {"first", "other"}, "other by _key"),
    "aggregate(key)": ({"stage": {"key": "k"}}, {"first"}, "first by k:"),
    "aggregate(fold)": ({"stage": {"fold": Fields(n=count("v"))}}, {"first"}, "Fields(n=count(v))"),
    "aggregate(co_partitioned)": ({"stage": {"co_partitioned": False}}, {"first"}, "by _key, not co-partitioned"),
    # A state keeps the positions that it has: a wider history is a longer one from then on.
    "aggregate(history)": ({"stage": {"history": 64}}, NONE, "by _key, history 64:"),
    "aggregate(lanes)": ({"stage": {"lanes": 9}}, NONE, "by _key, 9 lanes:"),
    "aggregate(emit)": (
        {"stage": {"emit": Emit(k="k", m="m", n="new.n")}},
        LATER,
        "Fields(n=count()), emit k, m, n=new.n",
    ),
    "aggregate(emit) on a condition": (
        {"stage": {"emit": Emit(k="k", m="m", n="new.n").when(pl.col("new.n") > 1)}},
        LATER,
        'emit k, m, n=new.n when [col("new.n") > 1]',
    ),
    "aggregate(emit) only when changed": (
        {"stage": {"emit": Emit(k="k", m="m", n="new.n").changed()}},
        LATER,
        'emit k, m, n=new.n when [col("new.n") is distinct from col("old.n")]',
    ),
    # A store's URL may contain a secret. The command shows it on standard error, redacted.
    "aggregate(store)": ({"stage": {"store": "sqlite:///states.db"}}, NONE, ""),
    "aggregate(window)": ({"stage": EARLY}, BOTH, "first by _key, tumbling 5m:"),
    "aggregate(expire_after)": ({"stage": {"expire_after": "30d"}}, BOTH, "first by _key, expires after 30d:"),
    "publish_states(topic)": ({"states": {"topic": "changes"}}, NONE, "changes"),
    "publish_states(on)": ({"stage": EARLY, "states": {"on": "close"}}, BOTH, "s on close"),
    # The table has states of its own, with the definition of its topic; the rows are the same.
    "lookup(table)": ({"lookup": {"table": "other"}}, {"table", "other"}, "other from rows"),
    "lookup(topic)": ({"table": {"envelope": False}}, {"table", "second"}, "table from rows, without envelopes"),
    "lookup(key)": ({"lookup": {"key": "k"}}, LATER, "fee of table by k,"),
    "lookup(columns)": ({"lookup": {"columns": {"cost": "fee"}}}, LATER, "cost=fee of table"),
    "lookup(missing)": ({"lookup": {"missing": "drop"}}, LATER, "missing drop"),
    "lookup(store)": ({"lookup": {"store": "sqlite:///states.db"}}, NONE, ""),
    # Outputs: no later stage reads them.
    "publish(topic)": ({"publish": {"topic": "elsewhere"}}, NONE, "elsewhere"),
    "publish(topics)": ({"publish": {"topic": "k", "topics": ["a", "b"]}}, NONE, "k: a, b"),
    "publish(key)": ({"publish": {"key": "m"}}, NONE, "out, key m"),
    "publish(value)": ({"publish": {"value": encoded}}, NONE, "out, value encoded"),
    "publish(name)": ({"publish": {"name": "relay"}}, NONE, "out, as relay"),
}
WINDOWS: dict[str, tuple[Any, Any, set[str], str]] = {
    "tumbling(size)": (tumbling("5m"), tumbling("20m"), BOTH, "tumbling 20m:"),
    "hopping(size)": (hopping("10m", "5m"), hopping("20m", "5m"), BOTH, "hopping 20m every 5m:"),
    "hopping(slide)": (hopping("10m", "5m"), hopping("10m", "2m"), BOTH, "hopping 10m every 2m:"),
    "session(gap)": (session("5m"), session("20m"), BOTH, "session 20m:"),
}
for _name, _window, _least in (
    ("tumbling", tumbling, ["5m"]),
    ("hopping", hopping, ["10m", "5m"]),
    ("session", session, ["5m"]),
):
    _given: Any = _window
    WINDOWS |= {
        f"{_name}(lateness)": (_given(*_least), _given(*_least, lateness="1m"), BOTH, "5m, 1m late:"),
        # A dead letter that comes back is late again, and dropped elements reach no state either.
        f"{_name}(late)": (
            _given(*_least),
            _given(*_least, late="dead_letter"),
            NONE,
            "5m, late elements are dead letters:",
        ),
        # What has left is gone, and a copy of it is late whatever the retention.
        f"{_name}(retention)": (_given(*_least), _given(*_least, retention="7d"), NONE, "5m, kept for 7d:"),
    }
CASES = {
    **{name: ({}, change, stages, shown) for name, (change, stages, shown) in OPTIONS.items()},
    **{
        name: ({"stage": {"window": before}}, {"stage": {"window": after}}, stages, shown)
        for name, (before, after, stages, shown) in WINDOWS.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_an_option_is_part_of_the_definitions_that_it_decides_and_of_no_other(name: str) -> None:
    before, after, changed, _ = CASES[name]
    one, other = flow(**before).definitions, flow(**after).definitions
    assert {stage for stage in one.keys() | other.keys() if one.get(stage) != other.get(stage)} == changed


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_describe_shows_an_option_as_text_and_as_a_picture(name: str) -> None:
    before, after, _, shown = CASES[name]
    assert shown not in flow(**before).describe()
    assert shown in flow(**after).describe()
    boxes = ET.fromstring(flow(**after).describe_svg()).iter(f"{SVG}text")
    assert shown in " ".join("".join(one.itertext()) for one in boxes)


def test_every_option_of_a_flow_is_in_the_table() -> None:
    calls = (Flow.aggregate, Flow.lookup, Flow.publish, Flow.publish_states, tumbling, hopping, session)
    named = {**{call.__name__: call for call in calls}, "Topic": Topic.__init__}
    options = {
        f"{name}({one})" for name, call in named.items() for one in inspect.signature(call).parameters if one != "self"
    }
    assert options == {name.partition(") ")[0].removesuffix(")") + ")" for name in CASES}
