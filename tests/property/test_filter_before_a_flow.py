"""A filter in front of a flow: what the flow folds is what the filter passes on, once, whatever crashes."""

import json
import random

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition, decode
from envelope.filters import SequenceFilter, from_value
from persistence import StoredFilter, StoreError
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.seeds.test_000_sequence_filter import incidents
from tests.support.pure import fresh_store

FLOW = (
    Flow("incidents")
    .source(Topic("incidents", payload=Json({"id": int, "data": str}), envelope=False))
    .aggregate("incident", key=lambda element: element.key.decode(), fold=Fields(messages=count()))
)
RULE = SequenceFilter(from_value("id"))
WITHOUT = {b"A": 6, b"B": 5, b"C": 4}
WITH = {b"A": 4, b"B": 4, b"C": 3}


class Crash(Exception):
    pass


def crash():
    raise Crash


def run(records: list[Record], *, filtered: bool, injected: list[Fault], seed: int) -> tuple[dict[bytes, int], int]:
    """The counts, with a new filter and a new runner on the same stores after each crash; and the number of crashes."""
    draw, crashes = random.Random(seed), 0
    states, positions = fresh_store(), fresh_store()
    with faults.use(Injector(injected, crash)):
        while True:
            try:
                runner = MemoryRunner(FLOW, bind(FLOW, {}, states))
                stored = StoredFilter(RULE, positions)
                start = stored.start if filtered else runner.run.start
                left = [
                    one for one in records if one.offset >= start.get(TopicPartition("incidents", one.partition), 0)
                ]
                while left:
                    size = draw.randrange(1, 5)
                    batch, left = left[:size], left[size:]
                    if filtered:
                        stored.process(batch, lambda made: runner.process([record for record, _ in made.passed]))
                    else:
                        runner.process(batch)
                return {key: one["messages"] for key, one in runner.results("incident").items()}, crashes
            except (Crash, StoreError):
                crashes += 1


def test_without_a_filter_the_copies_of_the_producer_are_counted() -> None:
    assert run(incidents("ABC".index), filtered=False, injected=[], seed=0) == (WITHOUT, 0)


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_with_the_filter_each_message_is_counted_once_whatever_crashes(partitions: int) -> None:
    crashes = 0
    for seed in range(40):
        draw = random.Random(seed)
        points = ["epoch", "load", "fold", "publish", "persist", "manifest", "persist:sequence", "persist:incident"]
        injected = [Fault(draw.choice(points), draw.choice(list(FaultOutcome)), draw.randrange(1, 8)) for _ in range(3)]
        records = incidents(lambda incident: "ABC".index(incident) % partitions)
        counts, crashed = run(records, filtered=True, injected=injected, seed=seed)
        assert counts == WITH
        crashes += crashed
    assert crashes > 40


def test_the_states_of_the_filter_written_before_those_of_the_flow_would_lose_messages(monkeypatch) -> None:
    def wrong(publish, stages, manifests):
        for _, persist in stages:
            persist()
        publish()
        for _, save in manifests:
            save()

    monkeypatch.setattr("persistence.stored_filter.commit", wrong)
    fault = Fault("persist:incident", FaultOutcome.BEFORE, 2)
    counts, crashes = run(incidents("ABC".index), filtered=True, injected=[fault], seed=0)
    assert crashes == 1
    assert sum(counts.values()) < sum(WITH.values())


PIPELINE = Flow("pipeline").source(FLOW.topic).publish("output", key=lambda element: element.key)
"""The article's `input -> filter -> output`: behind the filter a flow without a stage."""
COUNTS = (
    Flow("counts")
    .source(Topic("output", payload=Json({"id": int, "data": str})))
    .aggregate("incident", key=lambda element: element.key.decode(), fold=Fields(messages=count()))
)


def piped(records: list[Record], injected: list[Fault], seed: int) -> tuple[list[tuple[bytes, bytes]], int]:
    """Key and value of everything in the output topic, and the number of crashes."""
    draw, crashes, output = random.Random(seed), 0, []
    states, positions = fresh_store(), fresh_store()
    with faults.use(Injector(injected, crash)):
        while True:
            try:
                runner = MemoryRunner(PIPELINE, bind(PIPELINE, {}, states))
                stored = StoredFilter(RULE, positions)
                left = [one for one in records if one.offset >= stored.start.get(("incidents", one.partition), 0)]
                while left:
                    size = draw.randrange(1, 5)
                    batch, left = left[:size], left[size:]
                    before = len(runner.outputs)
                    try:
                        stored.process(batch, lambda made: runner.process([record for record, _ in made.passed]))
                    finally:
                        output += [(message.key, message.value) for message in runner.outputs[before:]]
                return output, crashes
            except (Crash, StoreError):
                crashes += 1


def test_the_pipeline_of_the_article_from_input_through_the_filter_to_output() -> None:
    output, crashes = piped(incidents(lambda incident: 0), [], 0)
    assert crashes == 0
    assert [json.loads(decode(value).payload)["id"] for _, value in output] == list(range(1, 12))


def test_what_the_pipeline_publishes_again_after_a_crash_is_dropped_by_the_flows_that_read_it() -> None:
    repeated = 0
    for seed in range(20):
        draw = random.Random(seed)
        points = ["publish", "persist:sequence", "manifest"]
        injected = [Fault(draw.choice(points), draw.choice(list(FaultOutcome)), draw.randrange(1, 8)) for _ in range(3)]
        output, _ = piped(incidents(lambda incident: 0), injected, seed)
        repeated += len(output) - sum(WITH.values())
        reader = MemoryRunner(COUNTS, bind(COUNTS, {}, fresh_store()))
        reader.process([Record("output", 0, offset, key, value) for offset, (key, value) in enumerate(output)])
        assert {key: one["messages"] for key, one in reader.results("incident").items()} == WITH
    assert repeated > 20
