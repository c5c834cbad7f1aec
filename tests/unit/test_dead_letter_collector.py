"""How the ledger lists a dead letter, and the facts in its headers. An error loses the event or folds it twice."""

from typing import Any

from aggregations.definition.element import Element
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.dead_letters import DeadLetterCollector, RejectedRecord
from aggregations.per_message.ledger import Changes, Entry, Ledger
from aggregations.per_message.stage import Decided
from aggregations.per_message.steps import RejectedElement
from envelope import Decision, EnvelopeError, Hop, Node, Reason, Route, Siblings, Standing, Verdict
from envelope.raised import Raised
from envelope.redrive import Redrive, redrive_hops

OWN = Node("legs", 0, 3, "T")
RAW = Hop("raw", 0, 7, via="rep", index=0)
EVENT = ("raw:0#R>rep>legs", (7, 0))
DIED_AT = ("!legs:0#T", (3,))
RAISED = Raised("ValueError")


def collector(*listed: Entry) -> DeadLetterCollector:
    ledger = Ledger("fleet").changed(Changes(added=set(listed)))
    return DeadLetterCollector(ledger, "first", Siblings.EVENT_ID, {"raw": "R"}, frozenset(), frozenset())


def element(*chain: Hop, **fields: Any) -> Element[Any]:
    return Element(None, b"k", OWN, chain or (RAW,), **fields)


def rejected(one: Element[Any], *, whole: bool = True, after: DeadLetterCollector | None = None) -> DeadLetterCollector:
    found = after or collector()
    found.rejected("carrier", RejectedElement(one, Reason.TRANSFORM_FAILED, "no number", whole))
    return found


def unreadable(*chain: Hop) -> EnvelopeError:
    error = EnvelopeError(Reason.BAD_PAYLOAD, "no JSON")
    error.chain = chain or None
    return error


def test_a_record_without_a_readable_chain_is_listed_where_it_died_and_its_letter_says_why() -> None:
    found = collector()
    found.unread(OWN, unreadable(), again=False)
    assert list(found.dead.values()) == [RejectedRecord(OWN, "", Reason.BAD_PAYLOAD, "no JSON")]
    assert found.changes.added == {Entry("first", *DIED_AT)}


def test_an_unreadable_payload_is_listed_as_its_event_if_it_is_the_first_delivery_and_where_it_died_if_not() -> None:
    """The event of a possible copy may have been folded: if it were listed by its event, it would be folded again."""
    for again, entry in ((False, EVENT), (True, DIED_AT)):
        found = collector()
        found.unread(OWN, unreadable(RAW), again=again)
        assert found.changes.added == {Entry("first", *entry)}
        lineage = "raw:0:7 -> legs:0:3"
        assert list(found.dead.values()) == [RejectedRecord(OWN, "", Reason.BAD_PAYLOAD, "no JSON", lineage)]


def test_a_letter_names_the_records_that_led_to_it_and_its_entry_has_the_current_id_of_the_root_topic() -> None:
    found = rejected(element())
    assert [one.lineage for one in found.dead.values()] == ["raw:0:7 -> legs:0:3"]
    assert found.changes.added == {Entry("carrier", *EVENT)}


def test_the_author_of_a_step_that_raises_is_told_what_it_raised_and_in_front_of_which_stage() -> None:
    found = collector()
    found.rejected("carrier", RejectedElement(element(), Reason.TRANSFORM_FAILED, "no number", raised=RAISED))
    assert [one.cause for one in found.dead.values()] == ["stage carrier: transform_failed, ValueError"]
    assert [one.cause for one in rejected(element()).dead.values()] == [""]


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
    """Its next dead letter has the same place, and would be a copy if it were listed under another one."""
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


def decided(
    one: Element[Any], verdict: Verdict, reason: Reason | None, *listed: Entry, transit: bool = False
) -> Decided:
    """The decision of stage `b` about an element with the standing `EVENT`, or about an item of it."""
    lineage = one.lineage.resolved({"raw": "R"})
    standing = Standing(f"{EVENT[0]}:0", EVENT[0], (*EVENT[1], *one.indices), one.route)
    arrival = Arrival(one, b"K", standing, transit=transit, entries=listed, redriven=lineage.redriven)
    return Decided(arrival, Decision(verdict, fold=verdict is Verdict.REDRIVEN), reason, "boom", raised=RAISED)


def after(*all_of: Decided, followed: frozenset[str] = frozenset({"b"})) -> DeadLetterCollector:
    found = DeadLetterCollector(Ledger("fleet"), "first", Siblings.EVENT_ID, {"raw": "R"}, followed, frozenset())
    found.decided("b", all_of)
    return found


def test_the_letter_of_what_a_stage_rejects_says_where_from_why_and_that_it_left_a_hole() -> None:
    found = after(decided(element(), Verdict.REJECTED, Reason.FOLD_FAILED))
    [dead] = found.dead.values()
    assert (dead.own, dead.stage, dead.reason, dead.detail) == (OWN, "b", Reason.FOLD_FAILED, "boom")
    assert (dead.lineage, dead.hole, dead.raised, dead.items) == ("raw:0:7 -> legs:0:3", True, RAISED, ())


def test_a_hole_in_front_of_other_stages_is_listed_only_where_no_attempt_can_have_brought_them_the_event() -> None:
    """What fills the hole then is folded below their floors as well."""
    event = Entry("b", EVENT[0], EVENT[1])
    first, copy = (decided(element(again=again), Verdict.REJECTED, Reason.FOLD_FAILED) for again in (False, True))
    assert after(first).changes.added == {event}
    assert after(copy).changes.added == set()
    assert after(first, followed=frozenset({"a"})).changes.added == set(), "nothing is behind it"


def test_all_items_of_a_record_that_leaves_holes_in_front_of_other_stages_are_one_entry() -> None:
    items = [decided(element(indices=(n,)), Verdict.REJECTED, Reason.FOLD_FAILED) for n in range(3)]
    found = after(*items)
    assert found.changes.added == {Entry("b", EVENT[0], EVENT[1])}
    assert len(found.dead) == 1


def test_what_is_unproven_is_listed_where_it_died_item_by_item_and_leaves_no_hole() -> None:
    """The operator may say of one item that it was never folded: its siblings may have been."""
    items = [decided(element(indices=(n,)), Verdict.UNPROVEN, Reason.UNPROVEN) for n in (0, 2)]
    found = after(*items)
    place, offset = DIED_AT
    assert found.changes.added == {Entry("b", place, (*offset, n)) for n in (0, 2)}
    assert [(one.items, one.hole) for one in found.dead.values()] == [(((0,), (2,)), False)]
    alone = after(decided(element(), Verdict.UNPROVEN, Reason.UNPROVEN))
    assert [one.items for one in alone.dead.values()] == [()]


def test_a_redriven_record_that_is_unproven_is_listed_where_it_died_first() -> None:
    back = redriven(Redrive("b", hole=False, application="fleet"))
    found = after(decided(back, Verdict.UNPROVEN, Reason.UNPROVEN))
    assert found.changes.added == {Entry("b", "!legs:0#T", (1,))}


def test_what_a_stage_folds_or_holds_strikes_its_entries_and_is_no_dead_letter() -> None:
    event = Entry("b", *EVENT)
    for verdict in (Verdict.REDRIVEN, Verdict.DUPLICATE):
        found = after(decided(element(), verdict, None, event))
        assert (found.changes.filled, found.dead) == ({event}, {})
    assert after(decided(element(), Verdict.REJECTED, Reason.FOLD_FAILED, event)).changes.filled == set()


def test_a_redriven_record_that_fails_at_a_stage_that_only_passes_it_on_stays_at_the_stage_that_it_goes_to() -> None:
    """It is missing there and nowhere else, as a hole or as an entry of the ledger."""
    for hole in (True, False):
        back = redriven(Redrive("last", hole=hole, application="fleet"))
        found = after(decided(back, Verdict.REJECTED, Reason.FOLD_FAILED, transit=True))
        assert [(one.stage, one.hole) for one in found.dead.values()] == [("last", hole)]
        assert found.changes.added == set()


def test_copies_behind_the_last_stage_are_counted_over_all_parts_of_a_batch() -> None:
    found, event = collector(), Entry("end", *EVENT)
    found.tail([event], copies=2)
    found.tail([], copies=1)
    found.tail([], copies=0)
    assert (found.changes.filled, found.copies) == ({event}, {"end": 3})
    unused = collector()
    unused.tail([], copies=0)
    assert unused.copies == {}, "a stage is reported only for what it had"


def test_the_letters_that_tasks_find_are_one_for_each_record_and_stage() -> None:
    letters = [
        RejectedRecord(OWN, "a", Reason.FOLD_FAILED, "", hole=True),
        RejectedRecord(OWN, "b", Reason.NULL_KEY, ""),
        RejectedRecord(Node("legs", 0, 4, "T"), "a", Reason.FOLD_FAILED, ""),
    ]
    found = collector()
    found.take(letters)
    found.take(letters[:1])
    assert list(found.dead.values()) == letters


def test_an_item_of_a_letter_comes_back_as_that_item_alone() -> None:
    """A step before its flat-map rejects the record: its missing items stay missing, and no others."""
    items = [Entry("second", EVENT[0], (*EVENT[1], n)) for n in (3, 1)]
    found = rejected(redriven(Redrive("second", hole=False, application="fleet")), after=collector(*items))
    assert [one.items for one in found.dead.values()] == [((1,), (3,))]
    assert found.changes.added == set()


def test_a_letter_of_another_flow_that_meets_an_entry_of_this_one_is_listed_where_this_one_has_it() -> None:
    back = redriven(Redrive("second", hole=True, application="other"))
    found = rejected(back, after=collector(Entry("first", *EVENT)))
    assert [(one.stage, one.hole) for one in found.dead.values()] == [("", False)]
    elsewhere = rejected(back, after=collector(Entry("second", *EVENT)))
    assert (elsewhere.dead, elsewhere.copies) == ({}, {"carrier": 1}), "its stages are not those of this flow"


def test_letters_of_a_full_ledger_are_dead_letters_again_and_not_copies() -> None:
    """It cannot tell whether this one is among those that it has forgotten."""
    found = collector()
    found.ledger = Ledger("fleet", forgotten={"second": 1})
    rejected(redriven(Redrive("second", hole=False, application="fleet")), after=found)
    assert [one.stage for one in found.dead.values()] == ["second"]
    other = collector()
    other.ledger = Ledger("fleet", forgotten={"first": 1})
    rejected(redriven(Redrive("second", hole=False, application="fleet")), after=other)
    assert other.dead == {}


def test_an_item_of_a_letter_that_was_rejected_as_a_whole_record_is_missing_with_it() -> None:
    """The entry is that of the record, not of the item."""
    back = redriven(Redrive("second", hole=False, application="fleet"), indices=(2,))
    found = rejected(back, after=collector(Entry("second", *EVENT)))
    assert [(one.stage, one.items) for one in found.dead.values()] == [("second", ())]
    assert found.copies == {}


def test_a_letter_names_items_only_if_nothing_but_items_of_its_whole_record_is_missing() -> None:
    group, position = EVENT
    redrive = Redrive("second", hole=False, application="fleet")
    record_too = collector(Entry("second", group, position), Entry("second", group, (*position, 1)))
    assert [one.items for one in rejected(redriven(redrive), after=record_too).dead.values()] == [()]
    item_of_an_item = collector(Entry("second", group, (*position, 2, 5)))
    found = rejected(redriven(redrive, indices=(2,)), after=item_of_an_item)
    assert [one.items for one in found.dead.values()] == [()]


def test_every_copy_that_is_redriven_is_counted() -> None:
    back = redriven(Redrive("carrier", application="other"))
    assert rejected(back, after=rejected(back)).copies == {"carrier": 2}
