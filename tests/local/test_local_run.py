"""How a run without Spark begins, waits for a broker, is stopped and ends."""

import json
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path as File

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine import opening
from aggregations.engine.options import RunOptions
from aggregations.errors import FlowError, RunRefusedError
from aggregations.local import run_local
from aggregations.report import Report
from aggregations.run.binding import bind
from jobs import stack
from jobs.stack import ports
from persistence.commit.faults import Fault, FaultOutcome, Injector, use
from persistence.errors import Terminal
from persistence.kafka import AcknowledgedProducer, BrokerUnavailable, KafkaSettings, Topics
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]


def is_clean(world: World, name: str = "fleet") -> bool:
    """Whether the last run noted that it ended cleanly."""
    [url] = set(world.stores(fleet(world.topic)).values())
    with closing(open_store(url)) as store:
        manifest = store.load_manifest(FlowRef(name, 1))
    return manifest is not None and manifest.clean


@pytest.mark.parametrize("path", PATHS)
def test_a_run_that_is_told_to_stop_ends_whole_and_the_next_one_goes_on(world: World, path: Path) -> None:
    sent, flow, stop = legs(160), fleet(world.topic, path), threading.Event()
    world.send(alone(leg) for leg in sent)
    report = world.run(
        flow, max_records=20, until_caught_up=False, trigger_seconds=0, progress=lambda _: stop.set(), stop=stop
    )
    assert report.batches == 1
    assert sum(world.ends(flow).values()) == report.records
    assert is_clean(world)
    assert world.run(flow).records == len(sent) - report.records
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("in a callback")])
def test_whatever_a_callback_raises_ends_the_run_and_comes_out_as_it_is(world: World, error: BaseException) -> None:
    sent, flow = legs(60), fleet(world.topic)
    world.send(alone(leg) for leg in sent)

    def fail(_: Report) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        world.run(flow, max_records=20, progress=fail)
    assert raised.value is error
    assert not is_clean(world)
    world.run(flow)
    world.check(flow)


@pytest.mark.parametrize(
    "spec",
    [
        ("load:aircraft.error", "persist:carrier.error", "persist:aircraft.unanswered"),
        ("fold.error", "publish.unanswered", "dead_letter.error", "persist:carrier.unanswered"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_store_or_broker_that_fails_for_a_moment_is_asked_again_within_the_run(
    world: World, path: Path, spec: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    sent, flow = legs(60), fleet(world.topic, path)
    world.send([*republished(sent, [*range(50), *range(20, 60)]), Sent(b"poison", b"N1")])
    faults = list(map(Fault.parse, spec))
    with use(Injector(faults)) as injector, caplog.at_level(logging.WARNING, "headwater.engine"):
        world.run(flow)
    assert all(injector.reached[fault.point] for fault in faults)
    assert caplog.text.count("injected at") == len(faults)
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


def test_records_as_large_as_their_topics_accept_are_published_and_become_dead_letters(
    world: World, topic: Callable[..., str]
) -> None:
    large, dead, out = (topic(name=name, max_message_bytes=3_000_000) for name in ("large", "dead", "out"))
    source = Topic(large, Json({"k": str, "text": str}), envelope=False)
    flow = Flow(f"f-{uuid.uuid4().hex}").source(source).publish(out, key="k").aggregate("k", "k", Fields(n=count()))
    stores = bind(flow, {}, f"lmdb://{world.directory}/large")
    text = "x" * 1_030_000
    with AcknowledgedProducer(world.settings) as producer:
        for value in (json.dumps({"k": "a", "text": text}), text * 2):
            producer.send(large, value.encode(), b"a")
        producer.flush()
    report = run_local(flow, RunOptions(kafka=world.settings, stores=stores, dead_letters=dead, until_caught_up=True))
    assert (report.records, report.outputs) == (2, 1)
    assert [len(one.value or b"") > len(text) for one in world.records(out)] == [True]
    assert [one.value for one in world.records(dead)] == [2 * text.encode()]


def test_a_store_in_the_memory_of_one_process_is_refused(world: World) -> None:
    flow = fleet(world.topic)
    with pytest.raises(FlowError, match=r"memory:.*end with the process.*lmdb"):
        run_local(flow, RunOptions(kafka=world.settings, stores=bind(flow, {}, "memory://here")))


def test_a_store_that_cannot_be_opened_is_one_line_with_the_remedy(world: World, tmp_path: File) -> None:
    (tmp_path / "file").write_text("in the way")
    flow = fleet(world.topic)
    with pytest.raises(Terminal) as refused:
        run_local(flow, RunOptions(kafka=world.settings, stores=bind(flow, {}, f"sqlite:///{tmp_path}/file/states.db")))
    assert str(tmp_path / "file") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_broker_that_does_not_answer_is_one_line_with_the_remedy(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: File
) -> None:
    monkeypatch.setattr(opening, "Topics", partial(Topics, timeout=1))
    monkeypatch.setattr(opening, "WAIT_SECONDS", 0.0)
    flow = fleet(world.topic)
    nowhere = KafkaSettings(f"{ports.LOOPBACK}:{ports.remembered(tmp_path, ['kafka'])['kafka']}")
    with pytest.raises(BrokerUnavailable, match=f"{nowhere.bootstrap}.*Check that the broker runs") as refused:
        run_local(flow, RunOptions(kafka=nowhere, stores=world.stores(flow), until_caught_up=True))
    assert "\n" not in str(refused.value)


def test_a_start_that_waits_for_its_broker_ends_when_it_is_told_to(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: File
) -> None:
    monkeypatch.setattr(opening, "Topics", partial(Topics, timeout=1))
    flow, stop = fleet(world.topic), threading.Event()
    nowhere = KafkaSettings(f"{ports.LOOPBACK}:{ports.remembered(tmp_path, ['kafka'])['kafka']}")
    with at_warning() as waiting:
        waiting.action = stop.set
        assert run_local(flow, RunOptions(kafka=nowhere, stores=world.stores(flow)), stop=stop) == Report()


def test_runs_of_one_flow_name_in_one_process_keep_their_states_and_clients_apart(
    world: World, kafka: str, topic: Callable[..., str], tmp_path: File
) -> None:
    """Both have epoch 1 and batch 1: two topics, two stores, two threads."""
    (tmp_path / "other").mkdir()
    both = threading.Barrier(2)

    def run(world: World, seed: int) -> None:
        sent, flow = legs(200, seed=seed, tails=40), fleet(world.topic)
        world.send([*(alone(leg) for leg in sent), Sent(b"poison", b"N1")])
        both.wait()
        world.run(flow, max_records=50, stop=threading.Event())
        world.check(flow)
        assert world.results(flow, "aircraft") == totals(sent, "tail")

    other = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path / "other", runner=run_local)
    with closing(other), ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, world, 1), threads.submit(run, other, 2)]:
            done.result()


class AtWarning(logging.Handler):
    """Does something once, when a run says that it tries again; nothing before `action` is set."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.action: Callable[[], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.action is not None:
            action, self.action = self.action, None
            action()


@contextmanager
def at_warning() -> Iterator[AtWarning]:
    """Do something at the first warning of the engine in this block after `action` was set."""
    handler, logger = AtWarning(), logging.getLogger("headwater.engine")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def frozen(world: World, tmp_path: File) -> Iterator[tuple[World, Callable[[], None], Callable[[], None]]]:
    """A world on a broker of its own, and functions that freeze the broker and let it continue."""
    with stack.ephemeral(kafka=True, heap_mb=256) as servers:
        [broker] = [one.pid for one in servers.servers if one.name == "kafka"]
        (tmp_path / "own").mkdir()
        own = Topics(KafkaSettings(servers.kafka), timeout=30)
        own.create("legs", 2)
        own.create("dead", 1)
        with closing(World(servers.kafka, "legs", "dead", tmp_path / "own", runner=run_local)) as made:
            try:
                yield made, partial(os.kill, broker, signal.SIGSTOP), partial(os.kill, broker, signal.SIGCONT)
            finally:
                os.kill(broker, signal.SIGCONT)


@pytest.mark.slow
def test_a_broker_that_is_away_for_a_while_is_waited_for(
    frozen: tuple[World, Callable[[], None], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    world, freeze, thaw = frozen
    sent, flow = legs(120), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    batches: list[Report] = []

    def away(report: Report) -> None:
        batches.append(report)
        if len(batches) == 2:
            freeze()
            waited.action = thaw  # a new broker may have caused warnings before

    with at_warning() as waited:
        world.run(flow, max_records=20, progress=away)
    assert waited.action is None, "it was noticed"
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.slow
def test_a_run_that_waits_for_its_broker_ends_when_it_is_told_to(
    frozen: tuple[World, Callable[[], None], Callable[[], None]],
) -> None:
    world, freeze, thaw = frozen
    sent, flow, stop = legs(120), fleet(world.topic), threading.Event()
    world.send(alone(leg) for leg in sent)

    def away(_: Report) -> None:
        freeze()
        waiting.action = stop.set

    with at_warning() as waiting:
        report = world.run(flow, max_records=20, progress=away, stop=stop, until_caught_up=False)
    assert report.batches >= 1
    with at_warning() as waiting:
        waiting.action = thaw  # when the next run has begun to wait for its broker
        world.run(flow)
    assert waiting.action is None, "it was noticed"
    world.check(flow)


@pytest.mark.parametrize("outcome", [FaultOutcome.ERROR, FaultOutcome.UNANSWERED])
def test_a_manifest_that_cannot_be_written_for_a_moment_is_written_again_without_another_fold(
    world: World, outcome: FaultOutcome
) -> None:
    sent, flow = legs(30), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    with use(Injector([Fault("manifest", outcome)])) as injector:
        world.run(flow)
    assert injector.reached["fold"] == len(flow.stages)
    world.check(flow)


def test_a_table_whose_topic_was_created_again_has_the_rows_of_the_new_topic_only(
    world: World, topic: Callable[..., str]
) -> None:
    table = topic(name="merchants")
    payments = Topic(world.topic, Json({"merchant": str}), envelope=False)
    merchants = Topic(table, Json({"category": str}), envelope=False)
    flow = (
        Flow("payments")
        .source(payments)
        .aggregate("card", "_key", Fields(n=count()))
        .lookup("merchant", merchants, "merchant")
        .aggregate("category", pl.col("category").fill_null("unknown"), Fields(n=count()))
    )

    def row(name: str, category: str) -> Sent:
        return Sent(json.dumps({"category": category}).encode(), name.encode())

    def pay(*names: str) -> None:
        world.send(Sent(json.dumps({"merchant": name}).encode(), b"card") for name in names)

    world.send([row("a", "food"), row("b", "books")], table)
    pay("a", "b")
    world.run(flow)
    for rows, found in (([row("a", "toys")], {b"a": {"category": "toys"}}), ([], {})):
        world.topics.delete([table])
        world.topics.create(table, 1)
        world.send(rows, table)
        pay("a", "b")
        with pytest.raises(RunRefusedError, match=r"created again.*--accept topic-recreated"):
            world.run(flow)
        world.run(flow, accept=["topic-recreated"])
        assert world.results(flow, "merchant") == found
        assert world.run(flow).records == 0
    assert world.results(flow, "category") == {
        name: {"n": n} for name, n in ((b"food", 1), (b"books", 1), (b"toys", 1), (b"unknown", 3))
    }
