"""A worker does the same with slices of records at once as with each record by itself."""

from dataclasses import asdict
from operator import itemgetter
from typing import Any, cast

from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from envelope import Envelope, Hop, encode
from jobs.republish import InputRecord, InputTopics, Processor, identity
from jobs.republish.input import Input
from jobs.republish.partition import Consumed, InputPartition
from jobs.republish.retry import RetryTopics
from jobs.republish.worker import Worker
from persistence.kafka import AcknowledgedProducer
from persistence.kafka.array_producer import Spans, texts_of
from tests.property.test_republish import Delivered
from tests.simulation.life import SimulatedReport

GOOD = encode(Envelope(b"payload", (Hop("raw", 0, 1),), key=b"k"))
LONGER = encode(Envelope(bytes(80), (Hop("raw", 0, 1), Hop("mid", 2, 300)), key=b"k"))
KEYLESS = encode(Envelope(b"payload", (Hop("raw", 0, 1),)))
EMPTY = encode(Envelope(b"payload", (Hop("raw", 0, 1),), key=b""))
GONE, WAITS = 2, 3
"""Partitions whose records are left: one was revoked, one waits."""

KINDS = {
    "good": {},
    "longer": {"value": LONGER},
    "headers": {"headers": [("h", b"1")]},
    "no key": {"key": None, "value": KEYLESS},
    "lost its key": {"key": None},  # a dead letter
    "an empty key": {"key": b"", "value": EMPTY},
    "another key": {"key": b"other"},  # a dead letter
    "damaged": {"value": GOOD[:-1] + b"\0"},
    "a tombstone": {"value": None},
    "no time": {"timestamp_ms": None},
}
usual = st.sampled_from(["good", "good", "longer", "no key"])
kinds = usual | usual | usual | st.sampled_from([*KINDS, "end"])
places = st.sampled_from([0, 0, 0, 0, 1, 1, 1, GONE, WAITS])
steps = st.sampled_from([1, 1, 1, 1, 1, 1, 2, 9])
runs = st.tuples(places, kinds, steps, st.integers(1, 40), st.sampled_from([0, 0, 1]))


class Source:
    """What a worker uses of its input, and what it heard."""

    def __init__(self) -> None:
        self.partitions = {("legs", one): InputPartition("legs", one, "r", "id", None, "") for one in (0, 1, WAITS)}
        self.partitions["legs", WAITS].due_ms = 1
        self.heard: list[tuple[str, int, int | None, int]] = []

    def check(self) -> None:
        """No topic was created again."""

    def jumped(self, part: InputPartition, offset: int) -> None:
        self.heard.append(("jumped", part.partition, part.next, offset))

    def raise_for(self, message: Consumed, error: KafkaError) -> None:
        part = self.partitions.get((message.topic(), message.partition()))
        self.heard.append(("end", message.partition(), part and part.next, message.offset()))


class Sink:
    """A producer that lists what it was given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes | None, bytes | None, Any]] = []

    def send_many(self, topic: str, many: list[dict[str, Any]]) -> None:
        self.sent += [(topic, one["value"], one.get("key"), one.get("headers")) for one in many]

    def send_arrays(self, topic: str, values: Spans, keys: Spans) -> None:
        pairs = zip(texts_of(values), texts_of(keys), strict=True)
        self.sent += [(topic, value, key, None) for value, key in pairs]


def worked(slices: list[list[Any]], *, at_once: bool) -> tuple[Any, ...]:
    source, sink = Source(), Sink()
    worker = Worker(
        name="r",
        processor=Processor(identity, via="r", source=InputTopics(("legs",)), targets={"out": 1000}),
        source=cast(Input, source),
        producer=cast(AcknowledgedProducer, sink),
        retry=RetryTopics({}),
        dead_letter=("dead", 1 << 20),
        cluster="",
    )
    if not at_once:
        worker.__dict__["_express"] = None
    worker.handle(delivered([(0, "longer", 1, 1, 0)], {0: 0})[0])  # checks the topics of the chains
    for some in slices:
        worker.handle(some)
    assert (worker._express is not None) == at_once
    dead = len(worker._dead)
    return (
        sink.sent,
        sorted(source.heard, key=itemgetter(1)),  # the order is that of each partition
        {place: part.next for place, part in source.partitions.items()},
        dead,
        {name: count for name, count in asdict(worker.take_counts()).items() if name != "_started"},
    )


def delivered(given: list[tuple[int, str, int, int, int]], at: dict[int, int]) -> list[list[Any]]:
    made: list[Any] = []
    for number, kind, step, count, epoch in given:
        for _ in range(count):
            offset = at[number] = at.get(number, 10) + step
            if kind == "end":
                made.append(SimulatedReport(KafkaError._PARTITION_EOF, "legs", number, offset))
                break
            record: dict[str, Any] = {"key": b"k", "value": GOOD, "timestamp_ms": 1_700_000_000_000, **KINDS[kind]}
            made.append(Delivered(InputRecord("legs", number, offset, leader_epoch=epoch, **record)))
    return [made]


@given(st.lists(st.lists(runs, max_size=12), min_size=1, max_size=3))
def test_slices_at_once_and_records_one_by_one(given_runs: list[list[tuple[int, str, int, int, int]]]) -> None:
    at: dict[int, int] = {}
    slices = [one for some in given_runs for one in delivered(some, at)]
    assert worked(slices, at_once=True) == worked(slices, at_once=False)
