"""Clients of the simulated broker, with the part of confluent-kafka's interface that a republisher uses.

`simulated_clients` replaces the clients and the clock in the republisher's modules and its producer. Besides the clients
it replaces `Topics`, which queries the broker, `KafkaSettings`, and the thread that waits for a commit.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError

from aggregations.definition.element import Record
from envelope.headers import Headers
from jobs.republish import absence, growth_watch, loop, offsets, place, service, topic_check, worker
from jobs.republish import input as reading
from jobs.republish.place import SESSION_MS
from persistence.commit.faults import effect
from persistence.errors import Transient
from persistence.kafka import array_producer
from persistence.kafka import producer as producing
from persistence.kafka.array_producer import Spans, texts_of
from persistence.kafka.facts import TopicFacts, Watermarks
from tests.simulation.consumer import SimulatedConsumer
from tests.simulation.kafka import CLOCK
from tests.simulation.life import Life, Place, Sent, SimulatedReport, demand
from tests.simulation.patch import Patch, patched

DELIVER = "deliver"
"""The effect of one record being appended to its topic, within the flush."""
_MOST_BYTES = 1 << 20
_PRODUCER = {"enable.idempotence": True, "acks": "all"}
_GAPLESS = {"enable.gapless.guarantee": True, "message.timeout.ms": 0}


class SimulatedTopics:
    """Facts about topics. Replaces `persistence.kafka.Topics`."""

    def __init__(self, settings: Life, *, timeout: float = 10) -> None:
        self.settings = settings
        self._cluster = settings.cluster

    def check(self) -> None:
        """Do nothing: there is always a broker."""

    def check_rights(self, *, read: Iterable[str] = (), write: Iterable[str] = ()) -> None:
        """Do nothing: rights are not simulated."""

    def max_message_bytes(self, names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, _MOST_BYTES)

    def missing(self, names: Iterable[str]) -> list[str]:
        return []

    def cleanup_policies(self, names: Iterable[str]) -> dict[str, str | None]:
        return dict.fromkeys(names, "delete")

    def describe(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        logs = [self._cluster.topics[name] for name in names]
        return {log.topic: TopicFacts(log.topic, log.topic_id, len(log.partitions)) for log in logs}

    def ask(self, names: Iterable[str]) -> Callable[[], dict[str, TopicFacts]]:
        found = self.describe(names)
        return lambda: found

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self._cluster.topics[name].topic_id for name in names}

    def marks(self, names: Iterable[str]) -> dict[Place, Watermarks]:
        return {(name, part): marks for name in names for part, marks in enumerate(self._cluster.topics[name].marks())}

    def ends(self, names: Iterable[str]) -> dict[Place, int]:
        return {at: marks.high for at, marks in self.marks(names).items()}

    def heads(self, names: Iterable[str]) -> dict[Place, tuple[int, int]]:
        return {at: (marks.high, marks.leader_epoch or 0) for at, marks in self.marks(names).items()}

    def epoch_ends(self, asked: Mapping[Place, int]) -> dict[Place, int]:
        return {at: self._cluster.topics[at[0]].partitions[at[1]].end_of(epoch) for at, epoch in asked.items()}

    def static_member(self, group: str, instance: str) -> str | None:
        """The last member that joined, until its session ends: a static member does not leave its group."""
        member = self._cluster.readers[group].members.get(int(instance[-1]))
        gone = member is None or CLOCK.monotonic() - member.seen > SESSION_MS / 1000
        return None if member is None or gone else f"{group}-{member.generation}"


class SimulatedBlocks:
    """Blocks of a topic. Replaces `persistence.kafka.tail.BlockReader`."""

    def __init__(self, settings: Life, topic: str) -> None:
        self._cluster, self._topic = settings.cluster, topic

    def __enter__(self) -> "SimulatedBlocks":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: it holds no connection."""

    def read(self, blocks: Mapping[int, tuple[int, int]]) -> Iterator[Record]:
        for partition, (start, end) in blocks.items():
            found = self._cluster.read(self._topic, partition, start, end - start)
            yield from (one for one in found if one.offset < end)


class SimulatedProducer:
    """A producer whose records stay in its queue until the flush; if it dies there, any number of them arrive.

    If its configuration allows gaps, a failed record is skipped and later ones are sent.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        demand(config, _PRODUCER)
        self._life: Life = config["life"]
        self._gapless = all(config.get(name) == value for name, value in _GAPLESS.items())
        self._reported: Callable[[KafkaError, SimulatedReport], None] = config["on_delivery"]
        self._queue: list[Sent] = []
        self._flushes = 0

    def produce(self, topic: str, value: bytes | None, key: bytes | None, partition: int, headers: Headers) -> None:
        self._queue.append(Sent(topic, key, value, headers))

    def produce_batch(self, topic: str, messages: Sequence[Mapping[str, Any]]) -> int:
        self._queue += [Sent(topic, message.get("key"), message["value"], ()) for message in messages]
        return len(messages)

    def produce_arrays(self, topic: str, values: Spans, keys: Spans) -> None:
        pairs = zip(texts_of(values), texts_of(keys), strict=True)
        self._queue += [Sent(topic, key, value, ()) for value, key in pairs]

    def poll(self, timeout: float = 0) -> int:
        return 0

    def flush(self, timeout: float) -> int:
        queue, self._queue = self._queue, []
        failed = False
        for sent in self._ordered(queue):
            try:
                if not (failed and self._gapless):
                    effect(DELIVER, lambda sent=sent: self._life.deliver(sent))  # type: ignore[misc]
                    continue
            except Transient:
                failed = True
            self._reported(KafkaError(KafkaError._MSG_TIMED_OUT), SimulatedReport(0, sent.topic))
        return 0

    def _ordered(self, queue: list[Sent]) -> list[Sent]:
        """Order the queue by partition, each time beginning with another partition."""
        cluster, self._flushes = self._life.cluster, self._flushes + 1
        queue.sort(key=lambda sent: (cluster.place(sent.topic, sent.key) + self._flushes) % 3)
        if self._life.reorders:
            for i in range(self._flushes % 2, len(queue) - 1, 2):
                queue[i], queue[i + 1] = queue[i + 1], queue[i]
        return queue

    def purge(self) -> None:
        self._queue.clear()


TIMED = (absence, growth_watch, loop, topic_check, offsets, place, worker, producing)
"""Modules that read the clock."""
_PATCHES: Sequence[Patch] = (
    (reading, "Consumer", SimulatedConsumer),
    (producing, "Producer", SimulatedProducer),
    (array_producer, "ArrayProducer", SimulatedProducer),
    (offsets, "BlockReader", SimulatedBlocks),
    *((module, "Topics", SimulatedTopics) for module in (absence, reading, place, service)),
    # Only with librdkafka can a commit stay unanswered; here no thread has to wait for it.
    (offsets, "_within", lambda timeout, action: action()),
    *((module, "time", CLOCK) for module in TIMED),
    (logging.getLogger("headwater.republish"), "disabled", True),
)


@contextmanager
def simulated_clients() -> Iterator[None]:
    """Connect republishers of this process to the simulated broker while the block runs."""
    CLOCK.reset()
    with patched(_PATCHES):
        yield
