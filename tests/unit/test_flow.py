"""A flow: what it is made of, what is refused where it is written, and how it is described."""

import pickle

import polars as pl
import pytest

from aggregations.definition.aggregates import count, last, total
from aggregations.definition.description import lines_of
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Filter, FlatMap, Flow, Map, Publish
from aggregations.definition.schemas import Passed
from aggregations.definition.source import Topic
from aggregations.errors import FlowError
from tests.support.pure import COLUMNS, bare

COUNT = Fields(n=count())


class Tally:
    def zero(self):
        return 0

    def fold(self, state, element):
        return state + 1


def legs(name="fleet", **options):
    return Flow(name).source(bare(**options))


def carrier(element):
    return element["carrier"]


def twice(element):
    return [element.value, element.value]


def states(element, state):
    return [state]


def test_every_method_returns_a_new_flow_and_leaves_the_old_one():
    flow = legs()
    longer = flow.filter("late").aggregate("a", "tail", COUNT)
    assert flow.steps == ()
    assert [type(step).__name__ for step in longer.steps] == ["Filter", "Aggregate"]


def test_stages_have_the_steps_in_front_of_them_and_the_tail_what_is_behind_all():
    flow = (
        legs()
        .filter("late")
        .aggregate("a", "tail", COUNT)
        .publish_states("states.a")
        .publish_states("more.a")
        .map(twice=pl.col("minutes") * 2)
        .flat_map(twice)
        .aggregate("b", carrier, COUNT)
        .publish("out")
    )
    first, second = flow.stages
    assert [type(step) for step in first.before] == [Filter]
    assert [type(step) for step in second.before] == [Map, FlatMap]
    assert [type(step) for step in flow.tail] == [Publish]
    assert (first.snapshots, second.snapshots) == (("states.a", "more.a"), ())
    assert (first.index, second.index, second.name) == (0, 1, "b")
    assert (first.fans_out, second.fans_out) == (False, True)


@pytest.mark.parametrize(
    "flow",
    [
        legs().aggregate("a", "tail", Tally()),
        legs().aggregate("a", carrier, COUNT),
        legs().filter(lambda e: e["late"]).aggregate("a", "tail", COUNT),
        legs().divert(lambda e: e["late"]).aggregate("a", "tail", COUNT),
        legs().aggregate("a", "tail", COUNT).publish("out"),
        legs().map(lambda e: e.value).aggregate("a", "tail", COUNT),
        legs().flat_map(twice).aggregate("a", "tail", COUNT),
        legs().aggregate("a", "tail", COUNT, emit=lambda element, state: [state]),
    ],
    ids=["fold", "key", "filter", "divert", "publish", "map", "flat_map", "emit"],
)
def test_a_function_is_called_on_the_vectorised_path_and_may_read_all_of_them(flow):
    assert flow.calls_functions
    assert flow.columns is None


def test_the_stages_before_a_function_that_replaces_values_are_done_on_columns():
    flow = legs().aggregate("a", "tail", Tally()).map(lambda e: e.value).aggregate("b", "carrier", COUNT)
    assert [stage.columnar for stage in flow.stages] == [True, False]


def test_the_columns_are_all_that_the_expressions_read():
    flow = (
        legs()
        .filter(pl.col("minutes") > 0)
        .aggregate("a", "tail", Fields(l=last("delay", by="late")))
        .aggregate("b", pl.col("carrier").str.to_uppercase(), COUNT)
    )
    assert flow.columns == {"minutes", "tail", "delay", "late", "carrier"}


def test_each_stage_knows_the_columns_in_front_of_it():
    flow = (
        legs()
        .map(half=pl.col("minutes") / 2)
        .aggregate("a", "tail", COUNT)
        .map(lambda e: e.value)
        .aggregate("b", "tail", COUNT)
        .publish("out")
    )
    assert set(flow.stages[0].schema) == set(COLUMNS)
    assert flow.stages[1].schema == {**flow.stages[0].schema, "half": pl.Float64()}
    assert isinstance(flow.tail_schema, Passed)
    assert flow.tail_schema == flow.schema == flow.stages[1].schema


def test_a_flow_that_emits_by_a_function_knows_behind_the_stage_only_what_it_may_pass_on():
    flow = legs().aggregate("a", "tail", COUNT, emit=lambda element, state: [state])
    assert isinstance(flow.schema, Passed)
    assert isinstance(flow.aggregate("b", "anything", COUNT).stages[1].schema, Passed)


def test_a_flow_survives_pickling_with_its_definitions():
    flow = legs().filter(pl.col("minutes") > 0).aggregate("a", carrier, Tally()).publish("out", key=carrier)
    copy = pickle.loads(pickle.dumps(flow))
    assert copy.describe() == flow.describe()
    assert copy.stages[0].definition == flow.stages[0].definition


def test_the_description_names_each_step_by_its_method_and_shows_its_path():
    flow = (
        legs()
        .filter(pl.col("minutes") > 0)
        .aggregate("aircraft", "tail", Fields(n=count(), m=total("minutes")))
        .publish_states("states")
        .map(half=pl.col("minutes") / 2, whole="minutes")
        .flat_map(twice)
        .divert(carrier)
        .aggregate("carriers", carrier, Tally(), emit=states)
        .publish("out")
    )
    assert flow.describe().splitlines() == [
        "fleet",
        "  source         legs, without envelopes",
        '  filter         [col("minutes") > 0]                               vectorised',
        "  aggregate      aircraft by tail: Fields(n=count(), m=total(minutes)) vectorised",
        "  publish_states states",
        '  map            half=[col("minutes") / 2], whole=minutes           vectorised',
        f"  flat_map       {'twice':50s} per message from here: its function replaces the values",
        "  divert         carrier                                            per message",
        "  aggregate      carriers by carrier: Tally, emit states            per message, verdicts vectorised",
        "  publish        out                                                per message",
    ]
    assert [line.step for line in lines_of(flow)] == [
        "source",
        *("filter", "aggregate", "publish_states", "map", "flat_map", "divert", "aggregate", "publish"),
    ]


def test_the_description_names_what_a_vectorised_step_calls_in_python():
    flow = (
        legs()
        .filter("late")
        .aggregate("aircraft", carrier, Tally())
        .divert(lambda element: element["late"])
        .publish("out")
    )
    assert ["vectorised" + line.rpartition(" vectorised")[2] for line in flow.describe().splitlines()[2:]] == [
        "vectorised",
        "vectorised, with Python for its key, its fold",
        "vectorised, with Python for its function",
        "vectorised, with Python for the encoding of its messages",
    ]
    emitting = legs().aggregate("a", "tail", COUNT, emit=states)
    assert emitting.describe().endswith("per message from here: emit replaces the values")
    behind = emitting.aggregate("b", "tail", COUNT)
    assert behind.describe().endswith(" per message, verdicts vectorised")
    assert emitting.aggregate("b", "tail", COUNT, emit=Emit(n="new.n")).describe().endswith(" per message")


BAD = {
    "a name with a space": (lambda: Flow("my flow"), "is not a valid flow name; use 1 to 100 letters"),
    "a name that is too long": (lambda: Flow("x" * 101), "is not a valid flow name"),
    "two sources": (lambda: legs().source(bare()), "already has a source"),
    "a source that is no topic": (lambda: Flow("f").source("legs"), "takes a Topic.*; got str"),  # type: ignore[arg-type]
    "a step without a source": (lambda: Flow("f").filter("late"), r"no source\(\): call it before filter"),
    "neither a stage nor an output": (
        lambda: legs().filter("late").stages,
        "does nothing with its elements: it needs an",
    ),
    "neither, asked for the tail": (lambda: legs().filter("late").tail, "does nothing with its elements"),
    "a stage without a name": (lambda: legs().aggregate("", "tail", COUNT), "not a valid stage name"),
    "two stages of one name": (
        lambda: legs().aggregate("a", "tail", COUNT).aggregate("a", "carrier", COUNT),
        "already has a stage 'a'",
    ),
    "an unknown stage": (lambda: legs().aggregate("a", "tail", COUNT).stage("b"), "it has a"),
    "a history of nothing": (lambda: legs().aggregate("a", "tail", COUNT, history=0), "at least 1"),
    "no lanes": (lambda: legs().aggregate("a", "tail", COUNT, lanes=0), "at least 1"),
    "a fold without fold": (lambda: legs().aggregate("a", "tail", object()), "the fold must be"),
    "a class instead of its instance": (lambda: legs().aggregate("a", "tail", Tally), "got the class Tally"),
    "a key of several rows": (lambda: legs().aggregate("a", pl.col("tail").first(), COUNT), "several rows"),
    "a key that is a number": (lambda: legs().aggregate("a", 3, COUNT), "stage 'a': key= takes a column.*got int"),
    "a key of a type that has no bytes": (lambda: legs().aggregate("a", "delay", COUNT), "the key is of type Float64"),
    "an emit that is no function": (lambda: legs().aggregate("a", "tail", COUNT, emit=3), "takes a function"),
    "a filter that is a number": (lambda: legs().filter(3), r"filter\(\) takes a column.*got int"),
    "a filter that is no truth": (lambda: legs().filter("minutes"), "not Boolean"),
    "a filter on a missing column": (lambda: legs().filter(pl.col("minuts") > 0), "no column minuts; the columns are"),
    "a filter that does not fit": (lambda: legs().filter(pl.col("tail") > 0), "does not fit"),
    "a divert that is no truth": (lambda: legs().divert("minutes"), "not Boolean"),
    "a map of nothing": (lambda: legs().map(), "either one function, or columns"),
    "a map of both": (lambda: legs().map(carrier, x="tail"), "either one function, or columns"),
    "a map of a value": (lambda: legs().map(x=3), "pl.lit"),
    "a map that is no function": (lambda: legs().map(3), "takes a function"),
    "a map of several rows": (lambda: legs().map(x=pl.col("minutes").sum()), "several rows"),
    "a map to a reserved column": (lambda: legs().map(_p0="minutes"), "reserved; rename _p0"),
    "a map that does not fit, beside one that may overflow": (
        lambda: legs().map(a=pl.col("minutes") * 2, b=pl.col("minutes").str.len_chars()),
        "does not fit",
    ),
    "a map of a missing column": (lambda: legs().map(x="minuts"), "no column minuts"),
    "a field of a missing column": (lambda: legs().aggregate("a", "tail", Fields(s=total("minuts"))), "no column"),
    "a total of text": (lambda: legs().aggregate("a", "tail", Fields(s=total("tail"))), "total of text"),
    "a flat map of a column": (lambda: legs().flat_map("tail"), "not a list"),
    "a topic that Kafka refuses": (lambda: legs().publish("my topic"), "not a topic name that Kafka allows"),
    "states without a stage": (lambda: legs().publish_states("s"), "must follow an aggregate"),
    "states to no topic": (lambda: legs().aggregate("a", "tail", COUNT).publish_states(""), "not a topic name"),
    "a value that is no function": (lambda: legs().publish("out", value=3), "takes a function"),
    "a published key of no type": (lambda: legs().publish("out", key="delay"), "the key is of type Float64"),
    "a name that is no text": (lambda: Flow(3), "3 is not a valid flow name"),  # type: ignore[arg-type]
    "a source of nothing": (lambda: Flow("f").source(None), "takes a Topic.*; got NoneType"),
    "a stage name that is no text": (lambda: legs().aggregate(3, "tail", COUNT), "3 is not a valid stage name"),
    "a reserved stage name": (lambda: legs().aggregate("end", "tail", COUNT), "'end' is reserved"),
    "a history in text": (
        lambda: legs().aggregate("a", "tail", COUNT, history="3"),
        "history= takes an integer; got str",
    ),
    "a history of a fraction": (lambda: legs().aggregate("a", "tail", COUNT, history=1.5), "got float"),
    "lanes of nothing": (lambda: legs().aggregate("a", "tail", COUNT, lanes=None), "lanes= takes an integer; got None"),
    "lanes that are a truth": (lambda: legs().aggregate("a", "tail", COUNT, lanes=True), "got bool"),
    "co-partitioning in text": (lambda: legs().aggregate("a", "tail", COUNT, co_partitioned="no"), "True or False"),
    "a store that is no URL": (lambda: legs().aggregate("a", "tail", COUNT, store=3), "store= takes the URL"),
    "a missing column of a stage": (lambda: legs().aggregate("a", "tial", COUNT), "stage 'a': no column tial"),
    "a topic that is no text": (lambda: legs().publish(3), r"publish\(\): 3 is not a topic name"),
    "a hop's name that is no text": (lambda: legs().publish("out", name=3), r"publish\(\): name= takes text; got int"),
    "states to a number": (
        lambda: legs().aggregate("a", "tail", COUNT).publish_states(3),
        r"publish_states\(\): 3 is not",
    ),
    "a total of a number": (lambda: total(3), r"total\(\) takes a column.*pl.lit.*got int"),  # type: ignore[arg-type]
    "a total of nothing": (lambda: total(None), r"total\(\) takes a column.*got None"),
    "a last by a function": (lambda: last("minutes", by=carrier), r"last\(\) takes a column.*got function"),  # type: ignore[arg-type]
    "a field that is a function": (lambda: Fields(n=count), "field 'n' takes an aggregate.*got function"),  # type: ignore[arg-type]
    "two hops of one name to one topic": (
        lambda: legs().publish("out").filter("late").publish("out"),
        "pass another name=",
    ),
}


@pytest.mark.parametrize(("bad", "match"), BAD.values(), ids=BAD)
def test_a_definition_that_cannot_work_is_refused_with_what_to_change(bad, match):
    with pytest.raises(FlowError, match=match):
        bad()


class NoJson(Tally):
    def zero(self):
        return (0, 0)


class Raises(Tally):
    def zero(self):
        raise RuntimeError("secret")


@pytest.mark.parametrize(("fold", "match"), [(NoJson(), "tuple"), (Raises(), "RuntimeError")])
def test_a_fold_whose_zero_is_no_state_is_refused(fold, match):
    with pytest.raises(FlowError, match=match) as error:
        legs().aggregate("a", "tail", fold)
    assert "secret" not in str(error.value)


def test_two_processors_to_one_topic_under_two_names_are_two_paths():
    assert len(legs().aggregate("a", "tail", COUNT).publish("out").publish("out", name="other").tail) == 2


def test_a_topic_may_be_read_without_declared_columns():
    flow = Flow("raw").source(Topic("t")).aggregate("a", "value", COUNT)
    assert flow.columns == {"value"}
