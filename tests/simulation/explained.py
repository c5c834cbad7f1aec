"""What `explain` says about every record of a simulated world, held against what the engine did with it.

Each state in a store is followed from write to write: which elements were folded into it, through crashes, zombies and
stores that go back. So it is known of each element whether the states of now have it, because of which record.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.run.begin import look
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, Siblings, TopicPartition, encode
from envelope.deadletter import DeadLetterHeaders
from envelope.limits import branch_id
from envelope.redrive_notes import Notes
from jobs.dead_letters.letters import StoredDeadLetter
from jobs.explaining.log import Log, Reader, Span
from jobs.tracing import Place
from persistence.manifest import Progress
from persistence.protocol import FlowRef, StageRef, Stored
from persistence.record import StateRecord, decode_record
from tests.property.test_windows import SCREWS
from tests.simulation import repairs
from tests.simulation.patch import original, patched
from tests.simulation.stores import SimulatedStore, open_store
from tests.simulation.windows import WindowWorld
from tests.simulation.world import World
from tests.support.both import TOPIC_ID
from tests.support.reports import Folded, Reports, event_place, is_passed_on

_persist = original(MemoryRunner, "_persist")
_compare = original(repairs, "_compare")
_write, _remove = original(SimulatedStore, "_write"), original(SimulatedStore, "remove")


class Truth:
    """Which elements the states of simulated stores have, or had when they left."""

    def __init__(self) -> None:
        self._new: dict[tuple[StageRef, int, int], Mapping[bytes, Folded]] = {}
        self._content: dict[tuple[StageRef, bytes, Stored], Folded] = {}
        self._left: defaultdict[StageRef, Folded] = defaultdict(frozenset)

    @contextmanager
    def watching(self) -> Iterator["Truth"]:
        """Follow what is folded and written while the block runs."""
        truth = self

        def persist(runner: MemoryRunner, stage: Any, batch: Any) -> None:
            ref = runner.run.stage_ref(stage)
            folded: defaultdict[bytes, set[tuple[Place, tuple[int, ...]]]] = defaultdict(set)
            for one in batch.outcomes[stage.name].decided:
                if is_passed_on(one, filters=stage.aggregate.rule is not None):
                    element = one.arrival.element
                    folded[one.arrival.key].add((event_place(element.own), element.indices))
            truth._new[ref, runner.run.epoch, runner.run.batch] = {k: frozenset(v) for k, v in folded.items()}
            _persist(runner, stage, batch)

        def write(store: SimulatedStore, stage: StageRef, one: Any, epoch: int, batch: int, *marks: Any) -> Any:
            before = store.stage(stage).get(one.key)
            saved = _write(store, stage, one, epoch, batch, *marks)
            after = store.stage(stage)[one.key]
            if before is not after:
                new = truth._new.get((stage, epoch, batch), {}).get(one.key, frozenset())
                truth._content[stage, one.key, after] = truth._of(stage, one.key, before) | new
            return saved

        def remove(store: SimulatedStore, stage: StageRef, until: int, **marks: Any) -> Any:
            before = dict(store.stage(stage))
            try:
                return _remove(store, stage, until, **marks)
            finally:
                for key in before.keys() - store.stage(stage).keys():
                    truth._left[stage] |= truth._of(stage, key, before[key])

        def compare(ref: StageRef, right: Mapping[bytes, Stored], mended: Mapping[bytes, Stored]) -> None:
            """States that were spoiled and mended have what the fold has that mended them, or what they had."""
            _compare(ref, right, mended)
            folds = defaultdict[bytes, list[tuple[StateRecord, Folded]]](list)
            for (at, key, one), folded in truth._content.items():
                if at == ref and folded:
                    folds[key].append((decode_record(one.value, ref, key), folded))
            for key, one in mended.items():
                record = decode_record(one.value, ref, key)
                alike = [folded for found, folded in folds[key] if found == record]
                truth._content[ref, key, one] = alike[-1] if alike else truth._of(ref, key, right.get(key))

        patches = (
            (repairs, "_compare", compare),
            (MemoryRunner, "_persist", persist),
            (SimulatedStore, "_write", write),
            (SimulatedStore, "remove", remove),
        )
        with patched(patches):
            yield self

    def folded(self, flow: Flow[Any], ref: FlowRef, stores: Mapping[str, SimulatedStore]) -> dict[str, Folded]:
        """The elements that the states of a generation have or had, by stage.

        Args:
            flow: The flow.
            ref: The generation.
            stores: Store by stage.
        """
        stages = {stage.name: ref.stage(stage.name) for stage in flow.stages}
        return {
            name: self._left[at].union(*(self._of(at, key, one) for key, one in stores[name].stage(at).items()))
            for name, at in stages.items()
        }

    def _of(self, stage: StageRef, key: bytes, stored: Stored | None) -> Folded:
        """The elements that a stored state has."""
        return frozenset() if stored is None else self._content.get((stage, key, stored), frozenset())


@dataclass
class Topics(Reader):
    """The topics of a simulated world, as `explain` reads them.

    Attributes:
        topics: Records by topic and partition; an offset is an index, None where nothing is stored.
        ids: Id by topic.
        low: First offset by topic and partition, if it is not 0.
        dead: Dead letters, in order.
        logs: As for any reader.
    """

    topics: Mapping[str, Sequence[Sequence[Record | None]]]
    ids: Mapping[str, str]
    low: Mapping[tuple[str, int], int] = field(default_factory=dict)
    dead: Sequence[Record] = ()
    logs: Mapping[TopicPartition, Progress] = field(default_factory=dict)

    def log(self, topic: str) -> Log:
        ends = {number: len(records) for number, records in enumerate(self.topics[topic])}
        low = {number: self.low.get((topic, number), 0) for number in ends}
        return Log(topic, self.ids[topic], low, ends, dict(ends))

    def offsets_at(self, topic: str, time_ms: int) -> dict[int, int]:
        found = enumerate(self.topics[topic])
        return {
            number: next((at for at, one in enumerate(records) if one and one.timestamp_ms >= time_ms), len(records))
            for number, records in found
        }

    def every(self, flow: Flow[Any]) -> list[Record]:
        """Every record of a flow's sources."""
        return [one for topic in flow.topics for records in self.topics[topic] for one in records if one]

    def letters(self, topic: str) -> Any:
        return _Letters(self.dead)

    def topic_ids(self, known: Mapping[str, str]) -> Mapping[str, str]:
        return {**self.ids, **known}

    def record(self, place: Place) -> Record | None:
        return next(self.records(Span(place.topic, place.partition, place.offset, place.offset + 1)), None)

    def records(self, span: Span) -> Iterator[Record]:
        first = max(span.first, self.low.get((span.topic, span.partition), 0))
        yield from filter(None, self.topics[span.topic][span.partition][first : span.last])


class _Letters:
    def __init__(self, records: Sequence[Record]) -> None:
        self.notes, self.total, self._records = Notes(), len(records), records

    def __iter__(self) -> Iterator[StoredDeadLetter]:
        for one in self._records:
            place = Hop(one.topic, one.partition, one.offset, topic_id=one.topic_id)
            yield StoredDeadLetter(place, one.key, one.value, one.headers, DeadLetterHeaders.read(one.headers))


def of_world(world: World, truth: Truth) -> Reports:
    """What `explain` says about the records of a world."""
    logs, flow = world.cluster.topics, world.spec.flow
    ids = {topic: log.topic_id for topic, log in logs.items()}
    with closing(look(flow, world.urls, generation=world.live.ref.generation)) as run:
        branches = run.logs(ids)

    def named(record: Record | None) -> Record | None:
        """A record with the topic id that its branch of the log has."""
        if record is None or (log := branches.get(TopicPartition(record.topic, record.partition))) is None:
            return record
        return replace(record, topic_id=branch_id(record.topic_id, log.branch(record.offset)))

    topics = Topics(
        {topic: [[*map(named, one.records)] for one in log.partitions] for topic, log in logs.items()},
        ids,
        {(topic, number): one.low for topic, log in logs.items() for number, one in enumerate(log.partitions)},
        list(logs["dead"].records()),
    )
    folded = truth.folded(flow, world.live.ref, {name: world.stores[url] for name, url in world.urls.items()})
    return Reports(flow, topics, world.urls, folded, topics.every(flow))


def explaining(kind: type[WindowWorld], said: Counter[str], truth: Truth) -> type[WindowWorld]:
    """A kind of worlds in which every record is explained after each step.

    Args:
        kind: The kind.
        said: Receives what is said.
        truth: What the states have.
    """

    class Explaining(kind):  # type: ignore[misc, valid-type]
        def _check(self, runner: MemoryRunner, *, ended: bool) -> None:
            super()._check(runner, ended=ended)
            logs = [[one.record(offset) for offset, one in enumerate(log)] for log in self._log]
            topics = Topics({"screws": logs}, {"screws": TOPIC_ID})
            stores = {name: open_store(url) for name, url in self._stores.items()}
            folded = truth.folded(self._flow, runner.run.ref, stores)
            reports = Reports(self._flow, topics, self._stores, folded, topics.every(self._flow))
            reports.check()
            said.update(reports.said)

    return Explaining


class SiblingWorld(WindowWorld):
    """A world of records of one root without an index, and of a stage that emits what its state decides."""

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        policy = random.choice([Siblings.GROUP, Siblings.GROUP, Siblings.DROP, Siblings.EVENT_ID])
        source = Flow("fastening").source(replace(SCREWS, siblings=policy))
        seen = source.aggregate("seen", "part", Fields(n=count()), emit=Emit(part="part", size="new.n"))
        self._flow = seen.aggregate("sizes", "size", Fields(n=count()))
        self._log = [self._lines(policy, partition) for partition in range(random.randint(1, 2))]  # type: ignore[misc]
        url = f"simulated://siblings-{seed}"
        self._stores = {"seen": url, "sizes": url}

    def _lines(self, policy: Siblings, partition: int) -> list["Line"]:
        lines: list[Line] = []
        for root in range(self._random.randint(2, 6)):
            for number in range(self._random.randint(1, 3)):
                name = f"{partition}-{root}-{number}" if policy is Siblings.EVENT_ID else ""
                lines.append(Line(partition, root, name))
            if self._random.random() < 0.3:
                lines.append(self._random.choice(lines))
        return lines

    @property
    def _upstream(self) -> SimulatedStore:
        return open_store(self._stores["seen"])

    def _check(self, runner: MemoryRunner, *, ended: bool) -> None:
        """Nothing but what `explain` says is checked."""


@dataclass(frozen=True)
class Line:
    """One of several records that a service without indices has made of a root."""

    partition: int
    root: int
    event_id: str

    def record(self, offset: int) -> Record:
        """A delivery of it."""
        chain = (Hop("raw", self.partition, self.root, via="foreign", topic_id="R"),)
        part = f"part-{self.partition}".encode()
        value = json.dumps({"part": part.decode(), "torque": self.root}).encode()
        body = encode(Envelope(value, chain, event_id=self.event_id))
        return Record("screws", self.partition, offset, part, body, offset, (), TOPIC_ID)
