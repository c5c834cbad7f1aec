"""A republish service: lives of the real republisher, one after another, each with as much to read as a step gives it."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from aggregations.element import Record
from aggregations.report import DeadLetter
from envelope import Envelope, Hop, Lineage, Node, Standing, decode, encode
from envelope.headers import Headers
from envelope.redrive import Redrive, redrive_hops
from jobs.republish import Output, Republisher, RetryTopics, Source, Transform, identity
from jobs.republish import Record as Input
from jobs.simulation.clients import Place, Sent, Session
from jobs.simulation.faults import Crash
from jobs.simulation.kafka import CLOCK, Cluster
from jobs.simulation.topology import Passage, Payload, digest
from persistence.errors import Transient

RETRY_SECONDS = 2.0
_LIFE_SECONDS = 0.2  # that pass between two lives
_BATCH = 3  # records between two commits: most lives have several
_MAX_WAIT = 0.3
_PATIENCE = 11  # looks in vain, a fifth of a second each, until it is stopped; only every fourth life has any
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(dict).decode


class Outgoing(NamedTuple):
    """A message on its way to a topic.

    Attributes:
        topic: The topic.
        key: Its key.
        value: Its envelope.
        headers: Its headers.
        partition: Where to, whatever the key says; None for the key's partition.
        redriven: Stage that it is redriven to; empty for none.
    """

    topic: str
    key: bytes
    value: bytes
    headers: Headers = ()
    partition: int | None = None
    redriven: str = ""


def payload_of(value: bytes | None) -> Payload:
    """The payload of an enveloped record's value."""
    assert value is not None
    payload: Payload = _decode_json(decode(value).payload)
    return payload


def published(value: bytes) -> tuple[str, Standing]:
    """Id of what a flow produced, and where it stands for whoever reads it."""
    message = decode(value)
    name: str = _decode_json(message.payload)["id"]
    return name, Lineage.of(message.chain, Node("out", 0, 0)).standing(event_id=message.event_id)


def rooted(payload: Payload) -> bytes:
    """What a producer that is no republisher writes."""
    return encode(Envelope(_encode_json(payload), event_id=payload["id"]))


def mended(letter: DeadLetter, place: Record) -> Outgoing:
    """A dead letter on its way back: the hops that the library gives it, and a payload that is no longer bad."""
    record = letter.record
    assert record.value is not None
    message = decode(record.value)
    payload = {**_decode_json(message.payload), "bad": ""}
    hops = redrive_hops(_place(record), _place(place), Redrive(letter.stage, letter.hole))
    value = encode(replace(message, payload=_encode_json(payload), chain=(*message.chain, *hops)))
    assert record.key is not None
    return Outgoing(record.topic, record.key, value, redriven=letter.stage)


@dataclass(slots=True)
class Service:
    """One instance of a republisher.

    Args:
        passage: What it does.
        cluster: The broker.
        deliver: Appends a message to its topic.
        reorders: Its producer may swap neighbours.

    Attributes:
        lives: How often it was started. What fails for a while fails in some lives and not in others.
    """

    passage: Passage
    cluster: Cluster
    deliver: Callable[[Outgoing], object]
    reorders: bool = False
    lives: int = 0
    _retry: RetryTopics = field(init=False)

    def __post_init__(self) -> None:
        self._retry = RetryTopics({self.passage.retry: RETRY_SECONDS} if self.passage.retries else {})

    @property
    def sources(self) -> list[str]:
        """Topics it reads: its own source and its retry topic."""
        return [self.passage.source, *self._retry.delays]

    def lag(self) -> int:
        """Records it has yet to read."""
        return sum(
            partition.high - max(partition.low, self.committed(topic, number))
            for topic in self.sources
            for number, partition in enumerate(self.cluster.topics[topic].partitions)
        )

    def committed(self, topic: str, partition: int) -> int:
        """What it has committed of a topic as it is now."""
        return self.cluster.committed(self.passage.name, topic, partition)

    def rewind(self, partition: int, back: int) -> None:
        """Set the committed offset of the source back, as an operator may."""
        topic = self.passage.source
        number = partition % len(self.cluster.topics[topic].partitions)
        self.cluster.commit(self.passage.name, topic, number, max(self.committed(topic, number) - back, 0))

    def step(self, source: int, partition: int, limit: int) -> None:
        """Live for up to `limit` records of one partition, and as many that come back for another try.

        It may die earlier; the next life goes on from what is committed.
        """
        topic = self.sources[source % len(self.sources)]
        place = topic, partition % len(self.cluster.topics[topic].partitions)
        self._survived({place: limit, **{(retry, 0): limit for retry in self._retry.delays}}, _BATCH)

    def drain(self, limit: int = 1000) -> None:
        """Live for up to `limit` records of every partition."""
        places = [(topic, n) for topic in self.sources for n in range(len(self.cluster.topics[topic].partitions))]
        self._survived(dict.fromkeys(places, limit), max(limit, _BATCH))

    def wait(self, stand_still: Callable[[], None], limit: int) -> None:
        """Live for what is there and, behind that, for up to `limit` records that come while it stands still."""
        places = {
            (topic, n): limit for topic in self.sources for n in range(len(self.cluster.topics[topic].partitions))
        }
        self._survived(places, _BATCH, stand_still)

    def _survived(self, allowed: dict[Place, int], batch_size: int, waits: Callable[[], None] | None = None) -> None:
        with suppress(Crash, Transient):
            self._live(allowed, batch_size, waits)

    def _live(self, allowed: dict[Place, int], batch_size: int, waits: Callable[[], None] | None) -> None:
        """Run the real republisher until it has read what it may, or dies."""
        passage = self.passage
        self.lives += 1
        CLOCK.sleep(_LIFE_SECONDS)
        session = Session(self.cluster, self._sent, allowed, _PATIENCE if self.lives % 4 == 1 else 0, self.reorders)
        republisher = Republisher(
            self._transform(self.lives),
            source=Source((passage.source,)),
            target=passage.target,
            name=passage.name,
            settings=session,  # type: ignore[arg-type]
            dead_letter=passage.dead,
            retry=self._retry,
            batch_size=batch_size,
            max_wait=_MAX_WAIT,
            check_roots=not passage.plain,  # with it there is no short way
        )
        session.stop, session.waits = republisher.stop, waits
        republisher.run()

    def _transform(self, life: int) -> Transform:
        passage = self.passage
        if passage.plain:
            return identity

        def transform(record: Input) -> Iterable[Output]:
            payload: Payload = _decode_json(record.payload)
            if passage.retries and record.topic == passage.source and _is_trouble(payload, life):
                raise RuntimeError("this try fails, another one may not")
            if passage.refuses(payload):
                raise ValueError("every try fails")
            return [Output(_encode_json(o), key=o["k"].encode(), event_id=o["id"]) for o in passage.outputs(payload)]

        return transform

    def _sent(self, sent: Sent) -> None:
        """The broker takes what the republisher's producer sends."""
        passage, (topic, key, value, headers) = self.passage, sent
        assert key is not None
        assert value is not None
        partition = None
        if topic == passage.target:
            if passage.foreign:
                value = _as_foreign(value)
            if passage.spread:
                partition = digest(payload_of(value)["id"], str(self.lives))
        self.deliver(Outgoing(topic, key, value, headers, partition))


def _is_trouble(payload: Payload, life: int) -> bool:
    return digest(payload["id"], str(life)) % 4 == 0


def _as_foreign(value: bytes) -> bytes:
    """What a republisher that is not ours would have written: neither index nor topic id in its hop."""
    message = decode(value)
    *before, hop = message.chain
    return encode(replace(message, chain=(*before, replace(hop, index=None, count=None, topic_id=""))))


def _place(record: Record) -> Hop:
    return Hop(record.topic, record.partition, record.offset, topic_id=record.topic_id)
