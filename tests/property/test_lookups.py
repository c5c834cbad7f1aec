"""Lookups: wherever batches end and runs crash, an element keeps the row that it found first, and is folded once."""

import json
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
from aggregations.run import memory
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.turns import unfinished
from envelope import TopicPartition
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
    """Keeps which records a state folded."""

    def zero(self) -> list[list[int]]:
        return []

    def fold(self, state: list[list[int]], element: Element[Any]) -> list[list[int]]:
        return sorted([*state, [element.partition, element.offset]])


def flow_of(missing: str) -> Flow[Any]:
    return (
        Flow("payments")
        .source(PAYMENTS)
        .aggregate("card", "card", Fields(n=count()))
        .lookup("merchant", MERCHANTS, "merchant", missing=missing)
        .aggregate("category", pl.col("category").fill_null("?"), Listing())
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )


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


@settings(max_examples=200, deadline=None)
@given(missing=MISSING, drawn=logs(), data=st.data(), apart=st.booleans())
def test_an_element_is_folded_once_with_the_row_that_it_found_first(
    missing: str, drawn: Logs, data: st.DataObject, *, apart: bool
) -> None:
    check(missing, drawn, data, apart=apart)


def _without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "begin_batch", lambda run, _ends: run.note(run.changed()))


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


@settings(max_examples=60, deadline=None)
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
