"""The commands of a flow with two sources, on a real broker: describe, plan, inspect, redrive and discard."""

import json
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope.deadletter import DeadLetterHeaders, Form, dead_letter_record
from jobs.cli.errors import Exit
from jobs.loading import load_flow
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from tests.support.cli import run
from tests.support.pure import Record

pytestmark = pytest.mark.integration

FLOWS = """
from aggregations import Fields, Flow, Json, Topic, count

ready = Topic({ready!r}, Json({{"part": str, "station": str}}), envelope=False)
results = Topic({results!r}, Json({{"part": str, "torque": int}}), envelope=False)
flow = Flow("line").source(ready, results).aggregate("part", "part", Fields(n=count(), results=count("torque")))
one = Flow("line").source(ready).aggregate("part", "part", Fields(n=count(), results=count("station")))
"""


class Line:
    """Two topics, their dead letters, and a store that holds a part of both."""

    def __init__(self, kafka: str, ready: str, results: str, dead: str, directory: Path) -> None:
        self.settings, self.ready, self.results, self.dead = KafkaSettings(kafka), ready, results, dead
        self.module = f"flows_{uuid.uuid4().hex}"  # imported once in this process
        (directory / f"{self.module}.py").write_text(FLOWS.format(ready=ready, results=results))
        self.url = f"sqlite://{directory}/states.db"
        self.values = {
            ready: [b'{"part": "p", "station": "left"}'] * 3,
            results: [b'{"part": "p", "torque": 5}', b'{"part": "p", "torque": "five"}'] * 2,
        }
        with AcknowledgedProducer(self.settings) as producer:
            for topic, values in self.values.items():
                for value in values:
                    producer.send(topic, value, b"p")
            producer.flush()
        ids = Topics(self.settings).topic_ids([ready, results])
        flow = load_flow(f"{self.module}:flow")
        with closing(MemoryRunner(flow, bind(flow, {}, self.url), topic_ids=ids)) as runner:
            runner.process(
                Record(topic, 0, offset, b"p", self.values[topic][offset], topic_id=ids[topic])
                for topic, offset in ((ready, 0), (results, 0), (results, 1))
            )
            with AcknowledgedProducer(self.settings) as producer:
                for one in runner.dead_letters:
                    facts = DeadLetterHeaders(
                        *(one.record.topic, one.record.partition, one.record.offset, one.reason, ids[one.record.topic]),
                        stage=one.stage,
                        application="line",
                        form=Form.PAYLOAD,
                    )
                    letter = dead_letter_record(facts, one.record.key, one.record.value, (), 1 << 20)
                    producer.send(dead, letter.value, letter.key, letter.headers)
                producer.flush()


@pytest.fixture
def line(kafka: str, topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.chdir(tmp_path)
    return Line(kafka, topic(name="ready"), topic(name="results"), topic(name="dead"), tmp_path)


@pytest.fixture
def command(line: Line, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def called(name: str, *options: str, flow: str = "flow", code: int = Exit.DONE) -> list[dict[str, Any]]:
        kafka = [] if name in ("describe", "inspect") else ["--bootstrap", line.settings.bootstrap]
        store = [] if name in ("describe", "redrive") else ["--store", line.url]
        which = [] if name == "redrive" else [f"{line.module}:{flow}"]
        capsys.readouterr()
        assert run(monkeypatch, name, *which, *options, *store, *kafka, "--json") == code
        return [json.loads(one) for one in capsys.readouterr().out.splitlines()]

    return called


def test_describe_shows_both_topics_and_where_they_meet(line: Line, command: Callable[..., Any]) -> None:
    [found] = command("describe")
    assert [(step["step"], step["what"]) for step in found["steps"][:3]] == [
        ("source", f"{line.ready}, without envelopes"),
        ("source", f"{line.results}, without envelopes"),
        ("merge", f"{line.ready}, {line.results}"),
    ]


def test_plan_shows_where_each_topic_continues(line: Line, command: Callable[..., Any]) -> None:
    plans = [one["plan"] for one in command("plan")]
    assert [(one["topic"], one["lag"], one["partitions"][0]["start"]) for one in plans] == [
        (line.ready, [2], 1),
        (line.results, [2], 2),
    ]


def test_a_start_position_is_for_one_topic(line: Line, command: Callable[..., Any]) -> None:
    plans = command("plan", "--start", f"{line.results}=latest", "--generation", "2")
    assert [one["plan"]["lag"] for one in plans] == [[3], [0]]
    plans = command("plan", "--start", f"{line.results}=0:1", "--start", f"{line.ready}=0:2", "--generation", "2")
    assert [one["plan"]["starting_offsets"] for one in plans] == [{"0": 2}, {"0": 1}]
    command("plan", "--start", "0:1", "--generation", "2", code=Exit.USAGE)
    command("plan", "--start", "other=latest", code=Exit.USAGE)


def test_a_flow_without_one_of_its_sources_is_refused(command: Callable[..., Any]) -> None:
    [*_, last] = command("plan", flow="one", code=Exit.REFUSED)
    assert last == {"refused": "definition"} or "definition" in str(last)


def test_inspect_shows_the_lanes_of_both_topics(line: Line, command: Callable[..., Any]) -> None:
    [state] = command("inspect", "--key", "p")
    assert state["state"] == {"n": 2, "results": 1}
    assert {name.partition(":")[0] for name in state["lanes"]} == {line.ready, line.results}


def test_a_dead_letter_returns_to_its_topic_or_is_discarded(line: Line, command: Callable[..., Any]) -> None:
    [found] = command("redrive", "--from", line.dead)
    assert [one["topic"] for one in found["redriven"]] == [line.results]
    [found] = command("discard", "--from", line.dead, "--apply")
    assert [(one["topic"], one["count"]) for one in found["discarded"]] == [(line.results, 1)]
    flow = load_flow(f"{line.module}:flow")
    with closing(MemoryRunner(flow, bind(flow, {}, line.url))) as runner:
        assert runner.run.ledger.listed == {}
        assert runner.run.start == {(line.ready, 0): 1, (line.results, 0): 2}
