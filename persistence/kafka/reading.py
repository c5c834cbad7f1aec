"""Reading partitions by offset, without a consumer group."""

from collections.abc import Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaException, TopicPartition


def assign(consumer: Consumer, parts: Sequence[TopicPartition], timeout: float = 10.0) -> None:
    """Assign partitions, once the client knows who leads them.

    A client that is given a topic it has not heard of looks for the leader at its next round, up to a second later
    (measured with librdkafka 2.12: 0.5 to 1.1 s until the first record, 0.03 s when it has asked before).

    Args:
        consumer: The consumer.
        parts: Partitions with the offsets to begin at; they replace what it was assigned.
        timeout: Seconds to ask for.
    """
    for topic in dict.fromkeys(part.topic for part in parts):
        with suppress(KafkaException):  # it will find out by itself
            consumer.list_topics(topic, timeout)
    consumer.assign(list(parts))
