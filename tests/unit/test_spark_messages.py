"""The per-message path of the Spark engine, task code called directly: it keeps what the in-memory runner keeps."""

import json
import uuid

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.messages import MessagePath
from aggregations.engine.path import Work
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, encode
from tests.support.jobs import job_of
from tests.support.pure import table_of

LEGS = Topic("legs", Json({"tail": pl.String, "carrier": pl.String, "note": pl.String}))


def leg(offset: int, note: str | None) -> Record:
    payload = json.dumps({"tail": "N1", "carrier": "AA", "note": note}).encode()
    return Record("legs", 0, offset, b"N1", encode(Envelope(payload, key=b"N1")), topic_id="T1")


def everything(_element: object) -> bool:
    return True


PER_MESSAGE = Flow("fleet").source(LEGS).filter(everything).aggregate("aircraft", "tail", Fields(legs=count()))
WORDS = pl.col("note").str.len_chars().fill_null(0)


@pytest.mark.parametrize(
    "flow",
    [
        PER_MESSAGE.map(words=WORDS).aggregate("carrier", "carrier", Fields(words=total("words"))),
        PER_MESSAGE.aggregate("carrier", "carrier", Fields(words=total(WORDS))),
        PER_MESSAGE.map(words=WORDS).publish("out"),
    ],
    ids=["map behind a stage", "field of the second stage", "map behind the last stage"],
)
def test_columns_keep_their_declared_types_behind_a_stage(flow: Flow[object]) -> None:
    records = [leg(0, "two words"), leg(1, None)]
    runner = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"))
    runner.process(records)
    urls = bind(flow, {}, f"memory://{uuid.uuid4()}")
    run = begin(flow, urls)
    work, path = Work(job_of(flow, run, {"legs": "T1"})), MessagePath()
    arrivals = path.read(work, table_of(records).to_batches())
    for stage in flow.stages:
        _, following = path.fold(work, stage, arrivals)
        arrivals = following or []
    assert (
        [one.reason.value for one in work.collector.dead.values()] == [one.reason for one in runner.dead_letters] == []
    )
    assert [one.value for one in work.outputs] == [one.value for one in runner.outputs]
    assert {stage: dict(counts) for stage, counts in work.report.counts.verdicts.items()} == {
        stage: dict(counts) for stage, counts in runner.report.verdicts.items()
    }
