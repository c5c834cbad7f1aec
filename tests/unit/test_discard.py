"""Discarding dead letters: their holes are filled under every key that has one, and nothing is folded."""

import json
import uuid
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import RunRefusedError
from aggregations.report import DeadLetter as Died
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.discard import fill_holes
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, EnvelopeError, Hop, Node, Reason, Tombstones, encode
from envelope.deadletter import DeadLetterHeaders, Form
from jobs.dead_letters import discard as discarding
from jobs.dead_letters.letters import Selection, StoredDeadLetter
from jobs.dead_letters.redrive import redriven
from persistence.kafka import KafkaSettings
from tests.support.letters import Legs

BROKEN = {"now": False}


def sold(element: Element[Any], state: Any) -> list[dict[str, Any]]:
    return [{**element.value, "carrier": one} for one in element["carrier"].split("+")]


def tail(element: Element[Any]) -> Any:
    if BROKEN["now"]:
        raise ValueError
    return element["tail"]


FLOW = (
    Flow("fleet")
    .source(Topic("legs", Json({"tail": str, "carrier": str}), envelope=False))
    .aggregate("aircraft", tail, Fields(legs=count()), emit=sold)
    .aggregate("carrier", lambda element: element["carrier"], Legs(), history=2)
)


def leg(offset: int, carrier: str) -> Record:
    return Record("legs", 0, offset, b"N1", json.dumps({"tail": "N1", "carrier": carrier}).encode(), topic_id="L")


@pytest.fixture
def runner() -> MemoryRunner:
    return MemoryRunner(FLOW, bind(FLOW, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})


def back(run: MemoryRunner) -> list[Record]:
    """The dead letters as they would be redriven, each to its place."""
    return back_of(run.dead_letters)


def back_of(letters: list[Died]) -> list[Record]:
    records = []
    for n, dead in enumerate(letters):
        one = dead.record
        facts = DeadLetterHeaders(
            one.topic, one.partition, one.offset, None, "L", stage=dead.stage, application="fleet", hole=dead.hole
        )
        value = redriven(one.key, one.value, (), facts, Hop("dead", 0, n))
        records.append(Record(one.topic, one.partition, one.offset, one.key, value, topic_id="L"))
    return records


def holes(run: MemoryRunner) -> dict[bytes, int]:
    return {key: sum(map(len, state.histories.holes.values())) for key, state in run.states("carrier").items()}


def test_every_key_of_a_record_loses_its_hole_and_keeps_what_it_had(runner: MemoryRunner) -> None:
    runner.process([leg(0, "AA"), leg(1, "AA+bad"), leg(2, "AA")])
    assert holes(runner) == {b"AA": 1, b"bad": 1}
    assert fill_holes(runner.run, back(runner), apply=False) == {Node("legs", 0, 1, "L"): 2}
    assert holes(runner) == {b"AA": 1, b"bad": 1}
    assert fill_holes(runner.run, back(runner), apply=True) == {Node("legs", 0, 1, "L"): 2}
    assert holes(runner) == {b"AA": 0, b"bad": 0}
    assert runner.results("carrier") == {b"AA": {"legs": 2}, b"bad": {"legs": 0}}
    assert runner.results("aircraft") == {b"N1": {"legs": 3}}
    assert fill_holes(runner.run, back(runner), apply=True) == {Node("legs", 0, 1, "L"): 0}


def test_what_was_given_up_is_held_as_if_it_had_been_folded(runner: MemoryRunner) -> None:
    runner.process([leg(0, "AA"), leg(1, "AA+bad"), leg(2, "AA")])
    fill_holes(runner.run, back(runner), apply=True)
    again = [Record("legs", 0, 3, one.key, one.value, topic_id="L") for one in back(runner)]
    assert runner.process(again).verdicts["carrier"] == {"duplicate": 2}
    assert runner.process([leg(4, "bad"), leg(5, "AA")]).verdicts["carrier"] == {"rejected": 1, "accepted": 1}
    assert runner.results("carrier") == {b"AA": {"legs": 3}, b"bad": {"legs": 0}}


def test_a_root_that_does_not_name_its_topic_s_id_is_found_where_it_stood() -> None:
    topic = Topic("legs", Json({"tail": str, "carrier": str}))
    flow = Flow("chained").source(topic).aggregate("carrier", lambda element: element["carrier"], Legs())
    ids = {"legs": "L", "raw": "R"}
    run = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"), topic_ids=ids)
    payload = b'{"tail": "N1", "carrier": "bad"}'
    value = encode(Envelope(payload, (Hop("raw", 0, 7, via="kit", index=0),)))
    run.process([Record("legs", 0, 0, b"N1", value, topic_id="L")])
    assert holes(run) == {b"bad": 1}
    assert fill_holes(run.run, back(run), apply=True) == {Node("legs", 0, 0, "L"): 1}
    assert holes(run) == {b"bad": 0}


def test_below_the_floor_it_is_a_copy_and_is_never_folded(runner: MemoryRunner) -> None:
    runner.process([leg(0, "AA"), leg(1, "AA+bad"), *(leg(n, "AA") for n in range(2, 9))])
    fill_holes(runner.run, back(runner), apply=True)
    again = [Record("legs", 0, 10, one.key, one.value, topic_id="L") for one in back(runner)]
    assert runner.process(again).verdicts["carrier"] == {"copy": 1, "duplicate": 1}
    assert runner.results("carrier")[b"AA"] == {"legs": 8}


def test_a_letter_whose_key_the_flow_does_not_find_any_more_is_told_with_the_reason(runner: MemoryRunner) -> None:
    runner.process([leg(0, "bad")])
    BROKEN["now"] = True
    try:
        found = fill_holes(runner.run, back(runner), apply=True)
    finally:
        BROKEN["now"] = False
    [error] = found.values()
    assert isinstance(error, EnvelopeError)
    assert error.reason is Reason.TRANSFORM_FAILED
    assert holes(runner) == {b"bad": 1}


def test_in_a_source_with_a_cluster_letters_are_found_where_they_died() -> None:
    topic = Topic("legs", Json({"tail": str, "carrier": str}), envelope=False, cluster="paris")
    flow = Flow("fleet").source(topic).aggregate("carrier", lambda element: element["carrier"], Legs())
    run = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})
    unread = Record("legs", 0, 1, b"N1", b"no JSON", topic_id="L")
    unusable = Record("legs", 0, 2, b"N1", b"", topic_id="L")
    run.process([leg(0, "bad"), unread, unusable])
    letters = back_of([dead for dead in run.dead_letters if dead.record is not unusable])
    found = fill_holes(run.run, letters, unreadable=[unusable.node], apply=True)
    assert found == {leg(0, "bad").node: 1, unread.node: 1, unusable.node: 1}
    assert (sum(holes(run).values()), run.run.ledger.listed) == (0, {})


SPLIT = (
    Flow("fleet")
    .source(Topic("legs", Json({"tail": str, "carrier": str}), envelope=False))
    .flat_map(lambda element: [{"carrier": one} for one in element["carrier"].split("+")])
    .divert(lambda element: element["carrier"] == "A")
    .aggregate("first", lambda element: element["carrier"], Fields(legs=count()))
    .divert(lambda element: element["carrier"] == "B")
    .aggregate("second", lambda element: element["carrier"], Legs())
)


class Found(list[StoredDeadLetter]):
    """Dead letters in place of those of a topic."""

    @property
    def total(self) -> int:
        return len(self)


def lay(monkeypatch: pytest.MonkeyPatch, run: MemoryRunner) -> None:
    """Put a run's dead letters where `discard` finds them."""
    found = Found()
    for n, dead in enumerate(run.dead_letters):
        one = dead.record
        facts = DeadLetterHeaders(
            *(one.topic, one.partition, one.offset, dead.reason, "L"),
            stage=dead.stage,
            application="fleet",
            hole=dead.hole,
            items=dead.items,
            form=Form.ENVELOPE if run.flow.source_of(one.topic).envelope else Form.PAYLOAD,
        )
        found.append(StoredDeadLetter(Hop("dead", 0, n), one.key, one.value, facts.headers(), facts))
    monkeypatch.setattr(discarding, "Letters", lambda *_: found)


@pytest.mark.parametrize("items", ["A+B", "A+bad"])
def test_of_a_record_with_two_letters_the_one_that_is_meant_is_given_up(
    monkeypatch: pytest.MonkeyPatch, items: str
) -> None:
    stores = bind(SPLIT, {}, f"memory://{uuid.uuid4()}")
    with closing(MemoryRunner(SPLIT, stores, topic_ids={"legs": "L"})) as run:
        run.process([leg(0, items)])
        lay(monkeypatch, run)

    def given_up(*stages: str) -> dict[str, int]:
        meant = Selection(stages=frozenset(stages))
        result = discarding.discard(KafkaSettings("nowhere:1"), "dead", SPLIT, stores, selection=meant, apply=True)
        assert not result.unusable
        return {stage: count for (_, stage, _), count in result.done.items()}

    assert given_up("second") == {"second": 1}
    assert given_up("second") == {}
    assert given_up("first") == {"first": 1}
    assert given_up() == {}


def test_both_letters_of_a_record_are_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = bind(SPLIT, {}, f"memory://{uuid.uuid4()}")
    with closing(MemoryRunner(SPLIT, stores, topic_ids={"legs": "L"})) as run:
        run.process([leg(0, "A+B")])
        lay(monkeypatch, run)
    result = discarding.discard(KafkaSettings("nowhere:1"), "dead", SPLIT, stores, apply=True)
    assert sorted(result.done) == [("legs", "first", "diverted"), ("legs", "second", "diverted")]
    with closing(begin(SPLIT, stores)) as after:
        assert after.ledger.listed == {}


def test_letters_of_another_generation_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = bind(SPLIT, {}, f"memory://{uuid.uuid4()}")
    with closing(MemoryRunner(SPLIT, stores, topic_ids={"legs": "L"})) as run:
        run.process([leg(0, "A+B")])
        lay(monkeypatch, run)
    begin(SPLIT, stores, generation=2).close()
    for generation, left in ((1, 0), (2, 2)):
        result = discarding.discard(KafkaSettings("nowhere:1"), "dead", SPLIT, stores, generation=generation)
        assert (result.dead_letters, result.left, result.done.total()) == (2, left, 2 - left)
        assert not result.no_hole
    with pytest.raises(RunRefusedError, match="generation 3: the stores contain nothing of it"):
        discarding.discard(KafkaSettings("nowhere:1"), "dead", SPLIT, stores, generation=3)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": b"another"}, Reason.KEY_MISMATCH),
        ({"destination": "elsewhere"}, Reason.WRONG_DESTINATION),
        ({"chain": (Hop("legs", 0, 7, via="kit", index=0),)}, Reason.CHAIN_LOOP),
    ],
)
def test_an_envelope_that_does_not_belong_to_its_record_can_be_given_up(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: Reason
) -> None:
    flow = Flow("fleet").source(Topic("legs", Json({"tail": str, "carrier": str}))).aggregate("s", "tail", Legs())
    stores = bind(flow, {}, f"memory://{uuid.uuid4()}")
    with closing(MemoryRunner(flow, stores, topic_ids={"legs": "L"})) as run:
        value = encode(Envelope(b'{"tail": "N1", "carrier": "AA"}', **fields))
        run.process([Record("legs", 0, 0, b"N1", value, topic_id="L")])
        assert run.run.ledger.listed
        lay(monkeypatch, run)
    for done in (1, 0):
        result = discarding.discard(KafkaSettings("nowhere:1"), "dead", flow, stores, apply=True)
        assert (result.done, result.no_hole) == (Counter({("legs", "", reason.value): 1} if done else {}), 1 - done)
        with closing(begin(flow, stores)) as after:
            assert after.ledger.listed == {}


@pytest.mark.parametrize("stage", ["first", "second"])
def test_the_hole_of_a_tombstone_can_be_given_up(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    class Strict(Legs):
        def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
            raise ValueError

    class Lenient(Legs):
        def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
            return {"legs": state["legs"] + 1}

    folds = {name: Strict() if name == stage else Lenient() for name in ("first", "second")}
    topic = Topic("legs", Json({"tail": str, "carrier": str}), tombstones=Tombstones.ELEMENT)
    flow = Flow("fleet").source(topic)
    for name, fold in folds.items():
        flow = flow.aggregate(name, lambda element: element.key.decode(), fold)
    stores = bind(flow, {}, f"memory://{uuid.uuid4()}")
    with closing(MemoryRunner(flow, stores, topic_ids={"legs": "L"})) as run:
        run.process([Record("legs", 0, 0, b"N1", None, topic_id="L")])
        lay(monkeypatch, run)
        [hole] = run.states(stage)[b"N1"].histories.holes.values()
    result = discarding.discard(KafkaSettings("nowhere:1"), "dead", flow, stores, apply=True)
    assert (sum(result.done.values()), result.unusable) == (len(hole), {})
    with closing(MemoryRunner(flow, stores, topic_ids={"legs": "L"})) as run:
        assert run.states(stage)[b"N1"].histories.holes == {}
        run.process([Record("legs", 0, 0, b"N1", None, topic_id="L")])
        assert run.dead_letters == []
        assert run.results(stage) == {b"N1": {"legs": 0}}


@pytest.mark.parametrize("crashed", [False, True])
def test_a_discard_leaves_no_doubt_unless_the_run_before_it_did(monkeypatch: pytest.MonkeyPatch, crashed: bool) -> None:
    class NoLetters(list[Any]):
        total = 0

    monkeypatch.setattr(discarding, "Letters", lambda *_: NoLetters())
    stores = bind(FLOW, {}, f"memory://{uuid.uuid4()}")
    run = MemoryRunner(FLOW, stores, topic_ids={"legs": "L"})
    run.process([leg(0, "AA")])
    if not crashed:
        run.close()
    discarding.discard(KafkaSettings("nowhere:1"), "dead", FLOW, stores, apply=True)
    assert begin(FLOW, stores).crashed is crashed
