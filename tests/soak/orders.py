"""Orders that follow from a seed, their plain fold, and a producer that puts each of them into the topic once."""

import json
import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from persistence.kafka import AcknowledgedProducer, KafkaSettings, Message, Topics
from tests.support.mission import ORDERS

Sums = dict[bytes, dict[str, int]]
_TILLS = 97
_AWAY_SECONDS = 600.0  # longest that a record may wait for a broker that is killed, frozen or full


def orders(seed: int, keys: int) -> Iterator[dict[str, Any]]:
    """Yield order 0, 1, 2, ...: of `keys` customers, with none to three items out of `keys` articles."""
    rng = random.Random(seed)
    number = 0
    while True:
        customer, till = int(rng.random() * keys), int(rng.random() * _TILLS)
        items = [[f"article {int(rng.random() * keys)}", 1 + int(rng.random() * 99)] for _ in range(number % 4)]
        yield {"number": number, "till": f"till {till}", "customer": f"customer {customer}", "items": items}
        number += 1


class Truth:
    """What every state must be once all orders are folded, each of them once.

    Attributes:
        sums: Items, pieces and largest number of pieces by stage and key.
        items: Items of all orders.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {stage: defaultdict(lambda: {"items": 0, "pieces": 0, "most": 0})
                                      for stage in ("customer", "article")}  # fmt: skip
        self.items = 0

    def add(self, order: Mapping[str, Any]) -> None:
        """Fold one order."""
        customer = order["customer"].encode()
        for article, pieces in order["items"]:
            self.items += 1
            for sums in (self.sums["customer"][customer], self.sums["article"][article.encode()]):
                sums["items"] += 1
                sums["pieces"] += pieces
                sums["most"] = max(sums["most"], pieces)


class Feed:
    """Produces the orders in slices of uneven size, on a thread of its own while it is open.

    Args:
        settings: Where Kafka is.
        seed: What the orders follow from.
        keys: Customers, and articles.
        sent: Orders that are in the topic from earlier runs.
        since: Next offsets at the moment of which `sent` tells, by partition: later records were sent by a run that
            could not tell any more. They are not sent again; those that it left out between them are.
        topic: Topic of the orders.

    Attributes:
        sent: Orders sent, from the first one on without a gap.
        truth: Their plain fold. An order is in it before it is sent.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        seed: int,
        keys: int,
        sent: int,
        since: Mapping[int, int],
        topic: str = ORDERS,
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._orders = orders(seed, keys)
        self._rng = random.Random(f"feed {seed} {sent}")
        self.sent = 0
        self.truth = Truth()
        for _ in range(sent):
            self.truth.add(next(self._orders))
            self.sent += 1
        self._there = set(_numbers(settings, topic, since)) if sent or since else set()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if (behind := max(self._there, default=-1) + 1 - sent) > 0:
            self.send(behind)

    def send(self, count: int) -> None:
        """Send the next orders and wait until all are in the log."""
        with self._producer() as producer:
            while count > 0:
                self._slice(producer, min(count, 20_000))
                count -= 20_000

    def open(self, rate: int) -> None:
        """Begin to send about `rate` orders a second."""
        self._closing.clear()
        self._thread = threading.Thread(target=self._work, args=(rate,), name="feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more; return when all that was sent is in the log."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Send no more, without waiting."""
        self._closing.set()

    def _work(self, rate: int) -> None:
        try:
            with self._producer() as producer:
                while not self._closing.wait(0.2):
                    burst = 40 if self._rng.random() < 0.01 else 1  # now and then as much as a large batch takes
                    self._slice(producer, int(rate * 0.2 * burst * (0.5 + self._rng.random())))
        except BaseException as error:
            self._failure = error

    def _slice(self, producer: AcknowledgedProducer, count: int) -> None:
        messages = []
        for _ in range(count):
            order = next(self._orders)
            self.truth.add(order)
            self.sent += 1
            if order["number"] not in self._there:
                messages.append(Message(key=order["till"].encode(), value=json.dumps(order).encode()))
        producer.send_many(self._topic, messages)
        producer.flush()

    def _producer(self) -> AcknowledgedProducer:
        # A new one for each round: it sees topics that were created again, and partitions that were added, at once.
        return AcknowledgedProducer(self._settings, delivery_timeout=_AWAY_SECONDS)


def _numbers(settings: KafkaSettings, topic: str, since: Mapping[int, int]) -> Iterator[int]:
    """Numbers of the orders that the topic has behind these offsets."""
    marks = Topics(settings, timeout=30).marks([topic])
    ends = {partition: one.high for (_, partition), one in marks.items() if one.high > since.get(partition, 0)}
    consumer = Consumer(settings.client(group_id="soak", enable_auto_commit=False))
    try:
        consumer.assign([TopicPartition(topic, partition, since.get(partition, 0)) for partition in ends])
        while ends:
            for record in consumer.consume(1000, 1.0):
                partition, offset = record.partition(), record.offset()
                if record.error() or partition is None or offset is None:
                    continue
                yield json.loads(record.value() or b"")["number"]
                if offset + 1 >= ends.get(partition, 0):
                    ends.pop(partition, None)
    finally:
        consumer.close()
