"""Dead letters without a hole: what proves that they were not folded, also after a crash."""

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.per_message.ledger import LISTED, Changes, Entry
from envelope.dedup import history
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.errors import Transient
from tests.support import pure
from tests.support.letters import FLEET, LEGS, Sum, back, feed, leg, legs, parsing, runner, url


@pytest.fixture(autouse=True)
def _broken() -> None:
    Sum.broken = True


def test_letters_without_a_hole_are_folded_in_any_order_however_far_the_history_is() -> None:
    broken = {"now": True}
    run = runner(parsing(lambda element: broken["now"] and element["v"] < 0))
    feed(run, [leg(n, v=-1 if n == 3 or 10 <= n < 50 else 1) for n in range(100)])
    first, *others = run.dead_letters
    broken["now"] = False
    feed(run, [back(one, 100 + n, "parsing", n) for n, one in enumerate(others)])
    assert run.results("counts") == {b"K": {"n": 99}}
    for offset in (200, 201):
        run.process([back(first, offset, "parsing", 60)])
    assert run.results("counts") == {b"K": {"n": 100}}
    assert run.run.ledger.listed == {}


def test_a_plain_copy_of_a_letter_without_a_hole_takes_its_place() -> None:
    broken = {"now": True}
    run = runner(parsing(lambda element: broken["now"] and element["v"] < 0))
    feed(run, [leg(n, v=-1 if n == 3 else 1) for n in range(100)])
    [died] = run.dead_letters
    broken["now"] = False
    run.process([leg(100, 3, v=-1)])
    assert run.results("counts") == {b"K": {"n": 100}}
    feed(run, [leg(n) for n in range(101, 160)])
    run.process([back(died, 160, "parsing")])
    assert run.results("counts") == {b"K": {"n": 159}}


def test_the_copy_of_a_folded_event_that_died_comes_back_unproven_and_is_folded_only_on_the_operator_s_word() -> None:
    broken = {"now": False}
    run = runner(parsing(lambda element: broken["now"]))
    feed(run, [leg(n) for n in range(100)])
    broken["now"] = True
    run.process([leg(100, 3)])
    [died] = run.dead_letters
    broken["now"] = False
    run.process([back(died, 101, "parsing")])
    assert run.dead_letters[-1].reason == "unproven"
    assert run.results("counts") == {b"K": {"n": 100}}
    word = back(run.dead_letters[-1], 102, "parsing", 1, asserted=True)
    run.process([word])
    run.process([Record("legs", 0, 103, word.key, word.value, topic_id="T")])
    assert run.results("counts") == {b"K": {"n": 101}}, "once, as the operator says that it was never folded"


def test_two_copies_of_one_event_that_both_died_are_folded_once() -> None:
    broken = {"now": True}
    run = runner(parsing(lambda element: broken["now"] and element["v"] < 0))
    feed(run, [leg(0), leg(1, v=-1), leg(2, 1, v=-1), *(leg(n) for n in range(3, 90))])
    broken["now"] = False
    run.process([back(run.dead_letters[1], 100, "parsing")])
    run.process([back(run.dead_letters[0], 101, "parsing", 1)])
    assert run.results("counts") == {b"K": {"n": 89}}


def test_a_record_that_dies_only_in_an_attempt_that_crashes_is_not_lost() -> None:
    """The attempt rejects it and persists later records; the next run can fold it."""
    broken, store = {"now": True}, url()
    flow = parsing(lambda element: broken["now"] and element["v"] < 0)
    records = [leg(n, v=-1 if n == 3 else 1) for n in range(100)]
    with faults.use(Injector([Fault.parse("manifest.error")])), pytest.raises(Transient):
        runner(flow, store).process(records)
    broken["now"] = False
    run = runner(flow, store, ends={("legs", 0): 100})
    run.process(records)
    assert run.results("counts") == {b"K": {"n": 100}}


def test_a_record_that_dies_only_after_an_attempt_folded_it_and_crashed_is_not_folded_twice() -> None:
    broken, store = {"now": False}, url()
    flow = parsing(lambda element: broken["now"] and element["v"] < 0)
    records = [leg(n, v=-1 if n == 3 else 1) for n in range(100)]
    with faults.use(Injector([Fault.parse("manifest.error")])), pytest.raises(Transient):
        runner(flow, store).process(records)
    broken["now"] = True
    run = runner(flow, store, ends={("legs", 0): 100})
    run.process(records)
    [died] = run.dead_letters
    broken["now"] = False
    run.process([back(died, 100, "parsing")])
    assert run.dead_letters[-1].reason == "unproven"
    assert run.results("counts") == {b"K": {"n": 100}}


def test_what_an_attempt_that_died_folded_at_a_later_stage_is_not_folded_there_again_on_the_operator_s_word() -> None:
    """The letter is folded above the floor in an attempt that persists only the last stage, and below it in the next."""
    broken, store = {"now": True}, url()
    parsed = Flow("parsing").source(LEGS).filter(lambda element: 1 // (not (broken["now"] and element["v"] < 0)) == 1)
    flow = parsed.aggregate("first", "k", Fields(n=count()), history=1).aggregate(
        "last", "c", Fields(n=count()), history=1
    )
    with faults.use(Injector([Fault.parse("fold.error")])), pytest.raises(Transient):
        runner(flow, store).process([leg(0, v=-1)])
    run = runner(flow, store, ends={("legs", 0): 1})
    run.process([leg(0, v=-1)])
    [died] = run.dead_letters
    broken["now"] = False
    rest = [leg(1), leg(2), leg(3), back(died, 4, "parsing")]
    with faults.use(Injector([Fault.parse("persist:first.error")])), pytest.raises(Transient):
        run.process(rest)
    run = runner(flow, store, ends={("legs", 0): 5})
    feed(run, rest[:3])
    run.process(rest[3:])
    assert [(one.stage, one.reason) for one in run.dead_letters] == [("first", "unproven")]
    assert (run.results("first"), run.results("last")) == ({b"K": {"n": 3}}, {b"UA": {"n": 4}})
    run.process([back(run.dead_letters[-1], 5, "parsing", 1, asserted=True)])
    assert (run.results("first"), run.results("last")) == ({b"K": {"n": 4}}, {b"UA": {"n": 4}})
    assert [(one.stage, one.reason) for one in run.dead_letters[1:]] == [("last", "unproven")]


@pytest.mark.parametrize("first", ["letter", "copy"])
def test_the_letter_of_a_doubtful_record_is_to_be_redriven_before_a_plain_copy_comes(first: str) -> None:
    """A limit: the copy is judged like any record, and a later stage drops it below its floor."""
    broken, store = {"now": True}, url()
    parsed = Flow("parsing").source(LEGS).filter(lambda element: 1 // (not (broken["now"] and element["v"] < 0)) == 1)
    flow = parsed.aggregate("wide", "k", Fields(n=count()), history=200).aggregate("narrow", "c", Fields(n=count()))
    records = [leg(n, v=-1 if n == 3 else 1) for n in range(100)]
    with faults.use(Injector([Fault.parse("fold.error")])), pytest.raises(Transient):
        runner(flow, store).process(records)
    run = feed(runner(flow, store, ends={("legs", 0): 100}), records)
    [died] = run.dead_letters
    broken["now"] = False
    if first == "copy":
        run.process([leg(100, 3, v=-1)])
        run.process([back(died, 101, "parsing")])
        assert run.report.verdicts["narrow"]["below_floor"] == 1
        assert run.results("narrow") == {b"UA": {"n": 99}}
    else:
        run.process([back(died, 100, "parsing")])
        run.process([leg(101, 3, v=-1), back(run.dead_letters[-1], 102, "parsing", 1, asserted=True)])
        assert run.results("narrow") == {b"UA": {"n": 100}}
    assert run.results("wide") == {b"K": {"n": 100}}


def test_a_run_that_ends_before_it_has_read_what_a_crashed_one_folded_leaves_the_doubt_to_the_next() -> None:
    broken, store = {"now": False}, url()
    flow = parsing(lambda element: broken["now"] and element["v"] < 0)
    records, ends = [leg(n, v=-1 if n == 50 else 1) for n in range(100)], {("legs", 0): 100}
    with faults.use(Injector([Fault.parse("manifest.error")])), pytest.raises(Transient):
        runner(flow, store).process(records)
    short = runner(flow, store, ends=ends)
    short.process(records[:10])
    short.close()
    broken["now"] = True
    run = runner(flow, store, ends=ends)
    run.process(records[10:])
    [died] = run.dead_letters
    broken["now"] = False
    run.process([back(died, 100, "parsing")])
    assert (run.dead_letters[-1].reason, run.results("counts")) == ("unproven", {b"K": {"n": 100}})
    run.close()
    assert not runner(flow, store).run.crashed


def test_what_a_crashed_run_folded_late_is_remembered_until_all_of_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replay comes in several batches, and something else is folded late between them."""
    monkeypatch.setattr(history, "HEALED", 8)
    broken, store = {"now": True}, url()
    flow = parsing(lambda element: broken["now"] and element["v"] < 0).aggregate("carriers", "c", Fields(n=count()))
    records = [leg(n, v=-1 if n < 20 else 1) for n in range(100)]
    run = runner(flow, store, ends={("legs", 0): 100})
    feed(run, records).close()
    broken["now"] = False
    *letters, other = run.dead_letters
    letters = letters[10:] + letters[:10]
    redriven = [back(one, 100 + n, "parsing", n) for n, one in enumerate(letters)]
    with faults.use(Injector([Fault.parse("persist:counts.error")])), pytest.raises(Transient):
        runner(flow, store, ends={("legs", 0): 119}).process(redriven)
    run = runner(flow, store, ends={("legs", 0): 120})
    run.process(redriven[:5])
    run.process([*redriven[5:10], back(other, 119, "parsing", 19)])
    run.process(redriven[10:])
    assert (run.results("counts"), run.results("carriers")) == ({b"K": {"n": 100}}, {b"UA": {"n": 100}})


def test_a_run_that_ended_of_its_own_accord_leaves_no_doubt_and_one_that_crashed_does() -> None:
    store = url()
    first = feed(runner(FLEET, store), legs(bad=-1))
    first.close()
    second = runner(FLEET, store)
    assert not second.run.crashed
    assert runner(FLEET, store).run.crashed


def test_letters_beyond_what_the_ledger_lists_come_back_unproven() -> None:
    broken = {"now": True}
    run = runner(parsing(lambda element: broken["now"] and element["v"] < 0))
    full = Changes(added={Entry("counts", "!other:0#", (n,)) for n in range(LISTED)})
    run.run.rewrite_ledger(run.run.ledger.changed(full))
    feed(run, [leg(n, v=-1 if n == 3 else 1) for n in range(100)])
    assert run.run.ledger.forgotten == {"counts": 1}
    [died] = run.dead_letters
    broken["now"] = False
    run.process([back(died, 100, "parsing")])
    assert run.dead_letters[-1].reason == "unproven"
    run.process([back(run.dead_letters[-1], 101, "parsing", 1, asserted=True)])
    run.process([back(run.dead_letters[-1], 102, "parsing", 1, asserted=True)])
    assert run.results("counts") == {b"K": {"n": 100}}


def test_what_an_operator_asserts_of_a_stage_is_still_in_doubt_at_the_next_one():
    broken = {"first", "second"}

    def step(name):
        def passes(element):
            if name in broken:
                raise ValueError
            return dict(element.value)

        return passes

    of = (
        Flow("fleet")
        .source(pure.wrapped())
        .map(step("first"))
        .aggregate("a", lambda one: one["tail"], Fields(n=count()))
    )
    run = pure.runner(of.map(step("second")).aggregate("b", lambda one: one["tail"], Fields(n=count())))
    run.process([pure.chained(0, pure.hop("raw", 0, 5, index=None), event_id="e1")])
    [died] = run.dead_letters
    broken.remove("first")
    run.process([back(died, 1, "fleet", asserted=True)])
    assert run.results("a") == {b"N1": {"n": 1}}
    assert run.run.ledger.listed == {"b": {"!legs:0#T1": {(0,)}}}
    broken.remove("second")
    run.process([pure.chained(2, pure.hop("raw", 0, 6, index=0)), back(run.dead_letters[-1], 3, "fleet", 1)])
    assert (run.results("b"), run.run.ledger.listed) == ({b"N1": {"n": 2}}, {})
