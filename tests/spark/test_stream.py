"""A run on Spark is a query of Spark's: its checkpoint may be in any state, and Spark shows where it stands."""

import json
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

from aggregations.errors import FlowError, RunRefusedError
from aggregations.spark.source import IS_LIMITED
from envelope import decode
from jobs import StatesSource
from jobs.stack.topics import create
from tests.messages import Leg
from tests.support.flows import fleet, totals
from tests.support.rows import frame
from tests.support.world import World, alone, legs

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture(scope="module")
def sql(spark: SparkContext) -> SparkSession:
    return SparkSession.builder.getOrCreate()


class Shown(StreamingQueryListener):
    """Keeps what Spark says of queries."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.progress: list[dict[str, Any]] = []
        self.ended = threading.Event()

    def onQueryStarted(self, event: Any) -> None:
        self.names.append(event.name)

    def onQueryProgress(self, event: Any) -> None:
        self.progress.append(json.loads(event.progress.json))

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        self.ended.set()


@pytest.fixture
def shown(sql: SparkSession) -> Iterator[Shown]:
    listener = Shown()
    sql.streams.addListener(listener)
    yield listener
    sql.streams.removeListener(listener)


def test_spark_shows_its_name_its_records_and_offsets_as_those_of_kafka(world: World, shown: Shown) -> None:
    sent, flow = legs(200), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    world.run(flow)
    assert shown.ended.wait(30)
    assert shown.names == ["fleet"]
    assert sum(one["numInputRows"] for one in shown.progress) == 200
    (source,) = shown.progress[-1]["sources"]
    ends = {str(partition): end for partition, end in world.ends(flow).items()}
    assert source["endOffset"] == {world.topic: ends}
    if IS_LIMITED:
        assert source["latestOffset"] == {world.topic: ends}


def test_a_backlog_is_divided_where_spark_lets_a_source_divide_it(world: World, shown: Shown) -> None:
    sent, flow = legs(300), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    reports: list[int] = []
    report = world.run(flow, max_records=100, progress=lambda one: reports.append(one.records))
    assert shown.ended.wait(30)
    assert (report.records, report.batches) == (300, len(reports))
    assert len(reports) >= 3
    assert max(reports) <= 102
    batches = [one for one in shown.progress if one["numInputRows"]]
    assert len(batches) == (len(reports) if IS_LIMITED else 1)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


@pytest.mark.parametrize(
    "state",
    [
        "kept",
        "lost",
        "older",
        "without its last commit",
        "without its last offsets",
        "of another flow",
        "damaged",
        "damaged in its commits",
        "damaged in its metadata",
    ],
)
def test_the_checkpoint_of_a_run_may_be_in_any_state(world: World, tmp_path: Path, state: str) -> None:
    sent, flow, checkpoint = legs(300), fleet(world.topic), tmp_path / "checkpoint"
    world.send(alone(leg) for leg in sent[:100])
    world.run(flow, checkpoint=str(checkpoint))
    shutil.copytree(checkpoint, tmp_path / "older")
    world.send(alone(leg) for leg in sent[100:200])
    world.run(flow, checkpoint=str(checkpoint))
    world.send(alone(leg) for leg in sent[200:])
    if state == "lost":
        shutil.rmtree(checkpoint)
    elif state == "older":
        shutil.rmtree(checkpoint)
        (tmp_path / "older").rename(checkpoint)
    elif state == "without its last commit":
        _newest(checkpoint / "commits").unlink()
    elif state == "without its last offsets":
        _newest(checkpoint / "offsets").unlink()
    elif state == "damaged":
        _newest(checkpoint / "offsets").write_text("")
    elif state == "damaged in its commits":
        _newest(checkpoint / "commits").write_text("")
    elif state == "damaged in its metadata":
        (checkpoint / ".metadata.crc").unlink(missing_ok=True)
        (checkpoint / "metadata").write_text("{")
    if state == "of another flow":
        other = World(world.settings.bootstrap, world.topic, world.dead, tmp_path / "others")
        (tmp_path / "others").mkdir()
        other.run(flow, checkpoint=str(checkpoint))
        assert other.results(flow, "aircraft") == totals(sent, "tail")
        other.close()
    if state.startswith("damaged") or state == "without its last offsets":
        with pytest.raises(RunRefusedError, match="remove it: progress is in the stores"):
            world.run(flow, checkpoint=str(checkpoint))
        shutil.rmtree(checkpoint)
    world.run(flow, checkpoint=str(checkpoint))
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")


def _newest(log: Path) -> Path:
    for checksum in log.glob(".*.crc"):
        checksum.unlink()
    return max((one for one in log.iterdir() if one.name.isdigit()), key=lambda one: int(one.name))


def test_a_checkpoint_that_is_ahead_of_the_stores_loses_nothing(world: World, tmp_path: Path) -> None:
    sent, flow, checkpoint = legs(200), fleet(world.topic), tmp_path / "checkpoint"
    world.send(alone(leg) for leg in sent)
    world.run(flow, checkpoint=str(checkpoint))
    world.directory = tmp_path / "restored"
    world.directory.mkdir()
    world.run(flow, checkpoint=str(checkpoint))
    assert world.results(flow, "aircraft") == totals(sent, "tail")


def test_the_aggregator_reads_kafka_itself_in_a_session_of_the_user(
    world: World, sql: SparkSession, tmp_path: Path
) -> None:
    sent, flow = legs(150), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    sql.dataSource.register(StatesSource)
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    with flow.aggregator(**given) as aggregator:
        writer = aggregator.read_stream(sql).writeStream.foreachBatch(aggregator)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.processAllAvailable()
        world.send(alone(leg) for leg in legs(50, seed=9))
        query.processAllAvailable()
        query.stop()
    assert world.results(flow, "aircraft") == totals([*sent, *legs(50, seed=9)], "tail")


def delete_before(world: World, offsets: dict[int, int]) -> None:
    """Let the broker delete the records before these offsets."""
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    parts = [TopicPartition(world.topic, partition, offset) for partition, offset in offsets.items()]
    for deleted in admin.delete_records(parts).values():
        deleted.result(30)


def rows_of(world: World, sql: SparkSession, begin: int = 0) -> Any:
    """The records of the topic as a stream of Spark's Kafka source would deliver them."""
    return frame(sql, [one for one in world.records() if one.offset >= begin])


def test_offsets_of_transactions_are_no_gap(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(60)
    producer = Producer({"bootstrap.servers": world.settings.bootstrap, "transactional.id": world.topic})
    producer.init_transactions(30)
    for start in range(0, 60, 20):
        producer.begin_transaction()
        for leg in sent[start : start + 20]:
            one = alone(leg)
            producer.produce(world.topic, one.value, one.key, 0)
        producer.commit_transaction(30)
    found = world.records()
    with flow.aggregator(kafka=world.settings, stores=world.stores(flow), dead_letters=world.dead) as aggregator:
        for start in range(0, 60, 20):
            aggregator(frame(sql, found[start : start + 20]), 0)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    without = fleet(world.topic).aggregator(stores=f"lmdb://{world.directory}/without")
    without(frame(sql, found[:20]), 0)
    with pytest.raises(RunRefusedError, match="cannot be known without the broker"):
        without(frame(sql, found[20:40]), 0)


def test_records_that_a_stream_skips_are_a_gap(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(100)
    world.send(alone(leg) for leg in sent)
    aggregator = flow.aggregator(kafka=world.settings, stores=world.stores(flow), dead_letters=world.dead)
    with pytest.raises(RunRefusedError, match="the topic has records there"):
        aggregator(rows_of(world, sql, begin=10), 0)
    aggregator(rows_of(world, sql), 0)
    aggregator.close()
    world.check(flow)


def test_a_run_and_a_stream_of_rows_continue_each_other(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(240)
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    world.send(alone(leg) for leg in sent[:80])
    with flow.aggregator(**given) as aggregator:
        aggregator(rows_of(world, sql), 0)
    world.send(alone(leg) for leg in sent[80:160])
    world.run(flow)
    world.send(alone(leg) for leg in sent[160:])
    with flow.aggregator(**given) as aggregator:
        aggregator(rows_of(world, sql), 0)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    world.check(flow)


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_folded_without_the_broker_is_continued_with_it(world: World, sql: SparkSession, clean: bool) -> None:
    flow, sent = fleet(world.topic), legs(160)
    world.send(alone(leg) for leg in sent[:80])
    without = flow.aggregator(stores=world.stores(flow))
    without(rows_of(world, sql), 0)
    if clean:
        without.close()
    world.send(alone(leg) for leg in sent)
    world.run(flow)
    assert world.results(flow, "aircraft") == totals([*sent[:80], *sent], "tail")


def test_a_crashed_run_with_the_broker_is_not_continued_without_it(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(80)
    world.send(alone(leg) for leg in sent)
    given = {"stores": world.stores(flow), "dead_letters": world.dead}
    flow.aggregator(kafka=world.settings, **given)(rows_of(world, sql), 0)
    with pytest.raises(RunRefusedError, match=r"only the broker can say .* Give the Kafka settings \(kafka=\)"):
        flow.aggregator(stores=world.stores(flow))(rows_of(world, sql), 0)


def test_a_flow_that_writes_needs_its_broker() -> None:
    with pytest.raises(FlowError, match="it writes to dead; give kafka=, the settings of its broker"):
        fleet("legs").aggregator(stores="lmdb:///nowhere", dead_letters="dead")
    with pytest.raises(FlowError, match="has no option store=; the options are kafka, stores"):
        fleet("legs").aggregator(store="lmdb:///nowhere")


def test_an_archive_that_begins_before_the_log_is_folded_whole_with_the_broker(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(120)
    world.send(alone(leg) for leg in sent)
    archive = rows_of(world, sql).persist()
    archive.count()
    delete_before(world, {0: 5, 1: 7})
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    aggregator = flow.aggregator(**given)
    with pytest.raises(
        RunRefusedError, match=r"lacks offsets 0 to 1 of .*:0, which the flow has not folded, and the topic does not"
    ):
        aggregator.fold(archive.filter("partition = 1 or offset >= 2"))
    with flow.aggregator(**given, max_records=40) as aggregator:
        assert aggregator.fold(archive).records == 120
    world.send(alone(leg) for leg in legs(30, seed=3))
    world.run(flow)
    assert world.results(flow, "aircraft") == totals([*sent, *legs(30, seed=3)], "tail")


def test_a_stream_that_begins_where_the_log_does_is_no_gap(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(60)
    world.send(alone(leg) for leg in sent)
    delete_before(world, {0: 5, 1: 7})
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    with flow.aggregator(**given) as aggregator:
        aggregator(rows_of(world, sql), 0)
    kept = [Leg.FromString(decode(one.value).payload) for one in world.records()]
    assert len(kept) == 48
    assert world.results(flow, "aircraft") == totals(kept, "tail")


def test_what_cannot_work_is_said_in_a_sentence(world: World, sql: SparkSession) -> None:
    flow, url = fleet("legs"), f"lmdb://{world.directory}/unused"
    with pytest.raises(FlowError, match="where it begins, its source decides"):
        flow.aggregator(stores=url, start="latest")(frame(sql, []), 0)
    with pytest.raises(FlowError, match=r"until_caught_up= is for ranges of Kafka; .* trigger\(availableNow=True\)"):
        flow.aggregator(stores=url, until_caught_up=True)(frame(sql, []), 0)
    with pytest.raises(FlowError, match=r"fold\(\) takes a DataFrame that is no stream.*foreachBatch\(aggregator\)"):
        flow.aggregator(stores=url).fold(sql.readStream.format("rate").load())
    with pytest.raises(FlowError, match="max_records=-1: it must not be negative"):
        flow.aggregator(stores=url, max_records=-1)
    with pytest.raises(FlowError, match=r"read_stream\(\) reads Kafka itself; give kafka="):
        flow.aggregator(stores=url).read_stream(sql)
    with pytest.raises(FlowError, match="as Spark Connect does; use a classic Spark session"):
        pickle.dumps(flow.aggregator(stores=url))
    closed = flow.aggregator(stores=url)
    closed.close()
    with pytest.raises(FlowError, match="this aggregator is closed"):
        closed(frame(sql, []), 0)


def test_records_that_a_stream_passes_over_within_a_batch_are_a_gap(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(100)
    world.send(alone(leg) for leg in sent)
    filtered = frame(sql, [one for one in world.records() if one.offset != 7])
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    with pytest.raises(RunRefusedError, match=r"lacks offset 7 of .*, and the topic has records"):
        flow.aggregator(**given)(filtered, 0)
    without = fleet(world.topic).aggregator(stores=f"lmdb://{world.directory}/without")
    with pytest.raises(RunRefusedError, match=r"lacks offset 7 of .*, and whether there are records cannot be known"):
        without(filtered, 0)
    with flow.aggregator(**given) as aggregator:
        aggregator(rows_of(world, sql), 0)
    world.check(flow)


def test_rows_of_a_topic_that_was_created_again_are_refused(world: World, sql: SparkSession) -> None:
    flow, sent = fleet(world.topic), legs(40)
    world.send(alone(leg) for leg in sent)
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    aggregator = flow.aggregator(**given)
    aggregator(rows_of(world, sql), 0)
    world.topics.delete([world.topic])
    create(world.settings.bootstrap, world.topic, 2)
    world.send(alone(leg) for leg in legs(20, seed=5))
    with pytest.raises(RunRefusedError, match="was created again"):
        aggregator(rows_of(world, sql), 1)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


def test_a_query_that_runs_on_after_its_aggregator_was_closed_ends(
    world: World, sql: SparkSession, tmp_path: Path
) -> None:
    flow = fleet(world.topic)
    world.send(alone(leg) for leg in legs(20))
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    aggregator = flow.aggregator(**given)
    writer = aggregator.read_stream(sql).writeStream.foreachBatch(aggregator)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.processAllAvailable()
    with pytest.raises(FlowError, match="a query of this aggregator runs; stop it before read_stream"):
        aggregator.read_stream(sql)
    aggregator.close()
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(60)
    world.run(flow)
    world.check(flow)


def test_added_partitions_whose_rows_are_delivered_are_noticed(
    world: World, sql: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    flow, sent = fleet(world.topic), legs(80)
    world.send(alone(leg) for leg in sent)
    given = {"kafka": world.settings, "stores": world.stores(flow), "dead_letters": world.dead}
    with flow.aggregator(**given) as aggregator:
        aggregator(rows_of(world, sql), 0)
        world.topics.add_partitions(world.topic, 3)
        world.send(alone(leg) for leg in legs(60, seed=4))
        aggregator(rows_of(world, sql), 1)
    assert "grown" in caplog.text or "growth of topic" in caplog.text
    assert world.results(flow, "aircraft") == totals([*sent, *legs(60, seed=4)], "tail")
