"""Deduplicating partitioned data by a sequence number: each example, assumption and remark of the article."""

import json
import random
from datetime import timedelta

import pytest

from aggregations import Fields, Flow, Json, MemoryRunner, Record, Topic, bind, count
from envelope import Envelope, Reason, Verdict, decode, encode
from envelope.filters import (
    Arrival,
    Decreasing,
    EventIdFilter,
    FilterStates,
    ProducerFilter,
    Ruling,
    Scope,
    SequenceFilter,
    Unusable,
    from_envelope,
    from_header,
    from_value,
)
from envelope.filters.sequence import KEYED, LastSeen, sequence_number
from tests.support.pure import fresh_store

# The article's "The Problem": incident, id, data. After the failure the producer sends ids 4 to 7 again.
BEFORE_THE_FAILURE = [
    ("A", 1, "ab583cc8f8"),
    ("B", 2, "83ccc8f8f8"),
    ("C", 3, "115tab5b58"),
    ("C", 4, "83caac564b"),
    ("B", 5, "a583ccc8f8"),
    ("A", 6, "8f8bc8f890"),
    ("A", 7, "07583ab583"),
]
AFTER_THE_FAILURE = [
    ("C", 4, "83caac564b"),
    ("B", 5, "a583ccc8f8"),
    ("A", 6, "8f8bc8f890"),
    ("A", 7, "07583ab583"),
    ("A", 8, "930fce58f3"),
    ("B", 9, "7583ab93ab"),
    ("C", 10, "7583aab583"),
    ("B", 11, "b583075830"),
]
INCIDENTS = [*BEFORE_THE_FAILURE, *AFTER_THE_FAILURE]


def incidents(partition_of) -> list[Record]:
    """The records of the article in partitions chosen by the incident, which is the key."""
    offsets: dict[int, int] = {}
    records = []
    for incident, number, data in INCIDENTS:
        partition = partition_of(incident)
        offset = offsets[partition] = offsets.get(partition, -1) + 1
        value = json.dumps({"id": number, "data": data}).encode()
        records.append(Record("incidents", partition, offset, incident.encode(), value))
    return records


def numbers(values, partition=0, key=b"peter") -> list[Arrival]:
    """The article's simplified setup: a name as key, and a value that consists of the sequence number."""
    return [Arrival("input", partition, offset, key, str(value)) for offset, value in enumerate(values)]


def plain(**settings) -> SequenceFilter:
    return SequenceFilter(lambda arrival: arrival.value, **settings)


def forwarded(rule: SequenceFilter, arrivals) -> list[str]:
    states = FilterStates(rule)
    return [one.value for one in arrivals if states.passes(one)]


@pytest.mark.parametrize(
    "partition_of",
    [lambda incident: 0, "ABC".index, lambda incident: int(incident == "B")],
    ids=["one partition", "a partition for each incident", "two incidents share a partition"],
)
def test_the_incidents_of_the_article_come_out_once_each_and_in_order(partition_of) -> None:
    states = FilterStates(SequenceFilter(from_value("id")))
    out = [json.loads(one.value)["id"] for one in incidents(partition_of) if states.passes(one)]
    assert out == list(range(1, 12))


def test_the_incident_example_counts_a4_b4_c3_and_not_a6_b5_c4() -> None:
    records = incidents("ABC".index)
    states = FilterStates(SequenceFilter(from_value("id")))
    counts = {"A": 0, "B": 0, "C": 0}
    every = dict(counts)
    for one in records:
        every[one.key.decode()] += 1
        counts[one.key.decode()] += states.passes(one)
    assert every == {"A": 6, "B": 5, "C": 4}
    assert counts == {"A": 4, "B": 4, "C": 3}


@pytest.mark.parametrize(
    "rule",
    [
        EventIdFilter(from_envelope("event_id"), timedelta(days=1)),
        ProducerFilter(),
        SequenceFilter(from_envelope("sequence")),
    ],
    ids=["event id", "producer and sequence", "sequence"],
)
@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_the_incident_example_is_counted_right_by_what_its_envelopes_say(rule, partitions: int) -> None:
    states, counts = FilterStates(rule), {"A": 0, "B": 0, "C": 0}
    for offset, (incident, number, data) in enumerate(INCIDENTS):
        envelope = Envelope(data.encode(), event_id=f"i-{number}", producer="incidents", sequence=number)
        place = "ABC".index(incident) % partitions
        counts[incident] += states.passes(Arrival("incidents", place, offset, incident.encode(), encode(envelope)))
    assert counts == {"A": 4, "B": 4, "C": 3}


def test_an_extractor_of_a_field_that_envelopes_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no field 'number'"):
        from_envelope("number")
    empty = FilterStates(EventIdFilter(from_envelope("event_id"), timedelta(days=1)))
    assert empty.judge(Arrival("t", 0, 0, b"k", encode(Envelope(b"x")))).verdict is Verdict.UNIDENTIFIED
    assert empty.judge(Arrival("t", 0, 0, b"k", b"foreign")).reason is Reason.NOT_AN_ENVELOPE


def test_the_copies_after_the_failure_are_dropped_and_their_verdict_says_what_was_proven() -> None:
    states = FilterStates(SequenceFilter(from_value("id")))
    rulings = [states.judge(one) for one in incidents(lambda incident: 0)]
    assert [one.verdict for one in rulings[:7]] == [Verdict.ACCEPTED] * 7
    assert [one.verdict for one in rulings[7:11]] == [Verdict.BELOW_FLOOR] * 3 + [Verdict.DUPLICATE]
    assert [one.verdict for one in rulings[11:]] == [Verdict.ACCEPTED] * 4


def test_the_simplified_example_separates_the_sequence_of_a_person_without_duplicates() -> None:
    assert forwarded(plain(), numbers([1, 2, 3, 2, 3, 4, 4, 5])) == ["1", "2", "3", "4", "5"]


def test_nothing_seen_accepts_any_first_number() -> None:
    for first in (-5, 0, 1, 10**18):
        assert forwarded(plain(), numbers([first])) == [str(first)]


def test_a_record_is_dropped_if_and_only_if_its_number_is_not_greater_than_the_last_one_seen() -> None:
    random.seed(0)
    for _ in range(200):
        values = [random.randrange(20) for _ in range(30)]
        seen, expected = None, []
        for value in values:
            if seen is None or seen < value:
                seen = value
                expected.append(str(value))
        assert forwarded(plain(), numbers(values)) == expected


def test_partitions_have_numbers_of_their_own() -> None:
    arrivals = [*numbers([1, 2, 3], 0), *numbers([1, 2, 3], 1), *numbers([3, 4], 0)]
    assert forwarded(plain(), arrivals) == ["1", "2", "3", "1", "2", "3", "4"]


def test_globally_unique_numbers_without_gaps_do_no_harm_and_neither_do_the_gaps_within_a_partition() -> None:
    random.seed(1)
    places = [random.randrange(3) for _ in range(50)]
    arrivals = [Arrival("input", place, number, b"k", str(number)) for number, place in enumerate(places)]
    assert forwarded(plain(), arrivals) == [str(number) for number in range(50)]


def test_the_state_is_one_number_for_each_partition_whatever_the_number_of_keys() -> None:
    states = FilterStates(plain())
    for number in range(1000):
        states.judge(Arrival("input", number % 4, number, b"key-%d" % number, number))
    dumped = states.dump()
    assert dumped == {b"input:%d" % part: {"seen": 996 + part, "keyed": KEYED} for part in range(4)}
    assert max(len(json.dumps(one)) for one in dumped.values()) < 40


def test_a_state_is_readable_json_and_continues_after_a_restart() -> None:
    before = FilterStates(plain())
    assert [before.passes(one) for one in numbers([1, 2, 3])] == [True] * 3
    stored = {scope: json.dumps(value) for scope, value in before.dump().items()}
    assert stored == {b"input:0": '{"seen": 3}'}
    after = FilterStates(plain(), {scope: json.loads(text) for scope, text in stored.items()})
    assert [after.passes(one) for one in numbers([2, 3, 4])] == [False, False, True]


def test_the_number_may_be_in_a_header_and_the_last_header_of_a_name_counts() -> None:
    rule = SequenceFilter(from_header("seq"))
    arrivals = [
        Arrival("input", 0, offset, b"k", b"v", headers=(("seq", b"1"), ("other", b"9"), ("seq", text)))
        for offset, text in enumerate([b"5", b"5", b"7"])
    ]
    states = FilterStates(rule)
    assert [states.passes(one) for one in arrivals] == [True, False, True]


def test_the_number_may_be_a_column_or_a_member_of_json_bytes() -> None:
    for value in ({"id": 3}, b'{"id": 3}', b'{"id": "3"}'):
        states = FilterStates(SequenceFilter(from_value("id")))
        one = Arrival("input", 0, 0, b"k", value)
        assert (states.passes(one), states.passes(one)) == (True, False)


def test_with_the_scope_of_a_key_each_key_has_a_number_and_records_without_a_key_are_passed_on() -> None:
    rule = plain(scope_by=Scope.KEY)
    arrivals = [*numbers([1, 2], key=b"peter"), *numbers([1, 2, 2], key=b"beate"), *numbers([1, 1], key=None)]
    assert forwarded(rule, arrivals) == ["1", "2", "1", "2", "1", "1"]


@pytest.mark.parametrize("text", ["0", "+7", "-7", "9223372036854775807", "-9223372036854775808", "007"])
def test_numbers_are_read_as_java_reads_a_long(text: str) -> None:
    assert sequence_number(text) == sequence_number(text.encode()) == int(text)


@pytest.mark.parametrize(
    "found", ["", " 7", "7 ", "1_000", "7.0", "٣", "9223372036854775808", "x", b"\xff", 7.0, True, [7], 2**63]
)
def test_what_is_not_a_number_is_rejected_with_a_reason_and_changes_nothing(found) -> None:
    state = LastSeen(5)
    ruling, after = plain().judge(state, Arrival("input", 0, 0, b"k", found))
    assert (ruling.verdict, ruling.forward, ruling.reason) == (Verdict.REJECTED, False, Reason.BAD_SEQUENCE)
    assert after == state


def test_a_missing_number_is_rejected_or_passed_on_as_the_policy_says() -> None:
    missing = Arrival("input", 0, 0, b"k", b"{}")
    [strict, lenient] = [FilterStates(SequenceFilter(from_value("id"), unusable=policy)) for policy in Unusable]
    assert strict.judge(missing).reason is Reason.MISSING_FIELD
    assert lenient.judge(missing) == Ruling(Verdict.UNIDENTIFIED, forward=True)
    assert lenient.passes(missing)


def test_an_extractor_that_raises_is_the_record_s_failure_and_not_the_filter_s() -> None:
    ruling = FilterStates(SequenceFilter(from_value("id"))).judge(Arrival("input", 0, 0, b"k", b"secret, not JSON"))
    assert ruling.reason is Reason.TRANSFORM_FAILED
    assert "secret" not in ruling.detail


def test_decreasing_numbers_are_dropped_or_rejected_as_the_policy_says_but_equal_ones_are_always_duplicates() -> None:
    rule = plain(decreasing=Decreasing.REJECT)
    states = FilterStates(rule)
    rulings = [states.judge(one) for one in numbers([5, 5, 4, 6])]
    assert [one.verdict for one in rulings] == [
        Verdict.ACCEPTED,
        Verdict.DUPLICATE,
        Verdict.REJECTED,
        Verdict.ACCEPTED,
    ]
    assert [one.forward for one in rulings] == [True, False, False, True]
    assert rulings[2].reason is Reason.OUT_OF_SEQUENCE
    assert rulings[2].detail == "sequence number 4 follows 5"


@pytest.mark.parametrize("key", ["{}", "peter-{}", "{}/a"], ids=["the number", "an id and the number", "at the start"])
def test_a_key_that_is_or_contains_the_sequence_number_gives_one_warning(key: str) -> None:
    states = FilterStates(plain())
    arrivals = [Arrival("input", 0, n, key.format(n).encode(), n) for n in range(1, 50)]
    warned = [one.value for one in arrivals if states.judge(one).warning]
    assert warned == [KEYED]


def test_a_key_that_equals_a_number_by_chance_gives_no_warning() -> None:
    states = FilterStates(plain())
    keys = [b"%d" % n if n % KEYED else b"peter" for n in range(1, 50)]
    assert not any(states.judge(Arrival("input", 0, n, key, n)).warning for n, key in enumerate(keys, start=1))


def test_with_the_sequence_number_as_key_the_order_is_lost_and_so_are_records() -> None:
    """The article's "Pointless / Contradictorily Usage": order within an incident needs one partition for it."""
    logs: dict[int, list[int]] = {0: [], 1: []}
    for number in range(1, 11):  # one incident, spread by the number
        logs[number % 2].append(number)
    read = [*logs[1], *logs[0]]
    states = FilterStates(plain())
    out = [n for n in read if states.passes(Arrival("input", n % 2, n, b"%d" % n, n))]
    assert sorted(out) == list(range(1, 11))  # every duplicate could be found,
    assert out != sorted(out)  # and the order is that of the partitions


def counting(rule: SequenceFilter) -> Flow:
    """The article's pipeline as one flow, with a count for each incident behind the filter."""
    source = Topic("incidents", payload=Json({"id": int, "data": str}), envelope=False)
    return Flow("incidents").source(source).deduplicate(rule).aggregate("incident", "_key", Fields(messages=count()))


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_the_example_as_a_flow_input_filter_count_gives_4_4_and_3_messages(partitions: int, scope: Scope) -> None:
    flow = counting(SequenceFilter(from_value("id"), scope_by=scope))
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    records = incidents(lambda incident: "ABC".index(incident) % partitions)
    for start in range(0, len(records), 4):
        runner.process(records[start : start + 4])
    counts = {key: state["messages"] for key, state in runner.results("incident").items()}
    assert counts == {b"A": 4, b"B": 4, b"C": 3}
    assert len(runner.results("sequence")) == (partitions if scope is Scope.PARTITION else 3)


def test_the_pipeline_input_filter_output_as_a_flow_without_an_aggregation() -> None:
    source = Topic("incidents", payload=Json({"id": int, "data": str}), envelope=False)
    flow = Flow("pipeline").source(source).deduplicate(SequenceFilter(from_value("id"))).publish("output")
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    runner.process(incidents(lambda _: 0))
    assert [json.loads(decode(one.value).payload)["id"] for one in runner.outputs] == list(range(1, 12))
