"""KIP-655, the initial proposal: `distinct` on tumbling and session windows, with its worked examples."""

import json
from datetime import timedelta

import pytest

from envelope import Verdict
from envelope.filters import Arrival, FilterStates, Scope, SessionWindows, TimeWindows, Windowed, distinct

S = 1000
BURSTS = [4, 5, 6, 23, 22, 24, 34, 33, 32]
LATE_ARRIVALS = [7, 22, 35]
RECORDS = [*BURSTS, *LATE_ARRIVALS]


def seconds(number: int) -> timedelta:
    return timedelta(seconds=number)


def at(time: int, key: bytes | None = b"key", offset: int = 0) -> Arrival:
    return Arrival("topic", 0, offset, key, time, time * S)


def passed(rule, times=RECORDS, *, restart: bool = False) -> list[tuple[Windowed, int]]:
    states, out = FilterStates(rule), []
    for time in times:
        if restart:
            stored = json.loads(json.dumps([*states.dump().values()]))
            states = FilterStates(rule, dict(zip(states.dump(), stored, strict=True)))
        ruling = states.judge(at(time))
        if ruling.forward:
            out.append((ruling.window, time))
    return out


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted after each record"])
def test_epoch_aligned_deduplication_using_tumbling_windows(restart: bool) -> None:
    assert passed(distinct(TimeWindows(seconds(10))), restart=restart) == [
        (Windowed(b"key", 0, 10000), 4),
        (Windowed(b"key", 20000, 30000), 23),
        (Windowed(b"key", 30000, 40000), 34),
    ]


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted after each record"])
def test_session_windows_with_a_gap_of_10_stick_all_records_above_7_together(restart: bool) -> None:
    assert passed(distinct(SessionWindows(seconds(10))), restart=restart) == [
        (Windowed(b"key", 4000, 4000), 4),
        (Windowed(b"key", 23000, 23000), 23),
    ]


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted after each record"])
def test_session_windows_with_a_gap_of_9_return_three_records(restart: bool) -> None:
    assert passed(distinct(SessionWindows(seconds(9))), restart=restart) == [
        (Windowed(b"key", 4000, 4000), 4),
        (Windowed(b"key", 23000, 23000), 23),
        (Windowed(b"key", 34000, 34000), 34),
    ]


def test_a_first_record_as_late_as_the_latest_is_not_late() -> None:
    for windows in (TimeWindows(seconds(10)), SessionWindows(seconds(10))):
        states = FilterStates(distinct(windows))
        verdicts = [states.judge(at(time, key)).verdict for time, key in ((5, b"a"), (5, b"b"), (4, b"c"))]
        assert verdicts == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.LATE]


def test_hopping_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="do not overlap"):
        distinct(TimeWindows(seconds(10), advance=seconds(5)))


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="do not overlap"):
        distinct("SlidingWindows")


def test_windows_that_advance_by_their_size_are_tumbling() -> None:
    assert passed(distinct(TimeWindows(seconds(10), advance=seconds(10)))) == passed(distinct(TimeWindows(seconds(10))))


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        distinct(TimeWindows(seconds(0)))


def test_records_are_duplicates_if_and_only_if_the_bytes_of_their_keys_are_equal() -> None:
    states = FilterStates(distinct(TimeWindows(seconds(10))))
    keys = [b"a", b"A", b"a ", b"", b"\xff", b"a", b"", b"\xff"]
    assert [states.passes(at(1, key)) for key in keys] == [True] * 5 + [False] * 3


def test_a_record_without_a_key_is_passed_on_without_a_window() -> None:
    for windows in (TimeWindows(seconds(10)), SessionWindows(seconds(10))):
        states = FilterStates(distinct(windows))
        rulings = [states.judge(at(1, None)) for _ in range(2)]
        assert [(one.verdict, one.forward, one.window) for one in rulings] == [(Verdict.UNIDENTIFIED, True, None)] * 2


@pytest.mark.parametrize(
    ("stream", "time", "expected"),
    [(14, 1, True), (15, 1, False), (15, 10, True)],
    ids=["within grace", "the window is closed", "the next window is open"],
)
def test_a_tumbling_window_is_remembered_for_its_grace_and_later_records_of_it_are_dropped(
    stream: int, time: int, expected: bool
) -> None:
    states = FilterStates(distinct(TimeWindows(seconds(10), grace=seconds(5))))
    states.judge(at(stream, b"other"))
    ruling = states.judge(at(time))
    assert ruling.forward is expected
    assert ruling.verdict is (Verdict.LATE if expected else Verdict.BEYOND_HORIZON)


@pytest.mark.parametrize(("stream", "expected"), [(16, True), (17, False)])
def test_a_session_is_remembered_for_gap_and_grace_and_later_records_are_dropped(stream: int, expected: bool) -> None:
    states = FilterStates(distinct(SessionWindows(seconds(10), grace=seconds(5))))
    states.judge(at(stream, b"other"))
    ruling = states.judge(at(1))
    assert ruling.forward is expected
    assert ruling.verdict is (Verdict.LATE if expected else Verdict.BEYOND_HORIZON)


def test_a_record_that_connects_two_sessions_is_dropped_and_they_continue_as_one() -> None:
    states = FilterStates(distinct(SessionWindows(seconds(5))))
    assert [states.passes(at(time)) for time in (0, 9, 4)] == [True, True, False]
    assert states.dump()[b"topic:0"]["sessions"] == {"key": [[0, 9000]]}


def test_windows_whose_grace_is_over_are_forgotten() -> None:
    for windows in (TimeWindows(seconds(10), seconds(20)), SessionWindows(seconds(1), seconds(20))):
        states = FilterStates(distinct(windows))
        for time in range(0, 3000, 3):
            states.judge(at(time, b"key-%d" % (time % 7)))
            state = states.state(b"topic:0")
            kept = len(state.opened) if hasattr(state, "opened") else len(state.sessions.by_key)
            assert kept <= 25


def test_expiry_of_a_session_that_was_extended_is_postponed() -> None:
    states = FilterStates(distinct(SessionWindows(seconds(5), grace=seconds(0))))
    for time in (0, 4, 8, 12, 16, 20):
        states.judge(at(time))
    assert states.dump()[b"topic:0"]["sessions"] == {"key": [[0, 20000]]}
    states.judge(at(26, b"other"))
    assert states.dump()[b"topic:0"]["sessions"] == {"other": [[26000, 26000]]}
    assert len(states.state(b"topic:0").sessions._expiry) == 1


def test_with_the_scope_of_a_key_only_the_key_s_own_records_close_its_windows() -> None:
    states = FilterStates(distinct(TimeWindows(seconds(10), seconds(0)), scope_by=Scope.KEY))
    states.judge(at(100, b"other"))
    assert states.judge(at(1)).verdict is Verdict.ACCEPTED
