"""Messages that are made row by row are those of the general way, byte for byte, and usual rows do not need it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.columns import publishing
from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, decode, encode
from envelope.codec import HEAD, SEAL_BYTES, append_hop
from tests.support.both import TOPIC_ID, Both
from tests.support.drawn import chained_batches

LEGS = Topic("legs", Json({"n": int, "c": str, "x": float}))
FRAME = b"\x00\x00\x00\x00\x01\x00"
"""Schema Registry's framing of a protobuf message."""
UNSEALED = HEAD[:2]


def value_of(element: Element[Any]) -> bytes:
    if element["n"] == 3:
        raise ValueError
    return b"%d" % element["n"]


def items(element: Element[Any]) -> list[dict[str, Any]]:
    return [{**element.value, "item": item} for item in range(element["n"] % 3)]


def topic_of(element: Element[Any]) -> str:
    return "abc"[element["n"] % 3]


STEPS = {
    "its key": lambda flow: flow.publish("out"),
    "a column": lambda flow: flow.publish("out", key="c"),
    "a function": lambda flow: flow.publish("out", key=lambda one: one["n"]),
    "a value": lambda flow: flow.publish("out", value=value_of),
    "a topic": lambda flow: flow.publish(topic_of, topics=["a", "b"]),
    "items": lambda flow: flow.flat_map(items).publish("out", key="item"),
    "items of items": lambda flow: flow.flat_map(items).flat_map(items).publish("out"),
    "made": lambda flow: flow.map(lambda one: [one["n"], one["x"]]).publish("out", key=lambda one: one.value[0]),
    "surrogate": lambda flow: flow.map(lambda one: "\ud800" * (one["n"] % 2)).publish("out"),
}
payloads = st.fixed_dictionaries(
    {"n": st.integers(0, 6), "c": st.sampled_from(["UA", "é", None]), "x": st.sampled_from([0.5, -1e300, None])}
)
KEYS = [b"a", b"\xff", b"", None]


def written(record: Record, how: str) -> Record:
    """The record as another writer would have sent it."""
    match how:
        case "framed":
            return replace(record, value=FRAME + record.value)
        case "unsealed":
            return replace(record, value=UNSEALED + record.value[len(HEAD) : -SEAL_BYTES])
        case "unknown fields":
            topic = "last" if decode(record.value).chain else "raw"  # the root must be a topic that is known here
            hop = Hop(topic, 0, 9, via="v", index=0, topic_id="R", unknown=b"\xba\x3e\x02hi")
            return replace(record, value=append_hop(record.value, hop))
    return record


@settings(max_examples=2 * settings.default.max_examples)
@given(
    chained_batches("legs", payloads, KEYS),
    st.sampled_from(sorted(STEPS)),
    st.lists(st.sampled_from(["", "", "framed", "unsealed", "unknown fields"]), min_size=1, max_size=5),
)
def test_published_rows_are_those_of_the_general_way(found: list[list[Record]], step: str, hows: list[str]) -> None:
    both = Both(STEPS[step](Flow("f").source(LEGS)))
    for batch in found:
        both.process([written(one, hows[number % len(hows)]) for number, one in enumerate(batch)])


@pytest.mark.parametrize("step", ["its key", "a column", "a function", "items", "items of items", "made"])
def test_usual_rows_do_not_go_the_general_way(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def general(element: Element[Any], key: Any, topic: Any) -> Any:
        raise AssertionError

    both = Both(STEPS[step](Flow("f").source(LEGS)))
    monkeypatch.setattr(publishing, "output_of", lambda step, marking: general)
    chain = (Hop("raw", 1, 7, via="a", index=0, count=1, timestamp_ms=5, leader_epoch=0, topic_id="R"),)
    payload = json.dumps({"n": 2, "c": "UA", "x": 0.5}).encode()
    values = [encode(Envelope(payload, hops, key=b"k", event_id=name)) for hops, name in ((chain, ""), ((), "e"))]
    both.process([Record("legs", 0, offset, b"k", value, 1, (), TOPIC_ID) for offset, value in enumerate(values)])
