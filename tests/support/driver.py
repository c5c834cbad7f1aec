"""A driver of a run whose tasks are given by the test, and whose broker is in memory. No Spark is started."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine import batches
from aggregations.engine.engine import Engine
from aggregations.engine.job import Job, TaskReport
from aggregations.engine.opening import Opening
from aggregations.engine.options import RunOptions
from aggregations.engine.ranges import Range
from aggregations.report import Report
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from envelope import TopicPartition
from persistence.kafka import KafkaSettings
from persistence.kafka.facts import Watermarks
from tests.support.jobs import changed
from tests.support.pure import fresh_store

ENDS = {TopicPartition("legs", 0): 5, TopicPartition("legs", 1): 7}
Outcome = tuple[TaskReport, Sequence[Exception]]


def items(element: Any) -> list[Any]:
    return [element.value]


def flow(*, scatters: bool = False) -> Flow[Any]:
    made: Flow[Any] = Flow("fleet").source(Topic("legs", Json({"tail": str, "carrier": str})))
    if scatters:
        made = made.flat_map(items)
    return made.aggregate("aircraft", "tail", Fields(n=count())).aggregate("carrier", "carrier", Fields(n=count()))


def report(records: int = 0, **given: Any) -> TaskReport:
    return TaskReport(Report(records=records), **given)


class Broker:
    """Keeps what the driver asks of it.

    Attributes:
        committed: Group offsets, in order.
    """

    def __init__(self) -> None:
        self.committed: list[tuple[str, Mapping[TopicPartition, int]]] = []
        self.topic_id = "T1"
        self.count = 2
        self.fails: Exception | None = None
        self.highs = dict(ENDS)
        self.lows: dict[TopicPartition, int] = {}
        self.epoch: int | None = None
        self.cut: dict[TopicPartition, int] = {}

    def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        if self.fails is not None:
            raise self.fails
        self.committed.append((group, dict(offsets)))

    def ends(self, _names: Sequence[str]) -> dict[TopicPartition, int]:
        return {}

    def heads(self, _names: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        return {}

    def marks(self, _names: Sequence[str]) -> dict[TopicPartition, Watermarks]:
        return {place: Watermarks(self.lows.get(place, 0), end, self.epoch) for place, end in self.highs.items()}

    def leader_epochs(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        return dict.fromkeys(places, self.epoch)

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        return {place: self.cut.get(place, self.highs[place]) for place in epochs}

    def partitions(self, names: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(names, self.count)

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(names, self.topic_id)


class Driver:
    """An engine whose actions have the outcomes given.

    Attributes:
        jobs: The jobs of its tasks, by attempt.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, of: Flow[Any], *outcomes: Outcome, urls: Any = None, **options: Any
    ) -> None:
        self.jobs: list[Job] = []
        self.broker = Broker()
        self.reports: list[Report] = []
        left = list(outcomes)

        def execute(job: Job) -> Outcome:
            # The driver continues with the same mappings.
            mine = {"excluded": dict(job.attempt.excluded), "doubt": dict(job.attempt.doubt)}
            self.jobs.append(changed(job, **mine))
            return left.pop(0)

        monkeypatch.setattr(batches, "pause_seconds", lambda _: 0.0)
        self.run = begin(of, bind(of, urls or {}, fresh_store()))
        self.run.start_at("legs", "T1", {0: 0, 1: 0})
        plan = SimpleNamespace(topic="legs", topic_id="T1", starts={0: 0, 1: 0})
        self.stop = threading.Event()
        self.engine = Engine(
            of,
            Opening(self.broker, self.run, [plan]),  # type: ignore[arg-type, list-item]
            SimpleNamespace(routes=2, is_local=True, execute=execute),
            RunOptions(kafka=KafkaSettings("nowhere:1"), dead_letters="dead", group="lag", **options),
            progress=self.reports.append,
            stop=self.stop,
        )

    def attempt(self) -> TaskReport:
        return self.engine.batches.fold((), ENDS)

    def commit(self) -> None:
        self.engine._commit([Range(partition, 0, end, "legs") for (_, partition), end in ENDS.items()])

    def stream(self, *, until_caught_up: bool = True, trigger_seconds: float = 0.0, most: int = 0) -> Report:
        given = self.engine.options
        given = replace(given, until_caught_up=until_caught_up, trigger_seconds=trigger_seconds, max_records=most)
        self.engine.options = given
        return self.engine.stream()
