"""What the guides to applications of Spark and to archives define, run on Spark."""

import json
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from jobs.views import states
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from tests.support.guides import load
from tests.support.rows import Files

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def sql(spark: SparkContext) -> SparkSession:
    return SparkSession.builder.getOrCreate()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/states"


def order(number: int) -> bytes:
    return json.dumps({"customer": "ann", "article": f"a{number % 2}", "cents": number}).encode()


def records(topic: str, numbers: Iterable[int]) -> Sequence[Record]:
    return [Record(topic, 0, number, b"ann", order(number), 1_700_000_000_000) for number in numbers]


def results(flow: Flow[Any], store: str) -> dict[bytes, Any]:
    return {view.key: view.state for view in states(flow, flow.stages[0].name, bind(flow, {}, store))}


def test_two_queries_of_one_application(sql: SparkSession, store: str, tmp_path: Path) -> None:
    defined, files = load("spark-application.md"), Files(sql, tmp_path / "rows")
    files.add(*records("orders", range(10)))
    queries = defined["start_both"](files.stream(), store, str(tmp_path / "checkpoints"))
    try:
        for query in queries:
            query.processAllAvailable()
    finally:
        for query in queries:
            query.stop()
    assert [query.name for query in queries] == ["customers", "articles"]
    assert results(defined["customers"], store) == {b"ann": {"cents": 45}}
    assert results(defined["articles"], store) == {b"a0": {"sold": 5}, b"a1": {"sold": 5}}


def test_a_query_without_a_connector(sql: SparkSession, kafka: str, store: str, tmp_path: Path) -> None:
    settings, unique = KafkaSettings(kafka), uuid.uuid4().hex
    names = {"orders": f"orders-{unique}", "orders.dead": f"dead-{unique}"}
    for name in names.values():
        Topics(settings).create(name, 1)
    with AcknowledgedProducer(settings) as producer:
        producer.send_many(names["orders"], [{"key": b"ann", "value": order(number)} for number in range(10)])
        producer.flush()
    defined = load("spark-application.md", **names)
    query = defined["start_without_connector"](sql, settings, store, str(tmp_path / "checkpoint"))
    try:
        query.processAllAvailable()
        assert sum(one["numInputRows"] for one in query.recentProgress) == 10
    finally:
        query.stop()
    assert results(defined["customers"], store) == {b"ann": {"cents": 45}}


def test_an_archive_that_grows(sql: SparkSession, store: str, tmp_path: Path) -> None:
    defined, files, archive = load("archive.md"), Files(sql, tmp_path / "rows"), str(tmp_path / "archive")
    for numbers in (range(10), range(10, 16)):
        files.add(*records("sales", numbers))
        defined["archive"](files.stream(), archive)
        assert defined["fold"](sql, archive, store) == len(numbers)
    assert results(defined["sales"], store) == {b"a0": {"sold": 8}, b"a1": {"sold": 8}}
