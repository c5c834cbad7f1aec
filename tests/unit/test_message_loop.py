"""What the loop over a flow's stages reads, and which records it gives up before any step."""

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.payloads import Json
from aggregations.definition.source import Topic
from aggregations.per_message.dead_letters import BEYOND_END, DeadLetterCollector
from aggregations.per_message.ledger import Doubt, Entry, Ledger
from aggregations.per_message.loop import MessageLoop
from aggregations.report import Report
from envelope import Envelope, Hop, Node, Reason, Siblings, TopicPartition, encode
from envelope.dedup.lineage import died_in

TOPIC = Topic("legs", Json({"tail": str}), cluster="paris")
FLOW = Flow("fleet").source(TOPIC).aggregate("aircraft", "tail", Fields(n=count()))
IDS = {"raw": "R", "legs": "L"}


def leg(offset: int, root: int | None, payload: bytes = b'{"tail": "N1"}') -> Record:
    chain = () if root is None else (Hop("raw", 0, root, via="kit", index=0, count=1, cluster="paris"),)
    value = encode(Envelope(payload, chain, key=b"N1"))
    return Record("legs", 0, offset, b"N1", value, headers=(("h", b"%d" % offset),), topic_id="L")


def own(offset: int) -> Node:
    return Node("legs", 0, offset, "L", "paris")


def reading(doubt: Doubt | None = None) -> tuple[MessageLoop, DeadLetterCollector]:
    ledger = Ledger("fleet")
    collector = DeadLetterCollector(ledger, "aircraft", Siblings.GROUP, IDS, frozenset())
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
