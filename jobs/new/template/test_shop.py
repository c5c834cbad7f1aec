"""Tests the republisher and the flow in this process, without Kafka and Spark, by the same rules."""

import json
import uuid
from collections.abc import Iterable

from aggregations import MemoryRunner, Record, bind
from envelope import HopWriter
from jobs.republish import InputRecord, InputTopics, Outgoing, Processor

from republisher import order_lines
from shop import flow

VIA = "order-lines"
PROCESSOR = Processor(
    order_lines, via=VIA, source=InputTopics.of("shop.orders", "json"), targets={"shop.lines": 1_000_000}
)

ANN = {
    "customer": "ann",
    "lines": [
        {"product": "bread", "pieces": 1, "price_cents": 320},
        {"product": "milk", "pieces": 6, "price_cents": 129},
    ],
}
BOB = {"customer": "bob", "lines": [{"product": "milk", "pieces": 2, "price_cents": 129}]}


def republished(order: object, offset: int) -> list[Outgoing]:
    """The messages that the republisher sends for the order at this offset of shop.orders."""
    record = InputRecord("shop.orders", 0, offset, b"", json.dumps(order).encode())
    return PROCESSOR.process(record, HopWriter("shop.orders", 0, via=VIA))


def folded(messages: Iterable[Outgoing]) -> MemoryRunner:
    """A runner with its own store that has read these messages from shop.lines."""
    runner = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"))
    runner.process(Record("shop.lines", 0, offset, sent.key, sent.value) for offset, sent in enumerate(messages))
    return runner


def test_an_order_becomes_one_message_for_every_line() -> None:
    assert [message.key for message in republished(ANN, offset=17)] == [b"bread", b"milk"]


def test_lines_are_added_up_by_product_and_by_customer() -> None:
    runner = folded([*republished(ANN, offset=17), *republished(BOB, offset=18)])
    assert runner.results("product")[b"milk"] == {"lines": 2, "pieces": 8, "cents": 1032, "largest": 6}
    assert runner.results("customer")[b"ann"] == {
        "cents": 1094,
        "pieces": {"bread": 1, "milk": 6},
        "favourite": "milk",
    }


def test_lines_that_a_republisher_sends_again_after_a_crash_are_not_counted_again() -> None:
    once = [*republished(ANN, offset=17), *republished(BOB, offset=18)]
    again = folded([*once, *once])
    assert again.results("product") == folded(once).results("product")
    assert again.report.verdicts["product"] == {"accepted": 3, "duplicate_in_batch": 3}
