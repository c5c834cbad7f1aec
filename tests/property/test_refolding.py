"""A second fold of the same history has the same states, wherever its batches end and however its partitions advance."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, first, maximum, mean, total
from aggregations.definition.aggregates_sketches import approximate_distinct
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.run.binding import bind
from aggregations.run.border import removed_by_stage
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, TopicPartition, encode
from jobs.comparing import Comparison, compare
from jobs.refolding.rows import Rows, latest_removal
from tests.support.pure import TOPIC_ID, fresh_store

PARTITIONS = 2
COLUMNS = {"tail": str, "carrier": str, "minutes": int, "at": int}


@dataclass(frozen=True)
class Event:
    """One event of a root topic; its minutes are its number."""

    number: int
    tail: str
    carrier: str
    minute: int
    broken: bool = False

    def record(self, partition: int, offset: int) -> Record:
        """One delivery of it."""
        payload = {"tail": self.tail, "carrier": self.carrier, "minutes": self.number, "at": self.minute * 60_000}
        value = encode(
            Envelope(
                b"?" if self.broken else json.dumps(payload).encode(),
                chain=[Hop("raw", partition, self.number, via="wrap", index=0, topic_id="id-raw")],
            )
        )
        stamp = 10_000_000
        return Record("legs", partition, offset, self.tail.encode(), value, stamp, (), TOPIC_ID)


@st.composite
def logs(draw: st.DrawFn) -> list[list[Event]]:
    """Logs of all partitions: events that are somewhat out of order in time, some sent again a little later."""
    made: list[list[Event]] = []
    for partition in range(PARTITIONS):
        events = [
            Event(
                number,
                f"N{partition}{draw(st.integers(0, 1))}",
                draw(st.sampled_from(["AA", "UA"])),
                max(number * draw(st.integers(0, 3)) + draw(st.integers(-4, 4)), 0),
                draw(st.integers(0, 9)) == 0,
            )
            for number in range(draw(st.integers(0, 14)))
        ]
        log: list[Event] = []
        for event in events:
            log.append(event)
            if draw(st.booleans()):
                log.append(draw(st.sampled_from(log)))
        made.append(log)
    return made


def flow(weight: int = 1) -> Flow[Any]:
    """Sessions, windows and states that expire, re-keyed; minutes of one carrier may count several times."""
    minutes = pl.when(pl.col("carrier") == "AA").then(pl.col("minutes") * weight).otherwise(pl.col("minutes"))
    fold = Fields(n=count(), m=total("minutes"))
    most = Fields(
        n=count(), m=total(minutes), mean=mean("minutes"), last=maximum("minutes"), tails=approximate_distinct("tail")
    )
    return (
        Flow("history")
        .source(Topic("legs", Json(COLUMNS), time="at"))
        .aggregate("visit", "tail", fold, window=session("3m", lateness="1m", retention="1m"))
        .aggregate("kept", "tail", Fields(n=count(), first=first("minutes")), expire_after="10m")
        .aggregate("window", "carrier", fold, window=tumbling("5m", lateness="2m", retention="1m"))
        .aggregate("activity", "carrier", fold, window=session("4m", retention="2m"))
        .aggregate("carrier", "carrier", most)
    )


def begun(made: Flow[Any], found: Sequence[Sequence[Event]]) -> MemoryRunner:
    """A run that has read nothing."""
    run = MemoryRunner(made, bind(made, {}, fresh_store()), ends={}, whole=lambda: dict(enumerate(map(len, found))))
    run.run.start_at("legs", TOPIC_ID, dict.fromkeys(range(PARTITIONS), 0))
    return run


def folded(made: Flow[Any], found: Sequence[Sequence[Event]], data: st.DataObject) -> MemoryRunner:
    """A run to the ends of the logs, in batches of any size."""
    run = begun(made, found)
    read(run, found, data)
    return run


def read(run: MemoryRunner, found: Sequence[Sequence[Event]], data: st.DataObject) -> None:
    """Let a run read to the ends of the logs, in batches of any size."""
    while True:
        start = [run.run.start.get(TopicPartition("legs", at), 0) for at in range(PARTITIONS)]
        left = [range(at, len(log)) for at, log in zip(start, found, strict=True)]
        if not any(left):
            return
        batch: list[Record] = []
        for partition, offsets in enumerate(left):
            size = data.draw(st.integers(0, len(offsets)))
            batch += [found[partition][offset].record(partition, offset) for offset in offsets[:size]]
        if batch:
            run.process(batch)


def compared(old: MemoryRunner, new: MemoryRunner, *, removals: bool = True) -> Comparison:
    gone = latest_removal(removed_by_stage(old.run), removed_by_stage(new.run)) if removals else {}
    sides = []
    for run, other in ((old, new), (new, old)):
        states = [
            (stage.name, [(key, one.value) for key, one in run.run.stores[stage.name].scan(run.run.stage_ref(stage))])
            for stage in run.flow.stages
        ]
        sides.append(Rows(run.flow, other.flow, 1, gone=gone).read(states))
    return compare(*sides, stages=[stage.name for stage in new.flow.stages])


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(found=logs(), data=st.data())
def test_a_second_fold_of_the_same_history_has_no_differences(found: list[list[Event]], data: st.DataObject) -> None:
    with closing(folded(flow(), found, data)) as live, closing(folded(flow(), found, data)) as again:
        assert compared(live, again).differences == 0


def test_without_the_times_of_removal_a_session_that_left_one_store_would_be_a_difference() -> None:
    mine = [Event(number, "N00", "AA", minute) for number, minute in enumerate((0, 60, 120))]
    found = [mine, [Event(0, "N10", "AA", 120)]]
    records = [event.record(at, offset) for at, log in enumerate(found) for offset, event in enumerate(log)]
    one_batch, one_by_one = begun(flow(), found), begun(flow(), found)
    with closing(one_batch), closing(one_by_one):
        one_batch.process(records)
        for record in (records[3], *records[:3]):
            one_by_one.process([record])
        assert compared(one_batch, one_by_one).differences == 0
        assert compared(one_batch, one_by_one, removals=False).stages["visit"].only_old == 1


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(found=logs(), data=st.data())
def test_another_definition_changes_exactly_the_keys_that_it_folds_otherwise(
    found: list[list[Event]], data: st.DataObject
) -> None:
    with closing(folded(flow(), found, data)) as old, closing(folded(flow(3), found, data)) as new:
        differences = compared(old, new)
        before = old.results("carrier").get(b"AA", {"m": 0})
        expected = [b"AA"] if before["m"] else []
        assert [one.key for one in differences.stages["carrier"].sample] == expected
        assert differences.differences == len(expected)
        if expected:
            fields = differences.stages["carrier"].fields
            assert fields["m"].total == 2 * before["m"]
            assert [name for name, one in fields.items() if one.changed] == ["m"]


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(found=logs(), data=st.data())
def test_an_event_that_the_live_states_lack_is_drift(found: list[list[Event]], data: st.DataObject) -> None:
    events = sorted(
        {(partition, event.number) for partition, log in enumerate(found) for event in log if not event.broken}
    )
    lost = data.draw(st.sampled_from(events)) if events else None
    without = [[one for one in log if (at, one.number) != lost] for at, log in enumerate(found)]
    with closing(folded(flow(), without, data)) as live, closing(folded(flow(), found, data)) as again:
        carriers = compared(live, again).stages["carrier"]
        folded_once = live.results("carrier") != again.results("carrier")
        assert (carriers.differences > 0) is folded_once
