"""The vectorised path of the Spark engine, task code called directly: it keeps what the in-memory runner keeps."""

import json
from typing import Any

import polars as pl
import pytest

from aggregations.columns.decode import Decoder
from aggregations.columns.first import may_be_copies
from aggregations.definition.aggregates import count, first, last, maximum, minimum, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.roots import RootTopics
from aggregations.per_message.ledger import Reading
from envelope import Envelope, Hop, Lineage, Reason, decode, encode
from envelope.deadletter import DeadLetterHeaders
from jobs.dead_letters.redrive import redriven
from tests.messages import Every
from tests.support.both import TOPIC_ID, Both, record
from tests.support.pure import bare, chained, hop, leg, table_of, wrapped

TOPIC = Topic("every", Every, envelope=False)
LOW, HIGH = -(2**31), 2**31 - 1


def numbers(offset: int, **fields: Any) -> Any:
    return record(TOPIC.name, offset, b"k", Every(**fields).SerializeToString())


@pytest.mark.parametrize(
    ("of", "fields", "wanted"),
    [
        (pl.col("int32") * pl.col("sint32"), {"int32": 50_000, "sint32": 50_000}, 2_500_000_000),
        (pl.col("uint32") - pl.col("fixed32"), {"uint32": 1, "fixed32": 2}, -1),
        (-pl.col("int32"), {"int32": LOW}, 2**31),
        (pl.col("int32").abs() + 1, {"int32": LOW}, 2**31 + 1),
        (pl.col("uint64") - pl.col("fixed64"), {"uint64": 2**64 - 1, "fixed64": 2**64 - 2}, 1),
    ],
    ids=str,
)
def test_narrow_and_unsigned_integers_are_computed_in_64_bits_on_both_paths(
    of: pl.Expr, fields: dict[str, int], wanted: int
) -> None:
    flow = Flow("f").source(TOPIC).aggregate("a", pl.lit("all"), Fields(n=count(), it=total(of), most=maximum(of)))
    both = Both(flow)
    both.process([numbers(0, **fields), numbers(1, **fields)])
    assert both.results("a") == {b"all": {"n": 2, "it": 2 * wanted, "most": wanted}}
    assert both.dead_letters == []


BIG = pl.col("int64") * pl.col("int64")


@pytest.mark.parametrize("where", ["field", "order", "filter", "divert", "map", "key"])
def test_an_overflow_is_a_dead_letter_wherever_the_expression_stands_and_on_both_paths(where: str) -> None:
    flow: Any = Flow("f").source(TOPIC)
    fold, key = Fields(n=count()), pl.lit("all")
    match where:
        case "field":
            fold = Fields(n=count(), it=minimum(BIG))
        case "order":
            fold = Fields(n=count(), it=last("int32", by=BIG))
        case "filter":
            flow = flow.filter(BIG > 0)
        case "divert":
            flow = flow.divert(BIG < 0)
        case "map":
            flow = flow.map(square=BIG)
        case "key":
            key = (BIG % 2).cast(pl.String)
    both = Both(flow.aggregate("a", key, fold))
    both.process([numbers(0, int64=3), numbers(1, int64=2**40), numbers(2, int64=5)])
    [state] = both.results("a").values()
    assert state["n"] == 2
    [letter] = both.dead_letters
    assert (letter.record.offset, letter.reason) == (1, Reason.OVERFLOW)
    assert letter.hole == (where in ("field", "order")), "its key is known there"


def test_unsigned_values_beyond_the_signed_range_are_exact_where_nothing_is_added_up() -> None:
    of = pl.col("uint64")
    flow = Flow("f").source(TOPIC).aggregate("a", pl.lit("all"), Fields(low=minimum(of), high=maximum(of), n=count()))
    both = Both(flow)
    both.process([numbers(0, uint64=2**64 - 1), numbers(1, uint64=2**63)])
    assert both.results("a") == {b"all": {"low": 2**63, "high": 2**64 - 1, "n": 2}}


def test_a_value_beyond_64_bits_is_refused_by_every_aggregate_on_both_paths() -> None:
    wide = pl.col("uint64").cast(pl.Int128)
    beyond = pl.when(wide > 5).then(pl.lit(2**64)).otherwise(wide)
    flow = Flow("f").source(TOPIC).aggregate("a", pl.lit("all"), Fields(low=minimum(beyond), high=maximum(beyond)))
    both = Both(flow)
    both.process([numbers(0, uint64=5), numbers(1, uint64=6)])
    assert both.results("a") == {b"all": {"low": 5, "high": 5}}
    assert [(letter.record.offset, letter.reason, letter.hole) for letter in both.dead_letters] == [
        (1, Reason.OVERFLOW, True)
    ]


def test_of_rows_that_fail_and_rows_that_overflow_each_has_its_own_reason() -> None:
    strict = pl.col("string").cast(pl.Int64)
    flow = Flow("f").source(TOPIC).aggregate("a", pl.lit("all"), Fields(n=count(), it=total(strict * 2**32)))
    both = Both(flow)
    texts = ["1", "one", str(2**31), "2", "two", str(2**40), str(2**30)]
    both.process([numbers(offset, string=text) for offset, text in enumerate(texts)])
    assert both.results("a") == {b"all": {"n": 3, "it": 2**32 * (3 + 2**30)}}
    failed, overflow = Reason.TRANSFORM_FAILED, Reason.OVERFLOW
    assert sorted(both.reasons()) == [(1, failed), (2, overflow), (4, failed), (5, overflow)]


def test_steps_behind_the_last_stage_see_their_columns_and_are_those_of_the_memory_runner() -> None:
    topic = Topic("legs", Json({"k": pl.String, "v": pl.Int64}), envelope=False)
    flow = (
        Flow("tail")
        .source(topic)
        .aggregate("a", "k", Fields(n=count()))
        .map(big=pl.col("v") > 600)
        .divert(pl.col("big"))
    )
    both = Both(flow)
    both.process(
        [
            record("legs", offset, b"K", json.dumps({"k": "K", "v": v}).encode())
            for offset, v in enumerate([1, 2, 700, 3])
        ]
    )
    assert both.reasons() == [(2, Reason.DIVERTED)]
    assert [(one.stage, one.hole) for one in both.dead_letters] == [("end", False)]
    assert both.results("a") == {b"K": {"n": 4}}


def test_fields_may_have_any_names() -> None:
    fold = Fields(
        _code=total("minutes"),
        _place=first("minutes"),
        **{"a": total("minutes"), "a.size": total("minutes"), "a.batch": last("tail")},
    )
    both = Both(Flow("names").source(bare()).aggregate("aircraft", "tail", fold))
    for start in (0, 9):
        both.process([leg(n, f"N{n % 2}", minutes=n) for n in range(start, start + 9)])
    assert both.results("aircraft")[b"N1"] == {"_code": 81, "_place": 1, "a": 81, "a.size": 81, "a.batch": "N1"}


def test_a_first_delivery_is_proven_beside_records_of_its_route_that_have_no_index() -> None:
    records = [chained(n, hop("raw", 0, n, index=0 if n % 2 else None)) for n in (0, 1, 3, 2, 1, 4, 5)]
    batch = Decoder(wrapped()).decode(table_of(records))
    again, read = may_be_copies(batch.frame, batch.signatures, {}, {})
    reading = Reading({})
    lineages = [Lineage.of(decode(one.value).chain, one.node) for one in records]
    assert again.tolist() == [reading.again(one, b"N1") for one in lineages]
    assert again.tolist() == [True, False, False, True, True, True, False]
    assert read == reading.read


def test_a_redriven_record_is_judged_beside_its_siblings_that_only_event_ids_tell_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RootTopics, "_ask", lambda *_: None)  # no broker is asked for root topics
    both = Both(Flow("siblings").source(wrapped()).aggregate("a", "tail", Fields(n=count())))
    first_one, second = (chained(n, hop("raw", 0, 5, index=None), event_id=f"e{n}") for n in (1, 2))
    both.process([first_one, second])
    died = DeadLetterHeaders(first_one.topic, 0, first_one.offset, None, topic_id=TOPIC_ID, application="other")
    value = redriven(first_one.key, first_one.value, (), died, Hop("dead", 0, 0, topic_id="D"))
    both.process([record(first_one.topic, 3, b"N1", value)])
    assert both.memory.report.verdicts["a"] == {"accepted": 2, "duplicate": 1}
    assert both.results("a") == {b"N1": {"n": 2}}


def test_a_record_that_a_later_stage_refuses_needs_no_chain_once_no_function_may_read_it() -> None:
    sums = Fields(n=count())
    both = Both(Flow("f").source(wrapped()).publish("out").aggregate("a", "tail", sums).aggregate("b", "carrier", sums))
    both.process([chained(0, hop("raw", 0, 7), carrier="AA"), chained(1, hop("raw", 0, 8))])
    assert both.reasons() == [(1, Reason.NULL_KEY)]


def unreadable(offset: int, root: int) -> Record:
    """A record whose chain can be read, and whose payload cannot."""
    value = encode(Envelope(b"not JSON", (hop("raw", 0, root, index=0),), key=b"N1"))
    return Record("legs", 0, offset, b"N1", value, topic_id=TOPIC_ID)


@pytest.mark.parametrize("roots", ["5 3 4", "5! 3", "5! 3!", "5 3!", "3! 5! 4 4!", "1! 2! 3! 3!", "9! 1 2! 10"])
def test_a_dead_letter_is_proven_only_above_all_records_of_its_route_those_without_a_payload_included(
    roots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RootTopics, "_ask", lambda *_: None)  # no broker is asked for root topics
    both = Both(
        Flow("unread").source(wrapped()).aggregate("a", "tail", Fields(n=count())).map(x=pl.lit(1)).publish("out")
    )
    records, proven, highest = [], set(), -1
    for offset, text in enumerate(roots.split()):
        root = int(text.removesuffix("!"))
        failed = text.endswith("!")
        made = unreadable(offset, root) if failed else chained(offset, hop("raw", 0, root, index=0))
        records.append(made)
        if failed and root > highest:
            proven.add((root, 0))
        highest = max(highest, root)
    both.process(records)
    listed = both.run.ledger.listed.get("a", {})
    assert {at for group, found in listed.items() if not group.startswith("!") for at in found} == proven
