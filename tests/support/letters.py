"""Flows that reject records, and their redriven dead letters."""

import json
import uuid
from collections.abc import Callable
from typing import Any

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.report import DeadLetter as Died
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, encode
from envelope.deadletter import DeadLetterHeaders, Form
from jobs.dead_letters.redrive import redriven

LEGS = Topic("legs", Json({"k": str, "c": str, "v": int}))


class Legs:
    """Counts, and takes no carrier `bad`."""

    def zero(self) -> dict[str, int]:
        return {"legs": 0}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if element["carrier"] == "bad":
            raise ValueError
        return {"legs": state["legs"] + 1}


class Sum:
    """Counts and adds up; rejects 5000 as long as it is broken."""

    broken = True

    def zero(self) -> dict[str, int]:
        return {"n": 0, "sum": 0}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if element["v"] == 5000 and self.broken:
            raise ValueError
        return {"n": state["n"] + 1, "sum": state["sum"] + element["v"]}


def url() -> str:
    return f"memory://{uuid.uuid4()}"


def runner(flow: Flow[Any], store: str = "", **options: Any) -> MemoryRunner:
    return MemoryRunner(flow, bind(flow, {}, store or url()), topic_ids={"legs": "T"}, **options)


def leg(offset: int, root: int | None = None, *, v: int = 1, topic: str = "legs") -> Record:
    body = json.dumps({"k": "K", "c": "UA", "v": v}).encode()
    chain = (Hop("raw", 0, 100 + (offset if root is None else root), via="rep", index=0, topic_id="R"),)
    return Record(topic, 0, offset, b"K", encode(Envelope(body, chain, b"K")), topic_id="T")


def legs(count: int = 100, bad: int = 5) -> list[Record]:
    return [leg(n, v=5000 if n == bad else 1) for n in range(count)]


def feed(run: MemoryRunner, records: list[Record]) -> MemoryRunner:
    for start in range(0, len(records), 20):
        run.process(records[start : start + 20])
    return run


def back(died: Died, offset: int, flow: str, letter: int = 0, *, asserted: bool = False, **facts: Any) -> Record:
    """The record that a redrive produces for a dead letter."""
    record = died.record
    told = DeadLetterHeaders(
        record.topic,
        record.partition,
        record.offset,
        died.reason,
        topic_id=record.topic_id,
        stage=died.stage,
        application=flow,
        hole=died.hole,
        items=died.items,
        form=Form.ENVELOPE,
        **facts,
    )
    value = redriven(record.key, record.value, (), told, Hop("dead", 0, letter, topic_id="D"), asserted=asserted)
    return Record(record.topic, record.partition, offset, record.key, value, topic_id=record.topic_id)


FLEET = Flow("fleet").source(LEGS).aggregate("totals", "k", Sum())


class Count:
    def zero(self) -> dict[str, int]:
        return {"n": 0}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        return {"n": state["n"] + 1}


def parsing(fails: Callable[[Element[Any]], bool]) -> Flow[Any]:
    def parse(element: Element[Any]) -> dict[str, Any]:
        if fails(element):
            raise ValueError
        return dict(element.value)

    return Flow("parsing").source(LEGS).map(parse).aggregate("counts", lambda element: element["k"], Count())
