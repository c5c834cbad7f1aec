"""Functions and folds in plain Python on the vectorised path: they see what they see message by message, and fail alike."""

import json
from collections.abc import Callable
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, last, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.stability import DIFFERING
from envelope import Envelope, Hop, Tombstones, encode
from tests.messages import Every
from tests.support.both import TOPIC_ID, Both, record
from tests.support.pure import TOPIC, bare, wrapped


class Odd:
    """A fold that does what the element says: `minutes` selects a deed."""

    def zero(self) -> Any:
        return {"n": 0}

    def fold(self, state: Any, element: Element[Any]) -> Any:
        state["n"] += 1
        return DEEDS[element["minutes"]](state, element)


def put(state: Any, value: Any) -> Any:
    state["x"] = value
    return state


def failed(state: Any, element: Element[Any]) -> Any:
    raise ValueError(element["tail"])


def failed_later(state: Any, element: Element[Any]) -> Any:
    if state["n"] > 2:
        raise KeyError(element.offset)
    return state


def appended(state: Any, element: Element[Any]) -> Any:
    state.setdefault("seen", []).append(element.offset)
    return state


def healed(state: Any, element: Element[Any]) -> Any:
    del state["x"]
    return state


def told(state: Any, element: Element[Any]) -> Any:
    state.setdefault("told", []).append(facts(element))
    return state


def facts(element: Element[Any]) -> list[Any]:
    """All that a function can read from an element, as a state."""
    return [
        str(element.own),
        element.own.topic_id,
        repr(element.key),
        str(element.lineage),
        [str(hop) for hop in element.chain],
        [element.event_id, element.event_time_us, element.timestamp_ms],
        repr(element.headers),
        [element.again, element.route.value, list(element.indices), list(element.branch)],
        repr(element.value),
        str(element.root),
    ]


DEEDS: list[Callable[[Any, Element[Any]], Any]] = [
    lambda state, element: state,
    lambda state, element: {**state, "kept": element["delay"]},
    appended,
    told,
    failed,
    failed_later,
    healed,
    lambda state, element: put(state, float("nan")),
    lambda state, element: put(state, (1, 2)),
    lambda state, element: put(state, 2**63),
    lambda state, element: put(state, "\ud800"),
    lambda state, element: put(state, element),
    lambda state, element: put(state, [[{"deep": [element["tail"], None, True]}]]),
    lambda state, element: put(state, [[{"deep": {1}}]]),
    lambda state, element: put(state, {1: "one"}),
    lambda state, element: put(state, element.value),
    lambda state, element: None,
]


def keep(element: Element[Any]) -> Any:
    if element["carrier"] == "X":
        raise RuntimeError("X")
    return element.offset % 5


def away(element: Element[Any]) -> bool:
    return element["late"] and element["delay"] > 1


def key_of(element: Element[Any]) -> Any:
    keys = {"A": element.key, "B": 7, "C": None, "D": 1.5}
    return keys[element["carrier"]]


REST: dict[str, st.SearchStrategy[Any]] = {
    "delay": st.sampled_from([0.5, 2.0, None]),
    "late": st.sampled_from([True, False, None]),
}
deeds = st.fixed_dictionaries(
    {"tail": st.sampled_from(["N1", "N1", "N2"]), "minutes": st.integers(0, len(DEEDS) - 1)}, optional=REST
)
payloads = st.fixed_dictionaries(
    {
        "tail": st.sampled_from(["N1", "N2", None]),
        "carrier": st.sampled_from(["A", "A", "B", "C", "D", "X"]),
        "minutes": st.integers(0, 4),
    },
    optional=REST,
)


@st.composite
def batches(draw: st.DrawFn, of: st.SearchStrategy[dict[str, Any]]) -> list[list[Record]]:
    """Records with and without a hop, some sent again in their batch or later, and tombstones."""
    found: list[list[Record]] = []
    sent: list[tuple[bytes | None, bytes]] = []
    offset = 0
    for _ in range(draw(st.integers(1, 3))):
        batch = []
        for payload in draw(st.lists(of, min_size=1, max_size=9)):
            if sent and draw(st.integers(0, 4)) == 0:
                key, value = draw(st.sampled_from(sent))
            else:
                key = draw(st.sampled_from([b"N1", b"N1", b"N2", None]))
                index = draw(st.sampled_from([0, 0, 0, 1, None]))
                hop = Hop("raw", 0, offset, via="wrap", index=index, topic_id="id-raw", rekeyed=draw(st.booleans()))
                envelope = Envelope(
                    json.dumps(payload).encode(),
                    (hop,) if draw(st.booleans()) else (),
                    event_id=draw(st.sampled_from(["", "e1"])),
                    event_time_us=draw(st.sampled_from([None, 5])),
                )
                value = encode(envelope)
                sent.append((key, value))
            headers = draw(st.sampled_from([(), (), (("a", b"1"), ("a", None))]))
            given = None if draw(st.integers(0, 9)) == 0 else value
            batch.append(Record(TOPIC, 0, offset, key, given, 1_000 + offset, headers, TOPIC_ID))
            offset += 1
        found.append(batch)
    return found


SUMS = Fields(n=count(), m=total("minutes"), at=last("_offset"))


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    flow: Flow[Any] = Flow("odd").source(wrapped(tombstones=draw(st.sampled_from(Tombstones)), stable=DIFFERING))
    steps = ["filter", "divert", "map", "publish", "columns", "lists", "headers"]
    for step in draw(st.lists(st.sampled_from(steps), max_size=3, unique=True)):
        flow = added(flow, step)
    flow = flow.aggregate(
        "first", draw(st.sampled_from(["tail", key_of, "_key"])), draw(st.sampled_from([Odd(), Odd(), SUMS]))
    )
    for step in draw(st.lists(st.sampled_from(["late filter", "again", "late lists"]), max_size=2, unique=True)):
        flow = added(flow, step)
    if draw(st.booleans()):
        flow = flow.aggregate(
            "second", draw(st.sampled_from(["carrier", key_of])), draw(st.sampled_from([Odd(), SUMS]))
        )
    for step in draw(st.lists(st.sampled_from(["last divert", "last publish"]), max_size=2, unique=True)):
        flow = added(flow, step)
    return flow if flow.calls_functions else flow.filter(keep)


def added(flow: Flow[Any], step: str) -> Flow[Any]:
    match step:
        case "filter" | "late filter":
            return flow.filter(keep)
        case "divert" | "last divert":
            return flow.divert(away)
        case "map":
            return flow.map(minutes=pl.col("minutes"), half=pl.col("delay") / 2)
        case "columns":
            return flow.filter((pl.col("_offset") != 3) & (pl.col("_timestamp") < 1_020)).map(who=pl.col("_event_id"))
        case "lists":
            hops, headers = pl.col("_chain"), pl.col("_headers")
            return flow.filter(hops.list.first().struct.field("offset").ne_missing(3)).map(
                hops=hops, headers=headers, size=headers.list.len() + hops.list.len()
            )
        case "headers":
            return flow.flat_map(pl.col("_headers").alias("header"))
        case "late lists":
            return flow.map(late=pl.col("_chain"), name=pl.col("_headers").list.last().struct.field("value"))
        case _:
            return flow.publish("out", key=key_of if step == "again" else None, name=step.replace(" ", "-"))


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(batches(deeds))
def test_a_fold_in_python_does_on_columns_what_it_does_message_by_message(given_batches: list[list[Record]]) -> None:
    both = Both(Flow("odd").source(wrapped(tombstones="dead_letter")).aggregate("a", "tail", Odd()))
    for batch in given_batches:
        both.process(batch)


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(flows(), batches(payloads))
def test_functions_do_on_columns_what_they_do_message_by_message(
    flow: Flow[Any], given_batches: list[list[Record]]
) -> None:
    both = Both(flow)
    for batch in given_batches:
        both.process(batch)


HOP, HEADER = pl.col("_chain").list.last().struct, pl.col("_headers").list.first().struct
SEEN = Fields(
    n=count(),
    hops=total(pl.col("_chain").list.len()),
    headers=total(pl.col("_headers").list.len()),
    via=last(HOP.field("via"), by="_offset"),
    index=last(HOP.field("index"), by="_offset"),
    rekeyed=last(HOP.field("rekeyed"), by="_offset"),
    name=last(HEADER.field("key"), by="_offset"),
)


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(
    batches(payloads),
    st.sampled_from(["tail", HOP.field("topic"), HEADER.field("value")]),
    st.sampled_from(["_key", HOP.field("offset"), HEADER.field("key")]),
    st.booleans(),
)
def test_expressions_read_headers_and_chain_without_any_function(
    given_batches: list[list[Record]], first: str | pl.Expr, second: str | pl.Expr, envelope: bool
) -> None:
    flow = Flow("lists").source((wrapped if envelope else bare)(stable=DIFFERING))
    flow = (
        flow.filter(pl.col("_chain").list.len() < 2).aggregate("first", first, SEEN).aggregate("second", second, SEEN)
    )
    assert not flow.calls_functions
    both = Both(flow)
    for batch in given_batches:
        both.process(batch)


class Shown:
    """Keeps every element as text."""

    def zero(self) -> list[str]:
        return []

    def fold(self, state: list[str], element: Element[Any]) -> list[str]:
        return [*state, repr(element)]


def test_a_fold_sees_every_kind_of_column_as_it_is_message_by_message() -> None:
    every = Every(
        int64=2**63 - 1, uint64=2**64 - 1, float=0.1, double=-0.0, bytes=b"\xff", string="é", rep_double=[0.5]
    )
    every.at.x = 7
    every.track.add(x=1)
    every.track.add(name="n")
    every.rep_bytes.append(b"\x00")
    flow = Flow("every").source(Topic("every", Every, envelope=False)).aggregate("a", pl.lit("all"), Shown())
    both = Both(flow)
    both.process([record("every", n, b"k", one.SerializeToString()) for n, one in enumerate([every, Every(int32=1)])])
    [state] = both.results("a").values()
    assert "'at': {'x': 7, 'name': None}" in state[0]
    assert both.dead_letters == []
