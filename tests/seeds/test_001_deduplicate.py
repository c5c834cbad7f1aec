"""KIP-655, `deduplicateByKey`, `deduplicateByKeyValue` and `deduplicate`: every example and every rule."""

import copy
import json
from datetime import timedelta

import pytest

from envelope import Reason, Verdict
from envelope.filters import (
    Arrival,
    FilterStates,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    from_value,
)

S = 1000
TEN = timedelta(seconds=10)

FORWARDED, DROPPED = True, False

# Title in the document: interval in seconds; then key, time in seconds, and whether it is forwarded.
T = 100
EXAMPLES = {
    "Duplicate sequence": (10, [("a", T, FORWARDED), ("a", T + 8, DROPPED), ("a", T + 11, FORWARDED)]),
    "Duplicate sequence, out-of-order records": (
        10,
        [("a", T, FORWARDED), ("a", T - 8, DROPPED), ("a", T - 11, FORWARDED)],
    ),
    "Deduplication interval boundaries": (10, [("a", 5, FORWARDED), ("a", 15, DROPPED), ("a", 16, FORWARDED)]),
    "Deduplication interval boundaries, out-of-order records": (
        10,
        [("a", 15, FORWARDED), ("a", 5, DROPPED), ("a", 4, FORWARDED)],
    ),
    "Lower bound of deduplicationInterval = 0": (0, [("a", 5, FORWARDED), ("a", 5, DROPPED), ("a", 6, FORWARDED)]),
    "Late events, example 1": (
        10,
        [("k", 20, FORWARDED), ("k", 25, DROPPED), ("k", 11, DROPPED), ("k", 9, FORWARDED)],
    ),
    "Late events, example 2": (10, [("k1", 10, FORWARDED), ("k2", 20, FORWARDED), ("k1", 9, DROPPED)]),
    "Late events, example 3": (10, [("k1", 10, FORWARDED), ("k2", 21, FORWARDED), ("k1", 9, FORWARDED)]),
}


def at(offset: int | None, seconds: float, key: str | None = "a", value=None, partition: int = 0) -> Arrival:
    return Arrival("topic", partition, offset, None if key is None else key.encode(), value, round(seconds * S))


def by_key(seconds: int = 10) -> FilterStates:
    return FilterStates(deduplicate_by_key(timedelta(seconds=seconds)))


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted after each record"])
@pytest.mark.parametrize("title", EXAMPLES)
def test_the_examples_by_key(title: str, restart: bool) -> None:
    interval, events = EXAMPLES[title]
    states = by_key(interval)
    for offset, (key, time, expected) in enumerate(events):
        assert states.passes(at(offset, time, key)) is expected, (key, time)
        if restart:
            stored = {scope: json.dumps(value) for scope, value in states.dump().items()}
            states = FilterStates(states.filter, {scope: json.loads(text) for scope, text in stored.items()})


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_examples_by_key_and_value(title: str) -> None:
    interval, events = EXAMPLES[title]
    states = FilterStates(deduplicate_by_key_value(from_value("id"), timedelta(seconds=interval)))
    for offset, (identity, time, expected) in enumerate(events):
        assert states.passes(at(offset, time, "one key", {"id": identity})) is expected


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_examples_by_id_over_several_partitions(title: str) -> None:
    """One state: stream time is that of the records that were shuffled to it."""
    interval, events = EXAMPLES[title]
    states = FilterStates(deduplicate(from_value("id"), timedelta(seconds=interval), partitions=1))
    for offset, (identity, time, expected) in enumerate(events):
        assert states.passes(at(0, time, f"key {offset}", {"id": identity}, partition=offset)) is expected


def test_a_null_key_is_always_forwarded() -> None:
    states = by_key()
    assert [states.judge(at(n, 1, None)).verdict for n in range(3)] == [Verdict.UNIDENTIFIED] * 3
    assert all(states.passes(at(n, 1, None)) for n in range(3, 6))


def test_a_null_id_is_always_forwarded_by_deduplicate() -> None:
    states = FilterStates(deduplicate(from_value("id"), TEN))
    assert all(states.passes(at(n, 1, "k", {"id": None})) for n in range(3))


@pytest.mark.parametrize(("key", "identity"), [(None, "i"), ("k", None), (None, None)])
def test_by_key_value_one_of_both_that_is_null_is_enough_to_be_forwarded(key: str | None, identity: str | None) -> None:
    states = FilterStates(deduplicate_by_key_value(from_value("id"), TEN))
    assert all(states.passes(at(n, 1, key, {"id": identity})) for n in range(3))


def test_a_null_id_may_be_mapped_to_a_constant() -> None:
    states = FilterStates(deduplicate_by_key_value(lambda one: one.value["id"] or "none", TEN))
    assert [states.passes(at(n, 1, "k", {"id": None})) for n in range(2)] == [True, False]


def test_a_null_key_may_be_mapped_to_a_constant() -> None:
    states = FilterStates(deduplicate_by_key(TEN, key=lambda one: one.key or b"none"))
    assert [states.passes(at(n, 1, None)) for n in range(2)] == [True, False]


def test_by_key_value_duplicates_have_the_same_key_and_the_same_id() -> None:
    states = FilterStates(deduplicate_by_key_value(from_value("id"), TEN))
    pairs = [("k", 1), ("k", 2), ("l", 1), ("k", 1), ("l", 1), ("l", 2)]
    assert [states.passes(at(n, 1, key, {"id": identity})) for n, (key, identity) in enumerate(pairs)] == [
        *[True] * 3,
        *[False] * 2,
        True,
    ]


def test_by_key_partitions_are_deduplicated_apart_and_by_id_together() -> None:
    records = [at(0, 1, "k", {"id": 7}, partition) for partition in range(3)]
    [local, spanning] = [FilterStates(one) for one in (deduplicate_by_key(TEN), deduplicate(from_value("id"), TEN))]
    assert [local.passes(one) for one in records] == [True] * 3
    by_both = FilterStates(deduplicate_by_key_value(from_value("id"), TEN))
    assert [by_both.passes(one) for one in records] == [True] * 3
    assert not by_both.filter.repartitions
    assert [spanning.passes(one) for one in records] == [True, False, False]
    assert not local.filter.repartitions
    assert spanning.filter.repartitions


def test_a_changed_key_spans_partitions_as_a_repartition_topic_does() -> None:
    rule = deduplicate_by_key(TEN, key=from_value("customer"))
    states = FilterStates(rule)
    assert rule.repartitions
    records = [at(0, 1, f"order {n}", {"customer": "ada"}, n) for n in range(3)]
    assert [states.passes(one) for one in records] == [True, False, False]
    assert len({rule.scope(one) for one in records}) == 1
    assert rule.scope(at(0, 1, "k", {"customer": None})) is None


def test_ids_need_at_least_one_state() -> None:
    assert deduplicate(from_value("id"), TEN, partitions=1).repartitions
    assert deduplicate_by_key(TEN, partitions=0).partitions == 0  # nothing is spread
    for made in (
        lambda: deduplicate(from_value("id"), TEN, partitions=0),
        lambda: deduplicate_by_key(TEN, key=from_value("id"), partitions=0),
        lambda: deduplicate_by_key_value(from_value("id"), TEN, key=from_value("id"), partitions=0),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            made()


def test_ids_are_spread_over_the_number_of_states_that_was_asked_for() -> None:
    rule = deduplicate(from_value("id"), TEN, partitions=4)
    assert {rule.scope(at(0, 1, "k", {"id": n})) for n in range(100)} == {b"%d/4" % n for n in range(4)}


def test_a_dropped_record_does_not_update_the_store() -> None:
    states = by_key()
    states.judge(at(0, 5))
    before = states.dump()[b"topic:0"]["passed"]
    assert states.judge(at(1, 13)).verdict is Verdict.DUPLICATE
    assert states.dump()[b"topic:0"]["passed"] == before == [[5 * S, 0, {"bytes": "a"}]]


def test_the_store_holds_time_and_offset_of_the_record_that_was_forwarded() -> None:
    states = by_key()
    states.judge(at(17, 5))
    states.judge(at(18, 6, "b"))
    assert states.dump() == {
        b"topic:0": {"stream_time_ms": 6000, "passed": [[5000, 17, {"bytes": "a"}], [6000, 18, {"bytes": "b"}]]}
    }


def test_the_first_of_two_duplicates_in_the_order_of_offsets_is_forwarded_whatever_their_times() -> None:
    states = by_key()
    assert [states.passes(at(0, 9)), states.passes(at(1, 5))] == [True, False]


def test_the_same_offset_again_is_a_reprocess_and_is_forwarded() -> None:
    states = by_key()
    assert states.judge(at(0, 5)).verdict is Verdict.ACCEPTED
    again = states.judge(at(0, 5))  # the crash came after the store and before the commit of the offset
    assert (again.verdict, again.forward) == (Verdict.REPROCESSED, True)
    assert not states.passes(at(1, 5))


def test_the_same_offset_of_another_partition_is_a_duplicate() -> None:
    states = FilterStates(deduplicate(from_value("id"), TEN))
    assert states.passes(at(0, 5, "k", {"id": 1}, partition=0))
    assert not states.passes(at(0, 5, "k", {"id": 1}, partition=1))
    assert states.judge(at(0, 5, "k", {"id": 1}, partition=0)).verdict is Verdict.REPROCESSED


def test_punctuated_records_have_no_offset_and_are_always_deduplicated() -> None:
    states = by_key()
    assert [states.passes(at(None, 5)) for _ in range(3)] == [True, False, False]
    assert not states.passes(at(0, 6))


def test_stream_time_is_the_highest_time_of_any_record_and_survives_a_restart() -> None:
    states = by_key()
    for offset, (time, key) in enumerate([(5, "a"), (12, None), (3, "a"), (9, "b")]):
        states.judge(at(offset, time, key))
    states = FilterStates(states.filter, states.dump())
    assert states.state(b"topic:0").stream_time_ms == 12 * S


def test_a_dropped_record_advances_stream_time() -> None:
    states = by_key()
    states.judge(at(0, 20))
    states.judge(at(1, 25))
    assert states.state(b"topic:0").stream_time_ms == 25 * S


def test_a_late_record_is_forwarded_and_not_remembered_so_its_copies_are_forwarded_too() -> None:
    states = by_key()
    states.judge(at(0, 21, "k2"))
    late = [states.judge(at(n, 9, "k1")) for n in (1, 2)]
    assert [(one.verdict, one.forward) for one in late] == [(Verdict.BEYOND_HORIZON, True)] * 2
    assert len(states.state(b"topic:0").passed) == 1


def test_a_user_s_own_step_may_drop_late_records_by_stream_time() -> None:
    """ "In case it's needed, the user may add a processor to purge those late records"."""
    states = by_key()

    def passes(one: Arrival) -> bool:
        forward = states.passes(one)
        return forward and one.timestamp_ms >= states.state(b"topic:0").stream_time_ms - 10 * S

    assert [passes(at(n, *event)) for n, event in enumerate([(10, "k1"), (21, "k2"), (9, "k1"), (11, "k3")])] == [
        True,
        True,
        False,
        True,
    ]


def test_a_record_that_is_out_of_order_within_the_interval_is_forwarded_remembered_and_counted_as_late() -> None:
    states = by_key()
    states.judge(at(0, 20, "k1"))
    assert states.judge(at(1, 12, "k2")).verdict is Verdict.LATE
    assert states.judge(at(2, 12, "k2")).verdict is Verdict.DUPLICATE
    assert states.judge(at(3, 20, "k3")).verdict is Verdict.ACCEPTED  # as late as the latest is not late


def test_ids_are_purged_by_a_range_of_the_index_and_nothing_else_is_looked_at() -> None:
    states = by_key()
    for n in range(1000):
        states.judge(at(n, n / 100, f"k{n}"))  # all within the interval
    passed = states.state(b"topic:0").passed
    looked = []

    class Counting(list):
        def __getitem__(self, index):
            looked.append(index)
            return super().__getitem__(index)

    passed._by_time = Counting(passed._by_time)
    assert passed.purge(round(0.03 * S)) == 20
    assert len(passed) == 997
    assert len(looked) <= 3 * 30  # three removals from a heap of a thousand, not a thousand comparisons


def test_the_state_is_bounded_by_the_records_within_the_interval() -> None:
    states = by_key()
    for n in range(5000):
        states.judge(at(n, n, f"k{n}"))
        assert len(states.state(b"topic:0").passed) <= 11


def test_the_interval_limits_storage_to_what_the_page_states_for_an_id() -> None:
    states = by_key(3600)
    for n in range(1000):
        states.judge(at(10**6 + n, 1_700_000_000 + n, f"customer-{n:06}"))
    assert len(json.dumps(states.dump()[b"topic:0"], separators=(",", ":"))) / 1000 < 55


def test_a_null_id_in_an_extractor_differs_from_an_id_of_the_wrong_type() -> None:
    states = FilterStates(deduplicate(from_value("id"), TEN))
    for wrong in (1.5, True, [1], {"a": 1}, 2**63, "\ud800"):
        ruling = states.judge(at(0, 1, "k", {"id": wrong}))
        assert (ruling.verdict, ruling.reason) == (Verdict.REJECTED, Reason.TRANSFORM_FAILED)


def test_a_key_that_cannot_be_encoded_is_rejected() -> None:
    states = FilterStates(deduplicate_by_key(TEN, key=from_value("k")))
    assert states.judge(at(0, 0, "k", {"k": "\ud800"})).reason is Reason.TRANSFORM_FAILED
    assert states.passes(at(1, 0, "k", {"k": "a"}))


def test_ids_of_different_types_are_different() -> None:
    states = FilterStates(deduplicate(from_value("id"), TEN, partitions=1))
    ids = [1, "1", b"1", (1,), ("1",), (b"1", (2, "x")), b"%", b"\xff ", "%25"]
    assert all(states.passes(at(n, 1, "k", {"id": identity})) for n, identity in enumerate(ids))
    restored = FilterStates(states.filter, {b"0/1": json.loads(json.dumps(states.dump()[b"0/1"]))})
    assert not any(restored.passes(at(n + 100, 1, "k", {"id": identity})) for n, identity in enumerate(ids))


def test_the_time_may_be_the_event_s_own() -> None:
    states = FilterStates(deduplicate_by_key(TEN, time=from_value("at")))
    assert [states.passes(at(n, 0, "k", {"at": time})) for n, time in enumerate([5000, 15000, 15001])] == [
        True,
        False,
        True,
    ]
    assert states.judge(at(3, 0, "k", {"at": "soon"})).reason is Reason.TRANSFORM_FAILED


def test_the_name_is_that_of_the_states() -> None:
    assert deduplicate_by_key(TEN).name == "deduplicate"
    assert deduplicate_by_key(TEN, name="payments").name == "payments"


@pytest.mark.parametrize("interval", [timedelta(seconds=-1), timedelta(microseconds=1)])
def test_an_interval_below_zero_or_of_a_part_of_a_millisecond_is_refused(interval: timedelta) -> None:
    with pytest.raises(ValueError, match="whole milliseconds"):
        deduplicate_by_key(interval)


def test_a_number_is_no_interval() -> None:
    with pytest.raises(TypeError, match="timedelta"):
        deduplicate_by_key(10)


def test_judging_a_copy_of_the_state_leaves_the_state_as_it_was() -> None:
    rule = deduplicate_by_key(TEN)
    state = rule.zero()
    _, state = rule.judge(state, at(0, 1))
    before = rule.dump(state)
    rule.judge(copy.deepcopy(state), at(1, 50, "b"))
    assert rule.dump(state) == before
