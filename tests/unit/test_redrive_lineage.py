"""Redriven records: where they stand, and that they are folded once."""

from envelope import Hop, Lineage, Node, Standing, Verdict, Windows
from envelope.redrive import Redrive, read_via, redrive_hops

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


def test_the_passage_through_the_dead_letter_topic_is_two_transparent_hops_with_the_ids_of_their_topics() -> None:
    letter = Hop("dead", 0, 3, "x", 1, 2, rekeyed=True, topic_id="idD", leader_epoch=4, timestamp_ms=5)
    assert redrive_hops(B, letter, Redrive("carrier", hole=False)) == (
        Hop("b", 1, 5, "headwater.redrive", transparent=True, topic_id="idB"),
        Hop("dead", 0, 3, "headwater.redrive/carrier!", transparent=True, topic_id="idD"),
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


def test_redriven_twice_the_last_passage_counts() -> None:
    again = Hop("dead", 0, 8)
    chain = (*ORIGIN, *redrive_hops(B, D, Redrive()), *redrive_hops(Hop("b", 1, 9), again, Redrive(hole=False)))
    line = Lineage.of(chain, Node("b", 1, 12, "idB"))
    assert line.redrive == Redrive(hole=False)
    assert line.reduced().own == Node("b", 1, 5, "idB")


def test_without_a_hole_it_has_a_lane_of_its_own_by_where_it_died() -> None:
    standing = redriven(Redrive(hole=False), *ORIGIN).standing(indices=(1,))
    assert standing.orphan == ("!b:1#idB", (5, 1))
    assert redriven(Redrive(), *ORIGIN).standing().orphan is None
    assert redriven(Redrive(), *ORIGIN).standing(stage="carrier").orphan is None
    assert redriven(Redrive("carrier"), *ORIGIN).standing(stage="carrier").orphan is None
    assert redriven(Redrive("carrier"), *ORIGIN).standing(stage="region").orphan == ("!b:1#idB", (5,))


def orphan(offset: int = 9) -> Standing:
    return redriven(Redrive(hole=False), *ORIGIN, offset=offset).standing()


def test_an_orphan_below_the_floor_is_folded_exactly_once() -> None:
    lane = orphan().lane
    rising = [Standing(lane, lane, (offset, 2)) for offset in range(71, 80)]
    windows, _ = Windows().folding(rising, size=4)
    [decision] = windows.judge([orphan()])
    assert decision == (Verdict.REDRIVEN, True)
    assert [one.verdict for one in windows.judge([orphan(), orphan(10)])] == ["redriven", "duplicate_in_batch"]
    after, _ = windows.folding([orphan()], size=4)
    assert after.judge([orphan(11)]) == [(Verdict.DUPLICATE, False)]


def test_an_orphan_that_came_meanwhile_by_the_ordinary_way_is_a_duplicate_and_the_other_way_round() -> None:
    original = Lineage.of(ORIGIN, Node("b", 1, 7, "idB")).standing()
    held, _ = Windows().folding([original])
    assert [one.verdict for one in held.judge([orphan()])] == ["duplicate"]
    folded, _ = Windows().folding([orphan()])
    assert [one.verdict for one in folded.judge([original])] == ["duplicate"]
    assert sum(one.fold for one in Windows().judge([orphan(), original])) == 1


def test_an_orphan_at_the_floor_of_its_own_lane_is_unproven_never_dropped() -> None:
    later = [
        Lineage.of(
            redrive_hops(Hop("b", 1, n, topic_id="idB"), D, Redrive(hole=False)), Node("b", 1, 90 + n)
        ).standing()
        for n in range(6, 60)
    ]
    windows, _ = Windows().folding(later, size=4)
    first = Lineage.of(redrive_hops(B, D, Redrive(hole=False)), Node("b", 1, 99)).standing()
    [decision] = windows.judge([first])
    assert decision == (Verdict.UNPROVEN, False)
    assert decision.verdict.diverts
