"""Redrives dead letters to their original topics; histories and holes ensure that each is folded once.

A dead letter is produced again unchanged, with two pass-through hops appended to its chain, so it keeps its lane and
position. If it left a hole, it fills the hole, however far its lane has advanced; the others are listed in the flow's
ledger. Redriving a dead letter twice does no harm.
"""

import logging
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from envelope import Envelope, EnvelopeError, Hop, append_hop, decode, encode
from envelope.codec import is_sealed, redriven_payload
from envelope.deadletter import PREFIX, DeadLetterHeaders, Form, own_headers, size_of
from envelope.errors import Reason
from envelope.headers import Headers
from envelope.raised import Raised
from envelope.redrive import Redrive, read_via, redrive_hops
from envelope.redrive_notes import notes_of
from jobs.dead_letters.letters import Handled, Letters, Selection, StoredDeadLetter, group_of
from persistence.commit.faults import REDRIVE_FLUSH, REDRIVE_PRODUCE, effect
from persistence.kafka import AcknowledgedProducer, BrokerRefused, KafkaSettings, Topics
from persistence.kafka.producer import BY_KEY, COMMAND_BATCH_BYTES

_LOG = logging.getLogger("headwater.redrive")
_BATCH = 1000

Mend = Callable[[bytes | None, bytes | None], bytes]
"""Makes the corrected value from a dead letter's key and value."""


def redrive(
    settings: KafkaSettings,
    letters: str,
    *,
    selection: Selection | None = None,
    apply: bool = False,
    mend: Mend | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Handled:
    """Redrive the dead letters that are in a topic now, and note there which were redriven (`envelope.redrive_notes`).

    Args:
        settings: Settings of the Kafka cluster.
        letters: The dead-letter topic.
        selection: Which dead letters to redrive; all when None.
        apply: Produce them; otherwise only count them.
        mend: Makes a new value from key and value, for dead letters with invalid bytes.
        progress: Called with the number of records read and their total.

    Returns:
        Counts. `unusable` are dead letters that cannot be redriven unchanged: damaged, trimmed, or too large
        for their topic.

    Raises:
        NotThereError: There are dead letters, and none is of a stage, topic or application that the selection names.
        BrokerError: Kafka cannot be reached, lacks a topic, or refuses a request. Dead letters that were redriven
            before the error can safely be redriven again.
    """
    found, selection, result = Letters(settings, letters), selection or Selection(), Handled()
    selection.check(Letters(settings, letters))
    with AcknowledgedProducer(settings, batch_size=COMMAND_BATCH_BYTES) if apply else nullcontext() as producer:
        back = _Back(Topics(settings), producer, mend, result, letters, asserted=selection.unproven)
        for done, letter in enumerate(found, start=1):
            if letter.facts is None:
                result.foreign += 1
            else:
                result.dead_letters += 1
                if selection.takes(letter.facts):
                    back.bring(letter, letter.facts)
                else:
                    result.left += 1
            if done % _BATCH == 0:
                back.flush()
            if progress is not None:
                progress(done, found.total)
        if progress is not None:  # the notes of earlier redrives are not dead letters
            progress(found.total, found.total)
        back.flush()
        back.close()
    for group, places in back.places.items():
        result.before[group] = sum(found.notes.count(partition, offsets) for partition, offsets in places.items())
    return result


class _Back:
    """Produces redriven records; without a producer it only counts them.

    Attributes:
        places: Offsets of dead letters that were, or would be, redriven, by group and dead-letter partition.
    """

    def __init__(
        self,
        topics: Topics,
        producer: AcknowledgedProducer | None,
        mend: Mend | None,
        result: Handled,
        dead_letters: str,
        *,
        asserted: bool,
    ) -> None:
        self._topics = topics
        self._producer = producer
        self._mend = mend
        self._result = result
        self._asserted = asserted
        self._partitions: dict[str, int] = {}
        self._rooms: dict[str, int] = {}
        self.places: dict[tuple[str, str, str], dict[int, array[int]]] = {}
        self._dead_letters = dead_letters
        self._failures: Counter[str] = Counter()
        self._unnoted: list[tuple[int, int]] = []
        self._notes = producer is not None and self._may_note()

    def bring(self, letter: StoredDeadLetter, facts: DeadLetterHeaders) -> None:
        """Produce a dead letter to its original partition; if that no longer exists, its key decides."""
        try:
            asserted = self._asserted and facts.reason is Reason.UNPROVEN
            value = redriven(
                letter.key, letter.value, letter.headers, facts, letter.place, self._mend, asserted=asserted
            )
        except EnvelopeError as error:
            self._result.unusable[error.reason.value] += 1
            if error.reason is Reason.TRANSFORM_FAILED:
                where = f" at {error.raised.at}" if error.raised and error.raised.at else ""
                self._failures[f"{error.detail}{where}"] += 1
            return
        headers = own_headers(letter.headers)
        if size_of(letter.key, value, headers) > self._room_of(facts.topic):
            # If the broker refused this record, records sent with it or after it would not be redriven either.
            self._result.unusable[Reason.PAYLOAD_TOO_LARGE.value] += 1
            return
        partition = facts.partition if facts.partition < self._partitions_of(facts.topic) else BY_KEY
        self._result.add(facts)
        by_partition = self.places.setdefault(group_of(facts), {})
        by_partition.setdefault(letter.place.partition, array("q")).append(letter.place.offset)
        if (producer := self._producer) is not None:
            effect(REDRIVE_PRODUCE, lambda: producer.send(facts.topic, value, letter.key, headers, partition))
            self._unnoted.append((letter.place.partition, letter.place.offset))

    def flush(self) -> None:
        """Return when everything produced is acknowledged, and queue the notes for it."""
        if (producer := self._producer) is None:
            return
        effect(REDRIVE_FLUSH, producer.flush)
        for note in notes_of(self._unnoted) if self._notes else ():
            effect(
                REDRIVE_PRODUCE,
                lambda note=note: producer.send(self._dead_letters, note.value, note.key, note.headers),  # type: ignore[misc]
            )
        self._unnoted.clear()

    def close(self) -> None:
        """Return when the last notes are acknowledged, and log why `mend` failed."""
        for failure, count in self._failures.items():
            _LOG.warning("dead letters not mended: %d: %s", count, failure)
        if self._notes and self._producer is not None:
            effect(REDRIVE_FLUSH, self._producer.flush)

    def _may_note(self) -> bool:
        try:
            self._topics.check_rights(write=[self._dead_letters])
        except BrokerRefused as error:
            _LOG.warning("the notes of redriven dead letters cannot be written: %s", error)
            return False
        return True

    def _room_of(self, topic: str) -> int:
        """Largest record that a topic accepts, in bytes; if this user may not read the limit, the broker decides."""
        if topic not in self._rooms:
            self._rooms.update(self._topics.max_message_bytes([topic], unknown=sys.maxsize))
        return self._rooms[topic]

    def _partitions_of(self, topic: str) -> int:
        if topic not in self._partitions:
            if self._producer is not None:
                self._topics.check_rights(write=[topic])
            self._partitions.update(self._topics.partitions([topic]))
        return self._partitions[topic]


def redriven(
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
    letter: DeadLetterHeaders,
    place: Hop,
    mend: Mend | None = None,
    *,
    asserted: bool = False,
) -> bytes:
    """Return the value of the redriven record.

    An envelope gets two more hops. A payload of a topic without envelopes is wrapped into an envelope that contains
    them; readers of such a topic recognise it by its last hop. The dead letter's headers say which of the two it is.

    Args:
        key: The dead letter's key.
        value: The dead letter's value.
        headers: The dead letter's headers.
        letter: Facts from these headers.
        place: Coordinates of the dead letter.
        mend: Makes a new value first: an envelope, or a payload that replaces the dead letter's and keeps its
            chain.
        asserted: The operator asserts that it was never folded where it was rejected.

    Raises:
        EnvelopeError: The value was trimmed, is a damaged envelope, or is not an envelope where one is expected;
            `mend` can fix this. Or `mend` itself raised.
    """
    if mend is None and any(name == f"{PREFIX}trimmed" for name, _ in headers):
        raise EnvelopeError(Reason.TRUNCATED, "the dead letter was trimmed; the record itself stays at its coordinates")
    hops = hops_back(letter, place, asserted=asserted)
    if mend is not None:
        return _rebuilt(value, _mended(mend, key, value), letter, key, hops)
    if not value:
        # An envelope around a missing or empty value would be rejected for another reason than the value itself.
        raise EnvelopeError(Reason.EMPTY, "a record without a value cannot carry a chain; mend it into a payload")
    if not _is_envelope(value, letter):
        if letter.reason is Reason.NOT_AN_ENVELOPE:
            # Within another envelope it would be read as a payload.
            raise EnvelopeError(
                Reason.NOT_AN_ENVELOPE, "it would be rejected again; mend it into an envelope or a payload"
            )
        return encode(Envelope(value, chain=hops, key=key))
    old = decode(value)
    if _came_back(old.chain):
        return _sealed(old, hops)
    for hop in hops:
        value = append_hop(value, hop)
    return value


def _came_back(chain: Sequence[Hop]) -> bool:
    """Whether the last two hops are a hop through a dead-letter topic."""
    return len(chain) > 1 and all(hop.pass_through and read_via(hop.via) is not None for hop in chain[-2:])


def _sealed(envelope: Envelope, hops: Sequence[Hop]) -> bytes:
    """An envelope with hops appended, in place of those of an earlier redrive: it keeps its first position."""
    chain = envelope.chain
    while _came_back(chain):
        chain, hops = chain[:-2], (chain[-2], hops[-1])
    return encode(envelope.with_chain((*chain, *hops)))


def hops_back(letter: DeadLetterHeaders, place: Hop, *, asserted: bool = False) -> tuple[Hop, Hop]:
    """The two hops of a redriven record.

    Args:
        letter: Facts from the dead letter's headers.
        place: Coordinates of the dead letter.
        asserted: The operator asserts that it was never folded where it was rejected.
    """
    died = Hop(
        *(letter.topic, letter.partition, letter.offset),
        topic_id=letter.topic_id,
        timestamp_ms=letter.timestamp_ms,
        leader_epoch=letter.leader_epoch,
    )
    back = Redrive(letter.stage, letter.hole, letter.application, asserted, letter.generation)
    return redrive_hops(died, place, back)


def _is_envelope(value: bytes, letter: DeadLetterHeaders) -> bool:
    """Whether a dead letter's value is an envelope. For dead letters of other systems only a checksum proves it.

    Raises:
        EnvelopeError: It cannot be decided.
    """
    if redriven_payload(value) is not None:
        return True  # it was redriven before: since then it is in an envelope, even in a topic without envelopes
    if letter.form is not None:
        return letter.form is Form.ENVELOPE and letter.reason is not Reason.NOT_AN_ENVELOPE
    try:
        decode(value)
    except EnvelopeError as error:
        if error.reason is not Reason.NOT_AN_ENVELOPE:
            raise
        return False
    if not is_sealed(value):
        raise EnvelopeError(
            Reason.NOT_AN_ENVELOPE,
            "its bytes can be read as an envelope without a checksum, and its headers do not say whether it is one; "
            "mend it into an envelope",
        )
    return True


def _rebuilt(
    value: bytes | None, mended: bytes, letter: DeadLetterHeaders, key: bytes | None, hops: Sequence[Hop]
) -> bytes:
    """The corrected value of a dead letter, with the dead letter's chain.

    Raises:
        EnvelopeError: The chain is unknown, so copies of the record could not be recognised.
    """
    try:
        new = decode(mended) if is_sealed(mended) else None
    except EnvelopeError:
        new = None
    old = None
    if value is not None and (letter.form is not Form.PAYLOAD or redriven_payload(value) is not None):
        try:
            old = decode(value)
        except EnvelopeError as error:
            if new is None and error.reason is not Reason.NOT_AN_ENVELOPE:
                raise EnvelopeError(
                    error.reason, "its chain cannot be read, and a payload has none: mend it into an envelope"
                ) from error
    if new is None:
        new = replace(old, payload=mended) if old is not None else Envelope(mended, key=key)
    elif not new.chain and old is not None:
        new = new.with_chain(old.chain)
    return _sealed(new, hops)


def _mended(mend: Mend, key: bytes | None, value: bytes | None) -> bytes:
    """Call the user's code for a dead letter; an exception affects only this dead letter."""
    try:
        result = mend(key, value)
    except Exception as error:  # user code may raise anything, and its text may quote the dead letter
        failed = EnvelopeError(Reason.TRANSFORM_FAILED, f"the function of --mend raised {type(error).__name__}")
        failed.raised = Raised.of(error)
        raise failed from error
    if not isinstance(result, bytes):
        raise EnvelopeError(
            Reason.TRANSFORM_FAILED, f"the function of --mend returned {type(result).__name__} instead of bytes"
        )
    return result
