"""Whether topics that share tasks are partitioned alike: judged at the start of a run by the last keys of each partition.

It saves batches that are folded a second time. That a batch is right does not depend on it: a key in two tasks is found in
every batch, see `aggregations.engine.job.SharedKeyError`.
"""

import logging
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import combinations
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from aggregations.definition.flow import Flow
from envelope import TopicPartition as Place
from persistence.kafka import BrokerError, KafkaSettings, Topics
from persistence.kafka.reading import assign
from persistence.murmur2 import murmur2

_LOG = logging.getLogger("headwater.engine")

SAMPLED: Final = 20
"""Last records of a partition that are looked at."""
_BY_CHANCE: Final = 1_000_000
"""A partitioner is recognised by so many keys that a wrong one fits them once in a million: 20 of two partitions."""
_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 0.02
_POSITIVE: Final = 0x7FFFFFFF
_READING: Final = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "earliest",
    "fetch.wait.max.ms": 10,
}

PARTITIONERS: Final[Mapping[str, Callable[[bytes], int]]] = {
    "murmur2, as Java's producers do": lambda key: murmur2(key) & _POSITIVE,
    "CRC32, as librdkafka's producers do by default": zlib.crc32,
}
"""How producers choose the partition of a key: this number modulo the number of partitions."""

Places = Sequence[tuple[bytes, int]]
"""Keys, and the partition of each."""


def are_apart(flow: Flow[Any], settings: KafkaSettings, topics: Topics) -> bool:
    """Whether sources have equal numbers of partitions, and provably different partitioners; this is logged.

    False also if the broker does not answer in time: batches show it as well.

    Args:
        flow: The flow, or the part of it that has several sources.
        settings: Settings of the Kafka cluster.
        topics: Administrative access to its topics.
    """
    first = flow.stages[0] if flow.stages else None
    if not flow.merges or first is None or not first.aggregate.co_partitioned or first.fans_out:
        return False
    if first.aggregate.rule is not None:
        return False  # a filter has states of its own for each topic
    try:
        numbers = set(topics.partitions(flow.topics).values())
        if len(numbers) > 1 or numbers == {1}:
            return False
        found = differing(_sample(settings, topics, list(flow.topics)), *numbers)
    except (BrokerError, KafkaException) as error:
        _LOG.info("the partitioners of %s were not compared: %s", ", ".join(flow.topics), error)
        return False
    if found:
        _LOG.warning(
            "%s. Stage %s is folded after a shuffle. To save it, let all producers choose partitions in the same way: "
            "partitioner=murmur2_random in librdkafka is Java's default",
            found,
            first.name,
        )
    return bool(found)


def differing(places: Mapping[str, Places], partitions: int) -> str:
    """Why topics are not partitioned in the same way; empty if that is not proven.

    Args:
        places: Keys and their partitions by topic.
        partitions: The number of partitions of every topic.
    """
    fitting = {
        topic: [name for name, number in PARTITIONERS.items() if all(number(key) % partitions == at for key, at in its)]
        for topic, its in places.items()
        if partitions ** len({key for key, _ in its}) >= _BY_CHANCE
    }
    for one, other in combinations(places, 2):
        at = dict(places[one])
        if moved := [(key, place) for key, place in places[other] if at.get(key, place) != place]:
            key, place = moved[0]
            return f"a key of partition {at[key]} of {one} is in partition {place} of {other}"
        mine, others = fitting.get(one, []), fitting.get(other, [])
        if mine and others and not {*mine} & {*others}:
            return f"the partitions of {one} are chosen by {mine[0]}, those of {other} by {others[0]}"
    return ""


def _sample(settings: KafkaSettings, topics: Topics, names: Sequence[str]) -> Mapping[str, Places]:
    """The keys of the last records of every partition, as far as they arrive in time."""
    found: defaultdict[str, list[tuple[bytes, int]]] = defaultdict(list)
    marks = {place: one for place, one in topics.marks(names).items() if one.low < one.high}
    starts = [TopicPartition(*place, max(one.low, one.high - SAMPLED)) for place, one in marks.items()]
    config = settings.client(on_error=lambda _: None, group_id=f"headwater.sample.{uuid.uuid4().hex}")
    left, deadline = {*marks}, time.monotonic() + _SECONDS
    with closing(Consumer(config | _READING)) as consumer:
        assign(consumer, starts, _SECONDS)
        while left and time.monotonic() < deadline:
            got: list[Any] = consumer.consume(SAMPLED * len(left), _WAIT_SECONDS)
            for message in got:
                place, error = Place(message.topic(), message.partition()), message.error()
                if not error and message.key():
                    found[place[0]].append((message.key(), place[1]))
                # The last offsets may be markers of transactions: then only this event shows the end.
                at_end = (
                    error.code() == KafkaError._PARTITION_EOF if error else message.offset() + 1 >= marks[place].high
                )
                if at_end:
                    left.discard(place)
    return found
