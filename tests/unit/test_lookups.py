"""Tables that a flow looks up: what is refused, what a row is, and that both paths find the same rows."""

import json
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.lookups import LatestRow
from aggregations.definition.source import Json, Topic
from aggregations.errors import FlowError, RunRefusedError
from aggregations.run.binding import bind
from aggregations.run.common import common
from aggregations.run.consistency import check_turns
from aggregations.run.memory import MemoryRunner
from aggregations.run.start import start_of
from aggregations.run.turns import Turns, begin_batch, forget_beyond, unfinished
from envelope import Envelope, Hop, Node, Reason, Tombstones, TopicPartition, decode, encode
from envelope.filters import EventIdFilter, from_value
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from persistence.manifest import Manifest, Progress
from persistence.names import FlowRef
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store


class Crash(BaseException):
    """The process died."""


def crash() -> None:
    raise Crash


PAYMENTS = Topic("payments", Json({"card": str, "merchant": str, "cents": int}), envelope=False)
MERCHANTS = Topic("merchants", Json({"category": str, "fee": float, "tags": [str]}), envelope=False)
COUNT = Fields(n=count(), cents=total("cents"))


def cards(source: Topic = PAYMENTS) -> Flow[Any]:
    return Flow("payments").source(source).aggregate("card", "card", Fields(n=count()))


def by_category(**options: Any) -> Flow[Any]:
    looked = cards().lookup("merchant", MERCHANTS, "merchant", columns=["category"], **options)
    return looked.aggregate("category", pl.col("category").fill_null("unknown"), COUNT)


def paid(offset: int, merchant: str | None, cents: int = 1, card: str = "c") -> Record:
    value = json.dumps({"card": card, "merchant": merchant, "cents": cents}).encode()
    return Record("payments", 0, offset, card.encode(), value, 1_000 + offset, (), TOPIC_ID)


def merchant(offset: int, name: str, category: str | None, *, partition: int = 0, at: int | None = None) -> Record:
    value = None if category is None else json.dumps({"category": category, "fee": 0.5}).encode()
    stamp = 1_000 + offset if at is None else at
    return Record("merchants", partition, offset, name.encode(), value, stamp, (), TOPIC_ID)


@pytest.mark.parametrize(
    ("define", "said"),
    [
        (lambda: Flow("f").source(PAYMENTS).lookup("m", MERCHANTS, "merchant"), "must follow an aggregate"),
        (lambda: cards().lookup("card", MERCHANTS, "merchant"), "a stage has this name"),
        (lambda: cards().lookup("end", MERCHANTS, "merchant"), "reserved for dead letters"),
        (lambda: cards().lookup("m", PAYMENTS, "merchant"), "reads payments as a source"),
        (lambda: cards().lookup("m", MERCHANTS, "shop"), "no column shop"),
        (lambda: cards().lookup("m", MERCHANTS, "merchant", columns=[["fee"]]), "names as text"),  # type: ignore[list-item]
        (lambda: cards().lookup("m", MERCHANTS, pl.col("cents") > 1), "the key is of type Boolean"),
        (lambda: cards().lookup("m", MERCHANTS, "merchant", columns=["tags"]), "columns= names 'tags'"),
        (lambda: cards().lookup("m", MERCHANTS, "merchant", columns={"card": "category"}), "already has a column card"),
        (lambda: cards().lookup("m", MERCHANTS, "merchant", columns={"_c": "category"}), "reserved"),
        (lambda: cards().lookup("m", MERCHANTS, "merchant", missing="wait"), "missing= takes one of null, drop"),
        (lambda: cards().lookup("m", Topic("raw"), "merchant"), "no column that a table can keep"),
        (lambda: cards().lookup("m", Topic("m", MERCHANTS.payload, cluster="x"), "merchant"), "another cluster="),
        (lambda: cards().map(lambda element: 1).lookup("m", MERCHANTS, "merchant"), "look up before it"),
        (lambda: by_category().lookup("m", MERCHANTS, "merchant"), "a table has one topic of its own"),
        (lambda: by_category().aggregate("merchant", "card", COUNT), "already has a stage 'merchant'"),
        (
            lambda: by_category().lookup("merchant", Topic("merchants", Json({"category": str})), "merchant"),
            "declared differently",
        ),
    ],
)
def test_a_lookup_that_cannot_be_exact_or_named_is_refused_at_its_definition(define: Any, said: str) -> None:
    with pytest.raises(FlowError, match=said):
        define()


def test_elements_read_the_table_as_it_was_before_their_batch() -> None:
    both = Both(by_category())
    both.process([merchant(0, "m", "food"), paid(0, "m", 5)])
    both.process([paid(1, "m", 7), paid(2, "x"), paid(3, None)])
    both.process([merchant(1, "m", "toys"), merchant(2, "x", "food")])
    both.process([paid(4, "m", 9), paid(5, "x")])
    assert both.results("category") == {
        b"food": {"n": 3, "cents": 13},
        b"toys": {"n": 1, "cents": 9},
        b"unknown": {"n": 2, "cents": 2},
    }
    assert both.results("merchant") == {b"m": {"category": "toys"}, b"x": {"category": "food"}}


def test_a_tombstone_deletes_a_row() -> None:
    both = Both(by_category())
    both.process([merchant(0, "m", "food"), merchant(1, "m", None), paid(0, "m")])
    assert both.results("category") == {b"unknown": {"n": 1, "cents": 1}}
    assert both.results("merchant") == {b"m": None}
    both.process([merchant(2, "m", "toys"), paid(1, "m")])
    assert both.results("category")[b"toys"] == {"n": 1, "cents": 1}


def test_a_table_whose_tombstones_are_dead_letters_keeps_its_rows() -> None:
    table = Topic("merchants", MERCHANTS.payload, envelope=False, tombstones=Tombstones.DEAD_LETTER)
    flow = cards().lookup("merchant", table, "merchant", columns=["category"])
    both = Both(flow.aggregate("category", pl.col("category").fill_null("unknown"), COUNT))
    both.process([merchant(0, "m", "food"), merchant(1, "m", None), merchant(2, "x", "toys"), paid(0, "m")])
    both.process([merchant(3, "x", "books"), paid(1, "x")])
    assert both.reasons() == [(1, Reason.EMPTY)]
    assert both.results("merchant") == {b"m": {"category": "food"}, b"x": {"category": "books"}}
    assert both.results("category").keys() == {b"food", b"books"}


@pytest.mark.parametrize("time", [None, "at"])
def test_a_tombstone_in_another_partition_deletes_a_row_whatever_the_event_time_of_the_row(time: str | None) -> None:
    table = Topic("merchants", Json({"category": str, "at": int}), time=time)
    both = Both(cards().lookup("merchant", table, "merchant", columns=["category"]).publish("out"))
    payload = b'{"category": "food", "at": 3600000}'
    row = encode(Envelope(payload, event_time_us=3_600_000_000))
    both.process([Record("merchants", 0, 0, b"m", row, 1_000, (), TOPIC_ID)])
    both.process([merchant(0, "m", None, partition=1, at=2_000)])
    assert both.results("merchant") == {b"m": None}


def test_a_tombstone_gets_no_columns_of_a_table() -> None:
    source = Topic("payments", PAYMENTS.payload, envelope=False, tombstones=Tombstones.ELEMENT)
    hour = timedelta(hours=1)
    first = Flow("payments").source(source).deduplicate(EventIdFilter(from_value("cents"), hour, name="cents"))
    looked = first.lookup("merchant", MERCHANTS, "_key", columns=["category"])
    both = Both(looked.deduplicate(EventIdFilter(from_value("category"), hour, name="category")).publish("out"))
    both.process([merchant(0, "c", "food")])
    gone = [Record("payments", 0, offset, b"c", None, 1_000, (), TOPIC_ID) for offset in (0, 1)]
    both.process([*gone, paid(2, "m", 1), paid(3, "m", 2)])
    assert both.memory.report.verdicts["category"] == {"unidentified": 2, "accepted": 1, "duplicate": 1}


def test_elements_without_a_row_are_dropped_if_the_flow_says_so() -> None:
    both = Both(by_category(missing="drop"))
    both.process([merchant(0, "m", "food"), paid(0, "m"), paid(1, "x"), paid(2, None)])
    assert both.results("category") == {b"food": {"n": 1, "cents": 1}}
    assert both.memory.report.filtered == 2


def test_a_dead_letter_without_a_row_is_folded_once_when_the_row_has_come() -> None:
    both = Both(by_category(missing="dead_letter"))
    both.process([merchant(0, "m", "food"), paid(0, "m"), paid(1, "x")])
    assert both.reasons() == [(1, Reason.MISSING_ENTRY)]
    [dead] = both.dead_letters
    both.process([merchant(1, "x", "toys")])
    for offset in (2, 3):
        both.process([both.redriven(dead, offset)])
    assert both.results("category") == {b"food": {"n": 1, "cents": 1}, b"toys": {"n": 1, "cents": 1}}
    assert both.results("card") == {b"c": {"n": 2}}


class Strict:
    """A fold that refuses what costs 13, until that is mended."""

    broken = True

    def zero(self) -> list[int]:
        return []

    def fold(self, state: list[int], element: Element[Any]) -> list[int]:
        if Strict.broken and element["cents"] == 13:
            raise ValueError
        return [*state, element["cents"]]


@pytest.mark.parametrize("followed", [False, True])
def test_a_record_whose_fold_failed_is_folded_once_under_the_key_that_it_has_now(
    monkeypatch: pytest.MonkeyPatch, *, followed: bool
) -> None:
    looked = cards().lookup("merchant", MERCHANTS, "merchant", columns=["category"])
    made = looked.aggregate("category", "category", Strict())
    both = Both(made.aggregate("all", pl.lit("all"), Fields(n=count())) if followed else made)
    both.process([merchant(0, "m", "food"), paid(0, "m", 12), paid(1, "m", 13)])
    assert both.reasons() == [(1, Reason.FOLD_FAILED)]
    [dead] = both.dead_letters
    both.process([merchant(1, "m", "toys"), *[paid(2 + n, "m", 100 + n) for n in range(40)]])
    monkeypatch.setattr(Strict, "broken", False)
    for offset in (50, 51):
        both.process([both.redriven(dead, offset)])
    assert both.results("category")[b"food"] == [12]
    assert sorted(both.results("category")[b"toys"]) == [13, *range(100, 140)]
    if followed:
        assert both.results("all") == {b"all": {"n": 42}}


def test_two_lookups_may_read_one_table() -> None:
    two = by_category().lookup("merchant", MERCHANTS, pl.lit("m"), columns={"usual": "category", "fee": "fee"})
    both = Both(two.aggregate("usual", "usual", Fields(n=count(), fee=total("fee"))))
    both.process([merchant(0, "m", "food"), merchant(1, "x", "toys"), paid(0, "x")])
    assert both.results("category").keys() == {b"toys"}
    assert both.results("usual") == {b"food": {"n": 1, "fee": 0.5}}
    assert both.results("merchant")[b"m"] == {"category": "food", "fee": 0.5}


def test_a_lookup_in_a_branch_adds_columns_to_what_the_branch_publishes() -> None:
    made = cards().also_to("x", lambda f: f.lookup("merchant", MERCHANTS, "merchant").publish("out"))
    both = Both(made)
    both.process([merchant(0, "m", "food"), paid(0, "m")])
    [output] = both.memory.outputs
    assert b'"category":"food"' in output.value


def _update(category: str, lane: int, offset: int, at_ms: int) -> Element[Any]:
    chain = (Hop("raw", lane, offset, via="kit", index=0, timestamp_ms=at_ms),)
    return Element({"category": category}, b"m", Node("merchants", lane, offset), chain)


def test_within_a_lane_the_highest_position_is_the_row_and_across_lanes_the_latest_root() -> None:
    fold = LatestRow((("category", "String"),))
    updates = [
        _update("a", 0, 5, at_ms=50),
        _update("b", 0, 7, at_ms=40),  # the producer's clock went back: its log still says which is newer
        _update("c", 1, 0, at_ms=45),
    ]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        state = fold.zero()
        for number in order:
            state = fold.fold(state, updates[number])
        assert fold.result(state) == {"category": "c"}
    assert fold.result(fold.fold(state, _update("d", 0, 8, at_ms=46))) == {"category": "d"}
    assert fold.result(fold.zero()) is None


def test_the_table_is_not_read_before_an_unfinished_batch_of_the_main_line() -> None:
    flow = by_category()
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    runner.process([merchant(0, "m", "food")])
    begin_batch(runner.run, {TopicPartition("payments", 0): 2}, {})
    with pytest.raises(RunRefusedError, match="payments:0 up to 2"):
        runner.process([merchant(1, "m", "toys")])
    with pytest.raises(RunRefusedError):  # one of two records is not enough
        runner.process([paid(0, "m"), merchant(1, "m", "toys")])
    runner.process([paid(1, "m"), merchant(1, "m", "toys")])
    assert runner.results("category") == {b"food": {"n": 2, "cents": 2}}
    assert unfinished(runner.run) == {}


def test_a_task_that_reads_the_table_after_its_batch_was_committed_fails() -> None:
    flow = by_category()
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    runner.process([merchant(0, "m", "food")])
    begin_batch(runner.run, {TopicPartition("payments", 0): 1}, {})
    assert runner._rows("merchant", [b"m"]) == {b"m": {"category": "food"}}
    late, batch = runner._rows, runner.run.batch
    runner.process([paid(0, "m"), merchant(1, "m", "toys")])
    assert runner.run.batch == batch + 2
    runner.run.manifest = Manifest(runner.run.epoch, batch - 1)  # what the task of the earlier batch knows
    with pytest.raises(Transient, match="may have changed"):
        late("merchant", [b"m"])


def test_tables_are_read_to_their_ends_first_and_take_turns_afterwards() -> None:
    flow = by_category()
    run = MemoryRunner(flow, bind(flow, {}, fresh_store())).run
    turns = Turns(run)

    def read(waiting: list[str], at: int) -> list[str]:
        run.manifest = Manifest(run.epoch, 1, {"merchants": {0: Progress(at)}})
        part = turns.next(waiting)
        return [] if part is None else list(part.topics)

    turns.begin({TopicPartition("merchants", 0): 10, TopicPartition("payments", 0): 10})
    both = ["payments", "merchants"]
    assert [read(both, at) for at in (0, 5)] == [["merchants"]] * 2
    assert [read(both, at) for at in (10, 11, 12)] == [["payments"], ["merchants"], ["payments"]]
    assert [read(["payments"], 12), read(["payments"], 12), read([], 12)] == [["payments"], ["payments"], []]
    run.manifest = Manifest(run.epoch, 1, unfinished={"payments": {0: 3}})
    assert read(both, 12) != []  # `read` replaces the manifest
    run.manifest = Manifest(run.epoch, 1, {"payments": {0: Progress(2)}}, unfinished={"payments": {0: 3}})
    assert [part.topics.keys() for part in (turns.next(both), turns.next(both)) if part] == [{"payments"}] * 2


def test_what_a_downstream_store_has_beyond_the_others_is_an_unfinished_batch() -> None:
    up = Manifest(1, 4, {"payments": {0: Progress(5)}, "merchants": {0: Progress(3)}}, unfinished={"payments": {1: 2}})
    down = Manifest(1, 5, {"payments": {0: Progress(9)}, "merchants": {0: Progress(3)}})
    both = common([up, down], FlowRef("payments"), finishes=True)
    assert both is not None
    assert both.unfinished == {"payments": {0: 9, 1: 2}}
    plain = common([up, down], FlowRef("payments"))
    assert plain is not None
    assert plain.unfinished == {}


def test_what_the_log_has_lost_is_not_waited_for() -> None:
    flow = by_category()
    run = MemoryRunner(flow, bind(flow, {}, fresh_store())).run
    run.manifest = Manifest(1, 1, {"payments": {0: Progress(2)}}, unfinished={"payments": {0: 5}})
    forget_beyond(run, {TopicPartition("payments", 0): 4})
    assert unfinished(run) == {"payments": {0: 4}}
    forget_beyond(run, {TopicPartition("payments", 0): 2})
    assert unfinished(run) == {}


def test_a_topic_that_is_created_again_ends_what_was_begun_of_the_former_one() -> None:
    flow = by_category()
    run = MemoryRunner(flow, bind(flow, {}, fresh_store())).run
    run.start_at("payments", "old", {0: 0})
    begin_batch(run, {TopicPartition("payments", 0): 5}, {})
    assert unfinished(run) == {"payments": {0: 5}}
    run.start_at("payments", "new", {0: 0})
    assert unfinished(run) == {}


def test_a_table_begins_at_its_beginning_unless_its_topic_is_named() -> None:
    assert start_of("latest", "merchants", table=True) == "earliest"
    assert start_of({"merchants": "latest"}, "merchants", table=True) == "latest"
    assert start_of("latest", "payments") == "latest"


def test_a_store_that_is_two_batches_behind_is_refused() -> None:
    def found(up: int, down: int) -> list[str]:
        return [one.risk for one in check_turns("f", [("merchant", Manifest(1, up)), ("category", Manifest(1, down))])]

    assert (found(4, 4), found(4, 5), found(4, 6)) == ([], [], ["store-went-back"])


def test_what_a_lookup_adds_and_how_is_part_of_the_definition_of_later_stages() -> None:
    plain = by_category().definitions
    assert by_category(missing="drop").definitions["category"] != plain["category"]
    assert by_category(store="sqlite:///x").definitions == plain
    assert by_category().definitions["card"] == cards().definitions["card"]


def test_describe_shows_the_table_and_the_lookup() -> None:
    text = by_category().describe()
    assert "table          merchant from merchants" in text
    assert "category of merchant by merchant, missing null" in text
    picture = by_category().describe_svg({"merchant": "redis://tables"})
    assert "redis://tables" in picture


def test_a_row_that_lacks_a_column_looked_up_since_refuses_the_run() -> None:
    store = fresh_store()
    first = MemoryRunner(by_category(), bind(by_category(), {}, store))
    first.process([merchant(0, "m", "food")])
    first.close()
    looked = cards().lookup("merchant", MERCHANTS, "merchant", columns=["category", "fee"])
    more = looked.aggregate("category", pl.col("category").fill_null("unknown"), COUNT)
    second = MemoryRunner(more, bind(more, {}, store), accept=["definition"])
    with pytest.raises(RunRefusedError, match=r"rows without fee.*`headwater replay --redefine`"):
        second.process([paid(0, "m")])


def again(record: Record) -> Record:
    """The record, in a topic of the same name that was created later."""
    return replace(record, topic_id="T2")


ENVELOPED = Topic("merchants", Json({"category": str}))


def copied(offset: int, root: int, name: str, category: str) -> Record:
    """A record of the table that a republisher made of a record of another topic."""
    chain = (Hop("raw", 0, root, via="kit", index=0, topic_id="R", timestamp_ms=1_000),)
    return Record(
        *("merchants", 0, offset, name.encode()),
        encode(Envelope(b'{"category": "%s"}' % category.encode(), chain)),
        1,
        (),
        TOPIC_ID,
    )


def test_a_table_whose_topic_was_created_again_has_the_rows_of_the_new_topic_only() -> None:
    both = Both(by_category())
    both.process(
        [merchant(0, "a", "food"), merchant(1, "b", "books"), merchant(2, "a", "typo", at=9_000), paid(0, "b")]
    )
    both.topic_ids["merchants"] = "T2"
    both.process([again(merchant(0, "a", "food", at=9_000))])
    both.process([paid(1, "a"), paid(2, "b")])
    assert both.results("merchant") == {b"a": {"category": "food"}}
    assert both.results("category") == {
        b"books": {"n": 1, "cents": 1},
        b"food": {"n": 1, "cents": 1},
        b"unknown": {"n": 1, "cents": 1},
    }
    both.process(
        [again(merchant(1, "b", "toys", at=1)), again(merchant(2, "a", None, at=1)), paid(3, "b"), paid(4, "a")]
    )
    assert both.results("merchant") == {b"a": None, b"b": {"category": "toys"}}


def test_a_table_of_republished_records_has_those_that_the_new_topic_got_again() -> None:
    """Their roots are the same: the histories of the former topic would take them for copies."""
    both = Both(cards().lookup("merchant", ENVELOPED, "merchant").publish("out"))
    both.process([copied(0, 7, "a", "food"), copied(1, 8, "b", "books")])
    both.topic_ids["merchants"] = "T2"
    both.process([again(copied(0, 7, "a", "food"))])
    assert both.results("merchant") == {b"a": {"category": "food"}}


def test_a_table_whose_topic_was_created_again_and_is_empty_has_no_rows() -> None:
    both = Both(by_category())
    both.process([merchant(0, "m", "food"), paid(0, "m")])
    both.topic_ids["merchants"] = "T2"
    both.process([paid(1, "m")])
    assert both.results("merchant") == {}
    assert both.results("category").keys() == {b"food", b"unknown"}
    both.process([again(merchant(0, "m", "toys"))])
    both.process([paid(2, "m")])
    assert both.results("category")[b"toys"] == {"n": 1, "cents": 1}


def test_what_was_begun_before_the_topic_of_a_table_was_created_again_finds_the_rows_of_before() -> None:
    flow, store = by_category(), fresh_store()
    first = MemoryRunner(flow, bind(flow, {}, store), topic_ids={"merchants": TOPIC_ID})
    first.process([merchant(0, "m", "food")])
    begin_batch(first.run, {TopicPartition("payments", 0): 1}, {})
    second = MemoryRunner(flow, bind(flow, {}, store), topic_ids={"merchants": "T2"})
    second.process([paid(0, "m")])
    second.process([paid(1, "m")])
    assert second.results("category").keys() == {b"food", b"unknown"}


@pytest.mark.parametrize(
    "point", ["remove:merchant", "ledger", "persist:merchant", "manifest:merchant", "manifest:card"]
)
@pytest.mark.parametrize("outcome", [FaultOutcome.BEFORE, FaultOutcome.AFTER])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "lmdb"])
@pytest.mark.parametrize("topic_id", ["T2", "T3"])
def test_a_crash_while_a_table_begins_anew_leaves_no_row_of_the_former_topic(
    point: str, outcome: FaultOutcome, kind: str, topic_id: str, tmp_path: Path
) -> None:
    """Also if the topic is then created once more, and has less."""
    store = fresh_store() if kind == "memory" else f"{kind}://{tmp_path}/states"
    flow = by_category()
    stores = bind(flow, {"merchant": fresh_store()} if kind == "memory" else {}, store)
    first = MemoryRunner(flow, stores, topic_ids={"merchants": TOPIC_ID})
    first.process([merchant(n, f"m{n}", "food") for n in range(3)])
    first.close()
    new = [merchant(0, "m1", "books", at=1), merchant(1, "x", "toys")]
    crashing = MemoryRunner(flow, stores, topic_ids={"merchants": "T2"})
    with faults.use(Injector([Fault(point, outcome)], crash)), suppress(Crash):
        crashing.process([again(one) for one in new])
    left = new if topic_id == "T2" else new[:1]
    third = MemoryRunner(flow, stores, topic_ids={"merchants": topic_id})
    third.process([replace(one, topic_id=topic_id) for one in left])
    third.process([paid(n, f"m{n}") for n in range(3)])
    assert third.results("merchant").keys() == {one.key for one in left}
    assert third.results("category") == {b"books": {"n": 1, "cents": 1}, b"unknown": {"n": 2, "cents": 2}}


def test_a_dead_letter_of_the_former_topic_makes_no_row_of_the_new_table() -> None:
    flow = cards().lookup("merchant", MERCHANTS, "merchant", columns=["fee"])
    both = Both(flow.aggregate("all", pl.lit("all"), COUNT))
    broken = replace(merchant(0, "m", "food"), value=b'{"fee": "x"}')
    both.process([broken])
    [dead] = both.dead_letters
    both.topic_ids["merchants"] = "T2"
    both.process([again(merchant(0, "m", "toys", at=1))])
    back = both.redriven(dead, 1)
    assert back.value is not None
    mended = encode(replace(decode(back.value), payload=b'{"fee": 2.0}'))
    both.process([replace(again(back), value=mended)])
    assert both.results("merchant") == {b"m": {"fee": 0.5}}
