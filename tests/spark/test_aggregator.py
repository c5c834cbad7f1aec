"""A flow as the function of `foreachBatch`: exact whatever Spark delivers, and whatever becomes of its checkpoint."""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from aggregations import Fields, Json, Topic, count, tumbling
from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.engine.batches import Batches
from aggregations.errors import FlowError, RunRefusedError
from aggregations.run.binding import bind
from aggregations.spark.stream_run import StreamRun
from envelope.filters import EventIdFilter, from_header
from jobs.views import states
from tests.support.flows import PATHS, fleet, totals
from tests.support.flows import Path as Way
from tests.support.rows import Files, frame, query
from tests.support.world import legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def sql(spark: SparkContext) -> SparkSession:
    return SparkSession.builder.getOrCreate()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/states"


def records(sent: Sequence[Any], topic: str = "legs", begin: int = 0, partitions: int = 2) -> list[Record]:
    """Legs as a republisher sends them, each key in its partition."""
    offsets = [begin] * partitions
    found = []
    for one in republished(sent):
        partition = sum(one.key) % partitions
        found.append(Record(topic, partition, offsets[partition], one.key, one.value, 1_700_000_000_000))
        offsets[partition] += 1
    return found


def results(flow: Flow[Any], store: str, stage: str) -> dict[bytes, Any]:
    return {view.key: view.state for view in states(flow, stage, bind(flow, {}, store)) if view.state is not None}


def exact(flow: Flow[Any], store: str, sent: Sequence[Any]) -> None:
    assert results(flow, store, "aircraft") == totals(sent, "tail")
    assert results(flow, store, "carrier") == totals(sent, "carrier")


@pytest.mark.parametrize("path", PATHS)
def test_rows_in_any_order_and_more_than_once_are_folded_once(sql: SparkSession, store: str, path: Way) -> None:
    sent = legs(400)
    all_of_them, flow = records(sent), fleet("legs", path)
    with flow.aggregator(stores=store) as aggregator:
        for number, end in enumerate((150, 150, 290, 400)):
            again = random.Random(number).choices(all_of_them[:end], k=40)
            aggregator(frame(sql, [*all_of_them[:end], *again], shuffled=number), 7)
        aggregator(frame(sql, []), 7)
    exact(flow, store, sent)


def test_what_republishers_send_again_is_dropped_as_on_kafka(sql: SparkSession, store: str) -> None:
    sent = legs(200)
    first = records(sent)
    ends = {partition: 1 + max(one.offset for one in first if one.partition == partition) for partition in (0, 1)}
    copies = [
        Record("legs", one.partition, one.offset + ends[one.partition], one.key, one.value, one.timestamp_ms)
        for one in first
    ]
    flow = fleet("legs")
    with flow.aggregator(stores=store) as aggregator:
        aggregator(frame(sql, first), 0)
        aggregator(frame(sql, copies), 1)
    exact(flow, store, sent)


@pytest.mark.parametrize("lost", ["kept", "lost", "older", "without its last commit", "of another query"])
def test_a_checkpoint_may_be_in_any_state(sql: SparkSession, store: str, tmp_path: Path, lost: str) -> None:
    sent, flow = legs(300), fleet("legs")
    whole = records(sent)
    files, checkpoint = Files(sql, tmp_path / "rows"), tmp_path / "checkpoint"
    files.add(*whole[:100])
    query(files.stream(), flow.aggregator(stores=store), checkpoint)
    shutil.copytree(checkpoint, tmp_path / "older")
    files.add(*whole[100:200])
    query(files.stream(), flow.aggregator(stores=store), checkpoint)
    files.add(*whole[200:])
    if lost == "lost":
        shutil.rmtree(checkpoint)
    elif lost == "older":
        shutil.rmtree(checkpoint)
        (tmp_path / "older").rename(checkpoint)
    elif lost == "without its last commit":
        commits = checkpoint / "commits"
        newest = max(int(one.name) for one in commits.iterdir() if one.name.isdigit())
        for name in (str(newest), f".{newest}.crc"):
            (commits / name).unlink(missing_ok=True)
    elif lost == "of another query":
        shutil.rmtree(checkpoint)
        query(files.stream(), fleet("legs").aggregator(stores=f"lmdb://{tmp_path}/others"), checkpoint)
        with pytest.raises(StreamingQueryException, match="which the flow has not folded"):
            files.add(*records(legs(4), begin=500))
            query(files.stream(), flow.aggregator(stores=store), checkpoint)
        exact(flow, store, sent[:200])
        return
    query(files.stream(), flow.aggregator(stores=store), checkpoint)
    exact(flow, store, sent)


def test_a_batch_that_does_not_continue_is_refused_and_nothing_of_it_is_written(sql: SparkSession, store: str) -> None:
    sent, flow = legs(300), fleet("legs")
    whole = records(sent)
    aggregator = flow.aggregator(stores=store)
    aggregator(frame(sql, whole[:100]), 0)
    with pytest.raises(RunRefusedError, match=r"the batch lacks offsets \d+ to \d+ of legs:\d.*accept gap"):
        aggregator(frame(sql, whole[200:]), 1)
    exact(flow, store, sent[:100])
    aggregator(frame(sql, whole[50:]), 1)
    aggregator.close()
    exact(flow, store, sent)


def test_a_gap_that_is_accepted_is_left_out(sql: SparkSession, store: str) -> None:
    sent, flow = legs(300), fleet("legs")
    whole = records(sent)
    with flow.aggregator(stores=store, accept=["gap"]) as aggregator:
        aggregator(frame(sql, whole[:100]), 0)
        aggregator(frame(sql, whole[200:]), 1)
    exact(flow, store, [*sent[:100], *sent[200:]])


def test_a_flow_may_begin_where_its_stream_begins(sql: SparkSession, store: str) -> None:
    sent, flow = legs(200), fleet("legs")
    whole = records(sent, begin=1000)
    with pytest.raises(RunRefusedError, match="start='delivered'"):
        flow.aggregator(stores=store)(frame(sql, whole[:100]), 0)
    with flow.aggregator(stores=store, start="delivered") as aggregator:
        aggregator(frame(sql, whole[:100]), 0)
        with pytest.raises(RunRefusedError, match="which the flow has not folded"):
            aggregator(frame(sql, whole[150:]), 1)
        aggregator(frame(sql, whole), 1)
    exact(flow, store, sent)


def test_a_run_that_was_not_closed_is_completed_by_the_next(sql: SparkSession, store: str) -> None:
    sent, flow = legs(300), fleet("legs")
    whole = records(sent)
    flow.aggregator(stores=store)(frame(sql, whole[:200]), 0)
    with flow.aggregator(stores=store) as aggregator:
        aggregator(frame(sql, whole), 0)
    exact(flow, store, sent)


def test_a_newer_aggregator_fences_the_older(sql: SparkSession, store: str) -> None:
    sent, flow = legs(300), fleet("legs")
    whole = records(sent)
    older, newer = flow.aggregator(stores=store), flow.aggregator(stores=store)
    older(frame(sql, whole[:100]), 0)
    newer(frame(sql, whole[:200]), 0)
    with pytest.raises(Exception, match="newer run"):
        older(frame(sql, whole[:300]), 1)
    newer(frame(sql, whole), 1)
    exact(flow, store, sent)


def test_it_is_not_closed_within_a_batch(sql: SparkSession, store: str) -> None:
    aggregator = fleet("legs").aggregator(stores=store, progress=lambda _: aggregator.close())
    with pytest.raises(FlowError, match="stop the query, then close"):
        aggregator(frame(sql, records(legs(10))), 0)
    assert isinstance(aggregator.error, FlowError)


def test_an_archive_is_folded_in_parts_and_the_stream_goes_on_from_there(
    sql: SparkSession, store: str, tmp_path: Path
) -> None:
    sent, flow = legs(500), fleet("legs")
    whole = records(sent)
    frame(sql, whole[:420], shuffled=3).write.parquet(str(tmp_path / "archive"))
    with flow.aggregator(stores=store, max_records=60) as aggregator:
        report = aggregator.fold(sql.read.parquet(str(tmp_path / "archive")))
        assert (report.records, report.batches) == (420, 8)
        aggregator(frame(sql, whole[300:]), 0)
    exact(flow, store, sent)


def test_an_archive_with_a_hole_is_refused(sql: SparkSession, store: str) -> None:
    sent, flow = legs(200), fleet("legs")
    whole = records(sent)
    holed = [one for one in whole if not (one.partition == 0 and one.offset in (20, 21))]
    aggregator = flow.aggregator(stores=store)
    with pytest.raises(
        RunRefusedError, match="the batch lacks offsets 20 to 21 of legs:0, which the flow has not folded"
    ):
        aggregator.fold(frame(sql, holed))
    aggregator.fold(frame(sql, whole))
    aggregator.close()
    exact(flow, store, sent)


def test_an_archive_of_two_topics_of_one_name_is_refused(sql: SparkSession, store: str) -> None:
    flow = fleet("legs")
    mixed = [*records(legs(50)), *records(legs(50, seed=8))]
    with pytest.raises(RunRefusedError, match=r"two different records at offset \d+.*two topics of that name"):
        flow.aggregator(stores=store).fold(frame(sql, mixed))
    assert results(flow, store, "aircraft") == {}


def wrong(sql: SparkSession, kind: str) -> DataFrame:
    good = frame(sql, records(legs(10)))
    return {
        "without a column": good.drop("offset"),
        "of a wrong type": good.withColumn("partition", f.col("partition").cast("bigint")),
        "of another topic": good.withColumn("topic", f.lit("others")),
        "without a topic": good.withColumn("topic", f.lit(None).cast("string")),
        "without an offset": good.withColumn("offset", f.lit(None).cast("bigint")),
        "with negative offsets": good.withColumn("offset", f.col("offset") - 2),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("without a column", "has no column 'offset'; it needs the columns of Spark's Kafka source: key, value, topic"),
        ("of a wrong type", "column 'partition' is bigint; it must be int, so cast it"),
        ("of another topic", "rows of topic others, and the flow reads legs; filter them out"),
        ("without a topic", "rows without a topic, partition or offset, or with a negative one; filter them out"),
        ("without an offset", "rows without a topic, partition or offset, or with a negative one; filter them out"),
        ("with negative offsets", "rows without a topic, partition or offset, or with a negative one; filter them out"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_in_a_sentence(
    sql: SparkSession, store: str, kind: str, text: str
) -> None:
    flow = fleet("legs")
    with pytest.raises((FlowError, RunRefusedError), match=text):
        flow.aggregator(stores=store)(wrong(sql, kind), 0)
    with pytest.raises((FlowError, RunRefusedError), match=text):
        flow.aggregator(stores=store).fold(wrong(sql, kind))
    assert results(flow, store, "aircraft") == {}


def test_workers_without_a_module_are_explained_in_a_sentence(sql: SparkSession, store: str) -> None:
    def imports(batches: Iterator[Any]) -> Iterator[Any]:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401

        yield from batches

    rows = frame(sql, records(legs(4)))
    with fleet("legs").aggregator(stores=store) as aggregator:
        with pytest.raises(
            FlowError, match=r"No module named 'no_such_module'\. Workers run the Python that PYSPARK_PYTHON"
        ):
            aggregator(rows.mapInArrow(imports, rows.schema), 0)
    assert results(fleet("legs"), store, "aircraft") == {}


def test_a_single_row_of_an_archive_without_an_offset_is_refused(sql: SparkSession, store: str) -> None:
    good, flow = frame(sql, records(legs(10))), fleet("legs")
    with pytest.raises(RunRefusedError, match="rows without a topic, partition or offset"):
        flow.aggregator(stores=store).fold(good.union(wrong(sql, "without an offset").limit(1)))
    assert results(flow, store, "aircraft") == {}


def dated(topic: str, partition: int, days: int, name: str) -> list[Record]:
    """A record a day, with its day and an id."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    times = [int((begin + timedelta(days=day)).timestamp() * 1000) for day in range(days)]
    values = [json.dumps({"name": name, "at": at}).encode() for at in times]
    ids = [(("id", b"%d-%d" % (partition, day)),) for day in range(days)]
    return [
        Record(topic, partition, day, b"k", value, at, headers=its)
        for day, (value, at, its) in enumerate(zip(values, times, ids, strict=True))
    ]


DATED = Topic("days", payload=Json({"name": str, "at": int}), envelope=False, time="at")


@pytest.mark.parametrize("more", [{"window": tumbling("1d")}, {"expire_after": "3d"}], ids=["windows", "expiry"])
def test_a_partition_that_is_delivered_after_the_others_loses_nothing_without_the_broker(
    sql: SparkSession, store: str, more: dict[str, Any]
) -> None:
    """Who does not know the partitions of a topic cannot say what no partition will deliver any more."""
    flow: Flow[Any] = Flow("days").source(DATED).aggregate("name", key="name", fold=Fields(n=count()), **more)
    with flow.aggregator(stores=store) as aggregator:
        for partition, name in enumerate(("a", "b")):
            aggregator(frame(sql, dated("days", partition, 20, name)), partition)
        assert aggregator.total.verdicts["name"].total() == 40
        assert aggregator.total.verdicts["name"]["accepted"] == 40


def test_an_archive_that_grew_after_a_crash_is_folded_on(
    sql: SparkSession, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter over all partitions may have passed on records of the batch that was not completed."""
    rule = EventIdFilter(from_header("id"), horizon=timedelta(days=10_000), partitions=2)
    flow: Flow[Any] = Flow("days").source(DATED).deduplicate(rule)
    flow = flow.aggregate("name", key="name", fold=Fields(n=count()))

    def die(*_: object) -> None:
        raise ZeroDivisionError

    aggregator = flow.aggregator(stores=store, max_records=20)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Batches, "advance", die)
        aggregator.fold(frame(sql, [*dated("days", 0, 10, "a"), *dated("days", 1, 10, "b")]))
    with aggregator:
        aggregator.fold(frame(sql, [*dated("days", 0, 100, "a"), *dated("days", 1, 10, "b")]))
    assert results(flow, store, "name") == {b"a": {"n": 100}, b"b": {"n": 10}}


def test_a_hole_of_an_archive_costs_one_more_scan(
    sql: SparkSession, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, flow = dated("days", 0, 10, "a"), Flow("days").source(DATED)
    flow = flow.aggregate("name", key="name", fold=Fields(n=count()))
    far = [Record("days", 0, 1 << 60, one.key, one.value) for one in whole[:1]]
    scans, fold = [], StreamRun.fold
    monkeypatch.setattr(StreamRun, "fold", lambda run, rows: (scans.append(rows), fold(run, rows)))
    with pytest.raises(RunRefusedError, match=r"lacks offsets? 10.* of days:0"):
        flow.aggregator(stores=store, max_records=20).fold(frame(sql, [*whole, *far]))
    assert len(scans) == 2


def test_two_queries_cannot_share_an_aggregator(sql: SparkSession, store: str, tmp_path: Path) -> None:
    sent, flow = legs(100), fleet("legs")
    files, aggregator = Files(sql, tmp_path / "rows"), flow.aggregator(stores=store)
    files.add(*records(sent)[:50])
    first = (
        files.stream().writeStream.foreachBatch(aggregator).option("checkpointLocation", str(tmp_path / "one")).start()
    )
    try:
        first.processAllAvailable()
        with pytest.raises(
            StreamingQueryException, match=r"serves the query .*; make another one with flow.aggregator\(\)"
        ):
            query(files.stream(), aggregator, tmp_path / "two")
        files.add(*records(sent)[50:])
        first.processAllAvailable()
    finally:
        first.stop()
    exact(flow, store, sent)


def test_an_exit_within_a_batch_ends_the_query(sql: SparkSession, store: str, tmp_path: Path) -> None:
    def leave(_: object) -> None:
        raise SystemExit(3)

    files, flow = Files(sql, tmp_path / "rows"), fleet("legs")
    files.add(*records(legs(20)))
    with pytest.raises(StreamingQueryException, match="SystemExit in a batch"):
        query(files.stream(), flow.aggregator(stores=store, progress=leave), tmp_path / "checkpoint")


def test_two_flows_share_an_application(sql: SparkSession, tmp_path: Path) -> None:
    sent = legs(200)
    files = Files(sql, tmp_path / "rows")
    files.add(*records(sent)[:90])
    files.add(*records(sent)[90:])
    running = []
    for name in ("one", "two"):
        flow, store = fleet("legs"), f"lmdb://{tmp_path}/{name}"
        writer = files.stream().writeStream.foreachBatch(flow.aggregator(stores=store))
        writer = writer.option("checkpointLocation", str(tmp_path / f"of-{name}"))
        running.append((flow, store, writer.trigger(availableNow=True).start()))
    for flow, store, one in running:
        one.awaitTermination()
        exact(flow, store, sent)


def test_where_a_flow_begins_is_noted_before_anything_is_folded(sql: SparkSession, store: str) -> None:
    flow, whole = fleet("legs"), records(legs(100))
    broken = [Record("legs", 0, 0, b"k", b"no envelope")]
    with pytest.raises(RunRefusedError, match="has no dead-letter topic"):
        flow.aggregator(stores=store, start="delivered")(frame(sql, broken), 0)
    late = [Record("legs", 0, 50, one.key, one.value) for one in whole[:1]]
    with pytest.raises(RunRefusedError, match="the batch lacks offsets 0 to 49 of legs:0"):
        flow.aggregator(stores=store, start="delivered")(frame(sql, late), 0)


def test_after_an_accepted_gap_what_was_left_out_is_in(sql: SparkSession, store: str) -> None:
    sent, flow = legs(300), fleet("legs")
    whole = records(sent)
    with flow.aggregator(stores=store) as aggregator:
        aggregator(frame(sql, whole[:100]), 0)
    with pytest.raises(RunRefusedError, match="has no dead-letter topic"):
        bad = [Record(one.topic, one.partition, one.offset, one.key, b"no envelope") for one in whole[200:202]]
        flow.aggregator(stores=store, accept=["gap"])(frame(sql, [*bad, *whole[202:]]), 0)
    with flow.aggregator(stores=store) as aggregator:
        aggregator(frame(sql, whole), 0)
    exact(flow, store, [*sent[:100], *sent[200:]])
