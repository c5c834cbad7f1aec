"""States as a table in Spark."""

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs import StatesSource, states
from persistence.registry import apply_schema
from tests.support import states_flow
from tests.support.redis_server import DURABLE, server

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MODULE = "tests.support.states_flow"


@pytest.fixture(scope="module")
def sql(spark: SparkContext) -> SparkSession:
    session = SparkSession.builder.getOrCreate()
    session.dataSource.register(StatesSource)
    return session


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with server(*DURABLE) as running:
        yield f"{running.url}?buckets=3"


@pytest.fixture(scope="module")
def cassandra(cassandra_url: str) -> str:
    url = f"{cassandra_url}/states_{uuid.uuid4().hex[:12]}?buckets=3"
    apply_schema(f"{url}&replication=1")
    return url


@pytest.fixture(params=["sqlite", "lmdb", "redis", "cassandra"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in ("redis", "cassandra"):
        return str(request.getfixturevalue(request.param))
    return f"{request.param}://{tmp_path}/states"


def fill(flow: Flow, store: str, shops: int, sales: int = 2, begin: int = 0) -> None:
    """Fold sales of each shop."""
    runner = MemoryRunner(flow, bind(flow, {}, store))
    lines = [{"shop": f"S{i:03d}", "cents": 100 + i} for _ in range(sales) for i in range(shops)]
    runner.process([Record("sales", 0, begin + at, b"k", json.dumps(line).encode()) for at, line in enumerate(lines)])
    runner.close()


def table(sql: SparkSession, store: str, flow: str = "flow", **options: str) -> DataFrame:
    reader = sql.read.format("headwater").options(flow=f"{MODULE}:{flow}", store=store, **options)
    return reader.load()


def test_the_rows_are_those_of_states_whatever_the_store_and_one_task_reads_each_bucket(
    sql: SparkSession, store: str
) -> None:
    fill(states_flow.flow, store, 50)
    found = table(sql, store, histories="true")
    expected = states(states_flow.flow, "shop", bind(states_flow.flow, {}, store), histories=True).frame()
    rows = sorted((row.asDict(recursive=True) for row in found.collect()), key=lambda row: row["_key"])
    # PySpark returns bytes as bytearray, and times without a zone, in the local one.
    alike = [
        {**row, "_key_bytes": bytes(row["_key_bytes"]), "_written_by": row["_written_by"].astimezone(UTC)}
        for row in rows
    ]
    assert alike == expected.sort("_key").to_dicts()
    assert found.rdd.getNumPartitions() == {"sqlite": 1, "lmdb": 4, "redis": 3, "cassandra": 3}[store.partition(":")[0]]


def test_sql_reads_a_view_of_it(sql: SparkSession, tmp_path: Path) -> None:
    store = f"lmdb://{tmp_path}/states"
    fill(states_flow.flow, store, 20)
    sql.sql(
        "CREATE OR REPLACE TEMPORARY VIEW shop USING headwater "
        f"OPTIONS (flow '{MODULE}:flow', stage 'shop', store '{store}', prefix 'S01')"
    )
    [row] = sql.sql("SELECT count(*) AS shops, sum(cents) AS cents, max(_version) AS version FROM shop").collect()
    assert row.asDict() == {"shops": 10, "cents": 2 * sum(range(110, 120)), "version": 1}
    assert sql.sql("SELECT _key FROM shop WHERE sales = 2 AND cents > 236").collect() == [("S019",)]


def test_a_fold_in_plain_python_is_a_column_of_json(sql: SparkSession, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/states.db"
    fill(states_flow.own, store, 3)
    found = table(sql, store, "own", where="_key > 'S000'").selectExpr(
        "_key", "from_json(state, 'cents array<int>').cents"
    )
    assert sorted(found.collect()) == [("S001", [101, 101]), ("S002", [102, 102])]


def test_each_session_is_a_row(sql: SparkSession, tmp_path: Path) -> None:
    store = f"lmdb://{tmp_path}/states"
    runner = MemoryRunner(states_flow.visits, bind(states_flow.visits, {}, store))
    hours = [0.0, 0.5, 2.0]
    value = json.dumps({"shop": "S000", "cents": 1}).encode()
    runner.process(
        [Record("sales", 0, at, b"k", value, timestamp_ms=int(hour * 3_600_000)) for at, hour in enumerate(hours)]
    )
    runner.close()
    found = table(sql, store, "visits").selectExpr(
        "sales", "unix_seconds(_window_start) AS begin", "unix_seconds(_window_end) AS end", "_version"
    )
    assert sorted(map(tuple, found.collect())) == [(1, 7200, 7200, 1), (2, 0, 1800, 1)]


def test_no_state_is_an_empty_table_with_all_columns(sql: SparkSession, tmp_path: Path) -> None:
    found = table(sql, f"lmdb://{tmp_path}/none")
    assert (found.count(), found.columns[:3]) == (0, ["_key", "sales", "cents"])
    assert list(tmp_path.iterdir()) == [], "reading creates nothing"


def test_each_state_is_whole_while_a_run_writes(sql: SparkSession, tmp_path: Path) -> None:
    store = f"lmdb://{tmp_path}/states"
    fill(states_flow.flow, store, 40, sales=1)
    stop = threading.Event()

    def write() -> None:
        begin = 40
        while not stop.is_set():
            fill(states_flow.flow, store, 40, sales=1, begin=begin)
            begin += 40

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            rows = table(sql, store).collect()
            assert len(rows) == 40
            wrong = [
                row for row in rows if row.cents != row.sales * (100 + int(row._key[1:])) or row.sales != row._version
            ]
            assert wrong == []
    finally:
        stop.set()
        writer.join()


def test_a_wrong_option_ends_the_query_with_the_remedy(sql: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match='unable to find column "hits"; write a condition on _key, sales, '):
        table(sql, f"lmdb://{tmp_path}/none", where="hits > 1")
