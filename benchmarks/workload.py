"""The events of a benchmark, and what their exact aggregation is."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import polars as pl

from envelope import Envelope, Hop, append_hop, encode
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Message

PARTITIONS: Final = 4
_CHUNK: Final = 20_000
_RECENT: Final = 2_000
"""A re-sent event is one of the last 1,000 to 2,000 of those before it."""

COLUMNS: Final = {"key": pl.String, "count": pl.Int64, "sum": pl.Int64, "max": pl.Int64}
"""Columns of a result: one row per key that has events."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a topic is filled with.

    Attributes:
        events: Number of records, re-sent ones included.
        keys: Number of distinct keys that events are drawn from, uniformly.
        resent: Share of records that carry an event that was sent before, at a new offset.
        seed: Seed of the draw.
        hops: Number of republish hops of each record.
        payload: Least size of a payload in bytes, made up by a longer name of the carrier.
        numbered: Envelopes have an event id, and the name and sequence number of a producer.
        headers: Records have the event id in the header `ce_id`, too.
    """

    events: int
    keys: int
    resent: float = 0.05
    seed: int = 7
    hops: int = 1
    payload: int = 0
    numbered: bool = False
    headers: bool = False


@dataclass(frozen=True, slots=True)
class Filled:
    """A topic with its events.

    Attributes:
        topic: Its name.
        workload: What it was filled with.
        unique: Number of distinct events.
        bytes_per_event: Mean size of a record's value.
        expected: Exact result: columns of `COLUMNS`, sorted by key.
    """

    topic: str
    workload: Workload
    unique: int
    bytes_per_event: float
    expected: pl.DataFrame


class Oracle:
    """Count, sum and maximum per key of distinct events, kept while they are drawn."""

    def __init__(self, keys: int) -> None:
        self._count = np.zeros(keys, np.int64)
        self._sum = np.zeros(keys, np.int64)
        self._max = np.full(keys, np.iinfo(np.int64).min)

    def add(self, key: int, minutes: int, delay: int) -> None:
        """Add one event that was not sent before."""
        self._count[key] += 1
        self._sum[key] += minutes
        self._max[key] = max(self._max[key], delay)

    def result(self) -> pl.DataFrame:
        """Return the rows of all keys with events, sorted by key."""
        (keys,) = np.nonzero(self._count)
        columns = {
            "key": [name(key) for key in keys.tolist()],
            "count": self._count[keys],
            "sum": self._sum[keys],
            "max": self._max[keys],
        }
        return pl.DataFrame(columns, schema=COLUMNS).sort("key")


def name(key: int) -> str:
    """The key of that number, as it is in records and states."""
    return f"N{key:05d}"


def draw(workload: Workload, topic: str, oracle: Oracle) -> Iterator[Message]:
    """Draw the records of a topic in their order, and tell the oracle of each event that is new.

    A record is a sealed envelope of republish hops, keyed, with a payload of the demo's schema `Leg`. A key has one
    root partition, and offsets there rise with every new event, as they do in the topics between.
    """
    rng = random.Random(workload.seed)
    unique = 0
    recent: list[Message] = []
    for _ in range(workload.events):
        if recent and rng.random() < workload.resent:
            yield rng.choice(recent)
            continue
        key, minutes, delay = rng.randrange(workload.keys), rng.randrange(400), rng.randrange(90)
        oracle.add(key, minutes, delay)
        message = _message(workload, topic, key, minutes, delay, unique)
        unique += 1
        recent.append(message)
        if len(recent) > _RECENT:
            recent = recent[_RECENT // 2 :]
        yield message


def fill(settings: KafkaSettings, topic: str, workload: Workload, progress: Callable[[int], None]) -> Filled:
    """Produce the records and return what their exact aggregation is.

    Args:
        settings: The broker.
        topic: An empty topic of `PARTITIONS` partitions.
        workload: What to produce.
        progress: Told the number of records sent.
    """
    oracle = Oracle(workload.keys)
    done = size = 0
    messages = draw(workload, topic, oracle)
    with AcknowledgedProducer(settings) as producer:
        while chunk := list(islice(messages, _CHUNK)):
            producer.send_many(topic, chunk)
            done += len(chunk)
            size += sum(len(message["value"] or b"") for message in chunk)
            progress(done)
        producer.flush()
    expected = oracle.result()
    return Filled(topic, workload, int(expected["count"].sum()), size / workload.events, expected)


def _message(workload: Workload, topic: str, key: int, minutes: int, delay: int, number: int) -> Message:
    tail = name(key)
    carrier = f"C{key % 16:02d}".ljust(workload.payload, ".")
    leg = Leg(tail=tail, carrier=carrier, arr_delay=delay, air_minutes=minutes)
    raw = tail.encode()
    stamp = {"event_id": f"e{number}", "producer": "bench", "sequence": number} if workload.numbered else {}
    value = encode(Envelope(leg.SerializeToString(), key=raw, destination=topic, **stamp))
    partition = sum(raw) % PARTITIONS
    for hop in range(workload.hops):
        source, topic_id = (f"step{hop}", "BBBB") if hop else ("raw", "AAAA")
        value = append_hop(value, Hop(source, partition, number, via="wrap", index=0, count=1, topic_id=topic_id))
    made: Message = {"key": raw, "value": value}
    if workload.headers:
        made["headers"] = [("ce_id", b"e%d" % number)]
    return made
