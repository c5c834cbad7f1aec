"""The history rule, verdict by verdict."""

from typing import Any

import pytest

from envelope import Decision, Histories, History, Position, Reason, Route, Siblings, Standing, Verdict
from envelope.dedup import eviction
from envelope.dedup import history as history_module
from envelope.dedup import room as room_module
from envelope.dedup.eviction import LANES
from envelope.dedup.histories import Group, HolesFullError, in_order
from envelope.dedup.history import HEALED, HISTORY, WIDE
from envelope.dedup.lanes import group_of, healed_lane
from envelope.dedup.room import Room


def at(*position: int | str, lane: str = "a:0#i", group: str | None = None, **fields: Any) -> Standing:
    return Standing(lane, group or lane.split(">")[0], position, **fields)


def verdicts(histories: Histories, *arrivals: Standing, siblings: Siblings = Siblings.EVENT_ID) -> list[str]:
    return [decision.verdict.value for decision in histories.judge(arrivals, siblings)]


def holding(*positions: int, size: int = 4) -> Histories:
    histories, _ = Histories().folding([at(position) for position in positions], size=size)
    return histories


def test_the_first_message_of_a_state_is_accepted() -> None:
    assert verdicts(Histories(), at(5)) == ["accepted"]


def test_a_held_position_is_a_duplicate_and_a_higher_one_is_not() -> None:
    assert verdicts(holding(5, 7), at(5), at(6), at(7), at(8)) == ["duplicate", "late", "duplicate", "accepted"]


def test_the_history_keeps_the_highest_positions_and_the_floor_is_the_highest_evicted() -> None:
    history = History().adding([(n,) for n in range(6)], size=4)
    assert (history.held, history.floor, history.highest) == (((2,), (3,), (4,), (5,)), (1,), (5,))


def test_at_or_below_the_floor_is_dropped_as_unproven_duplicate() -> None:
    histories = holding(1, 2, 3, 5, 8, 9)
    assert histories.lanes["a:0#i"].floor == (2,)
    assert verdicts(histories, at(0), at(2), at(4)) == ["below_floor", "below_floor", "late"]


def test_by_a_retry_route_below_the_floor_is_unproven_and_never_dropped_silently() -> None:
    [decision] = holding(1, 2, 3, 5, 8, 9).judge([at(0, route=Route.RETRIED)])
    assert decision == Decision(Verdict.UNPROVEN, fold=False)
    assert decision.verdict.diverts


def test_the_same_position_twice_in_a_batch_is_folded_once_in_the_order_of_positions() -> None:
    arrivals = [at(9), at(3), at(9), at(3)]
    assert verdicts(Histories(), *arrivals) == ["accepted", "accepted", "duplicate_in_batch", "duplicate_in_batch"]
    assert in_order(arrivals) == [1, 3, 0, 2]


def test_a_position_held_in_another_lane_of_the_group_is_a_duplicate() -> None:
    histories, _ = Histories().folding([at(5, lane="a:0#i>r>b:0", group="a:0#i>r>b")])
    assert verdicts(histories, at(5, lane="a:0#i>r>b:1", group="a:0#i>r>b")) == ["duplicate"]
    assert verdicts(histories, at(5, lane="a:0#i>s>b:1", group="a:0#i>s>b")) == ["new_lane"]
    assert verdicts(histories, at(5, lane="a:0#j>r>b:1", group="a:0#j>r>b")) == ["new_lane"]


def test_one_batch_with_one_position_in_two_lanes_of_a_group_folds_it_once() -> None:
    one, other = (at(5, lane=f"a:0#i>r>b:{n}", group="a:0#i>r>b") for n in (0, 1))
    assert verdicts(Histories(), other, one) == ["duplicate_in_batch", "accepted"]


def test_only_the_first_message_of_a_lane_is_called_a_new_lane() -> None:
    assert verdicts(holding(1), at(0, lane="z"), at(1, lane="z")) == ["new_lane", "accepted"]


def test_a_hole_below_the_floor_is_filled_exactly_once() -> None:
    histories = holding(3, 5, 7, 8, 9).leaving_hole(at(2))
    assert verdicts(histories, at(2, route=Route.RETRIED), at(2)) == ["redriven", "duplicate_in_batch"]
    filled, _ = histories.folding([at(2)], size=4)
    assert not filled.holes
    assert verdicts(filled, at(2)) == ["below_floor"]


def test_a_hole_above_the_floor_is_held_once_it_is_filled() -> None:
    histories = holding(3, 9).leaving_hole(at(7))
    assert verdicts(histories, at(7)) == ["redriven"]
    filled, _ = histories.folding([at(7)], size=4)
    assert verdicts(filled, at(7)) == ["duplicate"]


def test_of_two_holes_one_is_left_when_the_other_is_filled() -> None:
    histories = holding(3, 5, 7, 8, 9).leaving_hole(at(1)).leaving_hole(at(2))
    filled, _ = histories.folding([at(2)], size=4)
    assert filled.holes == {"a:0#i": {(1,)}}
    assert verdicts(filled, at(1, route=Route.RETRIED), at(2, route=Route.RETRIED)) == ["redriven", "unproven"]


def test_more_holes_than_allowed_stop_the_job() -> None:
    histories = Histories().leaving_hole(at(1), limit=1).leaving_hole(at(1), limit=1)
    with pytest.raises(HolesFullError, match="redrive"):
        histories.leaving_hole(at(2), limit=1)


def test_the_lane_longest_unused_is_retired_to_its_floor() -> None:
    histories = Histories()
    for batch, lane in enumerate(["a", "b", "c"]):
        histories, retired = histories.folding([at(batch, lane=lane)], lanes=2, batch=batch)
    assert retired == ("a",)
    assert histories.lanes["a"] == History((), (0,))
    assert verdicts(histories, at(0, lane="a"), at(1, lane="a")) == ["below_floor", "accepted"]


def test_a_retired_lane_keeps_its_floor_and_nothing_else() -> None:
    assert History(((1,), (4,)), (0,), 7).retired() == History((), (4,))
    assert History((), (4,), 7).retired() == History((), (4,))


def sibling(root: int, name: str, lane: str = "a:0#i>r>b:0") -> Standing:
    return at(root, -1, name, lane=lane, group="a:0#i>r>b")


def folded(histories: Histories, *arrivals: Standing, **options: Any) -> Histories:
    decisions = histories.judge(arrivals)
    return histories.folding([one for one, made in zip(arrivals, decisions, strict=True) if made.fold], **options)[0]


def test_siblings_without_an_index_count_as_one_and_are_evicted_together() -> None:
    names = [f"{n:03}" for n in range(100)]
    histories = folded(Histories(), *(sibling(7, name) for name in names[::2]), size=2)
    histories = folded(histories, *(sibling(7, name) for name in names), *(sibling(8, name) for name in names), size=2)
    [history] = histories.lanes.values()
    assert (len(history.held), history.floor) == (200, None)
    [history] = folded(histories, sibling(9, "a"), size=2).lanes.values()
    assert (len(history.held), history.floor) == (101, (7, -1, "099"))


def test_siblings_without_an_index_are_told_apart_over_all_lanes_of_their_group() -> None:
    histories = Histories()
    for n in range(100):
        histories = folded(histories, sibling(7, f"{n * 37 % 100:03}", f"a:0#i>r>b:{n % 3}"), size=1)
    assert sum(len(history.held) for history in histories.lanes.values()) == 100
    copies = [sibling(7, f"{n:03}", f"a:0#i>r>b:{n % 4}") for n in range(100)]
    assert set(verdicts(histories, *copies)) == {"duplicate"}


def test_where_only_some_messages_of_a_root_lack_an_index_all_of_them_stay_together() -> None:
    history = History().adding([(5, 0, 0), (5, 0, -1, "x"), (5, 1, 0), (4, 0, 0), (4, 0, 1), (4, 1, 0)], size=3)
    assert (history.held[0], history.floor) == ((4, 0, 1), (4, 0, 0))
    assert history.adding([(6, 0, 0)], size=1) == History(((6, 0, 0),), (5, 1, 0))


def test_a_lane_that_is_retired_keeps_the_siblings_of_its_last_root() -> None:
    histories = folded(Histories(), sibling(6, "q"), sibling(7, "m"), sibling(7, "x"), lanes=1, batch=1)
    histories = folded(histories, sibling(8, "a", "a:0#i>r>b:1"), sibling(9, "b", "a:0#i>r>b:1"), lanes=1, batch=2)
    assert verdicts(histories, sibling(6, "q"), sibling(7, "b"), sibling(7, "m")) == [
        "below_floor",
        "late",
        "duplicate",
    ]
    assert histories.lanes["a:0#i>r>b:0"].held == ((7, -1, "m"), (7, -1, "x"))


def test_a_lane_whose_last_position_has_an_index_is_retired_to_it() -> None:
    history = History().adding([(5, -1, "x"), (6, 0)])
    assert (history.loose, history.retired()) == (True, History((), (6, 0)))


def test_a_lane_through_records_without_a_key_is_wide_from_then_on_unless_the_stage_says_how_wide() -> None:
    def filled(*batches: tuple[int, bool], size: int | None = None) -> int:
        histories, root = Histories(), 0
        for count, wide in batches:
            histories, _ = histories.folding([at(root + n, wide=wide) for n in range(count)], size=size)
            root += count
        return len(histories.lanes["a:0#i"].held)

    assert filled((2000, False)) == HISTORY
    assert filled((2000, True)) == WIDE
    assert filled((20, True), (2000, False)) == WIDE
    assert filled((1, True), (2000, True), size=7) == 7


def test_what_a_group_holds_is_found_however_often_it_is_asked() -> None:
    """Few questions search the histories, many make a set of them."""
    group = Group([History(tuple((n, 0) for n in range(start, 100, 2))) for start in (0, 1)])
    for _ in range(3):
        assert [group.holds((n, 0)) for n in range(-1, 101)] == [False, *[True] * 100, False]
        assert not group.holds((7, 1))
    assert (group.lowest, group.highest) == ((0, 0), (99, 0))


def test_judging_a_batch_with_a_message_a_lane_searches_no_more_than_a_few_times_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = 0
    holds = History.holds

    def counted(self: History, position: Position) -> bool:
        nonlocal searched
        searched += 1
        return holds(self, position)

    lanes = [f"a:{root}#i>r>b:{middle}" for root in range(16) for middle in range(32)]
    before = [at(n, lane=lane, group=group_of(lane)) for lane in lanes for n in range(64)]
    histories, _ = Histories().folding(before, size=16)
    monkeypatch.setattr(History, "holds", counted)
    assert set(verdicts(histories, *(at(7, lane=lane, group=group_of(lane)) for lane in lanes))) == {"below_floor"}
    assert searched < 4 * len(lanes)


def missing(position: int) -> Standing:
    return at(position, route=Route.MISSING)


def test_what_is_known_to_be_missing_is_folded_once_however_far_the_history_is() -> None:
    histories = holding(3, 5, 7, 8, 9)
    assert verdicts(histories, missing(2), missing(2)) == ["redriven", "duplicate_in_batch"]
    filled, _ = histories.folding([missing(2)], size=4)
    assert verdicts(filled, missing(2), at(2), at(1)) == ["duplicate", "duplicate", "below_floor"]


def test_what_was_folded_late_above_the_floor_is_remembered_when_its_history_goes_on() -> None:
    histories, _ = Histories().folding([missing(1), *(at(n) for n in range(2, 9))], size=4, batch=1)
    assert verdicts(histories, missing(1)) == ["duplicate"]


def test_late_folds_of_one_batch_are_all_remembered_and_those_before_give_way_to_them() -> None:
    histories = holding(5000, 5001, 5002, 5003, 5004)
    first, _ = histories.folding([missing(n) for n in range(100)], size=4, batch=1)
    second, _ = first.folding([missing(n) for n in range(100, 100 + HEALED)], size=4, batch=2)
    assert set(verdicts(second, *(missing(n) for n in range(100, 100 + HEALED)))) == {"duplicate"}
    assert verdicts(second, at(0, route=Route.HEALED)) == ["unproven"]
    again, _ = second.folding([missing(1)], size=4, batch=2)
    assert verdicts(again, missing(1), missing(100)) == ["duplicate", "duplicate"]


def test_what_was_healed_upstream_is_folded_once_below_the_floor() -> None:
    healed = at(2, route=Route.HEALED)
    histories = holding(3, 5, 7, 8, 9)
    assert verdicts(histories, healed) == ["redriven"]
    filled, _ = histories.folding([healed], size=4)
    assert verdicts(filled, healed) == ["duplicate"]


def test_a_letter_without_proof_is_folded_above_the_floor_and_unproven_below_it() -> None:
    histories = holding(1, 2, 3, 5, 8, 9)
    letters = [at(n, route=Route.DEAD_LETTER) for n in (2, 4, 5)]
    assert verdicts(histories, *letters) == ["unproven", "redriven", "duplicate"]


def test_a_letter_without_proof_is_unproven_below_the_floor_of_any_lane_of_its_group() -> None:
    histories, _ = Histories().folding([at(n, lane="a:0#i>r>b:0", group="a:0#i>r>b") for n in range(9)], size=4)
    letter = at(2, lane="a:0#i>r>b:1", group="a:0#i>r>b", route=Route.DEAD_LETTER)
    assert verdicts(histories, letter) == ["unproven"]


def test_a_copy_is_dropped_by_name_unless_it_fits_a_hole() -> None:
    histories = holding(1, 2, 3, 5, 8, 9).leaving_hole(at(1))
    copies = [at(n, route=Route.COPY) for n in (1, 2, 4, 5, 99)]
    assert verdicts(histories, *copies) == ["redriven", "copy", "copy", "duplicate", "copy"]
    assert [decision.fold for decision in histories.judge(copies)] == [True, False, False, False, False]


def test_lanes_of_late_folds_are_not_retired_for_those_of_paths() -> None:
    histories = Histories()
    for batch, position in enumerate([7, 3, 5]):
        histories, _ = histories.folding([missing(position)], size=1, lanes=1, batch=batch)
        assert verdicts(histories, missing(position)) == ["duplicate"]
    assert histories.lanes["!a:0#i"].held == ((3,), (5,), (7,))
    assert [lane for lane, history in histories.lanes.items() if history.held] == ["a:0#i", "!a:0#i"]


@pytest.mark.parametrize(
    ("siblings", "expected", "later"),
    [
        (Siblings.DROP, [True, False], False),
        (Siblings.GROUP, [True, True], False),
        (Siblings.EVENT_ID, [True, False], False),
    ],
)
def test_siblings_without_index_or_id_follow_the_policy(siblings: Siblings, expected: list[bool], later: bool) -> None:
    pair = [at(5, -1, ambiguous=True)] * 2
    assert [decision.fold for decision in Histories().judge(pair, siblings)] == expected
    histories, _ = Histories().folding(pair)
    assert histories.judge(pair[:1], siblings) == [Decision(Verdict.AMBIGUOUS, fold=later)]


def test_of_what_was_folded_late_the_lowest_gives_way_and_the_floor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position below the floor that comes again is unproven: with a floor too low it would be folded twice."""
    monkeypatch.setattr(history_module, "HEALED", 2)
    full = ((1,), (2,), (3,))
    for floor, expected in ((None, (2,)), ((1,), (2,)), ((9,), (9,))):
        after = History(full, floor, 1).healing([(7,)], 2)
        assert (after.held, after.floor) == (((3,), (7,)), expected)


def test_a_late_fold_that_takes_no_position_s_place_leaves_the_floor_where_it_was() -> None:
    assert History(((5,),), (3,), 1).healing([(4,)], 2) == History(((4,), (5,)), (3,), 2)


def test_the_late_folds_of_a_batch_that_may_be_judged_again_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "HEALED", 2)
    held = ((1,), (2,), (3,))
    assert History(held, None, 5).healing([(4,)], 5).held == (*held, (4,))
    assert History(held, None, 1).healing([(4,)], 5, replays=True).held == (*held, (4,))
    assert History(held, None, 1).healing([(4,), (5,), (6,)], 5).held == ((4,), (5,), (6,))


def test_a_retired_lane_that_keeps_siblings_stays_as_wide_as_it_was_and_keeps_the_siblings_together() -> None:
    names = [(7, -1, name) for name in "abc"]
    wide = History().adding([(6, -1, "q"), *names], wide=True)
    retired = wide.retired()
    assert (retired, retired.loose) == (History(tuple(names), (6, -1, "q"), wide=True), True)
    assert retired.adding([(7, -1, "d")], size=1).held == (*names, (7, -1, "d"))
    assert not History().adding(names).retired().wide


def test_a_retired_lane_that_keeps_nothing_is_neither_wide_nor_loose() -> None:
    retired = History().adding([(5, -1, "x"), (6, 0)], wide=True).retired()
    assert (retired.held, retired.wide, retired.loose) == ((), False, False)


def test_a_lane_that_holds_the_siblings_of_one_root_alone_has_nothing_to_retire() -> None:
    history = History().adding([(7, -1, "a"), (7, -1, "b")])
    assert not history.retires
    assert history.retired() == History(history.held)


def test_a_lane_that_no_longer_holds_siblings_without_an_index_is_retired_as_any_other() -> None:
    history = History().adding([(5, -1, "x")]).adding([(6, 0), (6, 1)], size=2)
    assert (history.held, history.loose, history.retires) == (((6, 0), (6, 1)), False, True)
    assert history.retired() == History((), (6, 1))


def test_what_is_folded_and_what_is_dropped_is_the_same_for_a_verdict_however_it_is_reached() -> None:
    histories = holding(1, 2, 3, 5, 8, 9).leaving_hole(at(1))
    arrivals = {
        "accepted": at(20),
        "late": at(4),
        "new_lane": at(1, lane="z"),
        "redriven": at(1),
        "duplicate": at(5),
        "below_floor": at(0),
        "unproven": at(2, route=Route.RETRIED),
        "copy": at(30, route=Route.COPY),
    }
    decisions = histories.judge(list(arrivals.values()))
    assert [decision.verdict.value for decision in decisions] == list(arrivals)
    assert [name for name, made in zip(arrivals, decisions, strict=True) if made.fold] == list(arrivals)[:4]
    twice = Histories().judge([at(5)] * 2)
    assert twice == [Decision(Verdict.ACCEPTED, fold=True), Decision(Verdict.DUPLICATE_IN_BATCH, fold=False)]
    group = Histories().judge([at(5, -1, ambiguous=True)] * 2, Siblings.GROUP)
    assert group == [Decision(Verdict.ACCEPTED, fold=True), Decision(Verdict.AMBIGUOUS, fold=True)]


def test_siblings_are_counted_by_root_and_those_that_are_held_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "SIBLINGS", 3)
    histories = folded(Histories(), sibling(7, "a"), sibling(7, "b"), sibling(9, "a"))
    room = Room(histories)
    assert [room.take(sibling(7, "c")), room.take(sibling(8, "a")), room.take(sibling(9, "b"))] == [None] * 3
    assert room.take(sibling(7, "b")) is None, "it is one of the three"
    assert (room.take(sibling(7, "d")) or ("",))[0] is Reason.TOO_MANY_SIBLINGS
    assert room.take(at(7, 5, lane="a:0#i>r>b:0", group="a:0#i>r>b")) is None, "what has an index is no such sibling"


def test_the_lanes_that_a_batch_opens_count_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "KNOWN_LANES", 3)
    histories, _ = Histories().folding([at(1, lane="a"), at(1, lane="b")])
    room = Room(histories)
    assert [room.take(at(2, lane=lane)) for lane in ("a", "c", "c")] == [None] * 3
    assert (room.take(at(2, lane="d")) or ("",))[0] is Reason.TOO_MANY_LANES
    assert room.take(at(3, lane="b")) is None, "a lane that is known always has room"


def test_more_lanes_of_late_folds_than_a_state_keeps_are_retired_only_when_no_replay_may_ask_for_them() -> None:
    late = [missing_in(f"g{n}") for n in range(LANES + 1)]
    histories, _ = Histories().folding(late[:-1], lanes=2 * LANES, batch=1)
    same_batch, gone = histories.folding(late[-1:], lanes=2, batch=2, replays=True)
    assert not any(lane.startswith("!") for lane in gone)
    assert all(verdicts(same_batch, one) == ["duplicate"] for one in late[:3])
    _, gone = histories.folding(late[-1:], lanes=2, batch=2)
    assert not any(lane.startswith("!") for lane in gone), "the lane of this batch is needed until it is committed"
    full, _ = histories.folding(late[-1:], lanes=2 * LANES, batch=2)
    _, gone = full.folding([at(1, lane="z")], lanes=2, batch=3)
    assert [lane for lane in gone if lane.startswith("!")] == ["!g0"]


def missing_in(group: str) -> Standing:
    return at(1, lane=group, group=group, route=Route.MISSING)


def test_late_positions_are_kept_while_a_crashed_run_is_replayed_however_many_groups_have_some(monkeypatch):
    monkeypatch.setattr(eviction, "LANES", 2)
    groups = [f"raw:{n}#R" for n in range(4)]
    known = Histories({healed_lane(group): History(((1, 0),), used=1) for group in groups})
    one = Standing(groups[0], groups[0], (9, 0))
    for replays, retired in ((True, 0), (False, 2)):
        after, gone = known.folding([one], lanes=1, batch=5, replays=replays)
        assert len(gone) == retired
        assert sum(history.retires for lane, history in after.lanes.items() if lane.startswith("!")) == 4 - retired


def test_a_lane_that_may_not_evict_is_not_retired_either():
    lanes = [f"raw:0#R>rep{n}>legs" for n in range(3)]
    known = Histories({lane: History(((1, 0),), used=1) for lane in lanes})
    one = Standing(lanes[0], lanes[0], (9, 0))
    assert known.folding([one], lanes=2, batch=5, evict=True)[1] == (lanes[1],)
    assert known.folding([one], lanes=2, batch=5, evict=False)[1] == ()
