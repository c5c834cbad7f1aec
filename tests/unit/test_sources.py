"""Flows with several sources: what the definition refuses, and what the in-memory runner folds."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, last, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.stages import continues
from aggregations.errors import DefinitionChangedError, FlowError
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.start import checked_starts, parse_all, start_of
from envelope import Envelope, Hop, Reason, Siblings, TopicPartition, encode
from persistence.manifest import Growth
from tests.support.pure import fresh_store

RESULTS = Topic("results", Json({"part": str, "torque": int, "id": int}), envelope=False)
READY = Topic("ready", Json({"part": str, "station": str, "id": str}), envelope=False)
SEEN = Fields(n=count(), results=count("torque"), sum=total("torque"), station=last("station"))


def both(*more: Topic) -> Flow[Any]:
    return Flow("line").source(RESULTS, READY, *more)


def parts(flow: Flow[Any], **options: Any) -> Flow[Any]:
    return flow.aggregate("part", "part", SEEN, **options)


def counted(flow: Flow[Any]) -> Flow[Any]:
    return flow.aggregate("part", "part", Fields(n=count()))


def result(offset: int, part: str = "p", torque: Any = 1, partition: int = 0) -> Record:
    value = json.dumps({"part": part, "torque": torque}).encode()
    return Record("results", partition, offset, part.encode(), value, topic_id="R")


def ready(offset: int, part: str = "p", station: str = "s1", partition: int = 0) -> Record:
    value = json.dumps({"part": part, "station": station}).encode()
    return Record("ready", partition, offset, part.encode(), value, topic_id="Y")


def runner(flow: Flow[Any], store: str | None = None, **options: Any) -> MemoryRunner:
    return MemoryRunner(flow, bind(flow, {}, store or fresh_store()), **options)


def test_keys_of_several_topics_meet_in_one_state_and_missing_columns_are_null():
    run = runner(parts(both()))
    run.process([result(0, torque=3), ready(0), result(1, torque=4), ready(1, "q", "s2")])
    assert run.results("part") == {
        b"p": {"n": 3, "results": 2, "sum": 7, "station": "s1"},
        b"q": {"n": 1, "results": 0, "sum": 0, "station": "s2"},
    }
    assert run.run.start == {("results", 0): 2, ("ready", 0): 2}


def test_equal_offsets_of_two_topics_are_two_events_and_a_copy_of_either_is_dropped():
    run = runner(parts(both()))
    for _ in range(3):
        run.process([result(0), ready(0)])
    assert run.results("part")[b"p"]["n"] == 2


def test_the_steps_before_a_merge_apply_to_their_own_source_and_the_later_ones_to_both():
    tight = Flow("line").source(RESULTS).filter(pl.col("torque") > 2)
    loud = Flow("other").source(READY).map(station=pl.col("station").str.to_uppercase())
    run = runner(parts(tight.merge(loud).filter(pl.col("part") != "none")))
    run.process([result(0, torque=1), result(1, torque=3), ready(0), ready(1, "none")])
    assert run.results("part") == {b"p": {"n": 2, "results": 1, "sum": 3, "station": "S1"}}


def test_three_flows_merge_one_after_the_other():
    third = Topic("third", Json({"part": str}), envelope=False)
    flow = parts(Flow("line").source(RESULTS).merge(Flow("b").source(READY)).merge(Flow("c").source(third)))
    run = runner(flow)
    run.process([result(0), ready(0), Record("third", 0, 0, b"p", b'{"part": "p"}')])
    assert run.results("part")[b"p"]["n"] == 3
    assert list(flow.topics) == ["results", "ready", "third"]


def test_every_topic_has_its_own_envelope_limits_and_policies():
    wrapped = Topic("wrapped", Json({"part": str}), siblings=Siblings.GROUP)
    by_id = Topic("by-id", Json({"part": str}), siblings=Siblings.EVENT_ID)
    run = runner(counted(Flow("line").source(RESULTS, wrapped, by_id)))

    def unnumbered(topic: str, offset: int, event: str = "") -> Record:
        hop = Hop("raw", 0, 7, via="foreign", index=None)
        value = encode(Envelope(b'{"part": "p"}', chain=(hop,), key=b"p", event_id=event))
        return Record(topic, 0, offset, b"p", value)

    siblings = [unnumbered("wrapped", 0), unnumbered("wrapped", 1)]
    events = [unnumbered("by-id", 0, "a"), unnumbered("by-id", 1, "b"), unnumbered("by-id", 2, "a")]
    run.process([result(0), *siblings, *events])
    assert run.results("part")[b"p"]["n"] == 1 + 2 + 2


def test_a_function_sees_the_columns_of_all_topics():
    seen: list[Any] = []

    class Fold:
        def zero(self) -> int:
            return 0

        def fold(self, state: int, element: Element[Any]) -> int:
            seen.append((element.topic, element.value))
            return state + 1

    run = runner(both().aggregate("part", "part", Fold()))
    run.process([result(0), ready(0)])
    assert seen == [
        ("ready", {"part": "p", "torque": None, "station": "s1"}),
        ("results", {"part": "p", "torque": 1, "station": None}),
    ], "without the column that has two types"


def test_an_output_names_the_topic_of_its_element_in_its_chain():
    run = runner(parts(both()).publish("out"))
    run.process([result(0), ready(0)])
    own = [output.own for output in run.outputs]
    assert sorted((one.topic, one.topic_id) for one in own if one) == [("ready", "Y"), ("results", "R")]


def test_a_dead_letter_names_its_topic_and_stays_a_hole_of_its_own_lane():
    run = runner(parts(both().divert(pl.col("torque") == 9)))
    run.process([result(0, torque="no"), ready(0), result(1, torque=9), Record("ready", 0, 1, b"p", b"no JSON")])
    assert [(one.record.topic, one.record.offset, one.reason) for one in run.dead_letters] == [
        ("results", 0, Reason.BAD_PAYLOAD),
        ("ready", 1, Reason.BAD_PAYLOAD),
        ("results", 1, Reason.DIVERTED),
    ]
    assert {group.partition(":")[0] for group in run.run.ledger.listed["part"]} == {"results", "ready"}


def test_a_record_that_a_later_step_rejects_publishes_nothing_before_the_merge():
    flow = parts(
        Flow("line").source(RESULTS).publish("early").merge(Flow("b").source(READY)).divert(pl.col("torque") == 9)
    )
    run = runner(flow)
    run.process([result(0, torque=9), result(1)])
    assert [output.own.offset for output in run.outputs if output.own] == [1]
    assert set(run.run.ledger.listed) == {"part", "part>"}, "its output is missing"


def test_a_record_of_a_topic_that_is_not_a_source_is_refused():
    with pytest.raises(FlowError, match="flow 'line' reads results, ready, not other"):
        runner(parts(both())).process([Record("other", 0, 0, b"p", b"{}")])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a topic twice": (lambda: Flow("f").source(RESULTS, READY, RESULTS), "reads results twice"),
    "a topic twice after a merge": (lambda: both().merge(Flow("g").source(READY)), "reads ready twice"),
    "a second source": (lambda: both().source(RESULTS), r"already has a source; read several with source\(a, b\)"),
    "a source that is no topic": (lambda: Flow("f").source(RESULTS, "ready"), "takes a Topic.*; got str"),  # type: ignore[arg-type]
    "topics of two clusters": (
        lambda: Flow("f").source(RESULTS, Topic("far", cluster="paris")),
        "different cluster= names; a flow reads from one Kafka cluster",
    ),
    "a merge with nothing": (lambda: both().merge(Flow("g")), r"flow 'g' has no source\(\): call it before merge"),
    "a merge of nothing": (lambda: Flow("g").merge(both()), r"flow 'g' has no source\(\)"),
    "a merge with a topic": (lambda: both().merge(READY), r"merge\(\) takes another flow; got Topic"),  # type: ignore[arg-type]
    "a merge after a stage": (
        lambda: counted(Flow("f").source(RESULTS)).merge(Flow("g").source(READY)),
        r"flow 'f' has stage 'part': call merge\(\) before the first aggregate",
    ),
    "a merge of a stage": (
        lambda: Flow("f").source(RESULTS).merge(counted(Flow("g").source(READY))),
        "flow 'g' has stage 'part'",
    ),
    "a column of two types": (
        lambda: both().filter(pl.col("id") == 1),
        r"filter\(\): column id is Int64 in results and String in ready; give it one type with map\(\) before merge",
    ),
    "keys of different types": (
        lambda: both().aggregate("a", "id", Fields(n=count())),
        "column id is Int64 in results",
    ),
    "a key that a topic lacks": (
        lambda: both().aggregate("a", "station", Fields(n=count())),
        "the key is column station, and results has no such column",
    ),
    "a column that no topic has": (
        lambda: both().filter("nothing"),
        "no column nothing; the columns are part, station",
    ),
    "an output twice": (
        lambda: Flow("f").source(RESULTS).publish("out").merge(Flow("g").source(READY)).publish("out"),
        "already publishes to out as 'f'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_definition_that_cannot_work_is_refused_with_the_remedy(case: str):
    define, text = REFUSED[case]
    with pytest.raises(FlowError, match=text):
        define()


def test_a_column_of_two_types_can_be_used_after_it_was_given_one():
    same = Flow("f").source(RESULTS).map(id=pl.col("id").cast(pl.String)).merge(Flow("g").source(READY))
    assert same.aggregate("a", "id", Fields(n=count())).stages[0].schema == {
        "part": pl.String(),
        "torque": pl.Int64(),
        "id": pl.String(),
        "station": pl.String(),
    }


def test_a_column_that_one_topic_lacks_is_a_key_where_a_step_defines_or_filters_it():
    assert both().map(station=pl.col("station").fill_null("none")).aggregate("a", "station", Fields(n=count())).stages
    assert both().filter(pl.col("station").is_not_null()).aggregate("a", "station", Fields(n=count())).stages


def test_a_flow_is_described_with_every_source_and_its_steps():
    flow = counted(Flow("line").source(RESULTS).filter(pl.col("torque") > 1).merge(Flow("b").source(READY)))
    assert [line.split()[:2] for line in flow.describe().splitlines()] == [
        ["line"],
        ["source", "results,"],
        ["filter", '[col("torque")'],
        ["source", "ready,"],
        ["merge", "results,"],
        ["aggregate", "part"],
    ]


def test_the_definition_of_a_stage_has_a_hash_of_every_source_in_any_order():
    alone, other, two, turned = (
        counted(Flow("line").source(*topics)).stages[0].definition
        for topics in ([RESULTS], [READY], [RESULTS, READY], [READY, RESULTS])
    )
    assert set(two.split("+")) == {alone, other}
    assert two == turned
    assert continues(two, alone)
    assert continues(two, two)
    assert not continues(alone, two)
    assert not continues(two, alone[:-1] + "x")


def test_a_source_can_be_added_and_the_states_go_on():
    store = fresh_store()
    one = Flow("line").source(RESULTS).aggregate("part", "part", Fields(n=count()))
    two = both().aggregate("part", "part", Fields(n=count()))
    with closing(runner(one, store)) as run:
        run.process([result(0), result(1)])
    with closing(runner(two, store)) as run:
        run.process([result(1), ready(0), result(2)])
        assert run.results("part") == {b"p": {"n": 4}}
        assert run.run.earlier == {"part": (one.stages[0].definition,)}
    with closing(runner(two, store)) as run:
        run.process([ready(0), ready(1)])
        assert run.results("part") == {b"p": {"n": 5}}


@pytest.mark.parametrize("changed", ["removed", "renamed", "other steps", "other policy"])
def test_a_source_that_is_removed_or_changed_is_refused(changed: str):
    store = fresh_store()
    flows = {
        "removed": Flow("line").source(RESULTS),
        "renamed": Flow("line").source(RESULTS, Topic("mirror", READY.payload, envelope=False)),
        "other steps": Flow("line").source(RESULTS).merge(Flow("b").source(READY).filter(pl.col("station") == "s1")),
        "other policy": Flow("line").source(RESULTS, Topic("ready", READY.payload)),
    }
    with closing(runner(both().aggregate("part", "part", Fields(n=count())), store)) as run:
        run.process([result(0), ready(0)])
    with pytest.raises(DefinitionChangedError, match="stage part has definition"):
        runner(flows[changed].aggregate("part", "part", Fields(n=count())), store)


def test_the_growth_of_one_topic_is_noted_for_it_alone():
    ends = {"results": {0: 2}, "ready": {0: 1}}
    run = runner(parts(both()), whole={topic: lambda topic=topic: ends[topic] for topic in ends})  # type: ignore[misc]
    run.process([result(0), ready(0)])
    assert run.run.evicts
    ends["ready"] = {0: 1, 1: 0}
    run.process([result(1)])
    assert list(run.run.growths) == ["ready"]
    assert isinstance(run.run.growths["ready"], Growth)
    assert not run.run.evicts
    assert list(run.run.manifest.growth if run.run.manifest else ()) == ["ready"]
    again = runner(parts(both()), next(iter(run.run.urls.values())))
    assert again.run.growths == run.run.growths


def test_one_key_in_partitions_of_two_topics_is_no_growth_and_in_two_of_one_it_is():
    run = runner(parts(both()))
    run.process([result(0, partition=0), ready(0, partition=1)])
    assert run.run.growths == {}
    run.process([ready(0, partition=0), ready(1, partition=1)])
    assert list(run.run.growths) == ["ready"]


def test_a_topic_that_was_created_again_starts_over_and_the_other_one_goes_on():
    store = fresh_store()
    ids = {"results": "R", "ready": "Y"}
    with closing(runner(parts(both()), store, topic_ids=ids)) as run:
        run.run.start_at("results", "R", {0: 0})
        run.run.start_at("ready", "Y", {0: 0})
        run.process([result(0), result(1), ready(0)])
    ids = {"results": "R", "ready": "Z"}
    with closing(runner(parts(both()), store, topic_ids=ids)) as run:
        run.run.start_at("results", "R", {0: 2})
        run.run.start_at("ready", "Z", {0: 0})
        assert run.run.start == {("results", 0): 2, ("ready", 0): 0}
        before = run.run.stores["part"].load_manifest(run.run.ref)
        assert before is not None
        assert before.positions["ready"][0].next_offset == 1, "not before a batch of the new topic is folded"
        fresh = Record("ready", 0, 0, b"p", ready(0).value, topic_id="Z")
        run.process([fresh, result(2)])
        assert run.results("part")[b"p"]["n"] == 5
        assert run.run.start == {("results", 0): 3, ("ready", 0): 1}


def test_a_source_that_is_added_when_another_was_created_again_does_not_note_the_new_offsets_too_early():
    store = fresh_store()
    one, two = (flow.aggregate("part", "part", Fields(n=count())) for flow in (Flow("line").source(RESULTS), both()))
    with closing(runner(one, store, topic_ids={"results": "R"})) as run:
        run.run.start_at("results", "R", {0: 0})
        run.process([result(0), result(1)])
    with closing(runner(two, store, topic_ids={"results": "Q", "ready": "Y"})) as run:
        run.run.start_at("results", "Q", {0: 0})
        run.run.start_at("ready", "Y", {0: 5})
        kept = run.run.stores["part"].load_manifest(run.run.ref)
        assert kept is not None
        assert {topic: dict(of) for topic, of in kept.positions.items()} == {
            "results": {0: kept.positions["results"][0]},
            "ready": {0: kept.positions["ready"][0]},
        }
        assert kept.positions["results"][0].next_offset == 2, "next to the former topic's id"
        assert kept.topic_ids == {"results": "R", "ready": "Y"}


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["latest"], "latest"),
        (["0:5,1:7"], {0: 5, 1: 7}),
        (["ready=latest"], {"ready": "latest"}),
        (["ready=0:5", "results=earliest"], {"ready": {0: 5}, "results": "earliest"}),
    ],
)
def test_a_start_position_is_for_all_topics_or_for_one(texts: Sequence[str], found: object):
    assert parse_all(texts) == found


@pytest.mark.parametrize("texts", [["latest", "earliest"], ["ready=latest", "ready=earliest"], ["ready=latest", "0:5"]])
def test_start_positions_that_contradict_each_other_are_refused(texts: Sequence[str]):
    with pytest.raises(FlowError, match="give one position, or one as TOPIC=POSITION for each topic"):
        parse_all(texts)


def test_start_positions_name_sources():
    topics = ["results", "ready"]
    assert checked_starts({"ready": "latest"}, topics) == {"ready": "latest"}
    assert [start_of({"ready": "latest"}, topic) for topic in topics] == ["earliest", "latest"]
    assert [start_of("latest", topic) for topic in topics] == ["latest", "latest"]
    with pytest.raises(FlowError, match="gives offsets; name their topic, one of results, ready"):
        checked_starts({0: 5}, topics)
    with pytest.raises(FlowError, match="names other, which is not a source of the flow; it reads results, ready"):
        checked_starts({"other": "latest"}, topics)
    with pytest.raises(FlowError, match="it takes earliest, latest"):
        checked_starts({"ready": "soon"}, topics)


def test_each_source_may_be_given_ends_of_its_own():
    run = runner(parts(both()), ends={TopicPartition("results", 0): 1})
    run.process([result(0), ready(0)])
    assert run.run.doubt == {}
