"""What the loop over a flow's stages reads, and which records it gives up because they failed in another task."""

from collections.abc import Mapping

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.definition.payloads import Json
from aggregations.definition.source import Topic
from aggregations.per_message.cause import Cause
from aggregations.per_message.dead_letters import BEYOND_END, DeadLetterCollector
from aggregations.per_message.ledger import Changes, Doubt, Entry, Ledger
from aggregations.per_message.loop import Failures, MessageLoop
from aggregations.per_message.steps import Applied
from aggregations.report import Report
from envelope import Envelope, Hop, Node, Reason, Siblings, TopicPartition, encode
from envelope.dedup.lineage import died_in
from envelope.raised import Raised
from envelope.redrive import Redrive, redrive_hops

TOPIC = Topic("legs", Json({"tail": str}), cluster="paris")
FOLD = Fields(n=count())
FLOW = Flow("fleet").source(TOPIC).aggregate("aircraft", "tail", FOLD)
IDS = {"raw": "R", "legs": "L"}


def chain_of(root: int) -> tuple[Hop, ...]:
    return (Hop("raw", 0, root, via="kit", index=0, count=1, cluster="paris"),)


def leg(offset: int, root: int | None, payload: bytes = b'{"tail": "N1"}') -> Record:
    chain = () if root is None else chain_of(root)
    value = encode(Envelope(payload, chain, key=b"N1"))
    return Record("legs", 0, offset, b"N1", value, headers=(("h", b"%d" % offset),), topic_id="L")


def own(offset: int) -> Node:
    return Node("legs", 0, offset, "L", "paris")


def reading(doubt: Doubt | None = None) -> tuple[MessageLoop, DeadLetterCollector]:
    ledger = Ledger("fleet")
    collector = DeadLetterCollector(ledger, "aircraft", Siblings.GROUP, IDS, frozenset(), frozenset())
    loop = MessageLoop(
        *(FLOW, ledger, IDS, collector, Report(), 1, doubt or {}), beyond_end=lambda root: root.offset >= 10
    )
    return loop, collector


def test_a_record_whose_root_cannot_exist_is_given_up_where_it_stands_and_the_others_are_read() -> None:
    loop, found = reading()
    read = loop.read([leg(0, 5), leg(1, 10), leg(2, 9), leg(11, None)])
    assert [(element.offset, element.headers) for element in read.elements] == [
        (offset, (("h", b"%d" % offset),)) for offset in (0, 2, 11)
    ]
    assert read.schema == TOPIC.schema
    [dead] = found.dead.values()
    assert (dead.own, dead.reason, dead.detail) == (own(1), Reason.ROOT_BEYOND_END, BEYOND_END)
    assert found.changes.added == {Entry("aircraft", died_in(own(1)), (1,))}
    assert loop.report.records == 4


def test_an_unreadable_record_is_listed_as_its_event_unless_it_may_be_a_copy() -> None:
    loop, found = reading()
    loop.read([leg(0, 5, b"no JSON"), leg(1, 4, b"no JSON")])
    [event] = {entry for entry in found.changes.added if entry.position == (5, 0)}
    assert [route.partition(">")[0].partition(":")[2] for route in loop.seen] == ["0#R"]
    assert found.changes.added == {event, Entry("aircraft", died_in(own(1)), (1,))}
    assert {dead.own for dead in found.dead.values()} == {own(0), own(1)}


def test_records_below_an_offset_in_doubt_may_be_copies() -> None:
    for doubt, again in ((None, [False, False]), ({TopicPartition("legs", 0): 1}, [True, False])):
        loop, _ = reading(doubt)
        assert [element.again for element in loop.read([leg(0, 5), leg(1, 6)]).elements] == again


def test_tombstones_are_counted_and_what_comes_after_them_is_read() -> None:
    loop, _ = reading()
    empty = [Record("legs", 0, offset, b"N1", None, topic_id="L") for offset in (0, 1, 2)]
    read = loop.read([*empty, leg(3, 5)])
    assert [element.offset for element in read.elements] == [3]
    assert (loop.report.records, loop.report.tombstones) == (4, 3)
    assert [route.partition(">")[0].partition(":")[2] for route in loop.seen] == ["0#R"]


CAUSE = Cause(Reason.TRANSFORM_FAILED, "ValueError in a step", Raised("ValueError", "fleet.py:1 in step"))


class OtherTasks(Failures):
    """Other tasks, in which items of some records failed in a step before a stage."""

    def __init__(self, **failed: tuple[int, ...]) -> None:
        self.failed = {stage: {own(offset): CAUSE for offset in offsets} for stage, offsets in failed.items()}
        self.told: list[tuple[int, Node, Cause, bool]] = []

    def at(self, index: int, *, hole: bool) -> Mapping[Node, Cause]:
        return {} if hole else self.failed.get(f"stage{index}", {})

    def add(self, index: int, own: Node, cause: Cause, *, hole: bool) -> None:
        self.told.append((index, own, cause, hole))


def beside(flow: Flow, others: OtherTasks, *listed: Entry) -> tuple[MessageLoop, DeadLetterCollector]:
    ledger = Ledger("fleet").changed(Changes(added=set(listed)))
    collector = DeadLetterCollector(ledger, "aircraft", Siblings.GROUP, IDS, frozenset(), frozenset())
    return MessageLoop(*(flow, ledger, IDS, collector, Report(), 1), failures=others), collector


def facts(found: DeadLetterCollector) -> set[tuple[int, str, Cause]]:
    return {(dead.own.offset, dead.stage, Cause(dead.reason, dead.detail, dead.raised)) for dead in found.dead.values()}


def test_a_record_that_failed_in_another_task_is_rejected_for_that_cause_before_any_step_sees_it() -> None:
    seen = []

    def name(one: Element) -> dict[str, str]:
        seen.append(one.offset)
        return {"tail": one["tail"].lower()}

    known = pl.col("tail").str.starts_with("N").fill_null(True)
    flow = Flow("fleet").source(TOPIC).filter(known).map(name).aggregate("aircraft", "tail", FOLD)
    for records, arriving, filtered in (
        ([leg(0, 5), leg(1, 6), leg(2, 7, b'{"tail": null}'), leg(3, 8, b'{"tail": "D0"}'), leg(4, 9)], [0], 1),
        ([leg(1, 6), leg(2, 7, b'{"tail": null}'), leg(4, 9)], [], 0),
    ):
        others = OtherTasks(stage0=(1, 4))
        loop, found = beside(flow, others)
        seen.clear()
        arrivals = loop.enter(flow.stages[0], loop.read(records))
        assert [one.element.offset for one in arrivals] == arriving
        assert seen == [*arriving, 2]
        assert loop.report.filtered == filtered
        failed = {offset: cause for offset, _, cause in facts(found)}
        assert failed == {1: CAUSE, 2: failed[2], 4: CAUSE}
        assert failed[2].raised is not None
        assert failed[2].raised.kind == "AttributeError"
        assert {dead.stage for dead in found.dead.values()} == {"aircraft"}
        # Other tasks learn of all of them.
        assert others.told == [(0, own(offset), failed[offset], False) for offset in (2, 1, 4)]


def test_after_the_last_stage_only_the_missing_items_of_a_record_are_passed_on_beside_one_that_failed_elsewhere() -> (
    None
):
    """The items of a redriven record that were not diverted have been published before."""
    seen = []

    def pair(one: Element) -> list[str]:
        seen.append(one.offset)
        return ["first", "second"]

    flow = Flow("fleet").source(TOPIC).aggregate("aircraft", "tail", FOLD).flat_map(pair).publish("pairs")
    back = redrive_hops(
        Hop("legs", 0, 0, topic_id="L"), Hop("dead", 0, 0), Redrive(END_OF_FLOW, hole=False, application="fleet")
    )
    records = [
        Element({"tail": "N1"}, b"N1", own(7), (*chain_of(5), *back)),
        *(Element({"tail": "N1"}, b"N1", own(offset), chain_of(offset)) for offset in (8, 9)),
    ]
    group = records[0].lineage.resolved(IDS).standing().group
    missing = Entry(END_OF_FLOW, group, (5, 0, 1))
    passed = {7: [(7, (1,))], **{offset: [(offset, (0,)), (offset, (1,))] for offset in (8, 9)}}
    for failed in ((), (8,)):
        others = OtherTasks(stage1=failed)
        loop, found = beside(flow, others, missing)
        seen.clear()
        loop.leave(Applied(list(records), TOPIC.schema))
        assert [(one.own.offset, one.indices) for one in loop.outputs if one.own] == [
            item for offset in passed if offset not in failed for item in passed[offset]
        ]
        assert seen == [offset for offset in (7, 8, 9) if offset not in failed]
        assert facts(found) == {(offset, END_OF_FLOW, CAUSE) for offset in failed}
        assert others.told == [(1, own(offset), CAUSE, False) for offset in failed]
        assert found.changes.filled == {missing}


@pytest.mark.parametrize(("siblings", "passed"), [(Siblings.EVENT_ID, 1), (Siblings.GROUP, 0)])
def test_after_the_last_stage_the_event_id_stands_in_for_an_index_where_the_policy_says_so(siblings, passed) -> None:
    topic = Topic("legs", Json({"tail": str}), cluster="paris", siblings=siblings)
    flow = Flow("fleet").source(topic).aggregate("aircraft", "tail", FOLD).publish("pairs")
    back = redrive_hops(
        Hop("legs", 0, 0, topic_id="L"), Hop("dead", 0, 0), Redrive(END_OF_FLOW, hole=False, application="fleet")
    )
    chain = (Hop("raw", 0, 5, via="kit", cluster="paris"), *back)
    one = Element({"tail": "N1"}, b"N1", own(7), chain, event_id="e1")
    group = one.lineage.resolved(IDS).standing().group
    listed = Entry(END_OF_FLOW, group, (5, -1, "e1"))
    loop, found = beside(flow, OtherTasks(), listed)
    loop.leave(Applied([one], topic.schema))
    assert len(loop.outputs) == passed
    assert found.copies == ({} if passed else {END_OF_FLOW: 1})
    assert found.changes.filled == ({listed} if passed else set())


def test_each_stage_counts_its_keyless_lanes_and_passes_on_elements_with_the_columns_before_the_next() -> None:
    counted = pl.lit(1).alias("n")
    flow = (
        Flow("fleet")
        .source(TOPIC)
        .aggregate("aircraft", "tail", FOLD)
        .map(n=counted)
        .aggregate("again", "tail", FOLD)
        .map(m=counted)
        .aggregate("last", "tail", FOLD)
    )
    loop, _ = beside(flow, OtherTasks())
    hop = Hop("raw", 0, 5, via="kit", index=0, count=1, cluster="paris", keyless=True)
    value = encode(Envelope(b'{"tail": "N1"}', (hop,), key=b"N1"))
    applied = loop.read([Record("legs", 0, 0, b"N1", value, topic_id="L"), leg(1, 6)])
    columns = []
    for stage in flow.stages:
        outcome = loop.fold(stage, loop.enter(stage, applied), lambda _, __: {})
        applied = loop.onward(stage, outcome)
        assert applied.schema is not None
        columns.append([*applied.schema])
        assert len(applied.elements) == 2
    assert columns == [["tail"], ["tail", "n"], ["tail", "n", "m"]]
    assert loop.report.keyless == dict.fromkeys(["aircraft", "again", "last"], 1)


class Refusing:
    """A fold that fails of one aircraft."""

    def zero(self) -> int:
        return 0

    def fold(self, state: int, element: Element) -> int:
        if element["tail"] == "bad":
            raise LookupError("refused")
        return state + 1


def test_other_tasks_learn_why_a_fold_failed_and_nothing_of_a_record_that_leaves_no_hole() -> None:
    flow = Flow("fleet").source(TOPIC).aggregate("aircraft", "tail", Refusing(), history=1)
    others = OtherTasks()
    loop, found = beside(flow, others)
    [stage] = flow.stages
    before = loop.fold(stage, loop.enter(stage, loop.read([leg(n, n) for n in (5, 6, 7)])), lambda _, __: {}).states
    retried = (
        Hop("raw", 0, 5, via="kit", cluster="paris", pass_through=True),
        Hop("retry", 0, 0, via="kit", index=0, cluster="paris"),
    )
    value = encode(Envelope(b'{"tail": "N1"}', retried, key=b"N1"))
    records = [Record("legs", 0, 8, b"N1", value, topic_id="L"), leg(9, 9, b'{"tail": "bad"}')]
    loop.fold(stage, loop.enter(stage, loop.read(records)), lambda _, __: before)
    failed = {offset: cause for offset, _, cause in facts(found)}
    assert failed[8].reason is Reason.UNPROVEN
    assert failed[9].reason is Reason.FOLD_FAILED
    assert failed[9].raised is not None
    assert others.told == [(0, own(9), failed[9], True)]
