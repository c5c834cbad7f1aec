"""Filters as steps of a flow, with crashes at every step: each event is folded once, and it is the right one.

The oracle is the filter alone, over the whole log of each partition.
"""

import json
import random
from datetime import timedelta
from typing import Any

import pytest

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, TopicPartition, decode, encode
from envelope.filters import (
    Beyond,
    Decreasing,
    EventIdFilter,
    FilterStates,
    Gaps,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SessionWindows,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_envelope,
)
from persistence import StoreError
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.support.pure import fresh_store

TEN = timedelta(seconds=10)
RULES: list[Any] = [
    SequenceFilter(from_envelope("sequence")),
    SequenceFilter(from_envelope("sequence"), scope_by=Scope.KEY),
    SequenceFilter(from_envelope("sequence"), decreasing=Decreasing.REJECT),
    ProducerFilter(),
    ProducerFilter(gaps=Gaps.REFUSE, limit=2),
    EventIdFilter(from_envelope("event_id"), horizon=TEN),
    EventIdFilter(from_envelope("event_id"), horizon=TEN, limit=3, beyond=Beyond.DROP),
    deduplicate_by_key(TEN),
    deduplicate_by_key_value(from_envelope("event_id"), TEN),
    distinct(TimeWindows(TEN, grace=TEN)),
    distinct(SessionWindows(TEN, grace=TEN)),
]
POINTS = ["epoch", "load", "load:filter", "fold", "publish", "persist", "manifest", "persist:filter", "persist:key"]


class Places:
    """The coordinates that are folded: every one of them, in a list."""

    def zero(self) -> list[str]:
        return []

    def fold(self, state: list[str], element: Element[Any]) -> list[str]:
        return [*state, str(element.own)]


def flow_of(rule: Any) -> Flow[Any]:
    return (
        Flow("filtered")
        .source(Topic("events"))
        .deduplicate(rule, name="filter")
        .aggregate("key", key="_key", fold=Places())
    )


def log_of(draw: random.Random) -> list[Record]:
    """A log of two partitions: events of two producers, of which some are sent again."""
    sent: dict[int, list[Envelope]] = {0: [], 1: []}
    records: list[Record] = []
    sequences = dict.fromkeys([("t1", 0), ("t1", 1), ("t2", 0), ("t2", 1)], -1)
    for _ in range(40):
        partition = draw.randrange(2)
        log = sent[partition]
        if log and draw.random() < 0.4:
            message = draw.choice(log[-6:])
        else:
            producer = draw.choice(["t1", "t2"])
            sequences[producer, partition] = number = sequences[producer, partition] + draw.choice([1, 1, 1, 2])
            message = Envelope(
                json.dumps({"n": number}).encode(),
                key=b"%s%d" % (draw.choice([b"a", b"b"]), partition),
                event_id=f"{producer}-{partition}-{number}",
                producer=producer,
                sequence=number,
                sequence_per_partition=True,
            )
        log.append(message)
        time = 1000 * (len(records) // 2 + draw.randrange(-8, 3)) + 10_000
        records.append(Record("events", partition, len(log) - 1, message.key, encode(message), time, topic_id="T"))
    return records


def expected(rule: Any, records: list[Record]) -> set[str]:
    """What the filter alone passes on."""
    alone = FilterStates(rule)
    return {str(one.node) for one in records if alone.passes(one)}


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def run(rule: Any, records: list[Record], injected: list[Fault], draw: random.Random) -> tuple[list[str], int]:
    """The places that the flow folds, with a new runner on the same store after each crash; and the crashes."""
    flow, store, crashes = flow_of(rule), fresh_store(), 0
    with faults.use(Injector(injected, crash)):
        while True:
            try:
                runner = MemoryRunner(flow, bind(flow, {}, store), topic_ids={"events": "T"})
                start = runner.run.start
                left = [one for one in records if one.offset >= start.get(TopicPartition("events", one.partition), 0)]
                while left:
                    size = draw.randrange(1, 9)
                    ends = runner.unfinished
                    again = [one for one in left if one.offset < ends.get(TopicPartition("events", one.partition), 0)]
                    batch = again or left[:size]
                    left = [one for one in left if one not in batch]
                    runner.process(batch)
                return [place for state in runner.results("key").values() for place in state], crashes
            except (Crash, StoreError):
                crashes += 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_whatever_crashes_and_wherever_batches_end_what_the_filter_passes_on_is_folded_once(rule: Any) -> None:
    crashes, dropped = 0, 0
    for seed in range(30):
        draw = random.Random(seed)
        records = log_of(draw)
        injected = [
            Fault(draw.choice(POINTS), draw.choice(list(FaultOutcome)), draw.randrange(1, 12)) for _ in range(3)
        ]
        folded, crashed = run(rule, records, injected, draw)
        wanted = expected(rule, records)
        assert len(folded) == len(set(folded)), seed
        assert set(folded) == wanted, seed
        crashes, dropped = crashes + crashed, dropped + len(records) - len(wanted)
    assert crashes > 20
    assert dropped > 100


OVER_PARTITIONS: list[Any] = [
    deduplicate(from_envelope("event_id"), TEN, partitions=2),
    deduplicate_by_key(TEN, key=from_envelope("event_id"), partitions=2),
    EventIdFilter(from_envelope("event_id"), horizon=timedelta(days=1), partitions=2),
]


def scattered(draw: random.Random) -> list[Record]:
    """A log of three partitions: events with one time, of which some are sent again into any partition."""
    records: list[Record] = []
    ends = [0, 0, 0]
    for number in range(40):
        again = draw.choice(records[-6:]) if records and draw.random() < 0.4 else None
        message = Envelope(b"{}", key=b"%d" % (number % 3), event_id=f"e{number}")
        partition = draw.randrange(3)
        key, value = (message.key, encode(message)) if again is None else (again.key, again.value)
        records.append(Record("events", partition, ends[partition], key, value, 10_000, topic_id="T"))
        ends[partition] += 1
    return records


@pytest.mark.parametrize("rule", OVER_PARTITIONS, ids=lambda rule: type(rule).__name__)
def test_a_filter_over_all_partitions_passes_on_one_of_each_event_whatever_crashes(rule: Any) -> None:
    crashes = 0
    for seed in range(60):
        draw = random.Random(seed)
        records = scattered(draw)
        injected = [
            Fault(draw.choice(POINTS), draw.choice(list(FaultOutcome)), draw.randrange(1, 12)) for _ in range(3)
        ]
        folded, crashed = run(rule, records, injected, draw)
        ids = {str(one.node): decode(one.value or b"").event_id for one in records}
        assert sorted(ids[place] for place in folded) == sorted(set(ids.values())), seed
        crashes += crashed
    assert crashes > 60


def test_without_the_same_batch_two_of_an_event_would_be_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: after a crash, batches end anywhere."""
    monkeypatch.setattr("aggregations.run.memory.begin_batch", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_filter_over_all_partitions_passes_on_one_of_each_event_whatever_crashes(OVER_PARTITIONS[0])
