"""Lineage, reduction, position, lane and group."""

from typing import Any

import pytest

from envelope import Envelope, EnvelopeError, Hop, Lineage, Node, Reason, Route, Standing
from envelope.dedup.lanes import group_of
from envelope.dedup.lineage import Edge, died_in, event_of, position_order
from envelope.redrive import HEALED, Redrive, redrive_hops

A, B, C = Node("a", 2, 17, "idA"), Node("b", 0, 4, "idB"), Node("c", 5, 9, "idC")


def line(*hops: Hop, own: Node = C) -> Lineage:
    return Lineage.of(hops, own)


def hop(node: Node, **fields: object) -> Hop:
    return Hop(node.topic, node.partition, node.offset, topic_id=node.topic_id, **fields)  # type: ignore[arg-type]


def test_without_a_chain_the_record_itself_is_the_root() -> None:
    standing = line(own=A).standing()
    assert line(own=A).root == A
    assert (standing.lane, standing.position) == ("a:2#idA", (17,))


def test_a_topic_id_stands_in_the_lane_as_it_is_and_cannot_be_read_as_a_step_of_the_path() -> None:
    assert line(own=Node("a", 2, 17, "qd5k_u9TRnm+/==")).standing().lane == "a:2#qd5k_u9TRnm+/=="
    assert line(own=Node("a", 2, 17, "x>y:1")).standing().lane == "a:2#x%3Ey%3A1"


def test_a_lineage_whose_edges_do_not_join_its_nodes_stands_nowhere() -> None:
    for nodes in ((A,), (A, B, C)):
        with pytest.raises(ValueError, match="zip"):
            Lineage(nodes, (Edge("r", 0),)).standing()


def test_the_root_is_the_first_hop_and_the_own_coordinates_are_the_last_node() -> None:
    lineage = line(hop(A, via="r", index=0), hop(B, via="s", index=1))
    assert str(lineage) == "a:2:17 -> b:0:4 -> c:5:9"
    assert (lineage.root, lineage.own) == (A, C)
    assert lineage.standing().position == (17, 0, 1)


def test_a_root_s_position_has_its_leader_epoch_before_its_offset() -> None:
    """KIP-320: an offset may be used twice, in two epochs. Epoch 0, or none, leaves the offset as it is."""
    positions = [
        line(Hop("a", 2, offset, "r", 0, topic_id="idA", leader_epoch=epoch), hop(B, via="s", index=1, leader_epoch=9))
        .standing()
        .position
        for epoch, offset in [
            (None, 9),
            (-1, 9),
            (0, 9),
            (0, 2**45 - 1),
            (3, 5),
            (3, 9),
            (4, 0),
            (2**18 - 1, 2**45 - 1),
        ]
    ]
    assert positions[:3] == [(9, 0, 1)] * 3
    assert positions[2:] == sorted(positions[2:])
    assert positions[-1] == (2**63 - 1, 0, 1)


def test_partitions_are_part_of_the_lane_up_to_the_last_rekeyed_hop_only() -> None:
    kept = line(hop(A, via="r", index=0), hop(B, via="s", index=0))
    assert kept.standing().lane == "a:2#idA>r>b>s>c"
    first = line(hop(A, via="r", index=0, rekeyed=True), hop(B, via="s", index=0))
    assert first.standing().lane == "a:2#idA>r>b>s>c"
    second = line(hop(A, via="r", index=0), hop(B, via="s", index=0, rekeyed=True))
    assert second.standing().lane == "a:2#idA>r>b:0>s>c"


def test_a_stage_that_changes_the_key_puts_the_consumed_partition_into_the_lane() -> None:
    assert line(hop(A, via="r", index=0)).standing(rekeyed=True).lane == "a:2#idA>r>c:5"


def test_lanes_of_one_path_root_partition_and_topic_id_are_one_group() -> None:
    one = line(hop(A, via="r:x>y", index=0)).standing(rekeyed=True)
    other = line(hop(A, via="r:x>y", index=0), own=Node("c", 6, 1)).standing(rekeyed=True)
    assert one.lane != other.lane
    assert one.group == other.group == group_of(one.lane) == group_of(other.lane)
    assert group_of("a:2#idA") == "a:2#idA"
    two = line(hop(A, via="r", index=0), hop(B, via="s", index=0, rekeyed=True))
    for standing in (two.standing(), two.standing(rekeyed=True), two.standing(rekeyed=True, branch=("big",))):
        assert standing.lane.startswith("a:2#idA>r>b:0>s>c")
        assert standing.group.startswith("a:2#idA>r>b>s>c")
        assert group_of(standing.lane) == standing.group


def test_two_republishers_between_the_same_topics_are_two_paths() -> None:
    assert line(hop(A, via="r", index=0)).standing().group != line(hop(A, via="s", index=0)).standing().group


def test_a_retry_processor_reads_as_if_it_had_not_been() -> None:
    retry = Node("retry", 0, 7)
    by_retry = line(hop(A, via="r", pass_through=True), hop(retry, via="r", index=3))
    assert by_retry.reduced() == Lineage((A, C), (Edge("r", 3),))
    assert by_retry.standing().position == line(hop(A, via="r", index=3)).standing().position
    assert by_retry.standing().route is Route.RETRIED


def test_a_redrive_from_the_dead_letter_topic_has_the_original_lineage() -> None:
    dead, again = Node("dead", 0, 3), Node("c", 5, 4711)
    original = line(hop(A, via="r", index=1))
    redriven = line(
        hop(A, via="r", index=1),
        hop(C, via="dlq", pass_through=True),
        hop(dead, via="dlq", pass_through=True),
        own=again,
    )
    assert redriven.reduced() == original
    assert redriven.check() is redriven


def test_a_chain_that_comes_back_to_a_topic_is_a_loop() -> None:
    with pytest.raises(EnvelopeError) as error:
        line(hop(A, via="r"), hop(B, via="s"), own=Node("a", 1, 99)).check()
    assert error.value.reason is Reason.CHAIN_LOOP


def test_the_same_topic_name_in_another_cluster_is_another_topic() -> None:
    mirrored = line(hop(A, via="mirror"), own=Node("a", 2, 17, cluster="west"))
    assert mirrored.check().standing().lane == "a:2#idA>mirror>west/a"


@pytest.mark.parametrize(
    ("processor", "cluster"),
    [
        (Hop("c", 5, 1, pass_through=True), "west"),
        (Hop("c", 5, 1, pass_through=True, cluster="east"), "east"),
        (Hop("dead", 5, 1, pass_through=True), ""),
        (Hop("c", 5, 1), ""),
        (Hop("b", 5, 1), ""),
    ],
)
def test_only_who_redrives_into_a_records_own_topic_need_not_name_its_cluster(processor: Hop, cluster: str) -> None:
    assert line(processor, own=Node("c", 5, 9, cluster="west")).root.cluster == cluster


def test_an_unknown_root_topic_id_is_resolved_and_a_known_one_kept() -> None:
    unnamed = Lineage((Node("a", 2, 17), C), (Edge("r", 0),))
    assert unnamed.resolved({"a": "now"}).standing().lane == "a:2#now>r>c"
    assert line(hop(A, via="r")).resolved({"a": "now"}).root.topic_id == "idA"


def test_a_root_of_another_cluster_is_not_resolved_by_the_topics_of_this_one() -> None:
    elsewhere = Lineage((Node("a", 2, 17, cluster="elsewhere"), C), (Edge("r", 0),))
    assert elsewhere.resolved({"a": "now"}).root.topic_id == ""


def test_a_missing_index_is_ambiguous_unless_the_event_id_stands_in() -> None:
    foreign = line(hop(A, via="foreign"))
    assert foreign.standing().ambiguous
    with_id = foreign.standing(event_id="e-1", indices=(2,))
    assert (with_id.position, with_id.ambiguous) == ((17, -1, 2, "e-1"), False)


def test_branches_of_the_flow_are_part_of_the_path_and_flat_map_indices_of_the_position() -> None:
    standing = line(own=A).standing(branch=("late one", "big"), indices=(0, 3))
    assert (standing.lane, standing.position) == ("a:2#idA>late%20one>big", (17, 0, 3))


def test_a_chain_is_extended_and_replaced_without_changing_the_envelope() -> None:
    envelope = Envelope(b"payload", key=b"k")
    assert envelope.with_hop(hop(A)).with_hop(hop(B)) == Envelope(b"payload", (hop(A), hop(B)), key=b"k")
    assert envelope.with_chain(iter([hop(A), hop(B)])) == Envelope(b"payload", (hop(A), hop(B)), key=b"k")
    assert envelope.chain == ()


def test_positions_of_any_lanes_are_ordered_by_their_numbers_and_then_by_event_id() -> None:
    ordered = [(), (5,), (5, 1), (5, 1, "A"), (5, 1, "c"), (5, 2, "b"), (6, 0, "a")]
    assert sorted((ordered[i] for i in (3, 6, 0, 5, 2, 4, 1)), key=position_order) == ordered


@pytest.mark.parametrize(
    ("own", "hops", "wide"),
    [
        (True, [], False),
        (True, [Hop("a", 0, 1)], True),
        (False, [Hop("a", 0, 1)], False),
        (False, [Hop("a", 0, 1, keyless=True), Hop("b", 0, 2, rekeyed=True)], True),
        (False, [Hop("a", 0, 1, keyless=True, pass_through=True), Hop("b", 0, 2)], False),
    ],
)
def test_a_lane_is_wide_where_a_republisher_wrote_a_record_without_a_key(
    own: bool, hops: list[Hop], wide: bool
) -> None:
    assert Lineage.of(hops, Node("t", 0, 5)).standing(rekeyed=own, keyless=own).wide == wide


OWN = Node("legs", 0, 4, "T")
STEP = Hop("raw", 0, 7, via="rep", index=0, topic_id="R")


def by(*hops: Hop, **options: Any) -> Standing:
    return Lineage.of((STEP, *hops), OWN).standing(**options)


def test_the_route_says_what_it_means_that_a_state_does_not_hold_the_message() -> None:
    """A copy is dropped, what was healed is folded below the floor, what was retried is unproven there."""
    retry = Hop("legs", 0, 2, pass_through=True)
    letter = redrive_hops(Hop("legs", 0, 2), Hop("dead", 0, 0), Redrive("a", application="fleet"))
    healed = Hop("legs", 0, 2, via=HEALED, pass_through=True)
    assert by().route is Route.PLAIN
    assert by(retry).route is Route.RETRIED
    assert by(*letter).route is Route.COPY
    assert by(healed).route is Route.HEALED
    assert by(*letter, late=Route.MISSING).route is Route.MISSING, "a stage in front knows better"


def test_an_event_id_stands_in_for_a_missing_index_alone() -> None:
    """With an index, messages of one root that share an id by mistake are still distinguished."""
    foreign = Lineage.of([Hop("raw", 0, 7, via="rep")], OWN)
    assert by(event_id="e").position == (7, 0)
    assert foreign.standing(event_id="e").position == (7, -1, "e")
    assert foreign.standing().position == (7, -1)
    assert [one.ambiguous for one in (by(), foreign.standing(event_id="e"), foreign.standing())] == [False, False, True]


def test_a_redriven_record_comes_back_in_the_cluster_in_which_it_died() -> None:
    """A redrive does not know clusters: with another one, the copy would be in another lane than its record."""
    own = Node("legs", 0, 9, "T", "west")
    back = redrive_hops(Hop("legs", 0, 4, topic_id="T"), Hop("dead", 0, 0), Redrive("a", application="fleet"))
    died = Lineage.of([STEP], Node("legs", 0, 4, "T", "west"))
    lineage = Lineage.of([STEP, *back], own)
    assert lineage.standing().lane == died.standing().lane
    assert lineage.redriven is not None
    assert lineage.redriven.place == died_in(died.own) == "!west/legs:0#T"
    assert [node.cluster for node in lineage.nodes] == ["", "west", "", "west"]
    named = Lineage.of([Hop("legs", 0, 4, pass_through=True, cluster="east")], own)
    assert named.root.cluster == "east"


def test_the_record_of_an_item_stands_where_the_item_does_without_the_indices_of_its_flat_maps() -> None:
    for items, expected in ((0, (7, 0, 4, 5)), (1, (7, 0, 4)), (2, (7, 0))):
        assert event_of((7, 0, 4, 5), items) == expected
        assert event_of((7, 0, 4, 5, "e"), items) == (*expected, "e")
