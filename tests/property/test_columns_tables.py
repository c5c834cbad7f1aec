"""Tables in whole columns: whatever arrives, a table has the rows, and the bytes, that it has message by message."""

import json
import math
from typing import Any

import polars as pl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, Tombstones, encode
from tests.property import test_columns_fields as every
from tests.support.both import TOPIC_ID, Both, record

COLUMNS: dict[str, Any] = {"name": str, "fee": float, "size": int, "open": bool, "notes": [str]}
SOURCE = Topic("sales", Json({"shop": str}), envelope=False)

KEYS = [b"s1", b"s2", b"s3", None]
rows = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["a", 'é"\\', "", None]),
        "fee": st.sampled_from([0.5, 1e300, -0.0, None]),
        "size": st.sampled_from([0, 2**63 - 1, -(2**63), None]),
        "open": st.sampled_from([True, False, None]),
        "notes": st.just(["n"]),
    },
)


@st.composite
def batches(draw: st.DrawFn, *, enveloped: bool) -> list[list[Record]]:
    """Records of several partitions, with and without a chain, tombstones, and records that are sent again."""
    found: list[list[Record]] = []
    offsets, sent = [0, 0], list[tuple[bytes | None, bytes | None]]()
    for _ in range(draw(st.integers(1, 4))):
        batch = []
        moved = draw(st.integers(0, 1))  # a key is in one partition of a batch
        for _ in range(draw(st.integers(1, 9))):
            again = sent and draw(st.integers(0, 4)) == 0
            key, value = draw(st.sampled_from(sent)) if again else (draw(st.sampled_from(KEYS)), None)
            partition = (KEYS.index(key) + moved) % 2
            offset, offsets[partition] = offsets[partition], offsets[partition] + 1
            if not again:
                value = draw(st.none() | rows.map(lambda row: json.dumps(row).encode()))
                if enveloped and value is not None:
                    root = draw(st.sampled_from(["", "R"])), draw(st.sampled_from([None, 7, 2_000]))
                    hop = Hop(
                        "raw",
                        draw(st.integers(0, 1)),
                        offset,
                        via="rep",
                        index=0,
                        topic_id=root[0],
                        timestamp_ms=root[1],
                    )
                    value = encode(Envelope(value, (hop,) if draw(st.booleans()) else (), key=key))
                sent.append((key, value))
            stamp = draw(st.sampled_from([1_000, 1_000 + offset, 5]))
            batch.append(Record("shops", partition, offset, key, value, stamp, (), TOPIC_ID))
        found.append(batch)
    return found


def flow_of(policy: Tombstones, columns: list[str], *, enveloped: bool) -> Flow[Any]:
    table = Topic("shops", Json(COLUMNS), envelope=enveloped, tombstones=policy)
    first = Flow("shop").source(SOURCE).aggregate("sales", "_key", Fields(n=count()))
    return first.lookup("shop", table, "shop", columns=columns).aggregate("all", pl.lit("all"), Fields(n=count()))


@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data(), enveloped=st.booleans(), policy=st.sampled_from(Tombstones))
def test_a_table_has_the_same_rows_in_columns_and_message_by_message(
    data: st.DataObject, policy: Tombstones, *, enveloped: bool
) -> None:
    names = st.lists(st.sampled_from(["name", "fee", "size", "open"]), min_size=1, unique=True)
    both = Both(flow_of(policy, data.draw(names), enveloped=enveloped))
    for batch in data.draw(batches(enveloped=enveloped)):
        both.process(batch)


VALUES = {name: every.VALUES[name] for name in ("opt_float", "opt_double", "opt_int64", "opt_uint64", "opt_string")}
singular = st.dictionaries(st.sampled_from(sorted(VALUES)), st.just(None), max_size=3).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(
    found=st.lists(st.lists(st.tuples(st.booleans(), singular), min_size=1, max_size=6), min_size=1, max_size=3),
    columns=st.lists(st.sampled_from(sorted(VALUES)), min_size=1, unique=True),
)
@example(found=[[(True, {"opt_double": math.nan}), (True, {})]], columns=["opt_double"])
def test_a_row_that_no_state_can_have_is_a_dead_letter_also_if_a_later_one_of_its_batch_replaces_it(
    found: list[list[tuple[bool, dict[str, Any]]]], columns: list[str]
) -> None:
    first = Flow("shop").source(SOURCE).aggregate("sales", "_key", Fields(n=count()))
    both, offset = Both(first.lookup("shop", every.TOPIC, "shop", columns=columns).publish("out")), 0
    for batch in found:
        values = [(b"s1" if one else b"s2", every.Every(**fields).SerializeToString()) for one, fields in batch]
        both.process([record("every", offset + n, key, value) for n, (key, value) in enumerate(values)])
        offset += len(batch)
