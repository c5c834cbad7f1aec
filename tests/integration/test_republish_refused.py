"""What a republisher cannot use: dead letters, retries, and what ends the service."""

import os
import threading
import uuid
from collections import defaultdict
from typing import Any

import pytest

from envelope import Envelope, Hop, decode, encode
from envelope.deadletter import DeadLetterHeaders, own_headers
from jobs.republish import InputRecord, InputTopics, OutputRecord, Republisher, RetryTopics, Statistics, identity
from persistence.commit import faults
from persistence.errors import Transient
from persistence.kafka import AcknowledgedProducer, BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.headers import headers_of
from tests.support.raw_headers import produce_raw
from tests.support.republish import Make, produce, read_all, run

pytestmark = pytest.mark.integration


def test_poison_of_every_kind_is_kept_byte_for_byte_and_the_rest_goes_on(settings: KafkaSettings, topic: Make) -> None:
    source, target, dead = topic(1, "in"), topic(1, "out"), topic(1, "dead")
    good = encode(Envelope(b"v", key=b"k"))
    headers = [("h", b"1"), ("h", b"\xff"), ("none", None)]
    poison = [
        (b"k", None, "empty"),
        (b"k", b"", "empty"),
        (b"k", b"junk", "not_an_envelope"),
        (b"k", good[:-1], "truncated"),
        (b"other", good, "key_mismatch"),
        (None, encode(Envelope(b"v", destination="elsewhere")), "wrong_destination"),
        (b"k", encode(Envelope(b"v", (Hop(source, 0, 0),), key=b"k")), "chain_loop"),
    ]
    with AcknowledgedProducer(settings) as producer:
        for key, value, _ in poison:
            producer.send(source, good, b"k")
            producer.send(source, value, key, headers)
        producer.flush()
    read = InputTopics(source, tombstones="dead_letter")
    counts = run(settings, source=read, target=target, dead_letter=dead, name="r")
    assert counts.consumed == 14
    assert counts.produced == len(read_all(settings, target)) == 7
    dead_letters = read_all(settings, dead)
    assert [(m.key(), m.value() or b"") for m in dead_letters] == [(key, value or b"") for key, value, _ in poison]
    for i, (message, (_, _, reason)) in enumerate(zip(dead_letters, poison, strict=True)):
        letter = DeadLetterHeaders.read(message.headers())
        assert letter
        assert (letter.topic, letter.partition, letter.offset, letter.reason) == (source, 0, 2 * i + 1, reason)
        assert (letter.application, letter.attempt) == ("r", 1)
        assert letter.lineage.endswith(f"{source}:0:{2 * i + 1}")
        assert own_headers(message.headers()) == headers
    assert counts.dead_lettered == {"empty": 2, **{reason: 1 for _, _, reason in poison[2:]}}


def test_a_header_whose_name_is_not_utf_8_has_another_name_in_outputs_and_dead_letters(
    settings: KafkaSettings, topic: Make
) -> None:
    source, target, dead = topic(1, "in"), topic(1, "out"), topic(1, "dead")
    names = [(b"a", b"1"), (b"\xff", b"2"), (b"b\xff", None)]
    good = encode(Envelope(b"v", key=b"k"))
    records = [(b"k", good, names), (b"k", b"junk", names), (b"k", good, [])]
    produce_raw(settings.bootstrap, source, records * 10)
    counts = run(settings, source=source, target=target, dead_letter=dead)
    assert (counts.consumed, counts.dead_lettered) == (30, {"not_an_envelope": 10})
    headers = [("a", b"1"), ("\ufffd", b"2"), ("\ufffd", None)]
    assert [own_headers(headers_of(one)) for one in read_all(settings, dead)] == [headers] * 10
    assert [headers_of(one) for one in read_all(settings, target)] == [headers, []] * 10


@pytest.mark.parametrize("wrapping", ["envelope", "none"])
def test_tombstones_are_skipped_and_counted_unless_told_otherwise(
    settings: KafkaSettings, topic: Make, wrapping: str
) -> None:
    source, target = topic(1, "in"), topic(1, "out")
    good = encode(Envelope(b"v", key=b"k"))
    with AcknowledgedProducer(settings) as producer:
        for value in (good, None, good, None):
            producer.send(source, value, b"k")
        producer.flush()
    counts = run(settings, source=InputTopics(source, wrapping), target=target, name="r")
    assert (counts.consumed, counts.produced, counts.tombstones, counts.dropped) == (4, 2, 2, 0)
    assert counts.as_dict()["tombstones"] == 2


def test_a_dead_letter_that_is_too_large_is_trimmed(settings: KafkaSettings, topic: Make) -> None:
    source, target, dead = topic(1, "in"), topic(1, "out"), topic(1, "dead", max_message_bytes=2000)
    produce(settings, source, [(b"k", os.urandom(50_000))])
    run(settings, source=source, target=target, dead_letter=dead)
    (message,) = read_all(settings, dead)
    assert dict(message.headers())["hw-dlq-value-bytes"] == b"50000"
    assert DeadLetterHeaders.read(message.headers())


def test_without_a_dead_letter_topic_poison_stops_the_service_before_it(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, [(b"k", b"junk")])
    with pytest.raises(
        BrokerRefused, match=rf"{source}:0:0 cannot be republished \(not_an_envelope.*dead-letter.*--input"
    ):
        run(settings, source=source, target=target, group=group)
    assert topics.group_offsets(group) == {(source, 0): 0}


@pytest.mark.parametrize("missing", ["source", "target", "dead_letter"])
def test_a_topic_that_is_missing_is_named_before_anything_is_read(
    missing: str, settings: KafkaSettings, topic: Make
) -> None:
    names: dict[str, Any] = {"source": topic(1), "target": topic(1), "dead_letter": topic(1), missing: "nowhere"}
    with pytest.raises(BrokerRefused, match=r"topic nowhere.*Create the topic"):
        run(settings, topic_wait=0, **names)


def test_a_topic_that_is_read_and_written_is_refused(settings: KafkaSettings) -> None:
    with pytest.raises(ValueError, match="loop forever"):
        Republisher(identity, source="a", target=["b", "a"], name="r", settings=settings)


def test_a_broker_that_is_not_there_is_one_line_with_the_remedy() -> None:
    republisher = Republisher(identity, source="a", target="b", name="r", settings=KafkaSettings("127.0.0.1:1"))
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1.*Check that the broker runs"):
        republisher.run()


def test_a_failing_transform_is_tried_again_over_the_retry_topics_and_then_given_up(
    settings: KafkaSettings, topic: Make
) -> None:
    source, target, dead = topic(2, "in"), topic(1, "out"), topic(1, "dead")
    retry = RetryTopics({topic(1, "soon"): 0.2, topic(1, "later"): 0.5})
    produce(settings, source, [(b"k%d" % i, encode(Envelope(b"%d" % i, key=b"k%d" % i))) for i in range(1, 9)])
    tries: dict[bytes, list[int]] = defaultdict(list)

    def needs_tries(record: InputRecord) -> OutputRecord:
        tries[record.payload].append(record.attempt)
        return OutputRecord(b"%d" % (1 // (int(record.payload) <= record.attempt)))

    done = threading.Event()
    republisher = Republisher(
        needs_tries,
        source=source,
        target=target,
        dead_letter=dead,
        retry=retry,
        name="r",
        group=uuid.uuid4().hex,
        settings=settings,
        max_wait=0.05,
    )

    def progress(counts: Statistics) -> None:
        if counts.produced + sum(counts.dead_lettered.values()) == 8:
            done.set()

    thread = threading.Thread(target=lambda: republisher.run(progress=progress))
    thread.start()
    assert done.wait(60)
    republisher.stop()
    thread.join(60)
    assert {int(payload): len(attempts) for payload, attempts in tries.items()} == {
        1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3
    }  # fmt: skip
    assert republisher.statistics.retried == 7 + 6
    for message in read_all(settings, target):
        chain = decode(message.value()).chain
        assert [hop.pass_through for hop in chain] == [True] * (len(chain) - 1) + [False]
        assert message.headers() is None
    letters = [DeadLetterHeaders.read(message.headers()) for message in read_all(settings, dead)]
    assert [(letter.attempt, letter.raised and letter.raised.kind) for letter in letters if letter] == [
        (3, "ZeroDivisionError")
    ] * 5


def test_if_the_dead_letter_topic_refuses_nothing_is_committed(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, dead, group = topic(1, "in"), topic(1, "out"), topic(1, "dead"), uuid.uuid4().hex
    produce(settings, source, [(b"k", b"junk")])
    refusing = faults.Injector([faults.Fault.parse("republish:dead_letter.error")])
    with faults.use(refusing), pytest.raises(Transient):
        run(settings, source=source, target=target, dead_letter=dead, group=group)
    assert topics.group_offsets(group) == {(source, 0): 0}
    run(settings, source=source, target=target, dead_letter=dead, group=group)
    assert len(read_all(settings, dead)) == 1
    assert topics.group_offsets(group) == {(source, 0): 1}


def test_a_root_beyond_the_end_of_its_topic_is_refused_when_asked_for(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    root, source, target, dead = (topic(1, name) for name in ("root", "in", "out", "dead"))
    produce(settings, root, [(b"k", b"v")] * 3)
    topic_id = topics.topic_ids([root])[root]
    hops = [
        Hop(root, 0, 2, topic_id=topic_id),
        Hop(root, 0, 3, topic_id=topic_id),
        Hop(root, 0, 2**62, topic_id="of-another-life"),
        Hop("elsewhere", 0, 2**62),
        Hop(root, 7, 0),
    ]
    produce(settings, source, [(b"k", encode(Envelope(b"v", (hop,), key=b"k"))) for hop in hops])
    counts = run(settings, source=source, target=target, dead_letter=dead, check_roots=True)
    assert (counts.produced, counts.dead_lettered) == (3, {"root_beyond_end": 2})
    letters = [DeadLetterHeaders.read(message.headers()) for message in read_all(settings, dead)]
    assert [letter.offset for letter in letters if letter] == [1, 4]
