"""Kafka's proposal "Idempotent Producer": consumers that also produce, and the split brain."""

import json
import uuid

import pytest

from jobs.copying import Copy, TopicRecords
from jobs.copying.positions import Positions
from jobs.republish import InputTopics
from persistence.kafka import KafkaSettings, ProducerFenced
from tests.support.republish import Make, produce
from tests.support.sessions import killed, ran, written

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(kafka: str) -> KafkaSettings:
    return KafkaSettings(kafka)


@pytest.fixture
def positions(topic: Make) -> str:
    return topic(1, "positions", cleanup_policy="compact")


def test_a_copy_process_saves_its_input_position_and_its_output_ids_and_resumes_without_duplicates(
    settings: KafkaSettings, topic: Make, positions: str
) -> None:
    """Transitivity, for a source that is a topic: its output ids are the hops."""
    source, target, name = topic(2, "in"), topic(2, "out"), f"copy-{uuid.uuid4().hex}"
    produce(settings, source, [(b"k%d" % (number % 9), b"%d" % number) for number in range(300)])
    arguments = {
        "bootstrap": settings.bootstrap,
        "kind": "topic",
        "source": {"topic": source},
        "name": name,
        "target": target,
        "positions": positions,
        "batch_size": 50,
        "until_caught_up": True,
    }
    killed("copy_process", "copy:commit.after@3", **arguments)
    saved = Positions(settings, positions).read(name)
    assert saved
    before = written(settings, target)
    assert sum(saved["position"]["topics"][source]["offsets"].values()) == len(before)
    assert 0 < len(before) <= 150  # three batches; the end of a partition takes the place of a record in one
    assert ran("copy_process", **arguments)[0] == 0
    got = written(settings, target)
    assert sorted(int(one.payload) for one in got) == [*range(300)]


def test_the_ids_of_an_upstream_file_are_saved_with_its_position(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, name, file = topic(1, "out"), f"copy-{uuid.uuid4().hex}", tmp_path_factory.mktemp("lines") / "lines"
    file.write_bytes(b"one\ntwo\nthree\n")
    arguments = {
        "bootstrap": settings.bootstrap,
        "kind": "lines",
        "source": str(file),
        "name": name,
        "target": target,
        "positions": positions,
        "until_caught_up": True,
    }
    code, said = ran("copy_process", **arguments)
    saved = Positions(settings, positions).read(name)
    assert saved
    assert (code, json.loads(said[-1])["sequence"], saved["sequence"], saved["position"]["offset"]) == (0, 8, 8, 14)


def test_of_two_processes_with_the_same_input_and_output_only_the_newer_one_writes(
    settings: KafkaSettings, topic: Make, positions: str
) -> None:
    """Fencing: a false positive of the failure detection, the split brain."""
    source, target, name = topic(1, "in"), topic(1, "out"), f"copy-{uuid.uuid4().hex}"
    produce(settings, source, [(b"k", b"%d" % number) for number in range(100)])

    def records() -> TopicRecords:
        return TopicRecords(InputTopics.of(source, "raw"))

    class Replaced(TopicRecords):
        """The other process begins and finishes when this one has read and produced, and not yet committed."""

        def check(self) -> None:
            Copy(name, records(), target, settings, positions=positions).run(until_caught_up=True)

    older = Copy(name, Replaced(InputTopics.of(source, "raw")), target, settings, positions=positions)
    with pytest.raises(ProducerFenced):
        older.run(until_caught_up=True)
    assert [int(one.payload) for one in written(settings, target)] == [*range(100)]
