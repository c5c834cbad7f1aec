"""What one writes by hand: a consumer, protobuf, a dictionary of states that is written to Redis before each commit.

Run as a module it is the loop itself:

    python -m benchmarks.peers.python_loop BOOTSTRAP TOPIC GROUP REDIS_URL

It drains the topic up to where it ends, and ends when its standard input is closed.

It leaves out copies by the highest position per lane, kept in the state, so a crash between the write and the commit
does no harm. Nothing fences it: two of these loops that both believe they own a partition overwrite each other.
"""

import sys
import time
from typing import Any, Final

import msgspec
import polars as pl
import redis
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from benchmarks.peers.base import AT_LEAST_ONCE, Peer, Task, module
from benchmarks.workload import COLUMNS, PARTITIONS
from envelope.codec import parse
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import KafkaSettings, Topics

CHUNK: Final = 10_000
_COMMIT_SECONDS: Final = 1.0
_PREFIX: Final = b"state:"

State = list[Any]
"""Count, sum, maximum, and the highest position by lane."""


class PythonLoop(Peer):
    """One process."""

    name = "python-loop"
    store = "redis"
    guarantee = AT_LEAST_ONCE

    def command(self, task: Task) -> list[str]:
        return module("benchmarks.peers.python_loop", task.bootstrap, task.topic, task.run, task.server)

    def result(self, task: Task) -> pl.DataFrame:
        """Read every state from Redis."""
        rows: dict[str, list[Any]] = {column: [] for column in COLUMNS}
        with redis.Redis.from_url(task.server) as client:
            names = list(client.scan_iter(match=_PREFIX + b"*", count=CHUNK))
            for start in range(0, len(names), CHUNK):
                some = names[start : start + CHUNK]
                values: list[Any] = client.mget(some)
                for name, value in zip(some, values, strict=True):
                    state = msgspec.msgpack.decode(value)
                    for column, cell in zip(COLUMNS, (name.removeprefix(_PREFIX).decode(), *state), strict=False):
                        rows[column].append(cell)
        return pl.DataFrame(rows, schema=COLUMNS)


def fold(states: dict[bytes, State], changed: set[bytes], key: bytes, value: bytes) -> None:
    """Fold one record into the state of its key, which is in `states` already, unless it was folded before."""
    envelope = parse(value)
    if envelope.key != key:
        raise ValueError("the record's key is not the envelope's")
    state = states[key]
    lane = "|".join(f"{hop.topic_id or hop.topic}/{hop.partition}/{hop.via}" for hop in envelope.chain)
    position = [number for hop in envelope.chain for number in (hop.offset, hop.index)]
    if position <= state[3].get(lane, []):
        return
    leg = Leg.FromString(envelope.payload)
    state[0] += 1
    state[1] += leg.air_minutes
    state[2] = leg.arr_delay if state[2] is None else max(state[2], leg.arr_delay)
    state[3][lane] = position
    changed.add(key)


def load(client: "redis.Redis", states: dict[bytes, State], keys: set[bytes]) -> None:
    """Read the states of new keys; a key without one starts empty."""
    missing = [key for key in keys if key not in states]
    if missing:
        values: list[Any] = client.mget([_PREFIX + key for key in missing])
        for key, value in zip(missing, values, strict=True):
            states[key] = msgspec.msgpack.decode(value) if value else [0, 0, None, {}]


def save(client: "redis.Redis", states: dict[bytes, State], changed: set[bytes]) -> None:
    """Write the changed states."""
    keys = list(changed)
    for start in range(0, len(keys), CHUNK):
        client.mset({_PREFIX + key: msgspec.msgpack.encode(states[key]) for key in keys[start : start + CHUNK]})
    changed.clear()


def loop(bootstrap: str, topic: str, group: str, url: str) -> None:
    """Drain the topic up to where it ends now."""
    settings = KafkaSettings(bootstrap)
    total = sum(mark.high for mark in Topics(settings).marks([topic]).values())
    consumer = Consumer(settings.client(group_id=group, enable_auto_commit=False, queued_min_messages=200_000))
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
    states: dict[bytes, State] = {}
    changed: set[bytes] = set()
    done, committed = 0, time.monotonic()
    with redis.Redis.from_url(url) as client:
        while done < total:
            records: list[tuple[Any, Any]] = [(record.key(), record.value()) for record in consumer.consume(CHUNK, 0.1)]
            load(client, states, {key for key, _ in records})
            for key, value in records:
                fold(states, changed, key, value)
            done += len(records)
            if time.monotonic() - committed >= _COMMIT_SECONDS or done >= total:
                save(client, states, changed)
                consumer.commit(asynchronous=False)
                committed = time.monotonic()
    sys.stdin.read()  # until it was measured
    consumer.close()


if __name__ == "__main__":
    loop(*sys.argv[1:5])
