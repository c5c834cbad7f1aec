"""The journal's entries, and how the entry of a record is found."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine import dropped as module
from aggregations.engine.dropped import Dropped, Listed, runs_of, spans_of
from aggregations.engine.journal import Entry, decode_entry, encode_entry, entry_of
from aggregations.engine.ranges import Range
from aggregations.engine.sampling import is_sampled, partition_number, sampled
from envelope import Node, TopicPartition, Verdict
from jobs.explaining import journal
from jobs.explaining.journal import Journaled, journaled
from jobs.explaining.log import Log, Reader, Span
from jobs.explaining.outcome import Outcome
from jobs.tracing import Place
from persistence.manifest import GivenUp, Progress
from persistence.protocol import FlowRef
from tests.support.topics import InMemory

FLEET = ("fleet", 1)


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


OFFSETS = st.lists(st.integers(0, 2**62), max_size=20) | st.lists(st.integers(0, 30))


@given(st.lists(OFFSETS, min_size=1, max_size=3))
def test_runs_hold_the_offsets_that_they_were_made_of_and_no_other(parts: list[list[int]]) -> None:
    offsets = {one for part in parts for one in part}
    listed = Listed(runs_of([spans_of(ints(*part)) for part in parts]))
    assert [one for run in listed for one in run] == sorted(offsets)
    assert all(one in listed for one in offsets)
    assert not any(one + 1 in listed for one in offsets if one + 1 not in offsets)


def test_a_replayed_range_is_one_run() -> None:
    assert runs_of([spans_of(ints(100, 101, 102, 110))]) == [100, 3, 8, 1]
    dropped = Dropped()
    for task in range(4):
        dropped.take("first", "duplicate", "legs", np.full(1_000_000, task), np.arange(1_000_000))
    found = entry(ends=dict.fromkeys(range(4), 1_000_000), dropped=dropped)
    assert found.unlisted == {}
    assert found.dropped["first"]["duplicate"]["legs"] == {part: [0, 1_000_000] for part in range(4)}


def entry(batch: int = 1, ends: dict[int, int] | None = None, *, dropped: Dropped | None = None, **more: Any) -> Entry:
    """A batch that read ten records of each partition."""
    after = {TopicPartition("legs", partition): end for partition, end in (ends or {0: 10}).items()}
    ranges = [Range(partition, max(end - 10, 0), end, "legs") for (_, partition), end in after.items()]
    options = {"again": False, **more}
    return entry_of(FlowRef("fleet", 1), 1, batch, 5, {"legs": "T"}, after, ranges, dropped or Dropped(), **options)


def test_an_entry_lists_what_was_dropped_by_stage_and_verdict() -> None:
    dropped = Dropped()
    dropped.take("first", "duplicate", "legs", ints(0, 1, 0), ints(3, 4, 5))
    other = Dropped()
    other.take("first", "duplicate", "legs", ints(0), ints(4))
    other.take("second", "below_floor", "legs", ints(1), ints(9))
    dropped.add(other)
    found = decode_entry(encode_entry(entry(ends={0: 10, 1: 10}, dropped=dropped)))
    assert found is not None
    assert found.dropped["first"]["duplicate"]["legs"] == {0: [3, 3], 1: [4, 1]}
    assert [found.verdict("first", "legs", 0, at) for at in (2, 3, 4, 5, 6)] == [None, *[Verdict.DUPLICATE] * 3, None]
    assert found.verdict("second", "legs", 1, 9) is Verdict.BELOW_FLOOR
    assert found.verdict("second", "trips", 1, 9) is None


def test_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RUNS", 2)
    dropped = Dropped()
    dropped.take("first", "duplicate", "legs", ints(*[0] * 6), ints(1, 2, 5, 7, 8, 9))
    dropped.take("first", "duplicate", "legs", ints(0), ints(11))
    assert (runs_of(dropped.spans["first", "duplicate", "legs", 0]), dropped.unlisted) == ([1, 2, 3, 1], {"first": 4})
    monkeypatch.setattr("aggregations.engine.journal.MOST_RUNS", 1)
    dropped = Dropped()
    dropped.take("first", "duplicate", "legs", ints(0, 0, 0, 0), ints(1, 2, 5, 6))
    found = entry(dropped=dropped)
    assert (found.dropped["first"]["duplicate"]["legs"], found.unlisted) == ({0: [1, 2]}, {"first": 2})


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2**62)), unique=True), st.floats(0.01, 1), st.floats(0, 1))
def test_a_share_of_events_contains_every_smaller_share(
    roots: list[tuple[int, int]], share: float, part: float
) -> None:
    numbers, offsets = [partition_number("raw", one) for one, _ in roots], [offset for _, offset in roots]
    found, smaller = (sampled(one, numbers, offsets).tolist() for one in (share, share * part))
    assert found == [is_sampled(share, Node("raw", *root)) for root in roots]
    assert all(have or not need for have, need in zip(found, smaller, strict=True))
    assert sampled(1.0, numbers, offsets).all()


def test_a_share_of_events_is_this_share_of_neighbours_and_of_first_records() -> None:
    one, every = partition_number("raw", 0), np.arange(100_000)
    for share in (0.001, 0.1, 0.5, 0.9):
        for numbers, offsets in (
            (np.full(len(every), one), every),
            (np.array([partition_number("raw", int(at)) for at in every[:20_000]]), np.zeros(20_000, np.int64)),
        ):
            expected, spread = share * len(offsets), 5 * (share * (1 - share) * len(offsets)) ** 0.5
            assert abs(int(sampled(share, numbers, offsets).sum()) - expected) < spread


def test_an_entry_of_every_event_has_the_bytes_of_an_entry_without_a_share() -> None:
    assert b"share" not in encode_entry(entry())
    found = decode_entry(encode_entry(entry(share=0.25)))
    assert found is not None
    assert found.share == 0.25


def test_other_records_and_newer_entries_are_ignored() -> None:
    newer = json.loads(encode_entry(entry())) | {"schema": 2}
    for value in (None, b"", b"{", b"\xff", b"[]", json.dumps(newer).encode()):
        assert decode_entry(value) is None


class Entries(Reader):
    """A journal in memory.

    Attributes:
        reads: Number of ranges that were read.
    """

    def __init__(self, *entries: Entry | bytes) -> None:
        self.values = [one if isinstance(one, bytes) else encode_entry(one) for one in entries]
        self.reads = 0

    def log(self, topic: str) -> Log:
        return Log(topic, "J", {0: 0}, {0: len(self.values)}, {0: len(self.values)})

    def records(self, span: Span) -> Iterator[Record]:
        self.reads += 1
        for offset in range(span.first, span.last):
            yield Record("journal", 0, offset, b"fleet", self.values[offset])


def found(reader: Reader, offset: int, *, partition: int = 0, topic_id: str = "T") -> int | None:
    noted = journaled(reader, "journal", FLEET, Place("legs", partition, offset), topic_id)
    return None if noted is None else noted.entry.batch


@pytest.mark.parametrize("few", [0, 500], ids=["bisected", "read through"])
def test_the_batch_of_every_record_is_found_among_other_flows_and_batches_without_its_partition(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_FEW", few)
    entries: list[Entry | bytes] = []
    other = encode_entry(Entry("other", 1, 1, 1, {"legs": "T"}, {"legs": {0: (0, 10**9)}}))
    end = 0
    for batch in range(1, 60):
        end += 10 * (batch % 3 == 0)  # two of three batches read nothing of the partition
        entries += [*[other] * (batch % 4), entry(batch, {0: end, 1: batch * 10})]
    reader = Entries(*entries)
    for offset in range(end):
        batch = found(reader, offset)
        assert batch is not None
        assert batch == 3 * (offset // 10 + 1)
    assert found(reader, end) is None
    assert found(reader, 5, partition=2) is None
    assert found(reader, 5, topic_id="T2") is None
    assert [found(reader, at, partition=1) for at in (0, 9, 10)] == [1, 1, 2]


def test_a_lost_entry_is_no_answer_for_its_records() -> None:
    reader = Entries(entry(1, {0: 10}), entry(3, {0: 30}))
    assert [found(reader, at) for at in (5, 15, 25)] == [1, None, 3]


def test_entries_of_batches_that_a_restore_gave_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(batch, {0: 10 * batch}) for batch in range(1, 9)]
    epoch = entries[0].epoch
    # Restored after batch 3, then after batch 5 of the next history.
    entries += [replace(entry(batch, {0: 10 * batch}), epoch=epoch + 4, time_ms=4) for batch in range(4, 8)]
    entries += [replace(entry(batch, {0: 10 * batch}), epoch=epoch + 9, time_ms=9) for batch in range(6, 12)]
    given_up = [GivenUp(epoch, 3, epoch + 4), GivenUp(epoch + 4, 5, epoch + 9)]
    for few in (0, 500):
        monkeypatch.setattr(journal, "_FEW", few)
        for offset in range(110):
            noted = journaled(Entries(*entries), "journal", FLEET, Place("legs", 0, offset), "T", given_up)
            assert noted is not None
            batch = offset // 10 + 1
            history = 0 if batch < 4 else 4 if batch < 6 else 9
            assert (noted.entry.batch, noted.entry.epoch) == (batch, epoch + history)


LEGS = Topic("legs", Json({"k": str}), envelope=False)


@pytest.fixture
def world(tmp_path: Path) -> InMemory:
    """Fifty records of one key: the first ones are below the floor."""
    flow: Flow[Any] = Flow("fleet").source(LEGS).aggregate("first", "k", Fields(n=count()))
    made = InMemory(flow, tmp_path)
    for _ in range(50):
        made.send(b"K", b'{"k": "K"}')
    made.run()
    return made


def test_the_entry_of_a_record_is_of_its_branch_of_the_log() -> None:
    """The log was cut at 5 when it was read up to 20: batch 3 read other records at the same offsets."""
    logs = {TopicPartition("legs", 0): Progress(15, branches=((5, 4),))}
    entries = [
        entry(1, {0: 10}),
        entry(2, {0: 20}),
        entry(3, {0: 15}, logs=logs),
        entry(4, {0: 25}, logs=logs),
    ]
    assert [one.branches for one in entries] == [{}, {}, {"legs": {0: 4}}, {"legs": {0: 4}}]
    for offset, branch, batch in [(3, 0, 1), (7, 0, 1), (12, 0, 2), (7, 4, 3), (12, 4, 3), (16, 4, 4), (25, 4, None)]:
        noted = journaled(Entries(*entries), "journal", FLEET, Place("legs", 0, offset), "T", (), branch)
        assert (noted and noted.entry.batch) == batch, offset


def noted(
    world: InMemory, monkeypatch: pytest.MonkeyPatch, *dropped: int, again: bool = False, share: float = 1.0
) -> None:
    """Every record was read by batch 1, which dropped some of them."""
    taken = Dropped()
    taken.take("first", "below_floor", "legs", ints(*[0] * len(dropped)), ints(*dropped))
    ends = {TopicPartition("legs", 0): 50}
    made = entry_of(
        FlowRef("fleet", 1),
        7,
        1,
        9_000,
        {"legs": "T"},
        ends,
        [Range(0, 0, 50, "legs")],
        taken,
        again=again,
        share=share,
    )
    monkeypatch.setattr("jobs.explaining.explain.journaled", lambda *arguments: Journaled(arguments[3], made))


def test_the_journal_decides_below_the_floor(world: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = Place("legs", 0, 12), Place("legs", 0, 11)
    assert world.explain(kept, search=1).outcome is Outcome.UNDECIDED
    noted(world, monkeypatch, 11)
    found = world.explain(kept, search=1, journal="journal")
    assert (found.outcome, found.why) == (
        Outcome.FOLDED,
        "stage first: the journal does not list it among what was dropped",
    )
    batch = found.stages[0].batch
    assert batch is not None
    assert (batch.batch, batch.epoch, batch.time_ms, batch.exact) == (1, 7, 9_000, True)
    found = world.explain(gone, search=1, journal="journal")
    assert (found.outcome, found.stages[0].verdict) == (Outcome.DROPPED, Verdict.BELOW_FLOOR)


def test_a_batch_that_was_folded_twice_proves_nothing_about_what_it_dropped(
    world: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(world, monkeypatch, 11, again=True)
    for offset in (11, 12):
        found = world.explain(Place("legs", 0, offset), search=1, journal="journal")
        assert found.outcome is Outcome.UNDECIDED
        assert found.stages[0].batch is not None
        assert not found.stages[0].batch.exact


def test_of_an_expired_record_the_journal_knows_that_it_was_dropped(
    world: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(world, monkeypatch, 11)
    world.expire(Place("legs", 0, 20))
    found = world.explain(Place("legs", 0, 11), journal="journal")
    assert (found.outcome, found.stages[0].verdict) == (Outcome.DROPPED, Verdict.BELOW_FLOOR)
    assert world.explain(Place("legs", 0, 12), journal="journal").outcome is Outcome.EXPIRED


def test_explain_says_that_a_journal_of_a_share_left_an_event_out(
    world: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = 0.5
    inside, outside = (
        next(i for i in range(5, 15) if is_sampled(share, Node("legs", 0, i)) is had) for had in (True, False)
    )
    noted(world, monkeypatch, share=share)
    found = world.explain(Place("legs", 0, inside), search=1, journal="journal")
    assert (found.outcome, found.why) == (
        Outcome.FOLDED,
        "stage first: the journal does not list it among what was dropped",
    )
    found = world.explain(Place("legs", 0, outside), search=1, journal="journal")
    assert found.outcome is Outcome.UNDECIDED
    assert found.why.endswith("; the journal lists 50 % of the events, and not this one")
    assert found.stages[0].batch is not None
    assert found.stages[0].batch.exact, "a journal of a share lists every batch"

    world.expire(Place("legs", 0, 20))
    found = world.explain(Place("legs", 0, inside), journal="journal")
    assert found.outcome is Outcome.EXPIRED
    assert found.why.endswith("; the journal lists 50 % of the events"), "its root is not known any more"
