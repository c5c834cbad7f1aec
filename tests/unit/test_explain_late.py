"""What `explain` and `blame` say about late events, copies of dead letters, and siblings without an index."""

import json
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping, tumbling
from envelope import Envelope, Hop, Siblings, Verdict, encode
from jobs.explaining.blame import _Count
from jobs.explaining.copies import Events
from jobs.explaining.outcome import Outcome
from jobs.tracing import Place
from tests.support.explained import outcomes, send
from tests.support.topics import InMemory

TIMED = Topic("legs", Json({"k": str, "at": int}), envelope=False, time="at")
COUNT = Fields(n=count())
LATE = [
    ({"window": tumbling("10s")}, Verdict.WINDOW_CLOSED),
    ({"window": hopping("10s", "5s")}, Verdict.WINDOW_CLOSED),
    ({"window": session("5s")}, Verdict.WINDOW_CLOSED),
    ({"expire_after": "10s"}, Verdict.BELOW_FLOOR),
]


def at(world: InMemory, seconds: int, key: str = "K", partition: int = 0) -> Place:
    body = json.dumps({"k": key, "at": seconds * 1000}).encode()
    return world.send(key.encode(), body, partition=partition, timestamp_ms=seconds * 1000)


@pytest.mark.parametrize(("options", "verdict"), LATE, ids=lambda one: next(iter(one)) if isinstance(one, dict) else "")
def test_an_event_that_came_too_late_for_the_first_of_two_stages_was_dropped_there(
    options: dict[str, Any], verdict: Verdict
) -> None:
    made: Flow[Any] = Flow("fleet").source(TIMED).aggregate("one", "k", COUNT, **options)
    world = InMemory(made.aggregate("two", pl.lit("all"), COUNT))
    at(world, 1000), at(world, 1030)
    late = at(world, 1017)
    world.run()
    found = world.explain(late)
    assert {*outcomes(found)} == {("one", Outcome.DROPPED)}
    assert {row.verdict for row in found.stages} == {verdict}


def test_an_event_whose_session_left_the_store_is_not_called_dropped_because_its_key_returned() -> None:
    made: Flow[Any] = Flow("fleet").source(TIMED).aggregate("one", "k", COUNT, window=session("5m"))
    world = InMemory(made)
    days = [(100, "a"), (100, "b"), (105, "b"), (106, "a")]
    first, *_ = [at(world, day * 86_400, key) for day, key in days]
    world.run(size=1)
    found = world.explain(first)
    assert (found.outcome, found.stages[0].verdict) == (Outcome.UNDECIDED, None)
    assert "has left the store" in found.why


def test_the_stage_behind_a_window_that_has_left_shows_what_it_passed_on() -> None:
    made: Flow[Any] = Flow("fleet").source(TIMED).aggregate("one", "k", COUNT, window=tumbling("10s", retention="0s"))
    world = InMemory(made.aggregate("two", pl.lit("all"), COUNT))
    counted = at(world, 1000, partition=0)
    at(world, 1030)
    world.run(size=1)
    late = at(world, 1001, "x", partition=1)
    world.run()
    assert outcomes(world.explain(counted)) == [("one", Outcome.FOLDED), ("two", Outcome.FOLDED)]
    assert outcomes(world.explain(late)) == [("one", Outcome.DROPPED)]


def test_what_a_stage_emits_from_a_state_that_has_changed_is_not_called_missing() -> None:
    made: Flow[Any] = Flow("fleet").source(Topic("legs", Json({"k": str, "c": str, "v": int})))
    made = made.aggregate("one", "k", COUNT, emit=Emit(c="c", n="new.n"))
    world = InMemory(made.aggregate("two", "n", COUNT))
    first = send(world, 1)
    send(world, 2)
    world.run(size=1)
    found = world.explain(first)
    assert outcomes(found) == [("one", Outcome.FOLDED), ("two", Outcome.UNDECIDED)]
    assert "emits what it makes of its state" in found.why


@pytest.mark.parametrize("size", [1, 10])
def test_a_copy_of_a_dead_letter_that_waits_behind_a_stage_was_dropped_by_that_stage(size: int) -> None:
    made: Flow[Any] = Flow("fleet").source(Topic("legs", Json({"k": str, "c": str, "v": int})))
    made = made.aggregate("one", "k", COUNT).divert(pl.col("v") < 0).aggregate("two", "c", COUNT)
    world = InMemory(made)
    first, copy = send(world, 1, v=-1), send(world, 1, v=-1)
    world.run(size=size)
    assert world.explain(first).outcome is Outcome.DEAD_LETTER
    found = world.explain(copy)
    assert (outcomes(found), found.taken_by and found.taken_by.place) == ([("one", Outcome.DROPPED)], first)


def sibling(world: InMemory, root: int, k: str = "K") -> Place:
    body = json.dumps({"k": k, "v": 1}).encode()
    return world.send(b"K", encode(Envelope(body, (Hop("raw", 0, root, via="foreign", topic_id="R"),), b"K")))


def siblings(policy: Siblings) -> InMemory:
    topic = Topic("legs", Json({"k": str, "v": int}), siblings=policy)
    return InMemory(Flow("fleet").source(topic).aggregate("one", "k", COUNT))


def test_siblings_of_one_batch_are_folded_as_a_group_and_blamed_on_nobody() -> None:
    world = siblings(Siblings.GROUP)
    places = [sibling(world, 10) for _ in range(3)]
    world.run()
    assert [world.explain(place).outcome for place in places] == [Outcome.FOLDED] * 3
    counted, events = _Count(), Events(world.flow, {"raw": "R"})
    for record in filter(None, world.topics["legs"][0]):
        counted.add(record, events.of(record))
    assert (counted.resent, counted.grouped) == (0, 2)


def test_without_a_journal_later_siblings_of_several_batches_are_undecided() -> None:
    world = siblings(Siblings.GROUP)
    places = [sibling(world, 10) for _ in range(3)]
    world.run(size=1)
    said = [world.explain(place).outcome for place in places]
    assert said == [Outcome.FOLDED, Outcome.UNDECIDED, Outcome.UNDECIDED]


@pytest.mark.parametrize("policy", [Siblings.DROP, Siblings.EVENT_ID])
def test_all_but_the_first_sibling_of_a_key_are_dropped(policy: Siblings) -> None:
    world = siblings(policy)
    places = [sibling(world, 10, key) for key in "KKL"]
    world.run()
    found = [world.explain(place) for place in places]
    assert [one.outcome for one in found] == [Outcome.FOLDED, Outcome.DROPPED, Outcome.FOLDED]
    assert found[1].stages[0].verdict is Verdict.AMBIGUOUS
