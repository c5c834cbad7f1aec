"""Filters over all partitions judge the partitions in turn, by the time of their records."""

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope.filters import Arrival, Beyond, EventIdFilter, FilterStates, deduplicate, deduplicate_by_key, from_value
from envelope.filters.turns import in_turns
from persistence import Filtered, StoredFilter
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

MINUTE = timedelta(minutes=1)
SECONDS = range(0, 3600, 20)
AT = from_value("at")


def record(partition: int, offset: int, identity: str, seconds: int, *, at: object = None) -> Record:
    """A record of a topic; `at` is the time of its event."""
    body = json.dumps({"id": identity} | ({} if at is None else {"at": at})).encode()
    return Record("events", partition, offset, b"%d" % partition, body, seconds * 1000, topic_id=TOPIC_ID)


def everywhere(partitions: int = 3, *, bulk: bool = False) -> list[Record]:
    """An hour of events, each in every partition, one partition after the other.

    Args:
        partitions: Partitions.
        bulk: All records have the timestamp of their partition, because they were written later and in bulk.
    """
    return [
        record(place, n, f"e{n}", place if bulk else at, at=at * 1000)
        for place in range(partitions)
        for n, at in enumerate(SECONDS)
    ]


def rules(time: Any = None) -> list[Any]:
    return [
        deduplicate(from_value("id"), MINUTE, partitions=2, time=time),
        deduplicate_by_key(MINUTE, key=from_value("id"), partitions=2, time=time),
        EventIdFilter(from_value("id"), MINUTE, partitions=2, time=time, beyond=Beyond.DROP),
        EventIdFilter(lambda one: one.value["id"], MINUTE, partitions=2, time=time and (lambda one: one.value["at"])),
    ]


def flow_of(rule: Any) -> Flow[Any]:
    source = Topic("events", Json({"id": str, "at": int}), envelope=False)
    return Flow("turns").source(source).deduplicate(rule, name="filter").aggregate("id", "id", Fields(n=count()))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: type(rule).__name__)
def test_in_a_flow_one_of_each_event_passes_although_a_batch_reads_one_partition_after_the_other(rule: Any) -> None:
    both = Both(flow_of(rule))
    both.process(everywhere())
    assert both.results("id") == {b"e%d" % n: {"n": 1} for n in range(len(SECONDS))}
    assert both.memory.report.verdicts["filter"] == {"accepted": len(SECONDS), "duplicate": 2 * len(SECONDS)}


@pytest.mark.parametrize("rule", rules(AT), ids=lambda rule: type(rule).__name__)
def test_the_time_is_the_one_by_which_the_filter_judges(rule: Any) -> None:
    both = Both(flow_of(rule))
    both.process(everywhere(bulk=True))
    assert both.results("id") == {b"e%d" % n: {"n": 1} for n in range(len(SECONDS))}


def stored(rule: Any, *batches: Sequence[Any]) -> list[Any]:
    """The records that a filter with states in a store passes on."""
    passed: list[Any] = []

    def publish(made: Filtered) -> None:
        passed.extend(one for one, _ in made.passed)

    kept = StoredFilter(rule, fresh_store())
    for batch in batches:
        kept.process(batch, publish)
    return passed


@pytest.mark.parametrize("bulk", [False, True], ids=["by timestamp", "by the event's time"])
def test_with_states_in_a_store_one_of_each_event_passes(bulk: bool) -> None:
    for rule in rules(AT if bulk else None)[:3]:
        records = [
            Arrival("events", one.partition, one.offset, one.key, json.loads(one.value or b""), one.timestamp_ms)
            for one in everywhere(bulk=bulk)
        ]
        passed = stored(rule, records)
        assert [one.value["id"] for one in passed] == [f"e{n}" for n in range(len(SECONDS))]


def test_the_order_of_time_is_that_of_partitions_read_in_turn() -> None:
    logs = {0: [5, 1, 7], 1: [1, 6, 6], 2: [6]}
    records = [Arrival("t", place, n, timestamp_ms=time) for place, log in logs.items() for n, time in enumerate(log)]
    turns = [(records[n].partition, records[n].offset) for n in in_turns(records)]
    assert turns == [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (0, 2)]


def test_records_of_one_partition_keep_their_order_whatever_their_times() -> None:
    for times in ([9, 1, 5], [5, 5, 5], [1, 9_999_999_999_999, 2], [0, 0, 0]):
        records = [Arrival("t", place, n, timestamp_ms=time) for place in (1, 0) for n, time in enumerate(times)]
        for place in (0, 1):
            turns = [records[n].offset for n in in_turns(records) if records[n].partition == place]
            assert turns == [0, 1, 2]


def test_a_record_without_a_valid_time_follows_the_one_before_it_and_holds_nothing_up() -> None:
    """The filter rejects it."""
    times: dict[int, list[object]] = {0: [5_000, "soon", 9_000], 1: [None, 6_000, None]}
    rows = [record(place, n, f"e{n}", 0, at=time) for place, log in times.items() for n, time in enumerate(log)]
    records = [
        Arrival("t", one.partition, one.offset, None, json.loads(one.value or b""), one.timestamp_ms) for one in rows
    ]
    turns = [(records[n].partition, records[n].offset) for n in in_turns(records, AT)]
    assert turns == [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2), (0, 2)]
    columns = Both(flow_of(deduplicate(from_value("id"), MINUTE, partitions=1, time=AT)))
    columns.process([one for one in rows if b"soon" not in (one.value or b"")])


def test_a_partition_that_lags_by_a_batch_finds_what_the_interval_still_has() -> None:
    """What is more than the interval behind is passed on as beyond the horizon, as the interval says."""
    rule = deduplicate(from_value("id"), MINUTE, partitions=1)
    ahead = [Arrival("t", 0, n, None, {"id": f"e{n}"}, n * 1000) for n in range(100)]
    behind = [Arrival("t", 1, n, None, {"id": f"e{n}"}, n * 1000) for n in range(100)]
    passed = stored(rule, ahead, behind)
    assert [one.offset for one in passed if one.partition == 1] == list(range(39))
    together = stored(rule, list(chain(ahead, behind)))
    assert [one.partition for one in together] == [0] * 100
    alone = FilterStates(rule)
    assert [one for one in ahead + behind if alone.passes(one)] == passed
