"""A deduplicating writer on a real broker: killed at every step, recovered, fenced, and by topic."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envelope import Envelope, EnvelopeError, Hop, TopicPartition, Verdict, decode
from envelope.filters import DedupPolicy, Snapshot
from persistence.errors import StoreError
from persistence.kafka import (
    BrokerError,
    BrokerUnavailable,
    DeduplicatingWriter,
    KafkaSettings,
    ProducerFenced,
    SequenceLost,
    Topics,
)
from persistence.kafka.transactions import TransactionalProducer
from persistence.reader import SequenceSnapshots
from tests.integration.writer_process import messages
from tests.support.cli import run as headwater
from tests.support.pure import fresh_store
from tests.support.republish import Make, produce, read_all
from tests.support.sessions import killed, ran, written

pytestmark = pytest.mark.integration

COUNT = 90
POINTS = ["writer:produce", "writer:commit", "writer:snapshot"]
FAULTS = [f"{point}.{outcome}@{time}" for point in POINTS for outcome in ("before", "after") for time in (1, 3)]


def replayed(settings: KafkaSettings, topic: str, partitions: int) -> list[dict[str, int]]:
    """The maps that the whole topic gives, without any snapshot."""
    maps: list[dict[str, int]] = [{} for _ in range(partitions)]
    for record in read_all(settings.with_options(isolation_level="read_committed"), topic):
        message = decode(record.value())
        if message.sequence is not None:
            mine = maps[record.partition() or 0]
            mine[message.producer] = max(mine.get(message.producer, message.sequence), message.sequence)
    return maps


def test_a_batch_of_which_the_topic_contains_a_part_is_refused(settings: KafkaSettings, topic: Make) -> None:
    """Pulsar's issue 6273: it is neither new nor a duplicate."""

    def of(first: int, last: int) -> Envelope:
        return Envelope(b"", key=b"k", producer="till", sequence=first, last_sequence=last)

    name = topic(1, "orders")
    with DeduplicatingWriter(name, [name], settings, fresh_store()) as writer:
        assert writer.write(name, [of(1, 7)]) == [Verdict.ACCEPTED]
        for messages_ in ([of(5, 9)], [of(8, 9), of(9, 12)], [of(8, 8), of(1, 20)]):
            with pytest.raises(ValueError, match=r"contains a part of numbers .* of a producer"):
                writer.write(name, messages_)
        assert writer.write(name, [of(1, 7), of(8, 9), of(9, 9)]) == [
            Verdict.DUPLICATE,
            Verdict.ACCEPTED,
            Verdict.DUPLICATE,
        ]
        assert writer.last_sequence_id(name, "till") == 9
    assert [decode(one.value()).sequence for one in read_all(settings, name)] == [1, 8]


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[] if one == "writer:commit.after@3" else pytest.mark.kills) for one in FAULTS]
)
def test_a_writer_that_is_killed_recovers_its_maps_and_nothing_is_in_the_topic_twice_or_missing(
    fault: str, settings: KafkaSettings, topic: Make, tmp_path: Path
) -> None:
    name = topic(2, "orders")
    arguments: dict[str, Any] = {"bootstrap": settings.bootstrap, "topic": name, "partitions": 2, "count": COUNT}
    arguments |= {"store": f"sqlite://{tmp_path}/snapshots", "every": 7}
    killed("writer_process", fault, **arguments)
    before = replayed(settings, name, 2)
    code, said = ran("writer_process", **arguments)
    assert code == 0
    assert json.loads(said[0]) == before, "snapshot and tail give the maps before the crash"
    assert min(json.loads(said[-1])) > 0, "snapshots were written"
    found = Counter((one.producer, one.sequence) for one in written(settings, name) if one.producer)
    assert found == Counter({(one.producer, one.sequence): 1 for one in messages(COUNT) if one.producer})


def test_the_most_specific_setting_decides_in_which_topics_duplicates_are_refused(
    settings: KafkaSettings, topic: Make
) -> None:
    strict, loose = topic(1, "strict"), topic(1, "loose")
    policy = DedupPolicy(default=True, namespaces={loose[:5]: False}, topics={strict: True})
    with DeduplicatingWriter("gateway", [strict, loose], settings, fresh_store(), policy=policy) as writer:
        for name in (strict, loose):
            sent = [Envelope(b"m", producer="till", sequence=one) for one in (1, 1, 5, 4)]
            again = "duplicate" if name == strict else "accepted"
            assert writer.write(name, sent) == ["accepted", again, "accepted", again]
        assert (writer.last_sequence_id(strict, "till"), writer.last_sequence_id(loose, "till")) == (5, None)
        with pytest.raises(ValueError, match="not elsewhere"):
            writer.write("elsewhere", [])
    assert (len(written(settings, strict)), len(written(settings, loose))) == (2, 4)


def test_the_command_of_a_republisher_filters_the_topics_of_a_policy(
    settings: KafkaSettings,
    topic: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    strict, loose, out = topic(1, "strict"), topic(1, "loose"), topic(1, "out")
    for name in (strict, loose):
        produce(settings, name, [(b"k", b'{"id": %d}' % number) for number in (1, 1, 2)])
    command = ["republish", "jobs.republish.record:identity", "--from", strict, "--from", loose, "--input", "json"]
    command += ["--to", out, "--via", out, "--bootstrap", settings.bootstrap, "--until-caught-up", "--json"]
    command += ["--deduplicate", "tests.support.filters:by_id", "--policy", "tests.support.filters:only_strict"]
    assert headwater(monkeypatch, *command, "--store", f"lmdb://{tmp_path}/states") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdicts"] == {
        "accepted": 2,
        "duplicate": 1,
        "unidentified": 3,
    }
    assert Counter(decode(one.value()).chain[0].topic for one in read_all(settings, out)) == {strict: 2, loose: 3}


def test_a_newer_writer_of_a_name_fences_the_older_one_and_its_snapshots(settings: KafkaSettings, topic: Make) -> None:
    name, store = topic(1, "orders"), fresh_store()
    older = DeduplicatingWriter("gateway", [name], settings, store, every=1)
    older.write(name, [Envelope(b"m", producer="till", sequence=1)])
    with DeduplicatingWriter("gateway", [name], settings, store, every=1) as newer:
        assert newer.persisted(name, 0) == {"till": 1}
        with pytest.raises(ProducerFenced):
            older.write(name, [Envelope(b"m", producer="till", sequence=2)])
        assert newer.write(name, [Envelope(b"m", producer="till", sequence=2)]) == ["accepted"]
    older.close()
    assert [one.sequence for one in written(settings, name)] == [1, 2]


def test_a_message_that_is_too_large_is_refused_with_its_whole_batch_which_can_be_written_without_it(
    settings: KafkaSettings, topic: Make
) -> None:
    name = topic(1, "orders")
    with DeduplicatingWriter("gateway", [name], settings, fresh_store()) as writer:
        small, large = (Envelope(b"m" * size, producer="till", sequence=size) for size in (1, 1 << 21))
        with pytest.raises(Exception, match="bytes"):
            writer.write(name, [small, large])
        assert writer.write(name, [small]) == ["accepted"]
    assert [one.sequence for one in written(settings, name)] == [1]


def test_after_a_batch_that_was_refused_the_next_one_is_written_whatever_was_on_its_way(
    settings: KafkaSettings, topic: Make
) -> None:
    name, large = topic(2, "orders"), Envelope(b"m" * (1 << 21), producer="till", sequence=10_000)
    with DeduplicatingWriter("gateway", [name], settings, fresh_store(), linger_ms=1) as writer:
        for turn in range(
            60
        ):  # the abort meets records in the queue, on their way, and a transaction that has not begun
            batch = [
                Envelope(b"m", producer="till", sequence=2 * turn + one, key=b"%d" % (turn + one)) for one in (0, 1)
            ]
            with pytest.raises(EnvelopeError, match="bytes"):
                writer.write(name, [*batch * (1 + turn % 3 * 40), large])
            assert writer.write(name, batch) == ["accepted", "accepted"]
    assert sorted(one.sequence or 0 for one in written(settings, name)) == [*range(120)]


def test_a_topic_that_was_created_again_or_has_lost_messages_is_not_judged_by_an_old_snapshot(
    settings: KafkaSettings, topic: Make
) -> None:
    name, store = topic(1, "orders"), fresh_store()
    snapshots = SequenceSnapshots(store, "gateway")
    with DeduplicatingWriter("gateway", [name], settings, store, every=1) as writer:
        writer.write(name, [Envelope(b"m", producer="till", sequence=1)])
    taken = snapshots.load(name, 0)
    assert taken is not None
    with pytest.raises(StoreError):
        snapshots.save(name, 0, taken)  # it is the older one by now
    newest = SequenceSnapshots(store, "gateway")
    assert newest.load(name, 0, "another id") is None
    with DeduplicatingWriter("gateway", [name], settings, store, every=1000) as writer:
        writer.write(name, [Envelope(b"m", producer="till", sequence=one) for one in (2, 3)])
    deleted(settings, name, before=taken.next_offset + 1)
    with DeduplicatingWriter("gateway", [name], settings, store) as writer:
        assert writer.persisted(name, 0) == {"till": 3}, "a marker was deleted, and no message"
    deleted(settings, name, before=taken.next_offset + 2)
    with pytest.raises(SequenceLost, match="which are in no snapshot"):
        DeduplicatingWriter("gateway", [name], settings, store)


def test_retention_before_the_first_snapshot_that_is_due_is_noticed(settings: KafkaSettings, topic: Make) -> None:
    name, store = topic(1, "orders"), fresh_store()
    with DeduplicatingWriter("gateway", [name], settings, store) as writer:
        writer.write(name, [Envelope(b"m", producer="till", sequence=1)])
        writer.write(name, [Envelope(b"m", producer="shop", sequence=one) for one in range(20)])
    deleted(settings, name, before=10)
    with pytest.raises(SequenceLost, match=r"offsets 0 to 9, which are in no snapshot"):
        DeduplicatingWriter("gateway", [name], settings, store)


def test_offsets_that_are_used_again_are_a_loss_for_the_running_writer_and_for_the_next_one(
    settings: KafkaSettings, topic: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest records were lost, and a later leader gave their offsets to others."""
    name, store = topic(1, "orders"), fresh_store()
    with DeduplicatingWriter("gateway", [name], settings, store, every=5) as writer:
        writer.write(name, [Envelope(b"m", producer="till", sequence=one) for one in range(5)])
        monkeypatch.setattr(writer, "_note", lambda *_: None)
        writer._stored[name, 0].append(2)
        with pytest.raises(BrokerError, match=r"Kafka has lost records that this writer had written"):
            writer.write(name, [Envelope(b"m", producer="till", sequence=9)])
    monkeypatch.setattr("persistence.kafka.writer.former_ends", lambda *_: {TopicPartition(name, 0): 3})
    with pytest.raises(SequenceLost, match=r"up to offset 3, .*below 5: Kafka has lost records"):
        DeduplicatingWriter("gateway", [name], settings, store)


def test_a_snapshot_of_records_that_kafka_has_lost_judges_nothing(settings: KafkaSettings, topic: Make) -> None:
    name, store = topic(1, "orders"), fresh_store()
    SequenceSnapshots(store, "gateway").save(name, 0, Snapshot(50, {"till": 49}))
    with pytest.raises(SequenceLost, match=r"up to offset 0,.*below 50: Kafka has lost"):
        DeduplicatingWriter("gateway", [name], settings, store)


def test_a_writer_whose_topic_is_created_again_calls_nothing_a_duplicate_that_the_topic_lacks(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    name = topic(1, "orders")
    sent = [Envelope(b"m", producer="till", sequence=one) for one in range(3)]
    with DeduplicatingWriter("gateway", [name], settings, fresh_store()) as writer:
        assert writer.write(name, sent) == ["accepted"] * 3
        topics.delete([name])
        topics.create(name, 1)
        for some in (sent, [Envelope(b"m", producer="till", sequence=9)]):
            with pytest.raises(BrokerError, match=r"created again.*Make a new writer"):
                writer.write(name, some)


def test_a_republished_message_has_no_number_in_the_maps_before_and_after_a_recovery(
    settings: KafkaSettings, topic: Make
) -> None:
    name, store = topic(1, "orders"), fresh_store()
    relayed = Envelope(b"m", producer="till", sequence=5, chain=(Hop("raw", 0, 3, via="relay"),))
    for _ in range(2):
        with DeduplicatingWriter("gateway", [name], settings, store) as writer:
            assert writer.write(name, [relayed]) == writer.write(name, [relayed]) == ["accepted"]
            assert writer.persisted(name, 0) == {}


def test_what_a_writer_could_not_abort_is_not_taken_for_written(
    settings: KafkaSettings, topic: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic(1, "orders")
    small, large = (Envelope(b"m" * size, producer="till", sequence=size) for size in (1, 1 << 21))
    with DeduplicatingWriter("gateway", [name], settings, fresh_store()) as writer:
        with monkeypatch.context() as broken:
            broken.setattr(TransactionalProducer, "_patiently", unanswered)
            with pytest.raises(BrokerError, match="aborting"):
                writer.write(name, [small, large])
        with pytest.raises(BrokerError, match="aborting"):
            writer.write(name, [small])
    DeduplicatingWriter("gateway", [name], settings, fresh_store()).close()  # it ends the open transaction
    assert written(settings, name) == []


def unanswered(_producer: TransactionalProducer, _call: Any, doing: str, _timeout: float | None = None) -> None:
    """Behave as if the coordinator did not answer."""
    raise BrokerUnavailable(f"{doing}: no answer", "Try again")


def deleted(settings: KafkaSettings, name: str, *, before: int) -> None:
    """Delete the first records of the topic, as retention does."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(settings.client())
    [future] = admin.delete_records([TopicPartition(name, 0, before)]).values()
    assert future.result().low_watermark == before
