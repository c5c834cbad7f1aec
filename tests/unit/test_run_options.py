"""The options of a run: what they are for one flow, and what is refused before any server is asked."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.engine.options import Rebuilding, RunOptions
from aggregations.errors import FlowError
from aggregations.local import run_local
from aggregations.report import Report
from aggregations.spark import run_flow
from envelope import TopicPartition
from persistence.kafka import KafkaSettings
from persistence.manifest import Rebuilt

FLOW = (
    Flow("fleet")
    .source(Topic("legs", envelope=False))
    .aggregate("a", "value", Fields(n=count()), store="sqlite:///a.db")
    .aggregate("b", "value", Fields(n=count()))
)
KAFKA = KafkaSettings("nowhere:1")
REBUILDING = Rebuilding(Rebuilt(1, 7, "ann@host", "a test"), {TopicPartition("legs", 0): 5})


@pytest.mark.parametrize("runner", [run_local, run_flow])
@pytest.mark.parametrize("kafka", [None, "nowhere:1"])
def test_a_runner_needs_the_settings_of_its_cluster(runner: Callable[..., Report], kafka: KafkaSettings | None) -> None:
    with pytest.raises(FlowError, match=r"kafka= takes KafkaSettings, such as KafkaSettings.*; got (NoneType|str)"):
        runner(FLOW, RunOptions(kafka=kafka, stores="sqlite:///b.db"))


def test_options_without_a_cluster_are_checked_like_others() -> None:
    assert RunOptions(stores="sqlite:///b.db").checked(FLOW).kafka is None
    with pytest.raises(FlowError, match="--dead-letters legs is the flow's source"):
        RunOptions(stores="sqlite:///b.db", dead_letters="legs").checked(FLOW)


def test_one_store_is_that_of_all_stages_whose_definitions_name_none() -> None:
    assert RunOptions(stores="lmdb:///all").bound(FLOW).urls == {"a": "sqlite:///a.db", "b": "lmdb:///all"}
    assert RunOptions(stores={"b": "lmdb:///b"}).bound(FLOW).urls == {"a": "sqlite:///a.db", "b": "lmdb:///b"}
    with pytest.raises(FlowError, match="no store for stage b"):
        RunOptions().bound(FLOW)


def test_the_group_is_the_flow_s_unless_it_is_named_and_a_run_that_sends_nothing_has_none() -> None:
    options = RunOptions(stores="lmdb:///all")
    assert options.bound(FLOW).group == "fleet"
    assert replace(options, group="lag").bound(FLOW).group == "lag"
    for quiet in (replace(options, sends=False), replace(options, rebuilding=REBUILDING)):
        assert (quiet.bound(FLOW).group, quiet.bound(FLOW).sends) == (None, False)


def test_what_is_bound_and_checked_is_the_same_when_it_is_checked_again() -> None:
    options = RunOptions(kafka=KAFKA, stores="lmdb:///all", start=datetime(2026, 11, 24, tzinfo=UTC))
    for one in (options, replace(options, rebuilding=REBUILDING)):
        assert one.checked(FLOW).checked(FLOW) == one.bound(FLOW)


def test_options_can_be_sent_to_another_process() -> None:
    options = RunOptions(kafka=KAFKA, stores="lmdb:///all", rebuilding=REBUILDING).bound(FLOW)
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_runner_takes_options_or_their_fields() -> None:
    options = RunOptions(stores="memory://a", max_records=7)
    assert RunOptions.given("run_local", options, {}) is options
    assert RunOptions.given("run_local", None, {"stores": "memory://a", "max_records": 7}) == options
    with pytest.raises(
        FlowError, match=r"run_local\(\) takes options, or fields of RunOptions such as stores=, not both"
    ):
        RunOptions.given("run_local", options, {"stores": "memory://b"})
    with pytest.raises(FlowError, match=r"run_flow\(\) has no option store=; the options are kafka, stores"):
        RunOptions.given("run_flow", None, {"store": "memory://b"})
