"""What the ledger lists of a dead letter, and what its letter says: the one, or the event is lost or folded twice."""

from typing import Any

from aggregations.definition.element import Element
from aggregations.per_message.dead_letters import DeadLetterCollector, RejectedRecord
from aggregations.per_message.ledger import Changes, Entry, Ledger
from aggregations.per_message.steps import Rejected
from envelope import EnvelopeError, Hop, Node, Reason, Route, Siblings
from envelope.redrive import Redrive, redrive_hops

OWN = Node("legs", 0, 3, "T")
RAW = Hop("raw", 0, 7, via="rep", index=0)
EVENT = ("raw:0#R>rep>legs", (7, 0))
DIED_AT = ("!legs:0#T", (3,))


def collector(*listed: Entry) -> DeadLetterCollector:
    ledger = Ledger("fleet").changed(Changes(added=set(listed)))
    return DeadLetterCollector(ledger, "first", Siblings.EVENT_ID, {"raw": "R"}, frozenset())


def element(*chain: Hop, **fields: Any) -> Element[Any]:
    return Element(None, b"k", OWN, chain or (RAW,), **fields)


def rejected(one: Element[Any], *, whole: bool = True, after: DeadLetterCollector | None = None) -> DeadLetterCollector:
    found = after or collector()
    found.rejected("carrier", Rejected(one, Reason.TRANSFORM_FAILED, "no number", whole))
    return found


def unreadable(*chain: Hop) -> EnvelopeError:
    error = EnvelopeError(Reason.BAD_PAYLOAD, "no JSON")
    error.chain = chain or None
    return error


def test_a_record_without_a_readable_chain_is_listed_where_it_died_and_its_letter_says_why() -> None:
    found = collector()
    found.unread(OWN, unreadable(), key=b"k", again=False)
    assert list(found.dead.values()) == [RejectedRecord(OWN, "", Reason.BAD_PAYLOAD, "no JSON")]
    assert found.changes.added == {Entry("first", *DIED_AT)}


def test_an_unreadable_payload_is_listed_as_its_event_if_it_is_the_first_delivery_and_where_it_died_if_not() -> None:
    """Of a possible copy nobody knows whether the event was folded: listed as its event, it would be folded again."""
    for again, entry in ((False, EVENT), (True, DIED_AT)):
        found = collector()
        found.unread(OWN, unreadable(RAW), key=b"k", again=again)
        assert found.changes.added == {Entry("first", *entry)}
        lineage = "raw:0:7 -> legs:0:3"
        assert list(found.dead.values()) == [RejectedRecord(OWN, "", Reason.BAD_PAYLOAD, "no JSON", lineage)]


def test_a_letter_names_the_records_that_led_to_it_and_its_entry_has_the_current_id_of_the_root_topic() -> None:
    found = rejected(element())
    assert [one.lineage for one in found.dead.values()] == ["raw:0:7 -> legs:0:3"]
    assert found.changes.added == {Entry("carrier", *EVENT)}


def test_an_item_that_takes_its_whole_record_along_is_listed_as_the_record() -> None:
    """When it comes back all of its items are folded."""
    group, position = EVENT
    place, offset = DIED_AT
    for again, entry in ((False, (group, position)), (True, (place, offset))):
        found = rejected(element(indices=(2, 1), again=again))
        assert found.changes.added == {Entry("carrier", *entry)}
        assert [one.items for one in found.dead.values()] == [()]


def test_an_item_that_dies_alone_is_listed_by_its_index_and_its_letter_names_it() -> None:
    """When it comes back its siblings are not folded again."""
    group, position = EVENT
    place, offset = DIED_AT
    for again, entry in ((False, (group, (*position, 2, 1))), (True, (place, (*offset, 2, 1)))):
        found = rejected(element(indices=(2, 1), again=again), whole=False)
        assert found.changes.added == {Entry("carrier", *entry)}
        assert [one.items for one in found.dead.values()] == [((2, 1),)]


def test_without_a_fan_out_index_the_event_id_tells_siblings_apart_in_the_ledger() -> None:
    foreign = Hop("raw", 0, 7, via="rep")
    one, other = (element(foreign, event_id=name) for name in ("e1", "e2"))
    found = rejected(other, after=rejected(one))
    assert found.changes.added == {Entry("carrier", EVENT[0], (7, -1, name)) for name in ("e1", "e2")}


def test_a_possible_copy_of_an_event_that_is_listed_is_that_event_and_not_a_second_dead_letter() -> None:
    event = Entry("carrier", *EVENT)
    of_an_earlier_batch = rejected(element(again=True), after=collector(event))
    assert of_an_earlier_batch.changes.added == {event}
    assert of_an_earlier_batch.unlisted() == set()
    of_this_batch = rejected(element(again=True), after=rejected(element()))
    assert of_this_batch.changes.added == {event}


def redriven(redrive: Redrive, **fields: Any) -> Element[Any]:
    """The letter of `legs:0:1`, come back as `legs:0:3`."""
    hops = redrive_hops(Hop("legs", 0, 1, topic_id="T"), Hop("dead", 0, 0), redrive)
    return element(RAW, *hops, **fields)


def test_what_dies_behind_a_stage_that_folded_it_late_stays_listed_although_that_stage_has_filled_its_entry() -> None:
    event = Entry("carrier", *EVENT)
    found = rejected(element(route=Route.MISSING), after=collector(event))
    found.changes.filled.add(event)
    assert found.changes.resolved().filled == set()


def test_a_redriven_record_that_dies_again_behind_a_stage_is_listed_where_it_died_first_if_nothing_proves_more() -> (
    None
):
    """Its next letter says so, and would be a copy if it were listed anywhere else."""
    for stage in ("", "carrier"):
        found = rejected(redriven(Redrive(stage, hole=False, application="fleet"), route=Route.RETRIED))
        assert found.changes.added == {Entry("carrier", "!legs:0#T", (1,))}
        assert found.copies == {}


def test_a_redriven_record_that_this_flow_did_not_give_up_is_counted_as_a_copy_and_is_no_dead_letter() -> None:
    for redrive in (Redrive("carrier", application="other"), Redrive("carrier", hole=False, application="fleet")):
        found = rejected(redriven(redrive))
        assert (found.dead, found.changes.added, found.copies) == ({}, set(), {"carrier": 1})


def test_a_redriven_record_of_a_hole_that_dies_in_front_of_its_stage_stays_a_hole() -> None:
    found = rejected(redriven(Redrive("first", application="fleet")))
    assert [(one.stage, one.hole) for one in found.dead.values()] == [("first", True)]
    assert found.changes.added == set()


def test_a_redriven_record_that_is_listed_and_dies_again_stays_listed_at_the_stage_that_it_was_on_its_way_to() -> None:
    back = redriven(Redrive("second", hole=False, application="fleet"))
    found = rejected(back, after=collector(Entry("second", "!legs:0#T", (1,))))
    assert [(one.stage, one.hole) for one in found.dead.values()] == [("second", False)]
    assert (found.changes.added, found.copies) == (set(), {})


def test_several_items_of_one_record_are_one_letter_and_a_letter_of_the_whole_record_names_none() -> None:
    found = collector()
    for n in (0, 2):
        rejected(element(indices=(n,)), whole=False, after=found)
    assert [one.items for one in found.dead.values()] == [((0,), (2,))]
    rejected(element(indices=(1,)), after=found)
    assert [one.items for one in found.dead.values()] == [()]
