"""Which hop sent an event again, and what is counted for it."""

from collections.abc import Iterable

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, Lineage, Node, encode
from envelope.deadletter import DeadLetterHeaders, Form
from envelope.errors import Reason
from envelope.redrive import HEALED
from jobs.dead_letters.redrive import redriven
from jobs.explaining.blame import Passage, _Count
from jobs.explaining.copies import Events, letter_of, resend_of
from jobs.tracing import Place

FLOW = Flow("fleet").source(Topic("legs", Json({"k": str}))).aggregate("totals", "k", Fields(n=count()))
RAW = Hop("raw", 0, 7, via="wrap", index=0, count=1, topic_id="R")


def record(offset: int, *chain: Hop, partition: int = 0, timestamp_ms: int = 0) -> Record:
    value = encode(Envelope(b'{"k": "K"}', chain, b"K", event_id="e7"))
    return Record("legs", partition, offset, b"K", value, timestamp_ms, topic_id="T")


def lineage(*chain: Hop, own: tuple[str, int, int] = ("legs", 0, 4)) -> Lineage:
    return Lineage.of(chain, Node(*own))


def back(dead: Record, offset: int, letter: int = 3) -> Record:
    """The record that a redrive makes of the dead letter of a record."""
    facts = DeadLetterHeaders(
        "legs", 0, dead.offset, Reason.FOLD_FAILED, topic_id="T", application="fleet", hole=True, form=Form.ENVELOPE
    )
    value = redriven(dead.key, dead.value, (), facts, Hop("dead", 0, letter, topic_id="D"))
    return Record("legs", 0, offset, b"K", value, topic_id="T")


def test_the_republisher_that_read_one_record_and_sent_two_is_named() -> None:
    found = resend_of(lineage(RAW), lineage(RAW, own=("legs", 0, 9)))
    assert found is not None
    assert (found.via, str(found.read), found.target, found.kind) == ("wrap", "raw:0:7", "legs", "republisher")


def test_the_first_hop_with_other_coordinates_is_named_and_not_the_last_one() -> None:
    first = lineage(RAW, Hop("legs", 0, 4, via="rekey", index=0), own=("carriers", 0, 1))
    replayed_upstream = lineage(RAW, Hop("legs", 0, 9, via="rekey", index=0), own=("carriers", 0, 2))
    replayed_here = lineage(RAW, Hop("legs", 0, 4, via="rekey", index=0), own=("carriers", 0, 3))
    names = [found and found.via for found in (resend_of(first, replayed_upstream), resend_of(first, replayed_here))]
    assert names == ["wrap", "rekey"]


def test_a_mark_before_a_hop_is_not_named_in_its_place() -> None:
    mark = Hop("raw", 0, 7, via=HEALED, pass_through=True)
    found = resend_of(lineage(RAW), lineage(mark, RAW, own=("legs", 0, 9)))
    assert found is not None
    assert (found.via, found.kind) == ("wrap", "republisher")


def test_records_with_other_roots_were_sent_again_by_nobody() -> None:
    other = Hop("raw", 0, 8, via="wrap", index=0)
    assert resend_of(lineage(RAW), lineage(other)) is None
    assert resend_of(lineage(RAW), lineage(RAW)) is None


@pytest.mark.parametrize("swapped", [False, True], ids=["original first", "redriven first"])
def test_a_redriven_record_was_sent_again_by_the_redrive(swapped: bool) -> None:
    dead = record(4, RAW)
    events = Events(FLOW, {})
    one, other = events.of(dead), events.of(back(dead, 20))
    assert one is not None
    assert other is not None
    assert one.event == other.event
    first, later = (other, one) if swapped else (one, other)
    found = resend_of(first.lineage, later.lineage)
    assert found is not None
    assert (found.kind, str(found.read)) == ("redrive", "legs:0:4")
    assert letter_of(other.lineage) == Place("dead", 0, 3)
    assert letter_of(one.lineage) is None


def counted(records: Iterable[Record]) -> _Count:
    found, events = _Count(), Events(FLOW, {})
    for one in records:
        found.add(one, events.of(one))
    return found


def test_every_re_send_counts_and_every_event_once() -> None:
    found = counted(record(offset, RAW, timestamp_ms=100 + offset) for offset in (1, 2, 3))
    [hop] = found.hops.values()
    assert hop.passage == Passage("wrap", "raw", "legs", "republisher")
    assert (hop.records, hop.resent, hop.events) == (3, 2, 1)
    assert (hop.first, hop.last, hop.first_ms, hop.last_ms) == (Place("legs", 0, 2), Place("legs", 0, 3), 102, 103)


def test_a_redrive_between_two_copies_leaves_the_republisher_its_own() -> None:
    dead = record(1, RAW)
    found = counted([dead, back(dead, 2), record(3, RAW)])
    resent = {passage.kind: (hop.resent, hop.events) for passage, hop in found.hops.items() if hop.resent}
    assert resent == {"redrive": (1, 1), "republisher": (1, 1)}


def test_records_that_cannot_be_read_are_counted_apart() -> None:
    found = counted([Record("legs", 0, 0, b"K", b"?", topic_id="T"), Record("legs", 0, 1, b"K", None, topic_id="T")])
    assert (found.records, found.unread, found.hops) == (2, 2, {})
