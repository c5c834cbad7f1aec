"""Fastening stations: parts that are ready and the results of every attempt, joined by part; attempts per screw in windows.

python stations.py fill        creates the topics, and produces parts and attempts
headwater describe stations:flow
headwater run stations:flow --until-caught-up
headwater inspect stations:flow --stage part
headwater inspect stations:flow --stage screw --where 'attempts > 3'

A part is complete when `fastened` has reached `screws`, whichever of the two topics was read first. The broker is that of
the local stack, or of HEADWATER_KAFKA_BOOTSTRAP.
"""

import json
import random
import sys
from datetime import UTC, datetime

import polars as pl

from aggregations import Fields, Flow, Json, Topic, collect, count, last, maximum, minimum, session, tumbling
from jobs import kafka, run
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

PARTS = 500
SCREWS = 4
BEGIN = round(datetime(2024, 11, 24, 6, tzinfo=UTC).timestamp())

READY = {"part": str, "station": str, "screws": int, "at": int}
RESULT = {"part": str, "station": str, "screw": int, "torque": float, "ok": bool, "at": int}
ready = Topic("ready-to-fasten", Json(READY), envelope=False, time="at")
results = Topic("fastening-results", Json(RESULT), envelope=False, time="at")
screw = pl.format("{}/{}", "part", "screw")

flow = (
    Flow("stations")
    .source(ready, results)
    .aggregate(
        "part",
        key="part",
        fold=Fields(
            station=last("station", by="at"),
            screws=maximum("screws"),
            attempts=count("screw"),
            fastened=count(where=pl.col("ok")),
            weakest=minimum("torque", where=pl.col("ok")),
        ),
    )
    .filter(pl.col("screw").is_not_null())
    .aggregate(
        "screw",
        key=screw,
        fold=Fields(attempts=count(), failed=count(where=~pl.col("ok")), torque=maximum("torque")),
        window=tumbling("5m", lateness="10m"),
    )
    # A screw that is not touched for two minutes is done: what comes later is rework, and another session.
    .aggregate(
        "visit",
        key=screw,
        fold=Fields(attempts=count(), ok=last("ok", by="at"), torques=collect("torque", 20)),
        window=session("2m", lateness="10m"),
    )
    .aggregate(
        "station",
        key="station",
        fold=Fields(attempts=count(), failed=count(where=~pl.col("ok"))),
        window=tumbling("10m", lateness="10m"),
    )
)


def fill(broker: KafkaSettings) -> int:
    """Produce parts and results in the order of their times; return the number of attempts."""
    rng = random.Random(3)
    events: list[tuple[int, str, dict[str, object]]] = []
    for number in range(PARTS):
        at = BEGIN + 30 * number
        part = {"part": f"P-{number}", "station": rng.choice(["left", "right"])}
        events.append((at, ready.name, {**part, "screws": SCREWS}))
        for place in range(1, SCREWS + 1):
            ok = False
            while not ok:
                at, ok = at + 5, rng.random() < 0.9
                torque = round(rng.uniform(11, 13) if ok else rng.uniform(2, 10), 1)
                events.append((at, results.name, {**part, "screw": place, "torque": torque, "ok": ok}))
    events.sort(key=lambda event: event[0])
    with AcknowledgedProducer(broker) as producer:
        for at, topic, value in events:
            producer.send(topic, json.dumps({**value, "at": at * 1000}).encode(), key=str(value["part"]).encode())
        producer.flush()
    return len(events) - PARTS


if __name__ == "__main__":
    if sys.argv[1:] == ["fill"]:
        for name in (ready.name, results.name):
            Topics(kafka()).create(name, 4)
        print(f"{fill(kafka()):,} attempts at {PARTS} parts in {results.name}")
    else:
        run(flow)
