"""States that have been idle leave the store: what counts as idle, and what becomes of events that come later."""

import json
from typing import Any

import pytest

from aggregations.definition.aggregates import count, first, last
from aggregations.definition.aggregates_exact import collect
from aggregations.definition.element import Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.errors import FlowError
from envelope import Envelope, Hop, Reason, encode
from tests.support.both import TOPIC_ID, Both
from tests.unit.test_windows import MINUTE, NOW, SCREWS, at

COUNT = Fields(n=count())


def flow(after: str | None = "10m", **options: Any) -> Flow[Any]:
    return Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT, expire_after=after, **options)


def counts(both: Both, stage: str = "screw") -> dict[str, int]:
    return {key.decode(): state["n"] for key, state in both.results(stage).items()}


@pytest.mark.parametrize("after", ["0s", "-1m", "soon", 5])
def test_a_time_that_is_no_length_is_refused(after: Any) -> None:
    with pytest.raises(FlowError, match="expire_after="):
        flow(after)


def test_a_stage_with_windows_has_no_other_expiry() -> None:
    with pytest.raises(FlowError, match="retention="):
        flow(window=tumbling("5m"))


def test_the_expiry_is_part_of_the_definition_and_no_expiry_changes_nothing() -> None:
    plain = Flow("fastening").source(SCREWS).aggregate("screw", "screw", COUNT)
    assert plain.definitions == flow(None).definitions
    assert len({flow(after).stages[0].definition for after in ("5m", "300s", "10m", None)}) == 3
    behind = {flow(after).aggregate("all", "screw", COUNT).stages[1].definition for after in ("5m", "10m")}
    assert len(behind) == 2
    assert "expires after 10m" in flow().describe()


def test_a_state_leaves_when_all_partitions_are_its_time_past_its_latest_event() -> None:
    both = Both(flow())
    both.process([at(0, 0), at(1, 4), at(2, 4, screw="t")])
    both.process([at(3, 13, screw="u")])
    assert counts(both) == {"s": 2, "t": 1, "u": 1}
    both.process([at(4, 15, screw="u")])
    assert counts(both) == {"u": 2}
    assert both.memory.report.removed == {"screw": 2}


def test_an_event_keeps_its_state_for_its_time() -> None:
    both = Both(flow())
    for offset in range(6):
        both.process([at(offset, 8 * offset)])
    assert counts(both) == {"s": 6}


def test_an_event_after_the_time_begins_a_new_state_whether_or_not_the_old_one_has_left() -> None:
    apart, together = Both(flow()), Both(flow())
    events = [at(0, 0), at(1, 1), at(2, 30, screw="u"), at(3, 31)]
    for one in events:
        apart.process([one])
    together.process(events)
    assert counts(apart) == {"s": 1, "u": 1} == counts(together)
    assert apart.memory.report.removed == {"screw": 1}


def test_a_copy_of_an_event_whose_state_has_left_is_below_the_floor() -> None:
    both = Both(flow())
    both.process([at(0, 0), at(1, 1)])
    both.process([at(2, 30, screw="u")])
    both.process([at(3, 1), at(4, 21)])
    assert counts(both) == {"s": 1, "u": 1}
    verdicts = both.memory.report.verdicts["screw"]
    assert verdicts["below_floor"] == 1


def test_a_copy_is_not_folded_into_a_state_that_began_after_its_own_had_left() -> None:
    both = Both(flow())
    both.process([at(0, 0)])
    both.process([at(1, 30, screw="u")])
    both.process([at(2, 31)])
    both.process([at(3, 0)])
    assert counts(both) == {"s": 1, "u": 1}


def test_a_redriven_letter_whose_hole_may_have_left_is_unproven() -> None:
    class Picky:
        def zero(self) -> dict[str, int]:
            return {"n": 0}

        def fold(self, state: dict[str, int], element: Any) -> dict[str, int]:
            if element.value["screw"] == "bad":
                raise ValueError
            return {"n": state["n"] + 1}

    both = Both(Flow("fastening").source(SCREWS).aggregate("screw", "screw", Picky(), expire_after="10m"))
    both.process([at(0, 0, screw="bad"), at(1, 0)])
    assert both.reasons() == [(0, Reason.FOLD_FAILED)]
    both.process([at(2, 40)])
    assert set(both.memory.states("screw")) == {b"s"}
    both.process([both.redriven(both.dead_letters[0], 3)])
    assert both.reasons()[1:] == [(3, Reason.UNPROVEN)]


def test_a_hole_stays_as_long_as_its_event_may_be_redriven() -> None:
    class Picky:
        refuses = True

        def zero(self) -> dict[str, int]:
            return {"n": 0}

        def fold(self, state: dict[str, int], element: Any) -> dict[str, int]:
            if self.refuses and element.offset in (1, 2):
                raise ValueError
            return {"n": state["n"] + 1}

    fold = Picky()
    both = Both(Flow("fastening").source(SCREWS).aggregate("screw", "screw", fold, expire_after="10m"))
    both.process([at(0, 0)])
    both.process([at(1, 9)])  # its state's latest event is older
    both.process([at(2, 1, screw="t")])
    both.process([at(3, 12, screw="u")])
    assert set(both.memory.states("screw")) == {b"s", b"u"}
    fold.refuses = False
    both.process([both.redriven(both.dead_letters[0], 4)])
    assert counts(both) == {"s": 1, "u": 1}
    assert both.memory.report.verdicts["screw"]["redriven"] == 1


def test_a_state_is_the_same_wherever_a_batch_ends_if_lanes_meet_in_a_partition() -> None:
    topic = Topic("screws", Json({"screw": str, "at": int}), time="at")
    made = Flow("fastening").source(topic).aggregate("screw", "screw", COUNT, expire_after="10m")

    def sent(offset: int, root: Hop, minute: int) -> Record:
        payload = json.dumps({"screw": "s", "at": NOW + minute * MINUTE}).encode()
        value = encode(Envelope(payload, chain=(root,)))
        return Record("screws", 0, offset, b"s", value, NOW + 60 * MINUTE, (), TOPIC_ID)

    events = [sent(0, Hop("raw", 1, 7, topic_id="R"), 0), sent(1, Hop("raw", 0, 3, topic_id="R"), 40)]
    apart, together = Both(made), Both(made)
    for one in events:
        apart.process([one])
    together.process(events)
    assert counts(apart) == {"s": 1} == counts(together)


def test_another_time_that_is_accepted_also_holds_for_the_states_in_the_store() -> None:
    both = Both(flow("10m"))
    both.process([at(0, 0), at(1, 9, screw="u")])
    both.memory.close()
    longer = Both(flow("30m"), both.stores, accept=["definition"])
    longer.process([at(2, 20, screw="u")])
    longer.process([at(3, 21)])
    assert counts(longer) == {"s": 2, "u": 2}
    longer.memory.close()
    shorter = Both(flow("10m"), both.stores, accept=["definition"])
    shorter.process([at(4, 40, screw="t")])
    assert counts(shorter) == {"t": 1}


def test_an_event_without_a_time_is_a_dead_letter() -> None:
    both = Both(flow())
    both.process([at(0, None), at(1, 1)])
    assert both.reasons() == [(0, Reason.BAD_EVENT_TIME)]


def test_what_a_stage_emits_for_a_new_state_shows_no_old_one() -> None:
    both = Both(flow(emit=Emit(screw="screw", old="old.n", new="new.n")).aggregate("all", "screw", Fields(n=count())))
    both.process([at(0, 0), at(1, 1), at(2, 40)])
    assert counts(both) == {"s": 1}
    assert counts(both, "all") == {"s": 3}


@pytest.mark.parametrize("after", ["1s", "17s", "10m", "30d"])
def test_a_store_notes_few_due_times_and_a_state_leaves_when_it_is_due(after: str) -> None:
    expiry = flow(after).stages[0].aggregate.expiry
    assert expiry is not None
    times = [NOW * 1_000 + expiry.seconds * 1_000_000 * n // 999 for n in range(1_000)]
    assert len({expiry.noted_due(time) for time in times}) <= 33
    for time in times[::37]:
        due, noted = expiry.due(time), expiry.noted_due(time)
        for closing_us in (*times, *(time + expiry.seconds * 1_000_000 + delta for delta in range(-2, 3))):
            until = expiry.due_until(closing_us)
            assert (due <= until) == (noted <= until)


@pytest.mark.parametrize("emits", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_ordered_fields_follow_positions_though_events_are_folded_as_they_are_in_the_log(
    together: bool, emits: bool
) -> None:
    fields = Fields(last=last("v"), first=first("v"), all=collect("v", 1), n=count())
    source = Topic("t", Json({"k": str, "v": str, "at": int}), time="at")
    emit = Emit(last="new.last", n="new.n") if emits else None
    one = Flow("ordered").source(source).aggregate("one", "k", fields, expire_after="1h", emit=emit)
    both = Both(one.aggregate("all", "_key", Fields(seen=count())) if emits else one)
    arrivals = [(10, "new", 100), (9, "old", 101), (12, "newest", 102), (11, "between", 103)]
    records = [
        Record(
            "t",
            0,
            offset,
            b"k",
            encode(
                Envelope(
                    json.dumps({"k": "k", "v": v, "at": seconds * 1_000}).encode(),
                    (Hop("raw", 0, root, via="rep", index=0, topic_id="R1"),),
                    key=b"k",
                )
            ),
            seconds * 1_000,
            topic_id=TOPIC_ID,
        )
        for offset, (root, v, seconds) in enumerate(arrivals)
    ]
    for batch in [records] if together else [[one] for one in records]:
        both.process(batch)  # and compares both paths
    assert both.results("one")[b"k"] == {
        "last": "newest",
        "first": "old",
        "all": {"values": ["old"], "dropped": 3},
        "n": 4,
    }
