"""Creates the topics, then produces orders and one record that is not JSON.

python produce.py [ORDERS]     to the local stack, or to the broker in HEADWATER_KAFKA_BOOTSTRAP
"""

import json
import random
import sys

from jobs import kafka
from persistence.kafka import AcknowledgedProducer, Message, Topics

PRICES = {"apples": 45, "bread": 320, "coffee": 690, "milk": 129, "olives": 275, "rice": 210}
CUSTOMERS = ["ann", "bob", "cem", "dora", "eve", "finn"]


def order() -> Message:
    """A random order of one to four lines, keyed by its customer."""
    customer = random.choice(CUSTOMERS)
    lines = [
        {"product": product, "pieces": random.randint(1, 5), "price_cents": PRICES[product]}
        for product in random.sample(list(PRICES), random.randint(1, 4))
    ]
    return {"key": customer.encode(), "value": json.dumps({"customer": customer, "lines": lines}).encode()}


def main(count: int) -> None:
    """Create the topics that do not exist, and produce `count` orders."""
    broker = kafka()
    for topic in ("shop.orders", "shop.lines", "shop.dead"):
        Topics(broker).create(topic, partitions=2)
    with AcknowledgedProducer(broker) as producer:
        producer.send_many("shop.orders", [order() for _ in range(count)])
        producer.send("shop.orders", b"not JSON", b"ann")
        producer.flush()
    print(f"{count:,} orders and one record that is not JSON in shop.orders")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
