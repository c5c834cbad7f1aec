"""Windows of a stage: their definition, the event time, and what becomes of late elements."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import Window, hopping, tumbling
from aggregations.engine.columnar import ColumnarPath
from aggregations.engine.messages import MessagePath
from aggregations.engine.path import Path, Work
from aggregations.errors import FlowError, SharedKeyError
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.discard import fill_holes
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import read_snapshot
from envelope import Envelope, Hop, Reason, Tombstones, encode
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.support.both import TOPIC_ID, Both
from tests.support.jobs import job_of
from tests.support.pure import fresh_store, table_of

NOW = 1_764_000_000_000
MINUTE = 60_000
SCREWS = Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at")
COUNT = Fields(n=count())


def at(offset: int, minute: int | None, *, partition: int = 0, stamp: int = NOW + 60 * MINUTE, screw: str = "s") -> Any:
    """A fastening at a minute; none without a time."""
    value = json.dumps({"screw": screw, "at": None if minute is None else NOW + minute * MINUTE}).encode()
    return _record(offset, value, partition, stamp)


def _record(offset: int, value: bytes, partition: int = 0, stamp: int = NOW) -> Any:
    return Record("screws", partition, offset, b"s-%d" % partition, value, stamp, (), TOPIC_ID)


def flow(window: Window, topic: Topic = SCREWS, **options: Any) -> Flow[Any]:
    return Flow("fastening").source(topic).aggregate("screw", "screw", COUNT, window=window, **options)


def counts(runner: MemoryRunner, stage: str = "screw") -> dict[str, int]:
    return {key.decode(): state["n"] for key, state in runner.results(stage).items()}


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: tumbling("0s"), "longer than 0s"),
        (lambda: tumbling("-5m"), "a number of seconds"),
        (lambda: tumbling("5 minutes"), "a number of seconds"),
        (lambda: tumbling(300), "got int"),  # type: ignore[arg-type]
        (lambda: tumbling("4000d"), "at most 3650d"),
        (lambda: tumbling("5m", lateness="-1m"), "lateness= takes"),
        (lambda: tumbling("5m", late="ignore"), "drop, dead_letter"),
        (lambda: hopping("10m", "3m"), "slide 3m does not divide size 10m"),
        (lambda: hopping("5m", "10m"), "does not divide"),
        (lambda: hopping("1d", "1s"), "the limit is 1000"),
        (lambda: flow("5m"), 'tumbling\\("5m"\\)'),  # type: ignore[arg-type]
        (lambda: Topic("a", Json({"at": str}), time="at"), "an integer in milliseconds"),
        (lambda: Topic("a", Json({"at": int}), time="then"), "no column then"),
        (
            lambda: Topic("a", Json({"at": int}), time="_timestamp"),
            "reads _timestamp; .* differ between two deliveries",
        ),
        (lambda: Topic("a", Json({"at": int}), time="_event_time_us"), "reads _event_time_us; it takes the payload"),
        (lambda: Topic("a", Json({"at": int}), time="at", ahead="soon"), "ahead= takes"),
    ],
)
def test_windows_and_times_that_cannot_work_are_refused_when_the_flow_is_defined(make: Any, wanted: str) -> None:
    with pytest.raises(FlowError, match=wanted):
        make()


def test_a_window_and_the_event_time_are_part_of_the_definition_and_the_policy_is_not() -> None:
    def made(window: Window, **topic: Any) -> str:
        source = Topic("screws", Json({"screw": str, "at": int}), envelope=False, **{"time": "at", **topic})
        return flow(window, source).stages[0].definition

    base = made(tumbling("5m"))
    assert base == made(tumbling("300s", late="dead_letter"), ahead="60m")
    others = [made(tumbling("5m", lateness="1m")), made(hopping("5m", "1m")), made(tumbling("5m"), time=None)]
    others += [made(tumbling("5m"), time=pl.col("at") * 2), made(tumbling("5m"), ahead="2h")]
    assert len({base, *others}) == 6


def test_a_stage_behind_a_windowed_one_depends_on_which_elements_that_one_passes_on() -> None:
    behind = {
        flow(window).aggregate("all", "screw", COUNT).stages[1].definition
        for window in (tumbling("5m"), tumbling("1h"))
    }
    assert len(behind) == 2


def test_an_element_is_in_every_window_that_contains_its_time() -> None:
    both = Both(flow(hopping("10m", "5m")))
    both.process([at(0, 0), at(1, 4), at(2, 5)])
    assert counts(both.memory) == {
        "s@2025-11-24T15:55:00Z": 2,
        "s@2025-11-24T16:00:00Z": 3,
        "s@2025-11-24T16:05:00Z": 1,
    }


def test_a_window_closes_exactly_when_its_partition_reaches_its_end_plus_the_lateness() -> None:
    both = Both(flow(tumbling("5m", lateness="2m")))
    both.process([at(0, 0), at(1, 6), at(2, 4), at(3, 7), at(4, 4)])
    assert counts(both.memory)["s@2025-11-24T16:00:00Z"] == 2
    assert both.memory.report.verdicts["screw"]["window_closed"] == 1


def test_one_partition_does_not_close_the_windows_of_another() -> None:
    both = Both(flow(tumbling("5m")))
    both.process([at(0, 50), at(0, 1, partition=1, screw="t"), at(1, 50, partition=1, screw="t"), at(1, 1)])
    assert {"s@2025-11-24T16:00:00Z", "t@2025-11-24T16:00:00Z"} & set(counts(both.memory)) == {"t@2025-11-24T16:00:00Z"}


@pytest.mark.parametrize("minute", [None, 61 + 60 + 60, 60 * 24 * 365 * 8000, -(60 * 24 * 365 * 1100)])
def test_a_missing_or_impossible_time_is_a_dead_letter_and_closes_no_window(minute: int | None) -> None:
    both = Both(flow(tumbling("5m")))
    both.process([at(0, 0), at(1, minute), at(2, 1)])
    assert both.reasons() == [(1, Reason.BAD_EVENT_TIME)]
    assert counts(both.memory) == {"s@2025-11-24T16:00:00Z": 2}


def test_the_timestamp_of_a_republished_record_is_no_event_time_but_that_of_its_root_is() -> None:
    topic = Topic("screws", Json({"screw": str, "at": int}))

    def sent(offset: int, hop: Hop | None, time_us: int | None) -> Any:
        chain = () if hop is None else (hop,)
        return _record(
            offset, encode(Envelope(b'{"screw": "s"}', chain, event_time_us=time_us)), stamp=NOW + 30 * MINUTE
        )

    both = Both(flow(tumbling("5m", lateness="1d"), topic))
    root = Hop("raw", 0, 1, via="r", index=0, topic_id="R", timestamp_ms=NOW)
    both.process(
        [
            sent(0, None, None),
            sent(1, root, None),
            sent(2, Hop("raw", 0, 2, via="r", index=0, topic_id="R"), None),
            sent(3, Hop("raw", 0, 3, via="r", index=0, topic_id="R"), (NOW + 5 * MINUTE) * 1_000),
        ]
    )
    assert counts(both.memory) == {
        "s@2025-11-24T16:30:00Z": 1,
        "s@2025-11-24T16:00:00Z": 1,
        "s@2025-11-24T16:05:00Z": 1,
    }
    assert both.reasons() == [(2, Reason.BAD_EVENT_TIME)]


def test_late_elements_follow_the_policy_again_when_they_are_redriven() -> None:
    both = Both(flow(tumbling("5m", late="dead_letter")).aggregate("all", "screw", COUNT))
    both.process([at(0, 20), at(1, 1)])
    [letter] = both.dead_letters
    assert (letter.reason, letter.hole) == (Reason.WINDOW_CLOSED, False)
    both.process([both.redriven(letter, 2), both.redriven(letter, 3, "another")])
    assert both.reasons() == [(1, Reason.WINDOW_CLOSED), (2, Reason.WINDOW_CLOSED)]
    assert both.memory.report.verdicts["screw"] == {"accepted": 1, "window_closed": 2, "copy": 1}
    assert counts(both.memory, "all") == {"s": 1}


class Refusing:
    """Refuses everything, until that is mended."""

    broken = True

    def zero(self) -> int:
        return 0

    def fold(self, state: int, element: Any) -> int:
        if self.broken:
            raise ValueError
        return state + 1


def test_a_redriven_letter_of_an_open_window_is_folded_and_of_a_closed_one_follows_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Both(Flow("f").source(SCREWS).aggregate("screw", "screw", Refusing(), window=tumbling("10m", lateness="5m")))
    both.process([at(0, 0), at(1, 10)])
    monkeypatch.setattr(Refusing, "broken", False)
    first, second = both.dead_letters
    both.process([both.redriven(second, 2), at(3, 15), both.redriven(first, 4)])
    assert both.memory.results("screw") == {b"s@2025-11-24T16:10:00Z": 2}
    assert both.memory.report.verdicts["screw"] == {"rejected": 2, "redriven": 1, "accepted": 1, "window_closed": 1}


def test_a_discarded_letter_leaves_no_hole_in_its_window() -> None:
    one = Flow("f").source(SCREWS).aggregate("screw", "screw", Refusing(), window=hopping("10m", "5m"))
    both = Both(one)
    both.process([at(0, 0), at(1, 30)])
    letters = [both.redriven(letter, letter.record.offset) for letter in both.dead_letters]
    assert set(fill_holes(both.memory.run, letters, apply=True).values()) == {2}
    assert [state.histories.holes for state in both.memory.states("screw").values()] == [{}] * 4


def test_a_copy_of_what_a_closed_window_holds_is_a_duplicate() -> None:
    topic = Topic("screws", Json({"screw": str, "at": int}), time="at")

    def sent(offset: int, root: int, minute: int) -> Any:
        value = json.dumps({"screw": "s", "at": NOW + minute * MINUTE}).encode()
        hop = Hop("raw", 0, root, via="r", index=0, topic_id="R")
        return _record(offset, encode(Envelope(value, (hop,))), stamp=NOW + 60 * MINUTE)

    both = Both(flow(tumbling("5m", late="dead_letter"), topic))
    both.process([sent(0, 0, 0), sent(1, 2, 9), sent(2, 0, 0), sent(3, 1, 0)])
    both.process([sent(4, 0, 0), sent(5, 1, 0)])
    assert both.memory.report.verdicts["screw"] == {
        "accepted": 2,
        "duplicate_in_batch": 1,
        "duplicate": 1,
        "window_closed": 2,
    }
    assert len(both.dead_letters) == 2


class Crash(Exception):
    """The process dies."""


def _crash() -> Any:
    raise Crash


def test_after_a_crash_between_two_manifests_time_is_that_of_the_lowest_offset() -> None:
    two = flow(tumbling("5m")).aggregate("all", pl.lit("all"), COUNT)
    stores = bind(two, {"screw": fresh_store(), "all": fresh_store()})
    runner = MemoryRunner(two, stores)
    runner.process([at(0, 0)])
    with faults.use(Injector([Fault("manifest:screw", FaultOutcome.BEFORE)], _crash)), pytest.raises(Crash):
        runner.process([at(1, 1), at(2, 20), at(3, 2)])
    again = MemoryRunner(two, stores)
    again.process([at(1, 1)])
    again.process([at(2, 20), at(3, 2)])
    assert counts(again, "screw") == {"s@2025-11-24T16:00:00Z": 2, "s@2025-11-24T16:20:00Z": 1}
    assert counts(again, "all") == {"all": 3}


def test_in_a_topic_that_was_created_again_time_begins_anew() -> None:
    one = flow(tumbling("5m"))
    runner = MemoryRunner(one, bind(one, {}, fresh_store()))
    runner.process([at(0, 20)])
    runner.process([_of("T2", at(0, 1))])
    assert counts(runner) == {"s@2025-11-24T16:20:00Z": 1, "s@2025-11-24T16:00:00Z": 1}


def _of(topic_id: str, record: Any) -> Any:
    return replace(record, topic_id=topic_id)


def test_a_snapshot_names_its_window() -> None:
    one = flow(tumbling("5m")).publish_states("states")
    runner = MemoryRunner(one, bind(one, {}, fresh_store()))
    runner.process([at(0, 1), at(1, 7)])
    found = [(out.key, (read := read_snapshot(out.value)).window_start, read.window_end) for out in runner.outputs]
    assert found == [
        (b"s@2025-11-24T16:00:00Z", "2025-11-24T16:00:00Z", "2025-11-24T16:05:00Z"),
        (b"s@2025-11-24T16:05:00Z", "2025-11-24T16:05:00Z", "2025-11-24T16:10:00Z"),
    ]


def test_the_key_of_a_state_is_divided_whatever_the_stages_key_contains() -> None:
    window = tumbling("1h")
    begins = datetime(2026, 11, 24, 6, tzinfo=UTC)
    for key in (b"", b"a@b", b"s@2026-11-24T05:00:00Z", bytes(range(256))):
        assert window.split(window.key_at(key, begins))[:2] == (key, begins)
    with pytest.raises(ValueError, match="start of a window"):
        window.split(b"s")
    with pytest.raises(FlowError, match="no window starts"):
        window.key_at(b"s", datetime(2026, 11, 24, 6, 1, tzinfo=UTC))
    with pytest.raises(FlowError, match="no time zone"):
        window.key_at(b"s", datetime(2026, 11, 24, 6))


JOINTS = Topic("joints", Json({"screw": str}), envelope=False)


def joint(offset: int, minute: int, partition: int = 0) -> Any:
    """A joint of a screw: its time is the record's timestamp."""
    return replace(
        _record(offset, b'{"screw": "s"}', partition, NOW + minute * MINUTE), topic="joints", key=b"s-%d" % partition
    )


@pytest.mark.parametrize(
    "together",
    [
        lambda: Flow("fastening").source(SCREWS, JOINTS),
        lambda: Flow("one").source(SCREWS).merge(Flow("two").source(JOINTS).map(screw=pl.col("screw"))),
    ],
    ids=["source", "merge"],
)
def test_each_source_closes_windows_for_its_own_elements_alone(together: Any) -> None:
    both = Both(together().aggregate("screw", "screw", COUNT, window=tumbling("5m")))
    both.process([at(0, 20), joint(0, 1), joint(1, 6)])  # no joint of minute 1 is late, although a screw is far ahead
    both.process([joint(2, 2), joint(3, 7), at(1, 1)])
    both.process([joint(4, 21), at(2, 19)])
    assert counts(both.memory) == {
        "s@2025-11-24T16:00:00Z": 1,
        "s@2025-11-24T16:05:00Z": 2,
        "s@2025-11-24T16:20:00Z": 2,
    }
    assert both.memory.report.verdicts["screw"]["window_closed"] == 3


@pytest.mark.parametrize(
    ("window", "held", "closed"), [(tumbling("5m"), 4, 2), (hopping("10m", "5m", late="dead_letter"), 9, 3)]
)
def test_columns_are_emitted_for_open_windows_only(window: Window, held: int, closed: int) -> None:
    made = flow(window, emit=Emit(screw="screw", n="new.n", was="old.n").when(pl.col("new.n") > 0)).publish("seen")
    both = Both(made)
    both.process([at(0, 1), at(1, 2), at(2, 20)])
    both.process([at(3, 3), at(4, 21), at(5, 16)])
    assert len(both.memory.outputs) == sum(counts(both.memory).values()) == held
    assert both.memory.report.verdicts["screw"]["window_closed"] == closed


def test_a_batch_in_which_nothing_can_be_read_changes_no_window() -> None:
    both = Both(flow(tumbling("5m")))
    both.process([at(0, 20)])
    both.process([_record(1, b"no JSON")])
    both.process([at(2, 1)])
    assert counts(both.memory) == {"s@2025-11-24T16:20:00Z": 1}


def test_a_topic_with_another_policy_keeps_its_event_time() -> None:
    other = replace(Topic("a", Json({"at": int}), time="at", ahead="2h"), tombstones=Tombstones.DEAD_LETTER)
    assert (other.time, other.ahead, other.ahead_seconds) == ("at", "2h", 7_200)
    assert other == Topic("a", Json({"at": int}), time="at", ahead="120m", tombstones=Tombstones.DEAD_LETTER)


def test_a_key_in_two_partitions_is_noticed_in_windows_of_two_sources() -> None:
    made = Flow("fastening").source(SCREWS, JOINTS).aggregate("screw", "screw", COUNT, window=tumbling("5m"))
    records = table_of([replace(at(0, 1), key=b"s"), replace(at(0, 1, partition=1), key=b"s")])
    urls = bind(made, {}, fresh_store())
    run, ids, paths = begin(made, urls), {"screws": TOPIC_ID, "joints": "J"}, (ColumnarPath(), MessagePath())
    for path in cast("tuple[Path, ...]", paths):
        job = job_of(made, run, ids)
        arrivals = path.read(work := Work(job), [records])
        with pytest.raises(SharedKeyError):
            path.fold(work, made.stages[0], arrivals)
