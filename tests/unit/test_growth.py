"""Partitions that are added to the consumed topic before it is read to its end."""

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.growth import advance, describe, merge
from aggregations.run.memory import MemoryRunner
from aggregations.run.risks import Risk
from envelope import Histories, Standing
from envelope.dedup import histories
from envelope.dedup.eviction import GrowthFullError
from persistence.manifest import Growth
from tests.support.growing import MAX_AGE, Legs, flow
from tests.support.letters import back
from tests.support.pure import fleet, fresh_store, leg, runner

LATER = MAX_AGE + 1
OPEN, CLOSED = "raw:0#R>rep>legs", "raw:0#R>rep>legs:1"


def stores(of):
    return bind(of, {}, fresh_store())


def standings(lane, *offsets):
    return [Standing(lane, OPEN, (offset, 0)) for offset in offsets]


def held(runner, stage="s0"):
    return [len(history.held) for state in runner.states(stage).values() for history in state.histories.lanes.values()]


@pytest.mark.parametrize("stages", [1, 2])
def test_older_records_of_the_old_partition_are_folded_behind_newer_ones_of_a_new_partition(stages):
    legs, of = Legs.of(1), flow(stages=stages)
    runner = legs.start(of, stores(of))
    legs.write(*[1] * 20)
    legs.fold(runner, p0=1)
    legs.write(*[1] * 980)
    legs.grow(2)
    legs.write(*[1] * 100)
    legs.fold(runner, p0=500)
    legs.fold(runner)
    assert {name: runner.results(name) for name in runner.run.urls} == dict.fromkeys(runner.run.urls, legs.expected())
    assert runner.report.verdicts["s0"] == {"accepted": 601, "late": 499}


def test_from_four_to_six_partitions_keys_move_between_old_partitions_too():
    legs, of = Legs.of(4), flow()
    runner = legs.start(of, stores(of))
    keys = range(12)
    legs.write(*keys)
    legs.fold(runner)
    legs.write(*[*keys] * 20)
    legs.grow(6)
    legs.write(*[*keys] * 20)
    for slow in range(4):  # 8 moves from 0 to 2, 9 from 1 to 3, 6 from 2 to 0, 7 from 3 to 1
        legs.fold(runner, **{f"p{slow}": 0})
    legs.fold(runner)
    assert runner.results("s0") == legs.expected()


def test_a_copy_that_moved_to_another_old_partition_and_died_is_not_taken_for_a_first_delivery():
    legs, broken = Legs.of(2), {"now": False}
    of = (
        Flow("growing")
        .source(Topic("legs", Json({"k": str})))
        .filter(lambda element: 1 // (not broken["now"]) == 1)
        .aggregate("s0", "k", Fields(n=count()), history=4)
    )
    runner = legs.start(of, stores(of))
    legs.write(2, *[3] * 20)
    legs.fold(runner)
    legs.grow(3)  # 3 moves from partition 1 to 0, through which nothing has come since the first event
    broken["now"] = True
    legs.send_again(1)
    legs.fold(runner)
    broken["now"] = False
    first = runner.dead_letters[0]
    assert (first.record.partition, first.record.offset) == (0, 1)
    runner.process([back(first, len(legs.partitions[0]), "growing")])
    assert runner.results("s0") == legs.expected()
    assert runner.dead_letters[-1].reason == "unproven"


def test_a_second_growth_during_the_first_begins_the_wait_anew():
    legs, of = Legs.of(4), flow()
    runner = legs.start(of, stores(of))
    legs.write(*range(12))
    legs.fold(runner)
    legs.write(*[*range(12)] * 10)
    legs.grow(8)
    legs.fold(runner, p0=0, p1=0)
    legs.now += LATER / 2
    legs.write(*[*range(12)] * 10)
    legs.grow(12)
    legs.fold(runner, p0=0, p1=0)
    legs.now += LATER / 2
    legs.fold(runner, p0=0, p1=0)
    assert runner.run.growths.get("legs") == Growth(4, 12, runner.run.growths.get("legs").seen_at_ms)
    legs.write(*[*range(12)] * 10)
    legs.now += LATER
    legs.fold(runner, p0=0)
    legs.fold(runner)
    assert runner.results("s0") == legs.expected()


def test_a_growth_is_over_when_all_is_read_that_was_there_five_minutes_after_its_first_sight():
    legs, of = Legs.of(1), flow()
    runner = legs.start(of, stores(of))
    legs.write(0)
    legs.fold(runner)
    legs.grow(2, known=False)
    legs.write(*[1] * 10)
    legs.fold(runner)
    assert runner.run.growths.get("legs").until is None
    legs.now += LATER
    legs.write(*[1] * 10)
    legs.fold(runner, p0=5)
    assert runner.run.growths.get("legs").until == {0: 21, 1: 0}
    assert max(held(runner)) == 15, "nothing is evicted yet"
    legs.fold(runner)
    assert runner.run.growths.get("legs").until == {0: 21, 1: 0}, "as far as the batch before it had come"
    legs.write(1)
    legs.fold(runner)
    assert runner.run.growths.get("legs") is None
    assert runner.run.manifest.growth == {}
    assert held(runner) == [1, 4], "the next fold of a key cuts it"


def test_a_record_of_a_producer_that_does_not_know_yet_is_folded_within_five_minutes():
    legs, of = Legs.of(1), flow()
    runner = legs.start(of, stores(of))
    legs.write(1)
    legs.fold(runner)
    legs.grow(2, known=False)
    legs.write(*[1] * 10)
    legs.fold(runner, p0=0)
    legs.now += MAX_AGE - 1
    legs.write(*[1] * 10)
    legs.placing = 2
    legs.write(*[1] * 10)
    legs.fold(runner, p0=10)
    legs.now += LATER
    legs.fold(runner, p0=0)
    legs.fold(runner)
    assert runner.results("s0") == legs.expected()


def test_a_growth_is_kept_over_restarts_and_seen_at_a_start():
    legs, of = Legs.of(2), flow()
    at = stores(of)
    runner = legs.start(of, at)
    legs.write(*range(4))
    legs.fold(runner)
    legs.write(*[*range(4)] * 10)
    legs.grow(4)
    legs.write(*[*range(4)] * 10)
    runner = legs.start(of, at)
    legs.fold(runner, p0=0, p1=0)
    legs.now += 10
    seen = runner.run.growths.get("legs")
    assert (seen.partitions_before, seen.partitions_now) == (2, 4)
    runner = legs.start(of, at)
    assert runner.run.growths.get("legs") == seen
    legs.fold(runner)
    assert runner.run.growths.get("legs") == seen
    assert runner.results("s0") == legs.expected()


def test_of_two_stores_the_one_that_is_behind_says_how_long_a_growth_lasts():
    legs, of = Legs.of(1), flow(stages=2)
    at = {"s0": fresh_store(), "s1": fresh_store()}
    runner = legs.start(of, at)
    legs.write(0)
    legs.fold(runner)
    legs.grow(2)
    legs.fold(runner)
    ref, (_, upstream) = runner.run.ref, runner.run.distinct_stores()[0]
    behind = runner.run.manifest
    legs.now += LATER
    legs.fold(runner)
    legs.fold(runner)
    assert runner.run.growths.get("legs") is None
    after = legs.start(of, at)
    assert after.run.growths == {}
    upstream.save_manifest(ref, msgspec.structs.replace(behind, epoch=after.run.epoch, batch=after.run.batch))
    assert legs.start(of, at).run.growths == {"legs": behind.growth["legs"]}


def test_a_topic_that_grew_before_it_was_first_read_shows_by_a_key_in_two_partitions():
    legs, of = Legs.of(1), flow()
    legs.write(*[1] * 200)
    legs.grow(2)
    legs.write(*[1] * 100)
    runner = MemoryRunner(of, stores(of))  # nobody says which partitions there are
    runner.process([*legs.partitions[0][:50], *legs.partitions[1][:50]])
    runner.process([*legs.partitions[0][50:], *legs.partitions[1][50:]])
    assert runner.results("s0") == legs.expected()


def test_a_lane_that_is_full_stops_the_run_and_the_risk_can_be_taken(monkeypatch):
    monkeypatch.setattr(histories, "GROWTH", 50)
    of = flow()
    for accept, error in (((), GrowthFullError), ((Risk.GROWTH_FULL,), None)):
        legs = Legs.of(1)
        runner = legs.start(of, stores(of), accept=accept)
        legs.write(0)
        legs.fold(runner)
        legs.write(*[1] * 60)
        legs.grow(2)
        legs.write(*[1] * 40)
        legs.fold(runner, p0=0)
        if error:
            with pytest.raises(error, match=r"stage s0, legs:0:1: .* more than 50 records.*--accept growth-full"):
                legs.fold(runner)
        else:
            legs.fold(runner)
            assert runner.report.verdicts["s0"]["below_floor"] == 60


def test_a_wider_history_is_the_way_on_behind_a_full_lane(monkeypatch):
    monkeypatch.setattr(histories, "GROWTH", 50)
    legs, of = Legs.of(1), flow(history=200)
    runner = legs.start(of, stores(of))
    legs.write(0)
    legs.fold(runner)
    legs.write(*[1] * 60)
    legs.grow(2)
    legs.write(*[1] * 40)
    legs.fold(runner, p0=0)
    legs.fold(runner)
    assert runner.results("s0") == legs.expected()


def test_only_lanes_that_leave_the_consumed_partition_out_evict_nothing():
    made, _ = Histories().folding(
        [*standings(OPEN, *range(9)), *standings(CLOSED, *range(9)), *standings("legs:1#T", *range(9))],
        size=2,
        evict=False,
    )
    assert {lane: len(history.held) for lane, history in made.lanes.items()} == {OPEN: 9, CLOSED: 2, "legs:1#T": 2}


def test_they_are_not_retired_either():
    made = Histories()
    for batch, lane in enumerate([OPEN, CLOSED, "raw:0#R>rep>legs:2"]):
        made, _ = made.folding(standings(lane, 1), lanes=1, batch=batch, evict=False)
    assert [lane for lane, history in made.lanes.items() if history.held] == [OPEN, "raw:0#R>rep>legs:2"]


def test_a_clock_that_is_set_back_makes_the_wait_begin_anew():
    seen = Growth(1, 2, seen_at_ms=10_000)
    found = advance(seen, known=1, now=2, clock_ms=5_000, max_age_ms=1000, positions={0: 0, 1: 0}, ends=lambda: {0: 9})
    assert found == Growth(1, 2, seen_at_ms=5_000)


def test_a_growth_does_not_end_before_every_partition_was_read():
    drained = Growth(1, 2, 0, {0: 5, 1: 0})
    asked: dict[str, Any] = {"known": 1, "now": 2, "clock_ms": 0, "max_age_ms": 0, "ends": None}
    assert advance(drained, positions={0: 5}, **asked) == drained
    assert advance(drained, positions={0: 5, 1: 0}, **asked) is None


def test_a_key_in_two_partitions_is_a_growth_before_the_topic_was_first_read():
    asked: dict[str, Any] = {"known": 0, "now": 4, "clock_ms": 7, "max_age_ms": 1000, "positions": {}, "ends": None}
    assert advance(None, **asked) is None
    assert advance(None, **asked, shared=True) == Growth(4, 4, 7)
    assert advance(Growth(2, 4, 5), **asked, shared=True) == Growth(2, 4, 5)


def test_what_stores_say_together_is_the_longest_growth():
    assert merge([]) is None
    assert merge([Growth(2, 4, 10, {0: 3, 1: 4}), Growth(1, 4, 20, {0: 5})]) == Growth(1, 4, 20, {0: 5, 1: 4})
    assert merge([Growth(1, 3, 0, {0: 5, 2: 0}), Growth(1, 3, 0, {0: 3})]) == Growth(1, 3, 0, {0: 5, 2: 0})
    assert merge([Growth(2, 4, 10, {0: 3}), Growth(2, 8, 5)]) == Growth(2, 8, 10, None)


def test_a_growth_reads_as_a_sentence():
    assert describe("t", Growth(4, 6, 0)) == (
        "growth of topic t from 4 to 6 partitions: states evict no position; the ends to reach are not known yet, because "
        "producers may not know the new partitions"
    )
    assert describe("t", Growth(4, 6, 0, {1: 9, 0: 7})).endswith(
        "; it ends when these offsets are reached, as partition:offset: 0:7, 1:9"
    )
    assert "to 6 partitions before it was first read" in describe("t", Growth(6, 6, 0))


def test_a_growth_during_another_begins_where_that_one_began():
    """Records of keys that moved in the first growth may still be unread."""
    first = Growth(4, 6, 1_000, {})
    positions = dict.fromkeys(range(6), 0)
    grown = partial(advance, known=6, now=8, clock_ms=2_000, max_age_ms=300_000, positions=positions, ends=None)
    assert grown(first) == Growth(4, 8, 2_000)
    assert grown(None) == Growth(6, 8, 2_000)


def test_a_runner_that_gets_records_alone_knows_a_growth_by_their_partitions_and_waits_as_long_as_it_is_told():
    of, now = flow(), 5.0
    runner = MemoryRunner(of, stores(of), clock=lambda: now)
    legs = Legs.of(2)
    legs.write(0, 1)
    [first], [second] = legs.partitions
    runner.process([first])
    assert runner.run.growths.get("legs") is None
    runner.process([second])
    assert runner.run.growths.get("legs") == Growth(1, 2, 5_000)
    whole = {0: 0, 1: 0, 2: 0}
    runner = MemoryRunner(
        of, runner.run.urls, accept=[Risk.GROWN_UNDRAINED], whole=lambda: whole, clock=lambda: now, metadata_max_age=1
    )
    runner.process([])
    assert runner.run.growths.get("legs") is not None
    assert (runner.run.growths.get("legs").partitions_now, runner.run.growths.get("legs").until) == (3, None)
    now = 6.5
    runner.process([])
    assert runner.run.growths.get("legs") is None or runner.run.growths.get("legs").until is not None


@pytest.mark.parametrize(("key", "grown"), [(None, False), (b"N1", True)])
def test_records_without_a_key_in_two_partitions_are_no_growth_and_those_of_one_key_are(key, grown):
    run = runner(fleet())
    run.process([replace(leg(0, partition=n), key=key) for n in (0, 1)])
    assert (run.run.growths.get("legs") is not None) == grown
