"""What `explain` says about records that a filter of the flow judged."""

import json
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, Reason, Verdict, encode
from envelope.filters import (
    EventIdFilter,
    ProducerFilter,
    Scope,
    SequenceFilter,
    TimeWindows,
    deduplicate_by_key,
    distinct,
    from_envelope,
    from_value,
)
from jobs.explaining.outcome import AtStage, Explanation, Fate, Outcome
from jobs.tracing import Place
from tests.support.explained import decided, outcomes
from tests.support.topics import InMemory

MINUTE = timedelta(minutes=1)
ORDERS = Topic("orders", Json({"k": str, "n": int}))
NUMBERS = SequenceFilter(from_value("n"))
FOLD = Fields(n=count())


def filtered(rule: Any, *more: Any, fold: bool = True) -> Flow[Any]:
    flow: Flow[Any] = Flow("counted").source(ORDERS)
    for one in (rule, *more):
        flow = flow.deduplicate(one)
    return flow.aggregate("k", "k", FOLD) if fold else flow.publish("out")


def send(world: InMemory, n: int | None, k: str = "K", **at: Any) -> Place:
    body = json.dumps({"k": k} if n is None else {"k": k, "n": n}).encode()
    stamp: dict[str, Any] = {} if n is None else {"event_id": f"e{n}", "producer": "till", "sequence": n}
    return world.send(k.encode(), encode(Envelope(body, key=k.encode(), **stamp)), **at)


def sent(rule: Any, numbers: Sequence[int | None], *more: Any, fold: bool = True) -> tuple[InMemory, list[Place]]:
    world = InMemory(filtered(rule, *more, fold=fold))
    places = [send(world, n) for n in numbers]
    world.run()
    return world, places


def row_of(found: Explanation, stage: str) -> AtStage:
    [row] = [row for row in found.stages if row.stage == stage]
    return row


@pytest.mark.parametrize(
    "rule",
    [NUMBERS, EventIdFilter(from_envelope("event_id"), MINUTE), ProducerFilter(), deduplicate_by_key(MINUTE, name="x")],
    ids=lambda rule: rule.name,
)
def test_a_record_that_a_filter_dropped_is_explained_with_its_verdict_and_the_earlier_record(rule: Any) -> None:
    world, places = sent(rule, [1, 7, 7])
    found = world.explain(places[2])
    earlier = places[0] if rule.name == "x" else places[1]
    assert (found.outcome, found.taken_by) == (Outcome.DROPPED, None)
    assert outcomes(found) == [(rule.name, Outcome.DROPPED)]
    row = row_of(found, rule.name)
    assert (row.verdict, row.earlier) == (Verdict.DUPLICATE, earlier)
    assert found.why == f"stage {rule.name}: the filter drops it because of {earlier}"
    assert row.as_json()["earlier"] == str(earlier)


def test_a_record_that_a_filter_passed_on_is_folded_behind_it() -> None:
    world, places = sent(NUMBERS, [1, 7, 7])
    found = world.explain(places[1])
    assert outcomes(found) == [("sequence", Outcome.FOLDED), ("k", Outcome.FOLDED)]
    assert row_of(found, "sequence").why == "the filter passed it on"
    assert row_of(found, "sequence").earlier is None


def test_a_flow_that_only_filters_and_publishes_is_explained_too() -> None:
    world, places = sent(NUMBERS, [1, 7, 3], fold=False)
    assert world.explain(places[1]).outcome is Outcome.FOLDED
    assert world.explain(places[1]).outputs == ("out",)
    dropped = world.explain(places[2])
    assert (dropped.outcome, dropped.outputs) == (Outcome.DROPPED, ())
    assert row_of(dropped, "sequence").verdict is Verdict.BELOW_FLOOR


def test_the_second_of_two_filters_is_the_one_that_dropped_a_record() -> None:
    world, places = sent(NUMBERS, [1, 2], deduplicate_by_key(MINUTE))
    found = world.explain(places[1])
    assert outcomes(found) == [("sequence", Outcome.FOLDED), ("deduplicate", Outcome.DROPPED)]
    assert row_of(found, "deduplicate").earlier == places[0]


def test_a_copy_of_the_same_event_is_dropped_by_its_position_before_the_filter() -> None:
    world = InMemory(filtered(NUMBERS))
    chain = (Hop("raw", 0, 5, via="wrap", index=0, count=1, topic_id="R"),)
    places = [world.send(b"K", encode(Envelope(b'{"k":"K","n":%d}' % n, chain, b"K"))) for n in (1, 2)]
    world.run()
    found = world.explain(places[1])
    assert found.taken_by is not None
    assert (found.outcome, found.taken_by.place) == (Outcome.DROPPED, places[0])
    assert found.why == f"stage sequence: {places[0]} is the same event and came first"


def test_the_verdict_is_known_also_if_the_earlier_record_is_not() -> None:
    world, places = sent(distinct(TimeWindows(MINUTE)), [1, 2])
    assert row_of(world.explain(places[1]), "distinct").verdict is Verdict.DUPLICATE
    assert row_of(world.explain(places[1]), "distinct").earlier is None


def test_where_the_search_does_not_reach_back_the_states_behind_the_filter_decide() -> None:
    world, places = sent(NUMBERS, [9, 3, 1, 4, 11])
    dropped = world.explain(places[2], search=1)
    assert outcomes(dropped) == [("sequence", Outcome.DROPPED)]
    assert row_of(dropped, "sequence").why == (
        f"the filter drops it because of {places[1]}, or of a record that was not searched: stage k does not have it"
    )
    alone = row_of(world.explain(places[3], search=1), "sequence")
    assert (alone.outcome, alone.verdict, alone.earlier) == (Outcome.DROPPED, None, None)
    assert alone.why == "the filter dropped it: stage k does not have it"
    passed = world.explain(places[4], search=1)
    assert outcomes(passed) == [("sequence", Outcome.FOLDED), ("k", Outcome.FOLDED)]
    assert row_of(passed, "sequence").why == "the filter passed it on: stage k has it"


def test_without_a_state_behind_the_filter_and_all_records_before_nothing_shows_what_it_did() -> None:
    world, places = sent(NUMBERS, [9, 1, 10], fold=False)
    found = world.explain(places[2], search=1)
    assert found.outcome is Outcome.UNDECIDED
    assert "nothing among the 1 offsets before it makes the filter drop it" in found.why


def test_a_filter_by_key_is_decided_by_the_states_behind_it() -> None:
    # Partitions may have been added since the key's first record.
    world, places = sent(SequenceFilter(from_value("n"), scope_by=Scope.KEY), [5, 5, 6])
    dropped = row_of(world.explain(places[1]), "sequence")
    assert (dropped.outcome, dropped.verdict, dropped.earlier) == (Outcome.DROPPED, Verdict.DUPLICATE, places[0])
    assert world.explain(places[2]).outcome is Outcome.FOLDED


def test_a_record_that_the_filter_rejected_is_a_dead_letter_that_waits() -> None:
    world, places = sent(NUMBERS, [1, None, 2])
    found = world.explain(places[1])
    assert found.outcome is Outcome.DEAD_LETTER
    [letter] = found.letters
    assert (letter.stage, letter.reason, letter.fate) == ("sequence", Reason.MISSING_FIELD, Fate.WAITING)


def test_a_rejected_record_is_found_without_the_dead_letter_topic() -> None:
    world, places = sent(NUMBERS, [1, None, 2])
    row = row_of(world.explain(places[1], dead_letters=None), "sequence")
    assert (row.outcome, row.waits) == (Outcome.DEAD_LETTER, True)


def test_a_record_that_was_not_read_yet_is_not_judged() -> None:
    world, _ = sent(NUMBERS, [1])
    assert world.explain(send(world, 2)).outcome is Outcome.NOT_READ


RULES = [
    NUMBERS,
    SequenceFilter(from_value("n"), scope_by=Scope.KEY),
    EventIdFilter(from_envelope("event_id"), timedelta(milliseconds=20), limit=5),
    ProducerFilter(),
    deduplicate_by_key(timedelta(milliseconds=3), name="interval"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__} {getattr(rule, 'scope_by', '')}")
@pytest.mark.parametrize("search", [5, 1000])
def test_what_is_said_of_a_record_is_what_the_filter_did(rule: Any, search: int) -> None:
    settled = {Outcome.FOLDED: 0, Outcome.DROPPED: 0}
    for seed in range(4):
        draw = random.Random(seed)
        world, places = InMemory(filtered(rule)), []
        for n in range(60):
            number = draw.choice([n, n, n, max(n - 3, 0), max(n - 9, 0)])
            partition = draw.randrange(2)
            places.append(send(world, number, f"{partition}-{draw.randrange(2)}", partition=partition, timestamp_ms=n))
        truth = decided(world, draw.choice([1, 7, 60]))
        for place in places:
            passed = truth.get(("k", place), False)
            outcome = world.explain(place, search=search).outcome
            assert outcome is (Outcome.FOLDED if passed else Outcome.DROPPED), (seed, place)
            settled[outcome] += 1
    assert min(settled.values()) > 20
