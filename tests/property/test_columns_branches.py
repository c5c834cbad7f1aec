"""Branches, chosen topics and flows without a stage give the same on the vectorised path as message by message."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from tests.support.both import TOPIC_ID, Both
from tests.support.letters import LEGS, back, leg

Step = Callable[[Flow[Any]], Flow[Any]]
BROKEN = {"now": True}
ITEMS = pl.concat_list("v", pl.col("v") + 1).alias("v")
KINDS = 7
"""Values of elements, modulo this, say what happens to them."""


def kind(element: Element[Any]) -> int:
    return int(element["v"]) % KINDS


def fails(element: Element[Any]) -> bool:
    if BROKEN["now"] and kind(element) == 0:
        raise ValueError
    return kind(element) != 1


def made(element: Element[Any]) -> dict[str, Any]:
    return {**element.value, "v": element["v"] + fails(element)}


def items(element: Element[Any]) -> list[dict[str, Any]]:
    return [{**element.value, "v": element["v"] + n} for n in range(kind(element) % 3)]


def chosen(element: Element[Any]) -> str:
    return "abc"[kind(element) % 3]


IS_SECOND = pl.col("v") % KINDS == 2
STEPS: dict[str, Step] = {
    "filter": lambda flow: flow.filter(pl.col("v") % KINDS != 3),
    "failing filter": lambda flow: flow.filter(fails),
    "map": lambda flow: flow.map(v=pl.col("v") + 1),
    "made": lambda flow: flow.map(made),
    "flat_map": lambda flow: flow.flat_map(ITEMS),
    "items": lambda flow: flow.flat_map(items),
    "publish": lambda flow: flow.publish("out", name=f"n{len(flow.steps)}"),
    "topics": lambda flow: flow.publish(
        pl.when(IS_SECOND).then(pl.lit("b")).otherwise(pl.col("c")), topics=["UA", "b"], name=f"n{len(flow.steps)}"
    ),
    "chosen": lambda flow: flow.publish(chosen, topics=["a", "b"], name=f"n{len(flow.steps)}", key="c"),
}
DIVERSIONS: dict[str, Step] = {
    "divert": lambda flow: flow.divert(pl.col("v") % KINDS == 4),
    "failing divert": lambda flow: flow.divert(lambda one: fails(one) and kind(one) == 5),
}
WHEN: dict[str, Any] = {
    "all": None,
    "expression": pl.col("v") % KINDS > 3,
    "function": lambda one: fails(one) and kind(one) > 4,
}


@st.composite
def lines(draw: st.DrawFn, depth: int = 0, *, diverts: bool = True) -> Step:
    """Some steps, with branches among them down to a depth."""
    parts: list[Step] = []
    for _ in range(draw(st.integers(0, 3))):
        what = draw(st.sampled_from([*STEPS, *(DIVERSIONS if diverts and depth == 0 else ()), "branch"]))
        if what != "branch":
            parts.append({**STEPS, **DIVERSIONS}[what])
            continue
        when = draw(st.sampled_from(sorted(WHEN)))
        inner = draw(lines(depth + 1)) if depth < 2 else STEPS["filter"]
        first = draw(st.sampled_from([[], [], [DIVERSIONS["divert"]]])) if when != "all" and depth == 0 else []
        parts.append(_branch(WHEN[when], [*first, inner, STEPS["publish"]]))
    return lambda flow: _through(flow, parts)


def _through(flow: Flow[Any], parts: list[Step]) -> Flow[Any]:
    for part in parts:
        flow = part(flow)
    return flow


def _branch(when: Any, parts: list[Step]) -> Step:
    def add(flow: Flow[Any]) -> Flow[Any]:
        name = f"b{len(flow.steps)}.{len(flow.branches)}"
        if when is None:
            return flow.also_to(name, lambda inner: _through(inner, parts))
        return flow.branch(name, when, lambda inner: _through(inner, parts))

    return add


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(
    lines(),
    lines(),
    st.booleans(),
    st.lists(st.integers(0, 3 * KINDS), min_size=1, max_size=12),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_both_paths_publish_reject_and_take_back_the_same(
    first: Step, second: Step, folds: bool, values: list[int], again: list[int]
) -> None:
    BROKEN["now"] = True
    flow = first(Flow("fleet").source(LEGS))
    if folds:
        flow = flow.aggregate("all", "c", Fields(n=count()))
    both = Both(second(flow).publish("end"))
    both.process([replace(leg(n, v=v), topic_id=TOPIC_ID) for n, v in enumerate(values)])
    for n, which in enumerate(again):
        BROKEN["now"] = n == 0
        at = 100 + n
        copy = leg(at, which % len(values), v=values[which % len(values)])
        records = [copy, *(back(one, at + 50, "fleet", n) for one in both.dead_letters[which:][:1])]
        both.process([replace(one, topic_id=TOPIC_ID) for one in records])
