"""Checks the results without the engine: reads the topics record by record and compares the states with the truth."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import polars as pl
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka import Message as Received

from envelope import Reason
from envelope import envelope_pb2 as pb
from envelope.deadletter import DeadLetterHeaders
from jobs.demo.flights import FIELDS
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import assign

Coordinates: TypeAlias = tuple[str, int, int]
"""Topic, partition, offset."""
Dead: TypeAlias = dict[Coordinates, tuple[str, bytes | None]]
"""Dead letters: the record's coordinates, its reason code, its value."""
OnProgress: TypeAlias = Callable[[int], None]

_SCHEMA: Final = {
    "root_partition": pl.Int32,
    "root_offset": pl.Int64,
    "index": pl.Int64,
    "tail": pl.String,
    "carrier": pl.String,
    "event": pl.Int8,
    "dep_delay": pl.Int64,
    "arr_delay": pl.Int64,
    "air_minutes": pl.Int64,
}
_FETCH_SECONDS: Final = 30.0
_SLICE_SECONDS: Final = 0.2  # a call waits this long for the last records of a topic


@dataclass(slots=True)
class Scan:
    """The content of a topic of the demo.

    Attributes:
        records: Number of records.
        legs: One row per readable leg; empty for other topics.
        unusable: The records that must be in the dead-letter topic.
    """

    records: int = 0
    legs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_SCHEMA))
    unusable: Dead = field(default_factory=dict)

    @property
    def resent(self) -> int:
        """Number of messages that are copies: same root, and same position among its outputs."""
        return self.legs.height - self.legs.select("root_partition", "root_offset", "index").n_unique()


def read(
    kafka: KafkaSettings, topic: str, progress: OnProgress = lambda done: None
) -> Iterator[tuple[int, int, Received]]:
    """Yield partition, offset and record of everything that a topic contains now, each partition in order.

    Raises:
        BrokerUnavailable: The broker stopped answering.
    """
    ends = {partition: marks.high for (_, partition), marks in Topics(kafka).marks([topic]).items() if marks.high}
    consumer = Consumer(
        kafka.client(group_id="headwater-demo-audit", enable_auto_commit=False, queued_max_messages_kbytes=65_536)
    )
    try:
        assign(consumer, [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in ends])
        done, waited = 0, 0.0
        while ends:
            found = consumer.consume(10_000, _SLICE_SECONDS)
            waited = 0.0 if found else waited + _SLICE_SECONDS
            if waited > _FETCH_SECONDS:
                raise BrokerUnavailable(
                    f"reading {topic}: no record arrived for {_FETCH_SECONDS:g} s", "Check the broker's log"
                )
            for record in found:
                partition, offset = record.partition(), record.offset()
                if record.error() or partition is None or offset is None:
                    continue
                yield partition, offset, record
                if offset + 1 == ends[partition]:
                    del ends[partition]
            done += len(found)
            progress(done)
    finally:
        consumer.close()


def scan(
    kafka: KafkaSettings, topic: str, nonsense: Mapping[bytes | None, Reason], progress: OnProgress, *, legs: bool
) -> Scan:
    """Read a topic with nothing but the schemas.

    Args:
        kafka: Address of the broker.
        topic: The topic.
        nonsense: Reason code by value, for the malformed records in the topic.
        progress: Called with the number of records read.
        legs: The other records are legs in envelopes.
    """
    result = Scan()
    rows: list[tuple[Any, ...]] = []
    for partition, offset, record in read(kafka, topic, progress):
        result.records += 1
        value = record.value()
        reason = nonsense.get(value)
        if reason is None and value is not None and legs:
            envelope = pb.Envelope.FromString(value)
            leg = Leg.FromString(envelope.payload)
            root = envelope.chain[0]
            rows.append((root.partition, root.offset, root.index, *_fields(leg)))
            if not leg.HasField("tail"):
                reason = Reason.NULL_KEY
        if reason is not None:
            result.unusable[topic, partition, offset] = (reason.value, value)
    result.legs = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    return result


def _fields(leg: Leg) -> tuple[Any, ...]:
    return (
        leg.tail if leg.HasField("tail") else None,
        leg.carrier,
        leg.event,
        leg.dep_delay if leg.HasField("dep_delay") else None,
        leg.arr_delay if leg.HasField("arr_delay") else None,
        leg.air_minutes if leg.HasField("air_minutes") else None,
    )


def dead_letters(kafka: KafkaSettings, topic: str) -> Dead:
    """Read the dead-letter topic. A record that a crash caused to be sent twice counts once."""
    found: Dead = {}
    for _, _, record in read(kafka, topic):
        letter = DeadLetterHeaders.read(headers_of(record))
        if letter is not None:
            reason = letter.reason.value if letter.reason else "unknown"
            found[letter.topic, letter.partition, letter.offset] = (reason, record.value())
    return found


def naive(legs: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """The totals per carrier of a consumer that adds up every message it receives."""
    departed, cancelled = pl.col("event") == Leg.EVENT_DEPARTED, pl.col("event") == Leg.EVENT_CANCELLED
    found = (
        legs.filter(pl.col("tail").is_not_null())
        .group_by("carrier")
        .agg(
            legs=departed.sum(),
            air_minutes=pl.col("air_minutes").sum(),
            dep_delay=pl.col("dep_delay").sum(),
            arr_delay=pl.col("arr_delay").sum(),
            worst_delay=pl.col("arr_delay").max(),
            cancelled=cancelled.sum(),
        )
    )
    return {row.pop("carrier"): row for row in found.iter_rows(named=True)}


def differences(truth: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any], what: str) -> list[str]:
    """Compare states with the truth, key by key and field by field; one line per key that differs."""
    lines = [f"{what} {key}: not in the table of flights" for key in sorted(found.keys() - truth.keys())]
    for key, right in sorted(truth.items()):
        state = found.get(key)
        if state is None:
            lines.append(f"{what} {key}: missing")
        elif wrong := [f"{name} {state[name]} for {right[name]}" for name in FIELDS if state[name] != right[name]]:
            lines.append(f"{what} {key}: {', '.join(wrong)}")
    return lines


def unaccounted(due: Mapping[Coordinates, tuple[str, bytes | None]], found: Dead) -> list[str]:
    """Compare the expected dead letters with those found: coordinates, reason and bytes."""
    lines = []
    for place in sorted({**due, **found}):
        want, have = due.get(place), found.get(place)
        if want != have:
            where = ":".join(str(part) for part in place)
            expected, got = (one[0] if one else "none" for one in (want, have))
            lines.append(
                f"dead letter {where}: expected {expected}, found {got}{' with other bytes' * (expected == got)}"
            )
    return lines
