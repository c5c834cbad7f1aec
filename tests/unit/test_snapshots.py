"""States published as snapshots; the newest one wins."""

import itertools
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, mean, total
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import PAYLOAD_TYPE, Latest, Snapshot, read_snapshot
from envelope import Envelope, EnvelopeError, Reason, decode, encode
from tests.support.pure import fresh_store

FLOW = (
    Flow("fleet")
    .source(Topic("legs", Json({"tail": str, "air": int}), envelope=False))
    .aggregate("aircraft", "tail", Fields(legs=count(), minutes=mean("air")))
    .publish_states("aircraft.states")
)


def leg(offset: int, tail: str) -> Record:
    return Record("legs", 0, offset, tail.encode(), b'{"tail":"%s","air":10}' % tail.encode(), topic_id="i")


def snapshot(version: int, epoch: int = 1, attempt: int = 1, generation: int = 1, batch: int = 0) -> Snapshot:
    text = f"{generation}.{version}.{epoch}.{attempt}"
    return Snapshot("f", "s", generation, version, epoch, attempt, text, batch=batch)


def test_a_batch_publishes_one_snapshot_per_changed_key_with_what_readers_see() -> None:
    runner = MemoryRunner(FLOW, bind(FLOW, {}, "memory://snapshots"))
    runner.process([leg(0, "a"), leg(1, "a"), leg(2, "b")])
    found = {output.key: read_snapshot(output.value) for output in runner.outputs}
    assert found[b"a"] == Snapshot("fleet", "aircraft", 1, 1, 1, 1, {"legs": 2, "minutes": 10.0}, batch=1)
    assert set(found) == {b"a", b"b"}
    assert {output.topic for output in runner.outputs} == {"aircraft.states"}


def test_snapshots_of_sketches_have_their_results() -> None:
    flow = (
        Flow("fleet")
        .source(Topic("legs", Json({"tail": str, "air": int}), envelope=False))
        .aggregate("aircraft", "tail", Fields(kinds=approximate_distinct("air"), ranks=quantiles("air", at=[0.5])))
        .publish_states("aircraft.states")
    )
    runner = MemoryRunner(flow, bind(flow, {}, "memory://snapshots-sketches"))
    runner.process([leg(0, "a"), leg(1, "a")])
    assert [read_snapshot(output.value).state for output in runner.outputs] == [{"kinds": 1, "ranks": [10.0]}]


def test_a_batch_of_duplicates_publishes_nothing_and_the_next_version_follows_the_store_s() -> None:
    runner = MemoryRunner(FLOW, bind(FLOW, {}, "memory://snapshots-again"))
    for batch in ([leg(0, "a")], [leg(0, "a")], [leg(1, "a")]):
        runner.process(batch)
    assert [read_snapshot(output.value).version for output in runner.outputs] == [1, 2]


def test_a_newer_run_comes_before_a_later_attempt_of_an_older_one() -> None:
    latest = Latest([(b"k", snapshot(2, epoch=1, attempt=3))])
    assert latest.apply(b"k", snapshot(2, epoch=2, attempt=1))
    assert not latest.apply(b"k", snapshot(2, epoch=1, attempt=4))


def test_an_envelope_of_a_snapshot_says_where_it_belongs_and_what_it_is() -> None:
    runner = MemoryRunner(FLOW, bind(FLOW, {}, "memory://snapshots-envelope"))
    runner.process([leg(0, "a")])
    [output] = runner.outputs
    envelope = decode(output.value)
    assert (envelope.key, envelope.destination) == (b"a", "aircraft.states")
    assert (envelope.payload_type, envelope.content_type) == (PAYLOAD_TYPE, "application/json")


def test_a_key_of_which_nothing_was_folded_has_no_snapshot() -> None:
    strict = Fields(legs=count(), air=total(pl.col("tail").cast(pl.Int64)))
    flow = Flow("holes").source(FLOW.topic).aggregate("aircraft", "tail", strict).publish_states("aircraft.states")
    runner = MemoryRunner(flow, bind(flow, {}, "memory://snapshots-holes"))
    runner.process([leg(0, "one"), leg(1, "2")])
    assert [one.hole for one in runner.dead_letters] == [True]
    assert [output.key for output in runner.outputs] == [b"2"]


def test_whatever_the_order_of_arrival_the_newest_is_kept() -> None:
    every = [snapshot(1), snapshot(2), snapshot(2, epoch=2), snapshot(2, epoch=2, attempt=2), snapshot(1, generation=2)]
    for order in itertools.permutations(every):
        latest = Latest((b"k", one) for one in (*order, *order))
        assert latest.state(b"k") == "2.1.1.1"


def test_a_state_that_begins_anew_is_newer_although_its_version_is_lower() -> None:
    every = [snapshot(7, batch=0), snapshot(8, batch=8), snapshot(1, batch=9), snapshot(2, batch=10, attempt=2)]
    for order in itertools.permutations(every):
        assert Latest((b"k", one) for one in order).state(b"k") == "1.2.1.2"


@pytest.mark.parametrize("times", [{"expire_after": "10m"}, {"window": session("2m", retention="0s")}])
def test_readers_take_the_states_of_a_key_that_had_left_the_store(times: Any) -> None:
    topic = Topic("stops", Json({"bus": str, "at": int}), envelope=False, time="at")
    flow = Flow("stops").source(topic).aggregate("bus", "bus", Fields(n=count()), **times).publish_states("buses")

    def stop(offset: int, minute: int, bus: str = "b") -> Record:
        at_ms = 1_764_000_000_000 + minute * 60_000
        return Record("stops", 0, offset, bus.encode(), b'{"bus": "%s", "at": %d}' % (bus.encode(), at_ms), at_ms)

    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    for one in (stop(0, 0), stop(1, 1), stop(2, 2), stop(3, 40, "c"), stop(4, 41)):
        runner.process([one])
    assert runner.report.removed == {"bus": 1}
    last = [read_snapshot(one.value) for one in runner.outputs if one.key == b"b"][-1]
    assert last.version == 1
    for order in (runner.outputs, runner.outputs[::-1]):
        latest = Latest((one.key or b"", read_snapshot(one.value)) for one in order)
        assert latest.state(b"b") == last.state


def test_a_snapshot_that_is_not_newer_changes_nothing() -> None:
    latest = Latest()
    assert latest.apply(b"k", snapshot(2))
    assert not latest.apply(b"k", snapshot(2))
    assert not latest.apply(b"k", snapshot(1))
    assert latest.state(b"other") is None
    assert dict(latest) == {b"k": snapshot(2)}


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(EnvelopeError) as error:
        read_snapshot(encode(Envelope(b"{}", payload_type="something.else")))
    assert error.value.reason is Reason.UNKNOWN_PAYLOAD_TYPE
    with pytest.raises(EnvelopeError) as error:
        read_snapshot(encode(Envelope(b"{}", payload_type="headwater.snapshot.v1")))
    assert error.value.reason is Reason.BAD_PAYLOAD
