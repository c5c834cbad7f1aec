"""What became of a record: real flows and stores, with topics in memory."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from envelope import Envelope, Hop, Verdict, encode
from jobs.environment import UsageError
from jobs.explaining.find import find_records
from jobs.explaining.outcome import Fate, Outcome
from jobs.tracing import Place
from tests.support.explained import FOLDS, LEGS, Sum, flow, keys, mend, outcomes, send
from tests.support.topics import InMemory


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sum, "broken", True)


@pytest.fixture
def world(tmp_path: Path) -> InMemory:
    return InMemory(flow(), tmp_path)


def test_a_folded_record_is_in_the_states_of_every_stage(world: InMemory) -> None:
    place = send(world, 1)
    send(world, 2)
    world.run()
    found = world.explain(place)
    assert (found.outcome, found.taken_by, found.copies, found.letters) == (Outcome.FOLDED, None, (), ())
    assert outcomes(found) == [("first", Outcome.FOLDED), ("second", Outcome.FOLDED)]
    assert keys(found.stages) == [b"K", b"UA"]
    assert (found.event_id, found.key, found.lineage) == ("e1", b"K", "raw:0:1 -> legs:0:0")
    assert [one.version for one in found.stages] == [1, 1]


def test_the_batch_is_the_last_that_added_to_the_lane_and_its_commit_is_known(world: InMemory) -> None:
    place = send(world, 1)
    world.run(clock=lambda: 5.0)
    batch = world.explain(place).stages[0].batch
    assert batch is not None
    assert (batch.batch, batch.epoch, batch.time_ms, batch.exact) == (1, 1, 5000, False)
    send(world, 2)
    world.run(clock=lambda: 9.0)
    later = world.explain(place).stages[0].batch
    assert later is not None
    assert (later.batch, later.time_ms) == (2, 9000)


def test_a_record_that_was_sent_again_is_dropped_and_the_first_one_and_the_republisher_are_named(
    world: InMemory,
) -> None:
    first = send(world, 1)
    send(world, 2)
    again = send(world, 1)
    world.run(size=1)
    found = world.explain(again)
    assert found.outcome is Outcome.DROPPED
    assert outcomes(found) == [("first", Outcome.DROPPED)]
    assert found.stages[0].verdict is Verdict.DUPLICATE
    assert found.taken_by is not None
    assert found.taken_by.place == first
    assert found.taken_by.resend is not None
    assert (found.taken_by.resend.via, str(found.taken_by.resend.read)) == ("wrap", "raw:0:1")
    kept = world.explain(first)
    assert (kept.outcome, [copy.place for copy in kept.copies]) == (Outcome.FOLDED, [again])


def test_a_copy_in_another_partition_is_named_and_the_event_is_folded_once(tmp_path: Path) -> None:
    world = InMemory(flow(), tmp_path)
    one = send(world, 1, timestamp_ms=10)
    other = send(world, 1, partition=1, timestamp_ms=20)
    world.run()
    found = world.explain(one)
    assert found.outcome is Outcome.FOLDED
    assert [copy.place for copy in found.copies] == [other]
    assert str(other) in found.why
    assert "read first" in found.why


def test_a_copy_on_another_lane_of_a_stage_took_the_place(tmp_path: Path) -> None:
    by_carrier: Flow[Any] = Flow("fleet").source(LEGS).aggregate("carriers", "c", FOLDS)
    world = InMemory(by_carrier, tmp_path)
    one = send(world, 1)
    other = send(world, 1, partition=1)
    world.run()
    assert world.explain(one).outcome is Outcome.FOLDED
    found = world.explain(other)
    assert (found.outcome, found.stages[0].verdict) == (Outcome.DROPPED, Verdict.DUPLICATE)
    assert str(one) in found.why


def test_below_the_floor_the_searched_records_decide(world: InMemory) -> None:
    place = send(world, 0)
    for root in range(1, 50):
        send(world, root)
    again = send(world, 0)
    world.run()
    found = world.explain(place)
    assert (found.outcome, "came first and in order" in found.why) == (Outcome.FOLDED, True)
    dropped = world.explain(again)
    assert (dropped.outcome, dropped.stages[0].verdict) == (Outcome.DROPPED, Verdict.BELOW_FLOOR)
    assert dropped.taken_by is not None
    assert dropped.taken_by.place == place
    unsure = world.explain(again, search=10)
    assert (unsure.outcome, unsure.taken_by) == (Outcome.UNDECIDED, None)
    assert "10 offsets" in unsure.why


def test_an_overtaken_record_below_the_floor_is_undecided(world: InMemory) -> None:
    for root in range(1, 50):
        send(world, root)
    late = send(world, 0)
    world.run()
    assert world.explain(late).outcome is Outcome.UNDECIDED


def test_a_filtered_record_names_the_step(world: InMemory) -> None:
    place = send(world, 1, v=0)
    world.run()
    found = world.explain(place)
    assert (found.outcome, outcomes(found)) == (Outcome.REMOVED, [("first", Outcome.REMOVED)])
    assert "filter(" in found.why
    assert '"v"' in found.why


def test_a_record_that_nobody_has_read_says_what_is_read_next(world: InMemory) -> None:
    place = send(world, 1)
    assert world.explain(place).outcome is Outcome.NOT_READ
    assert "never ran" in world.explain(place).why
    world.run()
    after = send(world, 2)
    found = world.explain(after)
    assert (found.outcome, found.why) == (Outcome.NOT_READ, "the flow reads offset 1 of this partition next")
    assert (found.event_id, found.stages) == ("e2", ())


def test_a_record_that_expired_before_it_was_read_is_lost(world: InMemory) -> None:
    send(world, 1)
    world.run()
    lost = send(world, 2)
    send(world, 3)
    world.expire(lost)
    found = world.explain(lost)
    assert (found.outcome, found.why) == (Outcome.EXPIRED, "retention deleted it before the flow read it")


def items(element: Element[Any]) -> list[dict[str, Any]]:
    return [{**element.value, "c": one} for one in element["c"].split("+") if one]


def test_every_item_of_a_flat_map_is_followed(tmp_path: Path) -> None:
    made: Flow[Any] = Flow("shared").source(LEGS).flat_map(items).aggregate("carriers", lambda one: one["c"], Sum())
    world = InMemory(made, tmp_path)
    place, empty = send(world, 1, c="AA+UA"), send(world, 2, c="")
    broken = send(world, 3, c="AA+DL", v=5000)
    world.run()
    found = world.explain(place)
    assert [(one.indices, one.key, one.outcome) for one in found.stages] == [
        ((0,), b"AA", Outcome.FOLDED),
        ((1,), b"UA", Outcome.FOLDED),
    ]
    assert outcomes(world.explain(empty)) == [("carriers", Outcome.REMOVED)]
    assert [(one.key, one.outcome, one.waits) for one in world.explain(broken).stages] == [
        (b"AA", Outcome.DEAD_LETTER, True),
        (b"DL", Outcome.DEAD_LETTER, True),
    ]


def test_a_branch_that_took_an_element_is_named(tmp_path: Path) -> None:
    made: Flow[Any] = Flow("fleet").source(LEGS).branch("small", pl.col("v") < 5, lambda one: one.publish("small"))
    world = InMemory(made.aggregate("first", "k", FOLDS), tmp_path)
    place = send(world, 1)
    world.run()
    found = world.explain(place)
    assert (found.outcome, found.why, found.outputs) == (
        Outcome.REMOVED,
        "stage first: branch small took it",
        ("small",),
    )


def test_a_stage_that_emits_is_followed_with_what_it_makes_of_its_state_now(tmp_path: Path) -> None:
    made: Flow[Any] = Flow("emitting").source(LEGS)
    made = made.aggregate(
        "first", lambda one: one["k"], Sum(), emit=lambda one, state: [{**one.value, "n": state["n"]}]
    )
    world = InMemory(made.aggregate("second", lambda one: one["c"], Sum()), tmp_path)
    place = send(world, 1)
    send(world, 2)
    world.run()
    assert outcomes(world.explain(place)) == [("first", Outcome.FOLDED), ("second", Outcome.FOLDED)]


def test_a_flow_without_a_stage_names_where_it_published(tmp_path: Path) -> None:
    made: Flow[Any] = Flow("relay").source(LEGS).filter(pl.col("v") > 0).publish("out")
    world = InMemory(made, tmp_path)
    place, gone = send(world, 1), send(world, 2, v=0)
    world.run()
    found = world.explain(place)
    assert (found.outcome, found.outputs, found.stages) == (Outcome.PUBLISHED, ("out",), ())
    assert world.explain(gone).outcome is Outcome.REMOVED


@pytest.mark.parametrize("window", [tumbling("1m"), session("1m")], ids=str)
def test_a_closed_window_without_the_record_dropped_it(tmp_path: Path, window: Any) -> None:
    made: Flow[Any] = Flow("fleet").source(Topic("legs", Json({"k": str, "at": int}), time="at"))
    world = InMemory(made.aggregate("minutes", "k", Fields(n=count()), window=window), tmp_path)

    def at(root: int, seconds: int) -> Place:
        body = json.dumps({"k": "K", "at": seconds * 1000}).encode()
        hop = Hop("raw", 0, root, via="wrap", index=0, topic_id="R")
        return world.send(b"K", encode(Envelope(body, (hop,), b"K")), timestamp_ms=10_000_000)

    on_time, _, late = at(1, 10), at(2, 200), at(3, 20)
    world.run()
    found = world.explain(on_time)
    key = b"K@1970-01-01T00:00:00Z" if window == tumbling("1m") else b"K"
    assert (found.outcome, keys(found.stages)) == (Outcome.FOLDED, [key])
    dropped = world.explain(late)
    assert (dropped.outcome, dropped.stages[0].verdict) == (Outcome.DROPPED, Verdict.WINDOW_CLOSED)


def test_a_window_that_was_published_dropped_what_an_added_partition_delivered(tmp_path: Path) -> None:
    made: Flow[Any] = Flow("fleet").source(Topic("legs", Json({"k": str, "at": int}), envelope=False, time="at"))
    stage = made.aggregate("minutes", "k", Fields(n=count()), window=tumbling("1m"))
    world = InMemory(stage.publish_states("final", on="close"), tmp_path)

    def at(seconds: int, partition: int) -> Place:
        body = json.dumps({"k": "K", "at": seconds * 1000}).encode()
        return world.send(b"K", body, partition=partition, timestamp_ms=10_000_000)

    at(10, 0), at(200, 0)
    world.run()
    late = at(30, 1)
    world.run()
    dropped = world.explain(late)
    assert (dropped.outcome, dropped.stages[0].verdict) == (Outcome.DROPPED, Verdict.WINDOW_CLOSED)


def test_a_record_that_the_state_lacks_contradicts_the_flow(world: InMemory, tmp_path: Path) -> None:
    place = send(world, 1)
    other = send(world, 2, k="OTHER")
    world.run()
    # Its key was another one when it was read.
    [record] = [one for one in world.topics["legs"][0] if one and one.offset == other.offset]
    changed = encode(
        Envelope(b'{"k": "NEW", "c": "UA", "v": 1}', (Hop("raw", 0, 2, via="wrap", index=0, topic_id="R"),))
    )
    world.topics["legs"][0][other.offset] = type(record)(
        *("legs", 0, other.offset, b"NEW", changed, 0, (), record.topic_id)
    )
    assert world.explain(place).outcome is Outcome.FOLDED
    found = world.explain(other)
    assert (found.outcome, found.stages[0].why) == (Outcome.MISSING, "the store has no state of its key")


def test_a_topic_that_was_created_again_is_not_read(world: InMemory) -> None:
    send(world, 1)
    world.run()
    world.recreate("legs")
    place = send(world, 1)
    found = world.explain(place)
    assert (found.outcome, "created again" in found.why) == (Outcome.NOT_READ, True)


def test_offsets_without_a_record_are_refused(world: InMemory) -> None:
    send(world, 1)
    for place, what in (
        (Place("legs", 0, 1), "no record has this offset yet"),
        (Place("legs", 3, 0), "no record has this offset yet"),
    ):
        with pytest.raises(UsageError, match=what):
            world.explain(place)
    world.topics["legs"][0][0] = None
    with pytest.raises(UsageError, match="compacted"):
        world.explain(Place("legs", 0, 0))


def test_a_tombstone_is_removed_by_the_source(world: InMemory) -> None:
    place = world.send(b"K", None)
    world.run()
    found = world.explain(place)
    assert (found.outcome, "no value" in found.why) == (Outcome.REMOVED, True)


def test_a_record_of_a_topic_without_envelopes_is_its_own_root(tmp_path: Path) -> None:
    plain = Topic("legs", Json({"k": str, "v": int}), envelope=False)
    made: Flow[Any] = Flow("plain").source(plain).aggregate("first", "k", Sum())
    world = InMemory(made, tmp_path)
    place = world.send(b"K", b'{"k": "K", "v": 1}')
    bad = world.send(b"K", b'{"k": "K", "v": 5000}')
    world.run()
    found = world.explain(place)
    assert (found.outcome, found.lineage) == (Outcome.FOLDED, "legs:0:0")
    mend()
    back = world.redrive(0)
    world.run()
    assert world.explain(back).outcome is Outcome.FOLDED
    assert world.explain(bad).letters[0].fate is Fate.REDRIVEN


def test_records_are_found_by_their_event_id_and_by_what_they_were_made_of(world: InMemory) -> None:
    one, other = send(world, 1), send(world, 2)
    again = send(world, 1)
    assert find_records(world.flow, "e1", world) == [one, again]
    assert find_records(world.flow, Place("raw", 0, 2), world) == [other]
    assert find_records(world.flow, "e1", world, ["legs:0:1-2"]) == [again]
    assert find_records(world.flow, "e9", world) == []


def test_a_json_object_has_every_field(world: InMemory) -> None:
    place = send(world, 1)
    send(world, 1)
    world.run()
    found = json.loads(json.dumps(world.explain(place).as_json()))
    assert found["outcome"] == "folded"
    assert found["copies"][0]["sent_again_by"] == "wrap"
    assert found["stages"][0]["in_batch"]["batch"] == 1
