"""A republish service: successive lives of the real republisher, each with as many records to read as a step allows."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from envelope import Envelope, Lineage, Node, Standing, decode, encode
from envelope.codec import parse
from envelope.headers import Headers
from jobs.republish import InputRecord as Input
from jobs.republish import InputTopics, OutputRecord, Republisher, RetryTopics, Transform, Wrapping, identity
from jobs.republish.growth import Note
from jobs.republish.place import INSTANCE
from tests.simulation.driver import METADATA_MAX_AGE
from tests.simulation.functions import OUT, Payload, digest
from tests.simulation.kafka import CLOCK, Cluster, Committed
from tests.simulation.life import Life, Place, Sent
from tests.simulation.oracle import Violation
from tests.simulation.topology import FILTERS, Processor

RETRY_SECONDS = 2.0
_LIFE_SECONDS = 0.2  # between two lives
_BATCH = 3  # records between two commits: most lives commit several times
_MAX_WAIT = 0.3
_PATIENCE = 11  # unsuccessful polls, a fifth of a second each, until it is stopped; only every fourth life has any
_EVERYTHING = 1000
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(dict).decode


At = tuple[str, int, int]
"""Topic id, partition and offset of a record."""


class Outgoing(NamedTuple):
    """A message to be appended to a topic.

    Attributes:
        topic: The topic.
        key: Its key.
        value: Its envelope.
        headers: Its headers.
        partition: Its partition, whatever its key; None for the key's partition.
        redriven: Stage that it is redriven to; empty for none.
        application: The reader that rejected it, if it is redriven.
    """

    topic: str
    key: bytes | None
    value: bytes
    headers: Headers = ()
    partition: int | None = None
    redriven: str = ""
    application: str = ""


@lru_cache(maxsize=1 << 12)  # each record is read many times
def payload_of(value: bytes | None) -> Payload:
    """The payload of a record's value, read-only: from its envelope, or the value itself without one."""
    assert value is not None
    payload: Payload = _decode_json(value if value.startswith(b"{") else parse(value).payload)
    return payload


def published(value: bytes) -> tuple[str, Standing]:
    """Id of a flow's output, and its standing for a reader."""
    message = decode(value)
    name: str = _decode_json(message.payload)["id"]
    return name, Lineage.of(message.chain, Node(OUT, 0, 0)).standing(event_id=message.event_id)


def rooted(payload: Payload, *, raw: bool = False) -> bytes:
    """The value that a producer other than a republisher writes: an envelope, or the payload alone."""
    content = _encode_json(payload)
    if raw:
        return content
    return encode(Envelope(content, event_id=payload["id"], producer="till", sequence=payload.get("n")))


@dataclass(slots=True)
class Service:
    """One instance of a republisher.

    Args:
        processor: Its definition.
        cluster: The broker.
        deliver: Appends a message to its topic.
        reorders: Its producer may swap neighbours.
        accept: Accepted risks.
        store: URL of the store of its filter's states.

    Attributes:
        lives: How often it was started. Temporary failures occur in some lives only.
    """

    processor: Processor
    cluster: Cluster
    deliver: Callable[[Outgoing], object]
    reorders: bool = False
    accept: tuple[str, ...] = ()
    store: str = ""
    lives: int = 0
    _checked: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        """Every partition that it reads."""
        topics = [self.processor.source, *self.processor.retry_topics]
        return [(topic, n) for topic in topics for n in range(len(self.cluster.topics[topic].partitions))]

    def lag(self) -> int:
        """Records it has yet to read."""
        return sum(
            max(partition.high - max(partition.low, self.committed(topic, n)), 0)
            for topic, n in self.places
            for partition in [self.cluster.topics[topic].partitions[n]]
        )

    def committed(self, topic: str, partition: int) -> int:
        """Its committed offset of the current incarnation of a topic."""
        return self.cluster.committed(self.processor.name, topic, partition)

    @property
    def grows(self) -> bool:
        """Whether new partitions of its source wait, or nobody has seen them yet."""
        name, topic = self.processor.name, self.processor.source
        notes = [Note.read(one.metadata) for at, one in self.cluster.groups.items() if at[:2] == (name, topic)]
        resolved = max((note.resolved for note in notes), default=0)
        return any(note.now for note in notes) or 0 < resolved < len(self.cluster.topics[topic].partitions)

    def rewind(self, partition: int, back: int) -> None:
        """Set the committed offset of the source back, as an operator may."""
        topic = self.processor.source
        number = partition % len(self.cluster.topics[topic].partitions)
        self.cluster.commit(self.processor.name, topic, number, Committed(max(self.committed(topic, number) - back, 0)))

    def step(self, number: int, limit: int) -> None:
        """Live for up to `limit` records of one partition, and as many to retry."""
        places = self.places
        chosen = places[number % len(places)]
        self._live(dict.fromkeys([chosen, *(one for one in places if one[0] != self.processor.source)], limit))

    def drain(self) -> None:
        """Live until everything is read, except records that wait for a retry."""
        self._live(dict.fromkeys(self.places, _EVERYTHING), until_caught_up=True, batch_size=_EVERYTHING)

    def share(self, number: int, limit: int) -> None:
        """Live as one of several members for up to `limit` records of every partition that it gets."""
        self._live(dict.fromkeys(self.places, limit), place=number % self.processor.members)

    def turn(self, limit: int) -> None:
        """Live for up to `limit` records of every partition."""
        self._live(dict.fromkeys(self.places, limit))

    def wait(self, limit: int, pause: Callable[[], None]) -> None:
        """Live for the records that are there, pause, and resume with up to `limit` records that arrived meanwhile."""
        self._live(dict.fromkeys(self.places, limit), pause=pause)

    def went_back(self, topic: str, partition: int) -> None:
        """Check the records from the end of a log on, which are others than those that were checked."""
        log = self.cluster.topics[topic]
        at = log.topic_id, partition
        self._checked[at] = min(self._checked.get(at, 0), log.partitions[partition].high)

    def check(self, reached: Mapping[str, Container[str]], redriven: Mapping[At, str]) -> None:
        """Check that every record below a committed offset has reached its target.

        Args:
            reached: Ids that were ever in each topic.
            redriven: The reader that rejected a redriven record, by place; dead letters of other readers are skipped.

        Raises:
            Violation: A record has not.
        """
        processor = self.processor
        for topic, number in self.places:
            log = self.cluster.topics[topic]
            begin, end = self._checked.get((log.topic_id, number), 0), self.committed(topic, number)
            if begin >= end:
                continue
            for record in filter(None, log.partitions[number].records[begin:end]):
                if redriven.get((log.topic_id, number, record.offset), processor.name) != processor.name:
                    continue
                payload = payload_of(record.value)
                if any(payload["id"] in reached[one] for one in (*processor.retries_behind(topic), processor.dead)):
                    continue
                wanted = [] if processor.refuses(payload) else processor.outputs(payload)
                lost = [one["id"] for one in wanted if one["id"] not in reached[processor.target_of(one)]]
                if lost or processor.refuses(payload):
                    raise Violation(f"{processor.name} has committed {payload['id']}, which led to nothing: {lost}")
            self._checked[log.topic_id, number] = end

    def _live(
        self,
        allowed: dict[Place, int],
        *,
        until_caught_up: bool = False,
        batch_size: int = _BATCH,
        pause: Callable[[], None] | None = None,
        place: int = -1,
    ) -> None:
        """Run the real republisher until it has read its limit, or dies. It is alone unless it has a place."""
        processor = self.processor
        self.lives += 1
        CLOCK.sleep(_LIFE_SECONDS)
        life = Life(
            self.cluster,
            self._sent,
            allowed,
            idle=_PATIENCE if self.lives % 4 == 1 else 0,
            revoked=self.lives % 7,
            reorders=self.reorders,
            place=max(place, 0),
            places=1 if place < 0 else processor.members,
            options={INSTANCE: f"{processor.name}{max(place, 0)}"} if processor.static else {},
            pause=pause,
        )
        republisher = Republisher(
            self._transform(self.lives),
            source=InputTopics((processor.source,), Wrapping.NONE if processor.raw else Wrapping.ENVELOPE),
            target=processor.targets,
            name=processor.name,
            settings=life,  # type: ignore[arg-type]
            dead_letter=processor.dead,
            retry=RetryTopics(dict.fromkeys(processor.retry_topics, RETRY_SECONDS)),
            batch_size=batch_size,
            max_wait=_MAX_WAIT,
            check_roots=not processor.plain,  # with it there is no fast path
            metadata_max_age=METADATA_MAX_AGE,
            accept=self.accept,
            deduplicate=FILTERS.get(processor.deduplicates),
            store=self.store if processor.deduplicates else None,
        )
        life.stop = republisher.stop
        republisher.run(until_caught_up=until_caught_up)

    def _transform(self, life: int) -> Transform:
        processor = self.processor
        if processor.plain:
            return identity

        def transform(record: Input) -> Iterator[OutputRecord]:
            payload: Payload = _decode_json(record.payload)
            # A failing transform has already yielded some of its outputs.
            for output in processor.outputs(payload):
                kept = record.key is None and output["k"] == payload["k"]
                key = None if kept or processor.spread else output["k"].encode()
                yield OutputRecord(
                    _encode_json(output), key=key, event_id=_identity(output), topic=processor.target_of(output)
                )
            if processor.retries_behind(record.topic) and _is_trouble(payload, life):
                raise RuntimeError("this try fails, another one may not")
            if processor.refuses(payload):
                raise ValueError("every try fails")

        return transform

    def _sent(self, sent: Sent) -> None:
        """Append a record that the republisher's producer sends."""
        processor, (topic, key, value, headers) = self.processor, sent
        assert value is not None
        if topic in processor.targets and processor.foreign:
            value = _as_foreign(value)
        partition = None if key is not None else digest(payload_of(value)["id"], str(self.lives))
        self.deliver(Outgoing(topic, key, value, headers, partition))


def _identity(payload: Payload) -> str:
    """An event id: unique, the same in every life, and in no order."""
    return f"{digest(payload['id'])}-{payload['id']}"


def _is_trouble(payload: Payload, life: int) -> bool:
    return digest(payload["id"], str(life)) % 4 == 0


def _as_foreign(value: bytes) -> bytes:
    """The value as another republisher would have written it: without index and topic id in its hop."""
    message = decode(value)
    *before, hop = message.chain
    return encode(replace(message, chain=(*before, replace(hop, index=None, count=None, topic_id=""))))
