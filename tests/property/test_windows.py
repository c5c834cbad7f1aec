"""Windows: neither the ends of batches, nor the order of partitions, nor a crash changes what they hold."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers
from typing import Any

import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import Window, hopping, tumbling
from aggregations.per_message import loop, stage
from aggregations.per_message.times import Times, latest, with_times
from aggregations.report import DeadLetter
from aggregations.run import common, memory
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Decision, Envelope, Hop, TopicPartition, Verdict, encode
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from persistence.manifest import Progress
from tests.support.both import TOPIC_ID, Both
from tests.support.drawn import bring_back
from tests.support.pure import fresh_store

SCREWS = Topic("screws", Json({"part": str, "torque": int}))
MINUTE = 60_000
NOW = 1_699_999_200_000  # a full hour, so that event times and the ends of windows meet


class Crash(Exception):
    """The process dies."""


def crash() -> Any:
    raise Crash


@dataclass(frozen=True)
class Attempt:
    """One fastening: the event of a record of topic `raw`."""

    partition: int
    root: int
    minutes: int

    @property
    def part(self) -> str:
        """Its part: a part is always in the same partition."""
        return f"part-{self.partition}-{self.root % 2}"

    def record(self, offset: int) -> Record:
        """A delivery of it."""
        chain = (Hop("raw", self.partition, self.root, via="r", index=0, topic_id="R"),)
        value = json.dumps({"part": self.part, "torque": self.root}).encode()
        event_time_us = (NOW + self.minutes * MINUTE) * 1_000
        body = encode(Envelope(value, chain, event_time_us=event_time_us))
        stamp = NOW + 10_000 * MINUTE
        return Record("screws", self.partition, offset, self.part.encode(), body, stamp, (), TOPIC_ID)


WINDOWS = st.sampled_from(
    [
        tumbling("5m"),
        tumbling("5m", lateness="2m"),
        tumbling("1h"),
        hopping("10m", "5m"),
        hopping("15m", "5m", lateness="7m"),
    ]
)


@st.composite
def logs(draw: st.DrawFn) -> list[list[Attempt]]:
    """Per partition the deliveries in their order: event times out of order, and some events sent again."""
    found = []
    for partition in range(draw(st.integers(1, 3))):
        log: list[Attempt] = []
        for root in range(draw(st.integers(0, 10))):
            log.append(Attempt(partition, root, draw(st.integers(0, 25)) + root))
            if draw(st.integers(0, 3)) == 0:
                log.append(draw(st.sampled_from(log)))
        found.append(log)
    return found


def wanted(log: Sequence[Attempt], window: Window) -> tuple[dict[bytes, set[Attempt]], Counter[str]]:
    """What the states of a partition's parts hold, and the verdicts, by the rule."""
    held: dict[bytes, set[Attempt]] = {}
    verdicts: Counter[str] = Counter()
    latest = None
    for one in log:
        time_us = (NOW + one.minutes * MINUTE) * 1_000
        for start in window.starts(time_us):
            key = one.part.encode() + _named(start)
            if one in held.get(key, ()):
                verdicts["duplicate"] += 1
            elif latest is not None and (start + window.size + window.lateness) * 1_000_000 <= latest:
                verdicts["window_closed"] += 1
            else:
                held.setdefault(key, set()).add(one)
                verdicts["folded"] += 1
        latest = time_us if latest is None else max(latest, time_us)
    return held, verdicts


def _named(start: int) -> bytes:
    return pl.select(pl.from_epoch(pl.lit(start), "s").dt.strftime("@%Y-%m-%dT%H:%M:%SZ")).item().encode()


def flow_with(window: Window, **options: Any) -> Flow[Any]:
    return (
        Flow("fastening")
        .source(SCREWS)
        .aggregate("attempts", "part", Fields(n=count(), torque=total("torque")), window=window, **options)
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )


def plainly(counts: Counter[str]) -> Counter[str]:
    """Verdicts by what becomes of the message."""
    kinds = {"duplicate": "duplicate", "duplicate_in_batch": "duplicate", "window_closed": "window_closed"}
    found: Counter[str] = Counter()
    for verdict, number in counts.items():
        found[kinds.get(verdict, "folded")] += number
    return found


ROUNDS = 8
"""Batches and crashes after which the rest is read at once: a check is never longer than the draws that it may make."""
POINTS = ["fetch", "load", "fold", "publish", "persist:all", "persist:attempts", "manifest"]


def check(window: Window, found: list[list[Attempt]], data: st.DataObject) -> None:
    """Process logs in random batches with random crashes, and compare states and verdicts with the rule."""
    flow, store = flow_with(window), fresh_store()
    stores = bind(flow, {}, store)
    runner = MemoryRunner(flow, stores)
    verdicts: Counter[str] = Counter()
    crashed = False
    for number in numbers():
        start = {partition: runner.run.start.get(TopicPartition("screws", partition), 0) for partition in range(3)}
        left = [range(start[partition], len(log)) for partition, log in enumerate(found)]
        if not any(left):
            break
        batch = []
        for partition in data.draw(st.permutations(range(len(found)))):
            size = len(left[partition]) if number >= ROUNDS else data.draw(st.integers(0, len(left[partition])))
            batch += [found[partition][offset].record(offset) for offset in left[partition][:size]]
        dies = number < ROUNDS and data.draw(st.integers(0, 3)) == 0
        if dies:
            point, outcome = data.draw(st.sampled_from(POINTS)), data.draw(st.sampled_from(FaultOutcome))
            with faults.use(Injector([Fault(point, outcome)], crash)):
                try:
                    runner.process(batch)
                except (Crash, Transient):
                    crashed, runner = True, MemoryRunner(flow, stores)
            continue
        verdicts.update(plainly(runner.process(batch).verdicts["attempts"]))
    held: dict[bytes, set[Attempt]] = {}
    expected: Counter[str] = Counter()
    for log in found:
        mine, counts = wanted(log, window)
        held |= mine
        expected += counts
    assert runner.results("attempts") == {
        key: {"n": len(events), "torque": sum(one.root for one in events)} for key, events in held.items()
    }
    folded = sum(map(len, held.values()))
    assert runner.results("all") == ({b"all": {"n": folded}} if folded else {})
    if not crashed:
        assert verdicts == expected
    assert {key: window.split(key).key for key in held} == {
        key: next(one.part.encode() for one in events) for key, events in held.items()
    }


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(window=WINDOWS, found=logs(), data=st.data())
def test_batches_read_orders_and_crashes_do_not_change_what_windows_hold(
    window: Window, found: list[list[Attempt]], data: st.DataObject
) -> None:
    check(window, found, data)


def _judged_by_the_batch(
    elements: Sequence[Element[Any]], given: Sequence[int | None], flow: Flow[Any], read: Mapping[TopicPartition, int]
) -> tuple[list[Element[Any]], Times]:
    found, after = with_times(elements, given, flow, read)
    return [replace(one, before_us=after.get(TopicPartition(one.topic, one.partition))) for one in found], after


def _judged_by_all_partitions(
    elements: Sequence[Element[Any]], given: Sequence[int | None], flow: Flow[Any], read: Mapping[TopicPartition, int]
) -> tuple[list[Element[Any]], Times]:
    found, after = with_times(elements, given, flow, read)
    highest, judged = max(read.values(), default=None), []
    for one in found:
        judged.append(replace(one, before_us=latest(highest, one.before_us)))
        highest = latest(highest, one.time_us)
    return judged, after


PLANTED = {
    "late elements are judged by the latest time of their batch": (loop, "with_times", _judged_by_the_batch),
    "late elements are judged by the latest time of all partitions": (loop, "with_times", _judged_by_all_partitions),
    "times are not carried from batch to batch": (memory, "times_in", lambda *_: {}),
    "a restart begins without times": (common, "_progress", lambda *given: Progress(given[3])),
    "a window closes a microsecond too late": (
        Window,
        "closes_us",
        lambda self, start: (start + self.size + self.lateness) * 1_000_000 + 1,
    ),
    "a closed window says nothing of copies": (
        stage,
        "judge_closed",
        lambda *_: Decision(Verdict.WINDOW_CLOSED, fold=False),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    planted = given(window=WINDOWS, found=logs(), data=st.data())(check)
    few = settings(
        max_examples=100, derandomize=True, phases=[Phase.generate], deadline=None, report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        few(planted)()


class Listing:
    """A fold in Python that refuses some elements, until that is mended."""

    broken = True

    def zero(self) -> Any:
        return []

    def fold(self, state: Any, element: Element[Any]) -> Any:
        if Listing.broken and element["n"] == 5:
            raise ValueError
        return [*state, [element.offset, *element.indices, element.event_time_us]]

    def merge(self, state: Any, other: Any) -> Any:
        return [*state, *other]


@pytest.fixture(autouse=True)
def _broken() -> Iterator[None]:
    yield
    Listing.broken = True


def shared(element: Element[Any]) -> bytes:
    return str(element["who"]).encode()


def doubled(element: Element[Any]) -> Any:
    return {**element.value, "n": 2 * (element["n"] or 0)}


def emitted(element: Element[Any], state: Any) -> list[Any]:
    return [element.value] * (element.offset % 3)


EMIT = Emit(who="who", n="new.n", was="old.n")
VALUES = st.fixed_dictionaries(
    {
        "who": st.sampled_from(["ann", "bob", "ann", "bob", None]),
        "at": st.one_of(
            st.integers(0, 30).map(lambda m: NOW + m * MINUTE), st.sampled_from([None, 0, -(2**63), 2**63 - 1])
        ),
        "n": st.sampled_from([1, 2, 5, None]),
        "tags": st.lists(st.sampled_from(["x", "y"]), max_size=2),
    }
)
COLUMNS = {"who": str, "at": int, "n": int, "tags": [str]}


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    """Flows with windows in one or both stages, over one or two sources and every form of step and fold."""
    topics = [
        Topic(
            name,
            Json(columns),
            envelope=draw(st.booleans()),
            time=draw(st.sampled_from([None, "at", pl.col("at") + MINUTE])),
            ahead=draw(st.sampled_from(["1h", "5m"])),
        )
        for name, columns in {"orders": COLUMNS, "returns": {**COLUMNS, "why": str}}.items()
    ]
    flow: Flow[Any] = Flow("shop").source(*topics[: draw(st.sampled_from([1, 1, 2]))])
    if draw(st.booleans()):
        flow = flow.filter(pl.col("n").fill_null(0) != 2)
    if draw(st.integers(0, 3)) == 0:
        flow = flow.flat_map("tags")
    if draw(st.booleans()):
        flow = flow.publish("orders.out", name="before")
    if draw(st.integers(0, 3)) == 0:
        flow = flow.map(doubled)
    windows = st.sampled_from(
        [
            tumbling("5m", late="dead_letter"),
            tumbling("10m", lateness="3m"),
            hopping("10m", "5m"),
            hopping("9m", "3m", late="dead_letter"),
            session("2m", late="dead_letter"),
            session("3m", lateness="5m"),
        ]
    )
    fold = st.sampled_from([Fields(n=count(), sum=total("n")), Fields(n=count()), Listing()])
    first = draw(fold)
    emits = [EMIT, EMIT.changed()] if isinstance(first, Fields) else []
    flow = flow.aggregate(
        "first",
        draw(st.sampled_from(["who", "who", shared])),
        first,
        co_partitioned=draw(st.booleans()),
        window=draw(windows),
        emit=draw(st.sampled_from([None, None, emitted, *emits])),
    )
    if draw(st.booleans()):
        flow = flow.aggregate("second", pl.lit("all"), draw(fold), window=draw(st.one_of(st.none(), windows)))
    return flow.publish("end")


@st.composite
def batches(draw: st.DrawFn, topics: Sequence[Topic]) -> list[list[Record]]:
    """Records with and without chains, event times and timestamps, some of them sent again."""
    found = []
    offsets: Counter[tuple[str, int]] = Counter()
    sent: list[Record] = []
    for _ in range(draw(st.integers(1, 3))):
        batch = []
        for value in draw(st.lists(VALUES, min_size=1, max_size=6)):
            if sent and draw(st.integers(0, 4)) == 0:
                one = draw(st.sampled_from(sent))
            else:
                partition, minutes, topic = (
                    draw(st.integers(0, 1)),
                    draw(st.integers(0, 30)),
                    draw(st.sampled_from(topics)),
                )
                key = None if draw(st.integers(0, 9)) == 0 else b"%d" % partition
                # A key is in one partition.
                value = {**value, "who": value["who"] and f"{value['who']}-{partition}"}
                body = json.dumps(value).encode()
                if topic.envelope:
                    stamp = draw(st.sampled_from([None, NOW, NOW + 20 * MINUTE]))
                    root = offsets[topic.name, partition]
                    hop = Hop("raw", partition, root, via="a", index=0, topic_id="R", timestamp_ms=stamp)
                    time_us = draw(st.sampled_from([None, (NOW + minutes * MINUTE) * 1_000, 2**62]))
                    chain = (hop,) if draw(st.booleans()) else ()
                    body = encode(Envelope(body, chain, event_time_us=time_us))
                stamp_ms = draw(st.sampled_from([NOW + minutes * MINUTE, NOW + 40 * MINUTE, -1]))
                one = Record(topic.name, partition, 0, key, body, stamp_ms, (), TOPIC_ID)
            sent.append(one)
            batch.append(replace(one, offset=offsets[one.topic, one.partition]))
            offsets[one.topic, one.partition] += 1
        found.append(batch)
    return found


def back(both: Both, dead: DeadLetter, offset: int, how: str) -> Record:
    """A rejected record that comes back."""
    if how == "copy":
        return replace(dead.record, offset=offset)
    return both.redriven(dead, offset, "" if how == "redriven" else "another")


WAYS = st.lists(st.lists(st.sampled_from(["redriven", "redriven", "of another flow", "copy"]), min_size=1), max_size=3)


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(flow=flows(), data=st.data(), mended=st.booleans(), ways=WAYS)
def test_both_paths_put_elements_into_the_same_windows(
    flow: Flow[Any], data: st.DataObject, mended: bool, ways: list[list[str]]
) -> None:
    found = data.draw(batches([*flow.topics.values()]))
    Listing.broken = True
    both = Both(flow)
    for batch in found:
        both.process(batch)
    Listing.broken = not mended
    bring_back(both, found, ways, partial(back, both))
