"""Which slices a republisher forwards at once: only those that continue where every partition of them is read."""

import re
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envelope import Envelope, Hop, encode
from jobs.republish import InputRecord, InputTopics, OutputRecord, Processor, Transform, identity
from jobs.republish.input import Input
from jobs.republish.partition import InputPartition
from jobs.republish.retry import RetryTopics
from jobs.republish.worker import Worker
from persistence.kafka import AcknowledgedProducer
from persistence.kafka.array_producer import texts_of
from tests.property.test_republish import Delivered

VALUE = encode(Envelope(b"payload", (Hop("raw", 0, 1),), key=b"k"))


class Gaps:
    """What a worker uses of its input, and the gaps that it noticed."""

    def __init__(self, *parts: InputPartition) -> None:
        self.partitions = {(part.topic, part.partition): part for part in parts}
        self.noticed: list[tuple[int, int]] = []

    def check(self) -> None:
        """No topic was created again."""

    def jumped(self, part: InputPartition, offset: int) -> None:
        self.noticed.append((part.partition, offset))


def worker_of(source: Gaps, transform: Transform = identity) -> tuple[Worker, list[tuple[str, bytes]]]:
    sent: list[tuple[str, bytes]] = []
    producer = SimpleNamespace(
        send_many=lambda topic, many: sent.extend((topic, one["value"]) for one in many),
        send_arrays=lambda topic, values, keys: sent.extend((topic, value) for value in texts_of(values)),
    )
    processor = Processor(transform, via="r", source=InputTopics(("legs",)), targets={"out": 1000})
    worker = Worker(
        name="r",
        processor=processor,
        source=cast(Input, source),
        producer=cast(AcknowledgedProducer, producer),
        retry=RetryTopics({}),
        dead_letter=("dead", 1000),
        cluster="",
    )
    return worker, sent


def part(number: int, following: int, *, due_ms: int = 0) -> InputPartition:
    made = InputPartition("legs", number, "r", "id", None, "")
    made.next, made.due_ms = following, due_ms
    return made


def delivered(number: int, *offsets: int) -> list[Any]:
    return [Delivered(InputRecord("legs", number, at, b"k", VALUE, (), 1_700_000_000_000, 0)) for at in offsets]


@pytest.mark.parametrize(
    ("first", "second", "offsets", "gaps"),
    [
        ((5, 0), (7, 0), ([5, 6], [7, 8, 9]), []),  # at once
        ((5, 0), (7, 0), ([5, 7], [7, 8, 9]), [(0, 7)]),
        ((4, 0), (7, 0), ([5, 6], [7, 8, 9]), [(0, 5)]),
        ((5, 0), (9, 0), ([5, 6], [7, 8, 9]), [(1, 7)]),  # the position went back
    ],
)
def test_offsets_that_do_not_follow_are_noticed(
    first: tuple[int, int], second: tuple[int, int], offsets: tuple[list[int], list[int]], gaps: list[tuple[int, int]]
) -> None:
    source = Gaps(part(0, first[0]), part(1, second[0]))
    worker, sent = worker_of(source)
    worker.handle(delivered(0, 3, 4))  # checks the topics of the chains
    parts = source.partitions
    parts["legs", 0].next = first[0]
    source.noticed.clear()
    sent.clear()
    worker.handle(delivered(0, *offsets[0]) + delivered(1, *offsets[1]))
    assert source.noticed == gaps
    assert len(sent) == 5
    assert (parts["legs", 0].next, parts["legs", 1].next) == (offsets[0][-1] + 1, offsets[1][-1] + 1)
    counts = worker.take_counts()
    assert (counts.consumed, counts.produced) == (7, 7)


@pytest.mark.parametrize("second", [part(1, 7, due_ms=1), None], ids=["waits", "revoked"])
def test_records_of_a_partition_that_waits_or_was_revoked_are_left(second: InputPartition | None) -> None:
    source = Gaps(part(0, 3), *([second] if second else []))
    worker, sent = worker_of(source)
    worker.handle(delivered(0, 3, 4))
    sent.clear()
    worker.handle(delivered(0, 5, 6) + delivered(1, 7, 8))
    assert len(sent) == 2
    assert source.partitions["legs", 0].next == 7
    assert second is None or second.next == 7
    assert worker.take_counts().produced == 4


def test_how_the_transform_fails_is_said_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transform(record: InputRecord) -> OutputRecord:
        raise LookupError(f"no tariff for {record.offset}")

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    worker, _ = worker_of(Gaps(part(0, 3)), transform)
    worker.handle(delivered(0, 3, 4))
    now[0] += 59
    worker.handle(delivered(0, 5))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("dead letter: legs:0:3: transform_failed: the transform raised LookupError, ")
    assert re.search(r"LookupError at test_republish_worker\.py:\d+ in transform$", caplog.messages[0])
    now[0] += 1
    worker.handle(delivered(0, 6))
    assert len(caplog.messages) == 2
    assert worker.take_counts().dead_lettered == {"transform_failed": 4}
    worker, _ = worker_of(Gaps(part(0, 3)), cast(Any, lambda _: 5))
    worker.handle(delivered(0, 3, 4))
    [said] = caplog.messages[2:]
    assert said.endswith("transform_failed: the transform returned int; it returns None, an OutputRecord, or several")


@pytest.mark.parametrize("attempt", [None, b"9" * 5000, b"\xb2", b""], ids=["none", "many digits", "no digit", "empty"])
@pytest.mark.parametrize("room", [40, 4000], ids=["too large for the retry topic", "fits"])
def test_a_record_that_its_retry_topic_does_not_take_is_a_dead_letter(room: int, attempt: bytes | None) -> None:
    def transform(record: InputRecord) -> OutputRecord:
        raise LookupError

    dead: list[str] = []
    worker, sent = worker_of(Gaps(part(0, 3)), transform)
    worker._retry = RetryTopics({"retry": 0})
    sizes = {"retry": len(VALUE) + 256 + room}
    worker._processor = Processor(
        transform, via="r", source=InputTopics(("legs",)), targets={"out": 1000}, retry_topics=sizes
    )
    cast(Any, worker._producer).send = lambda topic, *_: dead.append(topic)
    cast(Any, worker._producer).flush = lambda timeout: None
    headers = [] if attempt is None else [("hw-retry-attempt", attempt), ("hw-retry-due", attempt)]
    worker.handle([cast(Any, Delivered(InputRecord("legs", 0, 3, b"k", VALUE, headers, 1_700_000_000_000, 0)))])
    worker.finish()
    counts = worker.take_counts()
    assert ([topic for topic, _ in sent], dead) == (([], ["dead"]) if room == 40 else (["retry"], []))
    assert (counts.retried, counts.dead_lettered) == ((0, {"transform_failed": 1}) if room == 40 else (1, {}))
