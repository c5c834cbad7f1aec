"""Reading partitions by offset, and reading ahead."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from envelope import TopicPartition as Place
from persistence.kafka.errors import BrokerUnavailable, broker_error, passes
from persistence.kafka.settings import KafkaSettings

READ_AHEAD: Final[dict[str, Any]] = {
    "queued_min_messages": 100_000,
    "queued_max_messages_kbytes": 65_536,
    "fetch_wait_max_ms": 100,
    # Once a queue was full, librdkafka pauses for a second by default: its reader then waits a third of the time.
    "fetch_queue_backoff_ms": 20,
}
"""Settings of a consumer that processes each record as fast as it can."""


_BEYOND: Final = 1 << 61
_END: Final = re.compile(r"end offset is (-?\d+)")
_ASKING: Final[dict[str, Any]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 10,
}


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


def epoch_ends(settings: KafkaSettings, epochs: Mapping[Place, int], timeout: float = 10.0) -> dict[Place, int]:
    """Return where the records of a leader epoch and of earlier ones end in the log of a partition; -1 if it has none.

    This is `OffsetsForLeaderEpoch` of KIP-320. librdkafka sends it when a consumer that reads a partition seeks an offset that
    has an epoch, and says so if the offset is beyond that end: no log has an offset as high as `_BEYOND`.

    Args:
        settings: Settings of the Kafka cluster.
        epochs: The epoch by partition.
        timeout: Seconds to wait for the answers.

    Raises:
        BrokerUnavailable: A leader does not answer.
        BrokerRefused: It refuses the request.
    """
    doing, ends, sought = "asking for the ends of leader epochs", dict[Place, int](), set[Place]()
    with closing(Consumer(settings.client(group_id="headwater") | _ASKING)) as consumer:
        assign(consumer, [TopicPartition(*place, OFFSET_END) for place in epochs], timeout)
        deadline = time.monotonic() + timeout
        while len(ends) < len(epochs) and time.monotonic() < deadline:
            if (message := consumer.poll(0.1)) is None:
                continue
            error, place = message.error(), Place(message.topic() or "", message.partition() or 0)
            if (
                error is not None
                and error.code() == KafkaError._AUTO_OFFSET_RESET
                and (found := _END.search(error.str()))
            ):
                ends[place] = int(found[1])
            elif error is not None and error.code() != KafkaError._PARTITION_EOF and not passes(error):
                raise broker_error(error, doing)
            elif place in epochs and place not in sought:
                sought.add(place)
                consumer.seek(TopicPartition(*place, _BEYOND, leader_epoch=epochs[place]))
    if left := [f"{topic}:{partition}" for topic, partition in sorted(epochs.keys() - ends.keys())]:
        raise BrokerUnavailable(f"{doing} in {left[0]}: no answer within {timeout:g} s", "Check that it has a leader")
    return ends
