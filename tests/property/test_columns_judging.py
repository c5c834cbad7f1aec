"""A filter as a step of a flow: the vectorised path judges as the pure code does, in every batch."""

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, encode
from envelope.filters import (
    Beyond,
    Decreasing,
    DedupPolicy,
    EventIdFilter,
    Gaps,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SessionWindows,
    TimeWindows,
    Unusable,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_envelope,
    from_header,
    from_value,
)
from tests.support.both import TOPIC_ID, Both

TEN = timedelta(seconds=10)
COLUMNS = Json({"id": int, "name": str})
SMALL = pl.col("id").cast(pl.UInt8)
BIG = pl.when(pl.col("id") == 9).then(pl.lit(1 << 63, pl.UInt64)).otherwise(pl.col("id").cast(pl.UInt64))
BARE = [
    SequenceFilter(from_value("id")),
    SequenceFilter(from_value("id"), scope_by=Scope.KEY),
    SequenceFilter(from_value("small"), unusable=Unusable.FORWARD),
    SequenceFilter(from_value("big"), decreasing=Decreasing.REJECT),
    SequenceFilter(from_value("name")),
    SequenceFilter(from_header("sequence")),
    SequenceFilter(from_header("sequence"), scope_by=Scope.KEY, unusable=Unusable.FORWARD),
    SequenceFilter(lambda element: element["id"]),
    EventIdFilter(from_value("id"), horizon=TEN),
    EventIdFilter(from_value("name"), horizon=TEN, limit=2, beyond=Beyond.REJECT, scope_by=Scope.KEY),
    EventIdFilter(from_header("sequence"), horizon=TEN, limit=2),
    EventIdFilter(from_value("big"), horizon=TEN),
    deduplicate_by_key(TEN),
    deduplicate_by_key_value(from_value("id"), TEN),
    deduplicate_by_key_value(from_header("sequence"), TEN),
    deduplicate(from_value("id"), TEN, partitions=2),
    deduplicate_by_key(TEN, key=from_value("name"), partitions=2),
    EventIdFilter(from_value("name"), horizon=TEN, partitions=2),
    distinct(TimeWindows(TEN, grace=TEN)),
    distinct(TimeWindows(TEN, grace=TEN), scope_by=Scope.KEY),
    distinct(SessionWindows(TEN / 5, grace=TEN)),
    distinct(SessionWindows(TEN, grace=TEN), scope_by=Scope.KEY),
]
ENVELOPED = [
    ProducerFilter(),
    ProducerFilter(gaps=Gaps.REFUSE, limit=2, expiry=TEN),
    ProducerFilter(expiry=2 * TEN),
    SequenceFilter(from_envelope("sequence")),
    EventIdFilter(from_envelope("event_id"), horizon=TEN),
    deduplicate_by_key_value(from_envelope("event_id"), TEN),
]


def named(rule: Any) -> str:
    return f"{type(rule).__name__}-{rule.name}"


def flow_of(rule: Any, *, envelope: bool = False) -> Flow[Any]:
    source = Topic("events", payload=COLUMNS, envelope=envelope)
    flow = Flow("filtered").source(source).filter(pl.col("name").ne_missing("removed")).map(small=SMALL, big=BIG)
    return flow.deduplicate(rule, name="filter").aggregate(
        "key", key=pl.col("_key").fill_null(b"none"), fold=Fields(events=count())
    )


KEYS = st.sampled_from([b"a", b"b", b"a-7", b"7", None])
FACTS = st.fixed_dictionaries(
    {
        "id": st.one_of(st.none(), st.integers(0, 12)),
        "name": st.sampled_from([None, "", "1", "2", "x", "removed"]),
    }
)
HEADERS = st.one_of(
    st.just(()), st.integers(0, 9).map(lambda n: (("sequence", b"%d" % n),)), st.just((("sequence", b"x"),))
)
ROWS = st.tuples(st.integers(0, 2), KEYS, FACTS, HEADERS, st.integers(0, 40))
BATCHES = st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=4)


@pytest.mark.parametrize("rule", BARE, ids=named)
@settings(max_examples=5 * settings.default.max_examples // 8)
@given(batches=BATCHES)
def test_both_paths_judge_records_alike(rule, batches):
    both, offsets = Both(flow_of(rule)), dict.fromkeys(range(3), 0)
    for rows in batches:
        records = []
        for drawn, key, facts, headers, seconds in rows:
            partition = len(key) % 3 if key else drawn  # records of one key are in one partition
            value = json.dumps({name: one for name, one in facts.items() if one is not None}).encode()
            at = offsets[partition] = offsets[partition] + 1
            records.append(Record("events", partition, at, key, value, seconds * 1000, headers, TOPIC_ID))
        both.process(records)


APART = [
    SequenceFilter(from_value("id")),
    SequenceFilter(from_value("id"), scope_by=Scope.KEY),
    SequenceFilter(lambda element: element["id"]),
    deduplicate(from_value("id"), TEN, partitions=2),
    distinct(SessionWindows(TEN / 5, grace=TEN)),
]


@pytest.mark.parametrize("rule", APART, ids=named)
@settings(max_examples=5 * settings.default.max_examples // 8)
@given(batches=st.lists(st.lists(st.tuples(st.booleans(), ROWS), max_size=12), min_size=1, max_size=4))
def test_both_paths_leave_alone_the_topics_that_a_policy_excludes(rule, batches):
    topics = [Topic(name, payload=COLUMNS, envelope=False) for name in ("events", "plain")]
    flow = Flow("filtered").source(*topics).deduplicate(rule, policy=DedupPolicy(topics={"events": True}))
    key = pl.concat_str("_topic", pl.col("_key").cast(pl.String).fill_null("none"))
    both, sent = Both(flow.aggregate("key", key=key, fold=Fields(events=count()))), Counter[str]()
    for rows in batches:
        records = []
        for apart, (drawn, key, facts, headers, seconds) in rows:
            partition = len(key) % 3 if key else drawn
            topic, value = "plain" if apart else "events", json.dumps(facts).encode()
            sent[topic] += 1
            records.append(Record(topic, partition, sent[topic], key, value, seconds * 1000, headers, TOPIC_ID))
        both.process(records)
    states = both.memory.results("key")
    assert sum(one["events"] for name, one in states.items() if name.startswith(b"plain")) == sent["plain"]


STAMPS = st.tuples(
    st.sampled_from(["", "till-1", "till-2", "till-3"]),
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(0, 2)),
    st.booleans(),
    st.sampled_from([None, None, None, 0, 1, -1]),
)


@pytest.mark.parametrize("rule", ENVELOPED, ids=named)
@settings(max_examples=5 * settings.default.max_examples // 8)
@given(
    batches=st.lists(
        st.lists(st.tuples(KEYS, st.one_of(st.none(), STAMPS), st.integers(0, 8), st.integers(0, 40)), max_size=12),
        min_size=1,
        max_size=4,
    )
)
def test_both_paths_judge_envelopes_alike(rule, batches):
    both, offset = Both(flow_of(rule, envelope=True)), 0
    for rows in batches:
        records = []
        for key, stamp, root, seconds in rows:
            producer, sequence, epoch, contiguous, more = stamp or ("", None, None, False, None)
            chain = () if root < 5 else (Hop("raw", 0, root, via="relay", index=0, topic_id="R"),)
            message = Envelope(
                b'{"id":1}',
                chain=chain,
                key=key,
                event_id={3: 'e"3', 4: ""}.get(root, f"e{root}"),
                producer=producer,
                sequence=sequence,
                producer_epoch=epoch,
                last_sequence=None if more is None else sequence + more,
                sequence_per_partition=contiguous,
            )
            offset += 1
            records.append(Record("events", 0, offset, key, encode(message), seconds * 1000, (), TOPIC_ID))
        both.process(records)
