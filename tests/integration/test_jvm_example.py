"""The Java producer and republisher of examples/jvm: the conformance vectors, and a flow that reads what they write."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from aggregations import Fields, Flow, Topic, count
from aggregations.local import run_local
from envelope.filters import EventIdFilter, Filter, ProducerFilter, from_envelope
from jobs import blame
from persistence.kafka import KafkaSettings, Topics
from tests.support.flows import counted
from tests.support.jvm import compiled
from tests.support.world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FILE = Path(__file__).parents[2] / "proto" / "headwater" / "envelope" / "v1" / "conformance.json"
VECTORS: Mapping[str, Any] = json.loads(FILE.read_text())
WORDS = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return compiled(tmp_path_factory.mktemp("jvm"))


def answers(program: list[str], questions: list[list[str]]) -> list[str]:
    """What the class `Conformance` says about each vector."""
    lines = "".join("\t".join(one) + "\n" for one in questions)
    done = subprocess.run([*program, "Conformance"], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in line.split("\t")) if line else {}


def flat(envelope: Mapping[str, Any]) -> dict[str, str]:
    """The fields of an expected envelope as the example writes them; an empty payload is a default."""
    found: dict[str, str] = {}
    for name, value in envelope.items():
        if name == "chain":
            for i, hop in enumerate(value):
                found |= {f"chain.{i}.{field}": text(one) for field, one in hop.items()}
        elif name != "payload" or value:
            found[name] = text(value)
    return found


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_bytes_of_an_envelope_give_its_fields_or_a_reason_code(program: list[str]) -> None:
    vectors = VECTORS["envelopes"]
    found = answers(program, [["envelope", one["bytes"]] for one in vectors])
    wanted = {one["name"]: {"reason": one["reason"]} if "reason" in one else flat(one["envelope"]) for one in vectors}
    assert {one["name"]: fields(line) for one, line in zip(vectors, found, strict=True)} == wanted


def test_a_hop_is_appended_byte_by_byte(program: list[str]) -> None:
    vectors = VECTORS["appended_hops"]
    asked = [["hop", one["bytes"], *(f"{name}={value}" for name, value in one["hop"].items())] for one in vectors]
    assert answers(program, asked) == [one["result"] for one in vectors]


def test_records_give_lanes_and_positions(program: list[str]) -> None:
    records = [
        (one, expected)
        for vector in VECTORS["lineages"]
        for one, expected in zip(vector["records"], vector["expected"], strict=True)
    ]
    asked = [
        ["lineage", one["topic"], *map(str, (one["partition"], one["offset"], one["value"], one["rekeyed"]))]
        for one, _ in records
    ]
    for line, (_, expected) in zip(answers(program, asked), records, strict=True):
        if "reason" in expected:
            assert fields(line) == {"reason": expected["reason"]}
            continue
        position = ",".join(map(str, expected["position"]))
        assert fields(line) == {"lane": expected["lane"], "group": expected["group"], "position": position}


def recorded(settings: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """A filter's record as the example is asked: with the number or the stamp that an extractor has found."""
    value = {} if settings.get("stamp") == "envelope" else json.loads(bytes.fromhex(record["value"]))
    headers = {name: bytes.fromhex(found).decode() for name, found in record.get("headers", ())}
    found = {name: record[name] for name in ("topic", "partition", "offset", "key") if record[name] is not None}
    found["time"] = value[settings["time"].removeprefix("value:")] if "time" in settings else record["timestamp_ms"]
    if settings.get("stamp") == "envelope":
        found["value"] = record["value"]
    elif settings["type"] == "producer":
        found |= {name: json.dumps(one) for name, one in value.items()}
    else:
        number = headers.get("id") if settings.get("id") == "header:id" else value.get("id")
        found |= {} if number is None else {"id": number}
    return [f"{name}={one}" for name, one in found.items()]


def test_records_give_the_rulings_and_states_of_the_sequence_and_the_producer_filter(program: list[str]) -> None:
    vectors = [one for one in VECTORS["filters"] if one["filter"]["type"] in ("sequence", "producer")]
    asked = []
    for one in vectors:
        asked.append(["filter", *(f"{name}={value}" for name, value in one["filter"].items())])
        asked += [["judge", *recorded(one["filter"], record)] for record in one["records"]]
        asked.append(["states"])
    found = iter(answers(program, asked))
    for one in vectors:
        assert [json.loads(next(found)) for _ in one["records"]] == one["rulings"], one["name"]
        assert json.loads(next(found)) == one["states"], one["name"]


@contextmanager
def running(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "rule", [ProducerFilter(), EventIdFilter(from_envelope("event_id"), timedelta(hours=1))], ids=lambda one: one.name
)
def test_a_flow_drops_what_the_producer_sends_again_after_a_crash(
    rule: Filter[Any], program: list[str], kafka: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    lines, dead = topic(partitions=2, name="lines"), topic(name="dead")
    sent = [WORDS[n % 7] for n in range(500)]
    for first, end in ((0, 300), (250, 500)):  # it does not know whether lines 250 to 299 are in the topic
        produce = [*program, "Produce", kafka, lines, "desk-1", str(first)]
        text = "\n".join(sent[first:end])
        done = subprocess.run(produce, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"{end - first}\n"), done.stderr
    flow = Flow("lines").source(Topic(lines)).deduplicate(rule)
    flow = flow.aggregate("words", "value", Fields(seen=count()))
    with closing(World(kafka, lines, dead, tmp_path, runner=run_local)) as world:
        report = world.run(flow)
        found = {key.decode(): state["seen"] for key, state in world.results(flow, "words").items()}
    assert found == Counter(sent)
    verdicts = report.verdicts[rule.name]
    assert (verdicts["accepted"], verdicts.total() - verdicts["accepted"]) == (500, 50)


def test_a_flow_counts_each_word_once_although_the_republisher_is_killed_and_sends_again(
    program: list[str], kafka: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    lines, words, dead = topic(partitions=2, name="lines"), topic(partitions=2, name="words"), topic(name="dead")
    sent = [" ".join(WORDS[(n * m) % 7] for m in range(n % 4 + 1)) for n in range(3_000)]
    produced = subprocess.run(
        [*program, "Produce", kafka, lines], input="\n".join(sent), capture_output=True, text=True, check=False
    )
    assert (produced.returncode, produced.stdout) == (0, "3000\n"), produced.stderr
    republish = [*program, "Republish", kafka, lines, words, f"splitter-{words}"]
    with running(republish) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()  # some of it is committed
        process.kill()
    settings = KafkaSettings(kafka)
    set_back(settings, f"splitter-{words}", lines)
    done = subprocess.run([*republish, "--until-caught-up"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    flow = counted(words, "columns")
    with closing(World(kafka, words, dead, tmp_path, runner=run_local)) as world:
        world.run(flow)
        found = {key.decode(): state["seen"] for key, state in world.results(flow, "payloads").items()}
        assert found == Counter(word for line in sent for word in line.split())
        world.check(flow)
        [hop] = blame(flow, kafka=settings).hops
    assert (hop.passage.via, hop.passage.source) == (f"splitter-{words}", lines)
    assert hop.resent > 0
    assert hop.records - hop.resent == sum(len(line.split()) for line in sent)


def set_back(settings: KafkaSettings, group: str, name: str) -> None:
    """Set the group's offsets back by 50 records, as if it had died before its last commits."""
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
    from confluent_kafka.admin import AdminClient

    offsets = Topics(settings).group_offsets(group, [name])
    back = [TopicPartition(name, part.partition, max(at - 50, 0)) for part, at in offsets.items()]
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    while True:  # the broker still counts the killed member
        [future] = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, back)]).values()
        if not [one.error for one in future.result(timeout=60).topic_partitions if one.error]:
            return
