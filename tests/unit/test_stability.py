"""What differs between two deliveries of an event decides nothing: where it is refused, and what is the same in both."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from aggregations import Emit, Fields, Flow, Json, Record, Topic, count, last, maximum, tumbling, window_columns
from aggregations.errors import FlowError
from envelope import Envelope, Hop, decode, encode
from envelope.filters import TimeWindows, deduplicate, distinct, from_value
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import runner

DIFFERING = ["_chain", "_headers", "_offset", "_partition", "_timestamp"]
N = Fields(n=count())
TABLE = Topic("fees", Json({"fee": int}), envelope=False)

SAME = {
    "the payload": pl.col("tail"),
    "the key": pl.col("_key").cast(pl.String),
    "the topic": pl.col("_topic"),
    "the event id": pl.col("_event_id"),
    "the event time": pl.col("_event_time_us").cast(pl.String),
    "the offset of the root": pl.col("_chain").list.first().struct.field("offset").cast(pl.String),
    "the time of the root": pl.col("_chain").list.get(0).struct.field("timestamp_ms").cast(pl.String),
}
OTHER = {
    "the offset": pl.col("_offset").cast(pl.String),
    "the partition": pl.col("_partition").cast(pl.String),
    "the timestamp": pl.col("_timestamp").cast(pl.String),
    "a header": pl.col("_headers").list.first().struct.field("value").cast(pl.String),
    "the last hop": pl.col("_chain").list.last().struct.field("offset").cast(pl.String),
    "the second hop": pl.col("_chain").list.get(1).struct.field("timestamp_ms").cast(pl.String),
    "who sent the root on": pl.col("_chain").list.first().struct.field("via"),
    "whether the root was tried again": pl.col("_chain").list.first().struct.field("pass_through").cast(pl.String),
    "the number of hops": pl.col("_chain").list.len().cast(pl.String),
    "the first hop, and another one": pl.concat_str(
        *(pl.col("_chain").list.get(n).struct.field("offset").cast(pl.String) for n in (0, 1))
    ),
    "one of several": pl.when(pl.col("minutes") > 0).then(pl.col("_offset")).cast(pl.String),
}


def even(text: pl.Expr) -> pl.Expr:
    return text.str.contains("[02468]$")


def chosen(text: pl.Expr) -> pl.Expr:
    return pl.when(even(text)).then(pl.lit("out.even")).otherwise(pl.lit("out.odd"))


PLACES: dict[str, Callable[[Flow[Any], pl.Expr], Flow[Any]]] = {
    "a filter": lambda flow, text: flow.filter(even(text)),
    "a diversion": lambda flow, text: flow.divert(even(text)),
    "a branch": lambda flow, text: flow.branch("b", even(text), lambda one: one.publish("out")),
    "a filter in a branch": lambda flow, text: flow.also_to("b", lambda one: one.filter(even(text)).publish("out")),
    "a list of items": lambda flow, text: flow.flat_map(pl.concat_list(text, pl.lit("N1")).alias("tail")),
    "the key of a stage": lambda flow, text: flow.aggregate("first", text, N),
    "the key of an output": lambda flow, text: flow.publish("out", key=text),
    "the topic of an output": lambda flow, text: flow.publish(chosen(text), topics=["out.even", "out.odd"]),
    "the condition of a field": lambda flow, text: flow.aggregate("first", "tail", Fields(n=count(where=even(text)))),
    "the order of a field": lambda flow, text: flow.aggregate("first", "tail", Fields(n=last("minutes", by=text))),
    "the condition of emit": lambda flow, text: flow.aggregate("first", "tail", N, emit=Emit(tail="tail").when(even(text))),
    "the state in the condition of emit": lambda flow, text: flow.aggregate(
        "first", "tail", Fields(n=maximum(text)), emit=Emit(tail="tail", n="new.n").changed()
    ),
    "the key of a lookup": lambda flow, text: flow.aggregate("first", "tail", N).lookup("fees", TABLE, text),
    "a column of map": lambda flow, text: flow.map(made=text).aggregate("first", "made", N),
    "a column of a column": lambda flow, text: flow.map(made=text).map(more="made", made="tail").filter(even(pl.col("more"))),
    "a column of emit": lambda flow, text: flow.aggregate("first", "tail", N, emit=Emit(tail=text)),
    "a result of emit": lambda flow, text: flow.aggregate("first", "tail", Fields(n=maximum(text)), emit=Emit(tail="new.n")),
}  # fmt: skip


def source(**options: Any) -> Flow[Any]:
    return Flow("f").source(Topic("legs", Json({"tail": str, "minutes": int}), **options))


def sent(event: int, offset: int, again: int = 0) -> Record:
    """A delivery of an event that two republishers passed on; the first one has sent it again `again` times before."""
    hops = (
        Hop("raw", 0, event, via="a", index=0, topic_id="R", timestamp_ms=event),
        Hop("mid", 0, event + 10 * again, via="b", index=0, topic_id="M", timestamp_ms=event + 10 * again),
    )
    payload = b'{"tail": "N%d", "minutes": %d}' % (event % 2, event)
    value = encode(Envelope(payload, hops, event_id=f"e{event}", event_time_us=event * 1_000))
    headers = (("attempt", b"%d" % again),)
    return Record("legs", 0, offset, b"N%d" % (event % 2), value, 1_000 + offset, headers, TOPIC_ID)


def outcome(flow: Flow[Any], *batches: list[Record]) -> tuple[Any, Any]:
    """States and distinct outputs, the same on both paths."""
    both = Both(flow)
    for batch in batches:
        both.process(batch)
    outputs = {(one.topic, one.key) for one in both.memory.outputs}
    return {stage.name: both.results(stage.name) for stage in flow.stages}, outputs


FIRST = [sent(event, event) for event in range(3)]
COPIES = [sent(event, 7 + event, again=1) for event in range(3)]


@pytest.mark.parametrize("made", SAME.values(), ids=SAME)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_is_accepted_gives_the_same_whether_events_are_sent_once_or_twice(place: Any, made: pl.Expr) -> None:
    flow = place(source(), made).aggregate("tails", "tail", N)
    once = runner(flow)
    once.process(FIRST)
    states = {stage.name: once.results(stage.name) for stage in flow.stages}
    assert outcome(flow, FIRST, COPIES) == (states, {(one.topic, one.key) for one in once.outputs})


@pytest.mark.parametrize("made", OTHER.values(), ids=OTHER)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_differs_between_two_deliveries_is_refused_wherever_it_would_decide(place: Any, made: pl.Expr) -> None:
    with pytest.raises(FlowError, match=r"what differs between two deliveries .* declare Topic\(..., stable=\['_"):
        place(source(), made).aggregate("tails", "tail", N)
    place(source(stable=DIFFERING), made).aggregate("tails", "tail", N)


@pytest.mark.parametrize("name", ["the offset", "the timestamp", "a header", "the last hop", "the second hop"])
def test_a_column_that_is_declared_stable_and_is_not_counts_copies_again(name: str) -> None:
    flow = source(stable=DIFFERING).aggregate("a", OTHER[name], N)
    states, _ = outcome(flow, FIRST, COPIES)
    assert sum(state["n"] for state in states["a"].values()) == 2 * len(FIRST)


def test_a_header_that_every_delivery_has_may_decide_if_the_topic_says_so() -> None:
    kind = pl.col("_headers").list.first().struct.field("key").cast(pl.String)
    flow = source(stable=["_headers"]).aggregate("a", kind, N)
    assert outcome(flow, FIRST, COPIES)[0] == {"a": {b"attempt": {"n": 3}}}
    with pytest.raises(FlowError, match="key= reads _offset"):
        source(stable=["_headers"]).aggregate("a", "_offset", N)


def test_a_result_that_is_only_stored_is_that_of_the_delivery_that_was_folded() -> None:
    flow = (
        source()
        .map(at="_offset", seen="_headers", hops=pl.col("_chain").list.len())
        .aggregate("a", "_topic", Fields(n=count("at"), at=maximum("at"), late=maximum(pl.col("_timestamp")), hops=maximum("hops")))
        .publish("out")
    )  # fmt: skip
    states = {"a": {b"legs": {"n": 3, "at": 2, "late": 1_002, "hops": 2}}}
    assert outcome(flow, FIRST, COPIES)[0] == states


def test_the_error_names_the_place_the_columns_and_what_was_made_of_them() -> None:
    flow = source().map(age=pl.col("_timestamp") - pl.col("minutes"))
    with pytest.raises(FlowError, match=r"stage 'a': key= reads _timestamp, as age: .* stable=\['_timestamp'\]\)"):
        flow.aggregate("a", "age", N)
    with pytest.raises(FlowError, match=r"filter\(\): it reads _offset, _timestamp, as "):
        flow.filter(pl.col("age") > pl.col("_offset"))
    assert flow.map(age="minutes").filter(pl.col("age") > 0).schema


def test_a_column_is_stable_behind_several_sources_if_each_of_them_says_so() -> None:
    def read(*stable: list[str]) -> Flow[Any]:
        first, second = (
            Flow("f").source(Topic(name, Json({"tail": str}), stable=columns)).map(at="_timestamp")
            for name, columns in zip("ab", stable, strict=True)
        )
        return first.merge(second)

    for key in ("at", "_timestamp"):
        assert read(["_timestamp"], ["_timestamp"]).aggregate("a", key, N)
        for one in (["_offset"], []):
            with pytest.raises(FlowError, match="reads _timestamp"):
                read(["_timestamp"], one).aggregate("a", key, N)


def test_behind_a_function_that_replaces_the_values_only_columns_of_the_record_are_known() -> None:
    flow = source().map(at="_offset").map(lambda element: {"at": element["minutes"]})
    assert flow.aggregate("a", "at", N)
    with pytest.raises(FlowError, match="reads _offset"):
        flow.aggregate("a", "_offset", N)


HOUR = 3_600_000


class Prefixed:
    """Makes keys by a method, or as a callable object."""

    offset = 7

    def key(self, element: Any) -> str:
        return f"{self.offset}/{element.offset}"

    def __call__(self, element: Any) -> str:
        return f"{self.offset}/{element.offset}"

    def other(self, element: Any) -> str:
        return f"{self.offset}/{element.key}"


def place_of(element: Any, digits: int = 3) -> str:
    return f"{element.offset:0{digits}}"


def place_by(element: Any) -> str:
    return place_of(element, 5) if element["minutes"] else place_by(element)


READING: dict[str, Callable[[Any], Any]] = {
    "the offset": lambda element: str(element.offset),
    "the hour of the timestamp": lambda element: str(element.timestamp_ms // HOUR),
    "the coordinates, in a branch of the code": lambda element: str(element.own if element["minutes"] else ""),
    "the partition, in a nested function": lambda element: "".join(str(element.partition + n) for n in range(2)),
    "a header": lambda element: str(dict(element.headers)),
    "the offset, in a method": Prefixed().key,
    "the offset, in an object": Prefixed(),
    "the offset, in a function that it calls": lambda element: place_by(element),
    "the last hop": lambda element: str(element.chain[-1].offset),
    "the number of hops": lambda element: str(len(element.chain)),
}
DECIDING: dict[str, Callable[[Flow[Any], Any], Flow[Any]]] = {
    "a filter": lambda flow, function: flow.filter(function),
    "a diversion": lambda flow, function: flow.divert(function),
    "a branch": lambda flow, function: flow.branch("b", function, lambda one: one.publish("out")),
    "the key of a stage": lambda flow, function: flow.aggregate("a", function, N),
    "the key of an output": lambda flow, function: flow.publish("out", key=function),
    "the topic of an output": lambda flow, function: flow.publish(function, topics=["out"]),
}


@pytest.mark.parametrize("function", READING.values(), ids=READING)
@pytest.mark.parametrize("place", DECIDING.values(), ids=DECIDING)
def test_a_function_that_decides_is_refused_if_its_code_reads_what_differs(place: Any, function: Any) -> None:
    with pytest.raises(FlowError, match=r"reads _.*, as .*: what differs .* declare Topic\(..., stable=\['_"):
        place(source(), function)
    assert place(source(stable=DIFFERING), function)


def test_a_function_may_read_what_is_the_same_and_one_whose_values_are_stored_whatever_it_likes() -> None:
    def items(element: Any) -> list[Any]:
        return [element.offset, element.partition]

    same = source().filter(lambda element: element.root.offset > 0 and element.event_time_us > 0)
    assert same.aggregate("a", lambda element: element.event_id or element["offset"], N)
    assert same.aggregate("a", lambda element: str(element.chain[0].offset), N)
    assert same.aggregate("a", Prefixed().other, N)
    assert source().map(lambda element: element.offset).aggregate("a", "_topic", N)
    assert source().flat_map(items).publish("out", value=lambda element: b"%d" % element.offset)


def test_a_filter_compares_no_column_that_differs_but_may_take_its_time_from_one() -> None:
    flow = source().map(id="_event_id", at="_timestamp", place="_offset")
    hour = timedelta(hours=1)
    assert flow.deduplicate(deduplicate(from_value("id"), hour, time=from_value("at")))
    with pytest.raises(FlowError, match="the filter reads _offset, as place"):
        flow.deduplicate(deduplicate(from_value("place"), hour))


def test_the_windows_of_distinct_are_keys_only_if_records_keep_their_times() -> None:
    rule = distinct(TimeWindows(timedelta(hours=1)))
    flow = source().deduplicate(rule).map(**window_columns(rule))
    with pytest.raises(FlowError, match="key= reads _timestamp, as window_start_ms"):
        flow.aggregate("a", "window_start_ms", N)
    kept = source(stable=["_timestamp"]).deduplicate(rule).map(**window_columns(rule))
    assert kept.aggregate("a", "window_start_ms", N)


@pytest.mark.parametrize("wrong", ["_offset", 3, ["_key"], ["tail"], [3], [["_offset"]]])
def test_stable_takes_a_list_of_the_columns_that_may_differ(wrong: Any) -> None:
    with pytest.raises(FlowError, match=r"topic legs: stable= takes a list of columns, of _chain, .*; got"):
        source(stable=wrong)


def test_the_declaration_is_shown_and_changes_no_definition() -> None:
    plain, stable = (source(stable=columns).aggregate("a", "tail", N) for columns in ((), ("_timestamp", "_offset")))
    assert plain.definitions == stable.definitions
    assert "stable" not in plain.describe()
    assert "legs, stable _offset _timestamp" in stable.describe()


@pytest.mark.parametrize(("root_ms", "found"), [(5, {b"5000": {"n": 1}}), (None, {b"9": {"n": 1}, b"10": {"n": 1}})])
def test_a_message_without_an_event_time_has_that_of_its_root_if_the_republisher_wrote_it(
    root_ms: Any, found: Any
) -> None:
    hops = (Hop("raw", 0, 3, via="a", index=0, topic_id="R", timestamp_ms=root_ms),)
    value = encode(Envelope(b'{"tail": "N1"}', hops))
    copies = [Record("legs", 0, n, b"N1", value, (9 + n) * 1_000, (), TOPIC_ID) for n in range(2)]
    seconds = pl.col("_event_time_us") // (1 if root_ms else 1_000_000)
    flow = source().aggregate("a", seconds, N).publish("out")
    both = Both(flow)
    both.process(copies)
    assert both.results("a") == found
    assert {decode(one.value).event_time_us for one in both.memory.outputs} == (
        {5_000} if root_ms else {9 * 10**6, 10**7}
    )
    counted = Both(source().aggregate("a", "tail", N, window=tumbling("1h")))
    counted.process(copies)
    assert len(counted.results("a")) == (root_ms is not None)
