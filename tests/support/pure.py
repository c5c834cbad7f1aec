"""Short forms for tests of the pure core: records, elements, arrivals, and a flow run in memory."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, Node, encode

TOPIC = "legs"
TOPIC_ID = "T1"
COLUMNS = {"tail": str, "carrier": str, "minutes": int, "delay": float, "late": bool}

FLEET = Fields(n=count(), m=total("minutes"))
"""What both stages of `fleet` keep."""

_names = itertools.count()


def bare(**options: Any) -> Topic:
    """A topic of JSON without envelopes."""
    return Topic(TOPIC, Json(COLUMNS), envelope=False, **options)


def wrapped(**options: Any) -> Topic:
    """The same in envelopes."""
    return Topic(TOPIC, Json(COLUMNS), **options)


def fresh_store() -> str:
    """URL of a memory store that nothing else uses."""
    return f"memory://test-{next(_names)}"


def leg(offset: int, key: str | None = "N1", *, partition: int = 0, topic: str = TOPIC, **columns: Any) -> Record:
    """A record of `bare()`; its tail is its key unless given."""
    value = {"tail": key, **columns}
    return Record(
        topic, partition, offset, None if key is None else key.encode(), json.dumps(value).encode(), topic_id=TOPIC_ID
    )


def table_of(records: Sequence[Record], *, headers: bool = False) -> pa.Table:
    """Records as the columns that a task reads, optionally with headers."""
    found = [[{"key": name, "value": value} for name, value in one.headers] for one in records]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.table(
        {
            **({"headers": pa.array(found, kind)} if headers else {}),
            "key": pa.array([one.key for one in records], pa.binary()),
            "value": pa.array([one.value for one in records], pa.binary()),
            "topic": [one.topic for one in records],
            "partition": pa.array([one.partition for one in records], pa.int32()),
            "offset": [one.offset for one in records],
            "timestamp": pa.array([one.timestamp_ms for one in records], pa.timestamp("ms")),
        }
    )


def batches_of(records: Sequence[Record]) -> list[pa.RecordBatch]:
    """Records of one topic as they come to a task."""
    batches: list[pa.RecordBatch] = table_of(records).to_batches()
    return batches


def batch(*offsets: int) -> list[Record]:
    """Records of three aircraft and two carriers; the minutes are the offset."""
    return [leg(offset, f"N{offset % 3}", carrier="UA" if offset % 2 else "AA", minutes=offset) for offset in offsets]


def fleet(**options: Any) -> Flow:
    """A flow of two stages that folds what has minutes, on `bare()` with these options."""
    return (
        Flow("fleet")
        .source(bare(**options))
        .filter(pl.col("minutes") > 0)
        .aggregate("aircraft", "tail", FLEET)
        .aggregate("carrier", "carrier", FLEET)
    )


def chained(offset: int, *hops: Hop, key: str = "N1", partition: int = 0, event_id: str = "", **columns: Any) -> Record:
    """A record of `wrapped()` that came through these hops."""
    payload = json.dumps({"tail": key, **columns}).encode()
    value = encode(Envelope(payload, chain=hops, event_id=event_id))
    return Record(TOPIC, partition, offset, key.encode(), value, topic_id=TOPIC_ID)


def hop(topic: str, partition: int, offset: int, index: int | None = 0, via: str = "wrap", **fields: Any) -> Hop:
    """A hop of a known topic."""
    return Hop(topic, partition, offset, via=via, index=index, topic_id=f"id-{topic}", **fields)


def element(value: Any, offset: int = 0, *, key: bytes | None = b"N1", partition: int = 0, **fields: Any) -> Element:
    """An element before a stage."""
    return Element(value, key, Node(TOPIC, partition, offset, TOPIC_ID), **fields)


def runner(flow: Flow, store: str | None = None) -> MemoryRunner:
    """The flow on one memory store, a new one unless given."""
    return MemoryRunner(flow, bind(flow, {}, store or fresh_store()))


def states(run: MemoryRunner, stage: str) -> dict[str, Any]:
    """The results of a stage, by text key."""
    return {key.decode(): state for key, state in run.results(stage).items()}
