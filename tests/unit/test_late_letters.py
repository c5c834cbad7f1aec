"""Dead letters behind a lookup that come back too late: they are not folded, and leave the list of dead letters."""

import json
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.run.discard import fill_holes
from envelope import Node, Reason
from tests.support.both import TOPIC_ID, Both

NOW, MINUTE = 1_764_000_000_000, 60_000
PAYMENTS = Topic("payments", Json({"merchant": str, "at": int}), envelope=False, time="at")
MERCHANTS = Topic("merchants", Json({"category": str}), envelope=False)
CATEGORY = pl.col("category").fill_null("unknown")
TIMES: dict[str, dict[str, Any]] = {
    "windows": {"window": tumbling("10m")},
    "late windows": {"window": tumbling("10m", late="dead_letter")},
    "sessions": {"window": session("5m")},
    "expiry": {"expire_after": "10m"},
}


class Picky:
    """Refuses the payments of one merchant, until that is mended."""

    broken = True

    def zero(self) -> dict[str, int]:
        return {"n": 0}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if self.broken and element["merchant"] == "bad":
            raise ValueError
        return {"n": state["n"] + 1}

    def merge(self, state: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {"n": state["n"] + other["n"]}


def both_of(missing: str = "null", **times: Any) -> Both:
    first = Flow("payments").source(PAYMENTS).aggregate("all", pl.lit("all"), Fields(n=count()))
    looked = first.lookup("merchant", MERCHANTS, "merchant", columns=["category"], missing=missing)
    return Both(looked.aggregate("category", CATEGORY, Picky(), **times))


def merchant(offset: int, name: str, category: str | None) -> Record:
    value = None if category is None else json.dumps({"category": category}).encode()
    return Record("merchants", 0, offset, name.encode(), value, NOW, (), TOPIC_ID)


def paid(offset: int, minute: int, merchant: str = "good") -> Record:
    value = json.dumps({"merchant": merchant, "at": NOW + minute * MINUTE}).encode()
    return Record("payments", 0, offset, b"c", value, NOW + 60 * MINUTE, (), TOPIC_ID)


@pytest.mark.parametrize("times", list(TIMES))
def test_a_letter_that_is_too_late_leaves_the_list_with_its_verdict(
    times: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = both_of(**TIMES[times])
    both.process([paid(0, 0, "bad"), paid(1, 1)])
    [letter] = both.dead_letters
    assert (letter.reason, letter.hole) == (Reason.FOLD_FAILED, False)
    assert both.run.ledger.listed.keys() == {"category"}
    both.process([paid(2, 30)])
    monkeypatch.setattr(Picky, "broken", False)
    both.process([both.redriven(letter, 3)])
    assert both.run.ledger.listed == {}
    verdict = "below_floor" if times == "expiry" else "window_closed"
    assert both.memory.report.verdicts["category"][verdict] == 1
    assert [reason for _, reason in both.reasons()[1:]] == [Reason.WINDOW_CLOSED] * (times == "late windows")
    both.process([both.redriven(letter, 4)])
    verdicts = both.memory.report.verdicts["category"]
    assert (verdicts["accepted"], verdicts["redriven"]) == (2, 0)
    assert both.run.ledger.listed == {}


def test_a_letter_that_is_in_time_is_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = both_of(expire_after="10m")
    both.process([paid(0, 5, "bad"), paid(1, 4)])
    monkeypatch.setattr(Picky, "broken", False)
    both.process([paid(2, 12)])
    for offset in (3, 4):
        both.process([both.redriven(both.dead_letters[0], offset)])
    assert both.results("category") == {b"unknown": {"n": 3}}
    assert both.memory.report.verdicts["category"] == {"rejected": 1, "accepted": 2, "redriven": 1, "duplicate": 1}
    assert both.run.ledger.listed == {}


def test_a_plain_copy_that_is_too_late_leaves_the_letter_listed() -> None:
    both = both_of(expire_after="10m")
    both.process([paid(0, 0, "bad"), paid(1, 30)])
    listed = both.run.ledger.listed
    assert listed.keys() == {"category"}
    both.process([paid(2, 0, "bad")])
    assert both.run.ledger.listed == listed


def test_a_letter_whose_row_is_gone_stays_listed_until_it_is_folded_or_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = both_of("drop")
    both.process([merchant(0, "bad", "food")])
    both.process([paid(0, 0, "bad"), paid(1, 1, "bad")])
    monkeypatch.setattr(Picky, "broken", False)
    both.process([merchant(1, "bad", None)])
    first, second = both.dead_letters
    both.process([both.redriven(first, 2)])
    assert both.results("category") == {}
    assert {*both.run.ledger.listed} == {"category"}

    runner, letter = both.memory, both.redriven(second, 1)
    for apply in (False, True):
        assert fill_holes(runner.run, [letter], apply=apply) == {Node("payments", 0, 1, TOPIC_ID): 1}
    assert fill_holes(runner.run, [letter], apply=True) == {Node("payments", 0, 1, TOPIC_ID): 0}
    runner.process([merchant(2, "bad", "toys")])
    runner.process([both.redriven(first, 3), both.redriven(second, 4)])
    assert runner.results("category") == {b"toys": {"n": 1}}
    assert runner.run.ledger.listed == {}
