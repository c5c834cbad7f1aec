"""Functions that replace the values on the vectorised path: every later step does what it does message by message."""

from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, last, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.stability import DIFFERING
from tests.support.both import Both
from tests.support.drawn import bring_back, chained_batches
from tests.support.pure import TOPIC, wrapped

BROKEN = {"now": True}


@pytest.fixture(autouse=True)
def _broken() -> Iterator[None]:
    yield
    BROKEN["now"] = True


def refused(element: Element[Any], minutes: int) -> None:
    if BROKEN["now"] and isinstance(element.value, dict) and element.value.get("minutes") == minutes:
        raise ValueError(minutes)


def value_of(element: Element[Any]) -> Any:
    """A mapping whose columns have types that change from message to message, or no mapping at all."""
    refused(element, 7)
    if not isinstance(element.value, dict):
        return element.value
    minutes = element.value.get("minutes")
    odd = {1: 1.5, 2: "2", 3: None, 4: 2**63, 5: [1]}.get(minutes, minutes)
    return {**element.value, "odd": odd} if minutes != 6 else element.offset


def items_of(element: Element[Any]) -> list[Any]:
    refused(element, 8)
    if not isinstance(element.value, dict):
        return [element.value, element.value]
    return [
        {**element.value, "item": n, "carrier": "AB"[n % 2]} for n in range((element.value.get("minutes") or 0) % 4)
    ]


def emitted(element: Element[Any], state: Any) -> list[Any]:
    refused(element, 9)
    if not isinstance(element.value, dict):
        return []
    several = [{**element.value, "state": state, "carrier": "C"}, element.value]
    return several[: element.offset % 3]


def key_of(element: Element[Any]) -> Any:
    return element.value.get("carrier") if isinstance(element.value, dict) else element.key


def keep(element: Element[Any]) -> bool:
    return not isinstance(element.value, dict) or element["tail"] != "N3"


def away(element: Element[Any]) -> bool:
    refused(element, 10)
    return BROKEN["now"] and isinstance(element.value, dict) and element.value.get("late") is True


class Facts:
    """Keeps what it sees, and refuses some values."""

    def zero(self) -> Any:
        return []

    def fold(self, state: Any, element: Element[Any]) -> Any:
        refused(element, 0)
        return [*state, [repr(element.value), str(element.lineage), list(element.indices), element.route.value]]


SUMS = Fields(n=count(), m=total("minutes"), at=last("_offset"), chain=total(pl.col("_chain").list.len()))
ODD = Fields(n=count(), odd=last("odd"), double=last(pl.col("odd") * 2, by="_offset"))
STEPS = ["filter", "keep", "divert", "away", "map", "publish", "publish by a function", "lists"]
MAKING = ["value", "value", "items", "list"]


def added(flow: Flow[Any], step: str, name: str) -> Flow[Any]:
    match step:
        case "filter":
            return flow.filter(pl.col("minutes") != 2)
        case "keep":
            return flow.filter(keep)
        case "divert":
            return flow.divert(pl.col("delay") > 1)
        case "away":
            return flow.divert(away)
        case "map":
            return flow.map(minutes=pl.col("minutes") + 1, carrier=pl.lit("B"))
        case "lists":
            return flow.filter(pl.col("_headers").list.len() + pl.col("_chain").list.len() < 3)
        case "value":
            return flow.map(value_of)
        case "items":
            return flow.flat_map(items_of)
        case "list":
            listed = flow.map(lists=pl.concat_list("minutes", pl.lit(1)))
            return listed.flat_map(pl.col("lists").alias("minutes"))
        case "publish":
            return flow.publish("out", name=name)
        case _:
            return flow.publish("out", key=key_of, name=name)


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    flow: Flow[Any] = Flow("made").source(wrapped(stable=DIFFERING))
    for part, stage in enumerate(["first", "second", "end"]):
        steps = draw(st.lists(st.sampled_from([*STEPS, *MAKING]), max_size=3))
        for number, step in enumerate(steps):
            flow = added(flow, step, f"{part}-{number}")
        if stage == "first" or (stage == "second" and draw(st.booleans())):
            fold = draw(st.sampled_from([Facts(), Facts(), SUMS, *([ODD] if flow.schema is None else [])]))
            key = draw(st.sampled_from(["tail", "carrier", "_key", key_of]))
            emit = draw(st.sampled_from([None, None, emitted]))
            flow = flow.aggregate(stage, key, fold, emit=emit, co_partitioned=draw(st.booleans()))
    return flow


payloads = st.fixed_dictionaries(
    {
        "tail": st.sampled_from(["N1", "N1", "N2", "N3", None]),
        "carrier": st.sampled_from(["A", "A", "B", None]),
        "minutes": st.one_of(st.integers(0, 4), st.integers(0, 12)),
    },
    optional={"delay": st.sampled_from([0.5, 2.0, None]), "late": st.sampled_from([True, False, False, None])},
)


HEADERS = st.sampled_from([(), (("a", b"1"), ("b", None))])
BATCHES = chained_batches(TOPIC, payloads, [b"N1", b"N1", b"N2", None], HEADERS)
HOWS = st.lists(st.lists(st.sampled_from(["", "", "another"]), min_size=1), max_size=2)


@settings(max_examples=2 * settings.default.max_examples)
@given(flow=flows(), found=BATCHES, mended=st.booleans(), ways=HOWS)
def test_both_paths_do_the_same_with_values_that_functions_made(
    flow: Flow[Any], found: list[list[Record]], mended: bool, ways: list[list[str]]
) -> None:
    BROKEN["now"] = True
    both = Both(flow)
    for batch in found:
        both.process(batch)
    BROKEN["now"] = not mended
    bring_back(both, found, ways, both.redriven)
