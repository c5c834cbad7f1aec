"""Items of one record that several tasks fold: all of them or none, whichever step fails. The engine's tasks, without Spark."""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.job import Exclusion, Job, RecordAtStage, TaskReport
from aggregations.engine.path import Work, route_of
from aggregations.engine.ranges import Range, Slot
from aggregations.per_message.dead_letters import RejectedRecord
from aggregations.per_message.ledger import UnlistedError
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.states import load_states
from aggregations.spark import tasks
from aggregations.spark.blocks import Row, pack, unpack
from envelope import Envelope, Hop, Tombstones, TopicPartition, encode
from envelope.deadletter import DeadLetterHeaders, Form
from jobs.dead_letters.redrive import redriven
from tests.support.jobs import job_of
from tests.support.pure import batches_of

STEPS = ("map", "key", "fold", "emit")
BROKEN = {"now": True}


class Count:
    def zero(self) -> dict[str, int]:
        return {"n": 0}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if element["at"] == "fold":
            fail(element)
        return {"n": state["n"] + 1}


def fail(element: Element[Any]) -> None:
    if BROKEN["now"] and element["sku"] == "bad":
        raise ValueError


def flow(step: str) -> Flow[Any]:
    def items(element: Element[Any]) -> list[dict[str, str]]:
        return [{"sku": sku, "at": step} for sku in element["items"].split(",")]

    def at(name: str, result: Any) -> Any:
        def call(element: Element[Any], *_: Any) -> Any:
            if step == name:
                fail(element)
            return result(element)

        return call

    return (
        Flow("shop")
        .source(Topic("orders", Json({"items": str})))
        .flat_map(items)
        .aggregate("sku", lambda element: element["sku"], _Fine())
        .map(at("map", lambda element: dict(element.value)))
        .aggregate(
            "all",
            at("key", lambda element: "all:" + element["sku"]),
            Count(),
            emit=at("emit", lambda element: [element.value]),
        )
    )


def of_columns(step: str) -> Flow[Any]:
    """The same with a flow whose functions replace no values."""

    def key(element: Element[Any]) -> str:
        if step == "key":
            fail(element)
        return f"all:{element['sku']}"

    def kept(element: Element[Any]) -> bool:
        fail(element)
        return True

    first = (
        Flow("shop")
        .source(Topic("orders", Json({"list": [str]})))
        .flat_map("list")
        .map(sku=pl.col("list"), at=pl.lit(step))
        .aggregate("sku", "sku", _Fine())
    )
    return (first.filter(kept) if step == "filter" else first).aggregate("all", key, Count())


def with_tombstones(step: str) -> Flow[Any]:
    """The first flow, which takes tombstones."""
    found = flow(step)
    [one] = found.inputs
    return replace(found, inputs=(replace(one, topic=replace(one.topic, tombstones=Tombstones.ELEMENT)),))


FLOWS = [
    *((made, step) for made in (flow, with_tombstones) for step in STEPS),
    *((of_columns, step) for step in ("filter", "key", "fold")),
]


class _Fine(Count):
    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        return {"n": state["n"] + 1}


def order(offset: int, items: str) -> Record:
    chain = (Hop("raw", 0, 100 + offset, via="rep", index=0, topic_id="R"),)
    body = json.dumps({"items": items, "list": items.split(",")}).encode()
    return Record("orders", 0, offset, b"x", encode(Envelope(body, chain, b"x")), topic_id="O")


_RECORDS: list[pa.RecordBatch] = []
"""What the task that reads gets from Kafka."""


class Tasks:
    """The engine's tasks of one flow, one after the other, with a shuffle to some routes between them."""

    def __init__(self, of: Flow[Any], routes: int) -> None:
        self.flow = of
        self.routes = routes
        self.urls = bind(of, {}, f"memory://{uuid.uuid4()}")
        self.run = begin(of, self.urls)
        self.dead: list[RejectedRecord] = []

    def process(self, records: list[Record]) -> None:
        """Fold one batch as the driver does."""
        excluded: dict[RecordAtStage, Exclusion] = {}
        while True:
            job = self._job(excluded)
            _RECORDS[:] = batches_of(records)
            rows = list(tasks.reading(job)([0]))
            for stage in self.flow.stages:
                rows = [row for part in self._shuffled(rows) for row in tasks.folding(job, stage)(iter(part))]
            report, failures = self._outcome(rows)
            unlisted = [one for one in failures if isinstance(one, UnlistedError)]
            assert len(unlisted) == len(failures), failures
            if unlisted:
                self.run.list_dead({entry for one in unlisted for entry in one.entries})
            elif scattered := {at: cause for at, cause in report.failed.items() if at not in excluded}:
                excluded |= scattered
            else:
                break
        for task in (tasks.publishing(job), *(tasks.persisting(job, stage) for stage in reversed(self.flow.stages))):
            rows = [row for part in self._shuffled(rows) for row in task(iter(part))]
        report, failures = self._outcome(rows)
        assert not failures
        ends = {TopicPartition(one.topic, one.partition): one.offset + 1 for one in records}
        manifest = self.run.following(ends, {"orders": "O"}, {}, report.changes)
        self.run.advanced(manifest)

    def results(self, stage: str) -> dict[bytes, Any]:
        found = self.flow.stage(stage)
        store = self.run.stores[stage]
        keys = [key for key, _ in store.scan(self.run.stage_ref(found))]
        return {key: state.fold for key, state in load_states(self.run, found, keys).items() if state.folded}

    def _job(self, excluded: Mapping[RecordAtStage, Exclusion]) -> Job:
        return job_of(
            *(self.flow, self.run, {"orders": "O", "raw": "R"}),
            dead_letters="dead",
            routes=self.routes,
            excluded=excluded,
            tasks=(Slot(0, (Range(0, 0, 60, "orders"),)),),
            asked=("raw", "orders"),
        )

    def _shuffled(self, rows: list[Row]) -> list[list[Row]]:
        blocks = unpack(rows)
        return [list(pack([one for one in blocks if one.route == route])) for route in range(self.routes)]

    @staticmethod
    def _outcome(rows: list[Row]) -> tuple[TaskReport, list[Exception]]:
        return tasks.outcome_of(unpack(rows))


@pytest.fixture
def _published(monkeypatch: pytest.MonkeyPatch) -> list[RejectedRecord]:
    """What goes to the dead-letter topic: there is no broker here, and the source is believed."""
    dead: list[RejectedRecord] = []

    def publish(work: Work) -> None:
        dead.extend(work.collector.dead.values())
        work.collector.dead.clear()
        work.outputs.clear()

    monkeypatch.setattr(tasks, "publish", publish)
    monkeypatch.setattr(tasks, "check_source", lambda *_: None)
    monkeypatch.setattr(tasks, "topics_of", lambda *_: None)
    monkeypatch.setattr(
        "aggregations.engine.fetch.fetcher_of", lambda *_, **__: SimpleNamespace(read=lambda *_, **__: iter(_RECORDS))
    )
    return dead


def letter(dead: RejectedRecord, record: Record, offset: int) -> Record:
    facts = DeadLetterHeaders(
        "orders",
        0,
        dead.own.offset,
        dead.reason,
        "O",
        "",
        dead.stage,
        application="shop",
        hole=dead.hole,
        form=Form.ENVELOPE,
    )
    value = redriven(record.key, record.value, (), facts, Hop("dead", 0, 0, topic_id="D"))
    return Record("orders", 0, offset, record.key, value, topic_id="O")


@pytest.mark.parametrize("routes", [1, 2, 3, 4])
@pytest.mark.parametrize(("flow", "step"), FLOWS)
def test_items_of_one_record_are_folded_all_or_none_and_its_letter_brings_what_was_missing(
    flow: Callable[[str], Flow[Any]], step: str, routes: int, _published: list[RejectedRecord]
) -> None:
    assert len({route_of(b"ok", 4), route_of(b"bad", 4)}) == 2, "the items are folded by different tasks"
    BROKEN["now"] = True
    records = [order(n, "ok,bad" if n == 0 else "ok") for n in range(60)]
    run = Tasks(flow(step), routes)
    memory = MemoryRunner(flow(step), bind(flow(step), {}, f"memory://{uuid.uuid4()}"), topic_ids={"orders": "O"})
    for start in range(0, 60, 20):
        run.process(records[start : start + 20])
        memory.process(records[start : start + 20])
    assert run.results("all") == memory.results("all") == {b"all:ok": {"n": 59}}
    [dead], [died] = {(one.own, one.stage): one for one in _published}.values(), memory.dead_letters
    assert (dead.own, dead.stage, dead.reason, dead.hole) == (died.record.node, died.stage, died.reason, died.hole)
    assert dead.stage != END_OF_FLOW
    BROKEN["now"] = False
    for offset in (60, 61):
        run.process([letter(dead, records[0], offset)])
        memory.process([letter(dead, records[0], offset)])
    assert run.results("all") == memory.results("all") == {b"all:ok": {"n": 60}, b"all:bad": {"n": 1}}
    assert run.results("sku") == memory.results("sku") == {b"ok": {"n": 60}, b"bad": {"n": 1}}
    assert run.run.ledger.listed == memory.run.ledger.listed == {}
