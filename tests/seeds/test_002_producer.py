"""Kafka's proposal "Idempotent Producer", the producer's side: ids, retries, pipelining, broker failures."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envelope import Envelope, SequenceError, decode, encode
from envelope.filters import Arrival, ProducerFilter, Stamp
from envelope.filters.producers import envelope_stamp
from envelope.sequences import TOPIC, SequenceRange, Sequences
from jobs import stack
from persistence.kafka import AcknowledgedProducer, BrokerUnavailable, KafkaSettings, ProducerSession, Topics
from tests.support.proxied_kafka import proxied_kafka
from tests.support.proxy import Fault, Proxy
from tests.support.republish import read_all
from tests.support.sessions import written

BOTH = pytest.mark.parametrize("transactional", [False, True])


@pytest.fixture(scope="module")
def broken() -> Iterator[tuple[KafkaSettings, KafkaSettings, Proxy]]:
    """A broker, the same through a proxy that breaks connections, and the proxy."""
    with proxied_kafka() as (address, proxy):
        options = {"batch.num.messages": "1", "compression.type": "none"}
        yield KafkaSettings(address), KafkaSettings(f"127.0.0.1:{proxy.port}", options), proxy


def new_topic(settings: KafkaSettings) -> str:
    return Topics(settings, timeout=20).create(f"t-{uuid.uuid4().hex}").name


@BOTH
@pytest.mark.integration
def test_an_error_before_the_message_was_delivered_and_the_retry_leads_to_no_duplicate(
    transactional: bool, broken: tuple[KafkaSettings, KafkaSettings, Proxy]
) -> None:
    settings, through, proxy = broken
    name = new_topic(settings)
    met = proxy.arm(b"the message", Fault.CUT_BEFORE)
    with ProducerSession("p", name, through, transactional=transactional) as session:
        session.send(b"the message")
        session.flush()
    assert met.is_set()
    assert [one.payload for one in written(settings, name)] == [b"the message"]


@BOTH
@pytest.mark.integration
def test_an_error_after_the_message_was_appended_and_the_retry_leads_to_no_duplicate(
    transactional: bool, broken: tuple[KafkaSettings, KafkaSettings, Proxy]
) -> None:
    settings, through, proxy = broken
    name = new_topic(settings)
    met = proxy.arm(b"the message", Fault.CUT_AFTER)
    with ProducerSession("p", name, through, transactional=transactional) as session:
        session.send(b"the message")
        session.flush()
    assert met.is_set()
    assert [one.payload for one in written(settings, name)] == [b"the message"]


@pytest.mark.integration
def test_a_producer_that_does_not_care_about_ids_does_nothing_special(
    broken: tuple[KafkaSettings, KafkaSettings, Proxy],
) -> None:
    """Opt-in."""
    settings, _, _ = broken
    name = new_topic(settings)
    with AcknowledgedProducer(settings) as producer:
        producer.send(name, b"plain bytes")
        producer.send(name, encode(Envelope(b"an envelope")))
        producer.flush()
    plain, wrapped = (record.value() for record in read_all(settings, name))
    assert plain == b"plain bytes"
    assert (decode(wrapped).producer, decode(wrapped).sequence) == ("", None)


@BOTH
@pytest.mark.parametrize("message", [b"M1", b"M2", b"M3"])
@pytest.mark.integration
def test_m1_m2_m3_sent_without_waiting_are_stored_in_order_when_one_of_them_is_retried(
    message: bytes, transactional: bool, broken: tuple[KafkaSettings, KafkaSettings, Proxy]
) -> None:
    """Pipelining: not M1, M3, M2."""
    settings, through, proxy = broken
    name = new_topic(settings)
    met = proxy.arm(message, Fault.CUT_BEFORE)
    with ProducerSession("p", name, through, transactional=transactional) as session:
        for payload in (b"M1", b"M2", b"M3"):
            session.send(payload)
        session.flush()
    assert met.is_set()
    assert [one.payload for one in written(settings, name)] == [b"M1", b"M2", b"M3"]


@BOTH
@pytest.mark.integration
@pytest.mark.slow
def test_the_mechanism_works_in_the_presence_of_broker_failures(transactional: bool, tmp_path: Path) -> None:
    """Fault tolerance: the broker dies with requests outstanding, and the sender does not know what it contains."""
    root = tmp_path / "stack"
    try:
        server = stack.up(root)
        settings = KafkaSettings(server.kafka, {"batch.num.messages": "50"})
        name = new_topic(settings)
        broker = server.find("kafka")
        assert broker

        def kill() -> None:
            os.kill(broker.pid, signal.SIGKILL)
            while broker.alive:
                time.sleep(0.01)

        def send(at_1000: Callable[[], object]) -> None:
            with ProducerSession("p", name, settings, transactional=transactional) as session:
                last = session.last_sequence_id()
                for number in range(0 if last is None else last + 1, 2_000):
                    session.send(b"%d" % number)
                    if number == 1_000:
                        at_1000()
                stack.up(root)
                session.flush()

        try:
            send(kill)
        except BrokerUnavailable:  # the client has lost its brokers: a new session continues after the last id
            send(lambda: None)
        assert stack.up(root).kafka == settings.bootstrap
        assert [one.sequence for one in written(settings, name)] == [*range(2_000)]
    finally:
        stack.down(root)


def test_a_producer_has_a_name_and_a_number_that_increments_with_each_message() -> None:
    """PID and sequence."""
    ids = Sequences()
    for number in range(5):
        one = ids.next(TOPIC, None, None, 1)
        ids.push(number % 3, one, own=False)
        assert one == (number, number)
    assert ids.pushed() == 4


def test_the_highwater_mark_of_a_producer_accepts_a_message_iff_it_is_below_its_number() -> None:
    """H(P) < S; the session refuses what the reader would drop."""
    ids = Sequences(last={0: 7})
    with pytest.raises(SequenceError, match="7 does not ascend: 7 was sent before it"):
        ids.next(TOPIC, 7, None, 1)
    assert ids.next(TOPIC, 8, None, 1) == SequenceRange(8, 8)
    assert ids.next(TOPIC, 100, None, 1) == SequenceRange(100, 100)


def test_the_reader_s_filter_sees_what_a_session_writes() -> None:
    """Batches, the epoch that fences an older session, and the declaration that a partition has no holes."""
    batch = Envelope(b"v", producer="p", sequence=5, last_sequence=9, producer_epoch=2, sequence_per_partition=True)
    assert envelope_stamp(Arrival("t", 0, 0, value=encode(batch))) == Stamp("p", 5, 9, 2, contiguous=True)
    sessions, judged = ProducerFilter(), []
    state = sessions.zero()
    for offset, (epoch, sequence) in enumerate([(0, 1), (1, 2), (0, 3), (1, 3), (1, 3)]):
        one = Envelope(b"v", producer="p", sequence=sequence, producer_epoch=epoch)
        ruling, state = sessions.judge(state, Arrival("t", 0, offset, value=encode(one)))
        judged.append(ruling.forward)
    assert judged == [True, True, False, True, False], "the older session is fenced, the copy is dropped"


def test_a_number_per_partition_allows_the_tighter_constraint() -> None:
    """H(P) + 1 = S."""
    ids = Sequences(per_partition=True, last={0: 7, 1: 2})
    with pytest.raises(SequenceError, match="leaves a hole: 7 was sent to partition 0"):
        ids.next(0, 9, None, 1)
    assert ids.next(0, 8, None, 1) == (8, 8)
    assert ids.next(1, 3, None, 1) == (3, 3)
    assert ids.next(2, None, None, 1) == (0, 0)


def test_a_global_number_is_simpler_for_the_client_and_has_holes_in_each_partition() -> None:
    ids = Sequences()
    for number, partition in enumerate((0, 1, 1, 0, 2)):
        ids.push(partition, ids.next(TOPIC, None, None, 1), own=False)
        assert ids.pushed(partition) == number
    ids.acknowledge()
    assert ids.last == {0: 3, 1: 2, 2: 4}
