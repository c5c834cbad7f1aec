"""Two members of a republisher with a filter on a real broker, of which one is killed: the oracle is the filter alone."""

import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from envelope import decode
from envelope.filters import Arrival, FilterStates
from persistence.cassandra import apply_schema
from persistence.kafka import KafkaSettings
from tests.support.filters import by_id
from tests.support.republish import Make, process, produce, read_all
from tests.support.runs import ONE_NODE

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PARTITIONS = 4
SECONDS = 90
# The store, where the member is killed, and whether another case goes the same way through the code (`make kills`).
CASES = [
    ("redis", "filter:save.before@3", False),
    ("redis", "filter:save.after@3", True),
    ("lmdb", "filter:save.before@3", True),
    ("sqlite", "republish:flush.after@3", False),
    ("cassandra", "filter:save.after@3", False),
]


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, f"not within {SECONDS} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind: str = request.param
    if kind == "redis":
        return str(request.getfixturevalue("redis_url"))
    if kind == "cassandra":
        url = f"{request.getfixturevalue('cassandra_url')}/filters?replication=1&buckets=4"
        apply_schema(url)
        return url
    return f"{kind}://{tmp_path}/states"


def expected(settings: KafkaSettings, source: str) -> set[tuple[int, int]]:
    """Places of the records that the filter alone passes on."""
    alone = FilterStates(by_id)
    found = sorted(read_all(settings, source), key=lambda one: (one.partition(), one.offset()))
    return {
        (one.partition(), one.offset())
        for one in found
        if alone.passes(Arrival(source, one.partition(), one.offset(), one.key(), one.value()))
    }


def passed_on(settings: KafkaSettings, target: str) -> set[tuple[int, int]]:
    hops = [decode(one.value()).chain[0] for one in read_all(settings, target)]
    return {(hop.partition, hop.offset) for hop in hops}


@pytest.mark.parametrize(
    ("store", "fault"),
    [
        pytest.param(store, fault, id=f"{store}, {fault}", marks=[pytest.mark.kills] if again else [])
        for store, fault, again in CASES
    ],
    indirect=["store"],
)
def test_what_a_killed_member_had_is_judged_by_the_other_one_and_no_duplicate_is_passed_on(
    store: str, fault: str, settings: KafkaSettings, topic: Make
) -> None:
    source, target, group = topic(PARTITIONS, "in"), topic(2, "out"), uuid.uuid4().hex
    arguments: dict[str, Any] = {
        "bootstrap": settings.bootstrap,
        "options": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
        "source": source,
        "kind": "json",
        "target": target,
        "name": "once",
        "group": group,
        "max_wait": 0.1,
        "transform": "jobs.republish.record:identity",
        "deduplicate": "tests.support.filters:by_id",
        "store": store,
        "accept": ONE_NODE if store.startswith("cassandra") else [],
    }
    admin, draw, sent = AdminClient(settings.client()), random.Random(7), list[tuple[bytes, bytes]]()

    def shares() -> list[int]:
        """Number of partitions of each member."""
        try:
            found = admin.describe_consumer_groups([group])[group].result()
        except KafkaException:  # the group has no coordinator yet
            return []
        return [len(one.assignment.topic_partitions) for one in found.members if one.assignment]

    def wave() -> None:
        """Send new messages, and before them again those that the producer is not sure of."""
        new = [(b"k%d" % draw.randrange(20), b'{"id": %d}' % n) for n in range(len(sent), len(sent) + 20)]
        produce(settings, source, [*sent[-10:], *new])
        sent.extend(new)

    members: list[subprocess.Popen[str]] = []
    try:
        members += [process(at, **arguments) for at in (fault, "")]
        killed, other = members
        until(lambda: sorted(shares()) == [PARTITIONS // 2] * 2, "both members have partitions")
        for _ in range(20):
            if killed.poll() is None:
                wave()
                time.sleep(0.3)
        until(lambda: killed.poll() is not None, f"the member dies at {fault}")
        assert killed.returncode == -signal.SIGKILL
        wave()
        until(lambda: shares() == [PARTITIONS], "the other member has all partitions")
        wave()
        wanted = expected(settings, source)
        until(lambda: passed_on(settings, target) >= wanted, "everything is passed on")
        other.send_signal(signal.SIGTERM)
        assert other.wait(60) == 0
    finally:
        for one in members:
            one.kill()
            one.communicate()
    assert passed_on(settings, target) == wanted
    assert len(wanted) == len(sent)
