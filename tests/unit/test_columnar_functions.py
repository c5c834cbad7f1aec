"""Functions and folds in plain Python on the vectorised path: what they are called with, and what is not called twice."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from aggregations.columns.decode import Decoder
from aggregations.columns.elements import Elements
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.records import StoredStates, form_of
from aggregations.definition.aggregates import count, last, total
from aggregations.definition.element import Element, Record
from aggregations.definition.expressions import CANNOT
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.folds import check_state
from aggregations.definition.source import RecordDecoder, Topic
from aggregations.engine.python_fold import fold_elements
from envelope import EnvelopeError, Histories, History, Hop, Node, Reason, decode
from persistence.record import StateRecord, encode_record
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import TOPIC, bare, chained, hop, leg, table_of, wrapped


class Seen:
    """Counts, and keeps offsets; refuses negative minutes after it has changed the state."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def zero(self) -> dict[str, Any]:
        return {"n": 0, "offsets": []}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        self.calls.append(element.offset)
        state["n"] += 1
        state["offsets"].append(element.offset)
        if element["minutes"] < 0:
            raise ValueError("negative")
        return state


def elements_of(records: list[Record], topic: Topic) -> Elements:
    batch = Decoder(topic).decode(table_of(records))
    frame = batch.frame.with_columns(pl.Series("_value", [one.value for one in records], dtype=pl.Binary))
    return Elements(frame, batch.signatures, lambda _: topic, lambda *place: Node(*place, TOPIC_ID))


def test_an_element_over_columns_is_the_element_of_its_record() -> None:
    records = [chained(n, hop("raw", 1, n), event_id=f"e{n}", minutes=n, late=None) for n in range(2)]
    decoder = RecordDecoder(wrapped())
    for lazy, one in zip(elements_of(records, wrapped()), records, strict=True):
        whole = decoder.decode(one).element(one)
        assert (lazy["minutes"], lazy["late"], lazy.offset) == (one.offset, None, one.offset)
        assert lazy.chain == decode(one.value).chain != ()
        assert repr(lazy) == repr(whole)
        assert replace(lazy, value=1) == replace(lazy, value=1)
        for made in (pickle.loads(pickle.dumps(lazy)), copy.copy(lazy)):
            assert made == whole
        assert (lazy.root, lazy.lineage, lazy.of("x").value) == (whole.root, whole.lineage, "x")
        assert isinstance(lazy, Element)


def test_an_element_over_columns_fails_as_any_element_does() -> None:
    [one] = elements_of([leg(0, minutes=1)], bare())
    with pytest.raises(KeyError, match="'minute'"):
        one["minute"]
    with pytest.raises(KeyError, match="not a mapping"):
        one.of(3)["minutes"]
    with pytest.raises(AttributeError, match="'Element' object has no attribute 'minutes'"):
        one.minutes
    with pytest.raises(FrozenInstanceError):
        one.key = b"other"
    one.value["minutes"] = 5
    assert one["minutes"] == 5


def test_a_fold_is_called_once_for_each_accepted_message_and_careful_only_for_the_keys_that_need_it() -> None:
    fold = Seen()
    both = Both(Flow("f").source(bare()).aggregate("a", "tail", fold))
    records = [leg(n, "AB"[n % 2], minutes=-1 if n == 3 else n) for n in range(6)]
    both.process(records)
    assert both.reasons() == [(3, Reason.FOLD_FAILED)]
    assert both.results("a") == {b"A": {"n": 3, "offsets": [0, 2, 4]}, b"B": {"n": 2, "offsets": [1, 5]}}
    [letter] = both.dead_letters
    assert letter.raised is not None
    assert (letter.raised.kind, letter.raised.text, letter.hole) == ("ValueError", "negative", True)
    fold.calls.clear()
    work = both._folded([leg(n, "AB"[n % 2], minutes=n) for n in range(6, 10)])[0]
    assert sorted(fold.calls) == [6, 7, 8, 9]
    assert work.collector.dead == {}


def test_a_key_whose_fold_raises_is_unfit_and_the_other_states_follow_from_the_stored_ones() -> None:
    names = LaneNames()
    held = Histories({"legs:0#T1": History(((5,),), used=1)})
    before = [{"n": 1, "offsets": [9]}, {"n": 1, "offsets": [8]}]
    stored = StoredStates(
        [*(encode_record(StateRecord("d", state, held)) for state in before), None], form_of("d", None), names
    )
    found = elements_of([leg(0, minutes=1), leg(1, minutes=-1), leg(2, minutes=1)], bare())
    [stage] = Flow("f").source(bare()).aggregate("a", "tail", Seen()).stages
    folded, passed = fold_elements(stage.aggregate, found, np.array([0, 1, 2]), stored)
    assert passed == []
    assert folded.unfit.tolist() == [False, True, False]
    texts = [folded.texts[folded.values.first[0, key] : folded.values.last[0, key]] for key in (0, 2)]
    assert texts == [b'{"n":2,"offsets":[9,0]}', b'{"n":1,"offsets":[2]}']


class Passing:
    """Makes its state what it is told to: a state that JSON would change must not even be passed through."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def zero(self) -> Any:
        return 0

    def fold(self, state: Any, element: Element[Any]) -> Any:
        return self.value if element.offset == 1 else 7


NOT_STATES = {
    "NaN": float("nan"),
    "infinity": [-float("inf")],
    "too long": {"a": {"b": 2**63}},
    "tuple": (1,),
    "surrogate": ["\ud800"],
    "name": {"\ud800": 1},
    "number as name": {1: 1},
    "set": [[{1}]],
    "a subclass": type("Text", (str,), {})("a"),
}


@pytest.mark.parametrize("value", NOT_STATES.values(), ids=NOT_STATES)
def test_a_message_whose_state_json_would_change_is_a_dead_letter_also_if_the_next_one_mends_it(value: Any) -> None:
    both = Both(Flow("f").source(bare()).aggregate("a", "tail", Passing(value)))
    both.process([leg(n, minutes=n) for n in range(3)])
    assert [offset for offset, _ in both.reasons()] == [1]
    assert both.results("a") == {b"N1": 7}


STATES = [None, True, -(2**63), 2**63 - 1, 1.5, "é", [], {}, [[None, {"a": [1.0, "b", False]}]], {"é": {"": 0}}]


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_a_state_that_json_preserves_is_accepted(state: Any) -> None:
    check_state(state)


def broken(element: Element[Any]) -> bool:
    if element["minutes"] == 1:
        raise RuntimeError("one")
    return bool(element["late"])


@pytest.mark.parametrize("step", ["filter", "divert", "key", "publish"])
def test_a_function_that_raises_rejects_its_record_alone_and_names_itself(step: str) -> None:
    flow: Flow[Any] = Flow("f").source(bare())
    match step:
        case "filter":
            flow = flow.filter(broken)
        case "divert":
            flow = flow.divert(broken)
        case "publish":
            flow = flow.publish("out", key=lambda element: b"k" if broken(element) else b"l")
    both = Both(flow.aggregate("a", (lambda element: str(broken(element))) if step == "key" else "tail", Seen()))
    both.process([leg(n, minutes=n, late=n == 2) for n in range(4)])
    [letter] = [one for one in both.dead_letters if one.reason is not Reason.DIVERTED]
    assert (letter.record.offset, letter.reason, letter.hole) == (1, Reason.TRANSFORM_FAILED, False)
    assert letter.raised is not None
    assert letter.raised.text == "one"
    if step in ("filter", "divert"):
        assert letter.detail == "RuntimeError in broken"


def test_a_record_that_a_later_step_of_the_end_rejects_publishes_nothing() -> None:
    flow = Flow("f").source(bare()).aggregate("a", "tail", Fields(n=count())).publish("out").divert("late")
    both = Both(flow)
    both.process([leg(n, minutes=n, late=n == 1) for n in range(3)])
    assert [output.own.offset for output in both.memory.outputs if output.own] == [0, 2]
    assert both.reasons() == [(1, Reason.DIVERTED)]


def test_the_records_facts_are_columns_of_every_expression_on_both_paths() -> None:
    flow = (
        Flow("f")
        .source(wrapped(stable=["_offset", "_partition", "_timestamp"]))
        .filter(pl.col("_partition") == 0)
        .map(name=pl.col("_topic") + "/" + pl.col("_event_id"), size=pl.col("_key").bin.size())
        .divert(pl.col("_timestamp") > 1_001)
        .aggregate("a", "_key", Fields(n=count(), at=last("_offset"), size=total("size"), name=last("name")))
        .aggregate("b", pl.col("_event_time_us") // 1_000_000, Fields(n=count(), top=last("name", by="_offset")))
    )
    assert flow.columns == {"name", "size"}, "none of the payload"
    assert flow.schema is not None
    assert not any(name.startswith("_") for name in flow.schema)
    records = [replace(chained(n, hop("raw", 0, n), event_id=f"e{n}"), timestamp_ms=1_000 + n) for n in range(3)]
    both = Both(flow)
    both.process([*records, chained(3, hop("raw", 1, 0), partition=1)])
    assert both.results("a") == {b"N1": {"n": 2, "at": 1, "size": 4, "name": f"{TOPIC}/e1"}}
    assert both.results("b") == {b"1": {"n": 2, "top": f"{TOPIC}/e1"}}
    assert both.reasons() == [(2, Reason.DIVERTED)]


def test_a_record_without_a_key_has_a_null_key_column() -> None:
    both = Both(Flow("f").source(bare()).aggregate("a", "_key", Fields(n=count())))
    both.process([leg(0), leg(1, None)])
    assert both.results("a") == {b"N1": {"n": 1}}
    assert both.reasons() == [(1, Reason.NULL_KEY)]


def test_headers_and_chain_are_lists_that_equal_what_a_function_reads() -> None:
    def same(element: Element[Any]) -> bool:
        headers = [(one["key"], one["value"]) for one in element["headers"]]
        return headers == list(element.headers) and [Hop(**one) for one in element["chain"]] == list(element.chain)

    full = Hop("raw", 1, 5, "a", 2, 3, True, False, "id", 7, 9, "eu", True)
    kept = Flow("f").source(wrapped()).map(headers="_headers", chain="_chain").divert(lambda one: not same(one))
    both = Both(kept.aggregate("a", "tail", Fields(n=count(), hops=total(pl.col("chain").list.len()))))
    record = replace(chained(0, full, hop("mid", 0, 1)), headers=(("a", b"1"), ("a", None)))
    both.process([record, chained(1), replace(chained(2), headers=(("", b""),))])
    assert both.results("a") == {b"N1": {"n": 3, "hops": 2}}
    both.process([chained(3)])
    assert both.results("a") == {b"N1": {"n": 4, "hops": 2}}


def test_headers_and_chain_are_made_only_for_expressions_that_read_them() -> None:
    flow = Flow("f").source(wrapped()).aggregate("a", "tail", Fields(n=count()))
    assert (flow.system_lists, flow.reads_headers) == (frozenset(), False)
    assert flow.publish("out").reads_headers
    assert flow.publish("out", key=pl.col("_chain").list.first().struct.field("topic")).system_lists == {"_chain"}
    read = flow.map(headers=pl.col("_headers").list.len() > 0)
    assert (read.system_lists, read.reads_headers) == (frozenset({"_headers"}), True)


def test_a_redriven_record_of_a_topic_without_envelopes_has_its_chain_as_a_column() -> None:
    hops = pl.col("_chain").list.len()
    told = bare(stable=["_chain"])  # only a redriven record has hops, so only it passes
    flow = Flow("f").source(told).divert(pl.col("late") & (hops == 0)).aggregate("a", "tail", Fields(hops=total(hops)))
    both = Both(flow)
    both.process([leg(0, late=True), leg(1, late=False)])
    both.process([both.redriven(both.dead_letters[0], 2)])
    assert both.results("a") == {b"N1": {"hops": 2}}, "the rejected record and the dead letter"


def test_the_records_facts_are_columns_behind_a_function_that_replaces_the_value() -> None:
    from tests.support.pure import runner, states

    flow: Flow[Any] = Flow("f").source(bare(stable=["_offset"])).map(lambda element: element.offset)
    run = runner(flow.aggregate("a", "_key", Fields(n=count(), at=last("_offset"))))
    run.process([leg(0), leg(1, "N2"), leg(2)])
    assert states(run, "a") == {"N1": {"n": 2, "at": 2}, "N2": {"n": 1, "at": 1}}
    wrong = runner(flow.filter(pl.col("_offset") / pl.col("minutes") > 0).aggregate("a", "_key", Fields(n=count())))
    wrong.process([leg(0)])
    assert [letter.reason for letter in wrong.dead_letters] == [Reason.MISSING_FIELD]


def test_an_unknown_column_with_an_underscore_is_refused_where_it_is_written() -> None:
    with pytest.raises(Exception, match="no column _ofset; the columns are"):
        Flow("f").source(bare()).filter(pl.col("_ofset") > 0)


def test_the_error_of_an_expression_over_a_records_facts_is_that_of_both_paths() -> None:
    flow = Flow("f").source(bare()).filter(pl.col("_key").cast(pl.String).cast(pl.Int64) > 0)
    both = Both(flow.aggregate("a", "tail", Seen()))
    both.process([leg(0, "1", minutes=0), leg(1, "x", minutes=0)])
    [letter] = both.dead_letters
    assert (letter.record.offset, letter.reason, letter.detail) == (1, Reason.TRANSFORM_FAILED, CANNOT)
    with pytest.raises(EnvelopeError):
        check_state({1})
