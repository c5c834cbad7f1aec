"""`Emit`: what a stage passes on as columns, on both paths."""

import json
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, first, last, maximum, mean, total
from aggregations.definition.aggregates_exact import collect, histogram, variance
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
from aggregations.definition.element import Element
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import FlowError
from envelope import Reason
from tests.support.both import Both
from tests.support.pure import bare, leg

FOLD = Fields(n=count(), m=total("minutes"), worst=maximum("minutes"), mean=mean("minutes"), late=count(where="late"))


def flow(emit: Any, fold: Fields = FOLD) -> Flow[Any]:
    return Flow("fleet").source(bare()).aggregate("aircraft", "tail", fold, emit=emit)


def emitted(emit: Any, *minutes: int | None, fold: Fields = FOLD) -> list[Any]:
    """What the stage passes on for elements of one key, on both paths, in one batch and in batches of one."""
    records = [
        leg(offset, "N1", carrier="AA", minutes=one, late=bool(offset % 2)) for offset, one in enumerate(minutes)
    ]
    published = flow(emit, fold).publish("out", value=as_json)
    together, alone = Both(published), Both(published)
    together.process(records)
    for one in records:
        alone.process([one])
    found = [json.loads(one.value.split(b"|")[1]) for one in bare_outputs(together)]
    assert found == [json.loads(one.value.split(b"|")[1]) for one in bare_outputs(alone)]
    return found


def as_json(element: Element[Any]) -> bytes:
    return b"|" + json.dumps(element.value).encode() + b"|"


def bare_outputs(both: Both) -> list[Any]:
    return list(both.memory.outputs)


def test_columns_read_the_state_before_and_after_each_element():
    emit = Emit(n="new.n", m="new.m", before="old.m", grown=pl.col("new.m") - pl.col("old.m"), worst="new.worst")
    assert emitted(emit, 5, None, 3) == [
        {"n": 1, "m": 5, "before": 0, "grown": 5, "worst": 5},
        {"n": 2, "m": 5, "before": 5, "grown": 0, "worst": 5},
        {"n": 3, "m": 8, "before": 5, "grown": 3, "worst": 5},
    ]


def test_columns_read_the_element_and_results_instead_of_raw_states():
    emit = Emit(carrier="carrier", minutes=pl.col("minutes") * 2, mean="new.mean", before="old.mean", at="_offset")
    assert emitted(emit, 5, 8) == [
        {"carrier": "AA", "minutes": 10, "mean": 5.0, "before": None, "at": 0},
        {"carrier": "AA", "minutes": 16, "mean": 6.5, "before": 5.0, "at": 1},
    ]


def test_only_changes_of_the_fields_that_it_reads_are_passed_on():
    emit = Emit(worst="new.worst", minutes="minutes").changed()
    assert emitted(emit, 5, 5, 3, None, 9) == [{"worst": 5, "minutes": 5}, {"worst": 9, "minutes": 9}]


def test_only_elements_that_meet_the_condition_are_passed_on():
    emit = Emit(n="new.n").when(pl.col("new.m") >= 10).when(pl.col("old.m") < 10)
    assert emitted(emit, 5, None, 6, 1) == [{"n": 3}]
    assert emitted(Emit(n="new.n").when(pl.col("minutes") > 1), None, 1, 2) == [{"n": 3}]


def test_every_result_that_is_a_column_can_be_passed_on():
    fold = Fields(
        first=first("minutes"),
        last=last("carrier", by="minutes"),
        spread=variance("minutes"),
        kinds=approximate_distinct("minutes"),
        ranks=quantiles("minutes", at=[0.0, 1.0]),
    )
    emit = Emit(**{name: f"new.{name}" for name in fold.fields}, median=pl.col("old.ranks").list.get(0)).changed()
    assert emitted(emit, 4, 4, 6, fold=fold) == [
        {"first": 4, "last": "AA", "spread": None, "kinds": 1, "ranks": [4.0, 4.0], "median": None},
        {"first": 4, "last": "AA", "spread": 0.0, "kinds": 1, "ranks": [4.0, 4.0], "median": 4.0},
        {"first": 4, "last": "AA", "spread": pytest.approx(4 / 3), "kinds": 2, "ranks": [4.0, 6.0], "median": 4.0},
    ]


def test_its_columns_are_those_of_the_following_stage_and_keep_their_types():
    made = flow(Emit(carrier="carrier", grown=pl.col("new.worst") - pl.col("old.worst"), mean="new.mean"))
    assert made.schema == {"carrier": pl.String, "grown": pl.Int64, "mean": pl.Float64}
    made = made.filter(pl.col("grown").is_not_null()).aggregate("carrier", "carrier", Fields(grown=total("grown")))
    assert [stage.columnar for stage in made.stages] == [True, True]
    assert not made.calls_functions
    assert made.columns == {"tail", "minutes", "late", "carrier", "grown"}
    assert "per message" not in made.describe()
    both = Both(made)
    both.process([leg(i, f"N{i % 2}", carrier="AA", minutes=one) for i, one in enumerate([3, 5, 4, 9, 1])])
    both.process([leg(i, f"N{i % 2}", carrier="AA", minutes=one) for i, one in enumerate([8, 7], 5)])
    assert both.results("carrier") == {b"AA": {"grown": (4 - 3) + (9 - 5) + 0 + 0 + (7 - 4)}}


def test_an_element_whose_columns_cannot_be_computed_is_a_dead_letter_and_leaves_a_hole():
    both = Both(flow(Emit(m=pl.col("new.m") * pl.col("minutes"))))
    both.process([leg(0, minutes=2), leg(1, minutes=2**40), leg(2, minutes=3), leg(3, "N2", minutes=1)])
    assert both.reasons() == [(1, Reason.OVERFLOW)]
    assert both.results("aircraft")[b"N1"]["m"] == 5
    both.process([both.redriven(both.dead_letters[0], 9)])
    assert both.reasons() == [(1, Reason.OVERFLOW), (9, Reason.OVERFLOW)]


BROKEN = {"now": False}


def refuse(element: Element[Any]) -> bool:
    if BROKEN["now"] and element["minutes"] == 3:
        raise ValueError("broken")
    return True


@pytest.mark.parametrize("minutes", [1, 5])
def test_what_failed_behind_the_stage_is_passed_on_again_when_it_is_redriven_whatever_the_condition(minutes):
    emit = Emit(carrier="carrier", minutes="minutes", worst="new.worst", before="old.worst").changed()
    fold = Fields(records=count(), worst=maximum("worst"), before=maximum("before"), minutes=total("minutes"))
    both = Both(flow(emit).filter(refuse).aggregate("carrier", "carrier", fold))
    BROKEN["now"] = True
    both.process([leg(0, carrier="AA", minutes=3), leg(1, carrier="AA", minutes=minutes)])
    BROKEN["now"] = False
    assert both.reasons() == [(0, Reason.TRANSFORM_FAILED)]
    passed = int(minutes > 3)
    assert both.results("carrier").get(b"AA", {}).get("records", 0) == passed
    both.process([both.redriven(both.dead_letters[0], 7)])
    both.process([both.redriven(both.dead_letters[0], 8)])
    assert both.results("aircraft")[b"N1"]["n"] == 2
    worst, before = max(minutes, 3), 3 if passed else None  # the redriven element has the state of its place
    expected = {"records": 1 + passed, "worst": worst, "before": before, "minutes": 3 + minutes * passed}
    assert both.results("carrier") == {b"AA": expected}


def test_copies_are_not_passed_on():
    both = Both(
        flow(Emit(carrier="carrier", n="new.n")).aggregate("carrier", "carrier", Fields(n=count(), sum=total("n")))
    )
    batch = [leg(i, carrier="AA") for i in range(3)]
    both.process(batch)
    both.process([*batch, leg(3, carrier="AA")])
    assert both.results("carrier") == {b"AA": {"n": 4, "sum": 1 + 2 + 3 + 4}}


def test_items_of_one_record_are_folded_as_a_whole_or_not_at_all():
    topic = Topic("orders", Json({"who": str, "lines": [int]}), envelope=False)
    made = (
        Flow("shop")
        .source(topic)
        .flat_map("lines")
        .aggregate(
            "who", "who", Fields(n=count(), sum=total("lines")), emit=Emit(who="who", room=2**62 * pl.col("new.n"))
        )
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )
    both = Both(made)
    record = leg(0, "ann", topic="orders")
    both.process([record.__class__("orders", 0, 0, b"ann", b'{"who": "ann", "lines": [1, 2, 3]}', topic_id="T1")])
    assert both.reasons() == [(0, Reason.OVERFLOW)]
    assert both.results("all") == {}
    both.process([record.__class__("orders", 0, 1, b"bob", b'{"who": "bob", "lines": [1]}', topic_id="T1")])
    assert both.results("all") == {b"all": {"n": 1}}


def test_it_passes_on_at_most_one_element_so_a_record_stays_in_one_task():
    def twice(element: Element[Any], state: Any) -> list[Any]:
        return [element.value, element.value]

    emit = Emit(carrier="carrier")
    assert not flow(emit).aggregate("carrier", "carrier", Fields(n=count())).scatters
    assert flow(twice).aggregate("carrier", lambda element: "a", Fields(n=count())).scatters


def test_values_that_a_function_made_are_passed_on_too():
    made = (
        Flow("fleet")
        .source(bare())
        .map(lambda element: {"tail": element["tail"], "x": element["minutes"] * 2})
        .aggregate("aircraft", "tail", Fields(m=total("x")), emit=Emit(m="new.m", x="x", old="old.m").changed())
        .aggregate("all", pl.lit("all"), Fields(m=total("m"), x=total("x"), old=total("old")))
    )
    both = Both(made)
    both.process([leg(0, minutes=1), leg(1, minutes=0), leg(2, minutes=3)])
    assert both.results("all") == {b"all": {"m": 2 + 8, "x": 2 + 6, "old": 0 + 2}}


def test_a_state_of_an_earlier_definition_whose_result_is_not_of_the_type_is_a_dead_letter():
    before = Both(Flow("fleet").source(bare()).aggregate("aircraft", "tail", Fields(m=total("delay"))))
    before.process([leg(0, delay=0.5), leg(1, "N2", delay=2.0)])
    now = flow(Emit(m="new.m"), Fields(m=total("minutes"))).aggregate("all", pl.lit("all"), Fields(m=total("m")))
    both = Both(now, before.stores, accept=["definition", "stage-added"])
    both.process([leg(2, minutes=1), leg(3, "N3", minutes=1)])
    assert both.reasons() == [(2, Reason.FOLD_FAILED)]
    assert "in a state of an earlier definition; emit= needs Int64" in both.dead_letters[0].detail
    assert both.results("all") == {b"all": {"m": 1}}


def test_the_following_stage_has_another_definition_when_what_is_emitted_changes():
    def behind(emit: Any, fold: Fields = FOLD) -> str:
        return flow(emit, fold).aggregate("all", pl.lit("all"), Fields(n=count())).stages[1].definition

    ranks = [Fields(q=quantiles("minutes", at=at)) for at in ([0.5], [0.9])]
    found = [
        behind(Emit(n="new.n")),
        behind(Emit(n="old.n")),
        behind(Emit(n="new.n").changed()),
        behind(Emit(n="new.n").when("late")),
        behind(Emit(n="new.q"), ranks[0]),
        behind(Emit(n="new.q"), ranks[1]),
    ]
    assert len(set(found)) == len(found)
    assert behind(Emit(n="new.n")) == found[0]
    assert flow(None, ranks[0]).stages[0].definition == flow(Emit(q="new.q"), ranks[1]).stages[0].definition


class Own:
    def zero(self) -> int:
        return 0

    def fold(self, state: int, element: Element[Any]) -> int:
        return state + 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Emit(), r"Emit\(\) needs at least one column"),
        (lambda: Emit(_x="new.n"), "column names that begin with _, old. and new. are reserved; rename _x"),
        (
            lambda: Emit(x=1),  # type: ignore[arg-type]
            r"Emit\(x=...\) takes a column name or a polars expression",
        ),
        (lambda: Emit(x=pl.col("new.n").sum()), "reads several rows"),
        (lambda: Emit(x="tail").changed(), r"changed\(\) needs a column that reads the new state"),
        (
            lambda: Emit(x="new.n").when(True),  # type: ignore[arg-type]
            r"when\(\) takes a column name or a polars expression",
        ),
        (lambda: flow(Emit(x="new.nope")), "the state has no field 'nope'; the fields are n, m, worst, mean, late"),
        (lambda: flow(Emit(x="nope")), "no column nope"),
        (lambda: flow(Emit(x="new.n").when("new.m")), r"when\(\) is of type Int64, not Boolean"),
        (lambda: flow(Emit(x=pl.col("tail") + 1)), "an expression does not fit the columns"),
        (lambda: flow(1), "emit= takes a function; got int"),
        (lambda: flow(Emit(x="new.c"), Fields(c=collect("tail", 1))), "the result of collect 'c' is not a column"),
        (lambda: flow(Emit(x="new.c"), Fields(c=top("tail", 1))), "the result of top 'c' is not a column"),
        (
            lambda: flow(Emit(x="new.c"), Fields(c=histogram("minutes", [1]))),
            "the result of histogram 'c' is not a column",
        ),
        (
            lambda: Flow("f").source(bare()).aggregate("a", "tail", Own(), emit=Emit(x="tail")),  # type: ignore[arg-type]
            r"emit=Emit\(...\) needs a fold of Fields",
        ),
        (
            lambda: (
                Flow("f")
                .source(Topic("t", Json({"new.n": int}), envelope=False))
                .aggregate("a", pl.lit("a"), Fields(n=count()), emit=Emit(x="new.n"))
            ),
            "column new.n has a name of the state's columns",
        ),
    ],
)
def test_what_cannot_be_emitted_is_refused_when_the_flow_is_defined(make, text):
    with pytest.raises(FlowError, match=text):
        make()
