"""Pulsar's PIP-6, the producer's side: names, sequence ids of the application's own, and restarts."""

from dataclasses import replace
from itertools import accumulate

import pytest

from envelope import SequenceError, SequenceState
from envelope.sequences import TOPIC, Sequences
from persistence.kafka import KafkaSettings, ProducerSession
from tests.support.republish import Make
from tests.support.sessions import written

integration = pytest.mark.integration


@pytest.fixture
def settings(kafka: str) -> KafkaSettings:
    return KafkaSettings(kafka)


@integration
def test_if_the_name_is_not_set_a_unique_one_is_assigned_and_can_be_asked_for(
    settings: KafkaSettings, topic: Make
) -> None:
    """setProducerName, getProducerName."""
    name = topic()
    with ProducerSession(None, name, settings) as one, ProducerSession(None, name, settings) as two:
        one.send(b"v")
        assert one.name
        assert one.name != two.name
    assert written(settings, name)[0].producer == one.name


def test_the_initial_sequence_id_is_that_of_the_first_message() -> None:
    """setInitialSequenceId."""
    ids = Sequences(initial=1000)
    first = ids.next(TOPIC, None, None, 1)
    ids.push(0, first, own=False)
    assert (first, ids.next(TOPIC, None, None, 1)) == ((1000, 1000), (1001, 1001))


def test_if_not_set_the_producer_starts_with_0_and_then_increases_it_for_each_message() -> None:
    ids, got = Sequences(), []
    for _ in range(3):
        one = ids.next(TOPIC, None, None, 1)
        ids.push(0, one, own=False)
        got.append(one.first)
    assert got == [0, 1, 2]


def test_the_application_may_give_ids_with_holes() -> None:
    """setSequenceId of a message."""
    ids = Sequences()
    for sequence in (0, 17, 18, 4711):
        ids.push(0, ids.next(TOPIC, sequence, None, 1), own=True)
    assert ids.pushed() == 4711


@integration
def test_a_producer_that_reads_a_file_uses_the_offset_in_the_file_as_sequence_id(
    settings: KafkaSettings, topic: Make
) -> None:
    """And restarts from the message after the last one: no mapping is required."""
    name, lines = topic(2), [b"a\n", b"bcd\n", b"ef\n", b"g\n", b"hijk\n"]
    offsets = [0, *accumulate(map(len, lines))][:-1]
    with ProducerSession("file", name, settings) as session:
        for offset, line in list(zip(offsets, lines, strict=True))[:3]:
            session.send(line, sequence=offset)
    with ProducerSession("file", name, settings) as session:
        last = session.last_sequence_id()
        assert last == offsets[2]
        for offset, line in zip(offsets, lines, strict=True):
            if offset > last:
                session.send(line, sequence=offset)
    got = {one.sequence: one.payload for one in written(settings, name)}
    assert got == dict(zip(offsets, lines, strict=True))
    assert len(written(settings, name)) == len(lines)


def test_if_the_application_uses_custom_ids_every_message_has_to_carry_one() -> None:
    ids = Sequences()
    ids.push(0, ids.next(TOPIC, 5, None, 1), own=True)
    with pytest.raises(SequenceError, match="every message of this session must carry a sequence id"):
        ids.next(TOPIC, None, None, 1)
    assert ids.pushed() == 5, "nothing is sent"


def test_and_a_session_that_numbers_its_messages_takes_no_custom_ids() -> None:
    ids = Sequences()
    ids.push(0, ids.next(TOPIC, None, None, 1), own=False)
    with pytest.raises(SequenceError, match="numbers its messages itself"):
        ids.next(TOPIC, 5, None, 1)


@integration
def test_the_last_sequence_id_is_that_of_the_last_message_that_was_published(
    settings: KafkaSettings, topic: Make
) -> None:
    """getLastSequenceId."""
    name = topic()
    with ProducerSession("p", name, settings) as session:
        assert session.last_sequence_id() is None
        session.send(b"v", sequence=41)
        session.flush()
        assert session.last_sequence_id() == 41
    with ProducerSession("p", name, settings) as session:
        assert session.last_sequence_id() == 41


def test_pushed_is_updated_when_a_message_is_sent_and_persisted_when_it_is_acknowledged() -> None:
    """last-sequence-pushed and last-sequence-persisted; the second is the one in the snapshot."""
    ids = Sequences()
    ids.push(0, ids.next(TOPIC, 7, None, 1), own=True)
    assert (ids.pushed(), ids.persisted(), ids.last) == (7, None, {})
    ids.acknowledge()
    assert (ids.pushed(), ids.persisted(), ids.last) == (7, 7, {0: 7})


@integration
def test_after_a_crash_the_state_is_the_snapshot_and_the_replay_of_all_later_entries(
    settings: KafkaSettings, topic: Make
) -> None:
    name = topic(3)
    with ProducerSession("p", name, settings) as session:
        for sequence in range(30):
            session.send(b"v", b"k%d" % sequence, sequence=sequence)
        snapshot = session.checkpoint()
        for sequence in range(30, 35):
            session.send(b"v", b"k%d" % sequence, sequence=sequence)
    with ProducerSession("p", name, settings, resume=snapshot) as session:
        assert session.last_sequence_id() == 34


def test_the_snapshot_is_a_map_of_numbers_that_can_be_read() -> None:
    """String to long: compact, and visible for debugging."""
    state = SequenceState("p", "orders", "Qx1", 2, {0: 7, 1: 5}, {0: 12, 1: 9})
    assert state.as_json() == (
        '{"producer": "p", "topic": "orders", "topic_id": "Qx1", "epoch": 2, "last": {"0": 7, "1": 5}, '
        '"offsets": {"0": 12, "1": 9}}'
    )
    known = replace(state, leader_epochs={0: 3})
    assert known.as_json().endswith('"offsets": {"0": 12, "1": 9}, "leader_epochs": {"0": 3}}')
    assert SequenceState.from_json(known.as_json()) == known
    assert SequenceState.from_json(state.as_json()) == state


@integration
def test_batches_carry_their_first_and_last_id(settings: KafkaSettings, topic: Make) -> None:
    name = topic()
    with ProducerSession("p", name, settings) as session:
        assert session.send(b"three messages", sequence=5, last=9) == (5, 9)
        with pytest.raises(SequenceError, match="9 does not ascend: 9 was sent"):
            session.send(b"v", sequence=9)
        session.send(b"v", sequence=10)
    assert [(one.sequence, one.last_sequence) for one in written(settings, name)] == [(5, 9), (10, None)]
    with ProducerSession("p", name, settings) as session:
        assert session.last_sequence_id() == 10
