"""Sessions of a stage: their definition, the gap, merges, late elements, and how readers see them."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import polars as pl
import pytest

from aggregations.definition import sessions
from aggregations.definition.aggregates import FieldAggregate, count, first, last, maximum, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, histogram, standard_deviation, variance
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import SessionWindow, are_sessions, near, session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import Window, tumbling
from aggregations.errors import DefinitionChangedError, FlowError
from aggregations.run.binding import bind
from aggregations.run.discard import fill_holes
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Latest, read_snapshot
from envelope import Envelope, Hop, Reason, decode, encode
from tests.support.both import Both, record
from tests.support.pure import fresh_store

SECOND = 1_000
SCREWS = Topic("screws", Json({"screw": str, "at": int}), envelope=False, time="at")
SEED = [4, 5, 6, 23, 22, 24, 34, 33, 32, 7, 22, 35]
"""The worked example of KIP-655, in seconds."""


def at(offset: int, second: int, *, partition: int = 0, screw: str = "s") -> Any:
    """A fastening so many seconds after 1970."""
    value = json.dumps({"screw": screw, "at": second * SECOND}).encode()
    one = record("screws", offset, screw.encode(), value, partition)
    return replace(one, timestamp_ms=second * SECOND)


def flow(window: SessionWindow, fold: Any = None, **options: Any) -> Flow[Any]:
    fold = fold or Fields(n=count(), first=first("at"), values=collect("at", 100))
    return Flow("fastening").source(SCREWS).aggregate("screw", "screw", fold, window=window, **options)


def found(both: Both | MemoryRunner, stage: str = "screw") -> dict[tuple[int, int], int]:
    """Number of fastenings by first and last second of each session."""
    window = session("1s")
    divided = [(window.split(key), state) for key, state in both.results(stage).items()]
    return {(round(one.start.timestamp()), round(one.end.timestamp())): state["n"] for one, state in divided}


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("gap", ["9s", "10s"])
def test_the_worked_example_of_kip_655_is_two_sessions_whatever_the_batches(gap: str, size: int) -> None:
    both = Both(flow(session(gap, lateness="1m")))
    for begin in range(0, len(SEED), size):
        both.process([at(offset, SEED[offset]) for offset in range(begin, min(begin + size, len(SEED)))])
    assert found(both) == {(4, 7): 4, (22, 35): 8}


def test_with_a_gap_of_9_the_example_has_a_third_session_until_an_element_connects_two() -> None:
    both = Both(flow(session("9s", lateness="1m")))
    both.process([at(offset, second) for offset, second in enumerate(SEED[:7])])
    assert found(both) == {(4, 6): 3, (22, 24): 3, (34, 34): 1}
    both.process([at(7, 33)])
    assert found(both) == {(4, 6): 3, (22, 34): 5}


def test_two_elements_exactly_a_gap_apart_are_in_one_session() -> None:
    both = Both(flow(session("10s")))
    both.process([at(0, 0), at(1, 10), at(2, 21)])
    assert found(both) == {(0, 10): 2, (21, 21): 1}


def test_an_element_that_connects_two_sessions_merges_their_states_and_every_copy_is_dropped() -> None:
    topic = Topic("screws", Json({"screw": str, "at": int}), time="at")

    def sent(offset: int, root: int, second: int) -> Any:
        hop = Hop("raw", 0, root, via="r", index=0, topic_id="R")
        one = at(offset, second)
        return replace(one, value=encode(Envelope(cast("bytes", one.value), (hop,))))

    counted = (
        Flow("f").source(topic).aggregate("screw", "screw", Fields(n=count()), window=session("10s", lateness="1h"))
    )
    both = Both(counted)
    both.process([sent(0, 0, 0), sent(1, 1, 20), sent(2, 0, 0)])
    assert found(both) == {(0, 0): 1, (20, 20): 1}
    both.process([sent(3, 2, 10), sent(4, 1, 20)])
    both.process([sent(5, 0, 0), sent(6, 1, 20), sent(7, 2, 10)])
    assert found(both) == {(0, 20): 3}
    assert both.memory.report.verdicts["screw"] == {"accepted": 3, "duplicate_in_batch": 1, "duplicate": 4}


@pytest.mark.parametrize("lateness", [0, 5])
def test_an_element_comes_too_late_if_its_partition_is_further_ahead_than_gap_and_lateness(lateness: int) -> None:
    both = Both(flow(session("10s", lateness=f"{lateness}s", late="dead_letter")))
    both.process([at(0, 100), at(1, 90 - lateness), at(2, 89 - lateness)])
    assert sum(found(both).values()) == 2
    assert both.reasons() == [(2, Reason.WINDOW_CLOSED)]


def test_an_element_of_an_open_session_is_late_by_the_log_of_its_own_partition_alone() -> None:
    both = Both(flow(session("10s"), co_partitioned=False))
    both.process([at(0, 0), at(1, 10), at(2, 20), at(3, 30), at(4, 15)])
    both.process([at(0, 15, partition=1), at(1, 30, partition=1)])
    assert found(both) == {(0, 30): 6}
    assert both.memory.report.verdicts["screw"]["window_closed"] == 1


ALL: dict[str, FieldAggregate] = {
    "n": count(),
    "total": total("at"),
    "low": minimum("at"),
    "high": maximum("at"),
    "mean": mean("at"),
    "first": first("at"),
    "last": last("at", by="screw"),
    "variance": variance("at"),
    "deviation": standard_deviation("at"),
    "histogram": histogram("at", [5_000.0]),
    "collect": collect("at", 3),
    "distinct": approximate_distinct("at"),
    "quantiles": quantiles("at"),
    "top": top("at", 2),
}


def test_every_built_in_aggregate_is_merged() -> None:
    apart = Both(flow(session("10s", lateness="1h"), Fields(**ALL)))
    apart.process([at(0, 0), at(1, 20)])
    apart.process([at(2, 10)])
    together = Both(flow(session("10s", lateness="1h"), Fields(**ALL)))
    together.process([at(0, 0)])
    together.process([at(2, 10)])
    together.process([at(3, 20)])
    [one], [other] = apart.results("screw").values(), together.results("screw").values()
    # The order of positions is another one, as are the offsets.
    by_position = {"last": None, "collect": None}
    assert {**one, **by_position} == {**other, **by_position}
    assert (one["n"], one["last"], one["collect"]["values"]) == (3, 10_000, [0, 20_000, 10_000])


class Unmergeable(FieldAggregate):
    """An aggregate without `merge`."""

    kind = "median"


class Listing:
    """The seconds in order of folding; a fold with a merge."""

    def zero(self) -> list[int]:
        return []

    def fold(self, state: list[int], element: Any) -> list[int]:
        if element["at"] == 13 * SECOND:
            raise ValueError
        return [*state, element["at"] // SECOND]

    def merge(self, state: list[int], other: list[int]) -> list[int]:
        return sorted([*state, *other])

    def result(self, state: list[int]) -> dict[str, Any]:
        return {"n": len(state), "seconds": state}


class Alone:
    """A fold without a merge."""

    def zero(self) -> int:
        return 0

    def fold(self, state: int, element: Any) -> int:
        return state + 1


class Wrong(Alone):
    """A fold whose merge returns something that is not a state."""

    def merge(self, state: int, other: int) -> tuple[int, int]:
        return state, other


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: session("0s"), "longer than 0s"),
        (lambda: session("-1m"), "a number of seconds"),
        (lambda: session(10), "got int"),  # type: ignore[arg-type]
        (lambda: session("5m", lateness="soon"), "lateness= takes"),
        (lambda: session("5m", late="ignore"), "drop, dead_letter"),
        (lambda: flow(cast("Any", "5m")), r'session\("5m"\)'),
        (lambda: flow(session("5m"), Fields(m=Unmergeable("at"))), r"cannot be merged: m \(median\)"),
        (lambda: flow(session("5m"), Alone()), r"give Alone a method merge\(state, other\)"),
        (lambda: flow(session("5m"), Wrong()), r"merge\(\) of its fold does not return a state"),
    ],
)
def test_sessions_that_cannot_work_are_refused_when_the_flow_is_defined(make: Any, wanted: str) -> None:
    with pytest.raises(FlowError, match=wanted):
        make()


def test_a_fold_in_python_is_merged_by_its_own_method_and_what_it_refuses_leaves_a_hole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Both(flow(session("10s", lateness="1h"), Listing()))
    both.process([at(0, 0), at(1, 20), at(2, 13), at(3, 5)])
    both.process([at(4, 12), at(5, 1)])
    [state] = both.results("screw").values()
    assert state["seconds"] == [0, 5, 20, 12, 1]
    [letter] = both.dead_letters
    assert (letter.reason, letter.hole) == (Reason.FOLD_FAILED, True)
    monkeypatch.setattr(Listing, "fold", lambda _self, state, element: [*state, element["at"] // SECOND])
    both.process([both.redriven(letter, 6), both.redriven(letter, 7)])
    [state] = both.results("screw").values()
    assert state["seconds"] == [0, 5, 20, 12, 1, 13]


def test_a_discarded_letter_leaves_no_hole_and_no_session() -> None:
    both = Both(flow(session("10s"), Listing()))
    both.process([at(0, 13)])
    letters = [both.redriven(letter, letter.record.offset) for letter in both.dead_letters]
    assert fill_holes(both.memory.run, letters, apply=True)
    [state] = both.memory.states("screw").values()
    assert (state.histories.holes, state.fold) == ({}, [])
    assert both.memory.results("screw") == {}


def test_the_sessions_of_a_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aggregations.per_message.sessions", "aggregations.columns.sessions"):
        monkeypatch.setattr(f"{module}.MOST_SESSIONS", 2)
    both = Both(flow(session("10s", lateness="1h")))
    both.process([at(0, 0), at(1, 20), at(2, 40), at(3, 5)])
    assert found(both) == {(0, 5): 2, (20, 20): 1}
    assert both.reasons() == [(2, Reason.TOO_MANY_SESSIONS)]
    both.process([at(4, 12)])
    both.process([both.redriven(both.dead_letters[0], 5)])
    assert found(both) == {(0, 20): 4, (40, 40): 1}
    assert "use a longer gap" in sessions.TOO_MANY


def test_gap_and_lateness_are_part_of_the_definition_and_the_policy_is_not() -> None:
    def made(window: SessionWindow | Window) -> str:
        return flow(cast("SessionWindow", window)).stages[0].definition

    base = made(session("5m"))
    assert base == made(session("300s", late="dead_letter"))
    assert len({base, made(session("6m")), made(session("5m", lateness="1s")), made(tumbling("5m"))}) == 4


def test_the_description_names_the_gap_and_what_is_done_message_by_message() -> None:
    described = flow(session("10s", lateness="1m"), Fields(n=count())).describe()
    assert (
        "screw by screw, session 10s, 1m late: Fields(n=count()) vectorised, merging sessions per message" in described
    )
    assert ">vectorised</text>" in flow(session("10s")).describe_svg()


def test_columns_are_emitted_of_the_session_that_an_element_joins() -> None:
    emit = Emit(n="new.n", was="old.n")
    made = flow(session("10s", lateness="1h"), emit=emit).aggregate(
        "all", pl.lit("all"), Fields(n=count(), grown=total(pl.col("n") - pl.col("was")), seen=collect("was", 9))
    )
    both = Both(made)
    both.process([at(0, 0), at(1, 20), at(2, 21)])
    both.process([at(3, 10)])
    assert both.results("all")[b"all"] == {"n": 4, "grown": 4, "seen": {"values": [0, 0, 1, 3], "dropped": 0}}


def test_a_function_gets_the_state_of_the_session_after_the_element() -> None:
    made = flow(session("10s"), Listing(), emit=lambda _element, state: [list(state)]).publish("out")
    both = Both(made)
    both.process([at(0, 0), at(1, 20), at(2, 10)])
    assert [json.loads(decode(one.value).payload) for one in both.memory.outputs] == [[0], [20], [0, 20, 10]]


def test_a_snapshot_contains_all_sessions_of_its_key_so_that_a_merge_replaces_them_at_once() -> None:
    made = flow(session("10s", lateness="1h"), Fields(n=count())).publish_states("states")
    both, latest = Both(made), Latest()
    both.process([at(0, 0), at(1, 20)])
    both.process([at(2, 10)])
    seen = []
    for out in both.memory.outputs:
        assert latest.apply(out.key, read_snapshot(out.value))
        seen.append(latest.state(b"s"))
    assert seen == [
        [
            {"window_start": "1970-01-01T00:00:00Z", "window_end": "1970-01-01T00:00:00Z", "state": {"n": 1}},
            {"window_start": "1970-01-01T00:00:20Z", "window_end": "1970-01-01T00:00:20Z", "state": {"n": 1}},
        ],
        [{"window_start": "1970-01-01T00:00:00Z", "window_end": "1970-01-01T00:00:20Z", "state": {"n": 3}}],
    ]


def test_states_of_another_gap_are_continued_if_that_is_accepted_and_states_without_sessions_never() -> None:
    url = fresh_store()
    before = flow(session("5s", lateness="1h"), Fields(n=count()))
    runner = MemoryRunner(before, bind(before, {}, url))
    runner.process([at(0, 0), at(1, 8), at(2, 16)])
    runner.close()
    longer = flow(session("10s", lateness="1h"), Fields(n=count(), more=count()).added(more=0))
    runner = MemoryRunner(longer, bind(longer, {}, url), accept=["definition"])
    runner.process([at(3, 8)])
    assert found(runner) == {(0, 16): 4}
    runner.close()
    for other in (Fields(n=count()), Listing()):
        plain = Flow("fastening").source(SCREWS).aggregate("screw", "screw", other)
        url = fresh_store()
        runner = MemoryRunner(plain, bind(plain, {}, url))
        runner.process([at(0, 0)])
        runner.close()
        changed = flow(session("5s"), other)
        with pytest.raises(DefinitionChangedError, match="not made by a stage with sessions"):
            MemoryRunner(changed, bind(changed, {}, url), accept=["definition"])


def test_the_key_of_a_session_is_divided_whatever_the_stages_key_contains() -> None:
    window = session("5m")
    for key in (b"", b"a@b", b"s@1970-01-01T00:00:00Z/1970-01-01T00:00:00Z", bytes(range(256))):
        made = window.key_of(key, 1, 2_000_000)
        assert made.end - made.start == timedelta(microseconds=1_999_999)
        assert window.split(sessions.row_key(made)) == made
    with pytest.raises(ValueError, match="start and end of a session"):
        window.split(b"s")
    with pytest.raises(FlowError, match="no time zone"):
        window.key_at(b"s", datetime(2026, 11, 24, 6))
    assert window.key_at(b"s", datetime(2026, 11, 24, 6, 0, 1, tzinfo=UTC)) == b"s"
    assert str(session("5m", lateness="90s")) == "session 5m, 90s late"


@pytest.mark.parametrize(
    "end", [b"2026-13-24T06:01:00Z", b"aaaaaaaaaaaaaaaaaaaa", b"\xff" * 20, b"2026-11-24T06:01:00.0", b"-" * 20 + b"Z"]
)
def test_a_key_that_only_looks_like_that_of_a_session_is_none(end: bytes) -> None:
    window = session("5m")
    assert window.find(b"s@2026-11-24T06:01:00Z/" + end) is None
    with pytest.raises(ValueError, match="does not end"):
        window.split(b"s@" + end + b"/2026-11-24T06:01:00Z")


def test_an_element_joins_the_sessions_within_the_gap_of_it() -> None:
    held = [[0, 10], [30, 40], [60, 60]]
    assert [near(held, time, 9) for time in (-10, -9, 19, 20, 21, 25, 50, 51, 70)] == [
        slice(0, 0),
        slice(0, 1),
        slice(0, 1),
        slice(1, 1),
        slice(1, 2),
        slice(1, 2),
        slice(2, 2),
        slice(2, 3),
        slice(3, 3),
    ]
    assert near(held, 20, 10) == slice(0, 2)


@pytest.mark.parametrize("state", [None, {}, [[1, 2]], [[1, "2", {}]], [1]])
def test_what_is_no_list_of_sessions_is_recognised(state: Any) -> None:
    assert not are_sessions(state)
    assert are_sessions([[1, 2, {}]])


def test_events_of_two_sources_are_in_one_session() -> None:
    joints = Topic("joints", Json({"screw": str}), envelope=False)
    both = Both(Flow("f").source(SCREWS, joints).aggregate("screw", "screw", Fields(n=count()), window=session("10s")))

    def joint(offset: int, second: int) -> Any:
        one = at(offset, second)
        return replace(one, topic="joints", value=b'{"screw": "s"}')

    both.process([at(0, 0), at(1, 20)])
    both.process([joint(0, 10), joint(1, 40)])
    assert found(both) == {(0, 20): 3, (40, 40): 1}
