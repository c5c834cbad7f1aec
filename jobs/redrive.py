"""Bring dead letters back to the topic where they died; the windows and holes see to it that each is folded once.

A letter is produced again as it was, with two transparent hops behind its chain: it keeps its place. One that left a
hole fills it, however far its lane has gone on; one that left none stands in a lane of its own. Redriving a letter
twice does no harm.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from confluent_kafka import Consumer, TopicPartition

from envelope import Envelope, EnvelopeError, Hop, append_hop, decode, encode
from envelope.deadletter import PREFIX, DeadLetter, Headers, own_headers
from envelope.errors import Reason
from envelope.redrive import Redrive, redrive_hops
from persistence.faults import REDRIVE_FLUSH, REDRIVE_PRODUCE, effect
from persistence.kafka import AcknowledgedProducer, BrokerUnavailable, KafkaSettings, Marks, Topics
from persistence.kafka.errors import broker_error, passes

_BATCH = 1000
_SECONDS = 10.0

Mend = Callable[[bytes | None, bytes | None], bytes]
"""Makes of a letter's key and value the value that should have been sent."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant; what is empty does not restrict.

    Attributes:
        reasons: Reason codes.
        stages: Stages at which they died.
        topics: Topics that they died in.
        applications: Flows and republishers that gave them up.
        unproven: Letters of reason `unproven` too, as ones that were never folded: the caller knows it.
    """

    reasons: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    topics: frozenset[str] = frozenset()
    applications: frozenset[str] = frozenset()
    unproven: bool = False

    def takes(self, letter: DeadLetter) -> bool:
        """Whether a letter is meant."""
        reason = letter.reason.value if letter.reason else ""
        if letter.reason is Reason.UNPROVEN and not self.unproven:
            return False
        pairs = (
            (self.reasons, reason),
            (self.stages, letter.stage),
            (self.topics, letter.topic),
            (self.applications, letter.application),
        )
        return all(not wanted or value in wanted for wanted, value in pairs)


@dataclass(slots=True)
class Redriven:
    """What was found and done.

    Attributes:
        letters: Letters read.
        redriven: Count by (topic, stage, reason) of the letters that were meant.
        left: Letters that were not meant.
        foreign: Records that are no dead letter.
        unusable: Count by reason of letters that cannot go back as they are: damaged, or trimmed.
    """

    letters: int = 0
    redriven: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    left: int = 0
    foreign: int = 0
    unusable: Counter[str] = field(default_factory=Counter)


def redrive(
    settings: KafkaSettings,
    letters: str,
    *,
    selection: Selection | None = None,
    apply: bool = False,
    mend: Mend | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Redriven:
    """Redrive what is in a dead-letter topic now.

    Args:
        settings: Where Kafka is.
        letters: The dead-letter topic.
        selection: Which letters are meant; all when None.
        apply: Produce them; otherwise only count what would be.
        mend: Makes a new value of key and value, for letters whose bytes were the trouble.
        progress: Told how many of how many letters are read.

    Raises:
        BrokerError: Kafka cannot be reached, or refuses. What was redriven before may be redriven again.
    """
    selection, result = selection or Selection(), Redriven()
    topics = Topics(settings)
    topics.check_rights(read=[letters])
    marks = topics.marks([letters])
    total = sum(one.high - one.low for one in marks.values())
    ids: dict[str, str] = topics.topic_ids([letters])
    with AcknowledgedProducer(settings) as producer:
        for done, record in enumerate(_read(settings, letters, marks), start=1):
            _one(record, ids[letters], selection, mend, producer if apply else None, result)
            if done % _BATCH == 0:
                effect(REDRIVE_FLUSH, producer.flush)
            if progress is not None:
                progress(done, total)
        effect(REDRIVE_FLUSH, producer.flush)
    return result


@dataclass(frozen=True, slots=True)
class _Letter:
    place: Hop
    key: bytes | None
    value: bytes | None
    headers: Headers


def _one(
    record: _Letter,
    letters_id: str,
    selection: Selection,
    mend: Mend | None,
    producer: AcknowledgedProducer | None,
    result: Redriven,
) -> None:
    letter = DeadLetter.read(record.headers)
    if letter is None:
        result.foreign += 1
        return
    result.letters += 1
    if not selection.takes(letter):
        result.left += 1
        return
    try:
        value = redriven(record.key, record.value, record.headers, letter, record.place, mend)
    except EnvelopeError as error:
        result.unusable[error.reason.value] += 1
        return
    result.redriven[letter.topic, letter.stage, letter.reason.value if letter.reason else "unknown"] += 1
    if producer is not None:
        headers = own_headers(record.headers)
        effect(REDRIVE_PRODUCE, lambda: producer.send(letter.topic, value, record.key, headers))


def redriven(
    key: bytes | None, value: bytes | None, headers: Headers, letter: DeadLetter, place: Hop, mend: Mend | None = None
) -> bytes:
    """Return the value that brings a letter back.

    An envelope gets two hops more. Any other value, of a topic without envelopes, is wrapped into an envelope that
    carries them; the reader of such a topic knows it by its last hop.

    Args:
        key: The letter's key.
        value: The letter's value.
        headers: The letter's headers.
        letter: What they say.
        place: Coordinates of the letter.
        mend: Makes a new value first.

    Raises:
        EnvelopeError: The value was trimmed, or is a damaged envelope; `mend` can help. Or `mend` itself raised.
    """
    if mend is not None:
        value = _mended(mend, key, value)
    elif any(name == f"{PREFIX}trimmed" for name, _ in headers):
        raise EnvelopeError(Reason.TRUNCATED, "the letter was trimmed; the record itself stays at its coordinates")
    died = Hop(letter.topic, letter.partition, letter.offset, topic_id=letter.topic_id)
    hops = redrive_hops(died, place, Redrive(letter.stage, letter.hole))
    if value is None:
        raise EnvelopeError(Reason.EMPTY, "a record without a value cannot carry a chain")
    try:
        decode(value)
    except EnvelopeError as error:
        if error.reason is not Reason.NOT_AN_ENVELOPE:
            raise
        return encode(Envelope(value, chain=hops, key=key))
    for hop in hops:
        value = append_hop(value, hop)
    return value


def _mended(mend: Mend, key: bytes | None, value: bytes | None) -> bytes:
    """What the user's code makes of a letter; one that it cannot mend does not end the others."""
    try:
        result = mend(key, value)
    except Exception as error:  # the user's code: anything may come, and its text may quote the letter
        raise EnvelopeError(Reason.TRANSFORM_FAILED, f"{type(error).__name__} in the function that mends") from error
    if not isinstance(result, bytes):
        raise EnvelopeError(
            Reason.TRANSFORM_FAILED, f"the function that mends returned {type(result).__name__}, not bytes"
        )
    return result


def _read(settings: KafkaSettings, topic: str, marks: Mapping[tuple[str, int], Marks]) -> Iterable[_Letter]:
    """Everything between the marks, partition by partition."""
    consumer = Consumer(
        settings.client(group_id="headwater-redrive", enable_auto_commit=False, enable_partition_eof=True)
    )
    try:
        for (_, partition), mark in sorted(marks.items()):
            if mark.low < mark.high:
                consumer.assign([TopicPartition(topic, partition, mark.low)])
                yield from _partition(consumer, topic, partition, mark.high)
    finally:
        consumer.close()


def _partition(consumer: Consumer, topic: str, partition: int, end: int) -> Iterable[_Letter]:
    while True:
        message = consumer.poll(_SECONDS)
        if message is None:
            raise BrokerUnavailable(
                f"reading {topic}:{partition}: no answer", "Try again; redriving twice does no harm"
            )
        error = message.error()
        if error is not None:
            if error.name() == "_PARTITION_EOF":
                return
            if passes(error):
                continue
            raise broker_error(error, f"reading {topic}:{partition}")
        offset = message.offset()
        if offset is None or offset >= end:
            return
        headers = [(name, text.encode() if isinstance(text, str) else text) for name, text in _pairs(message.headers())]
        yield _Letter(Hop(topic, partition, offset), message.key(), message.value(), headers)
        if offset + 1 >= end:
            return


def _pairs(headers: object) -> list[tuple[str, str | bytes | None]]:
    return list(headers) if isinstance(headers, list) else []
