"""Branches beside the main line, topics chosen per element, and reusable pieces of a flow."""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.errors import FlowError
from aggregations.run.memory import MemoryRunner
from envelope import Reason, decode
from envelope.redrive import HEALED
from tests.support.both import TOPIC_ID, Both
from tests.support.letters import LEGS, back, leg, runner

Step = Callable[[Flow[Any]], Flow[Any]]
BAD = -1
BROKEN = {"now": True}
FLOW = Flow("fleet").source(LEGS)
ITEMS = pl.concat_list("v", pl.lit(1)).alias("v")
COUNT = Fields(n=count())


@pytest.fixture(autouse=True)
def _broken() -> None:
    BROKEN["now"] = True


def fails(element: Element[Any]) -> bool:
    if BROKEN["now"] and element["v"] == BAD:
        raise ValueError
    return True


def diverts(element: Element[Any]) -> bool:
    return BROKEN["now"] and bool(element["v"] == BAD)


def to(topic: str) -> Step:
    return lambda flow: flow.publish(topic)


def ran(flow: Flow[Any], *values: int) -> MemoryRunner:
    run = runner(flow)
    run.process([leg(n, v=v) for n, v in enumerate(values)])
    return run


def published(run: MemoryRunner) -> dict[str, list[int]]:
    """Values by topic."""
    found: dict[str, list[int]] = {}
    for one in run.outputs:
        found.setdefault(one.topic, []).append(json.loads(decode(one.value).payload)["v"])
    return found


def vias(run: MemoryRunner) -> dict[str, str]:
    """`via` of the last hop by topic."""
    return {one.topic: decode(one.value).chain[-1].via for one in run.outputs}


def test_also_to_passes_every_element_to_a_branch_as_well() -> None:
    flow = FLOW.also_to("double", lambda flow: flow.map(v=pl.col("v") * 2).publish("doubles"))
    run = ran(flow.aggregate("all", "k", COUNT).publish("out"), 1, 2, 3)
    assert published(run) == {"doubles": [2, 4, 6], "out": [1, 2, 3]}
    assert run.results("all") == {b"K": {"n": 3}}


def test_elements_of_a_branch_leave_the_main_line_and_several_branches_split_it() -> None:
    flow = FLOW.branch("large", pl.col("v") > 10, to("large")).branch("even", lambda one: one["v"] % 2 == 0, to("even"))
    run = ran(flow.aggregate("rest", "k", COUNT).publish("odd"), 1, 2, 3, 12, 13)
    assert published(run) == {"large": [12, 13], "even": [2], "odd": [1, 3]}
    assert run.results("rest") == {b"K": {"n": 2}}


def test_null_leaves_an_element_on_the_main_line() -> None:
    when = pl.when(pl.col("v") > 10).then(statement=True)
    assert published(ran(FLOW.branch("large", when, to("large")).publish("out"), 1, 12)) == {"large": [12], "out": [1]}


def test_the_names_of_branches_are_part_of_the_lineage() -> None:
    flow = FLOW.also_to("outer", lambda flow: flow.also_to("inner", to("a")).publish("b", name="named")).publish("c")
    assert vias(ran(flow, 1)) == {"a": "fleet/outer/inner", "b": "named/outer", "c": "fleet"}


def test_a_reader_folds_two_outputs_of_one_element_that_branches_publish_to_one_topic() -> None:
    flow = FLOW.also_to("first", to("out")).also_to("second", to("out")).publish("out")
    reader = runner(Flow("reader").source(type(LEGS)("out", LEGS.payload)).aggregate("all", "k", COUNT))
    run = ran(flow, 1, 2)
    for _ in range(2):
        reader.process([type(leg(0))("out", 0, n, one.key, one.value) for n, one in enumerate(run.outputs)])
    assert reader.results("all") == {b"K": {"n": 6}}


@pytest.mark.parametrize("tail", ["a stage", "no stage"])
@pytest.mark.parametrize(
    "branch",
    [
        lambda flow: flow.also_to("side", lambda flow: flow.filter(fails).publish("side")),
        lambda flow: flow.also_to("side", lambda flow: flow.publish("side").filter(fails)),
        lambda flow: flow.branch("side", diverts_or_not, lambda flow: flow.filter(fails).publish("side")),
        lambda flow: flow.also_to("side", lambda flow: flow.flat_map(ITEMS).filter(fails).publish("side")),
        lambda flow: flow.also_to("side", lambda flow: flow.also_to("inner", fails_inside).publish("side")),
        lambda flow: flow.also_to("side", to("side")).filter(fails),
    ],
    ids=["before", "after", "exclusive", "an item", "nested", "on the main line"],
)
def test_if_a_step_fails_in_a_branch_nothing_of_the_record_leaves(branch: Step, tail: str) -> None:
    flow = branch(FLOW.also_to("other", to("other")))
    flow = flow.aggregate("all", "k", COUNT) if tail == "a stage" else flow.publish("out")
    run = ran(flow, 1, BAD, 1)
    [died] = run.dead_letters
    assert (died.record.offset, died.stage, died.items) == (1, "all" if tail == "a stage" else END_OF_FLOW, ())
    assert BAD not in {value for values in published(run).values() for value in values}
    BROKEN["now"] = False
    for n in range(2):
        run.process([back(died, 10 + n, "fleet", n)])
    counts = Counter(one.topic for one in run.outputs)
    assert counts["other"] == 3
    assert all(HEALED in {hop.via for hop in decode(one.value).chain} for one in run.outputs if one.own.offset >= 10)
    assert tail != "a stage" or run.results("all") == {b"K": {"n": 3}}
    assert published(run)["other"].count(BAD) == 1
    assert run.run.ledger.listed == {}


def diverts_or_not(element: Element[Any]) -> bool:
    return bool(element["v"] == BAD) and BROKEN["now"]


def fails_inside(flow: Flow[Any]) -> Flow[Any]:
    return flow.filter(fails).publish("inner")


@pytest.mark.parametrize(
    "leaves",
    [
        lambda flow: flow.branch("side", pl.col("v") == BAD, to("side")),
        lambda flow: flow.publish("side").filter(pl.col("v") != BAD),
        lambda flow: flow.publish("side").flat_map(lambda one: [one.value] * (one["v"] != BAD)),
    ],
    ids=["to a branch", "by a filter", "by an empty flat-map"],
)
@pytest.mark.parametrize("copy", ["plain", "redriven"])
def test_a_listed_record_that_does_not_reach_its_stage_is_no_longer_missing(leaves: Step, copy: str) -> None:
    flow = leaves(FLOW.filter(fails)).aggregate("all", "k", COUNT)
    both = Both(flow)
    both.process([replace(leg(n, v=BAD), topic_id=TOPIC_ID) for n in range(2)])
    BROKEN["now"] = False
    for n in range(2):
        again = leg(10 + n, 0, v=BAD) if copy == "plain" else back(both.dead_letters[0], 10 + n, "fleet", n)
        both.process([replace(again, topic_id=TOPIC_ID)])
    listed = both.memory.run.ledger.listed
    assert {stage: sum(map(len, groups.values())) for stage, groups in listed.items()} == {"all": 1, "all>": 1}
    healed = [HEALED in {hop.via for hop in decode(one.value).chain} for one in both.memory.outputs]
    assert healed == ([True, False] if copy == "plain" else [True])


def test_a_branch_may_divert_what_left_the_main_line() -> None:
    flow = FLOW.branch("bad", diverts_or_not, lambda flow: flow.publish("bad").divert(pl.col("v") < 0)).publish("out")
    run = ran(flow, 1, BAD)
    assert [(one.record.offset, one.reason) for one in run.dead_letters] == [(1, Reason.DIVERTED)]
    assert published(run) == {"out": [1]}
    BROKEN["now"] = False
    run.process([back(run.dead_letters[0], 10, "fleet")])
    assert published(run) == {"out": [1, BAD]}


def test_items_of_a_branch_are_not_items_of_the_main_line() -> None:
    flow = FLOW.also_to("side", lambda flow: flow.flat_map(ITEMS).publish("side")).flat_map(ITEMS).divert(diverts)
    run = ran(flow.publish("out"), BAD)
    [died] = run.dead_letters
    assert died.items == ((0,),)
    assert published(run) == {"side": [BAD, 1], "out": [1]}
    BROKEN["now"] = False
    run.process([back(died, 10, "fleet")])
    assert published(run) == {"side": [BAD, 1], "out": [1, BAD]}


def test_an_element_is_published_to_the_topic_that_it_chooses() -> None:
    names = ["legs.UA", "legs.DL"]
    for topic in (pl.concat_str(pl.lit("legs."), pl.col("c")), lambda one: f"legs.{one['c']}"):
        run = ran(FLOW.publish(topic, topics=names), 1, 2)
        assert published(run) == {"legs.UA": [1, 2]}
        assert {decode(one.value).destination for one in run.outputs} == {"legs.UA"}


def test_an_element_that_chooses_another_topic_is_a_dead_letter() -> None:
    for topic in (pl.col("c"), lambda one: one["c"], lambda _: None, pl.lit(None, pl.String)):
        run = ran(FLOW.also_to("side", to("side")).publish(topic, topics=["DL"]), 1)
        [died] = run.dead_letters
        assert (died.reason, died.detail) == (Reason.BAD_TOPIC, "publish() chose a topic that is not in topics=")
        assert run.outputs == []


def positive(flow: Flow[Any]) -> Flow[Any]:
    """A reusable piece."""
    return flow.filter(pl.col("v") > 0).map(w=pl.col("v") * 2)


def test_a_reusable_piece_is_named_by_describe_and_changes_nothing_else() -> None:
    flow = FLOW.via(positive).aggregate("all", "w", COUNT)
    plain = FLOW.filter(pl.col("v") > 0).map(w=pl.col("v") * 2).aggregate("all", "w", COUNT)
    assert flow.stages[0].definition == plain.stages[0].definition
    assert [line.split()[:2] for line in flow.describe().splitlines()[1:4]] == [
        ["source", "legs"],
        ["via", "positive"],
        ["filter", '[col("v")'],
    ]
    assert [line for line in flow.describe().splitlines() if "via" not in line] == plain.describe().splitlines()


def test_describe_indents_the_steps_of_branches() -> None:
    flow = FLOW.branch("late", pl.col("v") > 5, lambda flow: flow.via(positive).also_to("all", to("b")).publish("a"))
    assert [line.split("  vectorised")[0].rstrip() for line in flow.publish("out").describe().splitlines()] == [
        "fleet",
        "  source         legs",
        '  branch         late when [col("v") > 5]',
        "    via          positive",
        '    filter       [col("v") > 0]',
        '    map          w=[col("v") * 2]',
        "    also_to      all",
        "      publish    b",
        "    publish      a",
        "  publish        out",
    ]


def test_only_what_leaves_the_main_line_changes_the_definition() -> None:
    def definition(flow: Flow[Any]) -> str:
        return flow.aggregate("all", "k", COUNT).stages[0].definition

    assert definition(FLOW.also_to("side", lambda flow: flow.map(v=pl.lit(1)).publish("side"))) == definition(FLOW)
    late = definition(FLOW.branch("late", pl.col("v") > 5, to("late")))
    assert late != definition(FLOW)
    assert late == definition(FLOW.branch("other", pl.col("v") > 5, lambda flow: flow.flat_map(ITEMS).publish("side")))
    assert late != definition(FLOW.branch("late", pl.col("v") > 6, to("late")))
    assert late != definition(FLOW.filter(pl.col("v") > 5))


def test_a_flow_with_branches_can_be_pickled() -> None:
    flow = FLOW.via(positive).also_to("side", positive_out).aggregate("all", "k", COUNT)
    assert pickle.loads(pickle.dumps(flow)).definitions == flow.definitions


def positive_out(flow: Flow[Any]) -> Flow[Any]:
    return flow.via(positive).publish("positive")


OUT = to("out")
BAD_FLOWS: dict[str, tuple[Callable[[], object], str]] = {
    "a branch without an output": (lambda: FLOW.also_to("a", lambda flow: flow.filter("v")), "is of type Int64"),
    "without an output": (
        lambda: FLOW.also_to("a", lambda flow: flow.map(w="v")),
        r"branch 'a' has no output: end it with publish\(\)",
    ),
    "a branch that takes elements, without an output": (
        lambda: FLOW.branch("a", pl.col("v") > 1, lambda flow: flow),
        r"branch 'a' has no output: end it with publish\(\) or divert\(\)",
    ),
    "two branches of one name": (
        lambda: FLOW.also_to("a", OUT).branch("a", pl.col("v") > 1, to("more")),
        "already has a branch 'a'",
    ),
    "nested branches of one name": (
        lambda: FLOW.also_to("a", lambda flow: flow.also_to("a", OUT)),
        "already has a branch 'a'",
    ),
    "a name with a slash": (lambda: FLOW.also_to("a/b", OUT), "'a/b' is not a valid branch name"),
    "an aggregation in a branch": (
        lambda: FLOW.also_to("a", lambda flow: flow.aggregate("all", "k", COUNT)),
        "branch 'a' cannot aggregate",
    ),
    "states published in a branch": (
        lambda: FLOW.aggregate("all", "k", COUNT).also_to("a", lambda flow: flow.publish_states("s").publish("out")),
        "branch 'a' cannot publish states",
    ),
    "a copy that is diverted": (
        lambda: FLOW.also_to("a", lambda flow: flow.divert(pl.col("v") > 1).publish("out")),
        "branch 'a' cannot divert, because its elements also continue",
    ),
    "items of a branch that are diverted": (
        lambda: FLOW.branch("a", pl.col("v") > 1, lambda flow: flow.flat_map(ITEMS).divert(pl.col("v") > 1)),
        r"branch 'a' diverts after a flat_map\(\) of its own",
    ),
    "a function that returns nothing": (
        lambda: FLOW.also_to("a", lambda flow: None),  # type: ignore[arg-type,return-value]
        "branch 'a': the function must return the flow that it gets, with further steps",
    ),
    "a function that returns another flow": (lambda: FLOW.via(lambda flow: Flow("other").source(LEGS)), "must return"),
    "steps that are no function": (lambda: FLOW.also_to("a", "out"), "takes a function; got str"),  # type: ignore[arg-type]
    "a column that does not exist": (lambda: FLOW.branch("a", "late", OUT), "no column late"),
    "a predicate of another type": (lambda: FLOW.branch("a", "v", OUT), "is of type Int64, not Boolean"),
    "no source": (lambda: Flow("f").also_to("a", OUT), r"no source\(\)"),
    "a chosen topic without topics": (lambda: FLOW.publish(lambda one: "a"), "needs topics="),
    "an invalid topic to choose": (lambda: FLOW.publish("c", topics=["a b"]), "is not a topic name"),
    "a topic twice": (lambda: FLOW.publish("c", topics=["a", "a"]), "names a topic twice"),
    "topics as text": (lambda: FLOW.publish("c", topics="ab"), "topics= takes a list of topics; got str"),
    "a choice that is no text": (lambda: FLOW.publish("v", topics=["a"]), "is of type Int64, not String"),
    "one topic twice": (
        lambda: FLOW.publish("a").publish("c", topics=["b", "a"]),
        "already publishes to a as 'fleet'",
    ),
}


@pytest.mark.parametrize("what", BAD_FLOWS)
def test_what_cannot_work_is_refused_when_the_flow_is_defined(what: str) -> None:
    make, said = BAD_FLOWS[what]
    with pytest.raises(FlowError, match=said):
        make()
