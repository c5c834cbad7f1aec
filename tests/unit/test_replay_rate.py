"""How fast a plan's ranges are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError

from jobs.replaying import planning
from jobs.replaying.planning import RebuildRange, reading_rate
from persistence.kafka import KafkaSettings

END = KafkaError(KafkaError._PARTITION_EOF)


@dataclass
class Polled:
    """A message, or an error in the place of one."""

    failed: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failed


class Polls:
    """Consumer that returns one list after the other, then nothing more."""

    def __init__(self, lists: Iterator[list[Polled]]) -> None:
        self.lists = lists

    def consume(self, most: int, _: float) -> list[Polled]:
        return next(self.lists)[:most]

    def close(self) -> None:
        pass


def rate(monkeypatch: pytest.MonkeyPatch, lists: Sequence[list[Polled]]) -> int:
    polls = Polls(iter(lists))
    monkeypatch.setattr(planning, "Consumer", lambda _: polls)
    monkeypatch.setattr(planning, "assign", lambda *_: None)
    found = reading_rate(KafkaSettings("127.0.0.1:1"), [RebuildRange("t", 0, 0, 3), RebuildRange("t", 1, 0, 2)])
    assert found is not None
    assert list(polls.lists) == []
    return found.records


def test_the_end_of_a_partition_does_not_end_the_reading_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rate(monkeypatch, [[Polled(), Polled(), Polled(), Polled(END)], [Polled()], [Polled()]]) == 5


def test_the_reading_ends_with_the_last_partition_although_offsets_hold_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rate(monkeypatch, [[Polled(), Polled(END)], [Polled(), Polled(END)]]) == 2
