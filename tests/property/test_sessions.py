"""Sessions: neither the ends of batches, nor the order of partitions, nor copies, nor a crash change what they hold."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as numbers
from typing import Any

import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, first, last, total
from aggregations.definition.aggregates_exact import collect, variance
from aggregations.definition.element import Element
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import SessionWindow, near, row_key, session
from aggregations.definition.source import Json, Topic
from aggregations.per_message import loop, sessions, stage
from aggregations.run import common, memory
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Decision, Envelope, Hop, TopicPartition, Verdict, encode
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from persistence.manifest import Progress
from tests.property import test_columns_fields as every
from tests.property import test_windows as windows
from tests.support.both import Both, record
from tests.support.pure import fresh_store

SCREWS = Topic("screws", Json({"part": str, "torque": int}))
MINUTE = 60_000
NOW = 1_699_999_200_000
PARTITIONS = 3


class Crash(Exception):
    """The process dies."""


def crash() -> Any:
    raise Crash


@dataclass(frozen=True)
class Attempt:
    """One fastening: the event of a record of topic `raw`. A part is in several partitions."""

    partition: int
    root: int
    minutes: int

    @property
    def part(self) -> str:
        """Its part."""
        return f"part-{self.root % 2}"

    @property
    def time_us(self) -> int:
        """When it happened."""
        return (NOW + self.minutes * MINUTE) * 1_000

    def delivered(self, offset: int) -> Any:
        """A delivery of it."""
        chain = (Hop("raw", self.partition, self.root, via="r", index=0, topic_id="R"),)
        value = json.dumps({"part": self.part, "torque": self.root}).encode()
        body = encode(Envelope(value, chain, event_time_us=self.time_us))
        stamped = record("screws", offset, self.part.encode(), body, self.partition)
        return replace(stamped, timestamp_ms=NOW + 10_000 * MINUTE)


WINDOWS = st.sampled_from(
    [session("1m"), session("3m"), session("3m", lateness="4m"), session("2m", lateness="1d"), session("1h")]
)


@st.composite
def logs(draw: st.DrawFn) -> list[list[Attempt]]:
    """Per partition the deliveries in their order: event times out of order, and some events sent again."""
    found = []
    for partition in range(draw(st.integers(1, PARTITIONS))):
        log: list[Attempt] = []
        for root in range(draw(st.integers(0, 10))):
            log.append(Attempt(partition, root, draw(st.integers(0, 25)) + root))
            if draw(st.integers(0, 3)) == 0:
                log.append(draw(st.sampled_from(log)))
        found.append(log)
    return found


def wanted(log: Sequence[Attempt], window: SessionWindow) -> tuple[set[Attempt], Counter[str]]:
    """The events of a partition that are folded, and the verdicts, by the rule."""
    held: set[Attempt] = set()
    verdicts: Counter[str] = Counter()
    latest = None
    for one in log:
        if one in held:
            verdicts["duplicate"] += 1
        elif latest is not None and latest - one.time_us > (window.gap + window.lateness) * 1_000_000:
            verdicts["window_closed"] += 1
        else:
            held.add(one)
            verdicts["folded"] += 1
        latest = one.time_us if latest is None else max(latest, one.time_us)
    return held, verdicts


def divided(events: set[Attempt], window: SessionWindow) -> dict[bytes, dict[str, Any]]:
    """The sessions: the events of each part in order of time, divided where the gap is exceeded."""
    found: dict[bytes, dict[str, Any]] = {}
    for part in {one.part for one in events}:
        runs: list[list[Attempt]] = []
        for one in sorted((one for one in events if one.part == part), key=lambda one: one.time_us):
            if runs and one.time_us - runs[-1][-1].time_us <= window.gap_us:
                runs[-1].append(one)
            else:
                runs.append([one])
        for run in runs:
            key = row_key(window.key_of(part.encode(), run[0].time_us, run[-1].time_us))
            lowest = min(run, key=lambda one: (one.root, one.partition))
            found[key] = {"n": len(run), "torque": sum(one.root for one in run), "first": lowest.root}
    return found


def flow_with(window: SessionWindow, **options: Any) -> Flow[Any]:
    fold = Fields(n=count(), torque=total("torque"), first=first("torque"))
    return (
        Flow("fastening")
        .source(SCREWS)
        .aggregate("attempts", "part", fold, window=window, co_partitioned=False, **options)
        .aggregate("all", pl.lit("all"), Fields(n=count()))
    )


def check(window: SessionWindow, found: list[list[Attempt]], data: st.DataObject) -> None:
    """Process logs in random batches with random crashes, and compare states and verdicts with the rule."""
    flow, store = flow_with(window), fresh_store()
    stores = bind(flow, {}, store)
    runner = MemoryRunner(flow, stores)
    verdicts: Counter[str] = Counter()
    crashed = False
    for number in numbers():
        start = {one: runner.run.start.get(TopicPartition("screws", one), 0) for one in range(PARTITIONS)}
        left = [range(start[partition], len(log)) for partition, log in enumerate(found)]
        if not any(left):
            break
        batch = []
        for partition in data.draw(st.permutations(range(len(found)))):
            whole = number >= windows.ROUNDS
            size = len(left[partition]) if whole else data.draw(st.integers(0, len(left[partition])))
            batch += [found[partition][offset].delivered(offset) for offset in left[partition][:size]]
        if number < windows.ROUNDS and data.draw(st.integers(0, 3)) == 0:
            point, outcome = data.draw(st.sampled_from(windows.POINTS)), data.draw(st.sampled_from(FaultOutcome))
            with faults.use(Injector([Fault(point, outcome)], crash)):
                try:
                    runner.process(batch)
                except (Crash, Transient):
                    crashed, runner = True, MemoryRunner(flow, stores)
            continue
        verdicts.update(windows.plainly(runner.process(batch).verdicts["attempts"]))
    held: set[Attempt] = set()
    expected: Counter[str] = Counter()
    for log in found:
        mine, counts = wanted(log, window)
        held |= mine
        expected += counts
    assert runner.results("attempts") == divided(held, window)
    assert runner.results("all") == ({b"all": {"n": len(held)}} if held else {})
    if not crashed:
        assert verdicts == expected


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(window=WINDOWS, found=logs(), data=st.data())
def test_batches_read_orders_copies_and_crashes_do_not_change_what_sessions_hold(
    window: SessionWindow, found: list[list[Attempt]], data: st.DataObject
) -> None:
    check(window, found, data)


def _near_one(held: Sequence[Any], time_us: int, gap_us: int) -> slice:
    place = near(held, time_us, gap_us)
    return slice(place.start, min(place.start + 1, place.stop))


PLANTED = {
    "late elements are judged by the latest time of their batch": (loop, "with_times", windows._judged_by_the_batch),
    "late elements are judged by the latest time of all partitions": (
        loop,
        "with_times",
        windows._judged_by_all_partitions,
    ),
    "times are not carried from batch to batch": (memory, "times_in", lambda *_: {}),
    "a restart begins without times": (common, "_progress", lambda *given: Progress(given[3])),
    "an element comes too late a microsecond too early": (
        SessionWindow,
        "closes_us",
        lambda self, time_us: time_us + (self.gap + self.lateness) * 1_000_000,
    ),
    "a copy that comes too late is not recognised": (
        stage,
        "judge_closed",
        lambda *_: Decision(Verdict.WINDOW_CLOSED, fold=False),
    ),
    "the gap is exclusive": (sessions, "near", lambda held, time_us, gap_us: near(held, time_us, gap_us - 1)),
    "an element joins the first of two sessions only": (sessions, "near", _near_one),
    "the later of two sessions is lost in a merge": (
        Fields,
        "merge",
        lambda _self, state, _other: state,
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


KEYS = st.sampled_from([pl.when(pl.col("string") != "").then("string"), "int32", "opt_int32"])
GAPS = st.sampled_from([session("1m"), session("2m", lateness="5m"), session("5m", late="dead_letter")])
MINUTES = st.lists(st.integers(0, 12), min_size=1, max_size=40)


def _emitted(element: Element[Any], state: Any) -> list[Any]:
    return [state, {"own": element.offset}][: element.offset % 3]


@st.composite
def _flows(draw: st.DrawFn) -> Flow[Any]:
    fields: Mapping[str, Any] = draw(every.fields).fields
    columns = Emit(n="new.n", was="old.n")
    emit = draw(st.sampled_from([None, None, columns, columns.changed(), _emitted]))
    fold = Fields(n=count(where=draw(st.none() | every.predicates)), **fields)
    flow = Flow("f").source(every.TOPIC)
    flow = flow.aggregate("one", draw(KEYS), fold, co_partitioned=False, window=draw(GAPS), emit=emit)
    return flow.publish_states("states").aggregate("two", pl.lit("all"), Fields(n=count()), window=draw(GAPS))


@settings(max_examples=2 * settings.default.max_examples)
@given(_flows(), every.batches(), MINUTES)
def test_columns_put_rows_into_the_sessions_of_the_definition(
    flow: Flow[Any], found: list[list[tuple[int, bytes]]], minutes: list[int]
) -> None:
    both = Both(flow)
    for batch in found:
        both.process(
            [
                replace(
                    record(every.TOPIC.name, offset, b"k", value),
                    timestamp_ms=NOW + minutes[offset % len(minutes)] * MINUTE,
                )
                for offset, value in batch
            ]
        )


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_both_paths_divide_long_histories_alike_whatever_the_batches(
    minutes: list[int], gap: int, size: int, emits: bool
) -> None:
    window = session(f"{gap}m", lateness="1d")
    fold = Fields(
        n=count(), torque=total("torque"), all=collect("torque", 50), spread=variance("torque"), end=last("torque")
    )
    flow = Flow("f").source(Topic("screws", Json({"torque": int}), envelope=False))
    flow = flow.aggregate("s", pl.lit("s"), fold, window=window, emit=Emit(n="new.n") if emits else None).publish("o")
    both = Both(flow)
    records = [
        replace(record("screws", i, b"s", json.dumps({"torque": i}).encode()), timestamp_ms=NOW + minute * MINUTE)
        for i, minute in enumerate(minutes)
    ]
    for begin in range(0, len(records), size):
        both.process(records[begin : begin + size])
    runs: list[list[int]] = []
    for minute in sorted(minutes):
        if runs and minute - runs[-1][-1] <= gap:
            runs[-1].append(minute)
        else:
            runs.append([minute])
    found = [one for _, one in sorted(both.results("s").items())]
    assert [one["n"] for one in found] == [len(run) for run in runs]
    assert sorted(torque for one in found for torque in one["all"]["values"]) == list(range(len(minutes)))
