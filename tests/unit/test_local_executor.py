"""The local engine's batches, from their records to the manifest: the real commit on real stores, without a broker."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import polars as pl
import pytest
from msgspec.structs import replace as replaced

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.definition.sessions import SessionWindow, session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import Window, hopping, tumbling
from aggregations.engine.batches import Batches
from aggregations.engine.clients import own_clients
from aggregations.engine.opening import Opening
from aggregations.engine.options import RunOptions
from aggregations.engine.partition_watch import PartitionWatch
from aggregations.engine.path import Work
from aggregations.engine.ranges import Range, Slot
from aggregations.engine.retry import StoppedError
from aggregations.errors import RunRefusedError
from aggregations.local import executor
from aggregations.local.executor import LocalExecutor
from aggregations.per_message.dead_letters import RejectedRecord
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.states import load_states
from envelope import TopicPartition
from persistence.commit.faults import NoFaults, use
from persistence.errors import Fenced
from persistence.kafka import KafkaSettings
from persistence.kafka.facts import Watermarks
from persistence.manifest import Progress
from tests.support.pure import batches_of, fresh_store
from tests.unit.test_scattered_items import BROKEN, FLOWS, letter, order

T = TypeVar("T")
KAFKA = KafkaSettings("nowhere:1")
WAYS = {"compiled": 0, "by message": executor.FEW_RECORDS}


class Broker:
    """What a run asks of a broker about its topics."""

    def __init__(self) -> None:
        self.ids = {"orders": "O", "legs": "L", "raw": "R"}
        self.count, self.epoch = 1, 4

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.ids[name] for name in names}

    def partitions(self, names: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(names, self.count)

    def ends(self, _names: Sequence[str]) -> dict[TopicPartition, int]:
        return {}

    def leader_epochs(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        return dict.fromkeys(places, self.epoch)

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        return dict.fromkeys(epochs, 6)

    def heads(self, _names: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        return {}

    def marks(self, _names: Sequence[str]) -> dict[TopicPartition, Watermarks]:
        return {}


class Local:
    """A local run whose broker is not there.

    Attributes:
        dead: What went to the dead-letter topic.
    """

    def __init__(self, flow: Flow[Any], urls: Mapping[str, str] | None = None, *, partitions: int = 1) -> None:
        assert flow.topic is not None
        self.flow, self.topic = flow, flow.topic.name
        self.broker = Broker()
        self.broker.count = partitions
        self.dead: list[RejectedRecord] = []
        self.run = begin(flow, urls or bind(flow, {}, fresh_store()))
        self.run.start_at(self.topic, self.broker.ids[self.topic], dict.fromkeys(range(partitions), 0))
        plan: Any = SimpleNamespace(topic=self.topic, topic_id=self.broker.ids[self.topic])
        opening = Opening(self.broker, self.run, [plan])  # type: ignore[arg-type]
        self.executor = LocalExecutor(flow, KAFKA)
        self.batches = Batches(
            flow,
            opening,
            self.executor,
            {self.topic: PartitionWatch(opening, plan, 300, keeps_order=flow.publishes)},
            RunOptions(kafka=KAFKA, stores=self.run.urls, dead_letters="dead"),
            progress=None,
            stop=threading.Event(),
        )
        self.records: list[Record] = []

    def process(self, records: list[Record]) -> None:
        """Fold and commit one batch."""
        self.records = records
        ends: dict[int, int] = {}
        for one in records:
            ends[one.partition] = max(ends.get(one.partition, 0), one.offset + 1)
        ranges = tuple(
            Range(partition, self.run.positions(self.topic)[partition], end, self.topic)
            for partition, end in sorted(ends.items())
        )
        offsets = {TopicPartition(self.topic, partition): end for partition, end in ends.items()}
        stores = {self.run.urls[name]: store for name, store in self.run.stores.items()}
        with own_clients(KAFKA, self.broker, stores):  # type: ignore[arg-type]
            self.batches.commit_batch((Slot(0, ranges),), offsets)

    def states(self, stage: str) -> dict[bytes, Any]:
        found = self.flow.stage(stage)
        keys = [key for key, _ in self.run.stores[stage].scan(self.run.stage_ref(found))]
        return load_states(self.run, found, keys)

    def results(self, stage: str) -> dict[bytes, Any]:
        return {key: state.fold for key, state in self.states(stage).items() if state.folded}

    def stored(self, stage: str) -> dict[bytes, bytes]:
        """The stored bytes by key."""
        return {key: one.value for key, one in self.run.stores[stage].scan(self.run.ref.stage(stage))}


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Local]:
    """Makes local runs that read what they are given."""

    def make(flow: Flow[Any], urls: Mapping[str, str] | None = None, **options: Any) -> Local:
        made = Local(flow, urls, **options)

        def read(*_: object, **__: object) -> Iterator[Any]:
            return iter(batches_of(made.records))

        def publish(work: Work) -> None:
            made.dead.extend(work.collector.dead.values())
            work.collector.dead.clear()
            work.outputs.clear()

        monkeypatch.setattr(executor, "Fetcher", lambda *_, **__: SimpleNamespace(read=read, close=lambda: None))
        monkeypatch.setattr(executor, "publish", publish)
        return made

    return make


@pytest.fixture(params=[*WAYS.values()], ids=[*WAYS])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Records up to which a batch is folded message by message."""
    monkeypatch.setattr(executor, "FEW_RECORDS", request.param)
    return request.param


@pytest.mark.parametrize(("flow", "step"), FLOWS)
def test_items_of_one_record_are_folded_all_or_none_and_its_letter_brings_what_was_missing(
    flow: Callable[[str], Flow[Any]], step: str, few: int, local: Callable[..., Local]
) -> None:
    BROKEN["now"] = True
    records = [order(n, "ok,bad" if n == 0 else "ok") for n in range(60)]
    run = local(flow(step))
    memory = MemoryRunner(flow(step), bind(flow(step), {}, fresh_store()), topic_ids={"orders": "O"})
    for start in range(0, 60, 20):
        run.process(records[start : start + 20])
        memory.process(records[start : start + 20])
    assert run.results("all") == memory.results("all") == {b"all:ok": {"n": 59}}
    [dead], [died] = {(one.own, one.stage): one for one in run.dead}.values(), memory.dead_letters
    assert (dead.own, dead.stage, dead.reason, dead.hole) == (died.record.node, died.stage, died.reason, died.hole)
    assert dead.stage != END_OF_FLOW
    BROKEN["now"] = False
    for offset in (60, 61):
        run.process([letter(dead, records[0], offset)])
        memory.process([letter(dead, records[0], offset)])
    for stage in ("sku", "all"):
        assert run.states(stage) == memory.states(stage)
    assert run.results("all") == {b"all:ok": {"n": 60}, b"all:bad": {"n": 1}}
    assert run.run.ledger.listed == memory.run.ledger.listed == {}


def legs(*stages: str, **options: Any) -> Flow[Any]:
    made: Flow[Any] = Flow("fleet").source(Topic("legs", Json({"tail": str, "carrier": str}), envelope=False))
    for stage in stages or ("tail", "carrier"):
        made = made.aggregate(stage, stage, Fields(n=count()), **options)
    return made


def leg(offset: int, tail: str, carrier: str, partition: int = 0) -> Record:
    value = json.dumps({"tail": tail, "carrier": carrier}).encode()
    return Record("legs", partition, offset, tail.encode(), value, topic_id="L")


LEGS = [leg(n, f"N{n % 3}", f"C{n % 2}") for n in range(30)]


@pytest.mark.parametrize("window", [tumbling("5m"), hopping("10m", "5m", lateness="1m"), session("2m")])
def test_windows_close_across_batches_as_in_memory(
    window: Window | SessionWindow, few: int, local: Callable[..., Local]
) -> None:
    flow = legs("tail", window=window).aggregate("all", pl.lit("all"), Fields(n=count()))
    run, memory = local(flow, partitions=2), MemoryRunner(flow, bind(flow, {}, fresh_store()), topic_ids={"legs": "L"})
    hour, minutes, closed = 1_764_000_000_000, [[1, 20], [2, 21, 16], [22, 3]], 0
    for number, batch in enumerate(minutes):
        records = []
        for offset, minute in enumerate(batch, start=sum(map(len, minutes[:number]))):
            records.append(replace(leg(offset, "N1", "A"), timestamp_ms=hour + minute * 60_000))
            # The other partition is behind, and closes nothing.
            records.append(replace(leg(offset, "N2", "A", 1), timestamp_ms=hour + number * 60_000))
        run.process(records)
        report = memory.process(records)
        closed += report.verdicts["tail"]["window_closed"]
    assert closed > 0
    assert run.batches.total.counts.verdicts["tail"]["window_closed"] == closed
    for stage in ("tail", "all"):
        assert run.states(stage) == memory.states(stage)
    assert run.run.positions("legs") == {0: 7, 1: 7}
    assert memory.run.manifest is not None
    assert run.run.manifest is not None
    assert run.run.manifest.positions == memory.run.manifest.positions


def test_offsets_that_a_truncated_log_gave_twice_are_other_events_in_a_branch_with_dead_letters_of_their_own(
    few: int, local: Callable[..., Local]
) -> None:
    """KIP-320: the log was cut at 5, the loss is accepted, and other records have the offsets from there on."""
    run = local(legs("tail", "carrier"))
    run.process([leg(n, "N1", "A") for n in range(10)])
    branch = Progress(5, leader_epoch=4, branches=((5, 4),))
    run.run.start_at("legs", "L", {0: 5}, logs={0: branch})
    bad = replace(leg(6, "N1", "A"), value=b"?")
    run.process([leg(5, "N1", "A"), bad, leg(7, "N1", "A")])
    assert run.results("tail") == {b"N1": {"n": 12}}
    assert run.results("carrier") == {b"A": {"n": 12}}
    assert run.states("tail")[b"N1"].histories.lanes.keys() == {"legs:0#L", "legs:0#L~4"}
    [died] = [one.own for one in run.dead]
    assert (died.offset, died.topic_id) == (6, "L~4")
    assert run.run.manifest is not None
    assert run.run.manifest.positions == {"legs": {0: replaced(branch, next_offset=8)}}
    assert not run.batches.total.counts.verdicts["tail"].keys() & {"stale_incarnation", "duplicate"}


def test_a_batch_whose_log_was_cut_while_it_was_read_is_refused_before_anything_is_written(
    few: int, local: Callable[..., Local]
) -> None:
    run = local(legs("tail"))
    run.run.start_at("legs", "L", {0: 0}, logs={0: Progress(0, leader_epoch=4)})
    run.broker.epoch = 5
    run.process([leg(n, "N1", "A") for n in range(6)])
    with pytest.raises(
        RunRefusedError, match="legs:0 is read up to 8, but the broker lost its records from offset 6 on"
    ):
        run.process([leg(n, "N1", "A") for n in range(6, 8)])
    assert run.results("tail") == {b"N1": {"n": 6}}


def test_a_batch_of_few_records_and_one_of_many_store_the_same_bytes(
    local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []
    for few in WAYS.values():
        monkeypatch.setattr(executor, "FEW_RECORDS", few)
        run = local(legs())
        run.process(LEGS[:20])
        run.process([*LEGS[20:]])
        stored.append({stage: run.stored(stage) for stage in ("tail", "carrier")})
    assert stored[0] == stored[1]


def test_the_vectorised_path_is_kept_once_it_is_loaded(
    local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "FEW_RECORDS", 10)
    run = local(legs())
    paths = []
    for batch in (LEGS[:10], LEGS[10:21], LEGS[21:22]):
        run.process(batch)
        paths.append(type(run.executor._path_of((Range(0, 0, 1),))).__name__)
    assert paths == ["MessagePath", "ColumnarPath", "ColumnarPath"]


class Recorder(NoFaults):
    """Notes effects once they have happened."""

    def __init__(self) -> None:
        self.points: list[str] = []

    def effect(self, point: str, action: Callable[[], T]) -> T:
        done = action()
        self.points.append(point)
        return done


def test_a_batch_takes_the_steps_of_the_commit_in_their_order(local: Callable[..., Local], few: int) -> None:
    flow = legs()
    run = local(flow, {"tail": fresh_store(), "carrier": fresh_store()})
    with use(Recorder()) as recorder:
        run.process(LEGS)
    steps = [one for one in recorder.points if one.partition(":")[0] in ("persist", "manifest")]
    assert steps == ["persist:carrier", "persist:tail", "manifest:carrier", "manifest:tail"]
    loads = [recorder.points.index(f"load:{stage}") for stage in ("tail", "carrier")]
    assert max(loads) < recorder.points.index("persist:carrier")


def test_a_batch_that_is_cancelled_while_it_is_folded_leaves_nothing_behind(
    local: Callable[..., Local], few: int
) -> None:
    run = local(legs())
    before = run.run.stores["tail"].load_manifest(run.run.ref)

    class Cancels(NoFaults):
        def effect(self, point: str, action: Callable[[], T]) -> T:
            if point == "load:carrier":
                run.executor.cancel()
            return action()

    with use(Cancels()), pytest.raises(StoppedError):
        run.process(LEGS)
    assert run.stored("tail") == run.stored("carrier") == {}
    assert run.run.stores["tail"].load_manifest(run.run.ref) == before


def test_a_key_in_two_partitions_is_folded_once_and_noted_as_a_growth(local: Callable[..., Local], few: int) -> None:
    run = local(legs("tail"), partitions=2)
    run.process([leg(0, "N1", "A"), leg(0, "N1", "A", partition=1), leg(1, "N1", "A", partition=1)])
    assert run.results("tail") == {b"N1": {"n": 3}}
    assert not run.run.evicts


def test_a_newer_run_fences_the_older_one(local: Callable[..., Local], few: int) -> None:
    flow, urls = legs(), {"tail": fresh_store(), "carrier": fresh_store()}
    run = local(flow, urls)
    run.process(LEGS[:10])
    before = {stage: run.stored(stage) for stage in urls}
    begin(flow, urls).close()
    with pytest.raises(Fenced):
        run.process(LEGS[10:])
    assert {stage: run.stored(stage) for stage in urls} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_what_ends_the_process_is_no_failure_of_the_batch(
    error: BaseException, local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = local(legs())
    monkeypatch.setattr(run.executor, "_execute", raising(error))
    with pytest.raises(type(error)):
        run.process(LEGS)


def test_a_panic_of_polars_is_an_error_of_the_batch(
    local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = local(legs())
    monkeypatch.setattr(run.executor, "_execute", raising(pl.exceptions.PanicException("index out of bounds")))
    with pytest.raises(RuntimeError, match="PanicException while batch 1 was folded"):
        run.process(LEGS)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_neither_spark_nor_compiled_code_is_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, aggregations.local.runner, jobs.cli.run;"
        "print(sorted({'pyspark', 'py4j', 'numba', 'llvmlite', 'redis', 'cassandra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
