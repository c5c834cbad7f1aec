"""Redriven records keep their standing and are folded once."""

from dataclasses import replace

from envelope import Hop, Lineage, Node, Route
from envelope.dedup.lineage import Redriven
from envelope.redrive import HEALED, Redrive, read_via, redrive_hops

B, D = Hop("b", 1, 5, topic_id="idB"), Hop("dead", 0, 3)
ORIGIN = (Hop("a", 0, 70, via="r", index=2, topic_id="idA"),)


def redriven(redrive: Redrive, *before: Hop, offset: int = 9) -> Lineage:
    return Lineage.of((*before, *redrive_hops(B, D, redrive)), Node("b", 1, offset, "idB"))


def test_the_name_of_the_hop_says_where_it_goes_on() -> None:
    for redrive in (Redrive(), Redrive("carrier"), Redrive(hole=False), Redrive("carrier", hole=False)):
        assert read_via(redrive.via) == redrive
    assert read_via("wrap") is None
    assert read_via("headwater.redriver") is None
    assert read_via("headwater.redriveX/carrier") is None


def test_the_processor_through_the_dead_letter_topic_is_two_pass_through_hops_with_the_ids_of_their_topics() -> None:
    letter = Hop("dead", 0, 3, "x", 1, 2, rekeyed=True, topic_id="idD", leader_epoch=4, timestamp_ms=5)
    assert redrive_hops(B, letter, Redrive("carrier", hole=False)) == (
        Hop("b", 1, 5, "headwater.redrive", pass_through=True, topic_id="idB"),
        Hop("dead", 0, 3, "headwater.redrive/carrier!", pass_through=True, topic_id="idD"),
    )


def test_its_lineage_reads_as_the_original_one() -> None:
    line = redriven(Redrive("carrier"), *ORIGIN).check()
    original = Lineage.of(ORIGIN, Node("b", 1, 5, "idB"))
    assert line.reduced() == original
    assert line.redrive == Redrive("carrier")
    assert original.redrive is None
    assert line.standing().position == original.standing().position
    assert line.standing().lane == original.standing().lane


def test_it_stands_where_it_stood_when_its_topic_is_in_a_cluster_that_has_a_name() -> None:
    for before in ((), ORIGIN):
        died = Node("b", 1, 5, "idB", "oslo")
        chain = (*before, *redrive_hops(B, D, Redrive("carrier")))
        line = Lineage.of(chain, Node("b", 1, 9, "idB", "oslo")).check()
        assert line.standing().group == Lineage.of(before, died).standing().group
        assert line.reduced().own == died


def test_what_was_redriven_upstream_stands_where_it_stood_in_a_cluster_that_has_a_name() -> None:
    """Who redrives names no cluster; a republisher or a flow that reads the record there does, in the next hop."""
    own = Node("c", 0, 1, "idC", "west")
    for before in ((), ORIGIN):
        plain = Lineage.of((*before, replace(B, via="wrap", index=0, cluster="oslo")), own)
        back = replace(B, offset=9, via="wrap", index=0, cluster="oslo")
        once = redrive_hops(B, D, Redrive())
        twice = redrive_hops(replace(B, offset=7), D, Redrive())
        for hops in ((*once, back), (*once, *twice, back)):
            line = Lineage.of((*before, *hops), own).check()
            assert (line.standing().lane, line.standing().position) == (
                plain.standing().lane,
                plain.standing().position,
            )


def test_redriven_twice_the_last_processor_counts() -> None:
    again = Hop("dead", 0, 8)
    chain = (*ORIGIN, *redrive_hops(B, D, Redrive()), *redrive_hops(Hop("b", 1, 9), again, Redrive(hole=False)))
    line = Lineage.of(chain, Node("b", 1, 12, "idB"))
    assert line.redrive == Redrive(hole=False)
    assert line.reduced().own == Node("b", 1, 5, "idB")


def test_it_is_a_copy_until_a_ledger_or_a_hole_says_more() -> None:
    for redrive in (Redrive(), Redrive("carrier"), Redrive(hole=False)):
        assert redriven(redrive, *ORIGIN).standing(indices=(1,)).route is Route.COPY
    assert redriven(Redrive(), *ORIGIN).standing(late=Route.MISSING).route is Route.MISSING


def test_it_says_where_it_died_and_whose_dead_letter_it_was() -> None:
    redrive = Redrive("carrier", hole=False, application="fleet", asserted=True, generation=3)
    assert redriven(redrive, *ORIGIN).redriven == Redriven(redrive, "!b:1#idB", 5)
    assert Lineage.of(ORIGIN, Node("b", 1, 5, "idB")).redriven is None


def test_names_of_applications_may_have_any_character() -> None:
    for name in ("fleet", "a/b!+:2@", "große Flotte", "%2F"):
        redrive = Redrive("carrier", application=name, generation=2)
        assert read_via(redrive.via) == redrive


def test_a_mark_of_what_was_healed_upstream_is_no_processor() -> None:
    own = Node("c", 0, 9)
    hop = Hop("b", 1, 5, via="fleet", index=0, topic_id="idB")
    mark = Hop("b", 1, 5, via=HEALED, pass_through=True, topic_id="idB")
    plain, healed = Lineage.of((*ORIGIN, hop), own), Lineage.of((*ORIGIN, mark, hop), own).check()
    assert healed.reduced() == plain
    assert healed.standing() == replace(plain.standing(), route=Route.HEALED)
