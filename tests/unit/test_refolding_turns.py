"""The turns of tables and sources, from the entries of a journal."""

from typing import Any

import pytest

from aggregations.engine.journal import Entry
from envelope import TopicPartition
from jobs.refolding.history import History
from jobs.refolding.turns import TurnsUnknownError, turns_of
from tests.support.flows import spending

FLOW = spending("payments", "merchants")


def entry(batch: int, *, epoch: int = 1, time_ms: int = 0, **read: tuple[int, int]) -> Entry:
    """A batch that read these offsets of partition 0 of topics."""
    return Entry("spending", epoch, batch, time_ms, {}, {topic: {0: its} for topic, its in read.items()})


def history(payments: tuple[int, int], merchants: tuple[int, int]) -> History:
    both = {"payments": payments, "merchants": merchants}
    first, end = ({topic: {0: its[which]} for topic, its in both.items()} for which in (0, 1))
    return History(first, end)


def turns(entries: list[Entry], found: History) -> list[tuple[int, int]]:
    """Offset of payments and of merchants at the end of each turn but the last."""
    places: Any = (TopicPartition("payments", 0), TopicPartition("merchants", 0))
    return [tuple(turn[place] for place in places) for turn in turns_of(entries, FLOW, found)]  # type: ignore[misc]


def test_batches_of_one_part_are_one_turn() -> None:
    entries = [
        entry(1, payments=(0, 0), merchants=(0, 5)),
        entry(2, payments=(0, 10), merchants=(5, 5)),
        entry(3, payments=(10, 20), merchants=(5, 5)),
        entry(4, payments=(20, 20), merchants=(5, 7)),
        entry(5, payments=(20, 30), merchants=(7, 7)),
    ]
    assert turns(entries, history((0, 30), (0, 7))) == [(0, 5), (20, 5), (20, 7)]
    assert turns(entries[::-1], history((0, 30), (0, 7))) == [(0, 5), (20, 5), (20, 7)]


def test_a_fold_that_begins_with_a_snapshot_takes_the_turns_after_it() -> None:
    entries = [entry(1, merchants=(0, 5), payments=(0, 0)), entry(2, payments=(0, 10), merchants=(5, 5))]
    entries += [entry(3, payments=(10, 10), merchants=(5, 6)), entry(4, payments=(10, 20), merchants=(6, 6))]
    assert turns(entries, history((4, 20), (5, 6))) == [(10, 5), (10, 6)]
    assert turns(entries[2:], history((10, 20), (5, 6))) == [(10, 6)]


def test_a_lost_entry_does_no_harm_if_only_one_part_was_read_meanwhile() -> None:
    first, second = entry(1, merchants=(0, 5), payments=(0, 0)), entry(2, payments=(0, 10), merchants=(5, 5))
    last = entry(4, payments=(20, 20), merchants=(5, 7))
    assert turns([first, second, last], history((0, 20), (0, 7))) == [(0, 5), (20, 5)]
    assert turns([first, last], history((0, 20), (0, 7))) == [(0, 5), (20, 5)]
    assert turns([first], history((0, 20), (0, 5))) == [(0, 5)]
    with pytest.raises(TurnsUnknownError, match="lacks batches: what was read after merchants:0:0 is unknown"):
        turns([last], history((0, 20), (0, 7)))
    with pytest.raises(TurnsUnknownError):
        turns([first, second], history((0, 20), (0, 7)))


def test_what_was_read_before_a_restore_does_not_count() -> None:
    entries = [
        entry(1, merchants=(0, 5), payments=(0, 0)),
        entry(2, payments=(0, 10), merchants=(5, 5)),
        entry(3, payments=(10, 20), merchants=(5, 5)),
        entry(4, payments=(20, 20), merchants=(5, 9)),
        entry(3, epoch=5, payments=(10, 10), merchants=(5, 9)),  # restored after batch 2
        entry(4, epoch=5, payments=(10, 20), merchants=(9, 9)),
    ]
    assert turns(entries, history((0, 20), (0, 9))) == [(0, 5), (10, 5), (10, 9)]


def test_what_was_read_before_the_stores_were_emptied_does_not_count() -> None:
    before = [
        entry(1, merchants=(0, 5), payments=(0, 0), time_ms=1),
        entry(2, payments=(0, 10), merchants=(5, 5), time_ms=2),
        entry(3, payments=(10, 10), merchants=(5, 9), time_ms=3),
    ]
    since = [
        entry(1, merchants=(0, 9), payments=(0, 0), time_ms=11),
        entry(2, payments=(0, 10), merchants=(9, 9), time_ms=12),
    ]
    assert turns([*before, *since], history((0, 10), (0, 9))) == [(0, 9)]
    assert turns([*since, *before], history((0, 10), (0, 9))) == [(0, 9)]


def test_a_history_of_one_part_has_one_turn() -> None:
    assert turns([], history((0, 20), (3, 3))) == []
