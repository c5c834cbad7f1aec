"""Republishers in the tests, in this process and as processes: their inputs and expected outputs."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from envelope import Envelope, Hop, decode, encode
from jobs.republish import Republisher, Statistics, identity
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.kafka.reading import assign
from tests.integration.republish_process import split

ROOT = Path(__file__).parents[2]
Make = Callable[..., str]
"""Creates a topic: the fixture `topic`."""

INPUTS = [(b"k%d" % (i % 50), b"%d:%s" % (i, b",".join([b"a", b"b", b"c"][: i % 4]))) for i in range(2000)]
POISON = [(b"p%d" % i, b"poison %d" % i) for i in range(7)]


def produce(settings: KafkaSettings, topic: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> None:
    with AcknowledgedProducer(settings) as producer:
        for key, value in records:
            producer.send(topic, value, key)
        producer.flush()


def wrapped(records: Sequence[tuple[bytes | None, bytes]]) -> list[tuple[bytes | None, bytes]]:
    """The records in envelopes of one hop, as a republisher forwards them in compiled code."""
    hops = [(Hop("raw", 0, number),) for number in range(len(records))]
    return [(key, encode(Envelope(value, hop, key=key))) for (key, value), hop in zip(records, hops, strict=True)]


def read_all(settings: KafkaSettings, topic: str) -> list[Any]:
    """Every record that the topic contains now."""
    left = {(t, p): m.high for (t, p), m in Topics(settings).marks([topic]).items() if m.high > m.low}
    consumer = Consumer(settings.client(group_id=uuid.uuid4().hex, enable_auto_commit=False, enable_partition_eof=True))
    assign(consumer, [TopicPartition(t, p, OFFSET_BEGINNING) for t, p in left])
    found: list[Any] = []
    while left:
        got = consumer.consume(1000, 0.2)
        message: Any
        for message in got:
            if message.error():
                left.pop((message.topic(), message.partition()), None)
            else:
                found.append(message)
    consumer.close()
    return found


def run(settings: KafkaSettings, transform: Callable = identity, **arguments: Any) -> Statistics:
    arguments = {"name": "r", "group": uuid.uuid4().hex, **arguments}
    return Republisher(transform, settings=settings, **arguments).run(until_caught_up=True)


def process(faults: str = "", stderr: int | None = None, **arguments: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "HEADWATER_FAULT": faults, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.integration.republish_process", json.dumps(arguments)]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def killed_and_repeated(fault: str, arguments: dict[str, Any]) -> None:
    """Run a republisher until a fault kills it, then again to its end."""
    first = process(fault, **arguments)
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    second = process(**arguments)
    second.communicate(timeout=60)
    assert second.returncode == 0


def outputs(settings: KafkaSettings, topic: str) -> dict[tuple, list[bytes]]:
    """Root coordinates and fan-out index -> payloads of every copy."""
    copies: dict[tuple, list[bytes]] = defaultdict(list)
    for message in read_all(settings, topic):
        envelope = decode(message.value())
        hop = envelope.chain[0]
        assert (message.key(), hop.rekeyed) == (envelope.key, True)
        copies[hop.topic, hop.partition, hop.offset, hop.index, hop.count].append(message.value())
    return copies


def expected(settings: KafkaSettings, topic: str) -> dict[tuple, Any]:
    """The expected outputs for the records of a topic, by root and index."""
    wanted: dict[tuple, Any] = {}
    for message in read_all(settings, topic):
        try:
            made = split(FakeRecord(message.value()))  # type: ignore[arg-type]
        except ValueError:
            continue
        for index, output in enumerate(made):
            wanted[topic, message.partition(), message.offset(), index, len(made)] = output.payload
    return wanted


class FakeRecord:
    def __init__(self, payload: bytes) -> None:
        self.payload = payload
