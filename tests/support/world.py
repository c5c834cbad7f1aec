"""One test's topics and stores, a flow that is run on them, and the oracle that it is compared with."""

import random
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow, Stage
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.spark import run_flow
from envelope import Envelope, Histories, Hop, encode
from envelope.deadletter import DeadLetterHeaders, own_headers
from envelope.redrive_notes import Notes
from jobs.views import View, states
from persistence.kafka import KafkaSettings, Topics
from persistence.kafka.reading import assign
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.messages import Leg
from tests.support.options import called

Headers = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Sent:
    """A record to produce; without a partition, its key determines the partition."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int = -1


def legs(count: int, *, seed: int = 7, tails: int = 8) -> list[Any]:
    """Legs of a few aircraft and carriers; some take no time."""
    rng = random.Random(seed)
    return [
        Leg(
            tail=f"N{rng.randrange(tails)}",
            carrier=rng.choice(["AA", "DL", "UA"]),
            minutes=rng.choice([0, *range(1, 20)]),
        )
        for _ in range(count)
    ]


def alone(leg: Any, **sent: Any) -> Sent:
    """A leg in an envelope without hops: its root is its own record."""
    key = leg.tail.encode()
    return Sent(encode(Envelope(leg.SerializeToString(), key=key)), key, **sent)


def republished(legs: Sequence[Any], at: Iterable[int] | None = None, *, via: str = "kit", **sent: Any) -> list[Sent]:
    """Legs as a republisher sends them: leg `i` has the root raw:(i % 3):(i // 3) however often it is sent.

    Args:
        legs: All legs, in order of their roots.
        at: Indices of those to send, in this order; all of them when None.
        via: Name of the republisher.
        sent: More fields of `Sent`.
    """
    messages = []
    for i in range(len(legs)) if at is None else at:
        key = legs[i].tail.encode()
        hop = Hop("raw", i % 3, i // 3, via=via, index=0, count=1)
        messages.append(Sent(encode(Envelope(legs[i].SerializeToString(), (hop,), key=key)), key, **sent))
    return messages


class World:
    """Topics and stores of one test.

    Args:
        kafka: Broker address.
        topic: Topic that the flow reads.
        dead: Dead-letter topic.
        directory: Where the stores are: one file for each stage with `apart`, else one for all.
        apart: Every stage has a store of its own.
        urls: URL of the store by stage name, where states are not in files.
        runner: What runs flows: `run_flow`, or `run_local`.
    """

    def __init__(
        self,
        kafka: str,
        topic: str,
        dead: str,
        directory: Path,
        *,
        apart: bool = False,
        urls: Mapping[str, str] | None = None,
        runner: Callable[..., Report] = run_flow,
    ) -> None:
        self.settings = KafkaSettings(kafka)
        self.topics = Topics(self.settings, timeout=30)
        self.topic, self.dead, self.directory, self.apart, self.urls = topic, dead, directory, apart, urls
        self.runner = runner
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka,
                "group.id": uuid.uuid4().hex,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
            }
        )

    def close(self) -> None:
        """End the consumer."""
        self._consumer.close()

    def send(self, messages: Iterable[Sent], topic: str = "", *, partitioner: str = "murmur2_random") -> None:
        """Produce to a topic, by default to the first source, and wait until all are acknowledged."""
        failed: list[KafkaError] = []
        # A new producer each time sees added partitions and recreated topics immediately.
        producer = Producer({"bootstrap.servers": self.settings.bootstrap, "partitioner": partitioner, "linger.ms": 1})
        for one in messages:
            producer.produce(
                topic or self.topic,
                one.value,
                one.key,
                one.partition,
                on_delivery=lambda error, _: failed.append(error) if error else None,
                headers=list(one.headers),
            )
        assert producer.flush(30) == 0
        assert not failed

    def stores(self, flow: Flow[Any]) -> dict[str, str]:
        """URL of the store by stage name."""
        if self.urls is not None:
            return bind(flow, self.urls)
        names = {stage: stage if self.apart else "states" for stage in flow.stage_names}
        return bind(flow, {stage: f"sqlite:///{self.directory}/{name}.db" for stage, name in names.items()})

    def run(self, flow: Flow[Any], **options: Any) -> Report:
        """Run the flow until it is caught up; on Spark, in the existing session."""
        given = {"dead_letters": self.dead, "until_caught_up": True, **options}
        return called(self.runner, flow, kafka=self.settings, stores=self.stores(flow), **given)

    def views(self, flow: Flow[Any], stage: str) -> dict[bytes, View]:
        """Every state of a stage."""
        return {view.key: view for view in states(flow, stage, self.stores(flow))}

    def untimed(self, flow: Flow[Any]) -> list[dict[bytes, View]]:
        """The states of every stage, without the times of commits, which a replay makes again."""
        views = (self.views(flow, stage.name) for stage in flow.stages)
        return [{key: replace(view, written_by_ms=None) for key, view in one.items()} for one in views]

    def results(self, flow: Flow[Any], stage: str) -> dict[bytes, Any]:
        """The result of every key of a stage."""
        return {key: view.state for key, view in self.views(flow, stage).items() if view.state is not None}

    def records(self, topic: str = "") -> list[Record]:
        """Every record of a topic that a consumer sees, in order of offsets within a partition."""
        name = topic or self.topic
        marks = self.topics.marks([name])
        topic_id = self.topics.topic_ids([name])[name]
        assign(self._consumer, [TopicPartition(name, partition, OFFSET_BEGINNING) for _, partition in marks])
        found: list[Record] = []
        left = {partition for _, partition in marks}  # an end may be told twice
        while left:
            message = self._consumer.poll(30)
            assert message is not None, f"{name} does not end within 30 s"
            if error := message.error():
                assert error.code() == KafkaError._PARTITION_EOF, error
                left.discard(message.partition())
                continue
            found.append(_record(message, topic_id))
        self._consumer.unassign()
        return sorted(found, key=lambda record: (record.partition, record.offset))

    def dead_letters(self) -> list[tuple[DeadLetterHeaders, Record]]:
        """Everything in the dead-letter topic: the facts, and their record."""
        letters = []
        for record in self.records(self.dead):
            if Notes().take(record.headers, record.value):
                continue
            letter = DeadLetterHeaders.read(record.headers)
            assert letter is not None
            letters.append((letter, record))
        return letters

    def oracle(self, flow: Flow[Any], *batches: Sequence[Record]) -> MemoryRunner:
        """The in-memory runner after these batches; by default after one batch of everything in the topics."""
        marks = self.topics.marks(list(flow.topics))
        ends = {
            name: {partition: one.high for (topic, partition), one in marks.items() if topic == name}
            for name in flow.topics
        }
        runner = MemoryRunner(
            flow,
            bind(flow, {}, f"memory://{uuid.uuid4().hex}"),
            topic_ids=self.topics.topic_ids(list(flow.topics)),
            whole={name: lambda name=name: ends[name] for name in ends},  # type: ignore[misc]
        )
        for batch in batches or [[record for name in flow.topics for record in self.records(name)]]:
            runner.process(batch)
        return runner

    def check(self, flow: Flow[Any], *batches: Sequence[Record]) -> MemoryRunner:
        """Assert that states, histories, holes and dead letters are those of the oracle, and return it."""
        oracle = self.oracle(flow, *batches)
        for stage in flow.stages:
            views, truth = self.views(flow, stage.name), oracle.states(stage.name)
            same(self.results(flow, stage.name), oracle.results(stage.name))
            found = {key_of_state(stage, view): held(view.histories) for view in views.values()}
            same(found, {key: held(state.histories) for key, state in truth.items()})
        self._check_dead_letters(oracle)
        return oracle

    def _check_dead_letters(self, oracle: MemoryRunner) -> None:
        """Check that every dead letter of the oracle is in the topic, byte for byte; a crash may have written one twice."""
        wanted = {
            (str(one.record.node), one.stage, one.reason): (one.record.key, one.record.value, list(one.record.headers))
            for one in oracle.dead_letters
        }
        found = {}
        for letter, dead in self.dead_letters():
            place = f"{letter.topic}:{letter.partition}:{letter.offset}"
            cause = (place, letter.stage, letter.reason)
            found[cause] = (dead.key, dead.value, own_headers(dead.headers))
        same(found, wanted)

    def ends(self, flow: Flow[Any], stage: str = "", topic: str = "") -> dict[int, int]:
        """Next offset by partition of a topic in the manifest of a stage's store; empty without a manifest."""
        with closing(open_store(self.stores(flow)[stage or flow.stage_names[0]])) as store:
            manifest = store.load_manifest(FlowRef(flow.name, 1))
        progress = manifest.positions.get(topic or self.topic, {}) if manifest else {}
        return {partition: one.next_offset for partition, one in progress.items()}

    def manifest(self, flow: Flow[Any], stage: str = "") -> bytes:
        """The manifest's bytes in the store of a stage, by default of the first one."""
        with self._database(flow, stage) as connection:
            (manifest,) = connection.execute("SELECT manifest FROM flow WHERE name = ?", (flow.name,)).fetchone()
        assert isinstance(manifest, bytes)
        return manifest

    def restore(self, flow: Flow[Any], manifest: bytes, stage: str = "") -> None:
        """Restore an older manifest, as if the run had died before it wrote the newer ones."""
        with self._database(flow, stage) as connection, connection:
            connection.execute("UPDATE flow SET manifest = ? WHERE name = ?", (manifest, flow.name))

    def _database(self, flow: Flow[Any], stage: str) -> "closing[sqlite3.Connection]":
        url = self.stores(flow)[stage or flow.stage_names[0]]
        return closing(sqlite3.connect(url.removeprefix("sqlite://")))


def _record(message: Any, topic_id: str) -> Record:
    place = (message.topic(), message.partition(), message.offset())
    headers = tuple(message.headers() or ())
    return Record(*place, message.key(), message.value(), message.timestamp()[1], headers, topic_id)


def same(found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> None:
    """Assert that two mappings are equal, and show only where they differ."""
    differing = {key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)}
    assert not differing, {key: (found.get(key), wanted.get(key)) for key in differing}


def key_of_state(stage: Stage, view: View) -> bytes:
    """The key of the state that a view is of; several sessions are in one state."""
    return view.window.key if stage.aggregate.sessions and view.window else view.key


def held(histories: Histories) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The content of histories, without the batch that last used them, which depends on where batches end."""
    return {name: (lane.held, lane.floor) for name, lane in histories.lanes.items()}, histories.holes


def verdicts(report: Report) -> dict[str, Counter[str]]:
    """Counts by stage and verdict, without those that are 0."""
    return {stage: +counts for stage, counts in report.verdicts.items() if +counts}
