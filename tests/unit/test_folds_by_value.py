"""States are passed by value: what a fold shares with an element, with another state or with itself has no effect."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from aggregations import Element, Fields, Flow, Json, MemoryRunner, Record, Topic, bind, count, session
from aggregations.definition.folds import check_state, returned
from aggregations.errors import FlowError
from envelope import EnvelopeError, Histories
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record
from persistence.seal import seal, unseal
from tests.support.both import Both, record
from tests.support.pure import fresh_store

SOURCE = Topic("posts", Json({"k": str, "tags": [str], "x": int, "ms": int}), envelope=False, time="ms")
SPLITS = [(6,), (2, 2, 2), (1, 1, 1, 1, 1, 1)]


class Tags:
    """All tags of a key. The first list is the element's own, and grows."""

    def zero(self) -> dict[str, Any]:
        return {"tags": []}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        if element["x"] < 0:
            raise ValueError("below zero")
        if not state["tags"]:
            state["tags"] = element["tags"]
        else:
            state["tags"] += element["tags"]
        return state


class Row:
    """The last element's row as the state, which the next call changes."""

    def zero(self) -> dict[str, Any]:
        return {}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        state["x"] = state.get("x", 0) + 100
        state["tags"] = []
        return {**element.value, "before": state["x"]} if element["x"] % 2 else element.value  # type: ignore[no-any-return]


class Shared:
    """One list at two places of the state, and one of them grows."""

    def zero(self) -> dict[str, Any]:
        return {"now": [], "past": []}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        state["past"].append(state["now"])
        state["now"].append(element["x"])
        return state


def posts(*numbers: int) -> list[Record]:
    return [
        record(
            "posts",
            n,
            b"a",
            json.dumps({"k": "a", "tags": [f"t{n}"], "x": -1 if n in numbers else n, "ms": n}).encode(),
        )
        for n in range(6)
    ]


def after(flow: Flow[Any], sizes: Sequence[int], records: Sequence[Record]) -> list[Any]:
    """The states of every stage after the records in batches of these sizes, the same on both paths."""
    both, at = Both(flow), 0
    for size in sizes:
        both.process(records[at : at + size])
        at += size
    return [{key: one.fold for key, one in both.memory.states(stage.name).items()} for stage in flow.stages]


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_a_record_that_cannot_be_folded_leaves_no_copies_of_those_before_it(sizes: Sequence[int]) -> None:
    flow = Flow("f").source(SOURCE).aggregate("key", "k", Tags())
    assert after(flow, sizes, posts(4)) == [{b"a": {"tags": ["t0", "t1", "t2", "t3", "t5"]}}]


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("mapped", [False, True], ids=["columns", "after a function"])
def test_an_element_is_passed_on_as_it_was(sizes: Sequence[int], mapped: bool) -> None:
    flow: Any = Flow("f").source(SOURCE)
    if mapped:
        flow = flow.map(lambda element: dict(element.value))
    flow = flow.aggregate("key", "k", Tags()).flat_map(lambda element: [{"tag": one} for one in element["tags"]])
    flow = flow.aggregate("tag", "tag", Fields(n=count()))
    _, tags = after(flow, sizes, posts())
    assert tags == {f"t{n}".encode(): {"n": 1} for n in range(6)}


@pytest.mark.parametrize("fold", [Row(), Shared()], ids=["row", "shared"])
def test_the_state_does_not_depend_on_where_batches_end(fold: Any) -> None:
    flow = Flow("f").source(SOURCE).aggregate("key", "k", fold).aggregate("again", "k", Tags())
    first, *others = [after(flow, sizes, posts()) for sizes in SPLITS]
    assert others == [first, first]


class Constant:
    """Its zero is one object."""

    def __init__(self) -> None:
        self.none = {"n": 0}

    def zero(self) -> dict[str, int]:
        return self.none

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        state["n"] += 1
        return state

    def merge(self, state: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {"n": state["n"] + other["n"]}


@pytest.mark.parametrize("options", [{}, {"window": session("10s")}, {"expire_after": "10s"}], ids=str)
def test_a_zero_that_is_one_object_stays_zero(options: dict[str, Any]) -> None:
    fold = Constant()
    flow = Flow("f").source(SOURCE).aggregate("key", "k", fold, **options)
    records = [
        record("posts", n, b"a", json.dumps({"k": "ab"[n % 2], "tags": [], "x": 1, "ms": 60_000 * n}).encode())
        for n in range(6)
    ]
    after(flow, (3, 3), records)
    assert fold.none == {"n": 0}


def test_only_what_may_be_shared_is_copied() -> None:
    flat: dict[str, Any] = {"a": 1, "b": "x"}
    assert returned(flat, flat) is flat
    assert returned(flat, {}) == flat
    assert returned(flat, {}) is not flat
    assert returned(7, 5) == 7
    inner: list[int] = []
    nested = returned({"a": inner, "b": inner}, None)
    assert nested == {"a": [], "b": []}
    assert nested["a"] is not nested["b"]


def nest(levels: int) -> Any:
    state: Any = 1
    for _ in range(levels):
        state = [state]
    return state


class Deeper:
    def zero(self) -> Any:
        return nest(498)

    def fold(self, state: Any, element: Element[Any]) -> Any:
        return [state]


def test_a_state_that_is_too_deep_to_be_read_is_not_stored() -> None:
    check_state(nest(500))
    with pytest.raises(EnvelopeError, match="deeper than 500 levels"):
        check_state(nest(501))
    flow = Flow("f").source(SOURCE).aggregate("key", "k", Deeper())
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    runner.process(posts())
    assert runner.states("key")[b"a"].fold == nest(500)
    assert [(one.record.offset, one.reason) for one in runner.dead_letters] == [(n, "fold_failed") for n in range(2, 6)]


def test_a_stored_state_that_is_too_deep_is_named() -> None:
    record_of = StateRecord("d", nest(500), Histories())
    value, ref = encode_record(record_of), FlowRef("f").stage("s")
    assert decode_record(value, ref, b"k").state == nest(500)
    body = unseal(value).replace(b"[" * 500 + b"1" + b"]" * 500, b"[" * 5000 + b"1" + b"]" * 5000)
    with pytest.raises(Corrupt, match=r"key b'k'.*cannot be read.*recursion"):
        decode_record(seal(body), ref, b"k")


def test_a_zero_that_is_too_deep_is_refused() -> None:
    class Zero(Deeper):
        def zero(self) -> Any:
            return nest(501)

    with pytest.raises(FlowError, match="deeper"):
        Flow("f").source(SOURCE).aggregate("key", "k", Zero())
