"""Copies of a topic, a file and a query on a real broker: killed at every step, fenced, and refused."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from envelope import Envelope, encode
from envelope.deadletter import DeadLetterHeaders
from jobs.copying import Copy, FileLines, QueryRows, TopicRecords
from jobs.environment import UsageError
from jobs.republish import InputTopics
from jobs.republish.absence import Unsafe
from persistence.kafka import BrokerRefused, KafkaSettings, ProducerFenced, Topics
from persistence.murmur2 import murmur2
from tests.support.republish import ROOT, Make, produce, read_all
from tests.support.sessions import killed, lines_file, ran, written

pytestmark = pytest.mark.integration

COUNT = 400
STEPS = ("produce", "position", "commit")


@pytest.fixture
def positions(topic: Make) -> str:
    return topic(1, "positions", cleanup_policy="compact")


@pytest.fixture
def name() -> str:
    """Name of a copy: tests that run at the same time share the broker."""
    return f"copy-{uuid.uuid4().hex}"


def database(path: Path, numbers: range = range(COUNT)) -> list[tuple[int, str]]:
    """Write rows into a table `orders`; return them."""
    rows = [(3 * number, f"till {number % 7}") for number in numbers]
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, name TEXT)")
        connection.executemany("INSERT INTO orders VALUES (?, ?)", rows)
    connection.close()
    return rows


def prepared(kind: str, settings: KafkaSettings, topic: Make, folder: Path) -> tuple[Any, list[bytes]]:
    """A source, and the payloads that its copy must have."""
    if kind == "topic":
        name = topic(3, "in")
        records = [(b"k%d" % (number % 20), b"%d" % number) for number in range(COUNT)]
        produce(settings, name, records)
        return {"topic": name}, [value for _, value in records]
    if kind == "lines":
        return str(folder / "lines"), [line[:-1] for line in lines_file(folder / "lines", COUNT)]
    rows = database(folder / "db")
    return str(folder / "db"), [
        json.dumps({"number": one, "name": two}, separators=(",", ":")).encode() for one, two in rows
    ]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, f"copy:{step}.{outcome}@2", marks=[] if outcome in outcomes else pytest.mark.kills)
        for kind, outcomes in {"topic": ("before", "after"), "lines": ("before",), "rows": ("after",)}.items()
        for step in STEPS
        for outcome in ("before", "after")
    ],
)
def test_a_copy_that_is_killed_at_any_step_neither_loses_nor_repeats(
    kind: str, fault: str, settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path, name: str
) -> None:
    source, expected = prepared(kind, settings, topic, tmp_path)
    target = topic(2, "out")
    arguments = {
        "bootstrap": settings.bootstrap,
        "kind": kind,
        "source": source,
        "name": name,
        "target": target,
        "positions": positions,
        "batch_size": 60,
        "until_caught_up": True,
    }
    killed("copy_process", fault, **arguments)
    code, said = ran("copy_process", **arguments)
    assert code == 0
    done = json.loads(said[-1])
    assert done["epoch"] == 1
    got = written(settings, target)
    assert sorted(one.payload for one in got) == sorted(expected), "each once, in the target topic itself"
    if kind == "topic":
        hops = [one.chain[-1] for one in got]
        assert {(hop.topic, hop.via) for hop in hops} == {(source["topic"], name)}
        assert len({(hop.partition, hop.offset) for hop in hops}) == COUNT
        by_key: dict[bytes | None, list[int]] = {}
        for one in got:
            by_key.setdefault(one.key, []).append(int(one.payload))
        assert all(numbers == sorted(numbers) for numbers in by_key.values()), "in order by key"
    else:
        assert {one.producer for one in got} == {name}
        sequences = sorted(one.sequence or 0 for one in got)
        assert len(set(sequences)) == COUNT
        assert done["sequence"] == sequences[-1]
        assert [one.payload for one in sorted(got, key=lambda one: one.sequence or 0)] == expected
    code, said = ran("copy_process", **arguments)
    assert (code, json.loads(said[-1])["read"]) == (0, 0), "nothing is copied again"


def lines_copy(settings: KafkaSettings, file: Path, target: str, positions: str, name: str, **more: Any) -> Copy:
    return Copy(name, FileLines(file), target, settings, positions=positions, **more)


def test_the_older_one_of_two_copies_of_one_name_is_fenced(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path, name: str
) -> None:
    """002, Fencing: a process that was suspended, taken for dead and replaced, wakes up in the middle of a batch."""
    lines_file(tmp_path / "lines", COUNT)
    target = topic(1, "out")
    arguments = {
        "bootstrap": settings.bootstrap,
        "kind": "lines",
        "source": str(tmp_path / "lines"),
        "name": name,
        "target": target,
        "positions": positions,
        "batch_size": 50,
    }
    command = [sys.executable, "-m", "tests.integration.copy_process", json.dumps(arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    zombie = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert zombie.stdout
        assert int(zombie.stdout.readline()) > 0
        zombie.send_signal(signal.SIGSTOP)
        code, said = ran("copy_process", **arguments, until_caught_up=True)
        assert (code, json.loads(said[-1])["epoch"]) == (0, 1)
        with (tmp_path / "lines").open("ab") as file:
            file.write(b"later\n")  # the zombie reads and sends it, too
        zombie.send_signal(signal.SIGCONT)
        _, errors = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
    assert zombie.returncode == 1
    assert "ProducerFenced" in errors
    ran("copy_process", **arguments, until_caught_up=True)
    got = Counter(one.payload for one in written(settings, target))
    assert got == Counter(line for line in (tmp_path / "lines").read_bytes().splitlines())


def test_a_copy_that_is_fenced_says_so_and_its_batch_is_invisible(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path, name: str
) -> None:
    lines_file(tmp_path / "lines", 10)
    target = topic(1, "out")
    newer = lines_copy(settings, tmp_path / "lines", target, positions, name)

    class Overtaken(FileLines):
        def check(self) -> None:
            if not newer.statistics.commits:
                newer.run(until_caught_up=True)

    older = Copy(name, Overtaken(tmp_path / "lines"), target, settings, positions=positions)
    with pytest.raises(ProducerFenced, match="another process has begun under the name copy-"):
        older.run(until_caught_up=True)
    assert len(written(settings, target)) == 10
    assert older.statistics.commits == 0


def test_a_stop_by_signal_commits_what_is_under_way(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path
) -> None:
    lines_file(tmp_path / "lines", COUNT)
    target = topic(1, "out")
    arguments = {
        "bootstrap": settings.bootstrap,
        "kind": "lines",
        "source": str(tmp_path / "lines"),
        "name": f"copy-{uuid.uuid4().hex}",
        "target": target,
        "positions": positions,
    }
    command = [sys.executable, "-m", "tests.integration.copy_process", json.dumps(arguments)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert int(process.stdout.readline()) == COUNT
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(rest.splitlines()[-1])["written"] == len(written(settings, target)) == COUNT


def test_records_that_cannot_be_copied_go_to_the_dead_letter_topic_in_the_same_transaction(
    settings: KafkaSettings, topic: Make, positions: str, name: str
) -> None:
    source, target, dead = topic(1, "in"), topic(1, "out"), topic(1, "dead")
    good = encode(Envelope(b"v", key=b"k", producer="till", sequence=4))
    produce(settings, source, [(b"k", good), (b"k", b"junk"), (b"k", None), (b"k", good)])
    made = Copy(name, TopicRecords(source), target, settings, positions=positions, dead_letter=dead)
    done = made.run(until_caught_up=True)
    assert (done.read, done.written, done.tombstones, done.dead_lettered) == (4, 2, 1, {"not_an_envelope": 1})
    assert [(one.producer, one.sequence) for one in written(settings, target)] == [("till", 4)] * 2, "ids of the root"
    (letter,) = read_all(settings, dead)
    facts = DeadLetterHeaders.read(letter.headers())
    assert facts
    assert (letter.value(), facts.topic, facts.offset, facts.application) == (b"junk", source, 1, name)
    without = Copy(f"{name}-d", TopicRecords(source), target, settings, positions=positions)
    with pytest.raises(BrokerRefused, match=rf"{source}:0:1 cannot be copied \(not_an_envelope.*dead-letter"):
        without.run(until_caught_up=True)
    assert len(written(settings, target)) == 2, "its transaction is aborted"


def test_new_partitions_are_copied_after_the_old_ones(
    settings: KafkaSettings, topic: Make, topics: Topics, positions: str, name: str
) -> None:
    source, target = topic(2, "in"), topic(1, "out")
    raw = InputTopics.of(source, "raw")
    produce(settings, source, [(b"k%d" % (n % 20), b"%d" % n) for n in range(100)])
    Copy(name, TopicRecords(raw), target, settings, positions=positions).run(until_caught_up=True)
    produce(settings, source, [(b"k%d" % (n % 20), b"%d" % n) for n in range(100, 200)])
    topics.add_partitions(source, 5)
    produce(settings, source, [(b"k%d" % (n % 20), b"%d" % n) for n in range(200, 300)])
    Copy(name, TopicRecords(raw), target, settings, positions=positions).run(until_caught_up=True)
    got = written(settings, target)
    assert sorted(int(one.payload) for one in got) == [*range(300)]
    for key in {one.key for one in got if one.key}:
        before, after = ((murmur2(key) & 0x7FFFFFFF) % partitions for partitions in (2, 5))
        numbers = [int(one.payload) for one in got if one.key == key]
        # A key that moved from one of the old partitions to the other has no order: both are read at once.
        assert numbers == sorted(numbers) or (before != after and after < 2)


def test_what_an_added_partition_lost_before_it_was_copied_is_counted(
    settings: KafkaSettings, topic: Make, topics: Topics, positions: str, name: str
) -> None:
    """SPARK-17346: such a copy began the partition at offset 0, and ended at every start."""
    source, target = topic(1, "in"), topic(1, "out")
    raw = InputTopics.of(source, "raw")

    def copied() -> tuple[int, int]:
        done = Copy(name, TopicRecords(raw), target, settings, positions=positions).run(until_caught_up=True)
        return done.read, done.expired

    produce(settings, source, [(b"a", b"%d" % n) for n in range(5)])
    assert copied() == (5, 0)
    topics.add_partitions(source, 2)
    added = Producer(settings.client())
    for n in range(5, 15):
        added.produce(source, b"%d" % n, b"b", partition=1)
    assert added.flush(30) == 0
    admin = AdminClient(settings.client())
    admin.delete_records([TopicPartition(source, 1, 4)])[TopicPartition(source, 1)].result(30)
    assert [copied(), copied()] == [(6, 4), (0, 0)]
    assert sorted(int(one.payload) for one in written(settings, target)) == [*range(5), *range(9, 15)]


def test_a_growing_source_is_followed(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path, name: str
) -> None:
    target, file = topic(1, "out"), tmp_path / "lines"
    file.write_bytes(b"one\ntwo")
    source = FileLines(file)
    done = Copy(name, source, target, settings, positions=positions).run(until_caught_up=True)
    assert (done.read, source.unfinished, done.sequence) == (1, True, 0)
    with file.open("ab") as more:
        more.write(b" and a half\nthree\n")
    done = lines_copy(settings, file, target, positions, name).run(until_caught_up=True)
    assert (done.read, done.sequence) == (2, 19)
    assert [one.payload for one in written(settings, target)] == [b"one", b"two and a half", b"three"]


def refusals(
    settings: KafkaSettings, topic: Make, topics: Topics, positions: str, folder: Path, name: str
) -> dict[str, Callable]:
    file, target = folder / "lines", topic(1, "out")
    file.write_bytes(b"one\ntwo\n")
    lines_copy(settings, file, target, positions, name).run(until_caught_up=True)

    def truncated() -> None:
        file.write_bytes(b"one\n")
        lines_copy(settings, file, target, positions, name).run()

    def replaced() -> None:
        file.write_bytes(b"other\nlines\n")
        lines_copy(settings, file, target, positions, name).run()

    def other_target() -> None:
        lines_copy(settings, file, topic(1, "out"), positions, name).run()

    def other_kind() -> None:
        Copy(name, TopicRecords(topic(1, "in")), target, settings, positions=positions).run()

    def created_again() -> None:
        topics.delete([target])
        topics.create(target, 1)
        lines_copy(settings, file, target, positions, name).run()

    return {"truncated": truncated, "begins with other": replaced, "has written": other_target, "has read": other_kind, "created again": created_again}  # fmt: skip


@pytest.mark.parametrize("text", ["truncated", "begins with other", "has written", "has read", "created again"])
def test_a_position_that_belongs_to_something_else_is_refused(
    text: str, settings: KafkaSettings, topic: Make, topics: Topics, positions: str, tmp_path: Path, name: str
) -> None:
    case = refusals(settings, topic, topics, positions, tmp_path, name)[text]
    with pytest.raises(Unsafe, match=rf"{text}.*give the copy another name"):
        case()


def test_a_source_topic_that_was_created_again_is_refused(
    settings: KafkaSettings, topic: Make, topics: Topics, positions: str, name: str
) -> None:
    source, target = topic(1, "in"), topic(1, "out")
    produce(settings, source, [(b"k", encode(Envelope(b"v", key=b"k")))])
    Copy(name, TopicRecords(source), target, settings, positions=positions).run(until_caught_up=True)
    topics.delete([source])
    topics.create(source, 1)
    with pytest.raises(Unsafe, match="created again since it was copied"):
        Copy(name, TopicRecords(source), target, settings, positions=positions).run(until_caught_up=True)


def test_the_topic_of_positions_must_exist_and_be_compacted(
    settings: KafkaSettings, topic: Make, tmp_path: Path, name: str
) -> None:
    lines_file(tmp_path / "lines", 1)
    with pytest.raises(
        BrokerRefused,
        match=r"does not exist\. Create it: kafka-topics --bootstrap-server \S+:\d+ --create .*cleanup\.policy=compact",
    ):
        lines_copy(settings, tmp_path / "lines", topic(1, "out"), "nowhere", name).run()
    with pytest.raises(BrokerRefused, match=r"cleanup\.policy=delete: it would lose"):
        lines_copy(settings, tmp_path / "lines", topic(1, "out"), topic(1, "positions"), name).run()


def test_a_topic_is_not_copied_into_itself(settings: KafkaSettings, topic: Make, positions: str, name: str) -> None:
    name = topic(1, "both")
    with pytest.raises(UsageError, match="loop forever"):
        Copy(name, TopicRecords(name), name, settings, positions=positions).run()


def test_rows_that_the_column_does_not_order_are_refused(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path, name: str
) -> None:
    database(tmp_path / "db", range(20))

    def copied(query: str, column: str, which: str) -> None:
        rows = QueryRows(tmp_path / "db", query, column)
        Copy(name + which, rows, target, settings, positions=positions, batch_size=3).run(until_caught_up=True)

    target = topic(1, "out")
    with pytest.raises(BrokerRefused, match="another row has the same value"):
        copied("SELECT number / 10 AS ten FROM orders", "ten", "a")
    with pytest.raises(BrokerRefused, match="of type float, not a whole number"):
        copied("SELECT number * 1.5 AS half FROM orders", "half", "b")
    with pytest.raises(BrokerRefused, match="query failed: no such column: price"):
        copied("SELECT number, name FROM orders", "price", "c")
    with pytest.raises(ValueError, match="name of a column"):
        copied("SELECT 1", "number; DROP TABLE orders", "d")


def test_later_rows_are_copied_by_the_next_run(
    settings: KafkaSettings, topic: Make, positions: str, tmp_path: Path, name: str
) -> None:
    target = topic(1, "out")
    for numbers in (range(10), range(10, 15)):
        database(tmp_path / "db", numbers)
        rows = QueryRows(tmp_path / "db", "SELECT * FROM orders;", "number", key="name", event_id="hash:number,name")
        done = Copy(name, rows, target, settings, positions=positions).run(until_caught_up=True)
        assert done.read == len(numbers)
    got = written(settings, target)
    assert [json.loads(one.payload)["number"] for one in got] == [3 * number for number in range(15)]
    assert [one.sequence for one in got] == [*range(15)]
    assert got[3].key == b"till 3"
    assert len({one.event_id for one in got}) == 15
