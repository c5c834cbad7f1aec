"""Where copies continue: one record for each copy, in a compacted topic of the target's cluster.

The record is written in the transaction of the messages that it covers. A position in a consumer group would expire
with the group's offsets, and would have no place for a file or a query.
"""

import json
import time
import uuid
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

import envelope
from persistence.kafka import BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.errors import broker_error, connection_trouble, passes
from persistence.kafka.reading import assign
from persistence.murmur2 import murmur2

POSITIONS: Final = "headwater.positions"
"""The topic by default."""
_POSITIVE: Final = 0x7FFFFFFF
_PATIENCE_SECONDS: Final = 120.0  # twice as long as a transaction of another copy may be open
_WAIT_SECONDS: Final = 0.2
_MOST_READ: Final = 10_000


class Positions:
    """The topic of the positions.

    Args:
        settings: Settings of the target's cluster.
        topic: The topic.
    """

    def __init__(self, settings: KafkaSettings, topic: str = POSITIONS) -> None:
        self.topic = topic
        self._settings = settings
        self._topics = Topics(settings)
        self._connection = ""

    def check(self) -> None:
        """Check that the topic exists, and that records are only deleted by compaction.

        Raises:
            BrokerRefused: It does not exist, may not be written, or would lose positions.
        """
        create = (
            f"Create it: kafka-topics --bootstrap-server {self._settings.bootstrap} --create --topic {self.topic} "
            "--partitions 1 --config cleanup.policy=compact"
        )
        if self._topics.missing([self.topic]):
            raise BrokerRefused(f"topic {self.topic}, in which copies save their positions, does not exist", create)
        self._topics.check_rights(read=[self.topic], write=[self.topic])
        policy = self._topics.cleanup_policies([self.topic])[self.topic]
        if policy not in ("compact", None):
            raise BrokerRefused(
                f"topic {self.topic} has cleanup.policy={policy}: it would lose the positions of copies",
                "Set cleanup.policy=compact",
            )

    def place(self, copy: str) -> tuple[bytes, int]:
        """Key and partition of a copy's record."""
        key = copy.encode()
        return key, (murmur2(key) & _POSITIVE) % self._topics.partitions([self.topic])[self.topic]

    def read(self, copy: str) -> dict[str, Any] | None:
        """Return what a copy has saved; None if it has never run.

        Raises:
            BrokerUnavailable: A transaction of another copy remains open.
            BrokerRefused: The record is no position.
        """
        key, partition = self.place(copy)
        end = self._topics.ends([self.topic])[envelope.TopicPartition(self.topic, partition)]
        found: bytes | None = None
        config = self._settings.client(on_error=self._on_error, group_id=f"headwater.positions.{uuid.uuid4().hex}")
        config |= {
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
        consumer = Consumer(config)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        try:
            assign(consumer, [TopicPartition(self.topic, partition, 0)])
            at = 0
            while at < end:
                got: list[Any] = consumer.consume(_MOST_READ, _WAIT_SECONDS)
                for message in got:
                    if error := message.error():
                        self._raise_for(error)
                        at = max(at, message.offset() if error.code() == KafkaError._PARTITION_EOF else at)
                        continue
                    at = message.offset() + 1
                    found = message.value() if message.key() == key else found
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"reading {self.topic}: its end was not reached within {_PATIENCE_SECONDS:g} s",
                        "A transaction of another copy is open: try again",
                    )
        finally:
            consumer.close()
        return None if found is None else _decoded(found, copy, self.topic)

    def _raise_for(self, error: KafkaError) -> None:
        if error.code() == KafkaError._PARTITION_EOF or passes(error):
            return
        problem = broker_error(error, f"reading {self.topic}", self._connection)
        if isinstance(problem, BrokerRefused):
            raise problem

    def _on_error(self, error: KafkaError) -> None:
        self._connection = connection_trouble(error, self._connection)


def encoded(saved: dict[str, Any]) -> bytes:
    """The value of a copy's record."""
    return json.dumps(saved, sort_keys=True).encode()


def _decoded(value: bytes, copy: str, topic: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("copy") != copy:
        raise BrokerRefused(
            f"the record of copy {copy} in {topic} is not a position",
            "Another program writes this topic: give copies a topic of their own (--positions)",
        )
    return found
