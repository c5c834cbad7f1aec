"""Dead letters of the in-memory runner, and how they are folded once when they come back."""

from collections import Counter

import polars as pl
import pytest

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Hop, Reason
from envelope.redrive import Redrive, redrive_hops
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.errors import Transient
from tests.support.pure import FLEET, TOPIC, bare, batch, chained, fleet, fresh_store, hop, leg, runner, states, wrapped


def dead(run):
    return [(letter.record.offset, letter.stage, letter.reason) for letter in run.dead_letters]


def test_records_that_cannot_be_read_are_dead_letters_with_their_bytes_and_the_others_are_folded():
    run = runner(fleet(tombstones="dead_letter"))
    bad = Record(TOPIC, 0, 5, b"k", b"{", headers=(("h", b"v"),), topic_id="T1")
    empty, other = (Record(TOPIC, 0, offset, None, None, topic_id="T1") for offset in (6, 7))
    run.process([*batch(1), bad, empty, other])
    assert dead(run) == [(5, "", Reason.BAD_PAYLOAD), (6, "", Reason.EMPTY), (7, "", Reason.EMPTY)]
    assert run.dead_letters[0].record is bad
    assert run.dead_letters[0].detail
    assert run.report.reasons == Counter(bad_payload=1, empty=2)
    assert states(run, "carrier") == {"UA": {"n": 1, "m": 1}}


def test_a_null_key_of_the_second_stage_is_a_dead_letter_of_that_stage_and_the_first_has_the_event():
    run = runner(fleet())
    run.process([leg(1, "N1", minutes=7)])
    assert dead(run) == [(1, "carrier", Reason.NULL_KEY)]
    assert states(run, "aircraft") == {"N1": {"n": 1, "m": 7}}


def test_a_null_record_key_is_no_obstacle_for_a_stage_with_a_key_of_its_own():
    run = runner(fleet())
    run.process([leg(1, None, minutes=7, tail="N1", carrier="UA")])
    assert states(run, "aircraft") == {"N1": {"n": 1, "m": 7}}
    assert list(run.states("aircraft")[b"N1"].histories.lanes) == [f"{TOPIC}:0#T1"]


def test_diverted_messages_go_to_the_dead_letters_and_are_not_folded():
    run = runner(Flow("f").source(bare()).divert(pl.col("minutes") < 0).aggregate("a", "tail", FLEET))
    run.process([leg(1, minutes=-1), leg(2, minutes=3)])
    assert dead(run) == [(1, "a", Reason.DIVERTED)]
    assert run.dead_letters[0].detail == "the flow diverted it"
    assert states(run, "a") == {"N1": {"n": 1, "m": 3}}


def test_what_is_diverted_behind_the_last_stage_is_filed_under_the_end_of_the_flow():
    run = runner(Flow("f").source(bare()).aggregate("a", "tail", FLEET).divert(pl.col("minutes") < 0).publish("out"))
    run.process([leg(1, minutes=-1), leg(2, minutes=3)])
    assert dead(run) == [(1, "end", Reason.DIVERTED)]
    assert len(run.outputs) == 1


class PerPart:
    """Counts parts; refuses the one called bad."""

    def zero(self):
        return {"parts": []}

    def fold(self, state, element):
        state["parts"].append(element.value["part"])
        if element.value["part"] == "bad":
            raise RuntimeError
        return state


def parts(names=None):
    return (
        Flow("f")
        .source(bare())
        .flat_map(lambda e: [{"tail": f"{e['tail']}{n}", "part": p} for n, p in enumerate(e["carrier"].split(","))])
        .aggregate("a", "tail", PerPart())
    )


def test_a_record_whose_third_part_of_five_fails_is_one_dead_letter_and_none_of_its_parts_is_folded():
    run = runner(parts())
    run.process([leg(0, carrier="a,b,c"), leg(1, carrier="v,w,bad,y,z"), leg(2, carrier="d")])
    assert dead(run) == [(1, "a", Reason.FOLD_FAILED)]
    assert (run.dead_letters[0].detail, run.dead_letters[0].hole) == ("RuntimeError in the fold of stage a", True)
    assert states(run, "a") == {"N10": {"parts": ["a", "d"]}, "N11": {"parts": ["b"]}, "N12": {"parts": ["c"]}}
    assert run.report.verdicts["a"] == Counter(accepted=4, rejected=5)


def redriven(offset, original, **columns):
    """The copy of a dead letter, come back through the dead-letter topic."""
    hops = [
        Hop(TOPIC, original.partition, original.offset, via="dlq", pass_through=True, topic_id="T1"),
        hop("dead", 0, original.offset, None, via="redrive", pass_through=True),
    ]
    return chained(offset, *hops, **columns)


def test_a_redriven_record_fills_the_holes_of_all_its_parts_once():
    run = runner(
        Flow("f")
        .source(wrapped())
        .flat_map(lambda e: [{"tail": f"{e['tail']}{n}", "part": p} for n, p in enumerate(e["carrier"].split(","))])
        .aggregate("a", "tail", PerPart(), history=2)
    )
    bad = chained(1, carrier="v,bad,x")
    run.process([chained(0, carrier="a,b,c"), bad])
    run.process([chained(n, carrier="A,B,C") for n in range(2, 12)])
    first = run.process([redriven(20, bad, carrier="V,W,X")])
    second = run.process([redriven(21, bad, carrier="V,W,X")])
    assert first.verdicts["a"] == Counter(redriven=3)
    assert second.verdicts["a"] == Counter(unproven=3)
    assert states(run, "a")["N11"] == {"parts": ["b", *["B"] * 10, "W"]}
    assert dead(run)[1:] == [(21, "a", Reason.UNPROVEN)]


class Refuses:
    """Lists its values; refuses those that are negative."""

    def zero(self):
        return []

    def fold(self, state, element):
        if element["minutes"] < 0:
            raise ValueError
        return [*state, element["minutes"]]


def comes_back(offset, died, redrive, minutes, root):
    """A dead letter redriven by the library's own hops, with another payload."""
    at = Hop(TOPIC, died.partition, died.offset, topic_id="T1")
    letter = Hop("dead", 0, died.offset, topic_id="D")
    return chained(offset, root, *redrive_hops(at, letter, redrive), minutes=minutes)


@pytest.mark.parametrize("crash", [None, "persist:b", "persist:a", "manifest"])
def test_a_letter_of_the_first_stage_is_folded_once_by_the_second_however_far_that_has_gone_on(crash):
    """The second stage never met it: it has no hole there, and is below the floor."""
    flow = (
        Flow("f")
        .source(wrapped())
        .aggregate("a", "tail", Refuses(), history=1)
        .aggregate("b", "tail", Refuses(), history=1)
    )
    store = fresh_store()
    run = runner(flow, store)
    roots = [hop("raw", 0, n) for n in range(9)]
    dead = chained(2, roots[2], minutes=-2)
    run.process([chained(n, roots[n], minutes=n) if n != 2 else dead for n in range(9)])
    back = comes_back(20, dead, Redrive("a"), 2, roots[2])
    if crash:
        with faults.use(Injector([Fault(crash, faults.FaultOutcome.UNANSWERED)])), pytest.raises(Transient):
            run.process([back])
    for _ in range(2):
        run = runner(flow, store)
        run.process([back])
    for stage in ("a", "b"):
        assert sorted(run.states(stage)[b"N1"].fold) == list(range(9))


def test_two_letters_of_one_event_are_folded_once():
    """A service sent it twice, and each copy was rejected before its key was known."""
    mended = []

    def strict(element):
        if element["minutes"] < 0 and not mended:
            raise ValueError
        return element["late"] is None

    flow = Flow("f").source(wrapped()).filter(strict).aggregate("a", "tail", Refuses(), history=1)
    run = runner(flow)
    roots = [hop("raw", 0, n) for n in range(6)]
    first, second = chained(0, roots[0], minutes=-1), chained(1, roots[0], minutes=-1)
    run.process([first, second, *(chained(n + 1, roots[n], minutes=n) for n in range(1, 6))])
    assert [letter.hole for letter in run.dead_letters] == [False, False]
    mended.append(True)
    for offset, died in ((20, first), (21, second)):
        run.process([comes_back(offset, died, Redrive("a", hole=False), 7, roots[0])])
    assert run.results("a") == {b"N1": [1, 2, 3, 4, 5, 7]}


def test_a_key_with_holes_alone_has_no_result():
    run = runner(parts())
    run.process([leg(1, carrier="bad")])
    assert run.results("a") == {}
    assert set(run.states("a")) == {b"N10"}


def test_a_record_whose_root_has_no_topic_id_is_listed_by_its_event_in_the_current_topic():
    def fails(_element):
        raise ValueError

    of = Flow("fleet").source(wrapped()).map(fails).aggregate("aircraft", "tail", FLEET)
    run = MemoryRunner(of, bind(of, {}, fresh_store()), topic_ids={"raw": "R"})
    run.process([chained(0, Hop("raw", 0, 5, via="wrap", index=0))])
    assert run.run.ledger.listed == {"aircraft": {"raw:0#R>wrap>legs": {(5, 0)}}}
