"""`headwater plan`: what a run would start from, seen without one, on a real broker."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aggregations import Fields, Flow, Topic, count
from aggregations.definition.source import Json
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.cli.errors import Exit
from jobs.stack import ports
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.registry import open_store
from tests.support.cli import run
from tests.support.pure import Record

pytestmark = pytest.mark.integration

FLOWS = """
from aggregations import Fields, Flow, Topic, count
from aggregations.definition.source import Json

source = Flow("fleet").source(Topic({topic!r}, Json({{"tail": str}}), envelope=False))
flow = source.aggregate("aircraft", "tail", Fields(n=count()))
changed = source.aggregate("aircraft", "tail", Fields(seen=count()).added(seen=0))
renamed = source.aggregate("aircraft", "tail", Fields(seen=count()))
"""


class Fleet:
    """A topic of ten records, and an active run that has folded some of them."""

    def __init__(self, kafka: str, topic: str, directory: Path) -> None:
        self.settings, self.topic = KafkaSettings(kafka), topic
        self.module = f"flows_{uuid.uuid4().hex}"  # imported once in this process
        (directory / f"{self.module}.py").write_text(FLOWS.format(topic=topic))
        self.url = f"sqlite://{directory}/states.db"
        self.flow = Flow("fleet").source(Topic(topic, Json({"tail": str}), envelope=False))
        self.flow = self.flow.aggregate("aircraft", "tail", Fields(n=count()))
        with AcknowledgedProducer(self.settings) as producer:
            for _ in range(10):
                producer.send(topic, b'{"tail": "N1"}', b"N1")
            producer.flush()
        self.topic_id = Topics(self.settings).topic_ids([topic])[topic]
        self.runner = MemoryRunner(self.flow, bind(self.flow, {}, self.url))

    def fold(self, *offsets: int) -> None:
        value = b'{"tail": "N1"}'
        self.runner.process(Record(self.topic, 0, one, b"N1", value, topic_id=self.topic_id) for one in offsets)


@pytest.fixture
def fleet(kafka: str, topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.chdir(tmp_path)
    return Fleet(kafka, topic(name="legs"), tmp_path)


@pytest.fixture
def plan(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def planned(flow: str = "flow", *options: str, bootstrap: str = "") -> int:
        address = bootstrap or fleet.settings.bootstrap
        return run(
            monkeypatch,
            "plan",
            f"{fleet.module}:{flow}",
            "--store",
            fleet.url,
            "--bootstrap",
            address,
            "--json",
            *options,
        )

    return planned


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    [line] = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)["plan"]
    return found


def test_a_plan_shows_where_a_run_would_start_and_the_run_at_work_goes_on(
    fleet: Fleet, plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.fold(0, 1, 2, 3)
    Topics(fleet.settings).alter_group_offsets("lag", {(fleet.topic, 0): 3})
    store, ref = open_store(fleet.url), fleet.runner.run.ref
    before = (store.installed_epoch(ref), store.load_manifest(ref))
    assert plan("flow", "--group", "lag") == Exit.DONE
    [partition] = (found := shown(capsys))["partitions"]
    assert (found["topic"], found["lag"], found["findings"]) == (fleet.topic, [6], [])
    at = {"partition": 0, "start": 4, "group": 3, "low": 0, "high": 10, "skipped": 0}
    assert partition == {**at, "stores": {"aircraft": 4}, "leader_epoch": 0, "branches": []}
    assert (store.installed_epoch(ref), store.load_manifest(ref)) == before
    fleet.fold(*range(4, 10))
    assert fleet.runner.results("aircraft") == {b"N1": {"n": 10}}


def test_a_start_position_is_for_a_generation_that_has_not_begun(
    fleet: Fleet, plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.fold(0, 1, 2, 3)
    assert plan("flow", "--start", "0:7") == Exit.DONE
    found = shown(capsys)
    assert (found["lag"], found["starting_offsets"], found["start_unused"]) == ([6], None, True)
    assert plan("flow", "--start", "0:7", "--generation", "2") == Exit.DONE
    found = shown(capsys)
    assert (found["lag"], found["starting_offsets"], found["start_unused"]) == ([3], {"0": 7}, False)
    assert plan("flow", "--start", "0:11", "--generation", "2") == Exit.USAGE
    assert "start=0:11: the log of" in capsys.readouterr().err


def test_a_generation_that_never_ran_begins_at_the_beginning(
    fleet: Fleet, plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.fold(0, 1)
    assert plan("flow", "--generation", "2") == Exit.DONE
    assert [one["start"] for one in shown(capsys)["partitions"]] == [None]


def test_what_a_run_would_be_refused_for_ends_a_plan_with_the_same_code_and_words(
    fleet: Fleet, plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.fold(0)
    assert plan("changed") == Exit.REFUSED
    assert "--accept definition" in capsys.readouterr().err
    assert plan("renamed", "--accept", "definition") == Exit.REFUSED
    assert "field 'seen' is missing" in capsys.readouterr().err
    assert plan("changed", "--accept", "definition") == Exit.DONE
    capsys.readouterr()
    fleet.fold(50)
    assert plan() == Exit.REFUSED
    captured = capsys.readouterr()
    assert "--accept beyond-end" in captured.err
    planned, refused = map(json.loads, captured.out.splitlines())
    assert [one["risk"] for one in planned["plan"]["findings"]] == ["beyond-end"]
    assert "--accept beyond-end" in refused["refused"]
    assert plan("flow", "--accept", "no-such-risk") == Exit.USAGE
    assert plan("flow", "--dead-letters", "no-such-topic") == Exit.REFUSED


def test_a_broker_that_does_not_answer_fails_a_plan(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = f"{ports.LOOPBACK}:{ports.remembered(tmp_path, ['kafka'])['kafka']}"
    assert plan("flow", bootstrap=nowhere) == Exit.FAILED
    assert nowhere in capsys.readouterr().err
