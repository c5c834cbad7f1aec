"""`headwater trace` on a real broker."""

import json
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from envelope import Envelope, Hop, encode
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Message, Topics
from tests.support.cli import run as headwater

pytestmark = [pytest.mark.integration, pytest.mark.slow]


class Chain:
    """Raw records, each wrapped into a second topic, the last one twice and once with a false offset."""

    def __init__(self, settings: KafkaSettings, raw: str, legs: str) -> None:
        self.raw, self.legs = raw, legs
        topic_id = Topics(settings).topic_ids([raw])[raw]
        hops = [Hop(raw, 0, at, via="wrap", index=0, count=1, topic_id=topic_id) for at in (0, 1, 1, 99)]
        with AcknowledgedProducer(settings) as producer:
            producer.send_many(raw, [Message(value=b"raw", key=b"N%d" % at) for at in range(2)])
            producer.flush()
            producer.send_many(
                legs, [Message(value=encode(Envelope(b"{}", (hop,))), key=b"N%d" % min(hop.offset, 1)) for hop in hops]
            )
            producer.flush()


@pytest.fixture
def chain(settings: KafkaSettings, topic: Callable[..., str]) -> Chain:
    return Chain(settings, topic(name="raw"), topic(name="legs"))


@pytest.fixture
def trace(
    kafka: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = headwater(monkeypatch, "trace", "--bootstrap", kafka, *arguments)
        return (code, *capsys.readouterr())

    return run


def test_a_chain_is_shown_from_the_root_and_its_truth_is_the_exit_code(
    chain: Chain, trace: Callable[..., tuple[int, str, str]], settings: KafkaSettings, kafka: str
) -> None:
    code, out, err = trace(f"{chain.legs}:0:1", "--json")
    steps = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [(step["topic"], step["offset"], step["found"], step["key"]) for step in steps] == [
        (chain.raw, 1, "found", "N1"),
        (chain.legs, 1, "found", "N1"),
    ]

    code, out, err = trace(f"{chain.legs}:0:3")
    assert (code, err) == (4, f"{chain.raw}:0:99: the log ends below this offset\n")
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [
        [f"{chain.raw}:0:99", "beyond"],
        [f"{chain.legs}:0:3", "found"],
    ]

    admin = AdminClient({"bootstrap.servers": kafka})
    [deleted] = admin.delete_records([TopicPartition(chain.raw, 0, 1)]).values()
    deleted.result(timeout=60)
    code, out, err = trace(f"{chain.legs}:0:0")
    assert (code, err) == (0, "not checked, because it cannot be read any more: 1 record\n")
    assert out.splitlines()[2].split()[:2] == [f"{chain.raw}:0:0", "expired"]

    Topics(settings).delete([chain.raw])
    code, out, _ = trace(f"{chain.legs}:0:1", "--json")
    assert (code, json.loads(out.splitlines()[0])["found"]) == (0, "gone")


@pytest.mark.parametrize("record", ["legs", "legs:0", "legs:0:-1", "legs:x:1", ":0:1", "legs:0:１"])
def test_malformed_coordinates_are_refused(record: str, trace: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = trace("--", record)
    assert (code, err) == (2, f"headwater: {record!r}: write TOPIC:PARTITION:OFFSET, for example orders:0:1742\n")


def test_a_record_that_does_not_exist_is_refused(chain: Chain, trace: Callable[..., tuple[int, str, str]]) -> None:
    for record, why in (
        (f"{chain.legs}:0:4", "no record has this offset yet, or there is no such partition. Give a lower one"),
        (f"{chain.legs}:1:0", "no record has this offset yet, or there is no such partition. Give a lower one"),
        ("no-such-topic:0:0", "there is no such topic. Correct its name"),
    ):
        code, out, err = trace(record)
        assert (code, out) == (3, "")
        assert err.startswith(f"headwater: {record}: {why}")
