"""A flow behind Spark's own Kafka source, in an application of the user's own that is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer

from benchmarks.peers.connector import kafka_connector
from persistence.commit.faults import SPEC
from tests.support.flows import fleet, totals
from tests.support.runs import ROOT, check_invariants, some_legs
from tests.support.spark import python_path
from tests.support.world import Sent, World, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

FAULTS = ("persist:carrier.after@2", "manifest:aircraft.after@3")


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: Path) -> Iterator[World]:
    url = f"lmdb://{tmp_path}/states"
    names = topic(partitions=2, name="legs"), topic(name="dead")
    with closing(World(kafka, *names, tmp_path, urls={"aircraft": url, "carrier": url})) as world:
        yield world


def send_in_a_transaction(world: World, messages: list[Sent]) -> None:
    """The marker of its end takes an offset in each partition, which no source delivers."""
    settings = {"bootstrap.servers": world.settings.bootstrap, "transactional.id": world.topic}
    producer = Producer({**settings, "partitioner": "murmur2_random"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for one in messages:
        producer.produce(world.topic, one.value, one.key, headers=list(one.headers))
    producer.commit_transaction(30)


@pytest.mark.parametrize("checkpoint", ["lost", pytest.param("kept", marks=pytest.mark.kills)])
def test_a_flow_behind_the_connector_is_exact_though_it_is_killed(
    world: World, tmp_path: Path, checkpoint: str
) -> None:
    flow, directory, sent = fleet(world.topic), tmp_path / "checkpoint", some_legs(180)
    given = {
        "flow": "fleet",
        "arguments": [world.topic],
        "kafka": world.settings.bootstrap,
        "stores": world.stores(flow),
        "dead_letters": world.dead,
        "checkpoint": str(directory),
        "jars": [str(jar) for jar in kafka_connector()],
        "most": 20,
    }
    for number, fault in enumerate([*FAULTS, ""]):
        messages = republished(sent, range(max(0, 60 * number - 10), 60 * number + 60))
        (send_in_a_transaction if number == 1 else World.send)(world, messages)
        ended = subprocess.run(
            [sys.executable, "-m", "tests.support.run_connector", json.dumps(given)],
            cwd=ROOT,
            env={**os.environ, SPEC: fault, "PYTHONPATH": python_path(ROOT), "PYSPARK_PYTHON": sys.executable},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert ended.returncode == (-signal.SIGKILL if fault else 0), ended.stderr
        check_invariants(world, flow)
        if checkpoint == "lost":
            shutil.rmtree(directory, ignore_errors=True)
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")
