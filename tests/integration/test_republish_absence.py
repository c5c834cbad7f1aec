"""Topics of a republisher that are away: waited for at the start and meanwhile, and read from their beginning when they are new."""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from envelope import decode
from jobs.cli.errors import Exit
from jobs.republish import InputTopics, Republisher, Statistics, identity
from jobs.republish.absence import Unsafe
from persistence.kafka import BrokerRefused, KafkaSettings, TopicMissing, Topics
from tests.support.cli import run as headwater
from tests.support.republish import INPUTS, Make, produce, read_all, run

pytestmark = pytest.mark.integration


@pytest.fixture
def names(topics: Topics) -> Iterator[dict[str, str]]:
    """Names of three topics that do not exist."""
    found = {role: f"{role}-{uuid.uuid4().hex}" for role in ("source", "target", "dead_letter")}
    yield found
    topics.delete(list(found.values()))


@contextmanager
def running(settings: KafkaSettings, names: dict[str, str], **arguments: Any) -> Iterator[Republisher]:
    """A republisher that runs until the block ends, and has no error then."""
    republisher = Republisher(
        identity,
        source=InputTopics.of(names["source"], "raw"),
        target=names["target"],
        dead_letter=names["dead_letter"],
        name="r",
        group=uuid.uuid4().hex,
        settings=settings,
        max_wait=0.1,
        **arguments,
    )
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            republisher.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield republisher
    finally:
        republisher.stop()
        thread.join(60)
    assert errors == []
    assert not thread.is_alive()


def until(condition: Callable[[], bool], republisher: Republisher) -> None:
    """Wait for what the republisher does in its own time."""
    ended = threading.Event()
    for _ in range(1200):
        if condition():
            return
        ended.wait(0.1)
    raise AssertionError(f"it did not come to that: {republisher.statistics}")


@pytest.mark.parametrize("away", ["source", "target", "dead_letter"])
def test_a_topic_that_does_not_exist_yet_is_waited_for_and_shown(
    away: str, settings: KafkaSettings, topics: Topics, names: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for role, name in names.items():
        if role != away:
            topics.create(name)
    with running(settings, names) as republisher:
        until(lambda: republisher.statistics.waiting == (names[away],), republisher)
        assert republisher.statistics.as_dict()["waiting"] == [names[away]]
        topics.create(names[away])
        produce(settings, names["source"], INPUTS[:20])
        until(lambda: republisher.statistics.consumed == 20, republisher)
        assert (republisher.statistics.waiting, republisher.statistics.waited > 0) == ((), True)
    assert len(read_all(settings, names["target"])) == 20
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(f"topic {names[away]} does not exist; waiting for" in line for line in said)
    assert any("all topics exist after" in line for line in said)


def test_a_source_that_is_deleted_is_waited_for_and_the_new_one_is_read_from_its_beginning(
    settings: KafkaSettings, topics: Topics, names: dict[str, str]
) -> None:
    ids = [topics.create(names["source"]).topic_id]
    for role in ("target", "dead_letter"):
        topics.create(names[role])
    produce(settings, names["source"], INPUTS[:20])
    with running(settings, names) as republisher:
        until(lambda: republisher.statistics.consumed == 20, republisher)
        topics.delete([names["source"]])
        until(lambda: republisher.statistics.waiting == (names["source"],), republisher)
        ids.append(topics.create(names["source"]).topic_id)
        produce(settings, names["source"], INPUTS[:30])
        until(lambda: republisher.statistics.consumed == 50, republisher)
    hops = [decode(message.value()).chain[0] for message in read_all(settings, names["target"])]
    assert [(hop.topic_id, hop.offset) for hop in hops] == [
        *((ids[0], offset) for offset in range(20)),
        *((ids[1], offset) for offset in range(30)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("away", "records"), [("target", INPUTS[20:40]), ("dead_letter", [(b"k", b"")] * 20)])
def test_an_output_that_is_deleted_is_waited_for_and_nothing_is_left_out(
    away: str, records: list[Any], settings: KafkaSettings, topics: Topics, names: dict[str, str]
) -> None:
    for name in names.values():
        topics.create(name)
    produce(settings, names["source"], [*INPUTS[:19], (b"k", b"")])
    with running(settings, names) as republisher:
        until(lambda: republisher.statistics.consumed == 20, republisher)
        topics.delete([names[away]])
        produce(settings, names["source"], records)
        until(lambda: republisher.statistics.waiting == (names[away],), republisher)
        assert republisher.statistics.consumed == 20
        topics.create(names[away])
        until(lambda: republisher.statistics.consumed == 40, republisher)
    assert len(read_all(settings, names[away])) == 20


def test_the_wait_has_an_end_and_a_stop_ends_it(settings: KafkaSettings, topics: Topics, names: dict[str, str]) -> None:
    for role in ("target", "dead_letter"):
        topics.create(names[role])
    arguments: dict[str, Any] = {"source": names["source"], "target": names["target"]}
    with pytest.raises(TopicMissing, match=rf"topic {names['source']} does not exist; waited \d+ s\. Create"):
        run(settings, topic_wait=2, **arguments)
    with running(settings, names) as republisher:
        until(lambda: republisher.statistics.waiting == (names["source"],), republisher)


def test_the_command_waits_as_long_as_it_is_told_and_says_so_in_its_lines(
    kafka: str,
    names: dict[str, str],
    topics: Topics,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topics.create(names["target"])
    command = ["republish", "jobs.republish.record:identity", "--from", names["source"], "--to", names["target"]]
    command += ["--via", "v", "--bootstrap", kafka, "--until-caught-up", "--json", "--topic-wait"]
    assert headwater(monkeypatch, *command, "0") == Exit.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert f"topic {names['source']}" in err
    assert headwater(monkeypatch, *command, "3s") == Exit.FAILED
    out, err = capsys.readouterr()
    assert [json.loads(line)["waiting"] for line in out.splitlines()] == [[names["source"]]]
    assert "waited 3 s" in err


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_source_is_refused_unless_that_is_accepted(
    policy: str, settings: KafkaSettings, topic: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = topic(1, "in", cleanup_policy=policy), topic(1, "out", cleanup_policy="compact")
    produce(settings, source, INPUTS[:20])
    arguments: dict[str, Any] = {"source": InputTopics.of(source, "raw"), "target": target}
    with pytest.raises(Unsafe, match=rf"{source} is compacted.*--accept compacted-source"):
        run(settings, **arguments)
    assert run(settings, accept=["compacted-source"], **arguments).consumed == 20
    assert any("compacted-source: topic" in record.getMessage() for record in caplog.records)


def test_the_command_refuses_a_compacted_source_with_the_code_for_it(
    kafka: str, topic: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = topic(1, "in", cleanup_policy="compact"), topic(1, "out")
    command = ["republish", "jobs.republish.record:identity", "--from", source, "--to", target, "--via", source]
    command += ["--bootstrap", kafka, "--until-caught-up"]
    assert headwater(monkeypatch, *command) == Exit.REFUSED
    assert "--accept compacted-source" in capsys.readouterr().err
    assert headwater(monkeypatch, *command, "--accept", "compacted-source") == 0
    assert headwater(monkeypatch, *command, "--accept", "everything") == Exit.USAGE
    assert "unknown risk everything; choose from compacted-source, grown-undrained" in capsys.readouterr().err


def test_a_refusal_is_no_absence_and_ends_the_service_at_once(settings: KafkaSettings, topic: Make) -> None:
    source, target = topic(1, "in"), topic(1, "out")
    produce(settings, source, [(b"k", b"junk")])
    told: list[Statistics] = []
    republisher = Republisher(identity, source=source, target=target, name="r", settings=settings)
    with pytest.raises(BrokerRefused, match="cannot be republished"):
        republisher.run(progress=told.append)
    assert republisher.statistics.waited == 0
