"""Payments per category of their merchant, which is looked up in a table: the latest record of each merchant.

python spending.py fill        creates the topics, and produces merchants and payments
headwater describe spending:flow
headwater run spending:flow --until-caught-up
headwater inspect spending:flow --stage category
python spending.py change      every merchant moves to another category, and pays once more

Run the flow again: earlier payments keep their categories. The broker is that of the local stack, or of
HEADWATER_KAFKA_BOOTSTRAP.
"""

import json
import random
import sys

import polars as pl

from aggregations import Fields, Flow, Json, Topic, approximate_distinct, count, maximum, total
from jobs import kafka, run
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

CATEGORIES = ("food", "books", "travel", "garden")
MERCHANTS = 40

payments = Topic("payments", Json({"card": str, "merchant": str, "cents": int}), envelope=False)
merchants = Topic("merchants", Json({"category": str, "country": str}), envelope=False)

flow = (
    Flow("spending")
    .source(payments)
    .aggregate("card", key="card", fold=Fields(payments=count(), cents=total("cents"), highest=maximum("cents")))
    .lookup("merchant", merchants, key="merchant", columns=["category"])
    .aggregate(
        "category",
        key=pl.col("category").fill_null("unknown"),
        fold=Fields(payments=count(), cents=total("cents"), cards=approximate_distinct("card")),
    )
)


def fill(broker: KafkaSettings, *, shift: int, count: int) -> None:
    """Produce a record of each merchant but the last one, and payments.

    Args:
        broker: The broker.
        shift: Number of categories by which merchants have moved.
        count: Number of payments.
    """
    rng = random.Random(shift)
    with AcknowledgedProducer(broker) as producer:
        for number in range(MERCHANTS - 1):
            row = {"category": CATEGORIES[(number + shift) % len(CATEGORIES)], "country": "FR"}
            producer.send("merchants", json.dumps(row).encode(), key=f"m-{number}".encode())
        for _ in range(count):
            card, merchant = f"c-{rng.randrange(200)}", f"m-{rng.randrange(MERCHANTS)}"
            value = {"card": card, "merchant": merchant, "cents": rng.randrange(1, 20_000)}
            producer.send("payments", json.dumps(value).encode(), key=card.encode())
        producer.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["fill"]:
        Topics(kafka()).create("payments", 4)
        Topics(kafka()).create("merchants", 2, {"cleanup.policy": "compact"})
        fill(kafka(), shift=0, count=10_000)
    elif sys.argv[1:] == ["change"]:
        fill(kafka(), shift=1, count=10_000)
    else:
        run(flow)
