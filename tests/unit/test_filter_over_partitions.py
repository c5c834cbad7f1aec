"""A filter over all partitions as a step of a flow: one shuffle, and after a crash the same batch."""

import json
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from envelope.filters import EventIdFilter, deduplicate, deduplicate_by_key, from_value
from jobs.refolding.turns import spanned
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.support.letters import runner, url

MINUTE = timedelta(minutes=1)
ORDERS = Topic("legs", Json({"id": str, "k": str}), envelope=False)
RULES: list[Any] = [
    deduplicate(from_value("id"), MINUTE, partitions=3),
    EventIdFilter(from_value("id"), MINUTE, partitions=3, name="deduplicate"),
    deduplicate_by_key(MINUTE, key=from_value("id"), partitions=3),
]


def order(partition: int, offset: int, name: str | None) -> Record:
    body = json.dumps({"k": f"p{partition}"} | ({} if name is None else {"id": name})).encode()
    return Record("legs", partition, offset, b"%d-%d" % (partition, offset), body, 0, topic_id="T")


def flow_of(rule: Any) -> Flow[Any]:
    return Flow("spanning").source(ORDERS).deduplicate(rule).aggregate("k", "k", Fields(n=count()))


class Crash(Exception):
    pass


def crash() -> NoReturn:
    raise Crash


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_duplicates_of_several_partitions_are_dropped(rule: Any) -> None:
    run = runner(flow_of(rule))
    report = run.process([order(0, 0, "a"), order(1, 0, "a"), order(1, 1, "b"), order(2, 0, None), order(2, 1, None)])
    assert report.verdicts["deduplicate"] == {"accepted": 2, "duplicate": 1, "unidentified": 2}
    run.process([order(2, 2, "b"), order(2, 3, "c")])
    assert run.results("k") == {b"p0": {"n": 1}, b"p1": {"n": 1}, b"p2": {"n": 3}}


def test_the_states_are_named_by_their_number_and_read_in_one_shuffle() -> None:
    flow = flow_of(RULES[0])
    run = runner(flow)
    run.process([order(0, offset, f"e{offset}") for offset in range(30)])
    assert set(run.results("deduplicate")) == {b"0/3", b"1/3", b"2/3"}
    assert not flow.stages[0].aggregate.co_partitioned
    assert "IntervalFilter by id" in flow.describe()


def crashed(store: str) -> list[Record]:
    """Run a batch that dies when the stage after the filter is written; return the batch."""
    batch = [order(0, 0, "a"), order(0, 1, "b"), order(1, 0, "b"), order(1, 1, "a")]
    run = runner(flow_of(RULES[0]), store)
    with faults.use(Injector([Fault("persist:k", FaultOutcome.AFTER)], crash)), suppress(Crash):
        run.process(batch)
    return batch


def test_after_a_crash_the_batch_is_repeated_as_it_was_and_the_rest_is_another_one() -> None:
    store = url()
    batch = crashed(store)
    with closing(runner(flow_of(RULES[0]), store)) as again:
        assert again.unfinished == {TopicPartition("legs", 0): 2, TopicPartition("legs", 1): 2}
        more = [order(0, 2, "c"), order(1, 2, "c")]
        report = again.process([*batch[2:], *more[1:], *batch[:2], *more[:1]])
        assert report.batches == 2
        assert not again.unfinished
        assert again.results("k") == {b"p0": {"n": 3}}


def test_after_a_crash_a_part_of_the_batch_is_refused_because_it_would_pass_on_other_records() -> None:
    store = url()
    batch = crashed(store)
    again = runner(flow_of(RULES[0]), store)
    with pytest.raises(RunRefusedError, match=r"may have passed on records of legs:0 up to 2. Pass the whole batch"):
        again.process(batch[2:])


def test_a_flow_without_such_a_filter_repeats_no_batch() -> None:
    store = url()
    flow = Flow("plain").source(ORDERS).deduplicate(deduplicate_by_key(MINUTE)).aggregate("k", "k", Fields(n=count()))
    with faults.use(Injector([Fault("persist:k", FaultOutcome.AFTER)], crash)), suppress(Crash):
        runner(flow, store).process([order(0, 0, "a")])
    with closing(runner(flow, store)) as again:
        assert isinstance(again, MemoryRunner)
        assert again.unfinished == {}


def test_the_states_from_such_a_filter_on_depend_on_the_batches_and_are_left_out_of_an_audit() -> None:
    behind = Flow("f").source(ORDERS).deduplicate(deduplicate_by_key(MINUTE), name="own").deduplicate(RULES[0])
    assert list(spanned(behind.aggregate("k", "k", Fields(n=count())))) == ["deduplicate", "k"]
    assert not spanned(Flow("f").source(ORDERS).deduplicate(deduplicate_by_key(MINUTE)).publish("out"))
