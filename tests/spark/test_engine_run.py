"""How a run begins, tries again, is fenced, is stopped and ends."""

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path as File
from typing import Any, TypeVar

import pytest
from pyspark import RDD, SparkContext

from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.engine import batches, group_offsets, opening
from aggregations.engine.options import RunOptions
from aggregations.engine.roots import EndsByIncarnation, ask_ends
from aggregations.errors import FlowError
from aggregations.report import Report
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.spark import run_flow
from jobs.stack import ports
from persistence.commit.faults import SPEC, Fault, FaultOutcome, Injector, NoFaults, use
from persistence.errors import Fenced, Terminal
from persistence.kafka import BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from tests.messages import Leg
from tests.support.flows import PATHS, Deadly, Named, Path, Totals, carrier, fleet, tail, totals
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]

T = TypeVar("T")


@contextmanager
def faults_in_workers(spark: SparkContext, spec: str) -> Iterator[None]:
    """Let Spark's workers have `HEADWATER_FAULT`: those that start with another environment are new ones."""
    environment = spark.environment
    before = dict(environment)
    environment.update({SPEC: spec, "HEADWATER_TEST": uuid.uuid4().hex})
    try:
        yield
    finally:
        environment.clear()
        environment.update(before)


class StopAtFirstWarning(logging.Handler):
    """Stops a run while it waits for a retry."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.stop = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.stop.set()


class Recorder(NoFaults):
    """Notes the driver's effects once they have happened."""

    def __init__(self) -> None:
        self.points: list[str] = []

    def effect(self, point: str, action: Callable[[], T]) -> T:
        done = action()
        self.points.append(point)
        return done


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        pytest.param(path, spec, marks=[] if path == here else pytest.mark.kills)
        for here, spec in (
            ("messages", "load:aircraft.error,persist:carrier.error,persist:aircraft.unanswered"),
            ("columns", "fold.error,publish.unanswered,dead_letter.error,persist:carrier.unanswered"),
        )
        for path in PATHS
    ],
)
def test_a_store_or_broker_that_fails_for_a_moment_is_asked_again_within_the_run(
    world: World, path: Path, spec: str, spark: SparkContext, caplog: pytest.LogCaptureFixture
) -> None:
    sent, flow = legs(60), fleet(world.topic, path)
    world.send([*republished(sent, [*range(50), *range(20, 60)]), Sent(b"poison", b"N1")])
    with faults_in_workers(spark, spec), caplog.at_level(logging.WARNING, "headwater.engine"):
        world.run(flow)
    tried = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert any("injected at" in message for message in tried)
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.parametrize("victim", ["the resident that folds", "one that waits to persist", "the supervisor"])
def test_a_process_that_dies_is_replaced_and_its_batch_tried_again(
    world: World, tmp_path: File, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, marker = legs(40), tmp_path / "alive"
    marker.touch()
    world.send(alone(leg) for leg in sent)
    flow: Flow[Any] = Flow("deadly").source(Topic(world.topic, payload=Leg))
    if victim == "the resident that folds":
        folds = Deadly(str(marker)), Totals()
    else:
        folds = Named(str(marker), parent=victim == "the supervisor"), Deadly(str(marker))
    flow = flow.aggregate("aircraft", tail, folds[0]).aggregate("carrier", carrier, folds[1])
    with caplog.at_level(logging.WARNING, "headwater.engine"):
        world.run(flow)
    assert {
        "the resident that folds": "the resident process of slot",
        "one that waits to persist": "a resident process ended before it had persisted",
        "the supervisor": "batch 1, attempt 1",  # Spark starts its daemon again; which error comes first is a race
    }[victim] in caplog.text
    assert not marker.exists()
    world.check(flow)


@pytest.mark.parametrize("which", ["launcher", "daemon", "server"])
def test_workers_whose_daemon_was_killed_are_not_used_again(world: World, spark: SparkContext, which: str) -> None:
    sent, flow = legs(40), fleet(world.topic)
    world.send(alone(leg) for leg in sent[:20])
    world.run(flow)
    killed = []
    for process in daemons(spark)[which]:
        with suppress(ProcessLookupError):  # the server of a daemon that another test has killed ends by itself
            os.kill(process, signal.SIGKILL)
            killed.append(process)
    assert killed
    world.send(alone(leg) for leg in sent[20:])
    world.run(flow)
    world.check(flow)


def jobs_at_work(spark: SparkContext) -> list[int]:
    """Spark's jobs that have not ended. Spark tells its status tracker of an end a moment after the action returns."""
    spark._jsc.sc().listenerBus().waitUntilEmpty()
    return list(spark.statusTracker().getActiveJobsIds())


def daemons(spark: SparkContext) -> dict[str, list[int]]:
    """Process ids of what Spark took for its daemon, of the daemon, and of the server that it was forked from."""
    children: dict[int, list[int]] = {}
    for process in File("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(process.name))

    def running(parent: int, module: bytes) -> list[int]:
        found = []
        for one in children.get(parent, []):
            with suppress(OSError):
                found += [one] if module in File(f"/proc/{one}/cmdline").read_bytes() else []
        return found

    launchers = running(spark._gateway.proc.pid, b"aggregations.spark.daemon")
    servers = [one for ahead in running(os.getpid(), b"python_ahead") for one in children[ahead]]
    forks = [one for server in servers for one in children.get(server, [])]
    assert launchers
    return {"launcher": launchers, "daemon": forks or launchers, "server": servers or launchers}


def test_runs_of_one_flow_name_in_one_process_keep_their_states_apart(
    world: World, kafka: str, topic: Callable[..., str], tmp_path: File
) -> None:
    """Both have epoch 1 and batch 1: two topics, two stores."""
    (tmp_path / "other").mkdir()
    both = threading.Barrier(2)

    def run(world: World, seed: int) -> None:
        sent, flow = legs(200, seed=seed, tails=40), fleet(world.topic)
        world.send(alone(leg) for leg in sent)
        both.wait()
        world.run(flow, stop=threading.Event())
        assert world.results(flow, "aircraft") == totals(sent, "tail")
        assert world.results(flow, "carrier") == totals(sent, "carrier")

    other = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path / "other")
    with closing(other), ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, world, 1), threads.submit(run, other, 2)]:
            done.result()


@pytest.mark.parametrize("left", [0, 1, -1], ids=["nothing", "one block", "all but one"])
def test_results_that_break_off_are_not_taken_for_complete_ones(
    world: World, left: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent, flow = legs(40), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    collect, calls = RDD.collect, iter(range(100))

    def breaks_off_once(rows: RDD[Any]) -> list[Any]:
        found = collect(rows)
        return found if next(calls) else found[:left]

    monkeypatch.setattr(RDD, "collect", breaks_off_once)
    with caplog.at_level(logging.WARNING, "headwater.engine"):
        world.run(flow)
    assert "Spark delivered" in caplog.text
    world.check(flow)


def test_a_manifest_that_cannot_be_written_for_a_moment_is_written_again_within_the_run(world: World) -> None:
    sent, flow = legs(30), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    for outcome in (FaultOutcome.ERROR, FaultOutcome.UNANSWERED):
        with use(Injector([Fault("manifest", outcome)])) as injector:
            world.run(flow)
        world.send(alone(leg) for leg in sent)
        assert injector.reached["manifest:aircraft"] > 1
    assert world.run(flow).records == len(sent)
    world.check(flow)


def test_a_run_that_is_told_to_stop_before_it_tries_again_leaves_the_batch_to_the_next_one(world: World) -> None:
    sent, flow, impatient = legs(30), fleet(world.topic), StopAtFirstWarning()
    world.send(alone(leg) for leg in sent)
    logger = logging.getLogger("headwater.engine")
    logger.addHandler(impatient)
    try:
        with use(Injector([Fault("manifest", FaultOutcome.ERROR)])):
            report = world.run(flow, stop=impatient.stop)
    finally:
        logger.removeHandler(impatient)
    assert (report.batches, world.ends(flow)) == (0, {0: 0, 1: 0})
    assert world.run(flow).records == len(sent)
    world.check(flow)


def test_a_broker_that_does_not_answer_a_batch_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, flow, away = legs(30), fleet(world.topic), [BrokerUnavailable("no leader", "Wait")]

    def ask(topics: Topics, names: Iterable[str]) -> EndsByIncarnation:
        if away:
            raise away.pop()
        return ask_ends(topics, names)

    monkeypatch.setattr(batches, "ask_ends", ask)
    world.send(alone(leg) for leg in sent)
    assert world.run(flow).batches == 1
    assert not away
    world.check(flow)


@pytest.mark.parametrize("path", PATHS)
def test_a_newer_run_fences_the_older_one_which_writes_nothing_more(world: World, path: Path) -> None:
    world.apart = True
    sent, flow = legs(90), fleet(world.topic, path)
    world.send(alone(leg) for leg in sent)
    seen: list[object] = []

    def take_over(_: Report) -> None:
        if not seen:
            begin(flow, world.stores(flow)).close()
            seen.append((world.views(flow, "aircraft"), world.views(flow, "carrier")))

    with pytest.raises(Fenced, match="newer run"):
        world.run(flow, max_records=30, progress=take_over)
    assert seen == [(world.views(flow, "aircraft"), world.views(flow, "carrier"))]
    world.run(flow)
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


def test_the_driver_writes_manifests_downstream_first_then_returns_then_tells_the_group(world: World) -> None:
    world.apart = True
    flow = fleet(world.topic)
    world.send(alone(leg) for leg in legs(60))
    with use(Recorder()) as recorder:
        report = world.run(flow, max_records=30)
    points = recorder.points
    # The epoch is taken and installed; each of the two stores gets a manifest of nothing, and one with the start.
    assert points[:6] == ["epoch"] * 6
    batch = ["manifest:carrier", "manifest:aircraft", "return"]
    of_spark = ("offsets", "stream:plan", "stream:begin")
    assert [point for point in points[6:] if point not in of_spark] == [*batch * report.batches, "finish", "finish"]
    assert points.count("offsets") == report.batches
    for n in range(1, report.batches + 1):
        before = points[: [i for i, point in enumerate(points) if point == "offsets"][n - 1]]
        assert before.count("manifest:aircraft") >= n
    ends = {partition: marks.high for (_, partition), marks in world.topics.marks([world.topic]).items()}
    group = world.topics.group_offsets("fleet")
    assert {partition: group[world.topic, partition] for partition in ends} == ends
    assert world.ends(flow, "aircraft") == world.ends(flow, "carrier") == ends


def test_a_group_whose_offsets_cannot_be_committed_costs_nothing_but_a_number(world: World) -> None:
    sent, flow = legs(30), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    with use(Injector([Fault("offsets", FaultOutcome.ERROR)])):
        world.run(flow, group=world.topic)
    assert world.topics.group_offsets(world.topic) == {}
    world.check(flow)


def test_a_run_that_a_newer_one_took_over_from_does_not_set_the_group_s_offsets(world: World) -> None:
    """As if it had been frozen between its batch and its offsets."""
    flow, newer = fleet(world.topic), {(world.topic, 0): 1000, (world.topic, 1): 1000}
    world.send(alone(leg) for leg in legs(30))

    def taken_over(_: Report) -> None:
        begin(flow, world.stores(flow)).close()
        world.topics.alter_group_offsets(world.topic, newer)

    assert world.run(flow, group=world.topic, progress=taken_over).batches == 1
    assert world.topics.group_offsets(world.topic) == newer


@pytest.mark.parametrize("until_caught_up", [True, False])
def test_offsets_that_were_set_back_are_right_again_though_there_is_nothing_to_read(
    world: World, monkeypatch: pytest.MonkeyPatch, until_caught_up: bool
) -> None:
    flow, stop = fleet(world.topic), threading.Event()
    world.send(alone(leg) for leg in legs(30))
    world.run(flow, group=world.topic)
    told = world.topics.group_offsets(world.topic)
    world.topics.alter_group_offsets(world.topic, dict.fromkeys(told, 0))
    if not until_caught_up:
        monkeypatch.setattr(group_offsets, "OFFSETS_SECONDS", 0.0)

    class StopOnceTold(Recorder):
        def effect(self, point: str, action: Callable[[], T]) -> T:
            done = super().effect(point, action)
            if point == "offsets":
                stop.set()
            return done

    with use(StopOnceTold()):
        world.run(flow, group=world.topic, until_caught_up=until_caught_up, stop=stop)
    assert world.topics.group_offsets(world.topic) == told


@pytest.mark.parametrize("path", PATHS)
def test_a_run_that_is_told_to_stop_ends_whole_and_the_next_one_goes_on(
    world: World, path: Path, spark: SparkContext
) -> None:
    sent, flow, stop = legs(160), fleet(world.topic, path), threading.Event()
    world.send(alone(leg) for leg in sent)
    report = world.run(
        flow, max_records=20, until_caught_up=False, trigger_seconds=0, progress=lambda _: stop.set(), stop=stop
    )
    assert 1 <= report.batches < 8
    assert not jobs_at_work(spark)
    assert sum(world.ends(flow).values()) == report.records
    assert world.run(flow).records == len(sent) - report.records
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("in a callback")])
def test_whatever_a_callback_raises_ends_the_run_and_comes_out_as_it_is(
    world: World, spark: SparkContext, error: BaseException
) -> None:
    sent, flow = legs(60), fleet(world.topic)
    world.send(alone(leg) for leg in sent)

    def fail(_: Report) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        world.run(flow, max_records=20, progress=fail)
    assert raised.value is error
    assert not jobs_at_work(spark)
    world.run(flow)
    world.check(flow)


def test_a_store_in_the_memory_of_one_process_is_refused(world: World) -> None:
    flow = fleet(world.topic)
    with pytest.raises(FlowError, match=r"memory:.*sqlite"):
        run_flow(flow, RunOptions(kafka=world.settings, stores=bind(flow, {}, "memory://here")))


def test_a_store_that_cannot_be_opened_is_one_line_with_the_remedy(world: World, tmp_path: File) -> None:
    (tmp_path / "file").write_text("in the way")
    flow = fleet(world.topic)
    with pytest.raises(Terminal) as refused:
        run_flow(flow, RunOptions(kafka=world.settings, stores=bind(flow, {}, f"sqlite:///{tmp_path}/file/states.db")))
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
        run_flow(flow, RunOptions(kafka=nowhere, stores=world.stores(flow), until_caught_up=True))
    assert "\n" not in str(refused.value)


def test_a_topic_that_does_not_exist_is_refused_with_the_remedy(world: World) -> None:
    with pytest.raises(BrokerRefused, match=r"no-such-topic.*[Cc]reate"):
        world.run(fleet("no-such-topic"))
