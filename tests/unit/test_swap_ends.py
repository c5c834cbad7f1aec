"""Swaps and rollbacks that must not leave readers with something else: in the middle of a batch, or of published states."""

import json
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.options import RunOptions
from aggregations.errors import RunRefusedError
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from envelope.filters import deduplicate, from_value
from jobs.comparing import Comparison
from jobs.replay import rollback
from jobs.replaying.generations import begin_rebuild, generations_of
from jobs.replaying.results import Differences, Swapped
from jobs.replaying.swapping import at_work, swap_rebuild
from persistence.commit.faults import Fault, FaultOutcome, Injector, use
from persistence.kafka import BrokerUnavailable, KafkaSettings
from tests.simulation.faults import Crash, crash
from tests.support.pure import bare, batch, fresh_store
from tests.support.replays import author_of

PAYMENTS = Topic("pay", Json({"id": str, "account": str}), envelope=False)
ONCE = deduplicate(from_value("id"), timedelta(hours=1), partitions=2)
N = Fields(n=count())
SPANNING = (
    Flow("once").source(PAYMENTS).deduplicate(ONCE).aggregate("account", "account", N).publish("out", key="account")
)
READER = Flow("reader").source(Topic("out", Json({"account": str}))).aggregate("account", "account", N)
FLEET = Flow("fleet").source(bare()).aggregate("aircraft", "tail", N).publish_states("states")


def payment(partition: int, offset: int, name: str, time: int) -> Record:
    value = json.dumps({"id": name, "account": "ada"}).encode()
    return Record("pay", partition, offset, None, value, time, topic_id="PAY")


# The same payment is in both partitions, the earlier one in partition 1.
LOG = {
    0: [payment(0, 0, "p-0", 1000), payment(0, 1, "p-1", 5000)],
    1: [payment(1, 0, "p-9", 1000), payment(1, 1, "p-1", 3000)],
}


class Outside:
    """Folds in memory; publishes states until the broker goes away."""

    def __init__(self, flow: Flow[Any], urls: dict[str, str], log: dict[int, list[Record]]) -> None:
        self.flow, self.urls, self.log, self.sent, self.breaks = flow, urls, log, 0, False

    def fold(self, found: Any, pointer: Any, note: Any) -> Report:
        generation, until = pointer.rebuild.generation, found.positions(pointer.live)
        with closing(MemoryRunner(self.flow, self.urls, ends={}, generation=generation, rebuilt=note)) as run:
            run.process(
                one
                for records in self.log.values()
                for one in records
                if run.run.start.get(place := TopicPartition(one.topic, one.partition), 0) <= one.offset < until[place]
            )
        return Report()

    def send_states(self, *_: Any) -> int:
        self.sent += 1
        if self.breaks:
            raise BrokerUnavailable("no answer", "Try again")
        return self.sent

    def _nothing(self, *_: Any) -> int:
        return 0

    send_letters = drop_letters = send_outputs = _nothing

    def unread_growths(self, *_: Any) -> list[str]:
        return []

    def stopped(self) -> bool:
        return False


def swapped(outside: Outside, *, agrees: bool = True) -> Swapped:
    author = author_of("swap")
    with generations_of(outside.flow, outside.urls) as found:
        pointer, note = begin_rebuild(found, author, live=1, redefined=False)
        with at_work(found, author):
            return swap_rebuild(
                *(found, author, pointer, note, outside),
                compare=lambda *_: Differences(Comparison({})),
                agreed=lambda _: agrees,
            )


def pointer_of(outside: Outside) -> Any:
    with generations_of(outside.flow, outside.urls) as found:
        return found.pointer()


def test_a_swap_that_began_to_publish_states_only_goes_ahead() -> None:
    log = {0: batch(*range(9))}
    outside = Outside(FLEET, bind(FLEET, {}, fresh_store()), log)
    with closing(MemoryRunner(FLEET, outside.urls, ends={})) as run:
        run.process(log[0])
    outside.breaks = True
    for agrees in (True, False):
        with pytest.raises(BrokerUnavailable):
            swapped(outside, agrees=agrees)
        assert (pointer_of(outside).closing, pointer_of(outside).live) == (1, 1)
        with pytest.raises(RunRefusedError, match="repeat `headwater replay --swap`"):
            MemoryRunner(FLEET, outside.urls, ends={})
    outside.breaks = False
    done = swapped(outside, agrees=False)
    assert (done.done, done.live, done.previous, done.states) == (True, 2, 1, 3)
    assert (pointer_of(outside).live, pointer_of(outside).rebuild) == (2, None)


def test_a_swap_that_is_not_agreed_to_leaves_the_live_generation() -> None:
    log = {0: batch(*range(9))}
    outside = Outside(FLEET, bind(FLEET, {}, fresh_store()), log)
    with closing(MemoryRunner(FLEET, outside.urls, ends={})) as run:
        run.process(log[0])
    assert not swapped(outside, agrees=False).done
    assert (pointer_of(outside).closing, outside.sent) == (0, 0)
    MemoryRunner(FLEET, outside.urls, ends={}).close()


def test_a_generation_that_is_within_a_batch_is_not_swapped_if_only_it_repeats_the_batch() -> None:
    outside = Outside(SPANNING, bind(SPANNING, {}, fresh_store()), LOG)
    published = []

    with closing(MemoryRunner(SPANNING, outside.urls, ends={})) as run:
        run.process([LOG[0][0], LOG[1][0]])
        published += run.outputs
    run = MemoryRunner(SPANNING, outside.urls, ends={})
    with use(Injector([Fault("publish", FaultOutcome.AFTER)], crash)), pytest.raises(Crash):
        run.process([LOG[0][1], LOG[1][1]])
    published += run.outputs
    with pytest.raises(RunRefusedError, match=r"generation 1: its run ended within a batch.*--until-caught-up"):
        swapped(outside)
    with closing(MemoryRunner(SPANNING, outside.urls, ends={})) as run:
        run.process([LOG[0][1], LOG[1][1]])
        published += run.outputs
    assert swapped(outside).done
    reader = MemoryRunner(READER, bind(READER, {}, fresh_store()), ends={})
    for offset, one in enumerate(published):
        reader.process([Record("out", 0, offset, one.key, one.value, topic_id="OUT")])
    assert reader.results("account") == {b"ada": {"n": 3}}


def test_a_rollback_of_what_is_published_behind_a_filter_over_all_partitions_is_refused_unless_accepted() -> None:
    outside = Outside(SPANNING, bind(SPANNING, {}, fresh_store()), LOG)
    with closing(MemoryRunner(SPANNING, outside.urls, ends={})) as run:
        run.process([LOG[0][0], LOG[1][0]])
    swapped(outside)
    options = RunOptions(kafka=KafkaSettings("127.0.0.1:1"), stores=outside.urls)
    with pytest.raises(RunRefusedError, match=r"depends on where batches end.*\(--accept other-batches\)"):
        rollback(SPANNING, options, why="a test")
