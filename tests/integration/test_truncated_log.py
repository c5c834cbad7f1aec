"""A broker loses the end of a log and gives the offsets to new records (KIP-320): what reads it refuses, then resumes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from aggregations import Fields, Flow, Json, RunRefusedError, Topic, collect, count, run_local
from aggregations.report import Report
from aggregations.spark import run_flow
from envelope.filters import SequenceFilter, from_header
from jobs import Outcome, Place, explain, stack, states
from jobs.copying import Copy, TopicRecords
from jobs.republish import InputTopics, JsonPayload, Republisher, Wrapping, identity
from jobs.republish.absence import Unsafe
from persistence.commit.faults import NoFaults, use
from persistence.errors import Terminal
from persistence.kafka import KafkaSettings, ProducerSession, Topics
from tests.support.several_brokers import several_brokers

OLD, NEW = list(range(10)), list(range(100, 108))
LEFT = 5
"""Records that the broker keeps."""


def cut(root: Path, *topics: str) -> str:
    """Stop the broker, drop all but the first records of topics' logs, as a power loss may, and start it again."""
    stack.down(root)
    for topic in topics:
        (folder,) = root.glob(f"**/{topic}-0")
        segment = max(folder.glob("*.log"))
        content, at = segment.read_bytes(), 0
        while int.from_bytes(content[at : at + 8]) < LEFT:  # a batch: its first offset, its length, and so many bytes
            at += 12 + int.from_bytes(content[at + 8 : at + 12])
        segment.write_bytes(content[:at])
        for file in (*folder.glob("*index"), *folder.glob("*.snapshot")):
            file.unlink()
    for file in (*root.glob("**/.kafka_cleanshutdown"), *root.glob("**/recovery-point-offset-checkpoint")):
        file.unlink()
    return stack.up(root).kafka


def send(kafka: str, topic: str, numbers: list[int]) -> None:
    """Produce one batch for each record."""
    producer = Producer({"bootstrap.servers": kafka, "batch.num.messages": 1, "linger.ms": 0})
    for number in numbers:
        producer.produce(topic, json.dumps({"k": "a", "i": number}), b"a", headers=[("sequence", b"%d" % number)])
    assert producer.flush(60) == 0


@contextmanager
def broker(root: Path, *topics: str) -> Iterator[KafkaSettings]:
    settings = KafkaSettings(stack.up(root).kafka)
    try:
        for name in topics:
            Topics(settings, timeout=60).create(name)
        Topics(settings).create("positions", 1, {"cleanup.policy": "compact"})
        yield settings
    finally:
        stack.down(root)


class Reader:
    """A flow that collects the numbers it has read."""

    def __init__(self, name: str, topic: str, store: Path, *, envelope: bool, publishes: str = "") -> None:
        source = Topic(topic, Json({"k": str, "i": int}), envelope=envelope)
        fold = Fields(n=count(), numbers=collect("i", 100))
        self.flow: Flow[Any] = Flow(name).source(source).aggregate("s", key="k", fold=fold)
        if publishes:
            self.flow = self.flow.publish(publishes)
        self.store = f"lmdb://{store / name}"

    def run(self, settings: KafkaSettings, *accept: str, on: Callable[..., Report] = run_local) -> Report:
        return on(self.flow, kafka=settings, stores={"s": self.store}, until_caught_up=True, accept=[*accept])

    @property
    def numbers(self) -> list[int]:
        (found,) = states(self.flow, "s", {"s": self.store})
        assert found.state["n"] == len(found.state["numbers"]["values"])
        return sorted(found.state["numbers"]["values"])


def republisher(settings: KafkaSettings, name: str, target: str, **more: Any) -> Republisher:
    source = InputTopics("in", Wrapping.NONE, JsonPayload)
    return Republisher(identity, source=source, target=target, name=name, settings=settings, **more)


@pytest.mark.slow
@pytest.mark.parametrize("written", ["past the old end", "not yet"])
def test_a_log_that_lost_its_end_is_refused_by_all_that_read_it_and_its_new_records_arrive_once_that_is_accepted(
    tmp_path: Path, written: str
) -> None:
    with broker(tmp_path, "in", "out", "filtered", "copied", "published", "session") as settings:
        send(settings.bootstrap, "in", OLD)
        with ProducerSession("till", "session", settings) as session:
            for number in OLD:
                session.send(b"v", b"a", sequence=number)
                session.flush()
            reached = session.checkpoint()
        direct = Reader("direct", "in", tmp_path, envelope=False, publishes="published")
        behind_flow = Reader("behind-flow", "published", tmp_path, envelope=True)
        behind = Reader("behind", "out", tmp_path, envelope=True)
        behind_filter = Reader("behind-filter", "filtered", tmp_path, envelope=True)
        behind_copy = Reader("behind-copy", "copied", tmp_path, envelope=True)
        filtering = {"deduplicate": SequenceFilter(from_header("sequence")), "store": f"lmdb://{tmp_path / 'filter'}"}

        def senders(*accept: str) -> list[Callable[[], object]]:
            copied = TopicRecords(InputTopics("in", Wrapping.NONE, JsonPayload), accept=accept)
            plain = republisher(settings, "r", "out", accept=accept)
            filtered = republisher(settings, "f", "filtered", accept=accept, **filtering)
            copy = Copy("c", copied, "copied", settings, positions="positions")
            return [lambda one=one: one.run(until_caught_up=True) for one in (plain, filtered, copy)]

        for run in senders():
            run()
        for reader in (direct, behind, behind_flow, behind_filter, behind_copy):
            reader.run(settings)
            assert reader.numbers == OLD
        settings = KafkaSettings(cut(tmp_path, "in", "session"))
        if written != "not yet":
            send(settings.bootstrap, "in", NEW)
            send(settings.bootstrap, "session", NEW)  # those of other producers
        with ProducerSession("till", "session", settings, resume=reached) as session:
            assert [number for number in OLD if not session.contains(number, b"a")] == OLD[LEFT:]
        with pytest.raises(RunRefusedError, match=r"in:0 is read up to 10.* offset 5 on.*\(--accept beyond-end\)"):
            direct.run(settings)
        for run in senders():
            with pytest.raises(Unsafe, match=r"in:0 is \w+ up to 10.* offset 5 on.*\(--accept beyond-end\)"):
                run()
        assert direct.numbers == OLD
        for run in senders("beyond-end"):
            run()
        direct.run(settings, "beyond-end")
        if written == "not yet":
            send(settings.bootstrap, "in", NEW)
        for run in (*senders()[:2], senders("beyond-end")[2]):  # a copy notes its position with the next record only
            run()
        for reader in (direct, behind, behind_flow, behind_filter, behind_copy):
            reader.run(settings)
            assert reader.numbers == OLD + NEW, reader.flow.name
            assert reader.run(settings).records == 0
        (explained,) = explain(direct.flow, Place("in", 0, LEFT), kafka=settings, stores={"s": direct.store})
        assert (explained.outcome, explained.copies) == (Outcome.FOLDED, ())


@pytest.mark.slow
def test_records_in_place_of_those_that_a_crashed_run_folded_beyond_its_manifest_are_folded(tmp_path: Path) -> None:
    class Crash(NoFaults):
        def effect(self, point: str, action: Any) -> Any:
            if point.startswith("manifest:"):
                raise Terminal("the run ends here")
            return action()

    with broker(tmp_path, "in") as settings:
        send(settings.bootstrap, "in", OLD)
        reader = Reader("crashed", "in", tmp_path, envelope=False)
        with use(Crash()), pytest.raises(Terminal):
            reader.run(settings)
        assert reader.numbers == OLD
        settings = KafkaSettings(cut(tmp_path, "in"))
        send(settings.bootstrap, "in", NEW)
        report = reader.run(settings)
        assert reader.numbers == OLD + NEW
        assert report.verdicts["s"]["duplicate"] == LEFT


@pytest.mark.spark
@pytest.mark.slow
def test_on_spark_the_new_records_are_folded_once_the_loss_is_accepted(tmp_path: Path) -> None:
    on_spark = partial(run_flow, master="local[2]")
    with broker(tmp_path, "in") as settings:
        send(settings.bootstrap, "in", OLD)
        reader = Reader("spark", "in", tmp_path, envelope=False)
        reader.run(settings, on=on_spark)
        settings = KafkaSettings(cut(tmp_path, "in"))
        send(settings.bootstrap, "in", NEW)
        with pytest.raises(RunRefusedError, match=r"in:0 is read up to 10.* offset 5 on.*\(--accept beyond-end\)"):
            reader.run(settings, on=on_spark)
        reader.run(settings, "beyond-end", on=on_spark)
        assert reader.numbers == OLD + NEW
        assert reader.run(settings).records == 0


@pytest.mark.kills
def test_after_an_unclean_election_what_the_new_leader_has_is_folded_once_the_loss_is_accepted(tmp_path: Path) -> None:
    """Broker 3 is not in sync when broker 2, which has all records, dies: it leads without the last ones."""
    (tmp_path / "brokers").mkdir()
    with several_brokers(tmp_path / "brokers", 2, 3) as brokers:
        settings = KafkaSettings(brokers.bootstrap)
        brokers.create("out", 1)
        brokers.create("in", 2, 3)
        direct = Reader("direct", "in", tmp_path, envelope=False)
        behind = Reader("behind", "out", tmp_path, envelope=True)
        brokers.until(lambda: {*brokers.partition("in").isrs} == {2, 3})
        send(settings.bootstrap, "in", OLD[:LEFT])
        brokers.kill(3)
        brokers.until(lambda: [*brokers.partition("in").isrs] == [2])
        send(settings.bootstrap, "in", OLD[LEFT:])
        republisher(settings, "r", "out").run(until_caught_up=True)
        for reader in (direct, behind):
            reader.run(settings)
            assert reader.numbers == OLD
        brokers.kill(2)
        brokers.start(3)
        brokers.until(lambda: brokers.partition("in").leader == 3)
        send(settings.bootstrap, "in", NEW)
        with pytest.raises(RunRefusedError, match=r"in:0 is read up to 10.* offset 5 on.*\(--accept beyond-end\)"):
            direct.run(settings)
        with pytest.raises(Unsafe, match=r"in:0 is \w+ up to 10.* offset 5 on.*\(--accept beyond-end\)"):
            republisher(settings, "r", "out").run(until_caught_up=True)
        republisher(settings, "r", "out", accept=["beyond-end"]).run(until_caught_up=True)
        direct.run(settings, "beyond-end")
        behind.run(settings)
        for reader in (direct, behind):
            assert reader.numbers == OLD + NEW, reader.flow.name
        brokers.start(2)  # it gives up what broker 3 does not have
        brokers.until(lambda: {*brokers.partition("in").isrs} == {2, 3})
        for reader in (direct, behind):
            assert reader.run(settings).records == 0
