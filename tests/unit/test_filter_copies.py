"""Filters as steps of a flow, and what makes no difference to them: copies on other lanes, rejected and redriven records."""

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, encode
from envelope.filters import (
    FilterStates,
    Gaps,
    ProducerFilter,
    SequenceFilter,
    Stamp,
    deduplicate_by_key,
    from_envelope,
    from_value,
)
from envelope.filters.sequence import KEYED
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.support.both import TOPIC_ID, Both
from tests.support.letters import back, runner, url

EVENTS = Topic("events", Json({"n": int}))
TEN = timedelta(seconds=10)


class Places:
    """The offsets of the root records that were folded."""

    def zero(self) -> list[int]:
        return []

    def fold(self, state: list[int], element: Element[Any]) -> list[int]:
        return [*state, element.root.offset]


def flow_of(rule: Any) -> Flow[Any]:
    return Flow("copies").source(EVENTS).deduplicate(rule, name="filter").aggregate("key", "_key", Places())


def event(offset: int, root: int, middle: int, *, seconds: int = 0, key: bytes = b"K", n: int = 0) -> Record:
    """A record that came over a partition of a topic in between, and then got another key."""
    chain = (
        Hop("raw", 0, root, via="first", index=0, topic_id="R"),
        Hop("middle", middle, root, via="second", index=0, rekeyed=True, topic_id="M"),
    )
    value = encode(Envelope(json.dumps({"n": n}).encode(), chain, key))
    return Record("events", 0, offset, key, value, seconds * 1000, topic_id=TOPIC_ID)


def folded(rule: Any, records: Sequence[Record], batch: int, store: str = "") -> list[int]:
    run = runner(flow_of(rule), store)
    for start in range(0, len(records), batch):
        run.process(records[start : start + batch])
    return [offset for state in run.results("key").values() for offset in state]


# After the topic in between has grown from 8 to 16 partitions, the copy of a record of 2 arrives by 10.
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_of_two_copies_on_two_lanes_the_filter_judges_the_first_wherever_batches_end(batch: int) -> None:
    records = [event(0, 5, 2, n=5), event(1, 6, 2, n=6), event(2, 5, 10, n=5)]
    assert folded(SequenceFilter(from_value("n")), records, batch) == [5, 6]


def counted(rule: Any) -> Flow[Any]:
    return Flow("copies").source(EVENTS).deduplicate(rule, name="filter").aggregate("key", "_key", Fields(n=count()))


def test_both_paths_judge_the_first_of_two_copies_on_two_lanes() -> None:
    both = Both(counted(SequenceFilter(from_value("n"))))
    both.process([event(n, root, middle, n=root) for n, (root, middle) in enumerate([(5, 2), (6, 2), (5, 10)])])
    assert both.memory.report.verdicts["filter"] == {"accepted": 2, "duplicate_in_batch": 1}


class Crash(Exception):
    pass


def crash() -> NoReturn:
    raise Crash


def test_a_crash_and_another_batch_pass_on_no_other_of_two_duplicates() -> None:
    rule, store = deduplicate_by_key(TEN), url()
    records = [event(0, 1, 2), event(1, 2, 2, seconds=5), event(2, 1, 10, seconds=20)]
    with faults.use(Injector([Fault("persist:key", FaultOutcome.AFTER)], crash)), suppress(Crash):
        folded(rule, records, 2, store)
    assert folded(rule, records, 3, store) == [1]


def message(
    offset: int, sequence: int, *, epoch: int = 0, seconds: int = 0, producer: str = "p", contiguous: bool = True
) -> Record:
    """A message of a producer that numbers its partition without gaps."""
    one = Envelope(
        b'{"n":0}',
        key=b"K",
        producer=producer,
        sequence=sequence,
        producer_epoch=epoch,
        sequence_per_partition=contiguous,
    )
    return Record("events", 0, offset, b"K", encode(one), seconds * 1000, topic_id=TOPIC_ID)


REFUSED = {
    "an epoch": [message(0, 1, epoch=1), message(1, 9, epoch=2), message(2, 2, epoch=1)],
    "a time": [
        message(0, 1),
        message(1, 1, producer="q"),
        message(2, 2, seconds=9),
        message(3, 9, seconds=15),
        message(4, 1, seconds=9, producer="q"),
    ],
    "the latest": [
        message(0, 1),
        message(1, 1, producer="q"),
        message(2, 9),
        message(3, 1, producer="r"),
        message(4, 1, producer="q"),
    ],
}


@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize("case", REFUSED)
def test_a_message_that_is_refused_changes_nothing_wherever_batches_end(case: str, batch: int) -> None:
    rule, records = ProducerFilter(gaps=Gaps.REFUSE, expiry=TEN, limit=2), REFUSED[case]
    alone = FilterStates(rule)
    assert folded(rule, records, batch) == [one.offset for one in records if alone.passes(one)]


def test_a_message_that_is_refused_leaves_the_state_as_it_was() -> None:
    for records in REFUSED.values():
        states = FilterStates(ProducerFilter(gaps=Gaps.REFUSE, expiry=TEN, limit=2))
        rejected = 0
        for one in records:
            before = states.dump()
            if states.judge(one).reason:
                rejected += 1
                assert states.dump() == before
        assert rejected == 1


def test_a_message_that_was_refused_is_not_judged_again_by_the_state_that_a_crashed_run_has_written() -> None:
    """It would be below the highest number by then, and its epoch would fence the last message."""
    records = [message(0, 1), message(1, 9, epoch=1), message(2, 10, contiguous=False), message(3, 11)]
    rule, store = ProducerFilter(gaps=Gaps.REFUSE), url()
    with faults.use(Injector([Fault("persist:filter", FaultOutcome.AFTER)], crash)), suppress(Crash):
        folded(rule, records[:3], 3, store)
    run = runner(flow_of(rule), store)
    assert run.process(records[:3]).verdicts["filter"] == {"duplicate": 2, "below_floor": 1}
    assert run.process(records[3:]).verdicts["filter"] == {"accepted": 1}
    assert run.results("key") == {b"K": [0, 2, 3]}
    assert sum(map(len, run.run.ledger.listed["filter"].values())) == 1  # it can be redriven


def test_both_paths_leave_out_what_a_crashed_run_has_refused() -> None:
    records = [message(0, 1), message(1, 9), message(2, 2)]
    both = Both(counted(ProducerFilter(gaps=Gaps.REFUSE)))
    both.process(records)
    both.process(records)
    assert both.memory.report.verdicts["filter"] == {"accepted": 2, "rejected": 1, "duplicate": 2, "below_floor": 1}
    assert both.results("key") == {b"K": {"n": 2}}


def test_a_message_that_was_refused_and_sent_again_is_a_duplicate_when_it_is_redriven() -> None:
    """M1, M3, M2, and M3 again: then the operator redrives the first M3."""
    both = Both(counted(ProducerFilter(gaps=Gaps.REFUSE)))
    both.process([message(offset, number) for offset, number in enumerate([1, 3, 2, 3])])
    [dead] = both.dead_letters
    both.process([both.redriven(dead, 4)])
    assert both.results("key") == {b"K": {"n": 3}}
    assert both.memory.report.verdicts["filter"] == {"accepted": 3, "rejected": 1, "duplicate": 1}


def test_a_message_that_was_refused_is_passed_on_when_it_is_redriven_after_what_was_missing() -> None:
    run = runner(flow_of(ProducerFilter(gaps=Gaps.REFUSE)))
    run.process([message(offset, number) for offset, number in enumerate([1, 3, 2])])
    [dead] = run.dead_letters
    report = run.process([back(dead, 3, "copies"), message(4, 4)])
    assert report.verdicts["filter"] == {"redriven": 1, "accepted": 1}
    assert run.results("key") == {b"K": [0, 2, 1, 4]}


def test_a_copy_of_a_record_that_the_filter_rejected_is_judged_at_its_own_place() -> None:
    """3 comes before 2, and is refused; its copy comes after 2, and before 4."""
    rule = ProducerFilter(lambda one: Stamp("p", one.value["n"], contiguous=True), gaps=Gaps.REFUSE)
    records = [event(0, 1, 0, n=1), event(1, 3, 0, n=3), event(2, 2, 0, n=2), event(3, 3, 0, n=3), event(4, 4, 0, n=4)]
    for batch in (1, 2, 5):
        assert sorted(folded(rule, records, batch)) == [1, 2, 3, 4]


def test_a_record_at_the_same_offset_of_a_topic_that_was_created_again_is_a_duplicate() -> None:
    """Its topic was filled again: positions are those of another topic, ids are the same."""
    flow, store = flow_of(deduplicate_by_key(TEN)), url()
    for topic_id, verdict in (("first", "accepted"), ("second", "duplicate")):
        with closing(MemoryRunner(flow, bind(flow, {}, store), topic_ids={"events": topic_id})) as run:
            one = Record("events", 0, 0, b"K", encode(Envelope(b'{"n":0}', key=b"K")), 0, topic_id=topic_id)
            assert run.process([one]).verdicts["filter"] == {verdict: 1}
            assert run.results("key") == {b"K": [0]}


def test_a_warning_counts_once_for_each_state_on_both_paths() -> None:
    """Also of a state that is folded a second time, because a rejected record was listed."""

    def numbered(offset: int, root: int, number: int | None) -> Record:
        key = b"%d" % root
        chain = (Hop("raw", 0, root, via="first", index=0, topic_id="R"),)
        one = Envelope(b'{"n":0}', chain, key, producer="p" if number is not None else "", sequence=number)
        return Record("events", 0, offset, key, encode(one), 0, (), TOPIC_ID)

    both = Both(counted(SequenceFilter(from_envelope("sequence"))))
    records = [numbered(n, n, n) for n in range(KEYED + 1)]
    records += [numbered(KEYED + 1 + n, KEYED + 1, None) for n in range(2)]
    both.process(records)
    assert list(both.memory.report.warnings.values()) == [1]
