"""Several sources: whole columns must give exactly what message by message gives, whatever is read of which topic."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, first, last, maximum, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, EnvelopeError, Hop, Reason, Siblings, encode
from tests.support.both import TOPIC_ID, Both

RESULTS: Final = {"part": str, "torque": int, "ok": bool, "id": int, "marks": [int]}
READY: Final = {"part": str, "station": str, "torque": int, "id": str}
PARTS: Final = ("p0", "p1", "p2", "")
FOLD: Final = Fields(
    n=count(),
    results=count("torque"),
    most=maximum("torque"),
    sum=total("torque"),
    station=last("station"),
    ok=first("ok"),
)


class Collected:
    """A fold that sees every column of its elements."""

    def zero(self) -> list[Any]:
        return []

    def fold(self, state: list[Any], element: Element[Any]) -> list[Any]:
        if element.value["torque"] == 13:
            raise ValueError
        return [*state, [element.topic, element.offset, element.value.get("station"), sorted(map(str, element.value))]]


def doubled(element: Element[Any]) -> dict[str, Any]:
    if element.value["torque"] == 7:
        raise EnvelopeError(Reason.MISSING_FIELD, "seven")
    return {"part": element.value["part"], "torque": (element.value["torque"] or 0) * 2, "station": None, "ok": True}


def twice(element: Element[Any]) -> list[Any]:
    return [element.value, {**element.value, "torque": None}]


OWN: Final[Mapping[str, Sequence[Callable[[Flow[Any]], Flow[Any]]]]] = {
    "results": [
        lambda flow: flow,
        lambda flow: flow.filter("ok"),
        lambda flow: flow.map(torque=pl.col("torque") * 3),
        lambda flow: flow.flat_map("marks").map(torque=pl.col("marks") // pl.col("torque")),
        lambda flow: flow.divert(pl.col("torque") > 20),
        lambda flow: flow.publish("seen", name="results"),
        lambda flow: flow.map(doubled),
        lambda flow: flow.flat_map(twice),
    ],
    "ready": [
        lambda flow: flow,
        lambda flow: flow.map(station=pl.col("station").str.to_uppercase()),
        lambda flow: flow.filter(pl.col("torque").is_not_null()),
        lambda flow: flow.map(id=pl.col("id").cast(pl.Int64)),
        lambda flow: flow.publish("seen", name="ready").divert(pl.col("torque") == 5),
    ],
}
COMMON: Final[Sequence[Callable[[Flow[Any]], Flow[Any]]]] = [
    lambda flow: flow,
    lambda flow: flow.filter(pl.col("torque") != 3),
    lambda flow: flow.publish("all", key="part"),
    lambda flow: flow.map(torque=12 // pl.col("torque")),
    lambda flow: flow.divert(pl.col("_topic") == "ready"),
    lambda flow: flow.flat_map(twice),
]
STAGES: Final[Sequence[Callable[[Flow[Any]], Flow[Any]]]] = [
    lambda flow: flow.aggregate("part", "part", FOLD),
    lambda flow: flow.aggregate("part", "part", FOLD, co_partitioned=False).publish_states("states"),
    lambda flow: (
        flow.aggregate("part", "part", FOLD)
        .filter(pl.col("station").is_not_null())
        .aggregate("station", "station", Fields(n=count()))
    ),
    lambda flow: flow.aggregate("part", "part", Collected()).publish("out"),
    lambda flow: flow.publish("out"),
    lambda flow: flow.divert(pl.col("torque") == 4).publish("out", key="part"),
]


def record(topic: str, offset: int, part: str, torque: int | None, copy: int | None, wrapped: bool) -> Record:
    value: dict[str, Any] = {"part": part or None, "torque": torque}
    if topic == "results":
        value |= {"ok": (torque or 0) % 2 == 0, "id": torque, "marks": list(range((torque or 0) % 3))}
    else:
        value |= {"station": f"s{torque}", "id": "x" if torque == 9 else str(torque or 1)}
    if torque == 11:
        value["torque"] = "eleven"
    payload = json.dumps(value).encode()
    if wrapped:
        chain = (Hop("raw", 0, offset if copy is None else copy, via="cut", index=0 if (torque or 0) % 5 else None),)
        payload = encode(Envelope(payload, chain=chain, key=part.encode() or None, event_id=f"e{torque}"))
    return Record(topic, 0, offset, part.encode() or None, payload, topic_id=TOPIC_ID)


entry = st.tuples(
    st.sampled_from(("results", "ready")),
    st.sampled_from(PARTS),
    st.none() | st.integers(0, 24),
    st.none() | st.integers(0, 3),
)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    own=st.tuples(*(st.sampled_from(steps) for steps in OWN.values())),
    common=st.sampled_from(COMMON),
    stage=st.sampled_from(STAGES),
    batches=st.lists(st.lists(entry, max_size=8), min_size=1, max_size=4),
    wrapped=st.tuples(st.booleans(), st.booleans()),
    siblings=st.tuples(st.sampled_from(Siblings), st.sampled_from(Siblings)),
)
def test_both_paths_agree_on_two_topics(
    own: Sequence[Callable[[Flow[Any]], Flow[Any]]],
    common: Callable[[Flow[Any]], Flow[Any]],
    stage: Callable[[Flow[Any]], Flow[Any]],
    batches: Sequence[Sequence[tuple[str, str, int | None, int | None]]],
    wrapped: tuple[bool, bool],
    siblings: tuple[Siblings, Siblings],
) -> None:
    topics = [
        Topic(name, Json(columns), envelope=inside, siblings=policy)
        for (name, columns), inside, policy in zip(
            {"results": RESULTS, "ready": READY}.items(), wrapped, siblings, strict=True
        )
    ]
    results, ready = (steps(Flow("one").source(topic)) for steps, topic in zip(own, topics, strict=True))
    both = Both(stage(common(results.merge(ready))))
    offsets = {"results": 0, "ready": 0}
    for batch in batches:
        records = []
        for topic, part, torque, copy in batch:
            inside = wrapped[0] if topic == "results" else wrapped[1]
            records.append(record(topic, offsets[topic], part, torque, copy, inside))
            offsets[topic] += 1
        both.process(records)
    again = [both.redriven(dead, offsets[dead.record.topic] + place) for place, dead in enumerate(both.dead_letters)]
    if again:
        both.process(again)
