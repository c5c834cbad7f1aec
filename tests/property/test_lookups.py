"""Lookups: wherever batches end and runs crash, an element keeps the row that it found first, and is folded once."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.report import DeadLetter
from aggregations.run import memory
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.turns import unfinished
from envelope import Hop, TopicPartition
from envelope.codec import redriven_payload
from envelope.deadletter import DeadLetterHeaders, Form
from envelope.limits import DEFAULT_LIMITS
from jobs.dead_letters.redrive import redriven
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from tests.support.both import TOPIC_ID, Both
from tests.support.pure import fresh_store

PAYMENTS = Topic("payments", Json({"card": str, "merchant": str}), envelope=False)
MERCHANTS = Topic("merchants", Json({"category": str}), envelope=False)
ROUNDS = 10
"""Batches and crashes after which the rest is read at once."""
POINTS = [
    *("fetch", "load", "load:merchant", "fold", "publish", "ledger", "manifest", "return"),
    *("persist:all", "persist:category", "persist:card", "persist:merchant"),
]


class Crash(Exception):
    """The process dies."""


def crash() -> Any:
    raise Crash


class Listing:
    """Keeps which records a state folded; refuses those of merchant `c` until that is mended."""

    broken = False

    def zero(self) -> list[list[int]]:
        return []

    def fold(self, state: list[list[int]], element: Element[Any]) -> list[list[int]]:
        if Listing.broken and element["merchant"] == "c":
            raise ValueError
        return sorted([*state, [element.partition, element.chain[0].offset if element.chain else element.offset]])


def flow_of(missing: str, *, followed: bool = True) -> Flow[Any]:
    looked = (
        Flow("payments")
        .source(PAYMENTS)
        .aggregate("card", "card", Fields(n=count()))
        .lookup("merchant", MERCHANTS, "merchant", missing=missing)
        .aggregate("category", pl.col("category").fill_null("?"), Listing())
    )
    return looked.aggregate("all", pl.lit("all"), Fields(n=count())) if followed else looked


@dataclass
class Logs:
    """What the topics contain.

    Attributes:
        merchants: Name and category of each record of the table, None for a tombstone, by partition.
        payments: The merchant of each payment, by partition.
    """

    merchants: list[list[tuple[str, str | None]]]
    payments: list[list[str]]

    def records(self, topic: str, partition: int, begin: int, end: int) -> list[Record]:
        made = []
        for offset in range(begin, end):
            if topic == "merchants":
                key, category = self.merchants[partition][offset]
                value = None if category is None else json.dumps({"category": category}).encode()
            else:
                key = f"card-{partition}-{offset % 2}"
                value = json.dumps({"card": key, "merchant": self.payments[partition][offset]}).encode()
            made.append(Record(topic, partition, offset, key.encode(), value, 1_000 + offset, (), TOPIC_ID))
        return made

    def table(self, read: Sequence[int]) -> dict[str, str]:
        """The rows after these offsets."""
        rows: dict[str, str | None] = {}
        for log, end in zip(self.merchants, read, strict=True):
            rows |= dict(log[:end])
        return {name: category for name, category in rows.items() if category is not None}


@st.composite
def logs(draw: st.DrawFn) -> Logs:
    """A merchant is always in the same partition."""
    names = [["a", "b"], ["c"]]
    categories = st.sampled_from(["food", "toys", "books", None])
    merchants = [
        draw(st.lists(st.tuples(st.sampled_from(own), categories), max_size=8))
        for own in names[: draw(st.integers(1, 2))]
    ]
    payments = [draw(st.lists(st.sampled_from("abc"), max_size=12)) for _ in range(draw(st.integers(1, 2)))]
    return Logs(merchants, payments)


def check(missing: str, drawn: Logs, data: st.DataObject, *, apart: bool) -> None:
    """Read the topics in random batches with random crashes; compare with the rows as of each element's first batch."""
    flow = flow_of(missing)
    stores = bind(flow, {name: fresh_store() for name in flow.stage_names} if apart else {}, fresh_store())
    runner = MemoryRunner(flow, stores)
    found: dict[tuple[int, int], str | None] = {}
    sizes = {"merchants": [*map(len, drawn.merchants)], "payments": [*map(len, drawn.payments)]}

    def at(topic: str) -> list[int]:
        start = runner.run.start
        return [start.get(TopicPartition(topic, partition), 0) for partition in range(len(sizes[topic]))]

    for number in numbers():
        left = [topic for topic, size in sizes.items() if at(topic) != size]
        if not left:
            break
        first = list(unfinished(runner.run))
        topic = data.draw(st.sampled_from(first or left))
        batch = []
        for partition, (begin, end) in enumerate(zip(at(topic), sizes[topic], strict=True)):
            to = end if number >= ROUNDS else data.draw(st.integers(begin, end))
            batch += drawn.records(topic, partition, begin, to)
        if topic == "payments":
            # A record that an unfinished batch may have folded keeps what it found then.
            bound = unfinished(runner.run).get(topic, {})
            rows = drawn.table(at("merchants"))
            for one in batch:
                place = (one.partition, one.offset)
                if one.offset >= bound.get(one.partition, 0) or place not in found:
                    found[place] = rows.get(drawn.payments[one.partition][one.offset])
        if number < ROUNDS and data.draw(st.integers(0, 2)) == 0:
            point, outcome = data.draw(st.sampled_from(POINTS)), data.draw(st.sampled_from(FaultOutcome))
            with faults.use(Injector([Fault(point, outcome)], crash)):
                try:
                    runner.process(batch)
                except (Crash, Transient):
                    runner = MemoryRunner(flow, stores)
            continue
        runner.process(batch)
    expected: dict[bytes, list[list[int]]] = {}
    for place, category in sorted(found.items()):
        if category is not None or missing == "null":
            expected.setdefault((category or "?").encode(), []).append(list(place))
    assert runner.results("category") == expected
    folded = sum(map(len, expected.values()))
    assert runner.results("all") == ({b"all": {"n": folded}} if folded else {})
    assert sum(one["n"] for one in runner.results("card").values()) == len(found)
    if missing == "dead_letter":
        dead = {(one.record.partition, one.record.offset) for one in runner.dead_letters}
        assert dead <= {place for place, category in found.items() if category is None}
    rows = drawn.table(sizes["merchants"])
    assert {key.decode(): row["category"] for key, row in runner.results("merchant").items() if row} == rows


MISSING = st.sampled_from(["null", "drop", "dead_letter"])


@settings(max_examples=3 * settings.default.max_examples)
@given(missing=MISSING, drawn=logs(), data=st.data(), apart=st.booleans())
def test_an_element_is_folded_once_with_the_row_that_it_found_first(
    missing: str, drawn: Logs, data: st.DataObject, *, apart: bool
) -> None:
    check(missing, drawn, data, apart=apart)


def _without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "begin_batch", lambda run, *_: run.note(run.changed()))


def _forgets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller batch ends what a larger one began."""
    before = memory.Run.following

    def following(self: Any, *arguments: Any) -> Any:
        return msgspec.structs.replace(before(self, *arguments), unfinished={})

    monkeypatch.setattr(memory.Run, "following", following)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the ends of a batch are not noted": _without_notes,
    "a smaller batch ends a larger one": _forgets_the_rest,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    planted = given(missing=MISSING, drawn=logs(), data=st.data(), apart=st.booleans())(check)
    few = settings(
        max_examples=300, derandomize=True, phases=[Phase.generate], deadline=None, report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        few(planted)()


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(missing=MISSING, drawn=logs(), data=st.data())
def test_columns_find_the_rows_that_messages_find(missing: str, drawn: Logs, data: st.DataObject) -> None:
    both = Both(flow_of(missing))
    read = {"merchants": [0] * len(drawn.merchants), "payments": [0] * len(drawn.payments)}
    sizes = {"merchants": [*map(len, drawn.merchants)], "payments": [*map(len, drawn.payments)]}
    for number in range(6):
        batch = []
        for topic, its in read.items():
            for partition, begin in enumerate(its):
                end = sizes[topic][partition]
                its[partition] = end if number == 5 else data.draw(st.integers(begin, end))
                batch += drawn.records(topic, partition, begin, its[partition])
        if batch:
            both.process(batch)


def check_redriven(missing: str, drawn: Logs, data: st.DataObject, *, crashes: bool) -> None:
    """Let folds fail, change the table, redrive every dead letter twice: nothing is folded twice, or is missing."""
    followed = data.draw(st.booleans())
    flow = flow_of(missing, followed=followed)
    stores = bind(flow, {}, fresh_store())
    runner, died = MemoryRunner(flow, stores, ends={}), []
    sizes = [*map(len, drawn.payments)]

    def process(records: list[Record]) -> None:
        nonlocal runner
        for _ in range(4):
            point, outcome = data.draw(st.sampled_from(POINTS)), data.draw(st.sampled_from(FaultOutcome))
            faulty = Injector([Fault(point, outcome)] if crashes and data.draw(st.booleans()) else [], crash)
            with faults.use(faulty):
                try:
                    runner.process(records)
                except (Crash, Transient):
                    died.extend(runner.dead_letters)
                    runner = MemoryRunner(flow, stores, ends={})
                    continue
                return
        runner.process(records)

    table = [
        one for number, log in enumerate(drawn.merchants) for one in drawn.records("merchants", number, 0, len(log))
    ]
    cut = data.draw(st.integers(0, len(table)))
    rest = [one for one in table if one not in table[:cut]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Listing, "broken", True)
        if table[:cut]:
            process(table[:cut])
        for number, size in enumerate(sizes):
            if size:
                process(drawn.records("payments", number, 0, size))
    if rest:
        process(rest)
    letters = {(one.record.partition, one.record.offset): one for one in [*died, *runner.dead_letters]}
    for turn in range(2):
        again = [back(dead, partition, 100 + 20 * turn + n) for n, ((partition, _), dead) in enumerate(letters.items())]
        if again:
            process(sorted(again, key=lambda one: (one.partition, one.offset)))
    folded = Counter(tuple(place) for state in runner.results("category").values() for place in state)
    assert not [place for place, times in folded.items() if times > 1]
    wanted = {(number, offset) for number, size in enumerate(sizes) for offset in range(size)}
    assert folded.keys() <= wanted
    if followed:
        assert sum(one["n"] for one in runner.results("all").values()) == len(folded)
    still = {(one.record.partition, root_of(one.record)) for one in [*died, *runner.dead_letters]}
    if missing == "null":
        assert wanted - folded.keys() <= (still if crashes else set())


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(missing=MISSING, drawn=logs(), data=st.data(), crashes=st.booleans())
def test_a_redriven_record_is_folded_once_whatever_its_row_is_by_then(
    missing: str, drawn: Logs, data: st.DataObject, *, crashes: bool
) -> None:
    check_redriven(missing, drawn, data, crashes=crashes)


def root_of(record: Record) -> int:
    """The offset of the event's first record."""
    message = redriven_payload(record.value, DEFAULT_LIMITS)
    return record.offset if message is None else message.chain[0].offset


def back(dead: DeadLetter, partition: int, offset: int) -> Record:
    """A dead letter as an operator redrives it."""
    record = dead.record
    letter = DeadLetterHeaders(
        *(record.topic, record.partition, record.offset, dead.reason),
        topic_id=TOPIC_ID,
        stage=dead.stage,
        application="payments",
        hole=dead.hole,
        items=dead.items,
        form=Form.PAYLOAD,
        timestamp_ms=record.timestamp_ms,
    )
    value = redriven(record.key, record.value, (), letter, Hop("dead", 0, offset, topic_id="D"))
    return Record(record.topic, partition, offset, record.key, value, record.timestamp_ms, (), TOPIC_ID)
