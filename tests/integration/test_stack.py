import os
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from jobs import stack
from jobs.stack import jars, ports, topics
from persistence.kafka import BrokerError

pytestmark = pytest.mark.integration


def records_of(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "t", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        return [message.value() for message in consumer.consume(count, timeout=30)]
    finally:
        consumer.close()


def test_a_broker_outlives_the_command_that_started_it_and_keeps_address_and_records_over_a_restart(
    tmp_path: Path,
) -> None:
    tmp_path /= "Straße"  # a path that is not ASCII
    code = "import sys, pathlib; from jobs import stack; print(stack.up(pathlib.Path(sys.argv[1])).kafka)"
    bootstrap = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        running = stack.status(tmp_path)
        assert running is not None
        assert running.kafka == bootstrap
        assert stack.up(tmp_path) == running

        topics.create(bootstrap, "kept", 1)
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce("kept", b"record")
        assert producer.flush(30) == 0

        assert stack.down(tmp_path) == ["kafka"]
        again = stack.up(tmp_path)
        assert again.kafka == bootstrap
        assert records_of(bootstrap, "kept", 1) == [b"record"]
    finally:
        stack.down(tmp_path)
    assert ports.is_free(int(bootstrap.rpartition(":")[2]))


def test_a_broker_that_cannot_start_is_one_line_with_what_it_said_and_leaves_no_process(tmp_path: Path) -> None:
    stack.up(tmp_path)
    stack.down(tmp_path)
    (tmp_path / "kafka" / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=another\n")
    with pytest.raises(stack.StackError, match=r"kafka ended while it started: .*log: .*kafka\.log"):
        stack.up(tmp_path)
    assert not (tmp_path / "stack.json").exists()


def test_creating_a_topic_twice_is_one_topic_and_creating_it_after_a_deletion_is_another(kafka: str) -> None:
    first = topics.create(kafka, "twice", 3, retention_ms=-1)
    assert topics.create(kafka, "twice", 3) == first
    with pytest.raises(BrokerError, match="exists with 3 partitions, not 4"):
        topics.create(kafka, "twice", 4)
    topics.delete(kafka, "twice", "never-was")
    assert topics.create(kafka, "twice", 3) != first


def test_topic_ids_are_given_per_name_and_a_missing_topic_is_an_error(kafka: str, topic) -> None:
    one, other = topic(), topic(partitions=2)
    ids = topics.topic_ids(kafka, [one, other, one])
    assert set(ids) == {one, other}
    assert ids[one] != ids[other]
    with pytest.raises(BrokerError, match="topic never-was"):
        topics.topic_ids(kafka, ["never-was"])


def test_redis_answers_and_is_as_durable_as_the_stores_ask(redis_url: str) -> None:
    import redis

    client = redis.Redis.from_url(redis_url)
    assert client.ping()
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    assert client.config_get(*wanted) == wanted


def test_cassandra_answers_a_conditional_write(cassandra_url: str) -> None:
    from cassandra.cluster import Cluster

    host, _, port = cassandra_url.removeprefix("cassandra://").partition(":")
    with Cluster([host], port=int(port), protocol_version=5) as cluster, cluster.connect() as session:
        session.execute(
            "CREATE KEYSPACE stack_test WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
        )
        session.execute("CREATE TABLE stack_test.t (k int PRIMARY KEY, v int)")
        assert session.execute("INSERT INTO stack_test.t (k, v) VALUES (1, 2) IF NOT EXISTS").was_applied
        assert not session.execute("INSERT INTO stack_test.t (k, v) VALUES (1, 3) IF NOT EXISTS").was_applied


def test_jars_that_do_not_exist_are_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    with pytest.raises(jars.JarsUnavailable, match=r"not found.*HEADWATER_IVY_SETTINGS"):
        jars.resolve("nothing", ["org.apache.kafka:no-such-artifact:0.0.1"])
    assert not list((tmp_path / "jars").glob("*nothing*"))


def test_two_processes_that_resolve_the_same_jars_at_once_get_the_same_directory(tmp_path: Path) -> None:
    code = "from jobs.stack import jars; print(*jars.resolve('one', ['org.slf4j:slf4j-api:1.7.36@jar']))"
    environment = {**os.environ, "HEADWATER_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=300)[0].strip() for process in both}
    assert len(answers) == 1
    assert answers.pop().endswith("slf4j-api-1.7.36.jar")
