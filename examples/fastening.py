"""Parts that are ready to be fastened, and the results of every attempt, joined by part.

python fastening.py fill       creates the topics, and produces parts and attempts
headwater describe fastening:flow
headwater run fastening:flow --until-caught-up
headwater inspect fastening:flow --stage part

A part is complete when `fastened` has reached `screws`, whichever of the two topics was read first.
"""

import json
import random
import sys

import polars as pl

from aggregations import Fields, Flow, Json, Topic, count, last, maximum, minimum
from jobs import kafka, run
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

PARTS = 500

ready = Topic("ready-to-fasten", Json({"part": str, "station": str, "screws": int}), envelope=False)
results = Topic("fastening-results", Json({"part": str, "screw": int, "torque": float, "ok": bool}), envelope=False)

flow = (
    Flow("fastening")
    .source(ready, results)
    .aggregate(
        "part",
        key="part",
        fold=Fields(
            station=last("station"),
            screws=maximum("screws"),
            attempts=count("screw"),
            fastened=count(where=pl.col("ok")),
            weakest=minimum("torque", where=pl.col("ok")),
        ),
    )
    .filter(pl.col("screw").is_not_null())
    .aggregate("screw", key="screw", fold=Fields(attempts=count(), failed=count(where=pl.col("ok").not_())))
)


def fill(broker: KafkaSettings) -> int:
    """Produce parts and results; return the number of attempts."""
    rng, attempts = random.Random(3), 0
    with AcknowledgedProducer(broker) as producer:
        for number in range(PARTS):
            part = f"P-{number}"
            _send(producer, ready.name, part, {"part": part, "station": rng.choice(["left", "right"]), "screws": 4})
            for screw in range(1, 5):
                ok = False
                while not ok:
                    ok, attempts = rng.random() < 0.9, attempts + 1
                    torque = round(rng.uniform(11, 13) if ok else rng.uniform(2, 10), 1)
                    _send(producer, results.name, part, {"part": part, "screw": screw, "torque": torque, "ok": ok})
        producer.flush()
    return attempts


def _send(producer: AcknowledgedProducer, topic: str, part: str, value: dict[str, object]) -> None:
    producer.send(topic, json.dumps(value).encode(), key=part.encode())


if __name__ == "__main__":
    if sys.argv[1:] == ["fill"]:
        for name in (ready.name, results.name):
            Topics(kafka()).create(name, 4)
        print(f"{fill(kafka()):,} attempts at {PARTS} parts in {results.name}")
    else:
        run(flow)
