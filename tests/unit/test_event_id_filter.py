"""Duplicates by an id in the message, within a horizon and in bounded memory."""

import json
from datetime import timedelta

import pytest

from envelope import Reason, Verdict
from envelope.filters import Arrival, Beyond, EventIdFilter, FilterStates, Scope, from_header
from envelope.filters.event_ids import IDS

MINUTE = timedelta(minutes=1)


def at(seconds: float, identity, *, partition: int = 0, key: bytes | None = b"k") -> Arrival:
    return Arrival("t", partition, 0, key, identity, round(seconds * 1000))


def by_id(**settings) -> FilterStates:
    return FilterStates(EventIdFilter(lambda one: one.value, MINUTE, **settings))


def verdicts(states: FilterStates, *events) -> list[str]:
    return [states.judge(at(*event)).verdict.value for event in events]


def test_a_copy_has_the_id_of_its_event_and_is_dropped_whenever_it_comes_within_the_horizon() -> None:
    assert verdicts(by_id(), (0, "a"), (0, "a"), (30, "b"), (0, "a"), (60, "c"), (0, "a")) == [
        "accepted",
        "duplicate",
        "accepted",
        "duplicate",
        "accepted",
        "duplicate",
    ]


def test_the_copy_s_time_may_differ_as_long_as_the_id_is_remembered() -> None:
    assert verdicts(by_id(), (0, "a"), (50, "a"), (59, "b"), (59, "a")) == [
        "accepted",
        "duplicate",
        "accepted",
        "duplicate",
    ]


def test_an_id_is_remembered_until_stream_time_is_more_than_the_horizon_ahead() -> None:
    states = by_id()
    verdicts(states, (0, "a"), (60, "b"))
    assert len(states.state(b"t:0").ids) == 2
    verdicts(states, (60.001, "c"))
    assert [*states.state(b"t:0").ids] == ["b", "c"]
    assert states.state(b"t:0").floor_ms == 0


@pytest.mark.parametrize(
    ("beyond", "verdict", "forward"),
    [
        (Beyond.FORWARD, Verdict.BEYOND_HORIZON, True),
        (Beyond.DROP, Verdict.BEYOND_HORIZON, False),
        (Beyond.REJECT, Verdict.REJECTED, False),
    ],
)
def test_beyond_the_horizon_the_policy_decides(beyond: Beyond, verdict: Verdict, forward: bool) -> None:
    states = by_id(beyond=beyond)
    verdicts(states, (0, "a"), (61, "b"))
    ruling = states.judge(at(0, "a"))
    assert (ruling.verdict, ruling.forward) == (verdict, forward)
    assert ruling.reason is (Reason.UNPROVEN if beyond is Beyond.REJECT else None)


def test_a_late_event_above_everything_forgotten_is_proven_to_be_new() -> None:
    states = by_id()
    assert verdicts(states, (100, "a"), (5, "b")) == ["accepted", "late"]  # nothing was forgotten before b
    assert verdicts(states, (5, "b"), (6, "c"), (4, "d")) == ["beyond_horizon", "late", "beyond_horizon"]


def test_with_more_ids_than_the_limit_the_oldest_are_forgotten_earlier_and_the_rest_stays_exact() -> None:
    states = by_id(limit=2)
    assert verdicts(states, (1, "a"), (2, "b"), (3, "c")) == ["accepted"] * 3
    assert verdicts(states, (1, "a"), (2, "b"), (3, "c"), (2.5, "d")) == [
        "beyond_horizon",
        "duplicate",
        "duplicate",
        "late",
    ]
    assert len(states.state(b"t:0").ids) == 2


def test_a_limit_of_one_remembers_one_id() -> None:
    assert verdicts(by_id(limit=1), (1, "a"), (1, "a"), (2, "b"), (2, "b"), (1, "a")) == [
        "accepted",
        "duplicate",
        "accepted",
        "duplicate",
        "beyond_horizon",
    ]


def test_an_event_as_late_as_the_latest_is_not_late() -> None:
    assert verdicts(by_id(), (1, "a"), (1, "b")) == ["accepted"] * 2


def test_the_default_limit_bounds_a_state() -> None:
    assert EventIdFilter(lambda one: one.value, MINUTE).limit == IDS == 100_000


def test_messages_without_an_id_are_passed_on_and_advance_stream_time() -> None:
    states = by_id()
    verdicts(states, (0, "a"))
    assert verdicts(states, (90, None), (90, None)) == ["unidentified"] * 2
    assert states.state(b"t:0").stream_time_ms == 90_000


def test_copies_are_looked_for_in_the_partition_with_the_key_or_everywhere() -> None:
    first, second = at(0, "a", partition=0, key=b"k"), at(0, "a", partition=1, key=b"k")
    for states, passes in (
        (by_id(), True),
        (by_id(scope_by=Scope.KEY), False),
        (by_id(partitions=8), False),
    ):
        assert states.passes(first)
        assert states.passes(second) is passes
    everywhere = by_id(partitions=8)
    assert everywhere.judge(at(0, None)).verdict is Verdict.UNIDENTIFIED
    assert {everywhere.filter.scope(at(0, f"e{n}")) for n in range(100)} == {b"%d/8" % n for n in range(8)}


def test_the_id_may_be_a_header() -> None:
    states = FilterStates(EventIdFilter(from_header("ce_id"), MINUTE))
    record = Arrival("t", 0, 0, b"k", b"v", headers=(("ce_id", b"e-1"),))
    assert [states.passes(record) for _ in range(2)] == [True, False]


def test_an_unusable_id_is_rejected_also_when_it_decides_about_the_state() -> None:
    for states in (by_id(), by_id(partitions=4)):
        assert states.judge(at(0, 1.5)).reason is Reason.TRANSFORM_FAILED


def test_the_state_is_readable_json_of_less_than_50_bytes_for_an_id_of_20_characters() -> None:
    states = by_id()
    for n in range(1000):
        states.judge(at(1_700_000_000 + n / 1000, f"event-{n:014}"))
    text = json.dumps(states.dump()[b"t:0"], separators=(",", ":"))
    assert text.startswith(
        '{"stream_time_ms":1700000000999,"floor_ms":null,"ids":[[1700000000000,"event-00000000000000"],'
    )
    assert len(text) / 1000 < 50


@pytest.mark.parametrize("wrong", [{"horizon": timedelta(-1)}, {"limit": 0}])
def test_a_horizon_below_zero_or_a_limit_below_one_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"horizon|limit"):
        EventIdFilter(**{"id": str, "horizon": MINUTE, **wrong})
