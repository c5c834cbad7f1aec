"""A log that loses its end again and again (KIP-320), and a flow in two stores that dies at any write: nothing counts twice."""

import json
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count
from aggregations.definition.aggregates_exact import collect
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.memory import MemoryRunner
from aggregations.run.plan import Broker, plan
from envelope import TopicPartition
from envelope.limits import branch_id
from persistence.commit.faults import NoFaults, use
from persistence.errors import Terminal
from tests.support.pure import fresh_store

PLACE = TopicPartition("orders", 0)
NUMBERS = Fields(n=count(), numbers=collect("i", 1_000))
FLOW: Flow[Any] = (
    Flow("f")
    .source(Topic("orders", Json({"k": str, "i": int}), envelope=False))
    .aggregate("first", "k", NUMBERS)
    .aggregate("second", "i", NUMBERS)
)


class Dies(NoFaults):
    """Ends the process at one of its writes, before or after it has an effect; None for never."""

    def __init__(self, at: tuple[int, bool] | None) -> None:
        self.at, self.writes = at, 0

    def effect(self, point: str, action: Any) -> Any:
        self.writes += 1
        if self.at == (self.writes, False):
            raise Terminal(point)
        found = action()
        if self.at == (self.writes, True):
            raise Terminal(point)
        return found


class World:
    """One partition. Each record of it has a number of its own, and the leader epoch in which it was written."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int]] = []
        self.leader_epoch = self.written = 0
        self.stores = {"first": fresh_store(), "second": fresh_store()}

    def produce(self, records: int) -> None:
        for _ in range(records):
            self.log.append((self.leader_epoch, self.written))
            self.written += 1

    def elect(self, lost: int) -> None:
        self.leader_epoch += 1
        del self.log[max(len(self.log) - lost, 0) :]

    def run(self, most: int, dies: tuple[int, bool] | None = None) -> None:
        """Read to the end of the log, and accept that it was cut."""
        with use(Dies(dies)), suppress(Terminal):
            ends = {PLACE: len(self.log)}
            runner = MemoryRunner(FLOW, self.stores, topic_ids={"orders": "id"}, ends=ends)
            self._begin(runner)
            while (start := runner.run.positions("orders").get(0, 0)) < len(self.log):
                runner.process(self._records(runner, start, most))
            runner.close()

    def _begin(self, runner: MemoryRunner) -> None:
        run, marks = runner.run, {0: (0, len(self.log))}
        epoch_ends = {
            place.partition: sum(epoch <= one.leader_epoch for epoch, _ in self.log)
            for place, one in run.logs({"orders": "id"}).items()
            if one.leader_epoch not in (None, self.leader_epoch)
        }
        broker = Broker("orders", "id", marks, leader_epochs={0: self.leader_epoch}, epoch_ends=epoch_ends)
        found = plan("f", run.manifest, run.manifests, broker, crashed=run.crashed)
        run.start_at("orders", "id", found.starts, logs=found.logs)

    def _records(self, runner: MemoryRunner, start: int, most: int) -> list[Record]:
        log = runner.run.logs({"orders": "id"})[PLACE]
        end = min([start + most, len(self.log), *(first for first, _ in log.branches if first > start)])
        number = log.branch(start)
        return [
            Record(
                *("orders", 0, offset, b"k", json.dumps({"k": "k", "i": self.log[offset][1]}).encode()),
                topic_id=branch_id("id", number),
            )
            for offset in range(start, end)
        ]

    def counted(self, stage: str) -> list[int]:
        """The numbers of the records in the states of a stage, as often as they were folded."""
        runner = MemoryRunner(FLOW, self.stores, topic_ids={"orders": "id"}, ends={PLACE: len(self.log)})
        return sorted(one for state in runner.results(stage).values() for one in state["numbers"]["values"])


CYCLES = st.tuples(
    st.integers(0, 4), st.integers(1, 5), st.none() | st.tuples(st.integers(1, 30), st.booleans()), st.integers(0, 4)
)
"""Records produced before a run, the most records of its batches, where it dies, and records that a new leader loses then."""


@settings(max_examples=4 * settings().max_examples)
@given(st.lists(CYCLES, min_size=1, max_size=5), st.integers(0, 4))
def test_what_is_in_the_log_is_folded_once_at_each_stage_and_what_was_lost_at_most_once(
    cycles: list[tuple[int, int, tuple[int, bool] | None, int]], last: int
) -> None:
    world = World()
    for records, most, dies, lost in cycles:
        world.produce(records)
        world.run(most, dies)
        world.elect(lost)
    world.produce(last)
    world.run(3)
    for stage in ("first", "second"):
        counted = world.counted(stage)
        assert len(counted) == len({*counted})
        assert {number for _, number in world.log} <= {*counted}
