"""What became of a record that was rejected: real flows and stores, with topics in memory."""

import json
from pathlib import Path

import pytest

from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, Reason, encode
from jobs.explaining.outcome import Fate, Outcome
from jobs.tracing import Place
from tests.support.explained import Sum, flow, mend, outcomes, send
from tests.support.topics import InMemory


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sum, "broken", True)


@pytest.fixture
def world(tmp_path: Path) -> InMemory:
    return InMemory(flow(), tmp_path)


def test_a_dead_letter_waits_until_it_is_redriven_and_folded(tmp_path: Path) -> None:
    world = InMemory(flow(fold=Sum()), tmp_path)
    send(world, 1)
    place = send(world, 2, v=5000)
    world.run()
    found = world.explain(place)
    assert (found.outcome, outcomes(found)) == (Outcome.DEAD_LETTER, [("first", Outcome.DEAD_LETTER)])
    assert found.stages[0].waits
    [letter] = found.letters
    assert (letter.fate, letter.reason, letter.stage, letter.place) == (
        Fate.WAITING,
        Reason.FOLD_FAILED,
        "first",
        Place("dead", 0, 0),
    )
    back = world.redrive(0)
    [letter] = world.explain(place).letters
    assert (letter.fate, letter.redriven) == (Fate.SENT, back)
    mend()
    world.run()
    found = world.explain(place)
    [letter] = found.letters
    assert (found.outcome, letter.fate, letter.redriven) == (Outcome.DEAD_LETTER, Fate.REDRIVEN, back)
    assert outcomes(found) == [("first", Outcome.FOLDED), ("second", Outcome.FOLDED)]
    redriven = world.explain(back)
    assert (redriven.outcome, redriven.taken_by) == (Outcome.FOLDED, None)
    [copy] = redriven.copies
    assert copy.resend is not None
    assert (copy.place, copy.resend.kind) == (place, "redrive")


def test_a_dead_letter_of_a_retry_topic_took_nobody_s_place_although_its_topic_is_not_read(tmp_path: Path) -> None:
    retried = Topic("raw-retry-0", Json({"k": str, "v": int}), retries={"raw": "raw-retry-*"})
    world = InMemory(Flow("fleet").source(retried).aggregate("first", "k", Sum()), tmp_path)
    body = json.dumps({"k": "K", "v": 5000}).encode()
    world.send(b"K", encode(Envelope(body, (Hop("raw", 0, 3, via="retrier"),), b"K")))
    world.run()
    back = world.redrive(0)
    mend()
    world.run()
    found = world.explain(back, dead_letters=None)
    assert (found.outcome, found.taken_by) == (Outcome.FOLDED, None)


@pytest.mark.parametrize("noted", [True, False], ids=["with its note", "without a note"])
def test_a_dead_letter_redriven_twice_names_the_first_redriven_record(tmp_path: Path, noted: bool) -> None:
    world = InMemory(flow(fold=Sum()), tmp_path)
    place = send(world, 1, v=5000)
    send(world, 2)
    world.run()
    mend()
    one, other = world.redrive(0, noted=noted), world.redrive(0, noted=noted)
    world.run()
    assert world.explain(one).outcome is Outcome.FOLDED
    found = world.explain(other)
    assert (found.outcome, found.taken_by and found.taken_by.place) == (Outcome.DROPPED, one)
    assert world.explain(place).letters[0].fate is Fate.REDRIVEN


def test_a_copy_that_fills_a_hole_is_what_became_of_the_letter(tmp_path: Path) -> None:
    world = InMemory(flow(fold=Sum()), tmp_path)
    place = send(world, 1, v=5000)
    world.run()
    mend()
    again = send(world, 1, v=5000)
    world.run()
    found = world.explain(place)
    assert (found.outcome, found.letters[0].fate) == (Outcome.DEAD_LETTER, Fate.FILLED)
    filled = world.explain(again)
    assert (filled.outcome, filled.taken_by) == (Outcome.FOLDED, None)


def test_a_diverted_record_is_a_dead_letter_that_the_ledger_lists(world: InMemory) -> None:
    place = send(world, 1, v=-1)
    world.run()
    found = world.explain(place)
    [letter] = found.letters
    assert (found.outcome, letter.fate, letter.reason) == (Outcome.DEAD_LETTER, Fate.WAITING, Reason.DIVERTED)
    assert found.stages[0].reason is Reason.DIVERTED


def test_a_record_that_cannot_be_read_is_a_dead_letter(world: InMemory) -> None:
    place = world.send(b"K", b"not an envelope")
    world.run()
    found = world.explain(place)
    [letter] = found.letters
    assert (found.outcome, letter.fate) == (Outcome.DEAD_LETTER, Fate.WAITING)
    assert found.lineage == ""


def test_an_expired_record_is_explained_from_its_dead_letter(tmp_path: Path) -> None:
    world = InMemory(flow(fold=Sum()), tmp_path)
    place = send(world, 1, v=5000)
    kept = send(world, 2)
    world.run()
    world.expire(kept)
    found = world.explain(place)
    assert (found.outcome, found.letters[0].fate) == (Outcome.DEAD_LETTER, Fate.WAITING)
    assert "retention has deleted the record since" in found.why
    expired = world.explain(kept)
    assert (expired.outcome, "read it" in expired.why) == (Outcome.EXPIRED, True)
