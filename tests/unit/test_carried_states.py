"""States under a changed `Fields`: what is continued, as what, and what is refused before anything is written."""

from typing import Any

import pytest

from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, histogram, standard_deviation, variance
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError, FlowError
from aggregations.run.begin import look
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.views import states as views
from tests.support.both import Both
from tests.support.pure import bare, fresh_store, leg, runner, states

DEFINITION = ["definition"]
OLD = Fields(n=count(), m=total("minutes"))
ADDED = Fields(n=count(), m=total("minutes"), late=count("late"))


def flow(fields, **options):
    return Flow("fleet").source(bare()).aggregate("aircraft", "tail", fields, **options)


def legs(*offsets, **columns):
    return [leg(offset, f"N{offset % 2}", minutes=offset, late=True, **columns) for offset in offsets]


def accepted(fields, store):
    changed = flow(fields)
    return MemoryRunner(changed, bind(changed, {}, store), accept=DEFINITION)


def test_a_field_that_no_state_has_is_refused_before_anything_is_written_and_the_old_code_goes_on():
    store = fresh_store()
    before = runner(flow(OLD), store)
    before.process(legs(0, 1, 2))
    kept = before.run.stores["aircraft"].load_manifest(before.run.ref)
    with pytest.raises(
        DefinitionChangedError,
        match=r"flow fleet, generation 1, stage aircraft: 2 of 2 states do not fit its new definition, for example of key b'N[01]': "
        r"field 'late' is missing; declare its value in earlier states with \.added\(late=\.\.\.\)\. "
        r"Otherwise rebuild the flow \(`headwater replay --redefine`\)",
    ):
        accepted(ADDED, store)
    assert before.run.stores["aircraft"].load_manifest(before.run.ref) == kept
    again = runner(flow(OLD), store)
    again.process(legs(3))
    assert states(again, "aircraft") == {"N0": {"n": 2, "m": 2}, "N1": {"n": 2, "m": 4}}


def test_a_plan_refuses_it_as_a_run_does():
    store = fresh_store()
    runner(flow(OLD), store).process(legs(0))
    changed = flow(ADDED)
    with pytest.raises(DefinitionChangedError, match="field 'late' is missing"):
        look(changed, bind(changed, {}, store), accept=DEFINITION)


def test_a_field_that_was_added_begins_as_declared_and_new_keys_at_zero_on_both_paths():
    before = Both(flow(OLD))
    before.process(legs(0, 1))
    changed = flow(ADDED.added(late=7))
    after = Both(changed, before.stores, accept=DEFINITION)
    after.process([*legs(2), leg(4, "N9", minutes=1, late=True)])
    assert after.results("aircraft") == {
        b"N0": {"n": 2, "m": 2, "late": 8},
        b"N1": {"n": 1, "m": 1, "late": 7},
        b"N9": {"n": 1, "m": 1, "late": 1},
    }
    # It need not be accepted again, though N1 has not been written since.
    later = Both(changed, before.stores)
    later.process(legs(5))
    assert later.results("aircraft")[b"N1"] == {"n": 2, "m": 6, "late": 8}


def test_a_field_that_was_removed_is_left_out_and_cannot_come_back_undeclared():
    both = Both(flow(OLD))
    both.process(legs(0, 1))
    both = Both(flow(Fields(n=count())), both.stores, accept=DEFINITION)
    both.process(legs(2))
    assert both.results("aircraft") == {b"N0": {"n": 2}, b"N1": {"n": 1}}
    with pytest.raises(DefinitionChangedError, match=r"1 of 2 states .* key b'N0': field 'm' is missing"):
        accepted(OLD, both.stores[0])


def test_states_of_two_earlier_definitions_are_carried_over_together():
    both = Both(flow(OLD))
    both.process(legs(0, 1))
    both = Both(flow(ADDED.added(late=0)), both.stores, accept=DEFINITION)
    both.process(legs(2))
    newest = Fields(n=count(), late=count("late"), long=maximum("minutes")).added(late=0, long=None)
    both = Both(flow(newest), both.stores, accept=DEFINITION)
    both.process(legs(3, 4))
    assert both.results("aircraft") == {b"N0": {"n": 3, "late": 2, "long": 4}, b"N1": {"n": 2, "late": 1, "long": 3}}


def test_a_declaration_that_is_taken_away_again_is_another_definition():
    store = fresh_store()
    runner(flow(OLD), store).process(legs(0, 1))
    accepted(ADDED.added(late=0), store).process(legs(2))
    with pytest.raises(DefinitionChangedError, match="the flow last ran with"):
        runner(flow(ADDED), store)
    with pytest.raises(DefinitionChangedError, match="1 of 2 states do not fit"):
        accepted(ADDED, store)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (count(), mean("minutes")),
        (mean("minutes"), count()),
        (mean("minutes"), total("minutes")),
        (maximum("minutes"), count()),
        (total("delay"), count()),
        (count(), last("minutes")),
        (last("minutes"), last("minutes", by="delay")),
        (first("minutes", by="delay"), first("minutes")),
        (first("minutes", by="tail"), first("minutes", by="delay")),
        (first("minutes"), minimum("minutes")),
        (minimum("tail"), minimum("minutes")),
        (maximum("minutes"), maximum("tail")),
        (mean("minutes"), variance("minutes")),
        (variance("minutes"), mean("minutes")),
        (histogram("minutes", [1]), histogram("minutes", [2])),
        (collect("minutes", 1), collect("minutes", 2)),
        (first("minutes"), collect("minutes", 1)),
        (approximate_distinct("minutes"), approximate_distinct("minutes", precision=12)),
        (approximate_distinct("minutes"), quantiles("minutes")),
        (quantiles("minutes"), quantiles("minutes", k=100)),
        (top("minutes", 1), top("minutes", 1, size=2)),
        (top("minutes", 1), maximum("tail")),
    ],
)
def test_a_field_whose_state_is_of_another_kind_is_refused(old, new):
    store = fresh_store()
    records = [*legs(0, delay=1.5), *(leg(2 + i, "N2", minutes=-5 - i, delay=2.5) for i in range(3))]
    runner(flow(Fields(x=old)), store).process(records)
    with pytest.raises(DefinitionChangedError, match=r"field 'x' is not the state of "):
        accepted(Fields(x=new), store)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (count(), total("minutes")),
        (minimum("minutes"), maximum("delay")),
        (last("minutes"), last("tail")),
        (first("minutes", by="delay"), first("tail", by="minutes")),
        (count(), count(where="late")),
        (variance("minutes"), standard_deviation("delay")),
        (histogram("minutes", [1, 2]), histogram("delay", [1, 2.0])),
        (collect("minutes", 3), collect("tail", 4)),
        (approximate_distinct("minutes"), approximate_distinct("tail")),
        (quantiles("minutes"), quantiles("delay", at=[1])),
        (top("minutes", 1), top("tail", 2)),
    ],
)
def test_a_field_of_the_same_kind_is_continued(old, new):
    both = Both(flow(Fields(x=old)))
    both.process(legs(0, delay=1.5))
    both = Both(flow(Fields(x=new)), both.stores, accept=DEFINITION)
    both.process(legs(2, delay=2.5))
    assert both.results("aircraft")[b"N0"]["x"] is not None


def test_every_aggregate_can_be_added_and_then_holds_what_comes_after():
    added = Fields(
        n=count(),
        m=total("minutes"),
        spread=variance("minutes"),
        deviation=standard_deviation("minutes"),
        sizes=histogram("minutes", [3]),
        some=collect("minutes", 1),
        kinds=approximate_distinct("minutes"),
        ranks=quantiles("minutes", at=[1]),
        usual=top("minutes", 1),
    )
    new = [name for name in added.fields if name not in OLD.fields]
    both = Both(flow(OLD))
    both.process(legs(0, 1))
    both = Both(flow(added.added(**dict.fromkeys(new))), both.stores, accept=DEFINITION)
    both.process(legs(2, 4))
    assert both.results("aircraft")[b"N0"] == {
        "n": 3,
        "m": 6,
        "spread": 2.0,
        "deviation": 2.0**0.5,
        "sizes": {"bounds": [3.0], "counts": [1, 1]},
        "some": {"values": [2], "dropped": 1},
        "kinds": 2,
        "ranks": [4.0],
        "usual": {"values": [[2, 1]], "error": 0},
    }
    with pytest.raises(FlowError, match=r"added\(\): top 'usual' cannot start with 1; use None if nothing was folded"):
        added.added(usual=1)


class Counter:
    """A fold in plain Python."""

    def zero(self):
        return 0

    def fold(self, state, element):
        return state + 1


def test_the_state_of_a_fold_in_python_does_not_fit_fields():
    store = fresh_store()
    runner(flow(Counter()), store).process(legs(0))
    with pytest.raises(DefinitionChangedError, match="the state was not made by Fields"):
        accepted(OLD, store)


def test_a_fold_in_python_gets_earlier_states_as_they_are():
    store = fresh_store()
    runner(flow(Fields(n=count())), store).process(legs(0))
    run = accepted(Counter(), store)
    run.process(legs(2))
    assert states(run, "aircraft") == {"N0": {"n": 1}}
    assert [one.reason.value for one in run.dead_letters] == ["fold_failed"]


def test_states_that_have_holes_alone_need_no_declaration():
    store = fresh_store()
    broken = MemoryRunner(broken_flow := flow(Fields(m=total("delay"))), bind(broken_flow, {}, store))
    broken.process([leg(0, "N0", delay=1.7e308), leg(1, "N1", delay=1.7e308), leg(2, "N1", delay=1.7e308)])
    assert [one.reason.value for one in broken.dead_letters] == ["overflow"]
    accepted(Fields(m=total("delay"), n=count()).added(n=0), store)


def test_who_reads_the_states_with_the_new_code_is_told_what_does_not_fit_or_sees_it_carried_over(tmp_path):
    url = f"sqlite://{tmp_path}/states.db"
    runner(flow(OLD), url).process(legs(0, 1))
    with pytest.raises(DefinitionChangedError, match=r"stage aircraft, key b'N0': .* field 'late' is missing"):
        list(views(flow(ADDED), "aircraft", {"aircraft": url}, keys=[b"N0"]))
    [view] = views(flow(ADDED.added(late=3)), "aircraft", {"aircraft": url}, keys=[b"N0"])
    assert view.state == {"n": 1, "m": 0, "late": 3}


def test_what_cannot_be_a_start_is_refused_where_it_is_written():
    fields = Fields(n=count(), a=mean("minutes"), top=maximum("tail"))
    starts: dict[str, Any]
    for starts, text in [
        ({"m": 0}, "no field 'm'; the fields are n, a, top"),
        ({"n": -1}, "count 'n' cannot start with -1"),
        ({"n": 1.5}, "count 'n' cannot start with 1.5"),
        ({"a": 2}, "mean 'a' cannot start with 2; use None if nothing was folded"),
        ({"top": [1]}, "field 'top' is a list"),
        ({"n": 2**64}, "field 'n' is an integer beyond 64 bits"),
    ]:
        with pytest.raises(FlowError, match=rf"added\(\): {text}"):
            fields.added(**starts)
    assert fields.added(a=None).carried({"n": 1, "top": "N1"}) == {"n": 1, "a": [0, 0], "top": "N1"}


def test_a_start_is_part_of_the_definition_and_its_order_is_not():
    one, other = ADDED.added(n=0).added(late=0), ADDED.added(late=0, n=0)
    assert one.describe() == other.describe() != ADDED.describe()
    assert ADDED.added(late=1).describe() != ADDED.added(late=0).describe()
