"""The republisher's transform and the flow of the demo.

`headwater demo` starts `headwater republish jobs.demo.flow:legs --from flights.raw --to flights.legs ...` and
`headwater run jobs.demo.flow:flow ...` as separate processes.
"""

from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import polars as pl

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from envelope import Tombstones
from jobs.demo.leg_pb2 import Leg
from jobs.republish.record import InputRecord, OutputRecord

RAW: Final = "flights.raw"
LEGS: Final = "flights.legs"
DEAD: Final = "flights.dead"
VIA: Final = "timetable"
"""Name of the republisher, which is part of every message's chain."""

_TYPE: Final = Leg.DESCRIPTOR.full_name


def legs(record: InputRecord) -> Iterator[OutputRecord]:
    """The legs of one flight: a cancellation, or a departure and, if the flight has an arrival time, an arrival."""
    flight = record.data
    if flight["dep_time"] is None:
        yield _output(flight, event=Leg.EVENT_CANCELLED)
        return
    yield _output(flight, event=Leg.EVENT_DEPARTED, dep_delay=flight["dep_delay"])
    if flight["arr_time"] is not None:
        # The arrival of a diverted flight has no delay and no time in the air.
        yield _output(flight, event=Leg.EVENT_ARRIVED, arr_delay=flight["arr_delay"], air_minutes=flight["air_time"])


def _output(flight: dict[str, Any], **what: Any) -> OutputRecord:
    leg = Leg(tail=flight["tailnum"], carrier=flight["carrier"], **what)
    return OutputRecord(
        leg.SerializeToString(),
        payload_type=_TYPE,
        content_type="application/protobuf",
        event_time_us=_microseconds(flight["time_hour"]),
    )


@lru_cache(maxsize=10_000)
def _microseconds(hour: str) -> int:
    return int(datetime.fromisoformat(hour).timestamp()) * 1_000_000


TOTALS: Final = Fields(
    legs=count("departed"),
    air_minutes=total("air_minutes"),
    dep_delay=total("dep_delay"),
    arr_delay=total("arr_delay"),
    worst_delay=maximum("arr_delay"),
    cancelled=count("cancelled"),
)

flow: Final[Flow[Any]] = (
    Flow("flights")
    .source(Topic(LEGS, payload=Leg, tombstones=Tombstones.DEAD_LETTER))
    .divert((pl.col("event") == Leg.EVENT_UNSPECIFIED) | (pl.col("air_minutes") <= 0))
    .map(
        departed=pl.when(pl.col("event") == Leg.EVENT_DEPARTED).then(1),
        cancelled=pl.when(pl.col("event") == Leg.EVENT_CANCELLED).then(1),
    )
    .aggregate("aircraft", key="tail", fold=TOTALS)
    .aggregate("carrier", key="carrier", fold=TOTALS)
)
