"""Producer sessions on a real broker: killed and resumed, refused and fenced, and in order across retries."""

import json
import uuid
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from envelope import Envelope, EnvelopeError, SequenceError, SequenceState, decode, encode
from envelope.filters import Arrival, FilterStates, ProducerFilter
from envelope.limits import Limits
from persistence.kafka import (
    AcknowledgedProducer,
    BrokerUnavailable,
    KafkaSettings,
    ProducerFenced,
    ProducerSession,
    SequenceLost,
    Topics,
)
from tests.support.proxied_kafka import proxied_kafka
from tests.support.proxy import BREAKING, Fault, Proxy
from tests.support.republish import Make, read_all
from tests.support.sessions import killed, lines_file, ran, written

pytestmark = pytest.mark.integration

PLAIN_AND_TRANSACTIONAL = pytest.mark.parametrize("transactional", [False, True])


def ids(settings: KafkaSettings, topic: str) -> list[int | None]:
    return [one.sequence for one in written(settings, topic)]


@PLAIN_AND_TRANSACTIONAL
@pytest.mark.parametrize(
    "fault", ["session:send.before@1", "session:send.after@250", "session:flush.before@3", "session:flush.after@3"]
)
def test_a_session_that_is_killed_between_sends_continues_without_a_gap(
    fault: str, transactional: bool, settings: KafkaSettings, topic: Make, tmp_path: Path
) -> None:
    name, lines = topic(3), lines_file(tmp_path / "lines", 400)
    offsets = [0, *accumulate(len(line) for line in lines)][:-1]
    arguments = {
        "bootstrap": settings.bootstrap,
        "topic": name,
        "file": str(tmp_path / "lines"),
        "transactional": transactional,
        "flush_every": 50,
    }
    killed("session_process", fault, **arguments)
    before = ids(settings, name)
    code, said = ran("session_process", **arguments)
    assert (code, said[-1]) == (0, "done")
    began = json.loads(said[0])
    assert began["last"] == max((one for one in before if one is not None), default=None)
    assert began["epoch"] == (1 if before else 0)
    got = written(settings, name)
    assert {one.sequence: one.payload for one in got} == dict(zip(offsets, lines, strict=True)), "no gap"
    assert len(got) == len(lines), "nothing is there twice: the session continued after what is in the topic"


def test_a_message_that_a_crash_left_out_of_one_of_two_partitions_is_sent_by_the_next_session(
    settings: KafkaSettings, topic: Make
) -> None:
    """Of 1, 2 and 3, a session had sent 1 and 3, which are in one partition, when it was killed."""
    name, places = topic(2), {1: 0, 2: 1, 3: 0, 4: 1}
    with AcknowledgedProducer(settings) as producer:
        for number in (1, 3):
            value = encode(Envelope(b"v", producer="till", sequence=number, producer_epoch=0))
            producer.send(name, value, None, (), places[number])
        producer.flush()
    with ProducerSession("till", name, settings) as session:
        assert session.last_sequence_id() == 3
        left = [number for number, place in places.items() if not session.contains(number, partition=place)]
        assert left == [2, 4]
        for number in left:
            session.send(b"v", sequence=number, partition=places[number])
        with pytest.raises(SequenceError, match="3 does not ascend: 4 was sent"):
            session.send(b"v", sequence=3, partition=0)
    states = FilterStates(ProducerFilter())
    records = [Arrival(name, one.partition(), one.offset(), None, one.value()) for one in read_all(settings, name)]
    passed = [decode(one.value).sequence for one in records if states.passes(one)]
    assert sorted(one for one in passed if one is not None) == [1, 2, 3, 4]


@PLAIN_AND_TRANSACTIONAL
def test_ids_count_up_by_themselves_and_continue_after_those_in_the_topic(
    transactional: bool, settings: KafkaSettings, topic: Make
) -> None:
    name = topic(4)
    with ProducerSession("till", name, settings, transactional=transactional) as session:
        assert (session.last_sequence_id(), session.epoch) == (None, 0)
        assert [session.send(b"v", b"k%d" % i).first for i in range(100)] == list(range(100))
        assert (session.last_pushed_id(), session.last_sequence_id()) == (99, None)
        session.flush()
        assert (session.last_pushed_id(), session.last_sequence_id()) == (99, 99)
    with ProducerSession("till", name, settings, transactional=transactional) as session:
        assert (session.last_sequence_id(), session.epoch) == (99, 1)
        assert session.send(b"v") == (100, 100)
        assert session.send(b"batch", count=5) == (101, 105)
    got = written(settings, name)
    assert {(one.producer, one.producer_epoch) for one in got} == {("till", 0), ("till", 1)}
    assert sorted(one.last_sequence or one.sequence or 0 for one in got) == [*range(101), 105]


def test_another_producer_and_republished_messages_are_not_mistaken_for_it(
    settings: KafkaSettings, topic: Make
) -> None:
    name = topic()
    with ProducerSession("till", name, settings) as session, ProducerSession("till 2", name, settings) as other:
        session.send(b"v", sequence=7)
        for sequence in range(100):
            other.send(b"till", sequence=sequence)
    with ProducerSession("till", name, settings) as session:
        assert session.last_sequence_id() == 7


def test_a_session_without_a_name_gets_one_of_its_own(settings: KafkaSettings, topic: Make) -> None:
    name = topic()
    with ProducerSession(None, name, settings) as one, ProducerSession(None, name, settings) as two:
        one.send(b"v")
        two.send(b"v")
    assert one.name != two.name
    assert {message.producer for message in written(settings, name)} == {one.name, two.name}
    with pytest.raises(ValueError, match="empty"):
        ProducerSession(" ", name, settings)


def test_a_partition_is_numbered_by_itself_and_without_holes_if_declared(settings: KafkaSettings, topic: Make) -> None:
    name = topic(3)
    with ProducerSession("till", name, settings, per_partition=True) as session:
        for number in range(90):
            session.send(b"v", b"k%d" % (number % 20))
        for _ in range(9):
            session.send(b"without a key")
    for partition in range(3):
        records = [one for one in read_all(settings, name) if one.partition() == partition]
        assert records
        with ProducerSession("till", name, settings, per_partition=True) as session:
            assert session.last_sequence_id(partition) == len(records) - 1
    assert all(one.sequence_per_partition for one in written(settings, name))
    with ProducerSession("own", name, settings, per_partition=True) as session:
        session.send(b"v", sequence=4, partition=1)
        with pytest.raises(SequenceError, match="leaves a hole: 4 was sent to partition 1"):
            session.send(b"v", sequence=6, partition=1)
        session.send(b"v", sequence=5, partition=1)


def test_a_message_without_a_key_that_is_sent_again_arrives_in_the_same_partition(
    settings: KafkaSettings, topic: Make
) -> None:
    name = topic(3)
    for producer in ("one", "two"):  # they stand for one that lost its end of the topic
        with ProducerSession(producer, name, settings) as session:
            for sequence in range(0, 60, 2):
                session.send(b"v", sequence=sequence)
    places: dict[int | None, set[int]] = {}
    for partition in range(3):
        for record in (one for one in read_all(settings, name) if one.partition() == partition):
            places.setdefault(decode(record.value()).sequence, set()).add(partition)
    assert {len(found) for found in places.values()} == {1}


def test_the_end_of_a_long_topic_is_searched_backwards_up_to_the_saved_state(
    settings: KafkaSettings, topic: Make
) -> None:
    name = topic(2)
    with ProducerSession("till", name, settings) as session:
        session.send(b"v", b"a", sequence=41)
        state = session.checkpoint()
    assert SequenceState.from_json(state.as_json()) == state
    with AcknowledgedProducer(settings) as producer:
        producer.send_many(name, [{"value": b"till %d" % i, "key": b"%d" % i} for i in range(20_000)])
        producer.flush()
    for resume in (None, state):
        with ProducerSession("till", name, settings, resume=resume) as session:
            assert (session.last_sequence_id(), session.epoch) == (41, 1)
    with pytest.raises(ValueError, match="of producer 'till'"):
        ProducerSession("other", name, settings, resume=state)


def test_a_topic_that_was_created_again_contains_nothing_of_the_state_of_the_former_one(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    name = topic(1)
    with ProducerSession("till", name, settings) as session:
        session.send(b"line", sequence=41)
        state = session.checkpoint()
    topics.delete([name])
    topics.create(name, 1)
    with ProducerSession("till", name, settings, resume=state) as session:
        assert (session.contains(41), session.last_sequence_id(), session.epoch) == (False, None, 1)
        session.send(b"line", sequence=41)
    assert ids(settings, name) == [41]


def test_a_producer_whose_last_messages_retention_deleted_is_not_guessed(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    name = topic()
    with ProducerSession("till", name, settings) as session:
        session.send(b"v", sequence=41)
        state = session.checkpoint()
    _delete_records(settings, name)
    with pytest.raises(SequenceLost, match=r"its last sequence id is unknown.*resume=.*initial="):
        ProducerSession("till", name, settings)
    with ProducerSession("till", name, settings, resume=state) as session:
        assert session.last_sequence_id() == 41
        assert session.epoch == 1
    with ProducerSession("till", name, settings, initial=100) as session:
        with pytest.raises(SequenceError, match="below the initial id 100"):
            session.send(b"v", sequence=99)
        assert session.send(b"v", sequence=100) == (100, 100)


def _delete_records(settings: KafkaSettings, name: str) -> None:
    admin = AdminClient(settings.client())
    for future in admin.delete_records([TopicPartition(name, 0, -1)]).values():
        future.result(20)


def test_a_newer_session_fences_the_older_one_at_the_brokers(settings: KafkaSettings, topic: Make) -> None:
    name = topic()
    old = ProducerSession("till", name, settings, transactional=True)
    old.send(b"old, committed", sequence=1)
    old.flush()
    old.send(b"old, open", sequence=2)
    with ProducerSession("till", name, settings, transactional=True) as new:
        assert new.last_sequence_id() == 1
        with pytest.raises(ProducerFenced, match="another process has begun under the name till"):
            old.flush()
        new.send(b"new", sequence=2)
        new.flush()
        with pytest.raises(ProducerFenced):
            old.send(b"old, again", sequence=3)
        new.send(b"new", sequence=3)
    assert [(one.payload, one.producer_epoch) for one in written(settings, name)] == [
        (b"old, committed", 0),
        (b"new", 1),
        (b"new", 1),
    ]


def test_without_transactions_the_epoch_tells_readers_which_session_is_older(
    settings: KafkaSettings, topic: Make
) -> None:
    name = topic()
    old = ProducerSession("till", name, settings)
    old.send(b"old", sequence=1)
    old.flush()
    with ProducerSession("till", name, settings) as new:
        new.send(b"new", sequence=2)
    old.send(b"late", sequence=2)
    old.flush()
    assert [(one.payload, one.producer_epoch) for one in written(settings, name)] == [
        (b"old", 0),
        (b"new", 1),
        (b"late", 0),
    ]


def test_a_message_that_is_too_large_takes_no_id(settings: KafkaSettings, topic: Make) -> None:
    name = topic(max_message_bytes=2000)
    with ProducerSession("till", name, settings) as session:
        with pytest.raises(EnvelopeError, match=r"payload_too_large.*max\.message\.bytes"):
            session.send(bytes(3000))
        assert session.send(b"v") == (0, 0)


# ---- order across retries

NEEDLE = b"[5000]"


@PLAIN_AND_TRANSACTIONAL
@pytest.mark.parametrize("sequences", [(None, None, None), (5, 6, 9)], ids=["counted", "own"])
def test_a_message_whose_send_raises_is_not_sent_and_can_be_sent_again(
    transactional: bool, sequences: tuple[int | None, ...], settings: KafkaSettings, topic: Make
) -> None:
    name, refused = topic(1), BrokerUnavailable("an earlier message failed", "Flush")
    with ProducerSession("till", name, settings, transactional=transactional) as session:
        session.send(b"first", sequence=sequences[0])
        session.flush()
        with patch.object(session._producer, "send", side_effect=refused), pytest.raises(BrokerUnavailable):
            session.send(b"second", sequence=sequences[1])
        assert session.last_pushed_id() == (sequences[0] or 0)
        session.flush()
        session.send(b"second", sequence=sequences[1])
        session.send(b"third", sequence=sequences[2])
    expected = sequences if sequences[0] else (0, 1, 2)
    found = [(one.payload, one.sequence) for one in written(settings, name)]
    assert sorted(found, key=lambda one: one[1] or 0) == [*zip((b"first", b"second", b"third"), expected, strict=True)]


@PLAIN_AND_TRANSACTIONAL
@pytest.mark.parametrize("reaches", [False, True])
def test_a_message_whose_send_is_interrupted_is_kept_and_sent_by_the_next_flush(
    reaches: bool, transactional: bool, settings: KafkaSettings, topic: Make
) -> None:
    name = topic(1)
    with ProducerSession("till", name, settings, transactional=transactional) as session:
        session.send(b"0")
        send = session._producer.send

        def interrupted(*message: Any) -> None:
            if reaches:
                send(*message)
            raise KeyboardInterrupt

        with patch.object(session._producer, "send", interrupted), pytest.raises(KeyboardInterrupt):
            session.send(b"1")
        assert session.last_pushed_id() == 1
        session.send(b"2")
        state = session.checkpoint()
    assert max(state.last.values()) == 2
    found = {(one.payload, one.sequence) for one in written(settings, name)}
    assert found == {(b"%d" % number, number) for number in range(3)}


def test_the_numbers_of_a_former_topic_are_in_the_state_of_every_later_session(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    name, state = topic(2), None
    for partitions in ([0, 1], [0], [1]):
        with ProducerSession("till", name, settings, resume=state, per_partition=True) as session:
            found = [session.send(b"v", partition=one).first for _ in range(3) for one in partitions]
            state = SequenceState.from_json(session.checkpoint().as_json())
        if len(partitions) == 2:
            topics.delete([name])
            topics.create(name, 2)
        else:
            assert found == [3, 4, 5], "above those of the former topic"


def test_a_session_finds_its_own_messages_that_are_larger_than_others_may_be(
    settings: KafkaSettings, topic: Make
) -> None:
    name, limits = topic(1, max_message_bytes=4 << 20), Limits(payload_bytes=3 << 20)
    for number in range(2):
        with ProducerSession("till", name, settings, limits=limits) as session:
            assert session.last_sequence_id() == (number - 1 if number else None)
            session.send(b"v" * (2 << 20))


def test_a_transaction_does_not_grow_old_and_one_that_did_is_not_said_to_be_another_process(
    settings: KafkaSettings, topic: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic(1)
    with ProducerSession("till", name, settings, transactional=True) as session:
        session.send(b"0")
        session._producer._began -= 40  # type: ignore[union-attr]
        session.send(b"1")
        assert session.last_sequence_id() == 0, "the first transaction was committed"
        session.flush()
        session.send(b"2")
        session._producer._began -= 70  # type: ignore[union-attr]
        error = KafkaError(KafkaError.INVALID_PRODUCER_EPOCH)
        said = str(session._producer._error(error, "producing"))  # type: ignore[union-attr]
        assert "the coordinator has ended a transaction that began 70 s ago, or another process" in said
    assert ids(settings, name) == [0, 1, 2]


@pytest.fixture(scope="module")
def broken() -> Iterator[tuple[str, Proxy]]:
    with proxied_kafka() as found:
        yield found


def through(proxy: Proxy) -> KafkaSettings:
    return KafkaSettings(f"127.0.0.1:{proxy.port}", {"batch.num.messages": "100", "compression.type": "none"})


@pytest.mark.parametrize("fault", BREAKING)
@PLAIN_AND_TRANSACTIONAL
def test_pipelined_messages_stay_in_order_when_a_request_fails_and_is_retried(
    fault: Fault, transactional: bool, broken: tuple[str, Proxy]
) -> None:
    """002, Pipelining. A session has one request in flight: nothing overtakes the one that is retried."""
    address, proxy = broken
    name = f"t-{uuid.uuid4().hex}"
    Topics(KafkaSettings(address), timeout=20).create(name)
    met = proxy.arm(NEEDLE, fault)
    with ProducerSession("till", name, through(proxy), transactional=transactional) as session:
        for number in range(10_000):
            session.send(b"[%d]" % number, sequence=number)
        session.flush()
        assert met.is_set()
    assert ids(KafkaSettings(address), name) == list(range(10_000))


@pytest.mark.parametrize("fault", BREAKING)
def test_kafkas_own_idempotence_keeps_the_order_with_five_requests_in_flight(
    fault: Fault, broken: tuple[str, Proxy]
) -> None:
    """As long as the broker remembers the producer. `persistence.kafka.producer` says why headwater uses one."""
    address, proxy = broken
    name = f"t-{uuid.uuid4().hex}"
    Topics(KafkaSettings(address), timeout=20).create(name)
    met = proxy.arm(NEEDLE, fault)
    options = {"enable.idempotence": True, "max.in.flight.requests.per.connection": 5, "acks": "all"}
    producer = Producer(through(proxy).client() | options)
    for number in range(10_000):
        producer.produce(name, b"[%d]" % number)
    assert producer.flush(60) == 0
    assert met.is_set()
    assert [record.value() for record in read_all(KafkaSettings(address), name)] == [b"[%d]" % n for n in range(10_000)]


@PLAIN_AND_TRANSACTIONAL
def test_messages_that_were_not_acknowledged_are_kept_and_sent_again_with_the_same_ids(
    transactional: bool, broken: tuple[str, Proxy]
) -> None:
    address, proxy = broken
    name = f"t-{uuid.uuid4().hex}"
    Topics(KafkaSettings(address), timeout=20).create(name)
    with ProducerSession("till", name, through(proxy), transactional=transactional) as session:
        session.send(b"before")
        session.flush()
        with proxy.refusing():
            session.send(b"not acknowledged")
            with pytest.raises(BrokerUnavailable):
                session.flush(1)
            assert (session.last_sequence_id(), session.last_pushed_id()) == (0, 1)
            with pytest.raises(BrokerUnavailable):
                session.flush(1)
        session.send(b"after")
        session.flush()
        assert session.last_sequence_id() == 2
    assert [(one.payload, one.sequence) for one in written(KafkaSettings(address), name)] == [
        (b"before", 0),
        (b"not acknowledged", 1),
        (b"after", 2),
    ]
