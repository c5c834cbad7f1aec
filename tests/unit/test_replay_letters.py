"""Dead letters of a rebuild that the swap drops: their holes are filled, wherever the command dies, or none is dropped."""

import json
from contextlib import closing
from typing import Any

import msgspec
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.held import HELD, HeldLetter, held_letters
from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, encode
from envelope.deadletter import DeadLetterHeaders, Form
from jobs.replaying.generations import begin_rebuild, generations_of
from jobs.replaying.leaving import drop_letters, send_letters
from persistence.commit.faults import use
from persistence.kafka import KafkaSettings
from persistence.manifest import Rebuilt
from persistence.protocol import Write
from persistence.seal import seal
from tests.support.letters import Legs
from tests.support.pure import fresh_store
from tests.support.replays import CrashAt, author_of, dies

NAMES = {"known": True}


def tail(element: Element[Any]) -> Any:
    return element["tail"] if NAMES["known"] else element["missing"]


FLOW = (
    Flow("fleet")
    .source(Topic("legs", Json({"tail": str, "carrier": str})))
    .aggregate("aircraft", tail, Fields(legs=count()))
    .aggregate("carrier", "carrier", Legs())
)
PAYLOADS = [*(json.dumps({"tail": "N1", "carrier": one}).encode() for one in ("AA", "bad", "AA", "bad")), b"no JSON"]
VALUES = [*(encode(Envelope(payload, key=b"N1")) for payload in PAYLOADS), encode(Envelope(b"damaged"))[:-1]]
RECORDS = [Record("legs", 0, n, b"N1", value, topic_id="L") for n, value in enumerate(VALUES)]


class Site:
    """Generation 2 has folded the records in a rebuild, and holds four dead letters: the keys of two are unknown."""

    def __init__(self) -> None:
        self.urls = {"aircraft": fresh_store(), "carrier": fresh_store()}
        MemoryRunner(FLOW, self.urls, topic_ids={"legs": "L"}).close()
        with generations_of(FLOW, self.urls) as found:
            _, self.note = begin_rebuild(found, author_of("rebuild"), live=1, redefined=False)
        with closing(self.run(self.note)) as run:
            run.process(RECORDS)
            store, ref = run.run.stores["aircraft"], run.run.ref.stage(HELD)
            assert len(run.dead_letters) == 4
            for number, dead in enumerate(run.dead_letters):
                one = dead.record
                facts = DeadLetterHeaders(
                    *(one.topic, one.partition, one.offset, dead.reason),
                    topic_id="L",
                    stage=dead.stage,
                    application="fleet",
                    generation=2,
                    hole=dead.hole,
                    form=Form.ENVELOPE,
                )
                held = HeldLetter("dead", one.key, one.value, facts.headers())
                write = Write(b"%d" % number, 0, seal(msgspec.json.encode(held)), due=run.run.epoch)
                store.save(ref, [write], epoch=run.run.epoch, batch=1)

    def run(self, note: Rebuilt | None) -> MemoryRunner:
        return MemoryRunner(FLOW, self.urls, generation=2, rebuilt=note, topic_ids={"legs": "L"})

    def drop(self) -> int:
        with generations_of(FLOW, self.urls) as found:
            return drop_letters(found, 2, self.note)

    def waiting(self) -> tuple[int, int, int]:
        """Holes, entries of the ledger, and held dead letters."""
        with generations_of(FLOW, self.urls) as found, closing(self.run(self.note)) as run:
            states = [*run.states("aircraft").values(), *run.states("carrier").values()]
            holes = sum(len(held) for state in states for held in state.histories.holes.values())
            return holes, len(run.run.ledger.listed), len([*held_letters(found.stores[0], found.ref(2))])


def test_nothing_waits_for_them_afterwards_and_copies_are_dropped() -> None:
    land = Site()
    holes, listed, held = land.waiting()
    assert (holes, held) == (2, 4)
    assert listed
    assert land.drop() == 4
    assert land.waiting() == (0, 0, 0)
    assert land.drop() == 0
    with closing(land.run(land.note)) as run:
        assert run.results("carrier") == {b"AA": {"legs": 2}, b"bad": {"legs": 0}}
        before = {stage: run.results(stage) for stage in ("aircraft", "carrier")}
        run.process(RECORDS)
        assert {stage: run.results(stage) for stage in ("aircraft", "carrier")} == before


@pytest.mark.parametrize("applied", [False, True])
def test_it_is_repeated_after_a_crash_at_any_effect(*, applied: bool) -> None:
    land = Site()
    with use(CrashAt(0, applied=False)) as counted:
        land.drop()
    begun = counted.reached
    for nth in range(1, begun + 1):
        land = Site()
        if dies(land.drop, nth, applied=applied):
            land.drop()
        assert land.waiting() == (0, 0, 0), nth


def test_after_a_crash_what_is_left_is_dropped_and_not_sent() -> None:
    land = Site()
    with use(CrashAt(0, applied=False)) as counted:
        land.drop()
    land = Site()
    assert dies(land.drop, counted.reached, applied=False)
    with generations_of(FLOW, land.urls) as found, pytest.raises(RunRefusedError, match="--letters drop"):
        send_letters(found, 2, KafkaSettings("127.0.0.1:1"))
    assert land.drop() == 4
    assert land.waiting() == (0, 0, 0)


def test_none_is_dropped_if_the_key_of_one_cannot_be_found_any_more() -> None:
    land = Site()
    before = land.waiting()
    NAMES["known"] = False
    try:
        with pytest.raises(RunRefusedError, match=r"2 of its dead letters cannot be dropped.*without --letters drop"):
            land.drop()
    finally:
        NAMES["known"] = True
    assert land.waiting() == before
