"""The example `without_duplicates.py` on a real broker, killed at every step of its commit."""

import os
import random
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from envelope.filters import Arrival, FilterStates, SequenceFilter, from_header
from persistence.kafka import AcknowledgedProducer, KafkaSettings

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PARTITIONS = 2
KILLS = [
    "publish.before",
    "publish.after@2",
    "persist.before@2",
    "persist.after@2",
    "manifest.before",
    "manifest.after@2",
]


def sent(seed: int) -> list[int]:
    """Sequence numbers of a partition: 1, 2, 3, ..., some of them sent again after a failure."""
    draw, numbers = random.Random(seed), [1]
    while len(numbers) < 2500:
        back = draw.randrange(1, 20) if draw.random() < 0.02 else 0
        following = max(1, numbers[-1] + 1 - back)
        numbers += range(following, following + draw.randrange(1, 50))
    return numbers


def read(bootstrap: str, topic: str) -> list[Arrival]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex, "enable.auto.commit": False})
    ends = sum(consumer.get_watermark_offsets(TopicPartition(topic, part))[1] for part in range(PARTITIONS))
    consumer.assign([TopicPartition(topic, part, OFFSET_BEGINNING) for part in range(PARTITIONS)])
    found: list[Arrival] = []
    while len(found) < ends:
        found += [
            Arrival(topic, one.partition(), one.offset(), one.key(), one.value(), headers=tuple(one.headers()))
            for one in consumer.consume(ends - len(found), 10)
        ]
    consumer.close()
    return found


def test_killed_at_every_step_the_output_has_every_record_in_order_and_copies_only_of_what_was_being_published(
    kafka: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target = topic(PARTITIONS, "input"), topic(PARTITIONS, "output")
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        for part in range(PARTITIONS):
            for number in sent(part):
                producer.send(source, b"%d" % number, b"incident", [("sequence", b"%d" % number)], part)
        producer.flush()
    program = [sys.executable, str(ROOT / "examples" / "without_duplicates.py"), source, target]
    command = [*program, f"sqlite://{tmp_path}/states.db"]
    environment = {**os.environ, "HEADWATER_KAFKA_BOOTSTRAP": kafka, "PYTHONPATH": str(ROOT)}
    codes = []
    for kill in [*KILLS, ""]:
        ran = subprocess.run(
            command,
            env={**environment, "HEADWATER_FAULT": kill} if kill else environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        codes.append(ran.returncode)
        assert ran.returncode in (0, -9), ran.stderr
    assert codes[-1] == 0
    assert codes.count(-9) == len(KILLS)

    output = read(kafka, target)
    states = FilterStates(SequenceFilter(from_header("sequence")))
    for part in range(PARTITIONS):
        mine = [one for one in output if one.partition == part]
        expected = list(range(1, max(sent(part)) + 1))
        assert [int(one.value) for one in mine if states.passes(one)] == expected
        assert len(mine) > len(expected)  # a kill between two steps repeats what was published
