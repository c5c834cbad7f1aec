"""Pipelining, M1, M3, M2: why flows and republishers refuse to hold M3 back, and what does so instead."""

from collections.abc import Iterable
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, encode
from envelope.dedup.history import HISTORY
from envelope.filters import Gaps, ProducerFilter
from persistence import StoredFilter
from tests.support.pure import fresh_store

M1, M3, M2 = (("p", number) for number in (1, 3, 2))
OTHERS = [("q", number) for number in range(HISTORY + 1)]
SENT = [M1, M3, *OTHERS, M2]
"""M3 overtakes M2; until M2 is sent again, another producer sends more messages than a state remembers."""


def stamped(offset: int, producer: str, number: int) -> Record:
    message = Envelope(b"{}", key=b"k", producer=producer, sequence=number, sequence_per_partition=True)
    return Record("sent", 0, offset, b"k", encode(message))


LOG = [stamped(offset, *one) for offset, one in enumerate(SENT)]


def held(*batches: Iterable[Record]) -> list[list[Record]]:
    """What a filter that holds back passes on of each batch, in its order."""
    made: list[list[Record]] = []
    kept = StoredFilter(ProducerFilter(gaps=Gaps.HOLD), fresh_store())
    for batch in batches:
        kept.process(batch, lambda passed: made.append([one for one, _ in passed.passed]))
    return made


def counted(topic: str, *batches: Iterable[Record]) -> tuple[int, dict[str, int]]:
    """How many of the records a flow counts, and its verdicts."""
    flow = Flow("counted").source(Topic(topic)).aggregate("all", "_key", Fields(n=count()))
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    for batch in batches:
        runner.process(sorted(batch, key=lambda one: one.offset))
    return runner.results("all")[b"k"]["n"], dict(runner.report.verdicts["all"])


def test_m3_is_passed_on_behind_m2_and_after_all_that_the_other_producer_sent() -> None:
    first, second = held(LOG[:-1], LOG[-1:])
    assert [SENT[one.offset] for one in first] == [M1, *OTHERS]
    assert [SENT[one.offset] for one in second] == [M2, M3]


def test_a_flow_behind_the_filter_would_lose_m3_as_a_copy_because_positions_are_those_of_the_source() -> None:
    n, verdicts = counted("sent", *held(LOG[:-1], LOG[-1:]))
    assert verdicts["below_floor"] == 1
    assert n == len(SENT) - 1


def test_so_would_the_reader_of_a_republisher_because_the_lineage_of_an_output_is_its_input() -> None:
    passed = [one for batch in held(LOG[:-1], LOG[-1:]) for one in batch]
    hops = [Hop("sent", 0, one.offset, via="republisher", index=0) for one in passed]
    outputs = [Record("out", 0, n, b"k", encode(Envelope(b"{}", (hop,), b"k"))) for n, hop in enumerate(hops)]
    n, verdicts = counted("out", *([one] for one in outputs))
    assert verdicts["below_floor"] == 1
    assert n == len(SENT) - 1


def test_a_held_message_has_to_be_read_again_after_a_crash_from_before_all_that_followed_it() -> None:
    """The progress of a flow is one offset for each partition, above everything that it has passed on."""
    store = fresh_store()
    StoredFilter(ProducerFilter(gaps=Gaps.HOLD), store).process(LOG[:-1], lambda _: None)
    again, made = StoredFilter(ProducerFilter(gaps=Gaps.HOLD), store), list[Any]()
    assert again.start == {("sent", 0): 1}
    again.process(LOG[1:], lambda passed: made.extend(SENT[one.offset] for one, _ in passed.passed))
    assert made == [M2, M3]


@pytest.mark.parametrize("batch", [1, 7, len(LOG)])
def test_in_a_topic_of_its_own_the_filter_writes_them_in_order_and_nothing_is_lost(batch: int) -> None:
    passed = [one for made in held(*(LOG[n : n + batch] for n in range(0, len(LOG), batch))) for one in made]
    topic = [Record("once", 0, n, one.key, one.value) for n, one in enumerate(passed)]
    assert [SENT[one.offset] for one in passed if SENT[one.offset][0] == "p"] == [M1, M2, M3]
    assert counted("once", *([one] for one in topic)) == (len(SENT), {"accepted": len(SENT)})
