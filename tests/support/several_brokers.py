"""A Kafka cluster of several brokers on this machine, which can be killed and started one by one."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, PartitionMetadata

from jobs.stack import kafka, ports

_CLUSTER = "several-brokers-of-it0"
_SECONDS = 120
_SHARED = {
    "unclean.leader.election.enable": "true",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}


class Brokers:
    """Broker 1 is the controller, and has the groups' offsets; the others have only the partitions that name them.

    Args:
        root: A directory for all of them.

    Attributes:
        bootstrap: Address of broker 1.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._controller = 0
        self.bootstrap = ""

    def start(self, number: int) -> None:
        """Start a broker, and wait until the cluster has it."""
        home = self._root / f"broker-{number}"
        home.mkdir(exist_ok=True)
        properties = dict(_SHARED)
        if number > 1:
            client = ports.remembered(home, kafka.PORTS)["client"]
            properties |= {
                "process.roles": "broker",
                "node.id": str(number),
                "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
                "listeners": f"PLAINTEXT://127.0.0.1:{client}",
            }
        with patch.object(kafka, "_cluster_id", lambda: _CLUSTER):
            launch = kafka.prepare(home, heap_mb=256, progress=lambda _: None, properties=properties)
        if number == 1:
            self.bootstrap, self._controller = launch.address, ports.remembered(home, kafka.PORTS)["controller"]
        with (home / "output").open("ab") as output:
            self._running[number] = subprocess.Popen(
                launch.command, stdout=output, stderr=output, env={**os.environ, **launch.environment}
            )
        self.until(lambda: launch.is_ready() and number in self.admin.list_topics(timeout=5).brokers)

    def kill(self, number: int) -> None:
        """End a broker with SIGKILL."""
        process = self._running.pop(number)
        process.kill()
        process.wait()

    @property
    def admin(self) -> AdminClient:
        """Administrative access by way of broker 1."""
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def create(self, topic: str, *replicas: int) -> None:
        """Create a topic of one partition on these brokers; the first one leads."""
        admin = self.admin  # it must live until the answer
        for future in admin.create_topics([NewTopic(topic, 1, replica_assignment=[[*replicas]])]).values():
            future.result()

    def partition(self, topic: str) -> PartitionMetadata:
        """Leader and replicas in sync of a topic's partition."""
        return self.admin.list_topics(topic, timeout=10).topics[topic].partitions[0]

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + _SECONDS
        while not holds():
            assert time.monotonic() < deadline, "the brokers did not come that far"
            time.sleep(0.1)


@contextmanager
def several_brokers(root: Path, *numbers: int) -> Iterator[Brokers]:
    """Start broker 1, which then has the groups' offsets, and the others; end all of them with the block."""
    brokers = Brokers(root)
    try:
        brokers.start(1)
        brokers.create("first", 1)
        consumer = Consumer({"bootstrap.servers": brokers.bootstrap, "group.id": "first"})
        brokers.until(lambda: bool(consumer.committed([TopicPartition("first", 0)], timeout=30)))
        consumer.close()
        for number in numbers:
            brokers.start(number)
        yield brokers
    finally:
        for number in [*brokers._running]:
            brokers.kill(number)
