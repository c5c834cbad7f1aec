"""The closing watermark: what holds it up, and that it never goes back."""

import msgspec
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from aggregations.run.closing import IdlePartitions, closing_watermark
from aggregations.run.common import common
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from persistence.manifest import Growth, Manifest, Progress, decode_manifest, encode_manifest
from persistence.protocol import FlowRef
from tests.support.pure import fresh_store
from tests.unit.test_windows import MINUTE, NOW, SCREWS, at

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


def flow(topic: Topic = SCREWS) -> Flow:
    return Flow("fastening").source(topic).aggregate("screw", "screw", Fields(n=count()), window=tumbling("5m"))


def minute(manifest: Manifest | None) -> int | None:
    assert manifest is not None
    return None if manifest.closing_us is None else (manifest.closing_us // 1_000 - NOW) // MINUTE


def reached(a: int | None, b: int | None) -> dict[str, dict[int, Progress]]:
    return {"a": {0: Progress(9, a)}, "b": {0: Progress(9, b)}}


def test_it_is_the_event_time_that_every_partition_of_every_source_has_reached() -> None:
    assert closing_watermark(None, reached(5, 7), ["a", "b"]) == 5
    assert (
        closing_watermark(5, {"a": {0: Progress(1, 9), 1: Progress(1, 6)}, "b": {0: Progress(1, 8)}}, ["a", "b"]) == 6
    )


def test_a_partition_without_an_event_time_holds_it_up() -> None:
    assert closing_watermark(None, reached(5, None), ["a", "b"]) is None
    assert closing_watermark(3, reached(5, None), ["a", "b"]) == 3


def test_a_source_that_was_never_read_holds_it_up() -> None:
    assert closing_watermark(None, {"a": {0: Progress(9, 5)}}, ["a", "b"]) is None


def test_an_idle_partition_does_not_hold_it_up_and_cannot_lower_it_later() -> None:
    assert closing_watermark(None, reached(5, None), ["a", "b"], {B}) == 5
    assert closing_watermark(5, reached(6, 2), ["a", "b"]) == 5


def test_it_stays_while_all_partitions_are_idle() -> None:
    assert closing_watermark(3, reached(5, 7), ["a", "b"], {A, B}) == 3


def test_a_partition_is_idle_only_after_its_time_without_anything_to_read() -> None:
    idle = IdlePartitions({"a": 60, "b": None})
    assert not idle.look([A, B], [], 0.0)
    assert not idle.look([A, B], [], 59.0)
    assert idle.look([A, B], [], 60.0) == {A}
    assert not idle.look([A, B], [A], 61.0)
    assert not idle.look([A, B], [], 120.0)
    assert idle.look([A, B], [], 121.0) == {A}


@pytest.mark.parametrize("idle", ["0s", "soon", 5])
def test_an_idleness_that_is_no_length_is_refused(idle: str) -> None:
    with pytest.raises(FlowError, match="idle="):
        Topic("a", idle=idle)


def test_the_idleness_is_not_part_of_the_definition() -> None:
    topic = Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m")
    assert flow(topic).definitions == flow().definitions


def test_it_follows_the_slower_partition_and_survives_a_restart() -> None:
    made, store = flow(), fresh_store()
    runner = MemoryRunner(made, bind(made, {}, store))
    runner.process([at(0, 3), at(0, 1, partition=1, screw="t")])
    assert minute(runner.run.manifest) == 1
    runner.process([at(1, 30)])
    assert minute(runner.run.manifest) == 1
    runner.close()
    runner = MemoryRunner(made, bind(made, {}, store))
    assert minute(runner.run.manifest) == 1
    runner.process([at(1, 20, partition=1, screw="t")])
    assert minute(runner.run.manifest) == 20


def test_an_idle_partition_no_longer_holds_windows_open() -> None:
    seconds = [0.0]
    made = flow(Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m"))
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), clock=lambda: seconds[0])
    runner.process([at(0, 3), at(0, 1, partition=1, screw="t")])
    seconds[0] = 299.0
    runner.process([at(1, 20)])
    assert minute(runner.run.manifest) == 1
    seconds[0] = 300.0
    runner.process([at(2, 21)])
    assert minute(runner.run.manifest) == 21
    runner.process([at(1, 2, partition=1, screw="t")])
    assert minute(runner.run.manifest) == 21


@pytest.mark.parametrize("point", ["persist:screw", "manifest"])
def test_a_batch_that_crashed_before_its_manifest_does_not_move_it(point: str) -> None:
    made, store = flow(), fresh_store()
    runner = MemoryRunner(made, bind(made, {}, store))
    runner.process([at(0, 3)])
    with faults.use(Injector([Fault(point, FaultOutcome.ERROR)])), pytest.raises(Transient):
        runner.process([at(1, 30)])
    runner = MemoryRunner(made, bind(made, {}, store))
    assert minute(runner.run.manifest) == 3


def test_no_partition_counts_as_idle_before_what_a_crashed_run_read_is_read_again() -> None:
    seconds, store = [0.0], fresh_store()
    made = flow(Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at", idle="5m"))
    ends = {TopicPartition("screws", 0): 3, TopicPartition("screws", 1): 2}

    def start() -> MemoryRunner:
        return MemoryRunner(made, bind(made, {}, store), ends=ends, clock=lambda: seconds[0])

    runner = start()
    runner.process([at(0, 3), at(0, 1, partition=1, screw="t")])
    with faults.use(Injector([Fault("manifest", FaultOutcome.ERROR)])), pytest.raises(Transient):
        runner.process([at(1, 4), at(1, 2, partition=1, screw="t")])
    runner = start()
    runner.process([at(1, 4)])
    seconds[0] = 1_000.0
    runner.process([at(2, 30)])
    assert minute(runner.run.manifest) == 1


def test_it_stays_while_a_topic_grows() -> None:
    made = flow()
    runner = MemoryRunner(made, bind(made, {}, fresh_store()), whole=lambda: {0: 9, 1: 9})
    runner.process([at(0, 3), at(0, 2, partition=1, screw="t")])
    runner.run.growths["screws"] = Growth(2, 4, 0)
    runner._look = lambda _part, _records: None  # type: ignore[method-assign]
    runner.process([at(1, 30), at(1, 30, partition=1, screw="t")])
    assert minute(runner.run.manifest) == 2


def test_of_several_stores_the_earliest_counts() -> None:
    manifests = [Manifest(1, 1, closing_us=7), Manifest(1, 2, closing_us=9)]
    found = common(manifests, FlowRef("fleet"))
    assert found is not None
    assert found.closing_us == 7
    unknown = common([*manifests, Manifest(1, 1)], FlowRef("fleet"))
    assert unknown is not None
    assert unknown.closing_us is None


def test_a_manifest_from_before_it_existed_has_none() -> None:
    manifest = Manifest(1, 1, closing_us=7)
    assert decode_manifest(encode_manifest(manifest), FlowRef("fleet")) == manifest
    assert msgspec.convert({"epoch": 1, "batch": 1}, Manifest).closing_us is None
