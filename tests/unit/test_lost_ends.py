"""Where a log lost what was read of it, by the leader epoch of the last record."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from envelope import TopicPartition
from jobs.republish import offsets
from jobs.republish.offsets import lost_ends
from persistence.kafka.facts import Watermarks

PLACE = TopicPartition("t", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A log whose leader has epoch 4; records of epoch 3 end at 10."""
    found = SimpleNamespace(high=20, records=[*range(10)], settings=None)
    found.epoch_ends = lambda asked: {place: 10 for place, epoch in asked.items() if epoch == 3}

    class Blocks:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> "Blocks":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, blocks: Mapping[int, tuple[int, int]]) -> Iterator[int]:
            ((first, end),) = blocks.values()
            return (offset for offset in found.records if first <= offset < end)

    monkeypatch.setattr(offsets, "BlockReader", Blocks)
    return found


def lost(log: Any, offset: int, epoch: int | None) -> int | None:
    marks = {PLACE: Watermarks(0, log.high, 4)}
    return lost_ends(log, {PLACE: (offset, epoch)}, marks).get(PLACE)


def test_what_was_read_of_an_epoch_beyond_its_end_is_lost(log: Any) -> None:
    log.records = [*range(20)]
    assert (lost(log, 15, 3), lost(log, 10, 3), lost(log, 15, 4), lost(log, 15, None)) == (10, None, None, None)


def test_a_log_that_is_shorter_lost_its_end_whatever_is_known_of_epochs(log: Any) -> None:
    log.high = 10
    assert (lost(log, 15, 3), lost(log, 15, 4), lost(log, 15, None)) == (10, 10, 10)


def test_markers_of_transactions_that_a_later_leader_wrote_are_no_loss(log: Any) -> None:
    """The last record is at 9, in epoch 3; its transaction was committed in epoch 4, by a marker at 10."""
    assert lost(log, 11, 3) is None
    log.records.append(10)
    assert lost(log, 11, 3) == 10
