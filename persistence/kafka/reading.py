"""Reading partitions by offset, and reading ahead."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

READ_AHEAD: Final[dict[str, Any]] = {
    "queued_min_messages": 100_000,
    "queued_max_messages_kbytes": 65_536,
    "fetch_wait_max_ms": 100,
    # Once a queue was full, librdkafka pauses for a second by default: its reader then waits a third of the time.
    "fetch_queue_backoff_ms": 20,
}
"""Settings of a consumer that processes each record as fast as it can."""


def assign(consumer: Consumer, parts: Sequence[TopicPartition], timeout: float = 10.0) -> None:
    """Assign partitions after fetching their leaders.

    A client that is assigned an unknown topic looks up the leader in its next metadata round, up to a second later
    (measured with librdkafka 2.12: 0.5 to 1.1 s until the first record, 0.03 s if it knows the topic).

    Args:
        consumer: The consumer.
        parts: Partitions with the offsets to begin at; they replace the current assignment.
        timeout: Seconds to wait for the answer.
    """
    for topic in dict.fromkeys(part.topic for part in parts):
        with suppress(KafkaException):  # the client will look up the leaders by itself
            consumer.list_topics(topic, timeout)
    consumer.assign(list(parts))
