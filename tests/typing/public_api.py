"""The public names as a user's program has them, for mypy: `make lint` checks this file strictly, nothing runs it.

A line with `type: ignore[...]` is wrong on purpose. If mypy no longer reports exactly that error there, it reports
the comment as unused, and the check fails.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, assert_type

import polars as pl
import pytest
from pyspark.sql import DataFrame

from aggregations import (
    Aggregator,
    Element,
    Emit,
    Fields,
    Flow,
    Fold,
    Json,
    Latest,
    MemoryRunner,
    Raw,
    Record,
    RunOptions,
    Topic,
    approximate_distinct,
    bind,
    collect,
    count,
    first,
    histogram,
    last,
    maximum,
    mean,
    minimum,
    quantiles,
    read_snapshot,
    run_flow,
    session,
    standard_deviation,
    top,
    total,
    tumbling,
    variance,
    window_columns,
)
from envelope import (
    Decision,
    Envelope,
    Histories,
    Hop,
    HopWriter,
    Lineage,
    Node,
    Reason,
    Siblings,
    Tombstones,
    Verdict,
    append_hop,
    decode,
    encode,
)
from envelope.filters import DedupPolicy, SequenceFilter, TimeWindows, distinct, from_value
from jobs import States, View, kafka, states
from jobs.republish import (
    PASS,
    InputRecord,
    InputTopics,
    JsonPayload,
    Outgoing,
    OutputRecord,
    Processor,
    Republisher,
    RetryTopics,
    Statistics,
    Transform,
    Wrapping,
    identity,
)
from persistence import FlowRef, StateStore, Stored, Write, filter_states, open_store
from persistence.contract import StoreContract
from persistence.kafka import AcknowledgedProducer, DeduplicatingWriter, KafkaSettings, Topics

# Flows.

orders = Flow("orders").source(Topic("orders", payload=Json({"customer": str, "cents": int}), envelope=False))
assert_type(orders, Flow[Mapping[str, Any]])

columns = (
    orders.filter(pl.col("cents") > 0)
    .divert("test")
    .map(euros=pl.col("cents") / 100)
    .aggregate(
        "customer",
        key="customer",
        fold=Fields(
            orders=count(),
            cents=total("cents"),
            smallest=minimum("cents"),
            largest=maximum(pl.col("cents")),
            usual=mean("cents"),
            opened=first("cents"),
            latest=last("cents", by="cents"),
            large=count(where=pl.col("cents") > 100),
            spread=variance("cents", where="test"),
            deviation=standard_deviation("cents"),
            sizes=histogram("cents", [1, 10, 99.5]),
            opening=collect("cents", 3),
            customers=approximate_distinct("customer", precision=12),
            typical=quantiles("cents", at=[0.5], k=100),
            usual_ones=top("customer", 3, size=100),
        ),
        history=64,
        store="sqlite://states.db",
        emit=Emit(cents="new.cents", before=pl.col("old.cents")).when("test").changed(),
    )
    .publish_states("orders.states")
)


def cents(order: Element[Any]) -> int:
    return int(order["cents"])


def coins(amount: Element[int]) -> Iterator[bool]:
    yield from (True for _ in range(amount.value))


def named(amount: Element[int]) -> bytes:
    return b"%d" % amount.value


numbers = orders.map(cents)
assert_type(numbers, Flow[int])
assert_type(numbers.flat_map(coins), Flow[bool])
assert_type(orders.flat_map(pl.col("lines")), Flow[Mapping[str, Any]])
assert_type(numbers.filter(lambda amount: amount.value > 0), Flow[int])
assert_type(numbers.publish("amounts", value=named), Flow[int])
assert_type(numbers.also_to("all", lambda flow: flow.publish("all", value=named)), Flow[int])
assert_type(numbers.branch("large", lambda amount: amount.value > 9, lambda flow: flow.publish("large")), Flow[int])
assert_type(numbers.via(lambda flow: flow.map(lambda amount: str(amount.value))), Flow[str])
numbers.publish(lambda amount: f"amounts.{amount.value % 2}", topics=["amounts.0", "amounts.1"])
numbers.branch("large", "amount > 9")  # type: ignore[call-arg]
assert_type(numbers.lookup("rates", Topic("rates", Json({"rate": float})), "currency"), Flow[Mapping[str, Any]])
numbers.lookup("rates", "rates", "currency")  # type: ignore[arg-type]

assert_type(Flow("both").source(Topic("orders"), Topic("returns")), Flow[Mapping[str, Any]])
assert_type(orders.merge(numbers), Flow[Mapping[str, Any] | int])

numbers.publish("amounts", value=lambda amount: str(amount.value))  # type: ignore[arg-type,return-value]
numbers.flat_map(lambda amount: amount.value)  # type: ignore[arg-type,return-value]
orders.map(euros=100)  # type: ignore[call-overload]
orders.source("orders")  # type: ignore[arg-type]
orders.merge(Topic("returns"))  # type: ignore[arg-type]
Fields(orders=count, cents="cents")  # type: ignore[arg-type]
total()  # type: ignore[call-arg]
total("cents", "test")  # type: ignore[call-arg]
histogram("cents")  # type: ignore[call-arg]
top("customer")  # type: ignore[call-arg]
Emit("new.cents")  # type: ignore[call-arg]
Emit(cents=1)  # type: ignore[arg-type]
Flow()  # type: ignore[call-arg]
Topic("orders", Raw(), tombstones="skip")  # type: ignore[arg-type]


class Sum:
    """A fold of a user's own."""

    def zero(self) -> int:
        return 0

    def fold(self, state: int, element: Element[Any]) -> int:
        return state + cents(element)


class NoZero:
    """Not a fold."""

    def fold(self, state: int, element: Element[Any]) -> int:
        return state


fold: Fold[int] = Sum()
not_a_fold: Fold[int] = NoZero()  # type: ignore[assignment]
summed = orders.aggregate("customer", key="customer", fold=Sum(), emit=lambda element, state: [state])
orders.aggregate("customer", key="customer", fold=NoZero())  # type: ignore[arg-type]
orders.aggregate("customer", key="customer")  # type: ignore[call-arg]
orders.aggregate("customer", key="customer", fold=Sum(), history="32")  # type: ignore[arg-type]
orders.aggregate("customer", key="customer", fold=Sum(), window=tumbling("5m", lateness="1m"))
orders.aggregate("customer", key="customer", fold=Sum(), window=session("5m", lateness="1m"))
orders.aggregate("customer", key="customer", fold=Sum(), window=tumbling("5m", retention="0s"))
orders.aggregate("customer", key="customer", fold=Sum(), window=tumbling("5m")).publish_states("final", on="close")
orders.aggregate("customer", key="customer", fold=Sum(), window=tumbling("5m")).publish_states("final", "close")  # type: ignore[call-arg]
orders.aggregate("customer", key="customer", fold=Sum(), expire_after="30d")
orders.aggregate("customer", key="customer", fold=Sum(), expire_after=30)  # type: ignore[arg-type]
orders.aggregate("customer", key="customer", fold=Sum(), window="5m")  # type: ignore[arg-type]


# Runners.

runner = MemoryRunner(summed, bind(summed, {}, "memory://orders"), accept=["lost-records"])
report = runner.process([Record("orders", 0, 17, b"ann", b'{"customer": "ann", "cents": 5}')])
assert_type(report.verdicts["customer"][Verdict.ACCEPTED.value], int)
assert_type(runner.results("customer"), dict[bytes, Any])

MemoryRunner(summed, "memory://orders")  # type: ignore[arg-type]
runner.process(Record("orders", 0, 17, b"ann", None))  # type: ignore[arg-type]
Record("orders", "0", 17, b"ann", None)  # type: ignore[arg-type]
Record("orders", 0, 17, "ann", None)  # type: ignore[arg-type]
bind(summed, "memory://orders")  # type: ignore[arg-type]


def on_spark(stop: threading.Event) -> int:
    kafka = KafkaSettings("broker:9092")
    RunOptions(kafka="broker:9092")  # type: ignore[arg-type]
    RunOptions(kafka)  # type: ignore[call-arg]
    run_flow(summed, kafka)  # type: ignore[arg-type]
    options = RunOptions(kafka=kafka, stores=bind(summed, {}), until_caught_up=True)
    options.group = "lag"  # type: ignore[misc]
    return run_flow(summed, options, stop=stop).records


def in_a_query(rows: DataFrame) -> int:
    with summed.aggregator(stores="redis://host", progress=lambda report: print(report.records)) as aggregator:
        assert_type(aggregator, Aggregator)
        rows.writeStream.foreachBatch(aggregator)
        return aggregator.fold(rows).records


# Envelopes.

chain = (Hop("orders", 0, 17, via="lines", index=0),)
value: bytes = encode(Envelope(b"payload", chain))
assert_type(decode(value).chain, tuple[Hop, ...])
assert_type(decode(value).payload, bytes)
assert_type(Lineage.of(chain, Node("lines", 0, 3)).root, Node)
reason: Reason = Reason.FOLD_FAILED

encode(b"payload")  # type: ignore[arg-type]
Envelope("payload", chain)  # type: ignore[arg-type]
append_hop("value", b"hop")  # type: ignore[arg-type]

standing = Lineage.of(chain, Node("lines", 0, 3)).standing()
assert_type(Histories().judge([standing], Siblings.GROUP), list[Decision])
Histories().judge(standing)  # type: ignore[arg-type]


# Republishers.


def lines(record: InputRecord) -> Iterator[OutputRecord]:
    for line in record.data["lines"]:
        yield OutputRecord(line["text"].encode(), key=None, content_type="text/plain")


def texts(record: InputRecord) -> Iterable[str]:
    return [str(record.root)]


transforms: list[Transform] = [lines, identity, lambda record: None, lambda record: PASS]
source = InputTopics("orders", Wrapping.NONE, JsonPayload, Tombstones.DEAD_LETTER)
processor = Processor(lines, via="lines", source=source, targets={"lines": 1_000_000})
order = InputRecord("orders", 0, 17, b"ann", b'{"lines": []}')
assert_type(processor.process(order, HopWriter("orders", 0, via="lines")), list[Outgoing])

Processor(texts, via="lines", source=source, targets={"lines": 1_000_000})  # type: ignore[arg-type]
Processor(lines, via="lines", source=source, targets=["lines"])  # type: ignore[arg-type]
OutputRecord("text")  # type: ignore[arg-type]
OutputRecord(b"text", partition=3)  # type: ignore[call-arg]


def serve(settings: KafkaSettings) -> Statistics:
    Topics(settings).create("lines", partitions=4)
    with AcknowledgedProducer(settings) as producer:
        producer.send("orders", b"{}", b"ann")
        producer.send("orders", "{}", b"ann")  # type: ignore[arg-type]
    return Republisher(
        lines,
        source=source,
        target="lines",
        name="lines",
        settings=settings,
        dead_letter="dead",
        retry=RetryTopics({"orders.retry.10s": 10}),
        headers_mirror=True,
    ).run(until_caught_up=True, progress=print)


def misspelt(settings: KafkaSettings) -> Republisher:
    return Republisher(
        lines,
        source=source,
        target="lines",
        name="lines",
        settings=settings,
        on_statistics=print,  # type: ignore[call-arg]
    )


# States and stores.

latest = Latest()
assert_type(latest.apply(b"ann", read_snapshot(b"value")), bool)
latest.apply(b"ann", b"value")  # type: ignore[arg-type]
read = states(summed, "customer", bind(summed, {}), prefix=b"a", where="total > 9", limit=5)
assert_type(read, States)
assert_type(list(read), list[View])
assert_type(read.frame(), pl.DataFrame)
states(summed, "customer", bind(summed, {}), prefix="a")  # type: ignore[arg-type]
assert_type(kafka(), KafkaSettings)

store: StateStore = open_store("memory://orders")
assert_type(store.load(FlowRef("orders").stage("customer"), [b"ann"]), dict[bytes, Stored])
store.save(FlowRef("orders"), [Write(b"ann", 0, b"5")], epoch=1, batch=1)  # type: ignore[arg-type]


class TestMine(StoreContract):
    @pytest.fixture
    def store_url(self, tmp_path: Any) -> str:
        return f"mine://{tmp_path}"


# Filters.

ascending = SequenceFilter(from_value("n"))
policy = DedupPolicy(default=True, namespaces={"test.": False})
assert_type(orders.deduplicate(ascending, policy=policy), Flow[Mapping[str, Any]])
orders.deduplicate(ascending, policy={"orders": True})  # type: ignore[arg-type]
assert_type(window_columns(distinct(TimeWindows(timedelta(hours=1)))), dict[str, pl.Expr])
assert_type(dict(filter_states(ascending, "memory://filters")), dict[bytes, Any])


def write(settings: KafkaSettings) -> list[Verdict]:
    with DeduplicatingWriter("gateway", ["orders"], settings, "memory://snapshots", policy=policy) as writer:
        writer.write("orders", [b"payload"])  # type: ignore[list-item]
        return writer.write("orders", [Envelope(b"payload", producer="till", sequence=1)])
